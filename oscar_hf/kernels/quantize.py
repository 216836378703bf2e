"""Writing tokens in Triton: rotate them, keep the windows, quantise what goes into the history.

A row is held as four quarters [rows, D/4], the channels that share a byte, so that packing never leaves a thread.
`reference_write` has the same functions in plain torch.
"""

# ruff: noqa: SIM300 (constexpr parameters are capitals, which the rule takes for constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantization import SATURATION, clip_index
from .launch import LOG2E, dependent_launch, device_guard

PROGRAMS = 1024  # of a chunk: enough to balance the load, few enough that a rotation is read rarely
SATURATE_SCALE = tl.constexpr(2.0**54)


# The clip threshold: an order statistic of |x|, by bisection on its bits


@triton.jit
def _add_pairs_bf16(a, b):
    return tl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _add_pairs_fp16(a, b):
    return tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _max_pairs_bf16(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _max_pairs_fp16(a, b):
    return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _min_pairs_bf16(a, b):
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _min_pairs_fp16(a, b):
    return tl.inline_asm_elementwise("min.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _halves(pairs, DTYPE: tl.constexpr):
    """Both 16-bit floats of int32 words, as float32."""
    low = (pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    high = ((pairs >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _pattern(x):
    """Bits of |x|, whose order is that of |x|, as int32."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def _pair(a, b):
    """Two 16-bit floats in an int32 word."""
    low = a.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (b.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _count(p0, p1, p2, p3, level, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """How many of a row are at least `level` [rows]: of patterns, or of pairs of |x| p0, p1 (exact to 256)."""
    if PACKED:
        both = level | (level << 16)
        if DTYPE == tl.bfloat16:
            counts = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b;
                set.ge.bf16x2.bf16x2 a, $1, $3; set.ge.bf16x2.bf16x2 b, $2, $3;
                add.rn.bf16x2 $0, a, b; }""",
                "=r,r,r,r", [p0, p1, both[:, None]], tl.int32, True, 1,
            )  # fmt: skip
            counts = tl.reduce(counts, 1, _add_pairs_bf16)
        else:
            counts = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b;
                set.ge.f16x2.f16x2 a, $1, $3; set.ge.f16x2.f16x2 b, $2, $3;
                add.rn.f16x2 $0, a, b; }""",
                "=r,r,r,r", [p0, p1, both[:, None]], tl.int32, True, 1,
            )  # fmt: skip
            counts = tl.reduce(counts, 1, _add_pairs_fp16)
        low, high = _halves(counts, DTYPE)
        return low + high
    else:
        level = level[:, None]
        counts = (p0 >= level).to(tl.int32) + (p1 >= level).to(tl.int32)
        counts += (p2 >= level).to(tl.int32) + (p3 >= level).to(tl.int32)
        return tl.sum(counts, 1)


@triton.jit
def _search(p0, p1, p2, p3, base, KEEP: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """The largest pattern in [base, base + 2^BITS) that KEEP entries of the row reach, or base."""
    found = base
    step = 1 << (BITS - 1)
    for _ in range(BITS):
        level = found + step
        step = step >> 1
        found = tl.where(_count(p0, p1, p2, p3, level, DTYPE, PACKED) >= KEEP, level, found)
    return found


@triton.jit
def _threshold(p0, p1, p2, p3, peak, KEEP: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """The KEEP-th largest |x| of each row, float32 [rows]; `peak` [rows] is the largest.

    It is first sought within a factor of four of the peak, and below only where some row of the tile has it there.
    """
    top = _pattern(peak.to(DTYPE))
    NEAR: tl.constexpr = 8 if DTYPE == tl.bfloat16 else (11 if DTYPE == tl.float16 else 24)
    base = tl.maximum(top - ((1 << NEAR) - 1), 0)
    found = _search(p0, p1, p2, p3, base, KEEP, NEAR, DTYPE, PACKED)
    if tl.max(((found == base) & (base > 0)).to(tl.int32), 0) > 0:
        found = _search(p0, p1, p2, p3, base * 0, KEEP, 31 if DTYPE == tl.float32 else 15, DTYPE, PACKED)
    if DTYPE == tl.float32:
        return found.to(tl.float32, bitcast=True)
    else:
        return found.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


# Codes: floor((x - min) / scale + 1/2) changes at three values of x - min


@triton.jit
def _smallest_above(bound):
    """The smallest float32 above a positive float64 that is no float32."""
    near = bound.to(tl.float32)
    following = (near.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(near.to(tl.float64) > bound, near, following)


@triton.jit
def _reached(offset, at, SATURATING: tl.constexpr):
    """1.0 where offset >= at [rows], else 0.0, float32."""
    if SATURATING:  # (offset - predecessor of at) 2^54, clamped to [0, 1]: one instruction, not of the compare unit
        before = (at.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f5A800000, $2;", "=f,f,f",
            [offset, (before * -SATURATE_SCALE)[:, None]], tl.float32, True, 1,
        )  # fmt: skip
    else:
        return tl.where(offset >= at[:, None], 1.0, 0.0)


@triton.jit
def _sum4(a, b, c, d):
    return tl.sum((a + b) + (c + d), 1)


@triton.jit
def _dot4(a0, a1, a2, a3, b0, b1, b2, b3):
    return tl.sum(a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3, 1)


@triton.jit
def _group(
    x0, x1, x2, x3, m0, m1, m2, m3, smallest, largest,
    SIZE: tl.constexpr, INNER: tl.constexpr, MASKED: tl.constexpr, SATURATING: tl.constexpr,
):  # fmt: skip
    """Codes (float32 quarters, zero outside the masks), scale and min of one group, whose clipped range is given."""
    span = largest - smallest
    scale = tl.div_rn(tl.maximum(span, 1e-8), span * 0 + 3.0)
    # Where a rounded quotient plus 1/2, rounded, reaches 1, 2 and 3: the midpoints below 1/2 - 2^-25, 3/2 and 5/2.
    wide = scale.to(tl.float64)
    at1 = _smallest_above(wide * (0.5 - 3 * 2.0**-26))
    at2 = _smallest_above(wide * (1.5 - 2.0**-24))
    at3 = _smallest_above(wide * (2.5 - 2.0**-23))
    never = float("inf")  # a span below 1e-8 does not reach all codes, and what was clipped must not either
    at1, at2, at3 = (
        tl.where(span >= at1, at1, never),
        tl.where(span >= at2, at2, never),
        tl.where(span >= at3, at3, never),
    )
    low = smallest[:, None]
    o0, o1, o2, o3 = x0 - low, x1 - low, x2 - low, x3 - low
    if MASKED:
        o0, o1, o2, o3 = tl.where(m0, o0, 0.0), tl.where(m1, o1, 0.0), tl.where(m2, o2, 0.0), tl.where(m3, o3, 0.0)
    c0 = _reached(o0, at1, SATURATING) + _reached(o0, at2, SATURATING) + _reached(o0, at3, SATURATING)
    c1 = _reached(o1, at1, SATURATING) + _reached(o1, at2, SATURATING) + _reached(o1, at3, SATURATING)
    c2 = _reached(o2, at1, SATURATING) + _reached(o2, at2, SATURATING) + _reached(o2, at3, SATURATING)
    c3 = _reached(o3, at1, SATURATING) + _reached(o3, at2, SATURATING) + _reached(o3, at3, SATURATING)
    if INNER:  # sums of offsets, not of centred values: one pass, and offsets are of the size of the span
        codes, total = _sum4(c0, c1, c2, c3), _sum4(o0, o1, o2, o3)
        squares = _dot4(o0, o1, o2, o3, o0, o1, o2, o3)
        products = _dot4(o0, o1, o2, o3, c0, c1, c2, c3)
        overlap = (products - total * (codes / SIZE)) * scale
        stretch = (squares - total * (total / SIZE)) / tl.where(overlap > 0, overlap, 1.0)
        stretch = tl.where(overlap > 0, tl.minimum(tl.maximum(stretch, 0.5), 2.0), 1.0)
        smallest = smallest + (total / SIZE - codes / SIZE * scale * stretch)
        scale = scale * stretch
    return c0, c1, c2, c3, scale, smallest


@triton.jit
def _quantize_rows(
    h0, h1, h2, h3, codes, affine, inside,
    D: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, INNER: tl.constexpr,
    LIMIT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Quantise quarters [rows, QUARTER] (zero where padded) and store them at pointers [rows] to codes and affine.

    KEEP: how many of a row's |x| the clip threshold keeps, itself included; 0: no clip.
    """
    DTYPE: tl.constexpr = h0.dtype
    SIZE: tl.constexpr = D // GROUPS
    Q: tl.constexpr = D // 4
    PAIRS: tl.constexpr = PACKED and DTYPE != tl.float32
    PADDED: tl.constexpr = Q != QUARTER
    column = tl.arange(0, QUARTER)[None, :]
    real = column < Q
    x0, x1, x2, x3 = h0.to(tl.float32), h1.to(tl.float32), h2.to(tl.float32), h3.to(tl.float32)
    if PAIRS:
        p0, p1 = _pair(h0, h1), _pair(h2, h3)
        p2, p3 = p0, p1
    else:
        p0, p1, p2, p3 = _pattern(h0), _pattern(h1), _pattern(h2), _pattern(h3)
    if GROUPS == 1 and PAIRS and not PADDED:
        if DTYPE == tl.bfloat16:
            tops = tl.reduce(_max_pairs_bf16(p0, p1), 1, _max_pairs_bf16)
            bottoms = tl.reduce(_min_pairs_bf16(p0, p1), 1, _min_pairs_bf16)
        else:
            tops = tl.reduce(_max_pairs_fp16(p0, p1), 1, _max_pairs_fp16)
            bottoms = tl.reduce(_min_pairs_fp16(p0, p1), 1, _min_pairs_fp16)
        low, high = _halves(tops, DTYPE)
        largest = tl.maximum(low, high)
        low, high = _halves(bottoms, DTYPE)
        smallest = tl.minimum(low, high)
        peak = tl.maximum(largest, -smallest)
    else:
        above = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        below = tl.minimum(tl.minimum(x0, x1), tl.minimum(x2, x3))
        peak = tl.maximum(tl.max(above, 1), -tl.min(below, 1))
        largest = tl.max(tl.where(real, above, -float("inf")), 1)
        smallest = tl.min(tl.where(real, below, float("inf")), 1)
    bound = tl.full(peak.shape, LIMIT, tl.float32)
    if KEEP > 0:
        if PAIRS:
            p0, p1 = p0 & 0x7FFF7FFF, p1 & 0x7FFF7FFF
        bound = tl.minimum(bound, _threshold(p0, p1, p2, p3, peak, KEEP, DTYPE, PAIRS))
    if tl.max(peak, 0) > LIMIT:  # rare
        tl.debug_barrier()  # makes this a branch: without, it is predicated, and every element pays for it
        x0, x1 = tl.minimum(tl.maximum(x0, -LIMIT), LIMIT), tl.minimum(tl.maximum(x1, -LIMIT), LIMIT)
        x2, x3 = tl.minimum(tl.maximum(x2, -LIMIT), LIMIT), tl.minimum(tl.maximum(x3, -LIMIT), LIMIT)

    if GROUPS == 1:
        largest = tl.minimum(tl.maximum(largest, -bound), bound)  # clipping keeps order: the range says it all
        smallest = tl.minimum(tl.maximum(smallest, -bound), bound)
        c0, c1, c2, c3, scale, minimum = _group(
            x0, x1, x2, x3, real, real, real, real, smallest, largest, SIZE, INNER, PADDED, PACKED
        )
        _store_affine(affine, scale, minimum, inside, LIMIT)
    else:
        c0, c1, c2, c3 = x0 * 0.0, x1 * 0.0, x2 * 0.0, x3 * 0.0
        for group in range(GROUPS):
            m0 = real & (column // SIZE == group)
            m1 = real & ((column + Q) // SIZE == group)
            m2 = real & ((column + 2 * Q) // SIZE == group)
            m3 = real & ((column + 3 * Q) // SIZE == group)
            never = float("inf")
            above = tl.maximum(tl.where(m0, x0, -never), tl.where(m1, x1, -never))
            above = tl.maximum(above, tl.maximum(tl.where(m2, x2, -never), tl.where(m3, x3, -never)))
            below = tl.minimum(tl.where(m0, x0, never), tl.where(m1, x1, never))
            below = tl.minimum(below, tl.minimum(tl.where(m2, x2, never), tl.where(m3, x3, never)))
            largest = tl.minimum(tl.maximum(tl.max(above, 1), -bound), bound)
            smallest = tl.minimum(tl.maximum(tl.min(below, 1), -bound), bound)
            g0, g1, g2, g3, scale, minimum = _group(
                x0, x1, x2, x3, m0, m1, m2, m3, smallest, largest, SIZE, INNER, True, PACKED
            )
            c0, c1, c2, c3 = c0 + g0, c1 + g1, c2 + g2, c3 + g3
            _store_affine(affine + group * 2, scale, minimum, inside, LIMIT)
    # 2^23 + byte: the byte is the low end of the float's bits
    byte = (((c0 + 8388608.0) + 4.0 * c1) + 16.0 * c2) + 64.0 * c3
    byte = (byte.to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)
    tl.store(codes[:, None] + column, byte, mask=inside[:, None] & real)


@triton.jit
def _store_affine(pointer, scale, minimum, inside, LIMIT: tl.constexpr):
    TYPE: tl.constexpr = pointer.dtype.element_ty
    scale = tl.minimum(tl.maximum(scale, -LIMIT), LIMIT)
    minimum = tl.minimum(tl.maximum(minimum, -LIMIT), LIMIT)
    tl.store(pointer, scale.to(TYPE), mask=inside)
    tl.store(pointer + 1, minimum.to(TYPE), mask=inside)


# A chunk


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
def _mean_product(mean, rotation, D: tl.constexpr, QUARTER: tl.constexpr, PART: tl.constexpr):
    """`mean rotation`, [1, 4 QUARTER], with the parts of the rotation that the rows meet."""
    total = tl.zeros([16, 4 * QUARTER], tl.float32)
    for first in range(0, D, 16):
        d = first + tl.arange(0, 16)
        high, low = _split_rotation(rotation, d, D, QUARTER, PART)
        part = tl.load(mean + d, mask=d < D, other=0.0)[:, None]
        if PART == tl.float32:
            total += part * high
        else:
            total += part * (high.to(tl.float32) + low.to(tl.float32))
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


@triton.jit
def _write_rows(
    x, x_token, rotation, mean, codes, affine, sink, ring,
    block, blocks, n, start, flushed, sinks, window_start, index_start,
    D: tl.constexpr, SIZE: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
    INNER: tl.constexpr, LIMIT: tl.constexpr, RING: tl.constexpr, WINDOWS: tl.constexpr, ROTATED: tl.constexpr,
    MEAN: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head: tiles `block`, `block + blocks`, ... of its rows."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    Q: tl.constexpr = D // 4
    column = tl.arange(0, QUARTER)
    d = tl.arange(0, SIZE)
    if ROTATED and WHOLE:
        high, low = _split_rotation(rotation, d, D, QUARTER, PART)
    if ROTATED and MEAN:
        centre = _mean_product(mean, rotation, D, QUARTER, PART)
    for tile in range(block, tl.cdiv(n, ROWS), blocks):
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
            h0, h1, h2, h3 = _quarters(y.to(DTYPE), ROWS, QUARTER)
        else:
            mask = real[:, None] & (column < Q)[None, :]
            h0 = tl.load(place + column[None, :], mask=mask, other=0.0)
            h1 = tl.load(place + Q + column[None, :], mask=mask, other=0.0)
            h2 = tl.load(place + 2 * Q + column[None, :], mask=mask, other=0.0)
            h3 = tl.load(place + 3 * Q + column[None, :], mask=mask, other=0.0)
            if MEAN:
                c0 = tl.load(mean + column, mask=column < Q, other=0.0)[None, :]
                c1 = tl.load(mean + Q + column, mask=column < Q, other=0.0)[None, :]
                c2 = tl.load(mean + 2 * Q + column, mask=column < Q, other=0.0)[None, :]
                c3 = tl.load(mean + 3 * Q + column, mask=column < Q, other=0.0)[None, :]
                h0, h1 = (h0.to(tl.float32) - c0).to(DTYPE), (h1.to(tl.float32) - c1).to(DTYPE)
                h2, h3 = (h2.to(tl.float32) - c2).to(DTYPE), (h3.to(tl.float32) - c3).to(DTYPE)
        first, last = start + tile * ROWS, start + tl.minimum(n, (tile + 1) * ROWS)
        if WINDOWS and (first < sinks) | (last > window_start):
            if ROTATED:
                _store_window(y.to(DTYPE), sink, ring, token, real, sinks, window_start, RING, 0, D, QUARTER)
            else:
                _store_window(h0, sink, ring, token, real, sinks, window_start, RING, 0, D, QUARTER)
                _store_window(h1, sink, ring, token, real, sinks, window_start, RING, Q, D, QUARTER)
                _store_window(h2, sink, ring, token, real, sinks, window_start, RING, 2 * Q, D, QUARTER)
                _store_window(h3, sink, ring, token, real, sinks, window_start, RING, 3 * Q, D, QUARTER)
        if (last > sinks) & (first < sinks + flushed):
            index = (token - sinks + index_start).to(tl.int64)
            inside = real & (token >= sinks) & (token < sinks + flushed)
            _quantize_rows(
                h0, h1, h2, h3, codes + index * Q, affine + index * (2 * GROUPS), inside,
                D, QUARTER, GROUPS, KEEP, INNER, LIMIT, PACKED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n", "start", "flushed", "index_start", "blocks"])
def _write_kernel(
    keys, values, k_mean, k_rotation, v_rotation, k_codes, k_affine, v_codes, v_affine,
    sink_keys, sink_values, ring_keys, ring_values,
    key_batch, key_head, key_token, value_batch, value_head, value_token,
    mean_batch, mean_head, k_rotation_batch, k_rotation_head, v_rotation_batch, v_rotation_head,
    k_codes_batch, k_codes_head, k_affine_batch, k_affine_head, v_codes_batch, v_codes_head, v_affine_batch,
    v_affine_head, sink_batch, sink_head, ring_batch, ring_head,
    n, start, flushed, index_start, blocks,
    D: tl.constexpr, SIZE: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr, K_KEEP: tl.constexpr,
    V_KEEP: tl.constexpr, INNER: tl.constexpr, LIMIT: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr,
    WINDOWS: tl.constexpr, BOTH: tl.constexpr, MEAN: tl.constexpr, K_ROTATED: tl.constexpr, V_ROTATED: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program (block, side), head, row; sides are keys and values."""
    block = tl.program_id(0)
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    side = 0
    if BOTH:
        side, block = block % 2, block // 2
    window_start = tl.maximum(start + n - RING, SINKS)
    if side == 0:
        _write_rows(
            keys + row * key_batch + head * key_head, key_token,
            k_rotation + row * k_rotation_batch + head * k_rotation_head, k_mean + row * mean_batch + head * mean_head,
            k_codes + row * k_codes_batch + head * k_codes_head,
            k_affine + row * k_affine_batch + head * k_affine_head,
            sink_keys + row * sink_batch + head * sink_head, ring_keys + row * ring_batch + head * ring_head,
            block, blocks, n, start, flushed, SINKS, window_start, index_start, D, SIZE, QUARTER, GROUPS, K_KEEP,
            INNER, LIMIT, RING, WINDOWS, K_ROTATED, MEAN, WHOLE, ROWS, PACKED, PART,
        )  # fmt: skip
    else:
        _write_rows(
            values + row * value_batch + head * value_head, value_token,
            v_rotation + row * v_rotation_batch + head * v_rotation_head, k_mean,
            v_codes + row * v_codes_batch + head * v_codes_head,
            v_affine + row * v_affine_batch + head * v_affine_head,
            sink_values + row * sink_batch + head * sink_head, ring_values + row * ring_batch + head * ring_head,
            block, blocks, n, start, flushed, SINKS, window_start, index_start, D, SIZE, QUARTER, GROUPS, V_KEEP,
            INNER, LIMIT, RING, WINDOWS, V_ROTATED, False, WHOLE, ROWS, PACKED, PART,
        )  # fmt: skip


def _keep(head_dim: int, clip: float) -> int:
    """How many of a row's sorted |x| are at or above its clip threshold; 0 where nothing is clipped."""
    return head_dim - clip_index(head_dim, clip) if clip < 1 else 0


def _by_head(tensor: Tensor | None, inner: int) -> tuple[int, int]:
    """Strides of batch and head, 0 where broadcast, of a tensor with `inner` dims after them."""
    if tensor is None:
        return 0, 0
    outer = tensor.stride()[: tensor.dim() - inner]
    batch, head = (0, 0, *outer)[-2:]
    return batch, head


def _packs(tensor: Tensor) -> bool:
    """Whether the kernels may use packed 16-bit comparisons and saturating products (inline PTX)."""
    return tensor.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(tensor.device) >= (9, 0)


def _part_type(tensor: Tensor) -> tl.dtype:
    """In which dtype a chunk meets the parts of a rotation; the interpreter multiplies no bf16."""
    if not tensor.is_cuda:
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(tensor.dtype, tl.float32)


def _sizes(head_dim: int) -> dict[str, int]:
    return {
        "D": head_dim,
        "SIZE": triton.next_power_of_2(head_dim),
        "QUARTER": max(16, triton.next_power_of_2(head_dim // 4)),
    }


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
    """Rotate and store a chunk of rows of one length, in one launch: sink, ring and history.

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
    batch, heads, n, head_dim = keys.shape
    if not keys.numel():
        return
    capacity, sinks = k_codes.shape[2], sink_keys.shape[2]
    _launch_write(
        keys, values, k_mean, k_rotation, v_rotation, (k_codes, k_affine), (v_codes, v_affine),
        (sink_keys, sink_values), (recent_keys, recent_values), start, min(flushed, capacity), 0, sinks,
        recent_keys.shape[2], _keep(head_dim, k_clip), _keep(head_dim, v_clip), scale_rule, WINDOWS=True, BOTH=True,
    )  # fmt: skip


def quantize_into(
    rows: Tensor, codes: Tensor, affine: Tensor, start: int, *, clip: float = 1.0, scale_rule: str = "minmax"
) -> None:
    """Quantise ready rows [b, H, n, D] into places `start`, `start + 1`, ... of codes [b, H, C, D/4] and affine
    [b, H, C, groups, 2]."""
    head_dim = rows.shape[-1]
    if not rows.numel():
        return
    packed, keep = (codes, affine), _keep(head_dim, clip)
    _launch_write(
        rows, rows, None, None, None, packed, packed, (rows, rows), (rows, rows), 0, codes.shape[2] - start, start, 0,
        1, keep, keep, scale_rule, WINDOWS=False, BOTH=False,
    )  # fmt: skip


def _launch_write(
    keys, values, k_mean, k_rotation, v_rotation, k_packed, v_packed, sinks, rings, start, flushed, index_start,
    sink_tokens, ring_tokens, k_keep, v_keep, scale_rule, WINDOWS, BOTH,
) -> None:  # fmt: skip
    batch, heads, n, head_dim = keys.shape
    whole = head_dim <= 128
    rotated = k_rotation is not None or v_rotation is not None
    rows = 128 if rotated and whole and keys.dtype != torch.float32 else 64
    rows = min(rows, max(16, triton.next_power_of_2(n)))
    tiles, sides = triton.cdiv(n, rows), 1 + BOTH
    blocks = min(tiles, triton.cdiv(PROGRAMS, batch * heads * sides))
    packs = _packs(keys)
    with device_guard(keys):
        _write_kernel[(blocks * sides, heads, batch)](
            keys, values, keys if k_mean is None else k_mean, keys if k_rotation is None else k_rotation,
            keys if v_rotation is None else v_rotation, *k_packed, *v_packed, *sinks, *rings,
            *keys.stride()[:3], *values.stride()[:3], *_by_head(k_mean, 1), *_by_head(k_rotation, 2),
            *_by_head(v_rotation, 2), *(stride for part in (*k_packed, *v_packed) for stride in part.stride()[:2]),
            *sinks[0].stride()[:2], *rings[0].stride()[:2], n, start, flushed, index_start, blocks,
            **_sizes(head_dim), GROUPS=k_packed[1].shape[3], K_KEEP=k_keep, V_KEEP=v_keep,
            INNER=scale_rule == "inner_product", LIMIT=SATURATION[k_packed[1].dtype], SINKS=sink_tokens,
            RING=ring_tokens, WINDOWS=WINDOWS, BOTH=BOTH, MEAN=k_mean is not None,
            K_ROTATED=k_rotation is not None, V_ROTATED=v_rotation is not None, WHOLE=whole, ROWS=rows,
            PACKED=packs, PART=_part_type(keys), num_warps=max(rows // 16, 1), num_stages=2,
            **({"maxnreg": 128} if packs and rows == 128 else {}),
        )  # fmt: skip


# A decoding step


@triton.jit
def _rotated_rows(
    x, x_token, i, real, mean, rotation,
    column, D: tl.constexpr, SIZE: tl.constexpr, MEAN: tl.constexpr, ROTATED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Columns `column` of rows `i` [ROWS], less the mean and rotated, float32 [ROWS, COLUMNS]."""
    d = tl.arange(0, SIZE)
    if ROTATED:
        mask = (d < D)[:, None] & (column < D)[None, :]
        r = tl.load(rotation + d[:, None] * D + column[None, :], mask=mask, other=0.0)
        if MEAN:
            centre = tl.load(mean + d, mask=d < D, other=0.0)[None, :]
        if WAIT:  # the rotation is no product of the kernel before
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        mask = real[:, None] & (d < D)[None, :]
        rows = tl.load(x + i.to(tl.int64)[:, None] * x_token + d[None, :], mask=mask, other=0.0).to(tl.float32)
        if MEAN:
            rows -= centre
        return tl.sum(rows[:, :, None] * r[None, :, :], 1)
    else:
        if WAIT:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        mask = real[:, None] & (column < D)[None, :]
        rows = tl.load(x + i.to(tl.int64)[:, None] * x_token + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if MEAN:
            rows -= tl.load(mean + column, mask=column < D, other=0.0)[None, :]
        return rows


@triton.jit
def _append_rows(
    x, x_token, i, real, mean, rotation, sink, ring, length,
    column, D: tl.constexpr, SIZE: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, MEAN: tl.constexpr,
    ROTATED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    rows = _rotated_rows(x, x_token, i, real, mean, rotation, column, D, SIZE, MEAN, ROTATED, WAIT)
    rows = rows.to(ring.dtype.element_ty)
    token = tl.load(length) + i
    inside = real[:, None] & (column < D)[None, :]
    place = token[:, None] * D + column[None, :]
    tl.store(sink + place, rows, mask=inside & (token < SINKS)[:, None])
    place = (token % RING)[:, None] * D + column[None, :]
    tl.store(ring + place, rows, mask=inside & (token >= SINKS)[:, None])


@triton.jit
def _flush_rows(
    ring, codes, affine, first, last, capacity,
    D: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, INNER: tl.constexpr,
    LIMIT: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Quantise history tokens `first` to `last` from the ring."""
    Q: tl.constexpr = D // 4
    column = tl.arange(0, QUARTER)[None, :]
    index = first + tl.arange(0, BLOCK)
    inside = (index < last) & (index < capacity)
    place = ring + ((SINKS + index) % RING)[:, None] * D + column
    mask = inside[:, None] & (column < Q)
    h0 = tl.load(place, mask=mask, other=0.0)
    h1 = tl.load(place + Q, mask=mask, other=0.0)
    h2 = tl.load(place + 2 * Q, mask=mask, other=0.0)
    h3 = tl.load(place + 3 * Q, mask=mask, other=0.0)
    index = index.to(tl.int64)
    _quantize_rows(
        h0, h1, h2, h3, codes + index * Q, affine + index * (2 * GROUPS), inside,
        D, QUARTER, GROUPS, KEEP, INNER, LIMIT, PACKED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "capacity"])
def _append_kernel(
    query, key, value, q_buf, k_mean, q_rotation, k_rotation, v_rotation, k_codes, k_affine, v_codes, v_affine,
    sink_keys, sink_values, ring_keys, ring_values, lengths, floors,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    mean_batch, mean_head, q_rotation_batch, q_rotation_head, k_rotation_batch, k_rotation_head,
    v_rotation_batch, v_rotation_head, k_codes_batch, k_codes_head, k_affine_batch, k_affine_head, v_codes_batch,
    v_codes_head, v_affine_batch, v_affine_head, sink_batch, sink_head, ring_batch, ring_head,
    scale, n, capacity,
    D: tl.constexpr, SIZE: tl.constexpr, QUARTER: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
    K_KEEP: tl.constexpr, V_KEEP: tl.constexpr, INNER: tl.constexpr, LIMIT: tl.constexpr, SINKS: tl.constexpr,
    RING: tl.constexpr, RECENT: tl.constexpr, MEAN: tl.constexpr, Q_ROTATED: tl.constexpr, K_ROTATED: tl.constexpr,
    V_ROTATED: tl.constexpr, BLOCK: tl.constexpr, Q_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PACKED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Program task, KV head, row. Tasks: history of keys, of values; then blocks of queries, keys and values."""
    task, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    q_tasks, new_tasks = tl.cdiv(G * n, Q_ROWS) * PARTS, tl.cdiv(n, ROWS) * PARTS
    ring_keys += row * ring_batch + head * ring_head
    ring_values += row * ring_batch + head * ring_head
    if task < 2:
        if WAIT:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        length, floor = tl.load(lengths + row), tl.load(floors + row)
        first = tl.maximum(floor, tl.maximum(length - SINKS - RECENT, 0))
        last = tl.maximum(floor, tl.maximum(length + n - SINKS - RECENT, 0))
        if first < last:
            if task == 0:
                _flush_rows(
                    ring_keys, k_codes + row * k_codes_batch + head * k_codes_head,
                    k_affine + row * k_affine_batch + head * k_affine_head, first, last, capacity,
                    D, QUARTER, GROUPS, K_KEEP, INNER, LIMIT, SINKS, RING, BLOCK, PACKED,
                )  # fmt: skip
            else:
                _flush_rows(
                    ring_values, v_codes + row * v_codes_batch + head * v_codes_head,
                    v_affine + row * v_affine_batch + head * v_affine_head, first, last, capacity,
                    D, QUARTER, GROUPS, V_KEEP, INNER, LIMIT, SINKS, RING, BLOCK, PACKED,
                )  # fmt: skip
    elif task < 2 + q_tasks:
        task -= 2
        column = (task % PARTS) * COLUMNS + tl.arange(0, COLUMNS)
        r = (task // PARTS) * Q_ROWS + tl.arange(0, Q_ROWS)  # rows of q_buf: group-major
        real = r < G * n
        source = (r // n).to(tl.int64) * query_head + (r % n).to(
            tl.int64
        ) * query_token  # as elements, so token stride 1
        rows = _rotated_rows(
            query + row * query_batch + head * G * query_head, 1, source, real, k_mean,
            q_rotation + row * q_rotation_batch + head * q_rotation_head, column, D, SIZE, False, Q_ROTATED, WAIT,
        )  # fmt: skip
        place = q_buf + ((row * heads + head) * (G * n) + r[:, None]) * D + column[None, :]
        tl.store(place, rows * scale, mask=real[:, None] & (column < D)[None, :])
    else:
        task -= 2 + q_tasks
        i = (task % new_tasks // PARTS) * ROWS + tl.arange(0, ROWS)
        column = (task % PARTS) * COLUMNS + tl.arange(0, COLUMNS)
        if task < new_tasks:
            _append_rows(
                key + row * key_batch + head * key_head, key_token, i, i < n,
                k_mean + row * mean_batch + head * mean_head,
                k_rotation + row * k_rotation_batch + head * k_rotation_head,
                sink_keys + row * sink_batch + head * sink_head, ring_keys, lengths + row,
                column, D, SIZE, SINKS, RING, MEAN, K_ROTATED, WAIT,
            )  # fmt: skip
        else:
            _append_rows(
                value + row * value_batch + head * value_head, value_token, i, i < n, k_mean,
                v_rotation + row * v_rotation_batch + head * v_rotation_head,
                sink_values + row * sink_batch + head * sink_head, ring_values, lengths + row,
                column, D, SIZE, SINKS, RING, False, V_ROTATED, WAIT,
            )  # fmt: skip


def rotate_and_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: Tensor,
    floors: Tensor,
    k_mean: Tensor | None,
    q_rotation: Tensor | None,
    k_rotation: Tensor | None,
    v_rotation: Tensor | None,
    sink_keys: Tensor,
    sink_values: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
    k_codes: Tensor,
    k_affine: Tensor,
    v_codes: Tensor,
    v_affine: Tensor,
    recent: int,
    scaling: float,
    k_clip: float,
    v_clip: float,
    scale_rule: str,
    launch_pdl: bool = False,
) -> Tensor:
    """What a decoding step does before attention, in one launch for all rows, whatever their lengths.

    New keys and values go to sink or ring, and tokens that leave the window from the ring into the history. Lengths
    stay as they are.

    Args:
        query: [B, H_q, n, D], last dim contiguous; n is at most the ring's spare tokens, `R - recent`.
        key, value: [B, H, n, D], last dim contiguous.
        lengths: [B] int32, tokens of each row before this step.
        floors: [B] int32, history tokens that exist whatever the window says.
        k_mean: [H, D] or [B, H, D] float32, taken off the keys, or None.
        q_rotation, k_rotation, v_rotation: [D, D], [H, D, D] or [B, H, D, D] float32, or None (as they come).
        sink_keys, sink_values: [B, H, sink, D], written.
        recent_keys, recent_values: ring [B, H, R, D], read and written.
        k_codes, v_codes: [B, H, C, D/4] uint8, written below C only.
        k_affine, v_affine: [B, H, C, groups, 2] fp16 or bf16, written.
        recent: tokens of the window that queries see unquantised.
        scaling: factor on the logits.
        k_clip, v_clip, scale_rule: as in `quantize`.
        launch_pdl: programmatic dependent launch (compute capability 9 or newer).

    Returns:
        Tensor: q_buf [B, H, G n, D] float32, `query q_rotation` times `scaling log2(e)`, row `g n + i`.
    """
    batch, q_heads, n, head_dim = query.shape
    heads = key.shape[1]
    group = q_heads // heads
    q_buf = torch.empty(batch, heads, group * n, head_dim, dtype=torch.float32, device=query.device)
    q_rows, rows, columns = min(4, triton.next_power_of_2(group * n)), min(4, triton.next_power_of_2(n)), 32
    parts = triton.cdiv(head_dim, columns)
    tasks = 2 + parts * (triton.cdiv(group * n, q_rows) + 2 * triton.cdiv(n, rows))
    packed = (k_codes, k_affine, v_codes, v_affine)
    with device_guard(query):
        _append_kernel[(tasks, heads, batch)](
            query, key, value, q_buf, key if k_mean is None else k_mean, key if q_rotation is None else q_rotation,
            key if k_rotation is None else k_rotation, key if v_rotation is None else v_rotation, *packed,
            sink_keys, sink_values, recent_keys, recent_values, lengths, floors,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *_by_head(k_mean, 1),
            *_by_head(q_rotation, 2), *_by_head(k_rotation, 2), *_by_head(v_rotation, 2),
            *(stride for part in packed for stride in part.stride()[:2]), *sink_keys.stride()[:2],
            *recent_keys.stride()[:2], scaling * LOG2E, n, k_codes.shape[2],
            **_sizes(head_dim), G=group, GROUPS=k_affine.shape[3], K_KEEP=_keep(head_dim, k_clip),
            V_KEEP=_keep(head_dim, v_clip), INNER=scale_rule == "inner_product", LIMIT=SATURATION[k_affine.dtype],
            SINKS=sink_keys.shape[2], RING=recent_keys.shape[2], RECENT=recent, MEAN=k_mean is not None,
            Q_ROTATED=q_rotation is not None, K_ROTATED=k_rotation is not None, V_ROTATED=v_rotation is not None,
            BLOCK=triton.next_power_of_2(n), Q_ROWS=q_rows, ROWS=rows, COLUMNS=columns, PACKED=_packs(query),
            WAIT=launch_pdl, num_warps=4, **dependent_launch(launch_pdl),
        )  # fmt: skip
    return q_buf
