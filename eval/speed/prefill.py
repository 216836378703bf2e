"""Time and peak memory of a prompt in one go, and microseconds of quantising it.

    python -m eval.speed.prefill --model qwen3-8b --tokens 32K --write-tokens 100K

Random weights and tokens. Beside the peak stand what must be held: weights, the filled cache, and the keys and values
of two layers in the model's dtype.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from eval.speed import common
from eval.speed.common import DEVICE, Results, attempt, cache_bytes, graph_us, make_cache, numbers, release
from oscar_hf import OscarConfig, kernels
from oscar_hf._compat import architecture, cache_argument
from oscar_hf.config import get_recipe
from oscar_hf.quantization import quantize
from oscar_hf.storage import Tiers

KINDS = ("dynamic", "oscar", "oscar-static", "oscar-prompt")  # the last fits its transforms to what it is given


def write_chunk(keys: Tensor, values: Tensor, tiers: Tiers, k_mean: Tensor, k_rotation: Tensor) -> None:
    """Rotate keys, quantise and store keys and values [1, H, T, D] of one layer, as a prefill does."""
    kernels.write_chunk(
        keys,
        values,
        *tiers.buffers(),
        k_mean=k_mean,
        k_rotation=k_rotation,
        v_rotation=None,
        start=0,
        flushed=tiers.flushed_of(keys.shape[2], 0),
        k_clip=tiers.config.k_clip,
        v_clip=tiers.config.v_clip,
        scale_rule=tiers.config.scale_rule,
    )


@torch.no_grad()
def prefill_once(model: Any, kind: str, tokens: Tensor) -> tuple[float, dict[str, Any]]:
    """Seconds of one prefill into a new cache, with peak and cache bytes."""
    cache = make_cache(kind, model, tokens.shape[1] + 64)
    release()
    common.reset_peak()
    common.synchronize()
    start = time.perf_counter()
    model(tokens, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
    common.synchronize()
    seconds = time.perf_counter() - start
    return seconds, {"peak_bytes": common.peak_bytes(), "cache_bytes": cache_bytes(cache)}


def measure_model(results: Results, shape: str, length: int, repeats: int, kinds: list[str]) -> None:
    """Stock SDPA with DynamicCache, then the patched model."""
    model = common.random_model(shape)
    tokens = torch.randint(model.config.vocab_size, (1, length), device=DEVICE)
    weights = common.weight_bytes(model)
    two_layers = 2 * common.token_bytes(model) * length // model.config.num_hidden_layers
    for kind in kinds:
        if kind.startswith("oscar"):
            common.patch(model)

        def measure(kind: str = kind) -> dict[str, Any]:
            prefill_once(model, kind, tokens[:, : max(1, length // 8)])  # compiles kernels
            prefill_once(model, kind, tokens)
            runs = [prefill_once(model, kind, tokens) for _ in range(repeats)]
            seconds = [run[0] for run in runs]
            row = {"seconds": statistics.median(seconds), "seconds_all": seconds, **runs[-1][1]}
            row["weight_bytes"], row["two_layers_bytes"] = weights, two_layers
            row["held_bytes"] = weights + row["cache_bytes"] + two_layers
            return row

        results.add({"what": f"prefill, {kind} cache", "model": shape, "tokens": length, **attempt(measure)})
        release()


def measure_write(results: Results, length: int, heads: int, size: int) -> None:
    """Storing the keys and values of one layer: our kernels, plain torch's quantising, a copy of the same bytes."""
    recipe = get_recipe("balanced")
    config = OscarConfig.of(recipe)
    keys, values = (  # as projections leave them
        torch.randn(1, length, heads, size, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2) for _ in range(2)
    )
    copies = torch.empty_like(keys), torch.empty_like(values)
    tiers = Tiers(config, keys, length)
    k_rotation = torch.linalg.qr(torch.randn(heads, size, size, device=DEVICE))[0].contiguous()
    k_mean = torch.randn(heads, size, device=DEVICE)

    def plain() -> None:
        for states, clip in ((keys, config.k_clip), (values, config.v_clip)):
            for block in states.split(4096, dim=2):
                quantize(block, clip=clip, scale_rule=config.scale_rule)

    def copy() -> None:
        copies[0].copy_(keys)
        copies[1].copy_(values)

    for name, call in (
        ("rotate, quantise and store", lambda: write_chunk(keys, values, tiers, k_mean, k_rotation)),
        ("quantise alone, plain torch", plain),
        ("copy in BF16", copy),
    ):

        def measure(call: Any = call) -> dict[str, Any]:
            return {"us": graph_us([call], replays=10, least=4), "read_bytes": 2 * keys.nbytes}

        results.add({"what": f"{name}, one layer", "tokens": length, **attempt(measure)})


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(common.SHAPES)}.")] = "qwen3-8b",
    tokens: Annotated[str, typer.Option(help="Length of the prompt.")] = "32K",
    write_tokens: Annotated[str, typer.Option(help="Tokens of one layer to quantise.")] = "100K",
    caches: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}.")] = "dynamic,oscar,oscar-static",
    repeats: int = 3,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = common.RESULTS,
) -> None:
    """Measure a prefill, and the quantising of one layer alone."""
    columns = {"what": "", "tokens": ",", "seconds": ".3f", "us": ".1f", "peak_bytes": ",", "held_bytes": ","}
    results = Results("prefill", out, columns, model=model, dtype="bfloat16", batch=1, repeats=repeats)
    facts = architecture(common.model_config(model))
    measure_write(results, numbers(write_tokens)[0], facts["num_key_value_heads"], facts["head_dim"])
    release()
    kinds = [kind for kind in KINDS if kind in caches.split(",")]
    measure_model(results, model, numbers(tokens)[0], repeats, kinds)
    results.show("Prefill")


if __name__ == "__main__":
    typer.run(main)
