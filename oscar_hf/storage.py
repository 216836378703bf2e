"""Where one layer keeps its tokens: sink and recent window as they come, the history between them packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .config import OscarConfig
from .quantization import Quantized, quantize

GROWTH = 1 / 16
GRANULE = 32
READ_BLOCK = 4096


class Span(NamedTuple):
    """Keys and values [b, H_kv, n, D] of the tokens `start`, `start + 1`, ... of some rows."""

    start: int
    keys: Tensor
    values: Tensor

    @property
    def stop(self) -> int:
        return self.start + self.keys.shape[2]


class PackedSpan(NamedTuple):
    """The same in the stored format, of tokens `start` to `stop` of the history; views, not copies."""

    start: int
    stop: int
    keys: Tensor | Quantized
    values: Tensor | Quantized


class History:
    """Keys and values [B, H_kv, tokens, D] in the stored format, appended to and read in pieces.

    Buffers are head-major, [B, H_kv, capacity, ...], and grow by a sixteenth, so slack stays under 7 % and a block.
    With `config.bits == 16` the rows are kept as they come.
    """

    @torch.inference_mode(False)
    def __init__(self, config: OscarConfig, like: Tensor):
        batch, heads, _, head_dim = like.shape
        self.config = config
        if config.bits == 16:
            parts: list[tuple[tuple[int, ...], torch.dtype]] = [((head_dim,), like.dtype)]
        else:
            affine = (config.groups(head_dim), 2)
            parts = [((head_dim // 4,), torch.uint8), (affine, getattr(torch, config.scale_dtype))]
        self.keys, self.values = (
            [torch.empty(batch, heads, 0, *shape, dtype=dtype, device=like.device) for shape, dtype in parts]
            for _ in range(2)
        )

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return self.keys[0].shape[2]

    def buffers(self) -> list[Tensor]:
        """Every tensor that is held."""
        return [*self.keys, *self.values]

    @torch.inference_mode(False)  # a tensor made in inference mode could not be written to outside it
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all rows."""
        if tokens <= self.capacity:
            return
        if self.capacity:
            tokens += int(tokens * GROWTH)
        capacity = -(-tokens // GRANULE) * GRANULE
        for buffers in (self.keys, self.values):
            for index, old in enumerate(buffers):
                new = old.new_empty(*old.shape[:2], capacity, *old.shape[3:])
                new[:, :, : old.shape[2]] = old
                buffers[index] = new

    def write(self, rows: slice, start: int, keys: Tensor, values: Tensor) -> None:
        """Quantise keys and values [b, H_kv, n, D] of some rows into tokens `start`, `start + 1`, ..."""
        for states, buffers, clip in (
            (keys, self.keys, self.config.k_clip),
            (values, self.values, self.config.v_clip),
        ):
            for first in range(0, states.shape[2], READ_BLOCK):  # bounds what quantising holds besides
                block = states[:, :, first : first + READ_BLOCK]
                parts: tuple[Tensor, ...] = (block,)
                if self.config.bits == 2:
                    parts = quantize(
                        block,
                        clip=clip,
                        group_size=self.config.group_size,
                        scale_rule=self.config.scale_rule,
                        scale_dtype=buffers[1].dtype,
                    )
                place = slice(start + first, start + first + block.shape[2])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer[rows, :, place] = part

    def blocks(self, rows: slice, stop: int, start: int = 0) -> Iterator[PackedSpan]:
        """Tokens `start` to `stop` of some rows, at most `READ_BLOCK` at a time."""
        for first in range(start, stop, READ_BLOCK):
            last = min(first + READ_BLOCK, stop)
            keys, values = (
                Quantized(*parts) if self.config.bits == 2 else parts[0]
                for parts in ([buffer[rows, :, first:last] for buffer in held] for held in (self.keys, self.values))
            )
            yield PackedSpan(first, last, keys, values)

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may come more than once."""
        for buffers in (self.keys, self.values):
            buffers[:] = [_select(buffer, rows) for buffer in buffers]


@torch.inference_mode(False)
def _select(buffer: Tensor, rows: Tensor) -> Tensor:
    return buffer.index_select(0, rows.to(buffer.device))


class Tiers:
    """All tokens of one layer, row by row; rows of a batch may have different lengths.

    Token `t` of a row is in the sink if `t < sink_tokens`; else, once `recent_tokens` newer ones have come, in the
    history, at `t - sink_tokens`; else in the recent window, a ring with `t` at slot `t % recent_tokens`.
    """

    @torch.inference_mode(False)
    def __init__(self, config: OscarConfig, like: Tensor):
        batch, heads, _, size = like.shape
        self.config = config
        self.lengths = [0] * batch  # tokens of each row
        self.flushed = [0] * batch  # of which in the history
        self.windows = {
            f"{part}_{name}": like.new_empty(batch, heads, tokens, size)
            for part, tokens in (("sink", config.sink_tokens), ("recent", config.recent_tokens))
            for name in ("keys", "values")
        }
        self.history = History(config, like)

    @property
    def like(self) -> Tensor:
        """A tensor [B, H_kv, _, D] with the dtype and device of what is stored."""
        return self.windows["sink_keys"]

    @property
    def uniform(self) -> bool:
        """Whether all rows are equally long, so that they can be handled together."""
        return len(set(self.lengths)) == len(set(self.flushed)) == 1

    def buffers(self) -> list[Tensor]:
        """Every tensor that is held."""
        return [*self.windows.values(), *self.history.buffers()]

    def append(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [b, H_kv, n, D] of rows of one length, and flush what leaves their window."""
        sink, recent = self.config.sink_tokens, self.config.recent_tokens
        start, flushed = self.lengths[rows][0], self.flushed[rows][0]
        stop = start + keys.shape[2]
        leaving = range(sink + flushed, max(sink + flushed, stop - recent))
        self.history.reserve(flushed + len(leaving))
        if leaving:
            new = slice(max(0, leaving.start - start), max(0, leaving.stop - start))
            old = self.recent(rows, leaving.start, min(start, leaving.stop))
            pieces = (torch.cat([old.keys, keys[:, :, new]], 2), torch.cat([old.values, values[:, :, new]], 2))
            self.history.write(rows, flushed, *pieces)
        for name, states in (("keys", keys), ("values", values)):
            if start < sink:
                self.windows[f"sink_{name}"][rows, :, start : min(stop, sink)] = states[:, :, : sink - start]
            first = max(start, leaving.stop)
            if first < stop:
                slots = torch.arange(first, stop, device=states.device) % recent
                self.windows[f"recent_{name}"][rows].index_copy_(2, slots, states[:, :, first - start :])
        for row in range(*rows.indices(len(self.lengths))):
            self.lengths[row], self.flushed[row] = stop, flushed + len(leaving)

    def recent(self, rows: slice, start: int, stop: int) -> Span:
        """Tokens `start` to `stop` of the recent window, in order (a copy)."""
        keys, values = self.windows["recent_keys"][rows], self.windows["recent_values"][rows]
        if stop <= start:
            return Span(start, keys[:, :, :0], values[:, :, :0])
        slots = torch.arange(start, stop, device=keys.device) % self.config.recent_tokens
        return Span(start, keys.index_select(2, slots), values.index_select(2, slots))

    def exact(self, rows: slice, ordered: bool = True) -> list[Span]:
        """What sink and recent window hold; a full window that need not be in order is not copied."""
        sink, length, start = (
            self.config.sink_tokens,
            self.lengths[rows][0],
            self.config.sink_tokens + self.flushed[rows][0],
        )
        stored = min(sink, length)
        spans = [Span(0, *(self.windows[f"sink_{name}"][rows, :, :stored] for name in ("keys", "values")))]
        if not ordered and length - start == self.config.recent_tokens:
            spans.append(Span(start, self.windows["recent_keys"][rows], self.windows["recent_values"][rows]))
        else:
            spans.append(self.recent(rows, start, length))
        return [span for span in spans if span.keys.shape[2]]

    def crop(self, counts: list[int]) -> None:
        """Forget the newest tokens of each row; those that had left the window stay quantised."""
        self.lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        kept = [max(0, length - self.config.sink_tokens) for length in self.lengths]
        self.flushed = [min(pair) for pair in zip(self.flushed, kept, strict=True)]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may come more than once."""
        self.history.select(rows)
        self.windows = {name: _select(window, rows) for name, window in self.windows.items()}
        order = rows.tolist()
        self.lengths, self.flushed = [self.lengths[row] for row in order], [self.flushed[row] for row in order]
