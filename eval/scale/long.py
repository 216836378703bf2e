"""A 128K prompt and 256 new tokens on one GPU, beside the plan: `python -m eval.scale.long --out long.json`.

Qwen3-8B's shape, random weights. With batch 1 the prompt is run by chunks; at the largest batch that the plan says
fits, all of it but the last chunk is filled in as random keys, which leaves the same bytes. A batch that does not fit
after all is made smaller. Parts that would start after `--seconds` are left out, and said to be.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eval.scale.common import KINDS, Results, fill, footprint, plan_for, prefill
from eval.speed import common
from eval.speed.common import DEVICE, attempt, cache_bytes, decode, make_cache, numbers, release, synchronize

PARTS = {  # cache, compiled, largest batch, prompt run as a whole
    "bf16": ("dynamic", False, False, False),
    "bf16-most": ("dynamic", False, True, False),
    "oscar": ("oscar", False, False, True),
    "oscar-compiled": ("oscar-static", True, False, False),
    "oscar-most": ("oscar", False, True, False),
}


def measure(
    model: Any, kind: str, compiled: bool, context: int, batch: int, chunk: int, new: int, whole: bool
) -> dict[str, Any]:
    """Time and peak of the prompt and of the new tokens."""
    common.reset_peak()
    cache = make_cache(kind, model, context + new)
    ready = 0 if whole else max(0, context - chunk)
    if ready:
        fill(cache, model, batch, ready, chunk)
    tokens = torch.randint(0, model.config.vocab_size, (batch, context - ready), device=DEVICE)
    synchronize()
    start = time.perf_counter()
    prefill(model, cache, tokens, chunk, ready)
    synchronize()
    row = {"prefill_tokens": context - ready, "prefill_s": time.perf_counter() - start}
    row["prefill_peak"] = common.peak_bytes()
    forward = common.compiled(model) if compiled else model
    warm, repeats = max(1, new // 16), 3
    steps = max(1, (new - warm) // repeats)
    row |= decode(forward, model, cache, batch, context, steps, repeats, warm)
    row["decode_peak"] = row.pop("peak_bytes")
    return {**row, "cache": cache_bytes(cache), "new_tokens": warm + steps * repeats}


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(common.SHAPES)}.")] = "qwen3-8b",
    context: str = "128K",
    new_tokens: int = 256,
    chunk: Annotated[int, typer.Option(help="Of the prompt, at batch 1.")] = 4096,
    most_chunk: Annotated[int, typer.Option(help="At the largest batch.")] = 512,
    limit: Annotated[int, typer.Option(help="Largest batch to try.")] = 4096,
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}.")] = ",".join(PARTS),
    seconds: Annotated[float, typer.Option(help="Start nothing after this.")] = 240,
    out: Path = Path("long.json"),
) -> None:
    """Measure each part, and set the plan and its roofline beside it."""
    length = numbers(context)[0]
    results = Results(out, model=model, context=length, dtype="bfloat16")
    network = common.random_model(model)
    for part in (part for part in PARTS if part in parts.split(",")):  # stock ones first
        kind, compiled, most, whole = PARTS[part]
        if results.seconds > seconds:
            results.add(part=part, error=f"left out: {seconds:.0f} s had passed")
            continue
        if kind.startswith("oscar"):
            common.patch(network)
        step = min(most_chunk if most else chunk, length // 2)
        batch = 1
        if most:
            found = plan_for(network, kind, length, 1, new_tokens=new_tokens, chunk=step)
            batch = max(1, min(limit, footprint(found, kind)["largest_batch"]))
        while True:
            found = plan_for(network, kind, length, batch, new_tokens=new_tokens, chunk=step)
            row = attempt(
                lambda k=kind, c=compiled, b=batch, s=step, w=whole: measure(
                    network, k, c, length, b, s, new_tokens, w
                )
            )
            torch._dynamo.reset()
            gc.collect()
            release()
            said = footprint(found, kind)
            peak = max(row.get("prefill_peak") or 0, row.get("decode_peak") or 0)
            results.add(
                part=part,
                kind=KINDS[kind][0],
                batch=batch,
                chunk=step,
                planned=said["total"],
                planned_cache=said["cache"],
                planned_largest_batch=said["largest_batch"],
                roofline_ms=said["milliseconds"],
                error_of_the_plan=said["total"] / peak - 1 if peak else None,
                **row,
            )
            if not (most and "memory" in row.get("error", "") and batch > 1):
                break
            batch = min(batch - 1, int(batch * 0.95))


if __name__ == "__main__":
    typer.run(main)
