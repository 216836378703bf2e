"""Attention over sink, packed history and recent window in Triton: split over the tokens, then merged.

This is the portable path: any GPU that Triton knows, any head size, group count, softcap and number of queries. A row
of logits is folded out of the codes, `q . k = scale (q . code) + min sum(q)`, so that only codes meet the tensor
cores; a quarter of the channels shares each position in a byte, so a row is four small products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import LOG2E, dependent_launch, device_guard, processors

BLOCK_TOKENS = 64
WARPS = 4
MAX_ROWS = 64  # query rows of one program
PROGRAMS = 6  # that a multiprocessor holds at once, about
WINDOW_SPLIT = 64  # window tokens of one split: they weigh seven times as much as packed ones


@triton.jit
def _plane(packed, plane: tl.constexpr, level1, level2, LEVELS: tl.constexpr, PRECISE: tl.constexpr):
    """Codes of one plane as they meet the tensor cores: levels in units of scale.

    Evenly spaced ones need no conversion: two bits are a float16 subnormal as they lie, `code 4^plane 2^-24` exactly,
    and the factor goes into queries and results.
    """
    if LEVELS or PRECISE:
        return _value((packed >> (2 * plane)) & 3, level1, level2, LEVELS).to(tl.float32 if PRECISE else tl.float16)
    else:
        return (packed & (3 << (2 * plane))).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _value(code, level1, level2, LEVELS: tl.constexpr):
    """What a 2-bit code stands for in units of scale, float32: 0, level1, level2, 3."""
    if LEVELS:
        return tl.where(code == 0, 0.0, tl.where(code == 1, level1, tl.where(code == 2, level2, 3.0)))
    else:  # quicker than a conversion: the code in the last bits of 2^23
        return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _affine(pointer, tokens, inside, GROUPS: tl.constexpr):
    """Scale and min [N] of rows with one group."""
    scale = tl.load(pointer + tokens * (2 * GROUPS), mask=inside, other=0.0).to(tl.float32)
    minimum = tl.load(pointer + tokens * (2 * GROUPS) + 1, mask=inside, other=0.0).to(tl.float32)
    return scale, minimum


@triton.jit
def _dequantized(
    packed, affine, tokens, inside, columns, plane: tl.constexpr, level1, level2,
    QUARTER: tl.constexpr, GROUPS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Values [N, BQ] of one plane, for rows with several groups."""
    group = (columns + plane * QUARTER) // (4 * QUARTER // GROUPS)
    place = affine + tokens[:, None] * (2 * GROUPS) + group[None, :] * 2
    mask = inside[:, None] & (columns < QUARTER)[None, :]
    scale = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    minimum = tl.load(place + 1, mask=mask, other=0.0).to(tl.float32)
    return _value((packed >> (2 * plane)) & 3, level1, level2, LEVELS) * scale + minimum


