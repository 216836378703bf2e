"""`oscar-hf eval`: what caches cost in accuracy, beside the unquantised model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .config import Recipe
    from .evaluation import Plan
    from .rotation import RotationSet

DEFAULT_CACHES = "naive,hadamard,oscar,balanced"

Caches = Annotated[
    str,
    typer.Option(
        metavar="A,B,...",
        help="Recipes, rotation folders, zoo names, hqq2, quanto4, ...; settings follow colons.",
    ),
]
Tasks = Annotated[
    str, typer.Option(metavar="A,B,...", help="kl, needle (= single), multikey, multivalue, tracking, quote, all.")
]
Lengths = Annotated[str, typer.Option(metavar="N,M,...", help="Tokens of a sequence or prompt.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences of each length, for KL.")]
First = Annotated[int, typer.Option(min=0, help="First position that counts, for KL.")]
Offset = Annotated[int, typer.Option(min=0, help="Tokens of the text to leave out, for KL.")]
Trials = Annotated[int, typer.Option(min=1, help="Questions of each task, at as many depths.")]
Batch = Annotated[int, typer.Option(min=1, help="Questions at once.")]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens of a forward.")]
Exact = Annotated[
    bool, typer.Option("--exact-prefill", help="The text of a question comes in one exact forward, as in generate.")
]
Seed = Annotated[int, typer.Option(help="Of keys, numbers, places and bootstrap resamples.")]
CalibrationTokens = Annotated[int, typer.Option(min=1, help="Tokens to fit recipes to.")]
Chat = Annotated[bool, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template for questions.")]


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a Hub id or a .gguf file.")],
    text: Annotated[
        str | None, typer.Option(metavar="CORPUS", help="Text for KL and perplexity: FILE, or as for calibrate.")
    ] = None,
    haystack: Annotated[
        str | None, typer.Option(metavar="CORPUS", help="Prose to hide needles in.", show_default="--text")
    ] = None,
    calibration: Annotated[str, typer.Option(metavar="CORPUS", help="Text that recipes are fitted to.")] = "pydoc",
    caches: Caches = DEFAULT_CACHES,
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
    dtype: Annotated[str, typer.Option(help="torch dtype of the model; auto: its checkpoint's.")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="cpu, cuda:1, auto, ...", show_default="the first GPU, else the CPU")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Measure what caches cost in accuracy, beside the unquantised model.

    KL and perplexity count positions that read a quantised history, as in decoding; needles are asked for at many
    depths. All figures come with bootstrap bounds of 95 %.

    Examples:

    - `oscar-hf eval ./model --text wikitext.txt --haystack essays.txt`

    - `oscar-hf eval ./model --text book.txt --caches balanced,balanced:group_size=32,my-rotations,hqq2 --tasks all`

    - `oscar-hf eval ./model --text book.txt --tasks kl --lengths 2048,8192 --json`
    """
    from transformers.utils import logging

    from .contenders import parse_contender
    from .corpus import read_corpus
    from .evaluation import evaluate, summary
    from .loading import display_name, load_model

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
    if text is None and ("kl" in plan.tasks or haystack is None):
        raise ValueError("Give a text to measure on: --text FILE, and for needles --haystack FILE, or the same text.")
    measured = "\n\n".join(read_corpus(text)) if text else ""
    hidden_in = "\n\n".join(read_corpus(haystack)) if haystack else measured
    logging.set_verbosity_error()
    if as_json:
        logging.disable_progress_bar()
    network, tokenizer = load_model(model, dtype=dtype, device_map=device_map)
    fit = fitter(network, tokenizer, calibration, calibration_tokens, progress=not as_json)
    contenders = [parse_contender(spec, fit) for spec in caches.split(",") if spec]
    results = evaluate(
        network, tokenizer, contenders, plan, text=measured, haystack=hidden_in, chat=chat, progress=not as_json
    )
    sources = {"text": text, "haystack": haystack or text, "calibration": calibration}
    results = {
        "model": display_name(model),
        "dtype": str(network.dtype).removeprefix("torch."),
        **{key: name and Path(name).name for key, name in sources.items()},
        **results,
    }
    if as_json:
        typer.echo(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        Console().print(summary(results, f"{results['model']}, {results['dtype']}"))


def make_plan(tasks: str, lengths: str, **settings: Any) -> Plan:
    """A `Plan` from what a person writes."""
    from .evaluation import Plan
    from .retrieval import TASKS

    names: list[str] = []
    for task in tasks.split(","):
        names += ["kl", *TASKS] if task == "all" else ["single" if task == "needle" else task]
    try:
        numbers = tuple(int(length) for length in lengths.split(","))
    except ValueError:
        raise ValueError(f"--lengths {lengths}: write whole numbers with commas between, such as 2048,4096.") from None
    return Plan(tuple(dict.fromkeys(names)), numbers, **settings)


def fitter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: str,
    tokens: int,
    progress: bool = True,
) -> Callable[[Recipe], RotationSet]:
    """A function that fits a recipe to a model on a corpus; a recipe is fitted once."""
    from .calibration import calibrate
    from .corpus import read_corpus

    fitted: dict[Recipe, RotationSet] = {}

    def fit(recipe: Recipe) -> RotationSet:
        if recipe not in fitted:
            name = Path(corpus).name
            texts = read_corpus(corpus)
            fitted[recipe] = calibrate(
                model, texts, tokenizer, tokens=tokens, recipe=recipe, progress=progress, corpus=name
            )
        return fitted[recipe]

    return fit
