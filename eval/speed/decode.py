"""End-to-end decode latency against context: stock caches and OSCAR, eager and compiled, in one process.

    python -m eval.speed.decode --models qwen3-8b --contexts 8K,32K,100K,128K

Weights are random and caches are filled with random keys: neither plays a part in speed. Stock variants run under the
model as transformers makes it, with its SDPA attention, before it is patched. Compiled variants call
`torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)`; "tuned" adds the option
`coordinate_descent_tuning`, with which inductor writes its own matrix-vector products.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from eval.speed import common
from eval.speed.common import Results, attempt, cache_bytes, decode, fill, make_cache, numbers, release

VARIANTS = {  # cache, compiled: as generate does, or with tuned kernels
    "dynamic-eager": ("dynamic", ""),
    "static-compiled": ("static", "default"),
    "static-tuned": ("static", "tuned"),
    "oscar-compiled": ("oscar-static", "default"),
    "oscar-tuned": ("oscar-static", "tuned"),
    "oscar-eager": ("oscar", ""),
}


def measure(
    model: PreTrainedModel, variant: str, contexts: list[int], batch: int, steps: int, repeats: int, share: bool
) -> Iterator[dict[str, Any]]:
    """One variant at ascending contexts, a result for each."""
    kind, is_compiled = VARIANTS[variant]
    share = share and kind == "oscar-static"
    spare = common.WARM_UP + steps * repeats
    forward = common.compiled(model, tuned=is_compiled == "tuned") if is_compiled else model
    shared: tuple[Any, int] | None = None  # a cache, and how many tokens it holds

    def run(context: int) -> dict[str, Any]:
        nonlocal shared
        cache, filled = shared or (make_cache(kind, model, (contexts[-1] if share else context) + spare), 0)
        shared = None
        fill(cache, model, batch, context, filled)
        row = decode(forward, model, cache, batch, context, steps, repeats)
        if share:
            shared = cache, context + spare
        return {**row, "cache_bytes": cache_bytes(cache), "one_cache_for_all_contexts": share}

    for context in contexts:
        yield {"context": context, "variant": variant, **attempt(lambda context=context: run(context))}
        if is_compiled and shared is None:
            torch._dynamo.reset()  # CUDA graphs keep their caches alive
        release()


def main(
    models: Annotated[str, typer.Option(help=f"Of {', '.join(common.SHAPES)}.")] = "qwen3-8b",
    contexts: Annotated[str, typer.Option(help="Tokens before the first step.")] = "8K,32K,100K,128K",
    variants: Annotated[str, typer.Option(help=f"Of {', '.join(VARIANTS)}.")] = ",".join(VARIANTS),
    batch: int = 1,
    steps: Annotated[int, typer.Option(help="Steps per repetition.")] = 20,
    repeats: int = 3,
    share_cache: Annotated[
        bool, typer.Option(help="One fixed OSCAR storage, and so one compilation, for all contexts.")
    ] = True,
    label: Annotated[str, typer.Option(help="Names the file: speed-decode-LABEL.json.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = common.RESULTS,
) -> None:
    """Measure every variant at every context."""
    columns = {"model": "", "context": ",", "variant": "", "ms": ".3f", "recompiles": "", "cache_bytes": ","}
    results = Results("decode", out, columns, label=label, dtype="bfloat16", batch=batch, steps=steps, repeats=repeats)
    for shape in models.split(","):
        model = common.random_model(shape)
        for variant in (name for name in VARIANTS if name in variants.split(",")):  # stock ones first
            if VARIANTS[variant][0].startswith("oscar"):
                common.patch(model)
            for row in measure(model, variant, sorted(numbers(contexts)), batch, steps, repeats, share_cache):
                results.add({"model": shape, **row})
                add_speedups(results.rows)
            torch._dynamo.reset()
        del model
        release()
    results.save()
    results.show("Decode, ms per token")


def add_speedups(rows: list[dict[str, Any]]) -> None:
    """Set each row beside StaticCache, compiled, of the same model and context."""
    base = {(r["model"], r["context"]): r["ms"] for r in rows if r["variant"] == "static-compiled" and "ms" in r}
    for row in rows:
        if "ms" in row and (row["model"], row["context"]) in base:
            row["speedup_over_static_compiled"] = base[row["model"], row["context"]] / row["ms"]


if __name__ == "__main__":
    typer.run(main)
