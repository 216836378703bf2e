"""Choosing the codes of keys by the error they make in logits, in Triton: what `search` in plain torch defines.

A row's codes start from error feedback and are improved by coordinate descent in the metric. One channel after the
other: each step takes a channel out of every row of the tile, and a row of the metric from the cache.
"""

# ruff: noqa: SIM300 (constexpr parameters are capitals, which the rule takes for constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantization import SATURATION
from .launch import device_guard
from .quantize import by_head, keep, sizes

ROWS = 4  # of a program, which is one warp: a channel is taken out of rows without a barrier
BITS = {torch.bfloat16: 18, torch.float16: 18, torch.float32: 31}  # of a float32 that such a value, or a limit, uses


@triton.jit
def _channel(x, here):
    """The channel where `here` [1, SIZE] is true, of every row: [rows, 1]."""
    return tl.sum(tl.where(here, x, 0.0), 1)[:, None]


@triton.jit
def _threshold(x, KEEP: tl.constexpr, BITS: tl.constexpr):
    """The KEEP-th largest |x| of each row [rows, SIZE], by bisection on the BITS below the sign: [rows]."""
    pattern = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    found = tl.zeros([x.shape[0]], tl.int32)
    step = 1 << 30
    for _ in range(BITS):
        level = found + step
        step = step >> 1
        count = tl.sum((pattern >= level[:, None]).to(tl.int32), 1)
        found = tl.where(count >= KEEP, level, found)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _code(value):
    return tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 3.0)


