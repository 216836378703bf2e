"""Throughput under one memory budget, that of the GPU: the largest batch that fits, and its tokens per second.

    python -m eval.speed.throughput --model qwen3-8b --context 32K

A first guess from shapes is narrowed by bisection; a batch fits if its cache is filled and three steps run. A compiled
variant starts from the largest batch that ran eagerly with the same kind of cache, and takes less until it runs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eval.speed import common
from eval.speed.common import DEVICE, Results, attempt, cache_bytes, decode, fill, make_cache, numbers, release, short

VARIANTS = {  # cache, compiled
    "dynamic-eager": ("dynamic", False),
    "static-compiled": ("static", True),
    "oscar-compiled": ("oscar-static", True),
    "oscar-eager": ("oscar", False),
}
OSCAR_BITS = 2.25
RETRIES = 6


def row_bytes(kind: str, model: Any, context: int) -> int:
    """Bytes of one row's cache, by its shape."""
    dense = common.token_bytes(model) * context
    if not kind.startswith("oscar"):
        return dense
    exact = 352 * common.token_bytes(model)  # sink, recent window and what the ring has to spare
    return int(dense * OSCAR_BITS / (8 * model.dtype.itemsize)) + exact


def probe(kind: str, model: Any, context: int, batch: int, capacity: int) -> dict[str, Any]:
    """Three eager steps at a batch size."""

    def measure() -> dict[str, Any]:
        common.reset_peak()
        cache = make_cache(kind, model, capacity)
        fill(cache, model, batch, context)
        return decode(model, model, cache, batch, context, steps=1, repeats=1, warm_up=2)

    release()
    row = attempt(measure)
    release()
    return row


def out_of_memory(row: dict[str, Any]) -> bool:
    """Whether a measurement ended for lack of memory."""
    return any(words in row.get("error", "") for words in ("OutOfMemory", "out of memory"))


def largest(kind: str, model: Any, context: int, capacity: int, limit: int | None) -> int:
    """The largest batch that runs eagerly with a kind of cache; 0 where it fails for more than lack of memory."""
    release()
    free = torch.cuda.mem_get_info()[0] if DEVICE.type == "cuda" else 1 << 30
    guess = max(1, free // row_bytes(kind, model, context))
    low, high = 0, min(guess, limit or guess) + 1  # low runs, high does not
    batch = high - 1
    while high - low > max(1, low // 50):
        row = probe(kind, model, context, batch, capacity)
        fits = "error" not in row
        print(f"  {kind} cache, batch {batch}: {'runs' if fits else row['error'][:60]}", flush=True)
        if not fits and not out_of_memory(row):
            return 0
        low, high = (batch, high) if fits else (low, batch)
        batch = max(low + 1, (low + high) // 2 if low else int(high * 0.85))
    return low


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(common.SHAPES)}.")] = "qwen3-8b",
    context: Annotated[str, typer.Option(help="Tokens of each row.")] = "32K",
    variants: Annotated[str, typer.Option(help="Which to run.")] = ",".join(VARIANTS),
    steps: Annotated[int, typer.Option(help="Steps per repetition.")] = 20,
    repeats: int = 3,
    limit: Annotated[int, typer.Option(help="Largest batch to try; 0: what fits.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = common.RESULTS,
) -> None:
    """Find each variant's largest batch, and time it."""
    length = numbers(context)[0]
    capacity = length + common.WARM_UP + steps * repeats
    network = common.random_model(model)
    columns = {"variant": "", "batch": "", "tokens_per_s": ",.1f", "ms": ".2f", "recompiles": "", "cache_bytes": ","}
    total = torch.cuda.mem_get_info()[1] if DEVICE.type == "cuda" else None
    results = Results(
        "throughput", out, columns, model=model, context=length, dtype="bfloat16",
        memory_bytes=total, weight_bytes=common.weight_bytes(network), steps=steps, repeats=repeats,
    )  # fmt: skip
    fits: dict[str, int] = {}
    for variant in (name for name in VARIANTS if name in variants.split(",")):
        kind, is_compiled = VARIANTS[variant]
        if kind.startswith("oscar"):
            common.patch(network)
        started = time.perf_counter()
        if kind == "static" and "dynamic" in fits:
            # the same bytes, but attention under a mask repeats keys and values for every query head
            fits[kind] = largest(kind, network, length, capacity, fits["dynamic"])
        elif kind not in fits:
            fits[kind] = largest(kind, network, length, capacity, limit or None)
        forward = common.compiled(network) if is_compiled else network
        batch = fits[kind]
        row: dict[str, Any] = {"error": "no batch runs eagerly"}
        for _ in range(RETRIES):
            if not batch:
                break

            def measure(batch: int = batch, forward: Any = forward, kind: str = kind) -> dict[str, Any]:
                cache = make_cache(kind, network, capacity)
                fill(cache, network, batch, length)
                timed = decode(forward, network, cache, batch, length, steps, repeats)
                return {**timed, "tokens_per_s": 1e3 * batch / timed["ms"], "cache_bytes": cache_bytes(cache)}

            row = attempt(measure)
            torch._dynamo.reset()  # CUDA graphs keep their caches alive
            release()
            if not out_of_memory(row):
                break
            print(f"  {variant}, batch {batch}: {row['error'][:60]}", flush=True)
            batch = min(batch - 1, int(batch * 0.93))
        row["found_in_s"] = time.perf_counter() - started
        results.add({"variant": variant, "batch": batch, "row_bytes": row_bytes(kind, network, length), **row})
    stock = [row["tokens_per_s"] for row in results.rows if "oscar" not in row["variant"] and "tokens_per_s" in row]
    for row in results.rows:
        if stock and "tokens_per_s" in row:
            row["over_best_stock"] = row["tokens_per_s"] / max(stock)
    results.save()
    results.show(f"Throughput, {model}, {short(length)} tokens a row")


if __name__ == "__main__":
    typer.run(main)
