"""`oscar_hf.plan` against what is allocated, in the shape of Qwen3-8B: `python -m eval.scale.plan --out plan.json`.

Weights are random. All of a prompt but its last chunk is filled in as random keys; the last chunk and some steps are
run. Peaks are `torch.cuda.max_memory_allocated`, weights included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eval.scale.common import KINDS, Results, fill, footprint, plan_for, prefill
from eval.speed import common
from eval.speed.common import DEVICE, attempt, cache_bytes, decode, make_cache, numbers, release
from oscar_hf.planning import PREFILL_CHUNK

STEPS = 16


def measure(model: Any, kind: str, context: int, batch: int, chunk: int) -> dict[str, Any]:
    """Peaks of the last chunk and of decoding, and the bytes of the cache at the end."""
    cache = make_cache(kind, model, context + STEPS)
    fill(cache, model, batch, context - chunk, chunk)
    release()
    common.reset_peak()
    tokens = torch.zeros(batch, chunk, dtype=torch.long, device=DEVICE)
    prefill(model, cache, tokens, chunk, context - chunk)
    peak = {"prefill_peak": common.peak_bytes()}
    common.reset_peak()
    warm = STEPS // 2
    decode(model, model, cache, batch, context, steps=STEPS - warm, repeats=1, warm_up=warm)
    peak["decode_peak"] = common.peak_bytes()
    return {**peak, "cache": cache_bytes(cache)}


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(common.SHAPES)}.")] = "qwen3-8b",
    contexts: str = "100K",
    batches: str = "1,4",
    kinds: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}.")] = ",".join(KINDS),
    chunk: int = PREFILL_CHUNK,
    out: Path = Path("plan.json"),
) -> None:
    """Measure each kind of cache, and set the plan beside it."""
    results = Results(out, model=model, dtype="bfloat16", chunk=chunk)
    network = common.random_model(model)
    results.add(part="weights", measured=common.weight_bytes(network), **_allocated())
    for kind in (kind for kind in KINDS if kind in kinds.split(",")):  # stock ones first
        if kind.startswith("oscar") and getattr(network, "_oscar_patch", None) is None:
            release()
            common.reset_peak()
            before = _allocated().get("allocated")
            common.patch(network)
            layer = sum(p.numel() * p.element_size() for p in network.get_decoder().layers[0].parameters())
            peak = common.peak_bytes()
            results.add(part="patch", over_the_model=None if peak is None else peak - before, one_layer=layer)
        for context in numbers(contexts):
            for batch in numbers(batches):
                found = footprint(plan_for(network, kind, context, batch, new_tokens=STEPS, chunk=chunk), kind)
                row = attempt(lambda kind=kind, c=context, b=batch: measure(network, kind, c, b, min(chunk, c // 2)))
                release()
                base = found["weights"] + found["rotations"] + found["cache"]
                planned = {name: base + found[name] for name in ("prefill", "decode")}
                errors = {
                    f"{name}_error": planned[name] / row[f"{name}_peak"] - 1
                    for name in planned
                    if row.get(f"{name}_peak")
                }
                if row.get("cache"):
                    errors["cache_error"] = found["cache"] / row["cache"] - 1
                results.add(part="cache", kind=kind, context=context, batch=batch, planned=planned, **row, **errors)


def _allocated() -> dict[str, int]:
    return {"allocated": torch.cuda.memory_allocated()} if DEVICE.type == "cuda" else {}


if __name__ == "__main__":
    typer.run(main)
