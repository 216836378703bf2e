"""Plots of the measured results: latency and speed-up against context, and bytes. Needs the extra `plot`.

python -m eval.speed.plots --folder eval/results
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.speed.common import RESULTS, short

VARIANTS = {
    "dynamic-eager": ("DynamicCache, eager", "tab:gray", "--"),
    "static-compiled": ("StaticCache, compiled", "tab:orange", "-"),
    "oscar-eager": ("OSCAR, eager", "tab:cyan", "--"),
    "oscar-compiled": ("OSCAR, compiled", "tab:blue", "-"),
    "oscar-tuned": ("OSCAR, compiled and tuned", "tab:green", "-"),
}
KERNELS = {
    "BF16 SDPA": ("BF16 SDPA", "tab:orange", "-"),
    "BF16 FlashInfer": ("BF16 FlashInfer", "tab:red", "-"),
    "BF16 split Triton": ("BF16 split Triton", "tab:brown", "--"),
    "INT2 plain Triton": ("INT2, plain Triton", "tab:gray", "--"),
    "ours": ("OSCAR", "tab:blue", "-"),
    "ours, portable": ("OSCAR, portable kernel", "tab:purple", "--"),
    "ours, whole step": ("OSCAR, with rotating and appending", "tab:cyan", "--"),
    "read the same bytes": ("reading OSCAR's bytes", "black", ":"),
}


def _caption(figure: Any, results: dict[str, Any]) -> None:
    machine = results["machine"]
    text = f"{machine['gpu']}, torch {machine['torch']}, {machine['date']}: {results['command']}"
    figure.text(0.5, 0.005, text, ha="center", va="bottom", fontsize=6, wrap=True)


def _finish(figure: Any, results: dict[str, Any], path: Path) -> None:
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    _caption(figure, results)
    figure.savefig(path, dpi=150)
    print(path)


def _lines(axis: Any, lines: dict[str, dict[int, float]], styles: dict[str, tuple[str, str, str]]) -> None:
    """One line per variant, {tokens: value}."""
    contexts = sorted({tokens for line in lines.values() for tokens in line})
    for name, (label, colour, style) in styles.items():
        line = sorted(lines.get(name, {}).items())
        if line:
            axis.plot(*zip(*line, strict=True), style, color=colour, marker="o", markersize=3, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [short(tokens) for tokens in contexts], fontsize=7)
    axis.set_xlabel("context, tokens")
    axis.grid(alpha=0.3)


def _by_model(results: dict[str, Any], key: str) -> dict[str, dict[str, dict[int, float]]]:
    """{model: {variant: {context: value}}}."""
    table: dict[str, dict[str, dict[int, float]]] = {}
    for row in results["rows"]:
        if key in row:
            table.setdefault(row["model"], {}).setdefault(row["variant"], {})[row["context"]] = row[key]
    return table


def decode(results: dict[str, Any], folder: Path, pyplot: Any) -> None:
    """Latency, speed-up and bytes against context."""
    for key, name, label, factor in (
        ("ms", "latency", "ms per token", 1.0),
        ("speedup_over_static_compiled", "speedup", "times StaticCache, compiled", 1.0),
        ("cache_bytes", "bytes", "GB of cache", 1e-9),
    ):
        table = _by_model(results, key)
        if not table:
            continue
        figure, axes = pyplot.subplots(1, len(table), figsize=(4 * len(table), 3.6), squeeze=False)
        for axis, (model, lines) in zip(axes[0], table.items(), strict=True):
            scaled = {name: {t: factor * value for t, value in line.items()} for name, line in lines.items()}
            _lines(axis, scaled, VARIANTS)
            axis.set_title(model, fontsize=9)
            axis.set_ylabel(label)
            axis.set_yscale("log" if key != "speedup_over_static_compiled" else "linear")
        axes[0][0].legend(fontsize=7)
        _finish(figure, results, folder / f"speed-{name}.png")


def kernel(results: dict[str, Any], folder: Path, pyplot: Any) -> None:
    """Each kernel's best time and its speed-up over BF16 SDPA, at batch 1."""
    lines: dict[str, dict[int, float]] = {}
    for row in results["rows"]:
        if row["batch"] == 1 and "us" in row:
            line = lines.setdefault(row["kernel"], {})
            line[row["tokens"]] = min(row["us"], line.get(row["tokens"], float("inf")))
    if not lines:
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    _lines(left, lines, KERNELS)
    left.set_ylabel("microseconds")
    left.set_yscale("log")
    left.legend(fontsize=6)
    base = lines.get("BF16 SDPA", {})
    ratios = {
        name: {tokens: base[tokens] / value for tokens, value in line.items() if tokens in base}
        for name, line in lines.items()
    }
    _lines(right, ratios, KERNELS)
    right.set_ylabel("times BF16 SDPA")
    _finish(figure, results, folder / "speed-kernel.png")


def main(folder: Annotated[Path, typer.Option(help="Where the JSON is and the plots go.")] = RESULTS) -> None:
    """Plot what has been measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, plot in (("decode", decode), ("kernel", kernel)):
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"speed-{name}*.json"))]
        if runs:
            rows = [row for run in runs for row in run["rows"]]
            command = "; ".join(dict.fromkeys(run["command"] for run in runs))
            plot({**runs[0], "command": command, "rows": rows}, folder, pyplot)


if __name__ == "__main__":
    typer.run(main)
