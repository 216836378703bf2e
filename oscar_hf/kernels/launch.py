"""What every launch needs."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
UNPACK_BLOCK = 16_384
"""Tokens of the history that a chunk unpacks at once."""


def device_guard(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def dependent_launch(enabled: bool) -> dict[str, Any]:
    """Launch options for programmatic dependent launch; none where it is off, so that other backends never see it."""
    return {"launch_pdl": True} if enabled else {}


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) of anything else."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else (0, 0)


def dependent_launches(device: torch.device) -> bool:
    """Whether a launch may begin while the one before it still runs."""
    return capability(device) >= (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
