"""What every launch needs."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

LOG2E = math.log2(math.e)


def device_guard(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def dependent_launch(enabled: bool) -> dict[str, Any]:
    """Launch options for programmatic dependent launch; none where it is off, so that other backends never see it."""
    return {"launch_pdl": True} if enabled else {}
