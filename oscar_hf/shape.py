"""What a configuration says about its model, without any weights: bytes of weights, states of its cache's layers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from ._compat import cache_argument, cache_layers, parallel_plan, text_config
from .memory import tensors_in

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class LayerShape:
    """What one layer of a cache holds.

    Args:
        kind: `"full"`, `"sliding"` or `"linear"`.
        heads: KV heads; 0 for linear attention.
        head_dim: channels of a head.
        window: tokens of a sliding window.
        state: bytes a row of a linear layer's states.
        counters: bytes of its counters, whatever the batch.
    """

    kind: str
    heads: int = 0
    head_dim: int = 0
    window: int = 0
    state: int = 0
    counters: int = 0


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide what a model needs.

    Args:
        config: of the decoder.
        dtype: of its states, and of weights that are not quantised.
        parameters: how many numbers the weights are.
        active: how many of them a token meets (mixtures of experts).
        weights: bytes of all weights and buffers.
        embedding: bytes of those that a decode step reads single rows of.
        experts: bytes of those that are experts'.
        sharded: bytes of those that the model's tensor-parallel plan splits.
        layers: its cache's.
        query_heads: of an attention layer.
        width: elements a token takes at most within an MLP or its experts.
        tensor_parallel: `"heads"` if the plan splits the cache with the KV heads, `"weights"` if only weights, or "".
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    parameters: int
    active: int
    weights: int
    embedding: int
    experts: int
    sharded: int
    layers: tuple[LayerShape, ...]
    query_heads: int
    width: int
    tensor_parallel: str

    @property
    def full(self) -> list[LayerShape]:
        """Layers whose history OSCAR quantises."""
        return [layer for layer in self.layers if layer.kind == "full"]

    @property
    def expert_share(self) -> float:
        """Part of the experts that one token meets."""
        count, chosen = experts(self.config)
        return chosen / count if count else 0.0


def read_config(model: str | PreTrainedConfig | PreTrainedModel) -> PreTrainedConfig:
    """A configuration as it is, that of a model, a config.json, a folder, a GGUF file or a Hub id.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: JSON that is no model's configuration.
    """
    if isinstance(model, (PreTrainedConfig, PreTrainedModel)):
        return getattr(model, "config", model)
    path = Path(model)
    if model.endswith(".gguf"):
        if not path.is_file():
            raise FileNotFoundError(f"{model} is not there.")
        return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    if not model.endswith(".json"):
        return AutoConfig.from_pretrained(model)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{model} is no configuration of a model that transformers knows: {error!s:.200}") from error


def experts(config: PreTrainedConfig) -> tuple[int, int]:
    """Experts of a layer, and how many of them a token meets; zeros for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((n for n in (getattr(config, name, None) for name in names) if n), 0)
    chosen = next(
        (n for n in (getattr(config, name, None) for name in ("num_experts_per_tok", "top_k_experts")) if n), 1
    )
    return count, min(chosen, count)


def model_shape(config: PreTrainedConfig, dtype: str = "auto", weight_bytes: int | None = None) -> ModelShape:
    """Build the model on the meta device, where it takes no memory, and look at it.

    `weight_bytes` overrides what the weights are found to take.

    Raises:
        ValueError: an architecture that OSCAR does not support, an unknown dtype or kind of quantisation.
    """
    text = text_config(config)
    _, full = cache_layers(text)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot be planned for; choose one of {', '.join(DTYPES)}.")
    kind = DTYPES[dtype] if dtype != "auto" else _dtype(config, text)
    quantization = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    counted = _weights(model, None if weight_bytes else quantization)
    if weight_bytes:
        factor = weight_bytes / counted["weights"]
        counted |= {name: int(counted[name] * factor) for name in ("weights", "embedding", "experts", "sharded")}
    plan = parallel_plan(model)
    styles = [style for name, style in plan.items() if name.endswith("k_proj")]
    return ModelShape(
        config=text,
        dtype=kind,
        **counted,
        layers=_layers(model, text, full),
        query_heads=text.num_attention_heads,
        width=_width(model, text),
        tensor_parallel="heads" if "colwise" in styles else "weights" if plan else "",
    )


def _dtype(*configs: PreTrainedConfig) -> torch.dtype:
    named = next((c.dtype for c in configs if getattr(c, "dtype", None) is not None), None)
    dtype = getattr(torch, named) if isinstance(named, str) else named
    return dtype if isinstance(dtype, torch.dtype) and dtype in DTYPES.values() else torch.bfloat16


@torch.no_grad()
def _layers(model: PreTrainedModel, config: PreTrainedConfig, full: set[int]) -> tuple[LayerShape, ...]:
    """Run two tokens, of which only shapes exist, and see what the cache was given."""
    cache = DynamicCache(config=config)
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    model(tokens, use_cache=True, **{cache_argument(model): cache})
    shapes = []
    for index, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        if keys is None or keys.dim() != 4:
            held = {True: 0, False: 0}
            for tensor in tensors_in(vars(layer)):
                held[tensor.dim() > 0] += tensor.untyped_storage().nbytes()
            shapes.append(LayerShape("linear", state=held[True], counters=held[False]))
        else:
            kind = "full" if index in full else "sliding"
            window = 0 if index in full else layer.sliding_window
            shapes.append(LayerShape(kind, keys.shape[1], keys.shape[3], window))
    return tuple(shapes)


