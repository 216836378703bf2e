"""Storing a chunk in Triton: rotate it, keep its windows, quantise what goes into the history.

`reference_write` has the same functions in plain torch.
"""

# ruff: noqa: SIM300 (constexpr parameters are capitals, which the rule takes for constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantization import SATURATION
from .launch import device_guard, processors
from .quantize import by_head, keep, packs, quantize_rows, sizes

ROWS = 64  # of a chunk that a program takes at a time


@triton.jit
def _split_rotation(rotation, d, D: tl.constexpr, QUARTER: tl.constexpr, PART: tl.constexpr):
    """Rows `d` of a rotation, its quarters of columns padded, in two parts (together 16 bits of bf16, 22 of fp16)."""
    Q: tl.constexpr = D // 4
    column = tl.arange(0, 4 * QUARTER)
    place = column // QUARTER * Q + column % QUARTER
    mask = (d < D)[:, None] & (column % QUARTER < Q)[None, :]
    r = tl.load(rotation + d[:, None] * D + place[None, :], mask=mask, other=0.0)
    high = r.to(PART)
    low = (r - high.to(tl.float32)).to(PART)
    return high, low


@triton.jit
def _product(x, high, low, acc, PART: tl.constexpr):
    if PART == tl.float32:
        return tl.dot(x, high, acc, input_precision="ieee")
    else:
        return tl.dot(x, low, tl.dot(x, high, acc))


