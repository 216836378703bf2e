"""Decode attention over sink, ring and packed history, in Gluon: see `decode` for its launch."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from . import gluon_parts as parts


@gluon.jit
def _history(
    q, k_codes, k_affine, v_codes, v_affine, acc, stats, length, floor, n, window, first, last, stop, settled,
    M: gl.constexpr, D: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, BF16: gl.constexpr,
    PDL: gl.constexpr, INT8: gl.constexpr,
):  # fmt: skip
    """Tiles `first` to `last` of the history.

    INT8, for at most 4 rows: keys on integer tensor cores, the query in 16 bits, high bytes in even and low
    bytes in odd columns.
    """
    T: gl.constexpr = 64
    N: gl.constexpr = T * W
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    STEP: gl.constexpr = 2 if INT8 else 1
    C: gl.constexpr = 8 // STEP  # columns: query rows
    halves: gl.constexpr = gl.split(gl.zeros([W, T, 8], gl.int32, mma).reshape([W, T, 4, 2]))[0].type.layout
    score: gl.constexpr = halves if INT8 else mma
    row_layout: gl.constexpr = gl.SliceLayout(1, score)  # [W, C]
    token_layout: gl.constexpr = gl.SliceLayout(2, score)  # [W, T]
    column_layout: gl.constexpr = gl.SliceLayout(1, mma)  # [W, 8]

    buffers = (
        gl.allocate_shared_memory(gl.int16, [STAGES, N, 16], parts.tile_layout(W, False, False)),
        gl.allocate_shared_memory(gl.int32, [STAGES, N], parts.affine_layout(W, False)),
        gl.allocate_shared_memory(gl.int16, [STAGES, N, 16], parts.tile_layout(W, False, False)),
        gl.allocate_shared_memory(gl.int32, [STAGES, N], parts.affine_layout(W, False)),
    )
    k_words, k_pairs, v_words, v_pairs = buffers

    early = (first + STAGES - 1) * N <= settled
    if PDL:
        if early:
            for stage in gl.static_range(STAGES - 1):
                if first + stage < last:
                    parts.copy_tile(buffers, stage, k_codes, k_affine, v_codes, v_affine, (first + stage) * N, stop, W)
                async_copy.commit_group()
        parts.wait()
    if not (PDL and early):
        for stage in gl.static_range(STAGES - 1):
            if first + stage < last:
                parts.copy_tile(buffers, stage, k_codes, k_affine, v_codes, v_affine, (first + stage) * N, stop, W)
            async_copy.commit_group()

    x0 = parts.load_queries(q, 0, W, STEP, M, D)
    x1 = parts.load_queries(q, 1, W, STEP, M, D)
    x2 = parts.load_queries(q, 2, W, STEP, M, D)
    x3 = parts.load_queries(q, 3, W, STEP, M, D)
    largest = gl.maximum(gl.maximum(gl.abs(x0), gl.abs(x1)), gl.maximum(gl.abs(x2), gl.abs(x3)))
    if INT8:
        largest = gl.maximum(gl.max(largest, axis=2), 1e-30)
        norm = (32000.0 / largest)[:, :, None]
        d0 = parts.nearest(x0 * norm)
        d1 = parts.nearest(x1 * (norm * 0.25))
        d2 = parts.nearest(x2 * norm)
        d3 = parts.nearest(x3 * (norm * 0.25))
        total = gl.sum(d0 + d2 + 4 * (d1 + d3), axis=2).to(gl.float32)
        unit = gl.convert_layout(largest * (1.0 / 32000), column_layout)
        total = gl.convert_layout(total, column_layout)
        unit = gl.convert_layout(gl.split(unit.reshape([W, 4, 2]))[0], row_layout, assert_trivial=True)
        total = gl.convert_layout(gl.split(total.reshape([W, 4, 2]))[0], row_layout, assert_trivial=True)
        q0 = parts.query_bytes(d0, mma)
        q1 = parts.query_bytes(d1, mma)
        q2 = parts.query_bytes(d2, mma)
        q3 = parts.query_bytes(d3, mma)
    else:
        exponent = gl.minimum(gl.maximum(parts.exponent(gl.max(largest, axis=2)), -100), 100)
        norm = parts.power(13 - exponent)[:, :, None]
        x0 = x0 * norm
        x1 = x1 * (norm * 0.25)
        x2 = x2 * (norm * 0.0625)
        x3 = x3 * (norm * 0.015625)
        d0 = (x0 - x1).to(gl.float16)  # sum_j x_j code_j 4^j = sum_j (x_j - x_(j + 1)) (code_0 + ... + code_j 4^j)
        d1 = (x1 - x2).to(gl.float16)
        d2 = (x2 - x3).to(gl.float16)
        d3 = x3.to(gl.float16)
        total = d0.to(gl.float32) + 5 * d1.to(gl.float32) + 21 * d2.to(gl.float32) + 85 * d3.to(gl.float32)
        total = gl.sum(total, axis=2) * (1.0 / 16777216)  # of the rounded query
        unit = gl.convert_layout(
            parts.power(exponent + 11), column_layout
        )  # logit = unit * (scale q.code + min sum(q))
        total = gl.convert_layout(total, column_layout)
        q0, q4 = parts.query_operands(d0, mma)
        q1, q5 = parts.query_operands(d1, mma)
        q2, q6 = parts.query_operands(d2, mma)
        q3, q7 = parts.query_operands(d3, mma)

    query = gl.arange(0, C, layout=gl.SliceLayout(0, row_layout))
    bound = gl.maximum(length + query % n + 1 - window, floor)
    order = gl.arange(0, T, layout=gl.SliceLayout(0, token_layout))
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, token_layout))
    token = (warp * T)[:, None] + ((order & 7) * 8 + (order >> 3))[None, :]
    sure = gl.maximum(length + 1 - window, floor)  # tokens that every row sees

    peak = gl.full([W, C], -1e30, gl.float32, row_layout)  # running maximum of the logits
    level = gl.full([W], 2.0**-40, gl.float32, gl.SliceLayout(1, token_layout))  # and of the scales of V
    base = gl.full([W, C], -1e30, gl.float32, row_layout)  # weights are exp2(logit - base)
    zero = gl.zeros([W, 16, 8], gl.float32, mma)
    o0 = zero
    o1 = zero
    o2 = zero
    o3 = zero
    o4 = zero
    o5 = zero
    o6 = zero
    o7 = zero
    blocks: gl.constexpr = gl.zeros([W, T, C], gl.float32, score).reshape([W, T // 8, 8, C]).sum(1).type.layout
    weight = gl.zeros([W, 8, C], gl.float32, blocks)
    offset = gl.zeros([W, 8, C], gl.float32, blocks)

    slot = first * 0
    free = slot + STAGES - 1
    for tile in range(first, last):
        async_copy.wait_group(STAGES - 2)
        ahead = tile + STAGES - 1
        if ahead < last:
            parts.copy_tile(buffers, free, k_codes, k_affine, v_codes, v_affine, ahead * N, stop, W)
        async_copy.commit_group()

        if INT8:
            keys = k_words.index(slot)._reinterpret(gl.int8, [W, T, 32], parts.byte_layout(W))
            keys = keys.load(gl.DotOperandLayout(0, mma, 4))
            x = gl.zeros([W, T, 8], gl.int32, mma)
            x = mma_v2(parts.code_bytes(keys, 0), q0, x)
            x = mma_v2(parts.code_bytes(keys, 1), q1, x)
            keys = parts.high_codes(keys)
            x = mma_v2(parts.code_bytes(keys, 0), q2, x)
            x = mma_v2(parts.code_bytes(keys, 1), q3, x)
            high, low = gl.split(x.reshape([W, T, 4, 2]))
            s = (high * 256 + low).to(gl.float32)
        else:
            words = (
                k_words.index(slot)
                ._reinterpret(gl.int16, [W, T, 16], parts.tile_layout(W, False, True))
                .load(a_layout)
            )
            s = gl.zeros([W, T, 8], gl.float32, mma)
            s = mma_v2(parts.codes(words, 0), q0, s)
            s = mma_v2(parts.codes(words, 1), q1, s)
            s = mma_v2(parts.codes(words, 2), q2, s)
            s = mma_v2(parts.codes(words, 3), q3, s)
            words = parts.high_bytes(words)
            s = mma_v2(parts.codes(words, 0), q4, s)
            s = mma_v2(parts.codes(words, 1), q5, s)
            s = mma_v2(parts.codes(words, 2), q6, s)
            s = mma_v2(words.to(gl.float16, bitcast=True), q7, s)
        pairs = k_pairs.index(slot)._reinterpret(gl.int32, [W, T], parts.affine_layout(W, True)).load(token_layout)
        scale, minimum = parts.scale_min(pairs, BF16)
        s = gl.fma(s, scale[:, :, None], minimum[:, :, None] * total[:, None, :])
        pairs = v_pairs.index(slot)._reinterpret(gl.int32, [W, T], parts.affine_layout(W, True)).load(token_layout)
        if tile * N + N > sure:
            position = tile * N + token
            s = gl.where(position[:, :, None] < bound[None, :][:, None, :], s, float("-inf"))
            pairs = gl.where(position < stop, pairs, 0)

        scale, minimum = parts.scale_min(pairs, BF16)
        peak = gl.maximum(peak, gl.max(s, axis=1) * unit)
        level = gl.maximum(level, gl.max(scale, axis=1))
        shift = gl.convert_layout((parts.exponent(level) - 14).to(gl.float32), gl.SliceLayout(1, row_layout), True)
        new_base = peak + shift[:, None]
        shrink = parts.exp2(base - new_base)
        base = new_base
        p = parts.exp2(gl.fma(s, unit[:, None, :], -base[:, None, :]))
        lanes = gl.convert_layout(shrink, gl.SliceLayout(1, blocks), True)[:, None, :]
        weight = gl.fma(weight, lanes, p.reshape([W, T // 8, 8, C]).sum(1))
        offset = gl.fma(offset, lanes, (p * minimum[:, :, None]).reshape([W, T // 8, 8, C]).sum(1))
        p = p * scale[:, :, None]
        if INT8:
            p = gl.join(p, gl.zeros_like(p)).reshape([W, T, 8])
            p = gl.convert_layout(p, mma, assert_trivial=True)
            shrink = parts.spread(shrink, gl.full_like(shrink, 1.0), column_layout)
        p = parts.transpose_blocks(p.to(gl.float16))

        words = v_words.index(slot)._reinterpret(gl.int16, [W, 16, T], parts.tile_layout(W, True, True)).load(a_layout)
        shrink = shrink[:, None, :]
        o0 = mma_v2(parts.codes(words, 0), p, o0 * shrink)
        o1 = mma_v2(parts.codes(words, 1), p, o1 * shrink)
        o2 = mma_v2(parts.codes(words, 2), p, o2 * shrink)
        o3 = mma_v2(parts.codes(words, 3), p, o3 * shrink)
        words = parts.high_bytes(words)
        o4 = mma_v2(parts.codes(words, 0), p, o4 * shrink)
        o5 = mma_v2(parts.codes(words, 1), p, o5 * shrink)
        o6 = mma_v2(parts.codes(words, 2), p, o6 * shrink)
        o7 = mma_v2(words.to(gl.float16, bitcast=True), p, o7 * shrink)
        free = slot
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)

    weight = gl.convert_layout(weight.sum(1), row_layout)
    offset = gl.convert_layout(offset.sum(1), row_layout)
    if INT8:
        weight = parts.spread(weight, weight, column_layout)
        offset = parts.spread(offset, offset, column_layout)
        base = parts.spread(base, base, column_layout)
    o3 -= o2
    o2 -= o1
    o1 -= o0
    o7 -= o6
    o6 -= o5
    o5 -= o4
    parts.store_combined(acc, stats, o0, o1, o2, o3, o4, o5, o6, o7, base, weight, offset, STEP, M, D)


@gluon.jit
def _exact(
    q, sink_keys, sink_values, recent_keys, recent_values, acc, stats, length, floor, n, sink, window, ring,
    first, step,
    M: gl.constexpr, D: gl.constexpr, W: gl.constexpr, E: gl.constexpr,
):  # fmt: skip
    """Blocks of E sink and ring slots, one in `step`."""
    T: gl.constexpr = E // W
    dtype: gl.constexpr = sink_keys.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)
    token_layout: gl.constexpr = gl.SliceLayout(2, mma)
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [W, 1], [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    tiled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    keys = gl.allocate_shared_memory(dtype, [E, D], swizzled)
    values = gl.allocate_shared_memory(dtype, [E, D], swizzled)

    channel = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(2, b_layout)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, b_layout)))
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, b_layout)))
    place = (warp[:, None] * 0 + channel[None, :])[:, :, None] + (column * D)[None, None, :]
    x = gl.load(q + place, mask=(column < M)[None, None, :] & (place >= 0), other=0.0)
    exponent = gl.minimum(gl.maximum(parts.exponent(gl.max(gl.abs(x), axis=1)), -100), 100)
    query_operand = (x * parts.power(13 - exponent)[:, None, :]).to(dtype)
    unit = gl.convert_layout(parts.power(exponent - 13), row_layout)

    query = gl.arange(0, 8, layout=gl.SliceLayout(0, row_layout))
    last_seen = length + query % n
    bound = sink + gl.maximum(last_seen + 1 - window, floor)
    total = length + n
    sure = sink + gl.maximum(length + 1 - window, floor)
    peak = gl.full([W, 8], -1e30, gl.float32, row_layout)
    weight = gl.zeros([W, 8], gl.float32, row_layout)
    out = gl.zeros([W, D, 8], gl.float32, mma)
    order = gl.arange(0, T, layout=gl.SliceLayout(0, token_layout))
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, token_layout))
    inside = (warp * T)[:, None] + order[None, :]
    row = gl.arange(0, E, layout=gl.SliceLayout(1, copy))
    element = gl.arange(0, D, layout=gl.SliceLayout(0, copy))

    for block in range(first, (sink + ring + E - 1) // E, step):
        slot = block * E + row
        in_sink = slot < sink
        held = total - 1 - (total - 1 - (slot - sink) + ring) % ring  # the newest token of this slot of the ring
        valid = (in_sink & (slot < total)) | ((slot >= sink) & (slot < sink + ring) & (held >= sure))
        sink_place = slot[:, None] * D + element[None, :]
        ring_place = (slot - sink)[:, None] * D + element[None, :]
        in_sink = in_sink[:, None]
        mask = valid[:, None]
        pointers = gl.where(in_sink, sink_keys + sink_place, recent_keys + ring_place)
        async_copy.async_copy_global_to_shared(keys, pointers, mask=mask)
        async_copy.commit_group()
        pointers = gl.where(in_sink, sink_values + sink_place, recent_values + ring_place)
        async_copy.async_copy_global_to_shared(values, pointers, mask=mask)
        async_copy.commit_group()

        async_copy.wait_group(1)
        s = gl.zeros([W, T, 8], gl.float32, mma)
        s = mma_v2(keys._reinterpret(dtype, [W, T, D], tiled).load(a_layout), query_operand, s)
        slot = block * E + inside
        held = total - 1 - (total - 1 - (slot - sink) + ring) % ring
        token = gl.where(slot < sink, slot, held)[:, :, None]
        lower = gl.where(slot < sink, 0, 1)[:, :, None] * bound[None, :][:, None, :]
        seen = (token >= lower) & (token <= last_seen[None, :][:, None, :]) & (slot < sink + ring)[:, :, None]
        s = gl.where(seen, s * unit[:, None, :], float("-inf"))
        new_peak = gl.maximum(peak, gl.max(s, axis=1))
        shrink = parts.exp2(peak - new_peak)
        peak = new_peak
        p = parts.exp2(s - peak[:, None, :])
        weight = weight * shrink + gl.sum(p, axis=1)
        p = parts.transpose_blocks(p.to(dtype))
        async_copy.wait_group(0)
        transposed = values._reinterpret(dtype, [W, T, D], tiled).permute([0, 2, 1])
        out = mma_v2(transposed.load(a_layout), p, out * shrink[:, None, :])

    common = gl.max(peak, axis=0)
    factor = parts.exp2(peak - common[None, :])
    total = gl.sum(weight * factor, axis=0)
    x = gl.sum(out * factor[:, None, :], axis=0)
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, x.type.layout))
    channel = gl.arange(0, D, layout=gl.SliceLayout(1, x.type.layout))
    gl.store(acc + (row * D)[None, :] + channel[:, None], x, mask=(row < M)[None, :])
    row = gl.arange(0, 8, layout=common.type.layout)
    gl.store(stats + 2 * row, gl.where(total > 0, common, float("-inf")), mask=row < M)
    gl.store(stats + 2 * row + 1, total, mask=row < M)


@gluon.jit(do_not_specialize=["n", "splits", "exact"])
def attend_kernel(
    q, sink_keys, sink_values, recent_keys, recent_values, k_codes, k_affine, v_codes, v_affine,
    lengths, floors, acc, stats, n, heads, sink, recent, ring, splits, exact,
    codes_batch, codes_head, affine_batch, affine_head,
    M: gl.constexpr, D: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, E: gl.constexpr,
    BF16: gl.constexpr, PDL: gl.constexpr, INT8: gl.constexpr,
):  # fmt: skip
    """One program for a split of one KV head: the first `exact` splits take sink and ring, the others history."""
    split = gl.program_id(0)
    pair = gl.program_id(1)
    batch = pair // heads
    head = pair % heads
    if PDL:
        parts.launch_dependents()
    length = gl.load(lengths + batch)
    floor = gl.maximum(gl.load(floors + batch), 0)
    pair = pair.to(gl.int64)
    q += pair * (M * D)
    acc += (pair * splits + split) * (M * D)
    stats += (pair * splits + split) * (M * 2)
    if split < exact:
        if PDL:
            parts.wait()
        _exact(
            q, sink_keys + pair * sink * D, sink_values + pair * sink * D,
            recent_keys + pair * ring * D, recent_values + pair * ring * D,
            acc, stats, length, floor, n, sink, sink + recent, ring, split, exact, M, D, W, E,
        )  # fmt: skip
    else:
        codes = batch.to(gl.int64) * codes_batch + head.to(gl.int64) * codes_head
        affine = batch.to(gl.int64) * affine_batch + head.to(gl.int64) * affine_head
        window = sink + recent
        stop = gl.maximum(length + n - window, floor)
        settled = gl.maximum(length - window, floor)
        tiles = (stop + 64 * W - 1) // (64 * W)
        share = splits - exact
        first = (split - exact) * tiles // share
        last = (split - exact + 1) * tiles // share
        _history(
            q, k_codes + codes, k_affine + affine, v_codes + codes, v_affine + affine, acc, stats,
            length, floor, n, window, first, last, stop, settled, M, D, W, STAGES, BF16, PDL, INT8,
        )  # fmt: skip
