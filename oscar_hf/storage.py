"""Where one layer keeps its tokens: sink and recent window as they come, the history between them packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .config import OscarConfig
from .kernels import quantize_into
from .quantization import Quantized

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


def grown(capacity: int, tokens: int) -> int:
    """The capacity that holds `tokens` tokens, where there was one of `capacity`."""
    if tokens <= capacity:
        return capacity
    if capacity:
        tokens += int(tokens * GROWTH)
    return -(-tokens // GRANULE) * GRANULE


class History:
    """Keys and values [B, H_kv, tokens, D] in the stored format, appended to and read in pieces.

    Buffers are head-major, [B, H_kv, capacity, ...]. They grow by a sixteenth, so slack stays under 7 % and a block,
    unless they were reserved at once (`Tiers` with `max_tokens`). With `config.bits == 16` rows are kept as they come.
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
        capacity = grown(self.capacity, tokens)
        if capacity == self.capacity:
            return
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
            if self.config.bits == 16:
                buffers[0][rows, :, start : start + states.shape[2]] = states
                continue
            for first in range(0, states.shape[2], READ_BLOCK):  # bounds what quantising holds besides
                block = states[:, :, first : first + READ_BLOCK]
                place = slice(start + first, start + first + block.shape[2])
                codes, affine = (buffer[rows, :, place] for buffer in buffers)
                quantize_into(block, codes, affine, clip=clip, scale_rule=self.config.scale_rule)

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
            buffers[:] = [select_rows(buffer, rows) for buffer in buffers]


@torch.inference_mode(False)
def select_rows(buffer: Tensor, rows: Tensor) -> Tensor:
    """Rows of a buffer: in place where the shape stays, so that addresses do."""
    selected = buffer.index_select(0, rows.to(buffer.device))
    return buffer.copy_(selected) if selected.shape == buffer.shape else selected


