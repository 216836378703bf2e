"""Quantising rows inside a Triton kernel: the clip threshold, the codes, scale and min.

A row is held as four quarters [rows, D/4], the channels that share a byte, so that packing never leaves a thread.
Arithmetic is that of `quantization.quantize` on rows rounded to the model's dtype.
"""

# ruff: noqa: SIM300 (constexpr parameters are capitals, which the rule takes for constants)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..quantization import clip_index
from .launch import capability

UP = tl.constexpr(0.5 + 2.0**-20)  # rounds half up, whatever the error of a product with a reciprocal


# The clip threshold: an order statistic of |x|, by bisection on its bits


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
    if DTYPE == tl.bfloat16:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
        return low.to(DTYPE, bitcast=True).to(tl.float32), high.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _pattern(x):
    """Bits of |x|, whose order is that of |x|, as int32."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def _pair(a, b, DTYPE: tl.constexpr):
    """Two floats as 16-bit floats in an int32 word."""
    if a.dtype == DTYPE:
        low = a.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (b.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    elif DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1)
    else:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1)


@triton.jit
def _count(p0, p1, p2, p3, level, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """How many of a row are at least `level` [rows]: of patterns, or of pairs of |x| p0, p1."""
    if PACKED:  # a comparison yields 0xFFFF in either half: minus a sum of such words is low + 2^16 (high - low)
        both = (level | (level << 16))[:, None]
        if DTYPE == tl.bfloat16:
            masks = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b;
                set.ge.u32.bf16x2 a, $1, $3; set.ge.u32.bf16x2 b, $2, $3; add.u32 $0, a, b; }""",
                "=r,r,r,r", [p0, p1, both], tl.int32, True, 1,
            )  # fmt: skip
        else:
            masks = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b;
                set.ge.u32.f16x2 a, $1, $3; set.ge.u32.f16x2 b, $2, $3; add.u32 $0, a, b; }""",
                "=r,r,r,r", [p0, p1, both], tl.int32, True, 1,
            )  # fmt: skip
        counts = -tl.sum(masks, 1)
        return 2 * (counts & 0xFFFF) + (counts >> 16)
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


# Codes: floor((x - min) / scale + 1/2) changes at three values of x - min


@triton.jit
def _codes(offset, inverse, top, SATURATING: tl.constexpr):
    """floor(offset inverse + 1/2), at least 0 and at most floor(top), float32."""
    if SATURATING:  # a fraction of top in [0, 1], then an addition of 2^23 that rounds down
        coded = tl.inline_asm_elementwise(
            "{ .reg .f32 f; fma.rn.sat.f32 f, $1, $2, $3; fma.rm.f32 $0, f, $4, 0f4B000000; }", "=f,f,f,f,f",
            [offset, (inverse / top)[:, None], (UP / top)[:, None], top[:, None]], tl.float32, True, 1,
        )  # fmt: skip
        return coded - 8388608.0
    else:
        return tl.floor(tl.minimum(tl.maximum(offset * inverse[:, None] + UP, 0.0), top[:, None]))


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
    inverse = 1.0 / scale
    top = span * inverse + UP  # of what was clipped; a span below 1e-8 does not reach all codes
    low = smallest[:, None]
    o0, o1, o2, o3 = x0 - low, x1 - low, x2 - low, x3 - low
    if MASKED:
        o0, o1, o2, o3 = tl.where(m0, o0, 0.0), tl.where(m1, o1, 0.0), tl.where(m2, o2, 0.0), tl.where(m3, o3, 0.0)
    c0, c1 = _codes(o0, inverse, top, SATURATING), _codes(o1, inverse, top, SATURATING)
    c2, c3 = _codes(o2, inverse, top, SATURATING), _codes(o3, inverse, top, SATURATING)
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
def quantize_rows(
    h0, h1, h2, h3, codes, affine, inside,
    D: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, INNER: tl.constexpr,
    LIMIT: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Round quarters [rows, QUARTER] (zero where padded) to DTYPE, quantise them and store at pointers [rows].

    KEEP: how many of a row's |x| the clip threshold keeps, itself included; 0: no clip.
    """
    SIZE: tl.constexpr = D // GROUPS
    Q: tl.constexpr = D // 4
    PAIRS: tl.constexpr = PACKED and DTYPE != tl.float32
    PADDED: tl.constexpr = Q != QUARTER
    column = tl.arange(0, QUARTER)[None, :]
    real = column < Q
    if PAIRS:
        p0, p1 = _pair(h0, h1, DTYPE), _pair(h2, h3, DTYPE)
        p2, p3 = p0, p1
        x0, x1 = _halves(p0, DTYPE)
        x2, x3 = _halves(p1, DTYPE)
    else:
        h0, h1, h2, h3 = h0.to(DTYPE), h1.to(DTYPE), h2.to(DTYPE), h3.to(DTYPE)
        p0, p1, p2, p3 = _pattern(h0), _pattern(h1), _pattern(h2), _pattern(h3)
        x0, x1, x2, x3 = h0.to(tl.float32), h1.to(tl.float32), h2.to(tl.float32), h3.to(tl.float32)
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
    rare = peak > LIMIT
    found = tl.zeros(peak.shape, tl.int32)
    if KEEP > 0:
        if PAIRS:
            p0, p1 = p0 & 0x7FFF7FFF, p1 & 0x7FFF7FFF
        # first within a factor of four of the peak, and below only where some row of the tile needs it
        NEAR: tl.constexpr = 8 if DTYPE == tl.bfloat16 else (11 if DTYPE == tl.float16 else 24)
        base = tl.maximum(_pattern(peak.to(DTYPE)) - ((1 << NEAR) - 1), 0)
        found = _search(p0, p1, p2, p3, base, KEEP, NEAR, DTYPE, PAIRS)
        rare = rare | ((found == base) & (base > 0))
    if tl.max(rare.to(tl.int32), 0) > 0:
        tl.debug_barrier()  # makes this a branch: without, it is predicated, and every element pays for it
        if KEEP > 0:
            found = _search(p0, p1, p2, p3, found * 0, KEEP, 31 if DTYPE == tl.float32 else 15, DTYPE, PAIRS)
        x0, x1 = tl.minimum(tl.maximum(x0, -LIMIT), LIMIT), tl.minimum(tl.maximum(x1, -LIMIT), LIMIT)
        x2, x3 = tl.minimum(tl.maximum(x2, -LIMIT), LIMIT), tl.minimum(tl.maximum(x3, -LIMIT), LIMIT)
    bound = tl.full(peak.shape, LIMIT, tl.float32)
    if KEEP > 0:
        if DTYPE == tl.float32:
            bound = tl.minimum(bound, found.to(tl.float32, bitcast=True))
        else:
            bound = tl.minimum(bound, found.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32))

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
    """One store of both: they are neighbours of 16 bits."""
    TYPE: tl.constexpr = pointer.dtype.element_ty
    scale = tl.minimum(tl.maximum(scale, -LIMIT), LIMIT).to(TYPE)
    minimum = tl.minimum(tl.maximum(minimum, -LIMIT), LIMIT).to(TYPE)
    tl.store(pointer.to(tl.pointer_type(tl.int32), bitcast=True), _pair(scale, minimum, TYPE), mask=inside)


# What launches need


def keep(head_dim: int, clip: float) -> int:
    """How many of a row's sorted |x| are at or above its clip threshold; 0 where nothing is clipped."""
    return head_dim - clip_index(head_dim, clip) if clip < 1 else 0


def by_head(tensor: Tensor | None, inner: int) -> tuple[int, int]:
    """Strides of batch and head, 0 where broadcast, of a tensor with `inner` dims after them."""
    if tensor is None:
        return 0, 0
    outer = tensor.stride()[: tensor.dim() - inner]
    batch, head = (0, 0, *outer)[-2:]
    return batch, head


def packs(tensor: Tensor) -> bool:
    """Whether the kernels may use packed 16-bit comparisons and saturating products (inline PTX)."""
    return capability(tensor.device) >= (9, 0)


def sizes(head_dim: int) -> dict[str, int]:
    return {
        "D": head_dim,
        "SIZE": triton.next_power_of_2(head_dim),
        "QUARTER": max(16, triton.next_power_of_2(head_dim // 4)),
    }
