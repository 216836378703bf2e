"""`oscar-hf plan`: does it fit, at which context and batch, on which GPUs, and what is gained?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .planning import Footprint, Kind, Plan

ROWS = {
    "weights": "weights",
    "rotations": "rotations",
    "cache": "cache",
    "sink": "- first tokens",
    "recent": "- recent window",
    "history": "- history",
    "slack": "- room to grow",
    "other": "- other layers, counters",
    "prefill": "prompt, besides",
    "decode": "a step, besides",
    "total": "all at once",
}


def tokens(text: str | int) -> int:
    """`"131072"`, `"128K"` or `"1M"`."""
    word = str(text).strip().upper().replace("_", "").replace(",", "")
    factor = {"K": 1024, "M": 1024**2}.get(word[-1:], 1)
    digits = word[:-1] if factor > 1 else word
    if not digits.isdecimal():
        raise typer.BadParameter(f"{text!r} is no number of tokens; write 131072 or 128K.")
    return int(digits) * factor


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A config.json, a folder, a .gguf file or a Hub id.")],
    context: Annotated[
        int, typer.Option(parser=tokens, metavar="TOKENS", help="Of each prompt; 128K will do.")
    ] = 131072,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:N]",
            help="h200, h100, a100, l40s, 4090, ...; 48GiB@864 for another.",
            show_default="bytes alone",
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens after the prompt.")] = 256,
    chunk: Annotated[int, typer.Option(min=0, help="Tokens of the prompt in one forward; 0: all at once.")] = 4096,
    fixed: Annotated[bool, typer.Option("--fixed", help="Storage allocated at once (max_cache_len).")] = False,
    split: Annotated[
        str, typer.Option(metavar="auto|tensor|layers", help="How several GPUs share the model.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Of states and unquantised weights; auto: the configuration's.")] = "auto",
    weight_bytes: Annotated[
        int | None, typer.Option(min=1, help="What the weights take.", show_default="by the configuration")
    ] = None,
    sink_tokens: Annotated[int, typer.Option(min=0, help="First tokens kept exactly.")] = 64,
    recent_tokens: Annotated[int, typer.Option(min=0, help="Newest tokens kept exactly.")] = 256,
    group_size: Annotated[
        int | None, typer.Option(min=4, help="Channels a scale and min.", show_default="head_dim")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw memory against context (needs matplotlib).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Reckon, from the configuration alone, what a model and a context need, and what fits.

    Times are a roofline: what a step must read, at the memory's full bandwidth.

    Examples:

    - `oscar-hf plan Qwen/Qwen3-8B --context 128K --batch 32 --gpu h200`

    - `oscar-hf plan ./config.json --context 1M --gpu h100:4 --plot memory.png`

    - `oscar-hf plan Qwen/Qwen3-32B --gpu 48GiB@864:2 --json`
    """
    from transformers.utils import logging

    from .config import OscarConfig
    from .planning import plan as make

    logging.set_verbosity_error()
    config = OscarConfig("balanced", sink_tokens=sink_tokens, recent_tokens=recent_tokens, group_size=group_size)
    with Console(stderr=True).status(f"Looking at {model}"):
        made = make(
            model,
            context,
            batch,
            gpu=gpu,
            new_tokens=new_tokens,
            chunk=chunk or None,
            fixed=fixed,
            config=config,
            dtype=dtype,
            split=split,
            weight_bytes=weight_bytes,
        )
    if plot is not None:
        draw(made, plot)
    if as_json:
        typer.echo(json.dumps(made.to_dict(), indent=2))
        return
    console = Console(highlight=False, markup=False)
    console.print(table(made))
    for note in made.notes:
        console.print(note)


def size(count: int) -> str:
    """Bytes for people."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.{2 if name == 'GiB' else 1}f} {name}"
    return f"{count} B"


def table(made: Plan) -> Table:
    """The two caches side by side."""
    where = "one GPU" if made.gpu is None else f"{made.gpu.count} x {made.gpu.name}, each {made.gpu.gib:.0f} GiB"
    active = f", {made.active / 1e9:.1f} B active" if made.active < 0.8 * made.parameters else ""
    title = (
        f"{made.model} ({made.parameters / 1e9:.1f} B{active}, {made.dtype}), {made.batch} x {made.context:,} tokens "
        f"+ {made.new_tokens}, in chunks of {made.chunk:,}, on {where}"
    )
    grid = Table(title=title, title_justify="left")
    grid.add_column("")
    grid.add_column("StaticCache" if made.fixed else "DynamicCache", justify="right")
    grid.add_column("OSCAR", justify="right")
    both = (made.bf16, made.oscar)
    for name, label in ROWS.items():
        cells = [size(getattr(footprint, name)) if getattr(footprint, name) else "-" for footprint in both]
        if cells != ["-", "-"]:
            grid.add_row(label, *cells, end_section=name in ("rotations", "other", "decode"))
    if made.gpu is not None:
        fits = ["fits" if footprint.total <= made.gpu.usable else "does not fit" for footprint in both]
        grid.add_row(f"of {size(made.gpu.usable)} usable", *fits, end_section=True)
        grid.add_row(f"largest batch at {made.context:,}", *(_count(f.largest_batch) for f in both))
        grid.add_row(f"largest context at batch {made.batch}", *(_count(f.largest_context) for f in both))
        grid.add_row("ms per step, at least", *(_time(footprint) for footprint in both))
    return grid


def _count(number: int | None) -> str:
    return f"{number:,}" if number else "none"


def _time(footprint: Footprint) -> str:
    return "-" if footprint.milliseconds is None else f"{footprint.milliseconds:.2f}"


def draw(made: Plan, path: Path) -> None:
    """Memory of a GPU against context, both caches, as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'oscar-hf[plot]'.") from None

    limit = max(2 * made.context, *((f.largest_context or 0) for f in (made.oscar, made.bf16)))
    contexts = [max(1, round(limit * step / 48)) for step in range(1, 49)]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    stock = "StaticCache" if made.fixed else "DynamicCache"
    curves: tuple[tuple[Kind, str, str], ...] = (("bf16", stock, "tab:gray"), ("oscar", "OSCAR", "tab:blue"))
    for kind, label, colour in curves:
        totals = [made.footprint(kind, context=context).total / (1 << 30) for context in contexts]
        axes.plot([context / 1024 for context in contexts], totals, label=label, color=colour)
    axes.axhline(made.oscar.weights / (1 << 30), linestyle=":", color="black", linewidth=1, label="weights")
    if made.gpu is not None:
        axes.axhline(made.gpu.usable / (1 << 30), linestyle="--", color="tab:red", linewidth=1, label=made.gpu.name)
        axes.set_ylim(0, 1.5 * made.gpu.usable / (1 << 30))
    axes.set(xlabel="context, thousands (1,024) of tokens", ylabel="GiB on a GPU", xlim=(0, limit / 1024))
    axes.set_title(f"{Path(made.model).name}, batch {made.batch}")
    axes.legend()
    figure.savefig(path, dpi=150)