class Tiers:
    """All tokens of one layer, row by row; rows of a batch may have different lengths.

    Token `t` of a row is in the sink if `t < sink_tokens`. Later ones are in a ring, `t` at slot `t % ring`, which is
    `config.rollback` slots larger than the recent window; once `recent_tokens` newer ones have come, a token is in the
    history too, at `t - sink_tokens`, and is read there. The spare slots let a few tokens be taken back, or several
    come at once, and leave everything as if tokens had come one by one.

    Args:
        config: sizes of the tiers, and the format of the history.
        like: states [B, H_kv, _, D], whose dtype and device the windows take.
        max_tokens: allocate for so many tokens at once: buffers keep their addresses, and lengths are read from the
            device only when asked for. None: grow.
    """

    @torch.inference_mode(False)
    def __init__(self, config: OscarConfig, like: Tensor, max_tokens: int | None = None):
        batch, heads, _, size = like.shape
        self.config = config
        self.fixed = max_tokens is not None
        self._lengths, self._floors = [0] * batch, [0] * batch
        # the same for kernels: tokens of each row, and how many are in the history whatever the window says
        self.length_tensor, self.floor_tensor = (
            torch.zeros(batch, dtype=torch.int32, device=like.device) for _ in range(2)
        )
        self.seen_tensor = torch.zeros((), dtype=torch.int64, device=like.device)  # columns, for compiled code
        ring = config.recent_tokens + max(1, config.rollback)
        self.windows = {
            f"{part}_{name}": like.new_empty(batch, heads, tokens, size)
            for part, tokens in (("sink", config.sink_tokens), ("recent", ring))
            for name in ("keys", "values")
        }
        self.history = History(config, like)
        if max_tokens is not None:
            self.history.reserve(max(1, max_tokens - config.sink_tokens))

    @property
    def like(self) -> Tensor:
        """A tensor [B, H_kv, _, D] with the dtype and device of what is stored."""
        return self.windows["sink_keys"]

    @property
    def ring(self) -> int:
        """Slots of the recent window."""
        return self.windows["recent_keys"].shape[2]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self.length_tensor.tolist() if self.fixed else self._lengths

    @property
    def floors(self) -> list[int]:
        """Tokens of each row that are in the history whatever the window says: after a long rollback."""
        return self.floor_tensor.tolist() if self.fixed else self._floors

    @property
    def flushed(self) -> list[int]:
        """Tokens of each row that are in the history."""
        return [self.flushed_of(*pair) for pair in zip(self.lengths, self.floors, strict=True)]

    def flushed_of(self, length: int, floor: int) -> int:
        """Tokens in the history of a row that holds `length`, of which `floor` are there whatever the window says."""
        return max(floor, length - self.config.sink_tokens - self.config.recent_tokens, 0)

    @property
    def uniform(self) -> bool:
        """Whether all rows are equally long, so that they can be handled together."""
        return len(set(self.lengths)) == len(set(self.floors)) == 1

    def count(self, lengths: list[int], floors: list[int]) -> None:
        """Set the tokens of each row."""
        self._lengths, self._floors = lengths, floors
        for tensor, values in ((self.length_tensor, lengths), (self.floor_tensor, floors)):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))

    def stepped(self, tokens: int) -> None:
        """A kernel has stored `tokens` more in each row, and counted them on the device."""
        self._lengths = [length + tokens for length in self._lengths]

    def buffers(self) -> list[Tensor]:
        """Every tensor that holds keys and values."""
        return [*self.windows.values(), *self.history.buffers()]

    def tensors(self) -> list[Tensor]:
        """What a step needs: sink and ring, history, lengths and floors."""
        return [*self.buffers(), self.length_tensor, self.floor_tensor]

    @property
    def counters(self) -> list[Tensor]:
        """Lengths and floors [B] int32, and columns seen [] int64, on the device."""
        return [self.length_tensor, self.floor_tensor, self.seen_tensor]

    def clear(self) -> None:
        """Forget all tokens; buffers stay."""
        self.count([0] * len(self._lengths), [0] * len(self._floors))
        self.seen_tensor.zero_()

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more in each row."""
        self.history.reserve(self.flushed_of(max(self._lengths) + tokens, max(self._floors)))

    def leaving(self, row: int, tokens: int) -> range:
        """Which tokens leave the window of a row when `tokens` come."""
        sink, length, floor = self.config.sink_tokens, self.lengths[row], self.floors[row]
        return range(sink + self.flushed_of(length, floor), sink + self.flushed_of(length + tokens, floor))

    def append(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Store rotated keys and values [b, H_kv, n, D] of rows of one length, and flush what leaves their window."""
        sink, row = self.config.sink_tokens, rows.indices(len(self._lengths))[0]
        start = self.lengths[row]
        stop = start + keys.shape[2]
        leaving = self.leaving(row, keys.shape[2])
        if not self.fixed:
            self.history.reserve(leaving.stop - sink)
        if leaving:
            new = slice(max(0, leaving.start - start), max(0, leaving.stop - start))
            old = self.recent(rows, leaving.start, min(start, leaving.stop))
            leaving_keys = torch.cat([*(span.keys for span in old), keys[:, :, new]], 2)
            leaving_values = torch.cat([*(span.values for span in old), values[:, :, new]], 2)
            self.history.write(rows, leaving.start - sink, leaving_keys, leaving_values)
        first = max(start, sink, stop - self.ring)
        for name, states in (("keys", keys), ("values", values)):
            if start < sink:
                self.windows[f"sink_{name}"][rows, :, start : min(stop, sink)] = states[:, :, : sink - start]
            if first < stop:
                slots = torch.arange(first, stop, device=states.device) % self.ring
                self.windows[f"recent_{name}"][rows].index_copy_(2, slots, states[:, :, first - start :])
        self.stored(rows, stop)

    def stored(self, rows: slice, length: int) -> None:
        """These rows hold `length` tokens now."""
        lengths = list(self.lengths)
        for row in range(*rows.indices(len(lengths))):
            lengths[row] = length
        self.count(lengths, self.floors)

    def recent(self, rows: slice, start: int, stop: int) -> list[Span]:
        """Tokens `start` to `stop` of the ring, in order: at most two spans, which are views."""
        spans = []
        while start < stop:
            slot = start % self.ring
            count = min(stop - start, self.ring - slot)
            windows = (self.windows[f"recent_{name}"][rows, :, slot : slot + count] for name in ("keys", "values"))
            spans.append(Span(start, *windows))
            start += count
        return spans

    def exact(self, rows: slice) -> list[Span]:
        """What is read from sink and recent window, in order; views."""
        sink, row = self.config.sink_tokens, rows.indices(len(self._lengths))[0]
        length = self.lengths[row]
        stored = min(sink, length)
        spans = [Span(0, *(self.windows[f"sink_{name}"][rows, :, :stored] for name in ("keys", "values")))]
        spans += self.recent(rows, sink + self.flushed[row], length)
        return [span for span in spans if span.keys.shape[2]]

    def crop(self, counts: list[int]) -> None:
        """Forget the newest tokens of each row; what the ring no longer holds exactly stays quantised."""
        sink, lengths, floors = self.config.sink_tokens, [], []
        for length, floor, count in zip(self.lengths, self.floors, counts, strict=True):
            lengths.append(length - count)
            oldest = max(floor, length - self.ring - sink, 0)
            floors.append(min(oldest, max(0, length - count - sink)))
        self.count(lengths, floors)

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may come more than once."""
        self.history.select(rows)
        self.windows = {name: select_rows(window, rows) for name, window in self.windows.items()}
        order = rows.tolist()
        lengths, floors = [self.lengths[row] for row in order], [self.floors[row] for row in order]
        self.length_tensor, self.floor_tensor = (
            select_rows(tensor, rows) for tensor in (self.length_tensor, self.floor_tensor)
        )
        self.count(lengths, floors)
