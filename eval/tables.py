"""Write the tables of README.md and docs/ from the JSON in eval/results: `python -m eval.tables`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.quality import tables as quality_tables
from eval.speed import tables as speed_tables

ROOT = Path(__file__).parents[1]


def load(name: str) -> dict[str, Any]:
    """One result file."""
    return json.loads((ROOT / "eval/results" / f"{name}.json").read_text(encoding="utf-8"))


def source(results: dict[str, Any]) -> str:
    """Machine, versions and command, in a line."""
    machine, command = results["machine"], re.sub(r" --out \S+", "", results["command"])
    where = machine["gpu"] or f"{machine['cpu_cores']} CPU cores"
    return f"{where}, torch {machine['torch']}, transformers {machine['transformers']}, {machine['date']}: `{command}`"


def reproduce() -> str:
    """Quality by recipe at two lengths."""
    short, long = load("reproduce-2048"), load("reproduce-4096")
    lines = ["| recipe | KL at 2,048 | perplexity | KL at 4,096 | perplexity |", "|---|---|---|---|---|"]
    perplexities = (f"{results['unquantised_perplexity']:.2f}" for results in (short, long))
    lines.append("| unquantised | 0 | {} | 0 | {} |".format(*perplexities))
    for one, other in zip(short["rows"], long["rows"], strict=True):
        figures = (f"{row['kl']:.3f} | {row['perplexity']:.2f}" for row in (one, other))
        lines.append(f"| {one['recipe']} | {' | '.join(figures)} |")
    return "\n".join([*lines, "", source(short) + " (and `--tokens 4096`)."])


def decode() -> str:
    """Time per token and bytes."""
    results = load("decode")
    seconds, memory = results["seconds_per_token"], results["memory"]
    bits = 32 if results["dtype"] == "float32" else 16
    return "\n".join(
        [
            f"| {results['model']}, {results['context']:,} tokens, {results['dtype']} "
            "| ms per token | MB | bits per element |",
            "|---|---|---|---|",
            f"| `DynamicCache` | {1e3 * seconds['DynamicCache']:.0f} | {memory['dense'] / 1e6:.1f} | {bits} |",
            f"| `OscarQuantizedCache` | {1e3 * seconds['OSCAR']:.0f} | {memory['total'] / 1e6:.1f} "
            f"| {memory['bits']:.2f} (history {memory['history_bits']:.2f}) |",
            "",
            source(results) + ".",
        ]
    )


def facts() -> str:
    """Answers right, by recipe, of the demo's ten facts."""
    sets = [load("facts-balanced"), load("facts-oscar")]
    count = len(sets[0]["facts"])
    lines = ["| cache | right |", "|---|---|", f"| unquantised | {sets[0]['right']['unquantised']} of {count} |"]
    lines += [f"| 2 bits, `{results['recipe']}` | {results['right']['OSCAR']} of {count} |" for results in sets]
    other = (
        "the `oscar` row with `--rotations oscar --no-unquantised`, a set fitted with `fit_layer` to the statistics "
        "that `eval.reproduce` gathers, 24,576 tokens of essays_calibration.txt"
    )
    return "\n".join([*lines, "", f"{source(sets[0])}; {other}."])


def plan() -> str:
    """What a plan said and what was allocated, at most, in one shape."""
    results = load("scale-plan")
    lines = ["| cache | rows x tokens | | planned, GB | measured, GB | |", "|---|---|---|---|---|---|"]
    for row in (row for row in results["rows"] if row["part"] == "cache"):
        for name, what in (("prefill", f"prefill by {results['chunk']:,}"), ("decode", "decode")):
            figures = [f"{value / 1e9:.2f}" for value in (row["planned"][name], row[f"{name}_peak"])]
            figures.append(f"{row[f'{name}_error']:+.1%}")
            shape = f"{row['batch']} x {row['context']:,}"
            lines.append(f"| {row['kind']} | {shape} | {what} | {' | '.join(figures)} |")
    return "\n".join([*lines, "", source(results) + "."])


def speed(make: Callable[[dict[str, Any]], str], *parts: str) -> Callable[[], str]:
    """A table of `eval.speed` with its sources; of what several files measured, the last one's figure stands."""

    def table() -> str:
        runs = [load(f"speed-{part}") for part in parts]
        results = {**runs[0], "rows": [row for run in runs for row in run["rows"]]}
        sources = [source(runs[0]), *(source(run).split(": ", 1)[1] for run in runs[1:])]
        return f"{make(results)}\n\n{'; '.join(sources)}."

    return table


TABLES = {
    "reproduce": reproduce,
    "facts": facts,
    "decode": decode,
    "speed-kernel": speed(speed_tables.kernel, "kernel"),
    "speed-decode": speed(speed_tables.decode, "decode-8b", "decode-tuned", "decode-tuned-32k"),
    "speed-throughput": speed(speed_tables.throughput, "throughput"),
    "speed-prefill": speed(speed_tables.prefill, "prefill"),
    "plan": plan,
}


def quality() -> str:
    """All that `eval.quality` has measured, file by file."""
    parts = []
    for path in quality_tables.results_files():
        results = load(path.stem)
        table, setting = quality_tables.quality(results), quality_tables.setting(results)
        plots = quality_tables.plots(path)
        heading = f"### {results['model']}: {path.stem.removeprefix('quality-')}"
        parts += [heading, setting, table, f"{source(results)}.", *([plots] if plots else [])]
    return "\n\n".join(parts)


def tried() -> str:
    """What helped and what did not."""
    return quality_tables.tried(load("tried")["rows"])


def search() -> str:
    """How recipe `search` was found."""
    return quality_tables.search_steps(load("search-steps"))


DOCUMENTS = {"README.md": TABLES, "docs/quality.md": {"quality": quality, "tried": tried, "search": search}}


def render(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """A document with every table between its markers made anew."""
    for name, make in tables.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, body=make(): f"{match[1]}{body}\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"The document has {count} places for the table {name!r}, expected one.")
    return text


if __name__ == "__main__":
    for document, tables in DOCUMENTS.items():
        path = ROOT / document
        path.write_text(render(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
