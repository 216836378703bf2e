"""What calibration chose per layer, for people: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from .rotation import RotationSet


def choices(rotations: RotationSet) -> dict[int, dict[str, Any]]:
    """The report in a set's provenance, by layer; empty if nothing was chosen."""
    return {int(index): dict(row) for index, row in rotations.provenance.get("choice", {}).get("layers", {}).items()}


def table(rotations: RotationSet) -> Table:
    """One row a layer: what was chosen, and the error of attention outputs before and after."""
    made = Table(title="Chosen per layer: relative error of attention outputs on held-out tokens")
    for name in ("layer", "alpha", "k_clip", "v_clip", "scale_rule", "before", "after"):
        made.add_column(name, justify="left" if name == "scale_rule" else "right")
    for index, row in choices(rotations).items():
        shown = (f"{row[name]:g}" for name in ("alpha", "k_clip", "v_clip"))
        made.add_row(str(index), *shown, row["scale_rule"], f"{row['before']:.4f}", f"{row['after']:.4f}")
    return made


def draw(rotations: RotationSet, path: Path) -> None:
    """Errors of attention outputs by layer, before and after."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'oscar-hf[plot]'.") from None

    rows = choices(rotations)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, label, colour in (("before", "the recipe's settings", "tab:gray"), ("after", "chosen", "tab:blue")):
        axes.plot(
            list(rows), [row[name] for row in rows.values()], marker="o", markersize=3, label=label, color=colour
        )
    axes.set(xlabel="layer", ylabel="relative error of attention outputs", ylim=(0, None))
    axes.set_title(f"{rotations.provenance.get('model', 'model')}, recipe {rotations.config.recipe}")
    axes.legend()
    figure.savefig(path, dpi=150)
