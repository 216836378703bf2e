"""What the benchmarks share: model shapes, random weights and rotations, filled caches, the timed loop, results."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config, StaticCache

from eval.record import machine
from oscar_hf import LayerRotation, OscarConfig, OscarQuantizedCache, RotationSet, patch_model
from oscar_hf._compat import architecture, cache_argument, cache_layers
from oscar_hf.config import get_recipe
from oscar_hf.layer import OscarLayer
from oscar_hf.matrices import hadamard
from oscar_hf.memory import tensors_in
from oscar_hf.reading import store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RESULTS = Path("eval/results")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288},
    "qwen3-32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "tiny": {  # for trying the scripts
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
    },
}
FILL_BYTES = 1 << 28
WARM_UP = 5


def numbers(text: str) -> list[int]:
    """`"8K,32K"` -> [8192, 32768]."""
    return [int(part[:-1]) * 1024 if part[-1] in "kK" else int(part) for part in text.split(",")]


def short(tokens: int) -> str:
    """32768 -> `"32K"`."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def release() -> None:
    """Give memory back that nothing refers to."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def reset_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int | None:
    """The most that was allocated since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` returns, or its error: a variant that fails does not end the run."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc(limit=-12)
        message = " ".join(f"{type(error).__name__}: {error}".splitlines()[:2])[:300]
    release()
    return {"error": message}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Results:
    """Measurements of one benchmark: each is printed and saved as it comes."""

    def __init__(self, name: str, folder: Path, columns: dict[str, str], label: str = "", **header: Any):
        self.path = folder / f"speed-{name}{label and '-'}{label}.json"
        self.columns = columns  # key of a row: format specification
        command = " ".join([f"python -m eval.speed.{name}", *(Path(a).name for a in sys.argv[1:])])
        versions = {package: _version(package) for package in ("triton", "flashinfer-python")}
        self.content: dict[str, Any] = {
            "command": command,
            "machine": {**machine(), "cuda": torch.version.cuda, **versions},
            **header,
            "rows": [],
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["rows"]

    def add(self, row: dict[str, Any]) -> None:
        """Keep one measurement."""
        self.rows.append(row)
        print(
            "  ".join(f"{key} {value}" for key, value in zip(self.columns, self._cells(row), strict=True)), flush=True
        )
        self.save()

    def save(self) -> None:
        """Write what there is; a run cut short leaves a whole file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")
        draft.replace(self.path)

    def _cells(self, row: dict[str, Any]) -> list[str]:
        cells = []
        for key, form in self.columns.items():
            value = row.get(key)
            cells.append("-" if value is None else format(value, form))
        if "error" in row:
            cells[-1] = row["error"][:60]
        return cells

    def show(self, title: str) -> None:
        """All rows as a table."""
        table = Table(*self.columns, title=title)
        for row in self.rows:
            table.add_row(*self._cells(row))
        Console(width=140).print(table)


# Models


def model_config(shape: str) -> Qwen3Config:
    """The configuration of a model of that shape."""
    settings = {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        **SHAPES[shape],
    }
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen3Config(max_position_embeddings=1 << 18, rope_parameters=rope, **settings)


def random_model(shape: str) -> PreTrainedModel:
    """A model of that shape with random weights in bfloat16, made where it runs."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(
            model_config(shape), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()


def random_rotations(model: PreTrainedModel) -> RotationSet:
    """Rotations of the costliest kind, that of `balanced`: per head, with q_rotation apart and a mean of keys."""
    facts = architecture(model.config)
    heads, size = facts["num_key_value_heads"], facts["head_dim"]
    recipe = get_recipe("balanced")
    generator = torch.Generator().manual_seed(0)

    def layer() -> LayerRotation:
        basis = torch.linalg.qr(torch.randn(heads, size, size, generator=generator, dtype=torch.float64)).Q
        spread = torch.randn(heads, 1, size, generator=generator, dtype=torch.float64).mul(0.3).exp()
        mixed = basis.mT @ hadamard(size)
        return LayerRotation(
            k_rotation=((basis * spread) @ mixed).float(),
            q_rotation=((basis / spread) @ mixed).float(),
            v_rotation=hadamard(size).float(),
            k_mean=torch.randn(heads, size, generator=generator),
        )

    layers = {index: layer() for index in sorted(cache_layers(model.config)[1])}
    config = OscarConfig.of(recipe)
    return RotationSet(layers, config, architecture=facts)


def patch(model: PreTrainedModel) -> PreTrainedModel:
    """Patched with `random_rotations`, once."""
    if getattr(model, "_oscar_patch", None) is not None:
        return model
    return patch_model(model, random_rotations(model), reversible=False, check=False)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights; shared ones once."""
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


# Caches


def make_cache(kind: str, model: PreTrainedModel, capacity: int) -> Any:
    """A cache: `"dynamic"`, `"static"`, `"oscar"` (growing), `"oscar-static"` (fixed storage) or
    `"oscar-prompt"` (growing, fitted to its sequences)."""
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=capacity)
    if kind == "oscar-prompt":
        return OscarQuantizedCache(model, config=OscarConfig(recipe="prompt"))
    return OscarQuantizedCache(model) if kind == "oscar" else OscarQuantizedCache(model, max_cache_len=capacity)


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of one token's keys and values, all layers, in the model's dtype."""
    facts = architecture(model.config)
    row = 2 * facts["num_key_value_heads"] * facts["head_dim"] * model.dtype.itemsize
    return row * facts["num_hidden_layers"]


def random_states(model: PreTrainedModel, batch: int, tokens: int) -> Tensor:
    """Normal random keys [B, H_kv, tokens, D] in the model's dtype."""
    facts = architecture(model.config)
    shape = (batch, facts["num_key_value_heads"], tokens, facts["head_dim"])
    return torch.randn(shape, dtype=model.dtype, device=DEVICE)


def write(layer: OscarLayer, keys: Tensor, values: Tensor) -> None:
    """Store [B, H_kv, n, D] in one layer as a chunk of a prompt, without attending."""
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
        layer._started = True
    store(layer.tiers, layer.transform, slice(None), keys, values)
    layer._add_columns(keys.shape[2])


def fill(cache: Any, model: PreTrainedModel, batch: int, length: int, start: int = 0) -> None:
    """Random keys and values for tokens `start` to `length`, without a prefill."""
    if isinstance(cache, DynamicCache):
        for index in range(len(cache.layers)):
            cache.update(*(random_states(model, batch, length) for _ in range(2)), index)
    elif isinstance(cache, StaticCache):
        token = random_states(model, batch, 1)
        for index, layer in enumerate(cache.layers):
            cache.update(token, token, index)
            for buffer in (layer.keys, layer.values):
                buffer[:, :, :length].normal_()
            layer.cumulative_length.fill_(length)
    else:
        facts = architecture(model.config)
        row = batch * facts["num_key_value_heads"] * facts["head_dim"] * model.dtype.itemsize
        chunk = min(length - start, max(256, FILL_BYTES // row))
        keys, values = (random_states(model, batch, chunk) for _ in range(2))
        for layer in cache.oscar_layers:
            for first in range(start, length, chunk):
                count = min(chunk, length - first)
                write(layer, keys[:, :, :count], values[:, :, :count])


def cache_bytes(cache: Any) -> int:
    """Bytes of every tensor that a cache holds."""
    if isinstance(cache, OscarQuantizedCache):
        return cache.memory().total
    held = [tensor for layer in cache.layers for tensor in tensors_in(vars(layer))]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


# Timing


def compiled(model: PreTrainedModel, tuned: bool = False) -> Callable[..., Any]:
    """The forward as transformers' generate compiles it for a StaticCache, or with tuned kernels."""
    if tuned:
        options = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
        return torch.compile(model.forward, fullgraph=True, options=options)
    return torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)


def _compilations() -> dict[str, int]:
    return {
        "recompiles": counters["frames"]["total"] + counters["stats"]["unique_graphs"],
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }


@torch.no_grad()
def decode(
    forward: Callable[..., Any],
    model: PreTrainedModel,
    cache: Any,
    batch: int,
    length: int,
    steps: int = 20,
    repeats: int = 3,
    warm_up: int = WARM_UP,
) -> dict[str, Any]:
    """Greedy decode steps after `length` tokens; wall clock of `steps` steps at a time.

    Returns:
        dict: `ms` (median over repeats, per step), `ms_all`, `warm_up_s`, `recompiles` (frames and graphs compiled in
        the timed part), `cudagraph_skips` (since the start), `peak_bytes`.
    """
    name = cache_argument(model)
    token = torch.zeros(batch, 1, dtype=torch.long, device=DEVICE)
    position = torch.full((batch, 1), length, dtype=torch.long, device=DEVICE)

    def run(count: int) -> float:
        nonlocal token, position
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            output = forward(
                input_ids=token, position_ids=position, attention_mask=None, use_cache=True, **{name: cache}
            )
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            position = position + 1
            del output  # its logits may lie in the graph's memory
        synchronize()
        return time.perf_counter() - start

    skips = _compilations()["cudagraph_skips"]
    warm_up_s = run(warm_up)
    reset_peak()
    before = _compilations()["recompiles"]
    times = [1e3 * run(steps) / steps for _ in range(repeats)]
    after = _compilations()
    return {
        "ms": statistics.median(times),
        "ms_all": times,
        "warm_up_s": warm_up_s,
        "recompiles": after["recompiles"] - before,
        "cudagraph_skips": after["cudagraph_skips"] - skips,
        "peak_bytes": peak_bytes(),
    }


def graph_us(
    calls: list[Callable[[], Any]], replays: int = 30, before: Callable[[], Any] | None = None, least: int = 48
) -> float:
    """Microseconds of one call: a CUDA graph of all calls in turn, at least `least`; median of its replays.

    Each call should work on data of its own, so that no call finds its data in L2. `before` runs ahead of every
    replay, untimed. On a CPU, without a graph (for trying the scripts).
    """
    rounds = -(-least // len(calls))
    if DEVICE.type != "cuda":
        began = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - began) / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and allocates what is allocated once
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(replays + 3):
        if before is not None:
            before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # so that the host is ahead when the graph starts
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / (rounds * len(calls)))
    return statistics.median(times[3:])
