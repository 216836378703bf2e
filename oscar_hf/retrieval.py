"""Needles in a haystack, after RULER (arXiv 2404.06654): what a model finds again in a text that its cache holds."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ._compat import cache_argument, input_device
from .quality import token_ids

Task = Literal["single", "multikey", "multivalue", "tracking", "quote"]
TASKS: tuple[str, ...] = get_args(Task)
NEW_TOKENS = {"single": 16, "multikey": 16, "multivalue": 64, "tracking": 48, "quote": 32}

NEEDLES = 4  # keys of multikey, values of multivalue, hops of tracking
DIGITS = 7
QUOTED = 24  # tokens of a quotation's beginning that are shown, and as many to be continued
CITIES = (
    "Amsterdam/Athens/Auckland/Bangkok/Barcelona/Belgrade/Berlin/Boston/Brussels/Budapest/Cairo/Chicago/"
    "Copenhagen/Dallas/Delhi/Denver/Dublin/Edinburgh/Florence/Geneva/Hamburg/Havana/Helsinki/Houston/Istanbul/"
    "Jakarta/Kingston/Kyoto/Lagos/Lima/Lisbon/London/Madrid/Manila/Melbourne/Milan/Montreal/Moscow/Mumbai/Munich/"
    "Nairobi/Naples/Oslo/Oxford/Paris/Prague/Quebec/Rome/Santiago/Seattle/Seoul/Shanghai/Singapore/Stockholm/"
    "Sydney/Tokyo/Toronto/Venice/Vienna/Warsaw/Zurich"
)
PLACE = "\ue000"  # stands for the haystack in a prompt


@dataclass(frozen=True)
class Trial:
    """One question about one text.

    Args:
        task: of `TASKS`.
        length: tokens of the whole prompt.
        depth: where in the text the (first) needle is: 0 its beginning, 1 its end.
        ids: [length] the prompt, question and beginning of the answer included.
        question: tokens of the prompt that come after the text.
        expected: what the answer must contain; of a quotation, its continuation.
    """

    task: str
    length: int
    depth: float
    ids: Tensor
    question: int
    expected: tuple[str, ...]

    def score(self, answer: str) -> float:
        """From 0 to 1: whether the first number is the right one; the share of values found; of a quotation, the
        share that is right word for word up to the first error."""
        if self.task in ("single", "multikey"):
            number = re.search(r"\d+", answer)
            return float(number is not None and number.group() == self.expected[0])
        if self.task == "quote":
            words, said = self.expected[0].split(), answer.split()
            right = next((i for i, word in enumerate(words) if said[i : i + 1] != [word]), len(words))
            return right / len(words)
        found = set(re.findall(r"\w+", answer))
        return sum(value in found for value in self.expected) / len(self.expected)


@dataclass(frozen=True)
class _Question:
    """Sentences to hide, and what to ask."""

    needles: tuple[str, ...]
    question: str
    answer: str  # how the answer is made to begin
    expected: tuple[str, ...]


class Haystack:
    """A text cut into sentences, from which contexts of exactly so many tokens are made.

    Args:
        text: any prose; it begins again where it is too short.
        tokenizer: the model's.
        chat: put prompts into the tokenizer's chat template, if it has one.

    Raises:
        ValueError: a text of fewer than ten sentences.
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase, chat: bool = True):
        sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
        if len(sentences) < 10:
            raise ValueError(f"The haystack has {len(sentences)} sentences; ten at least are needed.")
        self.tokenizer, self.chat = tokenizer, chat and bool(tokenizer.chat_template)
        self.sentences = [token_ids(tokenizer, f" {sentence}") for sentence in sentences]

    def trials(self, task: str, length: int, count: int, seed: int = 0) -> list[Trial]:
        """`count` questions at evenly spaced depths, each in a part of the haystack of its own.

        Args:
            task: of `TASKS`.
            length: tokens of each prompt.
            count: of trials.
            seed: of keys, numbers and places; the same seed gives the same trials.

        Raises:
            ValueError: no such task, or a length that does not hold the question.
        """
        if task not in TASKS:
            raise ValueError(f"task={task!r} is not known; choose one of {', '.join(TASKS)}.")
        draw = random.Random(f"{seed} {task} {length}")
        return [self._trial(task, length, (index + 0.5) / count, draw) for index in range(count)]

    def _trial(self, task: str, length: int, depth: float, draw: random.Random) -> Trial:
        start = draw.randrange(len(self.sentences))
        if task == "quote":
            return self._quotation(length, depth, start)
        asked = _ASK[task](draw)
        before, after = self._frame(asked.question, asked.answer)
        needles = [token_ids(self.tokenizer, f" {needle}") for needle in asked.needles]
        room = self._room(length, len(before) + len(after) + sum(map(len, needles)))
        if task == "tracking":  # one hop after the other
            depths = [depth + (1 - depth) * hop / len(needles) for hop in range(len(needles))]
        else:
            depths = [depth, *(draw.random() for _ in needles[1:])]
        text = self._insert(self._fill(start, room), needles, depths)
        return Trial(task, length, depth, torch.tensor(before + text + after), len(after), asked.expected)

    def _quotation(self, length: int, depth: float, start: int) -> Trial:
        """The model is given the first words of a passage of the text, and must go on with the next."""
        place = "The following passage stands in the text, word for word:"
        before, after = self._frame("Repeat a passage of the text, word for word.", place)
        room = self._room(length, len(before) + len(after) + QUOTED)
        text = [token for sentence in self._fill(start, room) for token in sentence]
        first = min(int(depth * room), room - 2 * QUOTED)
        passage = text[first : first + 2 * QUOTED]
        expected = self.tokenizer.decode(passage[QUOTED:]).strip()
        ids = before + text + after + passage[:QUOTED]
        return Trial("quote", length, depth, torch.tensor(ids), len(after) + QUOTED, (expected,))

    def _frame(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokens of a prompt before and after its text."""
        request = f"Read the following text carefully.\n\n{PLACE}\n\n{question}"
        if self.chat:
            messages = [{"role": "user", "content": request}]
            request = str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        else:
            request += "\n\n"
        head, _, tail = (request + answer).partition(PLACE)
        return token_ids(self.tokenizer, head.rstrip(" "), prefix=not self.chat), token_ids(self.tokenizer, tail)

    def _room(self, length: int, taken: int) -> int:
        if length - taken < 4 * QUOTED:
            raise ValueError(f"A prompt of {length} tokens is too short: question and needles alone take {taken}.")
        return length - taken

    def _fill(self, start: int, room: int) -> list[list[int]]:
        """Sentences from `start` on, `room` tokens in all; the last is cut."""
        chosen: list[list[int]] = []
        while room > 0:
            sentence = self.sentences[(start + len(chosen)) % len(self.sentences)][:room]
            chosen.append(sentence)
            room -= len(sentence)
        return chosen

    @staticmethod
    def _insert(sentences: list[list[int]], needles: Sequence[list[int]], depths: Sequence[float]) -> list[int]:
        """All tokens, each needle before the sentence whose beginning is nearest to its depth."""
        starts = [0]
        for sentence in sentences[:-1]:
            starts.append(starts[-1] + len(sentence))
        total = starts[-1] + len(sentences[-1])
        places: dict[int, list[int]] = {}
        for needle, depth in zip(needles, depths, strict=True):
            distances = [abs(start - depth * total) for start in starts]
            places.setdefault(distances.index(min(distances)), []).extend(needle)
        return [t for i, sentence in enumerate(sentences) for t in [*places.get(i, []), *sentence]]


def _number(draw: random.Random) -> str:
    return str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def _ask_key(draw: random.Random, needles: int) -> _Question:
    keys = draw.sample(CITIES.split("/"), needles)
    numbers = [_number(draw) for _ in keys]
    hidden = tuple(f"The special magic number for {k} is {n}." for k, n in zip(keys, numbers, strict=True))
    about = f"the special magic number for {keys[0]} mentioned in the text"
    return _Question(hidden, f"What is {about}?", f"T{about[1:]} is", (numbers[0],))


def _ask_single(draw: random.Random) -> _Question:
    return _ask_key(draw, 1)


def _ask_multikey(draw: random.Random) -> _Question:
    return _ask_key(draw, NEEDLES)


def _ask_multivalue(draw: random.Random) -> _Question:
    key, numbers = draw.choice(CITIES.split("/")), [_number(draw) for _ in range(NEEDLES)]
    hidden = tuple(f"One of the special magic numbers for {key} is {number}." for number in numbers)
    about = f"all the special magic numbers for {key} mentioned in the text"
    return _Question(hidden, f"What are {about}?", f"A{about[1:]} are", tuple(numbers))


def _ask_tracking(draw: random.Random) -> _Question:
    names = ["".join(draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(NEEDLES + 1)]
    value = str(draw.randrange(10000, 100000))
    hidden = [f"VAR {names[0]} = {value}."]
    hidden += [f"VAR {name} = VAR {previous}." for previous, name in zip(names, names[1:], strict=False)]
    question = f"Find all variables that are assigned the value {value} in the text, directly or through others."
    answer = f"The variables that are assigned the value {value} are"
    return _Question(tuple(hidden), question, answer, tuple(names))


_ASK = {
    "single": _ask_single,
    "multikey": _ask_multikey,
    "multivalue": _ask_multivalue,
    "tracking": _ask_tracking,
}


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trials: Sequence[Trial],
    cache: Cache,
    chunk: int | None,
) -> list[str]:
    """Greedy answers to trials of one task and length, as one batch.

    Args:
        model: made ready for the cache.
        tokenizer: the model's.
        trials: prompts of equal length, so there is no padding.
        cache: empty.
        chunk: tokens of a forward. None: the text in one, the question in another.
    """
    name, device = cache_argument(model), input_device(model)
    ids = torch.stack([trial.ids for trial in trials]).to(device)
    if chunk is None:
        asked = max(trial.question for trial in trials)
        parts: Iterable[Tensor] = (ids[:, :-asked], ids[:, -asked:])
    else:
        parts = ids.split(chunk, 1)
    for part in parts:
        logits = model(part, logits_to_keep=1, **{name: cache}).logits[:, -1]
    ends = _end_tokens(model, tokenizer)
    said: list[Tensor] = []
    going = torch.ones(len(ids), dtype=torch.bool, device=device)
    for step in range(NEW_TOKENS[trials[0].task]):
        if step:
            logits = model(said[-1][:, None], logits_to_keep=1, **{name: cache}).logits[:, -1]
        said.append(logits.argmax(-1))
        going &= ~torch.isin(said[-1], ends.to(device))
        if not going.any():
            break
    rows = torch.stack(said, 1).cpu()
    return [tokenizer.decode(_until(row, ends), skip_special_tokens=True) for row in rows]


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    ends = model.generation_config.eos_token_id if model.generation_config else None
    listed = ends if isinstance(ends, list) else [ends]
    return torch.tensor([end for end in {*listed, tokenizer.eos_token_id} if end is not None], dtype=torch.long)


def _until(row: Tensor, ends: Tensor) -> Tensor:
    stops = torch.isin(row, ends).nonzero()
    return row[: int(stops[0])] if len(stops) else row


def batches(trials: Sequence[Trial], size: int) -> Iterator[Sequence[Trial]]:
    """Trials, `size` at a time."""
    for first in range(0, len(trials), size):
        yield trials[first : first + size]