def _width(model: nn.Module, config: PreTrainedConfig) -> int:
    """Elements that a token takes within an MLP: gate, up and product; for experts, its copies for each besides."""
    width = 0
    chosen = experts(config)[1]
    for name, module in model.named_modules():
        if name.endswith("down_proj") and isinstance(module, nn.Linear):
            width = max(width, 3 * module.in_features)
        down = getattr(module, "down_proj", None)
        if name.endswith("experts") and isinstance(down, nn.Parameter):
            inner = down.numel() // down.shape[0] // config.hidden_size
            width = max(width, chosen * 3 * (inner + config.hidden_size))
    return width


# Weights, quantised or not


def _weights(model: PreTrainedModel, quantization: Any) -> dict[str, int]:
    """Counts for `ModelShape`; a weight that two modules share counts once."""
    plan = parallel_plan(model)
    head, tied = model.get_output_embeddings(), set()
    counts = dict.fromkeys(("parameters", "active", "weights", "embedding", "experts", "sharded"), 0)
    share = 1.0
    if experts(text_config(model))[0]:
        share = experts(text_config(model))[1] / experts(text_config(model))[0]
    settings = _settings(quantization)
    for module_name, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if id(tensor) in tied:
                continue
            tied.add(id(tensor))
            full_name = f"{module_name}.{name}"
            of_expert = ".experts." in f"{full_name}."
            size = tensor.numel() * tensor.element_size()
            matrix = (type(module) is nn.Linear and name == "weight") or (of_expert and tensor.dim() == 3)
            if matrix and settings and module is not head and _converts(settings, module_name, of_expert):
                size = _quantized_bytes(settings, tensor.shape)
            if isinstance(tensor, nn.Parameter):
                counts["parameters"] += tensor.numel()
                counts["active"] += int(tensor.numel() * (share if of_expert else 1))
            counts["weights"] += size
            counts["experts"] += size if of_expert else 0
            if isinstance(module, nn.Embedding) and (head is None or tensor is not head.weight):
                counts["embedding"] += size
                counts["active"] -= tensor.numel()
            generic = re.sub(r"\.\d+(?=\.|$)", ".*", full_name)
            if generic in plan or generic.rpartition(".")[0] in plan:
                counts["sharded"] += size if tensor.dim() > 1 else 0
    return counts


def _settings(quantization: Any) -> dict[str, Any] | None:
    """The one dict of a checkpoint's quantisation that matters here; None: weights are as wide as states.

    Raises:
        ValueError: a kind whose bytes are not known here.
    """
    if quantization is None:
        return None
    found = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(getattr(found.get("quant_method"), "value", found.get("quant_method")))
    if method == "gguf":  # transformers unpacks these as it loads
        return None
    if method == "compressed-tensors":
        groups = list((found.get("config_groups") or {}).values())
        weights = (groups[0] if groups else {}).get("weights") or {}
        bits, strategy = weights.get("num_bits", 8), weights.get("strategy", "channel")
        group = weights.get("group_size") if strategy == "group" else None
        return {
            "method": method,
            "bits": bits,
            "group": group,
            "skip": found.get("ignore"),
            "tensor": strategy == "tensor",
        }
    skip = found.get("modules_to_not_convert") or found.get("llm_int8_skip_modules")
    known = {
        "fp8": {"bits": 8, "block": found.get("weight_block_size")},
        "gptq": {"bits": found.get("bits", 4), "group": found.get("group_size", 128)},
        "awq": {"bits": found.get("bits", found.get("w_bit", 4)), "group": found.get("group_size", 128)},
        "mxfp4": {"bits": 4},
        "bitsandbytes": {"bits": 4 if found.get("load_in_4bit") or found.get("_load_in_4bit") else 8},
    }
    if method not in known:
        raise ValueError(
            f"Weights quantised by {method!r} are not known here, but {', '.join(known)} and compressed-tensors "
            "are; plan for the model it was made from, or say what they take by weight_bytes."
        )
    double = bool(found.get("bnb_4bit_use_double_quant"))
    return {"method": method, "skip": skip, "double": double, **known[method]}


def _converts(settings: dict[str, Any], module: str, of_expert: bool) -> bool:
    """Whether a matrix of this module is quantised."""
    if settings["method"] == "mxfp4":
        return of_expert
    if settings["method"] in ("bitsandbytes", "gptq", "awq") and of_expert:
        return settings["method"] != "bitsandbytes"
    for pattern in settings["skip"] or []:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], module):
                return False
        elif module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}"):
            return False
    return True


def _quantized_bytes(settings: dict[str, Any], shape: torch.Size) -> int:
    """Bytes of a weight [..., out, in] with its scales."""
    method, bits = settings["method"], settings["bits"]
    *_, rows, columns = shape
    matrices, codes = shape.numel() // rows // columns, shape.numel() * bits // 8
    group = settings.get("group") or columns
    if group < 0:
        group = columns
    groups = matrices * rows * math.ceil(columns / group)
    if method == "fp8":
        block = settings["block"]
        return codes + 4 * matrices * (math.ceil(rows / block[0]) * math.ceil(columns / block[1]) if block else 1)
    if method == "mxfp4":
        return codes + shape.numel() // 32
    if method == "bitsandbytes":
        if bits == 8:
            return codes + 4 * matrices * rows
        blocks = math.ceil(shape.numel() / 64)
        scales = blocks + 4 * math.ceil(blocks / 256) + 4 if settings["double"] else 4 * blocks
        return codes + scales + 4 * 16  # and the sixteen values
    if method == "compressed-tensors":
        return codes + (2 * matrices if settings["tensor"] else 2 * groups)
    zeros = groups * bits // 8
    return codes + 2 * groups + zeros + (4 * columns * matrices if method == "gptq" else 0)
