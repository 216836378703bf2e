"""What the scripts share: this machine's GPU for a plan, caches filled where a model's layers are, results."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from eval.record import machine
from eval.speed.common import DEVICE, write
from oscar_hf import plan
from oscar_hf._compat import architecture, cache_argument
from oscar_hf.gpus import GPUS, Gpu
from oscar_hf.parallel import local_heads
from oscar_hf.planning import Plan

KINDS = {
    "dynamic": ("bf16", False),
    "static": ("bf16", True),
    "oscar": ("oscar", False),
    "oscar-static": ("oscar", True),
}


class Results:
    """Rows of one script: printed, and written as they come."""

    def __init__(self, path: Path, **header: Any):
        self.path, self.start = path, time.perf_counter()
        command = " ".join([f"python -m eval.scale.{Path(sys.argv[0]).stem}", *(Path(a).name for a in sys.argv[1:])])
        self.content: dict[str, Any] = {"command": command, "machine": machine(), **header, "rows": []}

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.start

    def add(self, **row: Any) -> None:
        """Keep one measurement."""
        row["at_s"] = round(self.seconds, 1)
        self.content["rows"].append(row)
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return str({key: _short(item) for key, item in value.items()})
    if isinstance(value, int) and value > 1e8:
        return f"{value / 1e9:.2f}G"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def this_gpu() -> Gpu:
    """The GPU at hand with the memory that it has; on a CPU, something to try the scripts with."""
    if DEVICE.type != "cuda":
        return Gpu("cpu", 2.0, 10, 0.1)
    properties = torch.cuda.get_device_properties(0)
    name = properties.name.lower()
    known = [gpu for key, gpu in GPUS.items() if key.replace("-", " ") in name]
    return dataclasses.replace(known[0] if known else Gpu(name, 0), gib=properties.total_memory / (1 << 30))


def plan_for(model: PreTrainedModel, kind: str, context: int, batch: int, **settings: Any) -> Plan:
    """The plan of a cache kind, as of `eval.speed.common.make_cache`."""
    return plan(model.config, context, batch, gpu=this_gpu(), fixed=KINDS[kind][1], dtype="bfloat16", **settings)


def footprint(found: Plan, kind: str) -> dict[str, Any]:
    """What a plan says of a cache kind."""
    return getattr(found, KINDS[kind][0]).to_dict()


def layer_device(model: PreTrainedModel, index: int) -> torch.device:
    """Where a layer's keys will be."""
    return model.get_decoder().layers[index].self_attn.k_proj.weight.device


@torch.no_grad()
def fill(cache: Any, model: PreTrainedModel, batch: int, length: int, chunk: int) -> None:
    """Random keys and values for `length` tokens of every layer, chunk by chunk, where and as the model would."""
    facts = architecture(model.config)
    heads = len(local_heads(model) or range(facts["num_key_value_heads"]))

    def states(index: int, tokens: int) -> Tensor:
        shape = (batch, heads, tokens, facts["head_dim"])
        return torch.randn(shape, dtype=model.dtype, device=layer_device(model, index))

    for index, layer in enumerate(cache.layers):
        if isinstance(cache, DynamicCache):
            cache.update(states(index, length), states(index, length), index)
        elif isinstance(cache, StaticCache):
            token = states(index, 1)
            cache.update(token, token, index)
            for buffer in (layer.keys, layer.values):
                buffer[:, :, :length].normal_()
            layer.cumulative_length.fill_(length)
        else:
            keys, values = states(index, min(chunk, length)), states(index, min(chunk, length))
            for first in range(0, length, chunk):
                count = min(chunk, length - first)
                write(layer, keys[:, :, :count], values[:, :, :count])


@torch.no_grad()
def prefill(model: PreTrainedModel, cache: Any, tokens: Tensor, chunk: int, start: int = 0) -> None:
    """Run tokens [B, n] through the model by chunks, after `start` that the cache holds already."""
    for part in tokens.split(chunk, 1):
        position = torch.arange(start, start + part.shape[1], device=part.device).expand(part.shape[0], -1)
        settings = {"attention_mask": None, "use_cache": True, "logits_to_keep": 1, cache_argument(model): cache}
        model(part, position_ids=position, **settings)
        start += part.shape[1]
