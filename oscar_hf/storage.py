"""The quantised history of one layer: growing buffers of packed rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .config import OscarConfig
from .quantization import Quantized, dequantize, quantize

GROWTH = 1 / 16
GRANULE = 32
READ_BLOCK = 4096


class History:
    """Keys and values [B, H_kv, tokens, D] in the stored format, appended to and read in pieces.

    Buffers are head-major, [B, H_kv, capacity, ...], and grow by a sixteenth, so slack stays under 7 % and a block.
    With `config.bits == 16` the rows are kept as they come.
    """

    def __init__(self, config: OscarConfig, like: Tensor):
        batch, heads, _, head_dim = like.shape
        self.config = config
        if config.bits == 16:
            shapes = [((head_dim,), like.dtype)]
        else:
            affine = (config.groups(head_dim), 2)
            shapes = [((head_dim // 4,), torch.uint8), (affine, getattr(torch, config.scale_dtype))]
        self.keys, self.values = (
            [torch.empty(batch, heads, 0, *shape, dtype=dtype, device=like.device) for shape, dtype in shapes]
            for _ in range(2)
        )

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return self.keys[0].shape[2]

    def buffers(self) -> list[Tensor]:
        """Every tensor that is held."""
        return [*self.keys, *self.values]

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
        for states, buffers, clip in ((keys, self.keys, self.config.k_clip), (values, self.values, self.config.v_clip)):
            parts: tuple[Tensor, ...] = (states,)
            if self.config.bits == 2:
                parts = quantize(
                    states,
                    clip=clip,
                    group_size=self.config.group_size,
                    scale_rule=self.config.scale_rule,
                    scale_dtype=buffers[1].dtype,
                )
            for buffer, part in zip(buffers, parts, strict=True):
                buffer[rows, :, start : start + states.shape[2]] = part

    def read(self, rows: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tokens `start` to `stop` of some rows, unpacked to float32: keys and values [b, H_kv, stop - start, D]."""
        keys, values = (
            dequantize(Quantized(*parts)) if self.config.bits == 2 else parts[0].float()
            for parts in ([buffer[rows, :, start:stop] for buffer in held] for held in (self.keys, self.values))
        )
        return keys, values

    def blocks(self, rows: slice, stop: int, start: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
        """`read`, at most `READ_BLOCK` tokens at a time, each with its first token's index."""
        for first in range(start, stop, READ_BLOCK):
            yield first, *self.read(rows, first, min(first + READ_BLOCK, stop))

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may come more than once."""
        for buffers in (self.keys, self.values):
            buffers[:] = [buffer.index_select(0, rows.to(buffer.device)) for buffer in buffers]
