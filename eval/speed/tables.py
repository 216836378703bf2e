"""Markdown tables of the benchmarks' JSON, for the README; `eval.tables` adds the source line."""

from __future__ import annotations

from typing import Any

from eval.speed.common import short

KERNELS = {
    "BF16 SDPA": "BF16, `F.scaled_dot_product_attention`, best backend",
    "BF16 FlashInfer": "BF16, FlashInfer",
    "BF16 split Triton": "BF16, simple split Triton kernel",
    "INT2 plain Triton": "INT2, plain Triton kernel",
    "ours": "OSCAR: all tiers, merge included",
    "ours, portable": "the same by the portable kernel (any GPU, head_dim, softcap)",
    "ours, whole step": "OSCAR: rotate, append and quantise besides",
    "read the same bytes": "a kernel that only reads OSCAR's bytes",
}
VARIANTS = {
    "dynamic-eager": "`DynamicCache`, eager",
    "static-compiled": "`StaticCache`, compiled",
    "static-tuned": "`StaticCache`, compiled and tuned",
    "oscar-eager": "OSCAR, eager",
    "oscar-compiled": "OSCAR, compiled",
    "oscar-tuned": "OSCAR, compiled and tuned",
}


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def kernel(results: dict[str, Any]) -> str:
    """Microseconds, each kernel's best setting, by shape."""
    summary = results["best_us"]
    rows = [
        [label, *(_figure(times.get(name), ".1f") for times in summary.values())]
        for name, label in KERNELS.items()
        if any(times.get(name) is not None for times in summary.values())
    ]
    return _table(["microseconds", *(shape.replace("x", " x ") for shape in summary)], rows)


def is_baseline(row: dict[str, Any], model: str, context: int) -> bool:
    """Whether this row is StaticCache, compiled."""
    return (row["model"], row["context"], row["variant"]) == (model, context, "static-compiled") and "ms" in row


def decode(results: dict[str, Any]) -> str:
    """Milliseconds per token by context, and how many times StaticCache's speed."""
    contexts = sorted({row["context"] for row in results["rows"]})
    rows = []
    for model in dict.fromkeys(row["model"] for row in results["rows"]):
        for variant, label in VARIANTS.items():
            found = {r["context"]: r for r in results["rows"] if (r["model"], r["variant"]) == (model, variant)}
            cells = []
            for context in contexts:
                row = found.get(context, {})
                stock = next((r["ms"] for r in results["rows"] if is_baseline(r, model, context)), None)
                ratio = stock / row["ms"] if stock and "ms" in row else None
                more = f" ({ratio:.1f}x)" if ratio and variant.startswith("oscar") else ""
                cells.append(_figure(row.get("ms"), ".1f") + more)
            if found:
                rows.append([model, label, *cells])
    return _table(["model", "ms per token", *map(short, contexts)], rows)


def throughput(results: dict[str, Any]) -> str:
    """Largest batch and tokens per second, and how many times the best stock cache's."""
    rows = [
        [
            VARIANTS[row["variant"]],
            str(row["batch"]),
            f"{row['cache_bytes'] / 1e9:.1f}",
            f"{row['ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}" + (f" ({row['over_best_stock']:.1f}x)" if "oscar" in row["variant"] else ""),
        ]
        for row in results["rows"]
        if "tokens_per_s" in row
    ]
    return _table(["cache", "largest batch", "GB of cache", "ms per step", "tokens per second"], rows)


def prefill(results: dict[str, Any]) -> str:
    """Time of a prompt and of storing one layer of it, and peak memory beside what has to be held."""
    rows = []
    for row in results["rows"]:
        time = f"{row['seconds']:.2f} s" if "seconds" in row else f"{row['us'] / 1e3:,.2f} ms"
        bytes_held = [_figure(row[key] / 1e9 if key in row else None, ".1f") for key in ("peak_bytes", "held_bytes")]
        rows.append([row["what"], f"{row['tokens']:,}", time, *bytes_held])
    return _table(["", "tokens", "time", "peak, GB", "weights + cache + K and V of two layers, GB"], rows)