@triton.jit(do_not_specialize=["n", "start", "capacity"])
def _search_kernel(
    rows, metric, factor, codes, affine, lengths, floors,
    row_batch, row_head, row_token, metric_batch, metric_head, codes_batch, codes_head, affine_batch, affine_head,
    n, start, capacity, stretch,
    D: tl.constexpr, SIZE: tl.constexpr, QUARTER: tl.constexpr, KEEP: tl.constexpr, SWEEPS: tl.constexpr,
    LIMIT: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, SINKS: tl.constexpr, RECENT: tl.constexpr,
    RING: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program block, head, batch row: ROWS rows. A step takes those that leave the ring, as `append` counts them."""
    Q: tl.constexpr = D // 4
    COLUMNS: tl.constexpr = 4 * QUARTER
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if STEP:
        length, floor = tl.load(lengths + batch), tl.load(floors + batch)
        first = tl.maximum(floor, tl.maximum(length - SINKS - RECENT, 0))
        last = tl.maximum(floor, tl.maximum(length + n - SINKS - RECENT, 0))
        index = first + i
        inside = (index < last) & (index < capacity)
        token = (SINKS + index) % RING
        busy = first + tl.program_id(0) * ROWS < last
    else:
        index = start + i
        inside = (i < n) & (index < capacity)
        token = i
        busy = True
    if busy:
        column = tl.arange(0, COLUMNS)
        real = column % QUARTER < Q
        channel = tl.where(real, column // QUARTER * Q + column % QUARTER, -1)[None, :]
        place = tl.where(real, column // QUARTER * Q + column % QUARTER, 0)
        metric += batch * metric_batch + head * metric_head
        factor += batch * metric_batch + head * metric_head
        rows += batch * row_batch + head * row_head
        source = rows + token.to(tl.int64)[:, None] * row_token
        y = tl.load(source + place[None, :], mask=inside[:, None] & real[None, :], other=0.0).to(tl.float32)
        y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)

        # the range, as without a search
        bound = tl.full([ROWS], LIMIT, tl.float32)
        if KEEP > 0:
            bound = tl.minimum(bound, _threshold(y, KEEP, BITS))
        largest = tl.max(tl.where(real[None, :], y, -float("inf")), 1)
        smallest = tl.min(tl.where(real[None, :], y, float("inf")), 1)
        largest = tl.minimum(tl.maximum(largest, -bound), bound)
        smallest = tl.minimum(tl.maximum(smallest, -bound), bound)
        scale = (tl.maximum(largest - smallest, 1e-8) / 3.0)[:, None]
        low = smallest[:, None]

        # error feedback: later channels make up for the error of earlier ones. As all that follows, in units of a
        # code; beside it, the metric times rows, codes and ones
        z = (y - low) / scale
        work, c = z, z * 0.0
        projected, product = z * 0.0, z * 0.0
        ones = tl.zeros([1, COLUMNS], tl.float32)
        for d in range(D):
            here = channel == d
            g = tl.load(metric + d * D + place, mask=real, other=0.0)[None, :]
            u = tl.load(factor + d * D + place, mask=real, other=0.0)[None, :]
            value = _channel(work, here)
            code = _code(value)
            work -= (value - code) / tl.load(factor + d * D + d) * u
            c = tl.where(here, code, c)
            projected += _channel(z, here) * g
            product += code * g
            ones += g

        one = tl.sum(ones, 1)[:, None]
        slope, shift = scale * 0.0 + 1.0, scale * 0.0
        for _ in range(SWEEPS):
            # slope and shift of least squares in the metric
            cc, c1 = tl.sum(product * c, 1)[:, None], tl.sum(product, 1)[:, None]
            cz, oz = tl.sum(product * z, 1)[:, None], tl.sum(projected, 1)[:, None]
            determinant = cc * one - c1 * c1
            new = (cz * one - c1 * oz) / tl.where(determinant == 0, 1.0, determinant)
            better = (determinant > 1e-6 * cc * one) & (new > 0)
            slope = tl.where(better, new, slope)
            shift = tl.where(better, (oz - c1 * slope) / one, shift)
            # one sweep of coordinate descent
            residual = projected - product * slope - ones * shift
            for d in range(D):
                here = channel == d
                g = tl.load(metric + d * D + place, mask=real, other=0.0)[None, :]
                old = _channel(c, here)
                code = _code(old + _channel(residual, here) / (slope * tl.load(metric + d * D + d)))
                change = code - old
                residual -= change * slope * g
                product += change * g
                c = tl.where(here, code, c)

        # the stretch that keeps inner products, in the metric
        weighted = projected * scale + ones * low
        low += scale * shift
        scale *= slope
        overlap, own = tl.sum(weighted * (c * scale + low), 1)[:, None], tl.sum(weighted * y, 1)[:, None]
        ratio = own / tl.where(overlap == 0, 1.0, overlap)
        bounded = tl.minimum(tl.maximum(ratio, 0.5), 2.0)
        ratio = tl.where((ratio > 0) & (overlap != 0), tl.exp2(tl.log2(bounded) * stretch), 1.0)
        scale, low = scale * ratio, low * ratio

        place64 = index.to(tl.int64)
        quarters = tl.reshape(c.to(tl.int32), [ROWS, 4, QUARTER]) << (2 * tl.arange(0, 4))[None, :, None]
        byte = tl.sum(quarters, 1).to(tl.uint8)
        q = tl.arange(0, QUARTER)[None, :]
        base = codes + batch * codes_batch + head * codes_head
        tl.store(base + place64[:, None] * Q + q, byte, mask=inside[:, None] & (q < Q))
        pair = affine + batch * affine_batch + head * affine_head + place64[:, None] * 2
        TYPE: tl.constexpr = affine.dtype.element_ty
        tl.store(pair, tl.minimum(tl.maximum(scale, -LIMIT), LIMIT).to(TYPE), mask=inside[:, None])
        tl.store(pair + 1, tl.minimum(tl.maximum(low, -LIMIT), LIMIT).to(TYPE), mask=inside[:, None])


def _launch(
    rows: Tensor, metric: Tensor, factor: Tensor, codes: Tensor, affine: Tensor, count: int, clip: float,
    sweeps: int, stretch: float, lengths: Tensor | None = None, floors: Tensor | None = None,
    start: int = 0, sinks: int = 0, recent: int = 0,
) -> None:  # fmt: skip
    batch, heads, slots, head_dim = rows.shape
    tile = min(ROWS, triton.next_power_of_2(count))
    size = sizes(head_dim)
    with device_guard(rows):
        _search_kernel[(triton.cdiv(count, tile), heads, batch)](
            rows, metric, factor, codes, affine, lengths, floors, *rows.stride()[:3], *by_head(metric, 2),
            *codes.stride()[:2], *affine.stride()[:2], count, start, codes.shape[2], stretch, **size,
            KEEP=keep(head_dim, clip), SWEEPS=sweeps, LIMIT=SATURATION[affine.dtype], BITS=BITS[rows.dtype],
            STEP=lengths is not None, SINKS=sinks, RECENT=recent, RING=slots, ROWS=tile, num_warps=1,
        )  # fmt: skip


def search_into(
    rows: Tensor, metric: Tensor, factor: Tensor, codes: Tensor, affine: Tensor, start: int = 0, *, clip: float,
    sweeps: int, stretch: float,
) -> None:  # fmt: skip
    """Quantise ready rows [b, H, n, D] by search into places `start`, ... of codes [b, H, C, D/4] and affine
    [b, H, C, 1, 2]; metric and factor [H, D, D] or [b, H, D, D], float32 and contiguous."""
    if rows.numel():
        _launch(rows, metric, factor, codes, affine, rows.shape[2], clip, sweeps, stretch, start=start)


def search_step(
    ring: Tensor, metric: Tensor, factor: Tensor, codes: Tensor, affine: Tensor, lengths: Tensor, floors: Tensor, *,
    n: int, sinks: int, recent: int, clip: float, sweeps: int, stretch: float,
) -> None:  # fmt: skip
    """Quantise by search what leaves the ring [B, H, R, D] when `n` tokens come to rows of these lengths [B]."""
    _launch(ring, metric, factor, codes, affine, n, clip, sweeps, stretch, lengths, floors, sinks=sinks, recent=recent)
