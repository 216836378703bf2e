"""One greedy generation, timed, with what its cache held in the end; and several of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from rich.status import Status
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ._compat import cache_argument
from .cache import OscarQuantizedCache
from .memory import tensors_in


@dataclass
class Run:
    """One generation and what it took.

    Args:
        text: the new tokens, decoded.
        prompt_tokens: tokens before them.
        new_tokens: how many they are.
        prefill_seconds: until the first new token.
        tokens_per_second: of the new tokens after the first; None if there is only one.
        cache_bytes: all that the cache holds in the end.
        bits_per_element: of all keys and values in the cache, windows and slack included.
        history_bits_per_element: of those that are quantised; None without quantisation.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    tokens_per_second: float | None
    cache_bytes: int
    bits_per_element: float
    history_bits_per_element: float | None


class Clock:
    """A streamer for `generate` that notes when each new token came."""

    def __init__(self, tell: Callable[[int], None] | None = None):
        self.start = perf_counter()
        self.times: list[float] = []
        self.tell = tell
        self.prompt_is_next = True  # generate hands over the prompt first

    def put(self, tokens: Tensor) -> None:
        if not self.prompt_is_next:
            self.times.append(perf_counter())
            if self.tell:
                self.tell(len(self.times))
        self.prompt_is_next = False

    def end(self) -> None:
        pass


def timed_generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, Tensor],
    cache: Cache,
    max_new_tokens: int,
    status: Status | None = None,
) -> Run:
    """Greedy generation into a cache, timed and measured.

    Args:
        model: patched if the cache is an OscarQuantizedCache.
        tokenizer: decodes what is new.
        inputs: input_ids [1, T] and attention_mask, on the model's device; the whole prompt if the cache holds some.
        cache: filled by this.
        max_new_tokens: upper limit.
        status: told how many tokens there are.
    """
    label = str(status.status) if status else ""
    clock = Clock((lambda count: status.update(f"{label}: {count} tokens")) if status else None)
    settings = {cache_argument(model): cache, "streamer": clock, "do_sample": False, "num_beams": 1}
    length = inputs["input_ids"].shape[1]
    ids = model.generate(**inputs, **settings, max_new_tokens=max_new_tokens)[0, length:]
    decoding = clock.times[-1] - clock.times[0]
    return Run(
        tokenizer.decode(ids, skip_special_tokens=True),
        length,
        len(ids),
        clock.times[0] - clock.start,
        (len(ids) - 1) / decoding if decoding else None,
        *cache_size(cache),
    )


def cache_size(cache: Cache) -> tuple[int, float, float | None]:
    """Bytes of a cache, bits per element of its keys and values, and of those in a quantised history."""
    if isinstance(cache, OscarQuantizedCache):
        memory = cache.memory()
        return memory.total, memory.bits, memory.history_bits or None
    storages = [t.untyped_storage() for layer in cache.layers for t in tensors_in(vars(layer))]
    states = tensors_in([[getattr(layer, "keys", None), getattr(layer, "values", None)] for layer in cache.layers])
    bits = 8 * sum(t.untyped_storage().nbytes() for t in states) / sum(t.numel() for t in states)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()), bits, None


def comparison(runs: Mapping[str, Run], with_text: bool = True) -> Table:
    """Runs side by side."""
    table = Table(show_lines=with_text)
    table.add_column()
    for label in runs:
        table.add_column(label, justify="left" if with_text else "right", overflow="fold")
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("prefill", lambda run: f"{run.prefill_seconds:.2f} s"),
        ("decode", lambda run: f"{run.tokens_per_second:.1f} tokens/s" if run.tokens_per_second else "-"),
        ("cache", lambda run: f"{run.cache_bytes:,} bytes"),
        ("bits per element", lambda run: f"{run.bits_per_element:.2f}"),
        (
            "of the history",
            lambda run: f"{run.history_bits_per_element:.2f}" if run.history_bits_per_element else "-",
        ),
    ]
    if with_text:
        rows.insert(0, ("text", lambda run: run.text.strip()))
    for label, show in rows:
        table.add_row(label, *(Text(show(run)) for run in runs.values()))  # Text: a model's "[/INST]" is no markup
    return table
