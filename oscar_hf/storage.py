"""Where one layer keeps its tokens: sink and recent window as they come, the history between them packed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .config import OscarConfig
from .kernels import quantize_into, search_into
from .quantization import Quantized
from .search import Metric
from .sharing import Prefix

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
    def __init__(self, config: OscarConfig, like: Tensor, metric: Metric | None = None):
        batch, heads, _, head_dim = like.shape
        self.config = config
        self.metric = metric  # keys are searched in it
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

    def mapped(self, change: Callable[[Tensor], Tensor]) -> History:
        """The same of other buffers: `change` of each."""
        twin = copy.copy(self)
        twin.keys, twin.values = ([change(buffer) for buffer in held] for held in (self.keys, self.values))
        return twin

    @torch.inference_mode(False)
    def copied(self, stop: int, start: int = 0, before: list[Prefix] | None = None) -> History:
        """Tokens `start` to `stop` in buffers of their own, behind those of `before`."""
        twin, before = copy.copy(self), before or []
        shared = sum(prefix.tokens for prefix in before)
        room = -(-(shared + stop - start) // GRANULE) * GRANULE
        pieces = [prefix.states() for prefix in before]
        for part, name in enumerate(("keys", "values")):
            buffers = []
            for index, old in enumerate(getattr(self, name)):
                new, place = old.new_empty(*old.shape[:2], room, *old.shape[3:]), 0
                for piece in (*(states[part][index] for states in pieces), old[:, :, start:stop]):
                    new[:, :, place : place + piece.shape[2]] = piece
                    place += piece.shape[2]
                buffers.append(new)
            setattr(twin, name, buffers)
        return twin

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
                if states is keys and self.metric is not None:
                    metric, config = self.metric.rows(rows), self.config
                    search_into(
                        block, *metric, codes, affine, clip=clip, sweeps=config.k_search, stretch=config.k_stretch
                    )
                else:
                    quantize_into(block, codes, affine, clip=clip, scale_rule=self.config.scale_rule)

    def blocks(self, rows: slice, stop: int, start: int = 0) -> Iterator[PackedSpan]:
        """Tokens `start` to `stop` of some rows, at most `READ_BLOCK` at a time."""
        for first in range(start, stop, READ_BLOCK):
            last = min(first + READ_BLOCK, stop)
            parts = ([buffer[rows, :, first:last] for buffer in held] for held in (self.keys, self.values))
            yield PackedSpan(first, last, *map(self.packed, parts))

    def packed(self, parts: list[Tensor]) -> Tensor | Quantized:
        """Buffers of keys or of values as readers take them."""
        return Quantized(*parts) if self.config.bits == 2 else parts[0]


@torch.inference_mode(False)
def select_rows(buffer: Tensor, rows: Tensor, in_place: bool) -> Tensor:
    """Rows of a buffer; `in_place` where the shape stays, so that addresses do."""
    selected = buffer.index_select(0, rows.to(buffer.device))
    return buffer.copy_(selected) if in_place and selected.shape == buffer.shape else selected


def differences(like: Tensor, keys: Tensor) -> list[str]:
    """How keys [B, H_kv, n, D] differ from those held, but for their number."""
    expected, given = ((*s.shape[:2], s.shape[3], s.dtype, s.device) for s in (like, keys))
    names = ("batch size", "KV heads", "head_dim", "dtype", "device")
    return [f"{n} {g} instead of {e}" for n, g, e in zip(names, given, expected, strict=True) if g != e]


class Tiers:
    """All tokens of one layer, row by row; rows of a batch may have different lengths.

    Token `t` of a row is in the sink if `t < sink_tokens`. Later ones are in a ring, `t` at slot `t % ring`, which is
    `config.rollback` slots larger than the recent window; once `recent_tokens` newer ones have come, a token is in the
    history too, at `t - sink_tokens`, and is read there. The spare slots let a few tokens be taken back, or several
    come at once, and leave everything as if tokens had come one by one.

    After `fork`, the first tokens of the history are in `prefixes`, and everything else is as if those had never come:
    lengths, floors and places do not count them. They are a multiple of `ring`, so that slots stay the same.

    Args:
        config: sizes of the tiers, and the format of the history.
        like: states [B, H_kv, _, D], whose dtype and device the windows take.
        max_tokens: allocate for so many tokens at once: buffers keep their addresses, and lengths are read from the
            device only when asked for. None: grow.
        metric: what errors of keys cost, where `config.searches`.
    """

    @torch.inference_mode(False)
    def __init__(self, config: OscarConfig, like: Tensor, max_tokens: int | None = None, metric: Metric | None = None):
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
        self.history = History(config, like, metric)
        self.prefixes: list[Prefix] = []
        self.borrowed = False  # windows and history are another's too, of one row that all rows repeat
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
    def prefix_tokens(self) -> int:
        """Tokens of each row that are in `prefixes`."""
        return sum(prefix.tokens for prefix in self.prefixes)

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
        """Every tensor that holds keys and values, but for those of `prefixes`."""
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
        self.make_room(self.flushed_of(max(self._lengths) + tokens, max(self._floors)))

    def make_room(self, flushed: int) -> None:
        """See to there being buffers that may be written to, with `flushed` tokens in the history."""
        if self.fixed:
            return
        if self.borrowed:
            self._own(self.history.copied(max(self.flushed)))
        self.history.reserve(flushed)

    @torch.inference_mode(False)
    def _own(self, history: History) -> None:
        """Go on with this history, and with windows of one's own."""
        self.history = history
        if self.borrowed:
            contiguous = torch.contiguous_format
            self.windows = {name: window.clone(memory_format=contiguous) for name, window in self.windows.items()}
        self.borrowed = False

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
        self.make_room(leaving.stop - sink)
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

    def hold_exactly(self, config: OscarConfig, keys: dict[str, Tensor]) -> None:
        """Go on with 16 bits and with other keys in the windows; nothing has been quantised yet."""
        for name, window in keys.items():
            self.windows[name].copy_(window)
        self.config, self.history = config, History(config, self.like)

    def shared_blocks(self, rows: slice) -> Iterator[PackedSpan]:
        """What is in `prefixes`, for some rows; [1, ...] where these read the same."""
        past = 0
        for whole in self.prefixes:
            prefix = whole.select(rows)
            for first in range(0, prefix.tokens, READ_BLOCK):
                block = prefix.part(first, min(first + READ_BLOCK, prefix.tokens))
                start = past + first
                yield PackedSpan(start, start + block.tokens, *map(self.history.packed, block.states()))
            past += prefix.tokens

    def fork(self, copies: int) -> Tiers:
        """`copies` of each row, side by side, in tiers that share with these all that either holds now.

        What the ring no longer holds stays shared for good. The rest is copied by whoever is first to write to it, or
        at once if there are several rows.
        """
        self._share()
        batch = len(self._lengths)
        twin = copy.copy(self)
        twin.seen_tensor = self.seen_tensor.clone()
        self.borrowed = twin.borrowed = self.borrowed or batch == 1
        twin.select(torch.arange(batch).repeat_interleave(copies))
        return twin

    def _share(self) -> None:
        """Move what the ring no longer holds from the history to `prefixes`."""
        sink = self.config.sink_tokens
        oldest = min(max(f, n - self.ring - sink, 0) for n, f in zip(self.lengths, self.floors, strict=True))
        tokens = oldest // self.ring * self.ring
        if not tokens:
            return
        batch = len(self._lengths)
        held = self.history.mapped(lambda buffer: buffer[:1]) if self.borrowed else self.history
        keys, values = (tuple(buffer[:, :, :tokens] for buffer in buffers) for buffers in (held.keys, held.values))
        self.prefixes = [*self.prefixes, Prefix(keys, values, (0,) * batch if self.borrowed else tuple(range(batch)))]
        rest = held.copied(max(self.flushed), tokens)
        self.history = rest.mapped(lambda buffer: buffer.expand(batch, *buffer.shape[1:]))
        self.count([n - tokens for n in self.lengths], [max(0, f - tokens) for f in self.floors])

    def _take_back(self, tokens: int) -> None:
        """Have the last `tokens` tokens of `prefixes`, or a few more, in a history of one's own."""
        tokens = left = min(-(-tokens // self.ring) * self.ring, self.prefix_tokens)
        kept = list(self.prefixes)
        taken: list[Prefix] = []
        while left:
            last = kept.pop()
            split = max(0, last.tokens - left)
            taken.insert(0, last.part(split, last.tokens))
            left -= taken[0].tokens
            if split:
                kept.append(last.part(0, split))
        self._own(self.history.copied(max(self.flushed), before=taken))
        self.prefixes = kept
        self.count([n + tokens for n in self.lengths], [f + tokens for f in self.floors])

    def whole(self) -> Tiers:
        """The same tokens in tiers that share nothing of their history."""
        if not self.prefixes:
            return self
        twin = copy.copy(self)
        twin.length_tensor, twin.floor_tensor = self.length_tensor.clone(), self.floor_tensor.clone()
        twin._take_back(self.prefix_tokens)
        return twin

    def crop(self, counts: list[int]) -> None:
        """Forget the newest tokens of each row; what the ring no longer holds exactly stays quantised."""
        shortest = min(n - count for n, count in zip(self.lengths, counts, strict=True)) - self.config.sink_tokens
        if shortest < 0 and self.prefixes:
            self._take_back(-shortest)
        sink, lengths, floors = self.config.sink_tokens, [], []
        for length, floor, count in zip(self.lengths, self.floors, counts, strict=True):
            lengths.append(length - count)
            oldest = max(floor, length - self.ring - sink, 0)
            floors.append(min(oldest, max(0, length - count - sink)))
        self.count(lengths, floors)

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may come more than once."""
        order = rows.tolist()
        lengths, floors = [self.lengths[row] for row in order], [self.floors[row] for row in order]

        def chosen(buffer: Tensor) -> Tensor:
            if self.borrowed:
                return buffer[:1].expand(len(order), *buffer.shape[1:])
            return select_rows(buffer, rows, in_place=self.fixed)

        self.windows = {name: chosen(window) for name, window in self.windows.items()}
        self.history = self.history.mapped(chosen)
        self.prefixes = [prefix.select(order) for prefix in self.prefixes]
        self.length_tensor, self.floor_tensor = (
            select_rows(tensor, rows, in_place=self.fixed) for tensor in (self.length_tensor, self.floor_tensor)
        )
        self.count(lengths, floors)
