"""Plots of measured quality: needles by depth and length, KL by length. Needs the extra `plot`.

python -m eval.quality.plots eval/results/quality.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

BINS = 10  # of depth


def by_depth(row: dict[str, Any]) -> list[float | None]:
    """Mean score of a row's trials in each tenth of the text."""
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for trial in row["trials"]:
        bins[min(BINS - 1, int(trial["depth"] * BINS))].append(trial["score"])
    return [sum(scores) / len(scores) if scores else None for scores in bins]


def heat_maps(results: dict[str, Any], task: str) -> Any:
    """A map for each cache: depth down, length across, share of right answers as colour."""
    rows = [row for row in results["rows"] if row["task"] == task]
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(caches), figsize=(1.3 + 1.7 * len(caches), 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, cache in zip(axes[0], caches, strict=True):
        found = sorted((row for row in rows if row["cache"] == cache), key=lambda row: row["length"])
        grid = [[float("nan") if value is None else value for value in by_depth(row)] for row in found]
        columns = list(map(list, zip(*grid, strict=True)))
        image = axis.imshow(columns, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", extent=(0, len(found), 1, 0))
        axis.set_xticks([i + 0.5 for i in range(len(found))], [f"{row['length']:,}" for row in found], fontsize=7)
        counts = ", ".join(f"{row['right']}/{len(row['trials'])}" for row in found)
        axis.set_title(f"{cache.replace(':', chr(10), 1)}\n{counts}", fontsize=7)
        axis.set_xlabel("tokens", fontsize=7)
    axes[0][0].set_ylabel("depth")
    figure.colorbar(image, ax=axes.ravel().tolist(), label=task)
    return figure


def intervals(results: dict[str, Any]) -> Any:
    """KL of each cache, with its bounds, by length."""
    rows = [row for row in results["rows"] if row["task"] == "kl" and row["kl"]["mean"]]
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    figure, axis = pyplot.subplots(figsize=(7, 1.2 + 0.4 * len(caches) * len(lengths)), layout="constrained")
    for at, length in enumerate(lengths):
        found = {row["cache"]: row["kl"] for row in rows if row["length"] == length}
        places = [index + 0.8 * at / len(lengths) for index in range(len(caches))]
        means = [found[cache]["mean"] for cache in caches]
        spread = [[abs(found[c][end] - found[c]["mean"]) for c in caches] for end in ("low", "high")]
        axis.errorbar(means, places, xerr=spread, fmt="o", capsize=2, label=f"{length:,} tokens")
    axis.set_yticks([index + 0.4 * (len(lengths) - 1) / len(lengths) for index in range(len(caches))], caches)
    axis.tick_params(labelsize=7)
    axis.margins(y=0.2)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.grid(alpha=0.3)
    axis.set_xlabel("KL to the unquantised model, nats")
    axis.legend(fontsize=7)
    return figure


def plot_results(path: Path) -> list[Path]:
    """Write every plot that a result file has the figures for, beside it; returns their paths."""
    results = json.loads(path.read_text(encoding="utf-8"))
    tasks = list(dict.fromkeys(row["task"] for row in results["rows"]))
    machine = results["machine"]
    where = machine["gpu"] or f"{machine['cpu_cores']} CPU cores"
    written = []
    for task in tasks:
        figure = intervals(results) if task == "kl" else heat_maps(results, task)
        caption = f"{results['model']}, {results['dtype']}, {where}, torch {machine['torch']}, {machine['date']}"
        figure.supxlabel(caption, fontsize=6)
        written.append(path.with_name(f"{path.stem}-{task}.png"))
        figure.savefig(written[-1], dpi=150)
        pyplot.close(figure)
    return written


def main(files: Annotated[list[Path], typer.Argument(help="Results of eval.quality.")]) -> None:
    """Plot what has been measured."""
    for file in files:
        for path in plot_results(file):
            print(path)


if __name__ == "__main__":
    typer.run(main)
