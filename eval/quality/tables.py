"""Markdown tables of measured quality, for docs/quality.md; `eval.tables` writes them there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
TASKS = {
    "single": "needle",
    "multikey": "one of four keys",
    "multivalue": "four values",
    "tracking": "variables",
    "quote": "quotation",
}


def results_files() -> list[Path]:
    """Everything that `eval.quality` has measured and that is kept."""
    return sorted(RESULTS.glob("quality-*.json"))


def quality(results: dict[str, Any]) -> str:
    """A row for each cache; KL and perplexity with their bounds, retrieval as right answers or share of score."""
    measured = list(dict.fromkeys((row["task"], row["length"]) for row in results["rows"]))
    header = ["cache", "bits"]
    for task, length in measured:
        names = ["KL", "perplexity"] if task == "kl" else [TASKS[task]]
        header += [f"{name}, {length:,}" for name in names]
    rows = {(row["cache"], row["task"], row["length"]): row for row in results["rows"]}
    lines = [header, ["---"] * len(header)]
    for cache, facts in results["caches"].items():
        if "skipped" not in facts:
            cells = [cell for task, length in measured for cell in figures(rows[cache, task, length])]
            lines.append([f"`{cache}`", f"{facts['bits_per_element']:g}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figures(row: dict[str, Any]) -> list[str]:
    """KL and perplexity, or the answers, of one measurement."""
    if row["task"] == "kl":
        kl, perplexity = row["kl"], row["perplexity"]
        bounds = f"{kl['mean']:.3f} ({kl['low']:.3f} to {kl['high']:.3f})" if kl["mean"] else "0"
        return [bounds, f"{perplexity['mean']:.2f}"]
    count = f"{row['right']} of {len(row['trials'])}"
    partial = row["task"] in ("multivalue", "tracking", "quote")
    return [f"{count} ({100 * row['score']['mean']:.0f} %)" if partial else count]


def setting(results: dict[str, Any]) -> str:
    """What was measured on, in a sentence."""
    plan = results["plan"]
    parts = [f"{results['model']} in {results['dtype']}"]
    if "kl" in plan["tasks"]:
        parts.append(f"{plan['sequences']} sequences of {results['text']}, positions {plan['first']:,} on")
    if len(plan["tasks"]) > 1 or "kl" not in plan["tasks"]:
        how = "an exact prefill" if plan["exact_prefill"] else "a quantised history throughout"
        parts.append(f"{plan['trials']} questions of a kind in {results['haystack']}, {how}")
    parts.append(f"recipes fitted to {results['calibration']}")
    return "; ".join(parts) + "."


def tried(rows: list[dict[str, Any]]) -> str:
    """What was tried, with the figures of the result file that it names, or its own.

    A row of `tried.json` has `what` and `verdict`; and `file`, `cache` and `length` of a result, or figures measured
    in another way: `kl`, `perplexity`, `needle` ("49 of 60") and `how`.
    """
    lines = [["what", "KL", "perplexity", "needle", "verdict", "measured"], ["---"] * 6]
    for row in rows:
        cells = _measured(row) if "file" in row else [str(row.get(key, "")) for key in ("kl", "perplexity", "needle")]
        where = f"[{row['file']}](../eval/results/{row['file']}.json)" if "file" in row else row["how"]
        lines.append([row["what"], *cells, row["verdict"], where])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def search_steps(results: dict[str, Any]) -> str:
    """How recipe `search` was found, axis by axis on the tuning texts, and what came of it on others."""
    lines = [["axis", "change", "KL, essays", "KL, wikitext", "needle loss", "objective", ""], ["---"] * 7]
    for row in results["rows"]:
        figures = [f"{row[name]:.4f}" for name in ("kl_essays", "kl_wikitext")] + [f"{row['needle_nll']:.2f}"]
        lines.append([row["axis"], row["what"], *figures, f"{row['loss']:.4f}", "kept" if row["kept"] else ""])
    tuning = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    lines = [["", "KL", "perplexity", "needle", "needle loss", "KL at 7,000"], ["---"] * 6]
    for row in results["scored"]:
        long = "" if row["kl_7000"] is None else f"{row['kl_7000']:.3f}"
        needle = f"{row['needle']} of {row['trials']}"
        lines.append(
            [row["what"], f"{row['kl']:.4f}", f"{row['perplexity']:.2f}", needle, str(row["needle_nll"]), long]
        )
    return tuning + "\n\nOn other texts:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _measured(row: dict[str, Any]) -> list[str]:
    results = json.loads((RESULTS / f"{row['file']}.json").read_text(encoding="utf-8"))
    found = {r["task"]: r for r in results["rows"] if (r["cache"], r["length"]) == (row["cache"], row["length"])}
    if not found:
        raise ValueError(f"tried.json: {row['file']} has no {row['cache']} at {row['length']} tokens.")
    kl = figures(found["kl"]) if "kl" in found else ["", ""]
    needle = figures(found["single"])[0] if "single" in found else ""
    return [re.sub(r" \(.*", "", kl[0]), kl[1], needle]


def plots(file: Path) -> str:
    """The pictures that lie beside a result file."""
    found = sorted(file.parent.glob(f"{file.stem}-*.png"))
    return "\n".join(f"![{path.stem}](../eval/results/{path.name})" for path in found)
