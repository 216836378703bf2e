"""plan: what a model and a context need, how much fits, and what a token costs, before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .config import OscarConfig, get_recipe
from .gpus import Gpu, find_gpu
from .kernels.launch import UNPACK_BLOCK
from .loading import display_name
from .reading import CHUNK_QUERIES
from .shape import LayerShape, ModelShape, experts, model_shape, read_config
from .storage import Tiers, grown

Kind = Literal["oscar", "bf16"]
PREFILL_CHUNK = 4096
WORKSPACE = 32 << 20  # what cuBLAS takes once


@dataclass(frozen=True)
class Footprint:
    """Bytes of one GPU, the fullest, with one kind of cache; and what follows from them.

    Args:
        weights: of the model.
        rotations: that caches use, in float32.
        sink: first tokens, in the model's dtype.
        recent: the ring of recent tokens.
        history: quantised tokens, scale and min included; for BF16, all keys and values.
        slack: room in the history that growing storage has and does not use.
        other: sliding windows, linear attention's states, counters.
        prefill: what a forward of the prompt needs besides, at its end.
        decode: what a step needs besides.
        milliseconds: a step's least time, every byte read once (roofline); None without a GPU to reckon with.
        largest_batch: rows of this context that fit; None without a GPU.
        largest_context: tokens of this batch's rows that fit; None without a GPU.
    """

    weights: int
    rotations: int
    sink: int
    recent: int
    history: int
    slack: int
    other: int
    prefill: int
    decode: int
    milliseconds: float | None = None
    largest_batch: int | None = None
    largest_context: int | None = None

    @property
    def cache(self) -> int:
        """All bytes of the cache."""
        return self.sink + self.recent + self.history + self.slack + self.other

    @property
    def total(self) -> int:
        """The most that is allocated at once."""
        return self.weights + self.rotations + self.cache + max(self.prefill, self.decode)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready values."""
        return {**asdict(self), "cache": self.cache, "total": self.total}


