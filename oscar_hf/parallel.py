"""Tensor parallelism as transformers does it: what this process holds of weights and heads."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ._compat import architecture, experts_apart, parallel_arguments, parallel_style, text_config

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Replicate, Shard
else:
    DTensor = Replicate = Shard = ()  # type: ignore[assignment, misc]


def tensor_parallel(model: str | PreTrainedConfig, size: int | None = None) -> dict[str, Any]:
    """Arguments with which `from_pretrained` splits a model's heads over the processes that torchrun started.

    Args:
        model: its configuration, directory or Hub id; only the configuration is read.
        size: processes (default: WORLD_SIZE, which torchrun sets).

    Returns:
        dict: `distributed_config`, or `tp_plan` in older transformers; empty for one process.

    Raises:
        ValueError: the model has no plan, or heads or experts that cannot be split evenly; nothing has been loaded.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(name, **tensor_parallel(name))
    """
    from .shape import experts, read_config

    config = text_config(read_config(model))
    size = int(os.environ.get("WORLD_SIZE", "1")) if size is None else size
    plan = getattr(config, "base_model_tp_plan", None)
    if size == 1:
        return {}
    if not plan:
        raise ValueError(f"{config.model_type} has no tensor-parallel plan in transformers; use device_map instead.")
    facts = architecture(config)
    counts = {name: facts[name] for name in ("num_attention_heads", "num_key_value_heads")}
    if experts_apart(config):
        counts["experts"] = experts(config)[0]
    odd = [f"{name}={count}" for name, count in counts.items() if count % size]
    if odd:
        most = max(n for n in range(1, size) if not any(count % n for count in counts.values()))
        raise ValueError(
            f"{config.model_type} with {' and '.join(odd)} cannot be split over {size} processes, each with "
            f"whole heads and experts. Start {most}{' (no split)' if most == 1 else ''}, or use device_map."
        )
    return parallel_arguments(config, size)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a parameter: the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(tensor: Tensor, dim: int) -> range:
    """Which indices of a parameter's dimension this process holds.

    Raises:
        ValueError: it is cut in a way that is not known here.
    """
    length = tensor.shape[dim]
    if not isinstance(tensor, DTensor):
        return range(length)
    span = range(length)
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            if placement.dim % tensor.dim() == dim % tensor.dim():
                size, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
                part = -(-len(span) // size)
                span = span[rank * part : (rank + 1) * part]
        elif type(placement) is not Replicate:
            raise ValueError(f"A parameter placed as {placement} cannot be rotated; absorb=False leaves it alone.")
    return span


def local_heads(model: PreTrainedModel) -> range | None:
    """The KV heads whose keys and values this process sees; None: all.

    Raises:
        ValueError: a head is cut in two.
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not name.endswith("k_proj") or not isinstance(weight, DTensor):
            continue
        rows, size = held(weight, 0), architecture(text_config(model))["head_dim"]
        if parallel_style(model, name) != "colwise" or len(rows) == weight.shape[0]:
            return None
        if rows.start % size or len(rows) % size or not rows:
            raise ValueError(
                f"Tensor parallelism cuts a head: this process holds rows {rows.start} to {rows.stop} of {name}, "
                f"whose heads have {size}. Choose processes that divide the KV heads; see tensor_parallel()."
            )
        return range(rows.start // size, rows.stop // size)
    return None