@triton.jit
def _softmax_step(logits, visible, peak, total):
    """One block of an online softmax in base 2: weights, what the past shrinks by, new peak and total."""
    logits = tl.where(visible, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(peak - base)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit
def _capped(logits, cap):
    """`cap tanh(logits / cap)` for logits and cap in base 2."""
    ratio = logits / cap * 2.8853900817779268  # tanh(x) = 1 - 2 / (2 ** (2 x log2 e) + 1)
    return cap * (1.0 - 2.0 / (tl.exp2(ratio) + 1.0))


@triton.jit(
    do_not_specialize=["queries", "rows_total", "history", "exact_count", "capacity", "splits", "window_splits"]
)
def _attend(
    query, k_codes, k_affine, v_codes, v_affine, sink_keys, sink_values, recent_keys, recent_values, lengths, floors,
    offset, partial, stats,
    queries, rows_total, history, exact_count, softcap, level1, level2,
    codes_batch, codes_head, codes_token, affine_batch, affine_head, capacity,
    sink_batch, sink_head, recent_batch, recent_head,
    recent_tokens, heads, splits, window_splits,
    SINK: tl.constexpr, RING: tl.constexpr, QUARTER: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, OFFSET: tl.constexpr,
    LEVELS: tl.constexpr, PRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one block of query rows of one KV head.

    A step (CHUNK false): query `i` of the row's `queries` newest tokens is at `length + i`; it reads the history up to
    its own bound, the rest from the windows. A chunk: all queries read `history` tokens of it and, causally, the
    `exact_count` tokens in `recent_keys`, of which the last `queries` are their own.
    """
    split, block = tl.program_id(0), tl.program_id(1)
    batch, head = tl.program_id(2) // heads, tl.program_id(2) % heads
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)
    rows = block * BM + tl.arange(0, BM)
    columns = tl.arange(0, BQ)
    in_rows, in_columns = rows < rows_total, columns < QUARTER
    own = rows % queries
    if CHUNK:
        position = exact_count - queries + own
        bound = tl.zeros_like(own) + history
        newest = history
    else:
        length = tl.load(lengths + batch)
        floor = tl.load(floors + batch)
        position = length + own
        bound = tl.maximum(tl.maximum(floor, position + 1 - SINK - recent_tokens), 0)
        newest = tl.maximum(tl.maximum(floor, length + queries - SINK - recent_tokens), 0)
    newest = tl.minimum(newest, capacity)

    q_pointer = query + ((batch64 * heads + head64) * rows_total + rows[:, None]) * (4 * QUARTER) + columns[None, :]
    q_mask = in_rows[:, None] & in_columns[None, :]
    q0 = tl.load(q_pointer, mask=q_mask, other=0.0)
    q1 = tl.load(q_pointer + QUARTER, mask=q_mask, other=0.0)
    q2 = tl.load(q_pointer + 2 * QUARTER, mask=q_mask, other=0.0)
    q3 = tl.load(q_pointer + 3 * QUARTER, mask=q_mask, other=0.0)
    q_sum = tl.sum(q0, 1) + tl.sum(q1, 1) + tl.sum(q2, 1) + tl.sum(q3, 1)
    q_peak = tl.maximum(
        tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1)),
        tl.maximum(tl.max(tl.abs(q2), 1), tl.max(tl.abs(q3), 1)),
    )
    q_peak = tl.where(q_peak > 0, q_peak, 1.0)  # queries are divided by it: any range fits 16 bits
    q0, q1, q2, q3 = q0 / q_peak[:, None], q1 / q_peak[:, None], q2 / q_peak[:, None], q3 / q_peak[:, None]
    CODE: tl.constexpr = tl.float32 if PRECISE else tl.float16
    SPAN: tl.constexpr = 1.0 if LEVELS or PRECISE else 16777216.0  # float16 subnormals: see `_plane`
    STEP: tl.constexpr = 1.0 if LEVELS or PRECISE else 0.25
    PRECISION: tl.constexpr = "ieee" if PRECISE else "tf32"
    shift = tl.zeros_like(q_sum)
    if OFFSET:
        shift = tl.load(offset + (batch64 * heads + head64) * rows_total + rows, mask=in_rows, other=0.0)

    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    bias = tl.zeros([BM], tl.float32)  # sum of weight * min, the same for all channels
    a0 = tl.zeros([BM, BQ], tl.float32)
    a1 = tl.zeros([BM, BQ], tl.float32)
    a2 = tl.zeros([BM, BQ], tl.float32)
    a3 = tl.zeros([BM, BQ], tl.float32)

    # windows
    if CHUNK:
        window_start = 0
        window_stop = tl.minimum(exact_count, exact_count - queries + tl.max(tl.where(in_rows, own, 0)) + 1)
        window_stop = tl.where(split == 0, window_stop, 0)
    else:
        span = tl.cdiv(tl.cdiv(SINK + RING, window_splits), BN) * BN
        window_start = split * span
        window_stop = tl.minimum(window_start + span, SINK + RING)
        window_stop = tl.where(split < window_splits, window_stop, window_start)
    for start in tl.range(window_start, window_stop, BN, num_stages=1):
        index = start + tl.arange(0, BN)
        slot = index - SINK
        if CHUNK:
            slot = index
            in_sink = index < 0
            in_ring = index < exact_count
            visible = index[None, :] <= position[:, None]
        else:
            last = length + queries - 1
            token = slot + (last - slot) // RING * RING
            in_sink = (index < SINK) & (index <= last)
            in_ring = (index >= SINK) & (slot < RING) & (slot <= last) & (token >= SINK)
            token = tl.where(index < SINK, index, token)
            late = token[None, :] >= SINK + bound[:, None]
            visible = (token[None, :] <= position[:, None]) & (late | (index < SINK)[None, :])
        visible = visible & (in_sink | in_ring)[None, :] & in_rows[:, None]
        sink_place = batch64 * sink_batch + head64 * sink_head + index.to(tl.int64)[:, None] * (4 * QUARTER)
        ring_place = batch64 * recent_batch + head64 * recent_head + slot.to(tl.int64)[:, None] * (4 * QUARTER)
        sink_place += columns[None, :]
        ring_place += columns[None, :]
        sink_mask, ring_mask = in_sink[:, None] & in_columns[None, :], in_ring[:, None] & in_columns[None, :]
        k0 = tl.load(recent_keys + ring_place, mask=ring_mask, other=0.0)
        k1 = tl.load(recent_keys + ring_place + QUARTER, mask=ring_mask, other=0.0)
        k2 = tl.load(recent_keys + ring_place + 2 * QUARTER, mask=ring_mask, other=0.0)
        k3 = tl.load(recent_keys + ring_place + 3 * QUARTER, mask=ring_mask, other=0.0)
        v0 = tl.load(recent_values + ring_place, mask=ring_mask, other=0.0)
        v1 = tl.load(recent_values + ring_place + QUARTER, mask=ring_mask, other=0.0)
        v2 = tl.load(recent_values + ring_place + 2 * QUARTER, mask=ring_mask, other=0.0)
        v3 = tl.load(recent_values + ring_place + 3 * QUARTER, mask=ring_mask, other=0.0)
        if not CHUNK:
            k0 += tl.load(sink_keys + sink_place, mask=sink_mask, other=0.0)
            k1 += tl.load(sink_keys + sink_place + QUARTER, mask=sink_mask, other=0.0)
            k2 += tl.load(sink_keys + sink_place + 2 * QUARTER, mask=sink_mask, other=0.0)
            k3 += tl.load(sink_keys + sink_place + 3 * QUARTER, mask=sink_mask, other=0.0)
            v0 += tl.load(sink_values + sink_place, mask=sink_mask, other=0.0)
            v1 += tl.load(sink_values + sink_place + QUARTER, mask=sink_mask, other=0.0)
            v2 += tl.load(sink_values + sink_place + 2 * QUARTER, mask=sink_mask, other=0.0)
            v3 += tl.load(sink_values + sink_place + 3 * QUARTER, mask=sink_mask, other=0.0)
        # 16-bit states are exact in tf32; a chunk's many products are worth the model's own dtype
        STATE: tl.constexpr = k0.dtype if CHUNK and not PRECISE else tl.float32
        logits = tl.dot(q0.to(STATE), tl.trans(k0.to(STATE)), input_precision=PRECISION)
        logits = tl.dot(q1.to(STATE), tl.trans(k1.to(STATE)), logits, input_precision=PRECISION)
        logits = tl.dot(q2.to(STATE), tl.trans(k2.to(STATE)), logits, input_precision=PRECISION)
        logits = tl.dot(q3.to(STATE), tl.trans(k3.to(STATE)), logits, input_precision=PRECISION)
        logits = logits * q_peak[:, None]
        if OFFSET:
            logits += shift[:, None]
        if SOFTCAP:
            logits = _capped(logits, softcap)
        weights, shrink, peak, total = _softmax_step(logits, visible, peak, total)
        weights = weights.to(STATE)
        bias *= shrink
        a0 = tl.dot(weights, v0.to(STATE), a0 * shrink[:, None], input_precision=PRECISION)
        a1 = tl.dot(weights, v1.to(STATE), a1 * shrink[:, None], input_precision=PRECISION)
        a2 = tl.dot(weights, v2.to(STATE), a2 * shrink[:, None], input_precision=PRECISION)
        a3 = tl.dot(weights, v3.to(STATE), a3 * shrink[:, None], input_precision=PRECISION)

    # history
    span = tl.cdiv(tl.cdiv(newest, splits - window_splits), BN) * BN
    first = (split - window_splits) * span
    stop = tl.where(split < window_splits, first, tl.minimum(first + span, newest))
    codes_place = batch64 * codes_batch + head64 * codes_head
    affine_place = batch64 * affine_batch + head64 * affine_head
    for start in range(first, stop, BN):
        index = start + tl.arange(0, BN)
        inside = index < newest
        tokens = index.to(tl.int64)
        place = codes_place + tokens[:, None] * codes_token + columns[None, :]
        mask = inside[:, None] & in_columns[None, :]
        packed = tl.load(k_codes + place, mask=mask, other=0)
        if GROUPS == 1:
            c0 = _plane(packed, 0, level1, level2, LEVELS, PRECISE)
            c1 = _plane(packed, 1, level1, level2, LEVELS, PRECISE)
            c2 = _plane(packed, 2, level1, level2, LEVELS, PRECISE)
            c3 = _plane(packed, 3, level1, level2, LEVELS, PRECISE)
            logits = tl.dot(q0.to(CODE), tl.trans(c0), input_precision=PRECISION)
            logits = tl.dot((q1 * STEP).to(CODE), tl.trans(c1), logits, input_precision=PRECISION)
            logits = tl.dot((q2 * (STEP * STEP)).to(CODE), tl.trans(c2), logits, input_precision=PRECISION)
            logits = tl.dot((q3 * (STEP * STEP * STEP)).to(CODE), tl.trans(c3), logits, input_precision=PRECISION)
            scale, minimum = _affine(k_affine + affine_place, tokens, inside, GROUPS)
            logits = logits * (q_peak * SPAN)[:, None] * scale[None, :] + q_sum[:, None] * minimum[None, :]
        else:
            affine = k_affine + affine_place
            d0 = _dequantized(packed, affine, tokens, inside, columns, 0, level1, level2, QUARTER, GROUPS, LEVELS)
            d1 = _dequantized(packed, affine, tokens, inside, columns, 1, level1, level2, QUARTER, GROUPS, LEVELS)
            d2 = _dequantized(packed, affine, tokens, inside, columns, 2, level1, level2, QUARTER, GROUPS, LEVELS)
            d3 = _dequantized(packed, affine, tokens, inside, columns, 3, level1, level2, QUARTER, GROUPS, LEVELS)
            logits = tl.dot(q0, tl.trans(d0), input_precision=PRECISION)
            logits = tl.dot(q1, tl.trans(d1), logits, input_precision=PRECISION)
            logits = tl.dot(q2, tl.trans(d2), logits, input_precision=PRECISION)
            logits = tl.dot(q3, tl.trans(d3), logits, input_precision=PRECISION)
            logits = logits * q_peak[:, None]
        if OFFSET:
            logits += shift[:, None]
        if SOFTCAP:
            logits = _capped(logits, softcap)
        visible = (index[None, :] < bound[:, None]) & inside[None, :] & in_rows[:, None]
        weights, shrink, peak, total = _softmax_step(logits, visible, peak, total)
        packed = tl.load(v_codes + place, mask=mask, other=0)
        bias *= shrink
        a0, a1, a2, a3 = a0 * shrink[:, None], a1 * shrink[:, None], a2 * shrink[:, None], a3 * shrink[:, None]
        if GROUPS == 1:
            scale, minimum = _affine(v_affine + affine_place, tokens, inside, GROUPS)
            bias += tl.sum(weights * minimum[None, :], 1)
            largest = tl.max(tl.abs(scale), 0)
            largest = tl.where(largest > 0, largest, 1.0)
            weights = (weights * (scale / largest)[None, :]).to(CODE)
            c0 = _plane(packed, 0, level1, level2, LEVELS, PRECISE)
            c1 = _plane(packed, 1, level1, level2, LEVELS, PRECISE)
            c2 = _plane(packed, 2, level1, level2, LEVELS, PRECISE)
            c3 = _plane(packed, 3, level1, level2, LEVELS, PRECISE)
            largest *= SPAN
            a0 += tl.dot(weights, c0, input_precision=PRECISION) * largest
            a1 += tl.dot(weights, c1, input_precision=PRECISION) * (largest * STEP)
            a2 += tl.dot(weights, c2, input_precision=PRECISION) * (largest * (STEP * STEP))
            a3 += tl.dot(weights, c3, input_precision=PRECISION) * (largest * (STEP * STEP * STEP))
        else:
            affine = v_affine + affine_place
            d0 = _dequantized(packed, affine, tokens, inside, columns, 0, level1, level2, QUARTER, GROUPS, LEVELS)
            d1 = _dequantized(packed, affine, tokens, inside, columns, 1, level1, level2, QUARTER, GROUPS, LEVELS)
            d2 = _dequantized(packed, affine, tokens, inside, columns, 2, level1, level2, QUARTER, GROUPS, LEVELS)
            d3 = _dequantized(packed, affine, tokens, inside, columns, 3, level1, level2, QUARTER, GROUPS, LEVELS)
            a0 = tl.dot(weights, d0, a0, input_precision=PRECISION)
            a1 = tl.dot(weights, d1, a1, input_precision=PRECISION)
            a2 = tl.dot(weights, d2, a2, input_precision=PRECISION)
            a3 = tl.dot(weights, d3, a3, input_precision=PRECISION)

    out_row = ((batch64 * heads + head64) * splits + split) * rows_total + rows
    out = partial + out_row[:, None] * (4 * QUARTER) + columns[None, :]
    tl.store(out, a0 + bias[:, None], mask=q_mask)
    tl.store(out + QUARTER, a1 + bias[:, None], mask=q_mask)
    tl.store(out + 2 * QUARTER, a2 + bias[:, None], mask=q_mask)
    tl.store(out + 3 * QUARTER, a3 + bias[:, None], mask=q_mask)
    tl.store(stats + out_row * 2, peak, mask=in_rows)
    tl.store(stats + out_row * 2 + 1, total, mask=in_rows)


def _block(rows: int) -> int:
    return min(MAX_ROWS, max(16, triton.next_power_of_2(rows)))


def step_splits(batch: int, heads: int, capacity: int, windows: int, device: torch.device) -> tuple[int, int]:
    """How many splits a step has, and how many of them are for the windows; depends on shapes alone."""
    wanted = max(1, processors(device) * PROGRAMS // (batch * heads))
    window_splits = -(-windows // WINDOW_SPLIT) if wanted > 4 else 1
    return window_splits + max(1, min(wanted, -(-capacity // 256))), window_splits


def chunk_splits(shape: torch.Size, batch: int, tokens: int, device: torch.device) -> int:
    """How many splits share `tokens` of the history, for queries [B, H_kv, M, D] handled as those of `batch` rows."""
    heads, rows = shape[1], shape[0] * shape[2] // batch
    programs = batch * heads * triton.cdiv(rows, _block(rows))
    return max(1, min(processors(device) * PROGRAMS // programs, -(-tokens // 256)))


def attend_split(
    query: Tensor,
    k_codes: Tensor,
    k_affine: Tensor,
    v_codes: Tensor,
    v_affine: Tensor,
    sink_keys: Tensor,
    sink_values: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
    lengths: Tensor | None,
    floors: Tensor | None,
    *,
    queries: int,
    splits: int | None = None,
    window_splits: int = 0,
    recent_tokens: int = 0,
    history: int = 0,
    softcap: float | None = None,
    offset: Tensor | None = None,
    levels: tuple[float, float] | None = None,
    launch_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Partial attention of each split.

    Args:
        query: [B, H_kv, M, D] float32, rotated, times scaling and log2(e); row `g * queries + i`.
        k_codes: [B, H_kv, C, D/4] uint8; v_codes, k_affine and v_affine ([B, H_kv, C, groups, 2]) likewise.
        v_codes: as k_codes.
        k_affine: scale and min of the keys.
        v_affine: the same of the values.
        sink_keys: [B, H_kv, sink, D]; sink_values the same. Not read for a chunk.
        sink_values: as sink_keys.
        recent_keys: [B, H_kv, R, D], the ring; for a chunk (`lengths` None) all exact keys in order, the queries' own
            last.
        recent_values: as recent_keys.
        lengths: [B] int32, tokens before this step.
        floors: [B] int32, tokens that are in the history whatever the window says.
        queries: new tokens.
        splits: programs that share one head's tokens; in a chunk, the first takes all exact ones. None: as the shapes
            suggest.
        window_splits: how many of them read the windows.
        recent_tokens: of the window, the newest query's included.
        history: for a chunk: tokens of the history that all queries see.
        softcap: as in `reference.attend_blocks`.
        offset: [B, H_kv, M] float32, added to the logits, in base 2.
        levels: what codes 1 and 2 stand for, of 0 to 3; None: 1 and 2.
        launch_pdl: launch while the kernel before still runs.

    Returns:
        tuple: sums [B, H_kv, splits, M, D] float32 of weights times values, and [B, H_kv, splits, M, 2], the largest
        logit and the sum of the weights, in base 2.
    """
    batch, heads, rows, size = query.shape
    chunk = lengths is None
    if splits is None:
        windows = sink_keys.shape[2] + recent_keys.shape[2]
        splits, window_splits = step_splits(batch, heads, k_codes.shape[2], windows, query.device)
    partial = query.new_empty(batch, heads, splits, rows, size)
    stats = query.new_empty(batch, heads, splits, rows, 2)
    block = _block(rows)
    quarter = size // 4
    level1, level2 = levels or (1.0, 2.0)
    precise = recent_keys.dtype == torch.float32
    small = not chunk and block == 16 and k_affine.shape[3] == 1  # registers and shared memory for larger tiles
    with device_guard(query):
        _attend[(splits, triton.cdiv(rows, block), batch * heads)](
            query, k_codes, k_affine, v_codes, v_affine, sink_keys, sink_values, recent_keys, recent_values,
            lengths, floors, offset, partial, stats,
            queries, rows, history, recent_keys.shape[2], (softcap or 0.0) * LOG2E, level1, level2,
            k_codes.stride(0), k_codes.stride(1), k_codes.stride(2), k_affine.stride(0), k_affine.stride(1),
            k_codes.shape[2], sink_keys.stride(0), sink_keys.stride(1), recent_keys.stride(0), recent_keys.stride(1),
            recent_tokens, heads, splits, window_splits,
            SINK=sink_keys.shape[2], RING=1 if chunk else recent_keys.shape[2], QUARTER=quarter,
            BQ=max(16, triton.next_power_of_2(quarter)), BM=block,
            BN=32 if size > 128 or precise else 2 * BLOCK_TOKENS if small else BLOCK_TOKENS,
            GROUPS=k_affine.shape[3], CHUNK=chunk, SOFTCAP=softcap is not None, OFFSET=offset is not None,
            LEVELS=levels is not None, PRECISE=precise, PDL=launch_pdl,
            num_warps=WARPS, num_stages=2, **dependent_launch(launch_pdl),
        )  # fmt: skip
    return partial, stats
