"""Quality of caches on a real model: KL, perplexity and retrieval, to JSON, a table and plots.

    python -m eval.quality --model DIR --texts DIR --recipes naive,hadamard,oscar,balanced --tasks kl,needle

The folder of texts has wikitext2_test.txt (KL and perplexity), essays_haystack.txt (needles) and
essays_calibration.txt (recipes are fitted to it). Nothing else is read, so it runs without a network.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from transformers.utils import logging

from eval.quality.models import load
from eval.record import save_results
from oscar_hf.cli_eval import (
    DEFAULT_CACHES,
    Batch,
    CalibrationTokens,
    Chat,
    Chunk,
    Exact,
    First,
    Lengths,
    Offset,
    Seed,
    Sequences,
    Tasks,
    Trials,
    fitter,
    make_plan,
)
from oscar_hf.contenders import parse_contender
from oscar_hf.evaluation import evaluate, summary


def main(
    model: Annotated[
        str, typer.Option(help="smollm2 or gemma3-270m (installed packages), a folder with a GGUF, or a model.")
    ] = "smollm2",
    texts: Annotated[Path, typer.Option(help="Folder of the texts.")] = Path("../shared/data/text"),
    recipes: Annotated[
        str, typer.Option(metavar="A,B,...", help="As --caches of `oscar-hf eval`: recipes, folders, hqq2, ...")
    ] = DEFAULT_CACHES,
    tasks: Tasks = "kl,needle",
    lengths: Lengths = "4096",
    sequences: Sequences = 2,
    first: First = 1024,
    offset: Offset = 0,
    trials: Trials = 60,
    batch: Batch = 10,
    chunk: Chunk = 1024,
    exact_prefill: Exact = False,
    calibration_tokens: CalibrationTokens = 24_576,
    seed: Seed = 0,
    chat: Chat = True,
    dtype: str = "float32",
    text: Annotated[str, typer.Option(help="File in the folder, for KL.")] = "wikitext2_test.txt",
    haystack: Annotated[str, typer.Option(help="File in the folder, for needles.")] = "essays_haystack.txt",
    calibration: Annotated[str, typer.Option(help="File in the folder, for fitting.")] = "essays_calibration.txt",
    out: Annotated[Path, typer.Option(help="JSON file for the results.")] = Path("eval/results/quality.json"),
    plot: Annotated[bool, typer.Option(help="Plots beside the JSON; needs the extra `plot`.")] = True,
) -> None:
    """Measure every cache on one model."""
    logging.set_verbosity_error()
    plan = make_plan(
        tasks,
        lengths,
        sequences=sequences,
        first=first,
        offset=offset,
        trials=trials,
        batch=batch,
        chunk=chunk,
        exact_prefill=exact_prefill,
        seed=seed,
    )
    started = time.perf_counter()
    network, tokenizer, label = load(model, dtype)
    fit = fitter(network, tokenizer, str(texts / calibration), calibration_tokens)
    contenders = [parse_contender(spec, fit) for spec in recipes.split(",") if spec]
    measured, hidden_in = ((texts / name).read_text(encoding="utf-8") for name in (text, haystack))
    results = evaluate(network, tokenizer, contenders, plan, text=measured, haystack=hidden_in, chat=chat)
    results = {
        "model": label,
        "dtype": dtype,
        "text": text,
        "haystack": haystack,
        "calibration": f"{calibration}, {calibration_tokens} tokens",
        "seconds": time.perf_counter() - started,
        **results,
    }
    save_results(out, results)
    console = Console(width=200 if not Console().is_terminal else None)
    console.print(summary(results, f"{label}, {dtype}"))
    if plot:
        try:
            from eval.quality.plots import plot_results
        except ImportError:
            console.print("No plots: pip install matplotlib")
            return
        for path in plot_results(out):
            console.print(str(path))


if __name__ == "__main__":
    typer.run(main)