@dataclass(frozen=True)
class Plan:
    """What a model needs at a context and batch, with an OSCAR cache and with an unquantised one.

    Args:
        model: its name.
        dtype: of states and unquantised weights.
        parameters: of the model.
        active: parameters that one token meets.
        context: tokens of a row's prompt.
        new_tokens: tokens that come after it.
        batch: rows.
        chunk: tokens of a row in one forward of the prompt.
        fixed: whether storage is allocated at once (`max_cache_len`).
        gpu: on which, and how many; None: bytes alone, as if on one GPU.
        split: how several GPUs share: `"heads"` (tensor parallel), `"weights"` (tensor parallel, each with the whole
            cache), `"layers"` (`device_map`, one GPU at a time), or `""` for a single one.
        config: of the OSCAR cache.
        oscar: with the OSCAR cache.
        bf16: with DynamicCache, or StaticCache if `fixed`.
        notes: what to know besides.
    """

    model: str
    dtype: str
    parameters: int
    active: int
    context: int
    new_tokens: int
    batch: int
    chunk: int
    fixed: bool
    gpu: Gpu | None
    split: str
    config: OscarConfig
    oscar: Footprint
    bf16: Footprint
    notes: tuple[str, ...]
    at: Callable[[Kind, int, int], Footprint] = dataclasses.field(repr=False, compare=False)

    def footprint(self, kind: Kind, batch: int | None = None, context: int | None = None) -> Footprint:
        """The same model and cache, `"oscar"` or `"bf16"`, at another batch or context."""
        return self.at(kind, self.batch if batch is None else batch, self.context if context is None else context)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready values."""
        names = ("model", "dtype", "parameters", "active", "context", "new_tokens", "batch", "chunk", "fixed", "split")
        return {
            **{name: getattr(self, name) for name in names},
            "gpu": None if self.gpu is None else {**asdict(self.gpu), "usable": self.gpu.usable},
            "config": self.config.to_dict(),
            "oscar": self.oscar.to_dict(),
            "bf16": self.bf16.to_dict(),
            "notes": list(self.notes),
        }


def plan(
    model: str | PreTrainedConfig | PreTrainedModel,
    context: int = 131072,
    batch: int = 1,
    *,
    gpu: str | Gpu | None = None,
    new_tokens: int = 256,
    chunk: int | None = PREFILL_CHUNK,
    fixed: bool = False,
    config: OscarConfig | None = None,
    dtype: str = "auto",
    split: str = "auto",
    weight_bytes: int | None = None,
) -> Plan:
    """What a model and a context need, from the configuration alone: no weights are read.

    Args:
        model: a configuration, a model, the path of a config.json, a folder, a `.gguf` file or a Hub id.
        context: tokens of each row's prompt.
        batch: rows.
        gpu: as for `find_gpu`: `"h200"`, `"4090:2"`, `"48GiB@864"`. None: bytes alone.
        new_tokens: tokens that come after the prompt.
        chunk: tokens of a row in one forward of the prompt (`generate`'s `prefill_chunk_size`); None: all at once.
        fixed: storage allocated at once (`max_cache_len`), not growing; beside StaticCache.
        config: of the OSCAR cache (default: that of recipe `balanced`, whose rotations are the largest).
        dtype: of states: "bfloat16", "float16" or "float32"; "auto": the configuration's.
        split: over several GPUs, `"tensor"` (tensor parallel) or `"layers"` (`device_map`); "auto": tensor parallel if
            the model's plan and its number of heads allow it.
        weight_bytes: what the weights take, where the configuration does not say.

    Raises:
        ValueError: a number that makes no sense, an unknown GPU, or a model whose cache OSCAR does not support.
        FileNotFoundError: a file that is not there.
    """
    for name, value, least in (("context", context, 1), ("batch", batch, 1), ("new_tokens", new_tokens, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number, {least} or more.")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk={chunk!r} must be a number of tokens, or None for the whole prompt at once.")
    if split not in ("auto", "tensor", "layers"):
        raise ValueError(f"split={split!r} is not known; choose auto, tensor or layers.")
    found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    model_config = read_config(model)
    shape = model_shape(model_config, dtype, weight_bytes)
    config = config or _default_config()
    for layer in shape.full:
        config.groups(layer.head_dim)
    count = 1 if found is None else found.count
    reckon = _Reckoning(shape, config, found, _split(shape, count, split), new_tokens, chunk, fixed)
    name = _name(model) if isinstance(model, str) else model_config.name_or_path or shape.config.model_type
    positions = getattr(shape.config, "max_position_embeddings", None)
    notes = []
    if positions and context + new_tokens > positions:
        notes.append(f"The configuration has {positions:,} positions, fewer than {context + new_tokens:,} tokens.")
    if found is not None and count > 1:
        notes.append(_SPLIT_NOTES[reckon.split])
    return Plan(
        model=name,
        dtype=str(shape.dtype).removeprefix("torch."),
        parameters=shape.parameters,
        active=shape.active,
        context=context,
        new_tokens=new_tokens,
        batch=batch,
        chunk=min(chunk or context, context),
        fixed=fixed,
        gpu=found,
        split=reckon.split,
        config=config,
        oscar=reckon.with_limits("oscar", batch, context),
        bf16=reckon.with_limits("bf16", batch, context),
        notes=tuple(notes),
        at=reckon.footprint,
    )


def _name(model: str) -> str:
    return Path(model).stem if model.endswith(".json") and Path(model).stem != "config" else display_name(model)


_SPLIT_NOTES = {
    "heads": "Tensor parallel: heads and weights are split; bytes and times are those of one GPU.",
    "weights": "Tensor parallel, but this model's plan keeps all heads on every GPU, and so the whole cache.",
    "layers": "Whole layers on each GPU (device_map), which work in turn: bytes are the fullest one's.",
}


def _default_config() -> OscarConfig:
    recipe = get_recipe("balanced")
    return OscarConfig(recipe.name)


def _split(shape: ModelShape, count: int, asked: str) -> str:
    """How GPUs share a model."""
    if count == 1:
        return ""
    heads = {layer.heads for layer in shape.layers if layer.kind != "linear"} | {shape.query_heads}
    even = bool(shape.tensor_parallel) and not any(number % count for number in heads)
    if asked == "tensor" and not even:
        raise ValueError(
            f"{shape.config.model_type} with heads {sorted(heads)} is not split over {count} GPUs by tensor "
            "parallelism: heads must be a multiple of GPUs, and the model must have a plan; use split='layers'."
        )
    return shape.tensor_parallel if even and asked != "layers" else "layers"


@dataclass(frozen=True)
class _Reckoning:
    """The arithmetic of a plan; one object answers for any batch and context."""

    shape: ModelShape
    config: OscarConfig
    gpu: Gpu | None
    split: str
    new_tokens: int
    chunk: int | None
    fixed: bool

    @property
    def count(self) -> int:
        return 1 if self.gpu is None else self.gpu.count

    def _part(self, size: float, what: str) -> int:
        """A GPU's part of bytes that are spread over the layers: of the "cache" or of what a forward "computes"."""
        if self.split == "layers" and what == "cache":
            layers = len(self.shape.layers)
            return int(size * -(-layers // self.count) / layers)
        sharded = self.split == "heads" or (self.split == "weights" and what == "computes")
        return int(size / self.count) if sharded else int(size)

    def _weights(self) -> int:
        shape = self.shape
        if self.split == "layers":
            within = shape.weights - shape.embedding
            return self._part(within, "cache") + (shape.embedding if self.count > 1 else 0)
        return shape.weights - shape.sharded + (shape.sharded // self.count if self.split else shape.sharded)

    def footprint(self, kind: Kind, batch: int, context: int) -> Footprint:
        """Bytes and time at a batch and context."""
        shape, total = self.shape, context + self.new_tokens
        chunk = min(self.chunk or context, context)
        parts = dict.fromkeys(("sink", "recent", "history", "slack", "other", "rotations"), 0)
        read = 0
        for layer, alike in Counter(shape.layers).items():
            if layer.kind == "full" and kind == "oscar":
                held, used = self._oscar_layer(layer, batch, context, chunk)
            else:
                held, used = self._stock_layer(layer, batch, context, chunk)
            read += alike * used
            for name, size in held.items():
                parts[name] += alike * size
        milliseconds = self._milliseconds(read + parts["rotations"], batch, total)
        parts = {name: self._part(size, "cache") for name, size in parts.items()}
        weights = self._weights()
        prefill, decode = self._transients(kind, batch, context, chunk)
        return Footprint(weights=weights, **parts, prefill=prefill, decode=decode, milliseconds=milliseconds)

    def _oscar_layer(self, layer: LayerShape, batch: int, context: int, chunk: int) -> tuple[dict[str, int], int]:
        """Bytes that a quantised layer holds, by tier, and those a step reads: counted on tensors without data."""
        total = context + self.new_tokens
        tiers = Tiers(
            self.config, torch.empty(1, layer.heads, 0, layer.head_dim, dtype=self.shape.dtype, device="meta")
        )
        sizes = {name: batch * window.untyped_storage().nbytes() for name, window in tiers.windows.items()}
        token = batch * sum(b.shape[1] * b.shape[3:].numel() * b.element_size() for b in tiers.history.buffers())
        flushed = tiers.flushed_of(total, 0)
        matrices = 4 if self.config.searches else 2  # of keys and queries, of errors
        rows = batch if self.config.fits else 1  # that have their own
        rotations = rows * layer.heads * (matrices * layer.head_dim + 1) + layer.head_dim  # with the mean; of values
        held = {
            "sink": sum(size for name, size in sizes.items() if name.startswith("sink")),
            "recent": sum(size for name, size in sizes.items() if name.startswith("recent")),
            "history": token * flushed,
            "slack": token * (self._capacity(tiers, context, chunk) - flushed),
            "other": 8 * batch + 8,  # lengths, floors, columns seen
            "rotations": 4 * layer.head_dim * rotations,
        }
        row = 2 * batch * layer.heads * layer.head_dim * self.shape.dtype.itemsize
        return held, held["history"] + row * min(total, self.config.sink_tokens + self.config.recent_tokens)

    def _capacity(self, tiers: Tiers, context: int, chunk: int) -> int:
        """Tokens that the history has room for, once the prompt has come by chunks and the new tokens one by one."""
        if self.fixed:
            return grown(0, max(1, context + self.new_tokens - self.config.sink_tokens))
        capacity = 0
        for length in (*range(chunk, context, chunk), context):
            capacity = grown(capacity, tiers.flushed_of(length, 0))
        last = tiers.flushed_of(context + self.new_tokens, 0)
        while capacity < last:
            capacity = grown(capacity, capacity + 1)
        return capacity

    def _stock_layer(self, layer: LayerShape, batch: int, context: int, chunk: int) -> tuple[dict[str, int], int]:
        """The same of a layer of transformers' own."""
        if layer.kind == "linear":
            held = batch * layer.state + layer.counters
            return {"other": held}, held
        total = context + self.new_tokens
        row = 2 * batch * layer.heads * layer.head_dim * self.shape.dtype.itemsize
        if layer.kind == "full":
            return {"history": row * total, "other": 8 * self.fixed}, row * total
        kept = min(total, layer.window)
        if not self.fixed and not self.new_tokens:  # the prompt's last chunk is still held
            last = context % chunk or chunk
            kept = min(context - last, layer.window - 1) + last
        return {"other": row * kept + 8}, row * min(total, layer.window)

    def _transients(self, kind: Kind, batch: int, context: int, chunk: int) -> tuple[int, int]:
        """What a forward of the prompt's last chunk, and a decode step, hold besides weights and cache."""
        shape, size = self.shape, self.shape.dtype.itemsize
        hidden, vocabulary = shape.config.hidden_size, shape.config.vocab_size
        largest = max(shape.full, key=lambda layer: layer.heads * layer.head_dim)
        keys = largest.heads * largest.head_dim
        queries = shape.query_heads * largest.head_dim
        total = context + self.new_tokens
        logits = batch * vocabulary * (size + 4)

        def forward(tokens: int) -> tuple[int, int]:
            """MLP and attention: states that are split between GPUs, residuals that are not."""
            residual = batch * tokens * hidden * (3 * size)
            states = batch * tokens * 3 * (queries + 2 * keys) * size
            return residual + self._part(batch * tokens * shape.width * size, "computes"), residual + self._part(
                states, "computes"
            )

        mlp, attention = forward(chunk)
        if chunk < context:
            if kind == "oscar":
                exact = self.config.sink_tokens + self.config.recent_tokens + chunk
                rows = min(chunk, CHUNK_QUERIES) * queries
                unpacked = 2 * min(context, UNPACK_BLOCK) * keys * size
                more = batch * (2 * exact * keys * size + 4 * rows)
                more += max(batch * 8 * rows, 12 * rows + unpacked)  # the portable kernel's, or `kernels.chunk`'s
                attention += self._part(more, "computes")
            else:  # a mask, and keys and values repeated for each of a group's heads
                attention += batch * chunk * context * (1 + size) + self._part(
                    2 * batch * context * queries * size, "computes"
                )
        window = max((layer.window for layer in shape.layers), default=0)
        sliding = sum(layer.heads * layer.head_dim for layer in shape.layers if layer.kind == "sliding")
        held = self._part(2 * batch * size * sliding * max(0, chunk - window), "cache")
        growth = 0 if self.fixed else batch * total * keys * (size if kind == "bf16" else self._history_byte(largest))
        growth = self._part(growth, "computes")
        prefill = held + max(mlp, attention + growth) + WORKSPACE
        return prefill + logits, max(*forward(1)) + growth + logits + WORKSPACE

    def _history_byte(self, layer: LayerShape) -> float:
        """Bytes an element of the history takes."""
        bits = self.config.bits_per_element(layer.head_dim)
        return bits / 8 if self.config.bits == 2 else self.shape.dtype.itemsize

    def _milliseconds(self, cache: int, batch: int, total: int) -> float | None:
        """The least time of a decode step: what it reads at full bandwidth, or its products at full speed."""
        gpu, shape = self.gpu, self.shape
        if gpu is None or not gpu.gbps:
            return None
        touched = 1 - (1 - shape.expert_share) ** batch if experts(shape.config)[0] else 0.0
        weights = shape.weights - shape.embedding - shape.experts + touched * shape.experts
        together = 1 if self.split in ("", "layers") else gpu.count
        kept = cache / (together if self.split == "heads" else 1)
        reading = (weights / together + kept) / (gpu.gbps * 1e9)
        attended = 4 * shape.query_heads * sum(layer.head_dim for layer in shape.full) * total
        products = batch * (2 * shape.active + attended) / together / (gpu.tflops * 1e12) if gpu.tflops else 0.0
        return 1e3 * max(reading, products)

    def with_limits(self, kind: Kind, batch: int, context: int) -> Footprint:
        """`footprint`, with the largest batch and context that fit."""
        found = self.footprint(kind, batch, context)
        if self.gpu is None:
            return found
        usable = self.gpu.usable
        return dataclasses.replace(
            found,
            largest_batch=_largest(lambda rows: self.footprint(kind, rows, context).total <= usable),
            largest_context=_largest(lambda tokens: self.footprint(kind, batch, tokens).total <= usable),
        )


def _largest(fits: Callable[[int], bool], limit: int = 1 << 27) -> int:
    """The largest number that fits, 0 if none does."""
    low, high = 0, 1
    while high < limit and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