@triton.jit
def _mean_product(mean, rotation, D: tl.constexpr, QUARTER: tl.constexpr):
    """`mean rotation`, [1, 4 QUARTER]."""
    column = tl.arange(0, 4 * QUARTER)
    place = column // QUARTER * (D // 4) + column % QUARTER
    total = tl.zeros([16, 4 * QUARTER], tl.float32)
    for first in range(0, D, 16):
        d = (first + tl.arange(0, 16))[:, None]
        mask = (d < D) & (column % QUARTER < D // 4)[None, :]
        r = tl.load(rotation + d * D + place[None, :], mask=mask, other=0.0)
        total += tl.load(mean + d, mask=d < D, other=0.0) * r
    return tl.sum(total, 0)[None, :]


@triton.jit
def _quarters(y, ROWS: tl.constexpr, QUARTER: tl.constexpr):
    """[ROWS, 4 QUARTER] as its four quarters: a renaming of registers."""
    left, right = tl.split(tl.permute(tl.reshape(y, [ROWS, 2, 2 * QUARTER]), [0, 2, 1]))
    y0, y1 = tl.split(tl.permute(tl.reshape(left, [ROWS, 2, QUARTER]), [0, 2, 1]))
    y2, y3 = tl.split(tl.permute(tl.reshape(right, [ROWS, 2, QUARTER]), [0, 2, 1]))
    return y0, y1, y2, y3


@triton.jit
def _store_window(
    h, sink, ring, token, real, sinks, window_start,
    RING: tl.constexpr, offset: tl.constexpr, D: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """A quarter of rows, or all four, into the sink, or the ring at slot `token % RING`: each row has one place."""
    Q: tl.constexpr = D // 4
    column = tl.arange(0, h.shape[1])
    place = tl.where(token < sinks, sink + token * D, ring + token % RING * D)[:, None]
    place += offset + (column // QUARTER * Q + column % QUARTER)[None, :]
    held = real & ((token < sinks) | (token >= window_start))
    tl.store(place, h, mask=held[:, None] & (column % QUARTER < Q)[None, :])


@triton.jit(do_not_specialize=["n", "start", "flushed", "index_start"])
def _write_kernel(
    x, mean, rotation, codes, affine, sink, ring,
    x_batch, x_head, x_token, mean_batch, mean_head, rotation_batch, rotation_head, codes_batch, codes_head,
    affine_batch, affine_head, sink_batch, sink_head, ring_batch, ring_head, n, start, flushed, index_start,
    D: tl.constexpr, SIZE: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
    INNER: tl.constexpr, LIMIT: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, WINDOWS: tl.constexpr,
    MEAN: tl.constexpr, ROTATED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Program block, head, row: tiles `block`, `block + blocks`, ... of the keys or values of one head."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    Q: tl.constexpr = D // 4
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x += row * x_batch + head * x_head
    mean += row * mean_batch + head * mean_head
    rotation += row * rotation_batch + head * rotation_head
    codes += row * codes_batch + head * codes_head
    affine += row * affine_batch + head * affine_head
    sink += row * sink_batch + head * sink_head
    ring += row * ring_batch + head * ring_head
    window_start = tl.maximum(start + n - RING, SINKS)
    column = tl.arange(0, QUARTER)
    d = tl.arange(0, SIZE)
    if ROTATED and WHOLE:
        high, low = _split_rotation(rotation, d, D, QUARTER, PART)
    if ROTATED and MEAN:
        centre = _mean_product(mean, rotation, D, QUARTER)
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0)):
        i = tile * ROWS + tl.arange(0, ROWS)
        real = i < n
        token = start + i
        place = x + i.to(tl.int64)[:, None] * x_token
        if ROTATED:
            y = tl.zeros([ROWS, 4 * QUARTER], tl.float32)
            if WHOLE:
                rows = tl.load(place + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0).to(PART)
                y = _product(rows, high, low, y, PART)
            else:
                for first in range(0, D, 16):
                    part = first + tl.arange(0, 16)
                    rows = tl.load(place + part[None, :], mask=real[:, None] & (part < D)[None, :], other=0.0).to(PART)
                    high, low = _split_rotation(rotation, part, D, QUARTER, PART)
                    y = _product(rows, high, low, y, PART)
            if MEAN:
                y -= centre
            h0, h1, h2, h3 = _quarters(y, ROWS, QUARTER)
        else:
            mask = real[:, None] & (column < Q)[None, :]
            h0 = tl.load(place + column[None, :], mask=mask, other=0.0)
            h1 = tl.load(place + Q + column[None, :], mask=mask, other=0.0)
            h2 = tl.load(place + 2 * Q + column[None, :], mask=mask, other=0.0)
            h3 = tl.load(place + 3 * Q + column[None, :], mask=mask, other=0.0)
            if MEAN:
                h0 = h0.to(tl.float32) - tl.load(mean + column, mask=column < Q, other=0.0)[None, :]
                h1 = h1.to(tl.float32) - tl.load(mean + Q + column, mask=column < Q, other=0.0)[None, :]
                h2 = h2.to(tl.float32) - tl.load(mean + 2 * Q + column, mask=column < Q, other=0.0)[None, :]
                h3 = h3.to(tl.float32) - tl.load(mean + 3 * Q + column, mask=column < Q, other=0.0)[None, :]
        first, last = start + tile * ROWS, start + tl.minimum(n, (tile + 1) * ROWS)
        if WINDOWS and (first < SINKS) | (last > window_start):
            if ROTATED:
                _store_window(y.to(DTYPE), sink, ring, token, real, SINKS, window_start, RING, 0, D, QUARTER)
            else:
                _store_window(h0.to(DTYPE), sink, ring, token, real, SINKS, window_start, RING, 0, D, QUARTER)
                _store_window(h1.to(DTYPE), sink, ring, token, real, SINKS, window_start, RING, Q, D, QUARTER)
                _store_window(h2.to(DTYPE), sink, ring, token, real, SINKS, window_start, RING, 2 * Q, D, QUARTER)
                _store_window(h3.to(DTYPE), sink, ring, token, real, SINKS, window_start, RING, 3 * Q, D, QUARTER)
        if (last > SINKS) & (first < SINKS + flushed):
            index = (token - SINKS + index_start).to(tl.int64)
            inside = real & (token >= SINKS) & (token < SINKS + flushed)
            quantize_rows(
                h0, h1, h2, h3, codes + index * Q, affine + index * (2 * GROUPS), inside,
                D, QUARTER, GROUPS, KEEP, INNER, LIMIT, DTYPE, PACKED,
            )  # fmt: skip


def _part_type(tensor: Tensor) -> tl.dtype:
    """In which dtype a chunk meets the parts of a rotation; the interpreter multiplies no bf16."""
    if not tensor.is_cuda:
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(tensor.dtype, tl.float32)


def write_chunk(
    keys: Tensor,
    values: Tensor,
    *,
    k_mean: Tensor | None,
    k_rotation: Tensor | None,
    v_rotation: Tensor | None,
    start: int,
    flushed: int,
    sink_keys: Tensor,
    sink_values: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
    k_codes: Tensor,
    k_affine: Tensor,
    v_codes: Tensor,
    v_affine: Tensor,
    k_clip: float,
    v_clip: float,
    scale_rule: str,
) -> None:
    """Rotate and store a chunk of rows of one length, in two launches: sink, ring and history.

    Tokens of the ring that leave the window because of this chunk have to be in the history before (`quantize_into`),
    since the ring is overwritten. Arithmetic is that of `quantization.quantize` on rows rounded to the model's dtype.

    Args:
        keys, values: [b, H, n, D], last dim contiguous; the chunk's tokens are `start` to `start + n`.
        k_mean: [H, D] or [b, H, D] float32, taken off the keys, or None.
        k_rotation, v_rotation: [D, D], [H, D, D] or [b, H, D, D] float32, or None (as they come).
        start: tokens of each row before the chunk.
        flushed: tokens of the history after it; those of the chunk among them are quantised.
        sink_keys, sink_values: [b, H, sink, D], written.
        recent_keys, recent_values: ring [b, H, R, D], written: the last R tokens that are no sinks.
        k_codes, v_codes: [b, H, C, D/4] uint8, written; batch and head may have any strides.
        k_affine, v_affine: [b, H, C, groups, 2] fp16 or bf16, written.
        k_clip, v_clip, scale_rule: as in `quantize`.
    """
    if not keys.numel():
        return
    flushed = min(flushed, k_codes.shape[2])
    for x, mean, rotation, codes, affine, windows, clip in (
        (keys, k_mean, k_rotation, k_codes, k_affine, (sink_keys, recent_keys), k_clip),
        (values, None, v_rotation, v_codes, v_affine, (sink_values, recent_values), v_clip),
    ):
        _write(x, mean, rotation, codes, affine, windows, start, flushed, 0, clip, scale_rule)


def quantize_into(
    rows: Tensor, codes: Tensor, affine: Tensor, start: int, *, clip: float = 1.0, scale_rule: str = "minmax"
) -> None:
    """Quantise ready rows [b, H, n, D] into places `start`, `start + 1`, ... of codes [b, H, C, D/4] and affine
    [b, H, C, groups, 2]."""
    if rows.numel():
        _write(rows, None, None, codes, affine, None, 0, codes.shape[2] - start, start, clip, scale_rule)


def _write(
    x: Tensor, mean: Tensor | None, rotation: Tensor | None, codes: Tensor, affine: Tensor,
    windows: tuple[Tensor, Tensor] | None, start: int, flushed: int, index_start: int, clip: float, scale_rule: str,
) -> None:  # fmt: skip
    """Launch for the keys or the values of a chunk; without windows, all of it goes to the history."""
    batch, heads, n, head_dim = x.shape
    sink, ring = windows or (x, x)
    sinks, slots = (sink.shape[2], ring.shape[2]) if windows else (0, 1)
    packed = packs(x)
    rows = min(ROWS, max(16, triton.next_power_of_2(n)))
    # Two programs that hold a rotation fit a processor, and each reads it once; without one, many balance the load.
    places = processors(x.device) * (2 if rotation is not None else 64)
    blocks = min(triton.cdiv(n, rows), triton.cdiv(places, batch * heads))
    narrow = packed and rotation is None and x.dtype != torch.float32 and head_dim <= 128 and affine.shape[3] == 1
    with device_guard(x):
        _write_kernel[(blocks, heads, batch)](
            x, x if mean is None else mean, x if rotation is None else rotation, codes, affine, sink, ring,
            *x.stride()[:3], *by_head(mean, 1), *by_head(rotation, 2), *codes.stride()[:2], *affine.stride()[:2],
            *sink.stride()[:2], *ring.stride()[:2], n, start, flushed, index_start,
            **sizes(head_dim), GROUPS=affine.shape[3], KEEP=keep(head_dim, clip),
            INNER=scale_rule == "inner_product", LIMIT=SATURATION[affine.dtype], SINKS=sinks, RING=slots,
            WINDOWS=windows is not None, MEAN=mean is not None, ROTATED=rotation is not None, WHOLE=head_dim <= 128,
            ROWS=rows, PACKED=packed, PART=_part_type(x), num_warps=rows // 16, num_stages=2,
            **({"maxnreg": 128} if narrow else {}),
        )  # fmt: skip
