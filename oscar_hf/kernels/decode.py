"""The quickest decode attention, for the commonest shapes: tensor cores of NVIDIA sm_80 and later, in Gluon.

A row's D/4 bytes are D/8 words of 16 bits; bits `2J, 2J + 1` of word `m` hold channel `2m + (J >> 2) + D/4 (J & 3)`.
So a masked word already is the float16 subnormal `code * 4^(J & 3) * 2^-24`, exact on tensor cores: plane `J` of a
tile is an operand [tokens, D/8], its channels are a fixed permutation of the query's, and unpacking is one `and` for
two codes. Codes are the A operand, the query rows (at most 8) are N. `attend.py` computes the same for any shape.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .launch import capability, dependent_launch, dependent_launches, device_guard, processors

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

    AVAILABLE = all(hasattr(gl, name) for name in ("SharedLinearLayout", "DistributedLinearLayout"))
except (ImportError, AttributeError):
    AVAILABLE = False

ROWS = 8  # query rows of a KV head: N of the matrix instruction
WARP_TOKENS = 64  # history tokens of one warp and iteration
EXACT_TOKENS = 64  # sink and ring tokens of one program and iteration
EXACT_COST = 2.0  # time of their bytes to time of as many of the history
PROGRAMS = 6  # of two warps, that a multiprocessor holds at once
MOST_SPLITS = 16  # of a large batch: more would only write more partial results


if AVAILABLE:

    @gluon.jit
    def _wait():
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def _launch_dependents():
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )

    @gluon.jit
    def _exp2(x):
        return gl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
        )

    @gluon.jit
    def _codes(words, J: gl.constexpr):
        """The codes 0 to J of each byte, as `sum_j 4^j code_j * 2^-24` in float16: of words with empty high bytes."""
        if J == 0:
            out = gl.inline_asm_elementwise("and.b32 $0, $1, 0x00030003;", "=r,r", [words], gl.float16, True, 2)
        elif J == 1:
            out = gl.inline_asm_elementwise("and.b32 $0, $1, 0x000F000F;", "=r,r", [words], gl.float16, True, 2)
        elif J == 2:
            out = gl.inline_asm_elementwise("and.b32 $0, $1, 0x003F003F;", "=r,r", [words], gl.float16, True, 2)
        else:
            out = gl.inline_asm_elementwise("and.b32 $0, $1, 0x00FF00FF;", "=r,r", [words], gl.float16, True, 2)
        return out

    @gluon.jit
    def _high_bytes(words):
        """High byte of each word, one instruction for two words."""
        return gl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [words], gl.int16, True, 2)

    @gluon.jit
    def _bytes(rows, J: gl.constexpr):
        """Code 0 of each byte, or four times code 1."""
        if J == 0:
            out = gl.inline_asm_elementwise("and.b32 $0, $1, 0x03030303;", "=r,r", [rows], gl.int8, True, 4)
        else:
            out = gl.inline_asm_elementwise("and.b32 $0, $1, 0x0C0C0C0C;", "=r,r", [rows], gl.int8, True, 4)
        return out

    @gluon.jit
    def _high_codes(rows):
        return gl.inline_asm_elementwise("shr.b32 $0, $1, 4;", "=r,r", [rows], gl.int8, True, 4)

    @gluon.jit
    def _transpose_blocks(p):
        """Weights [W, T, 8] of the accumulator's layout as the B operand: each 8 x 8 block by one `movmatrix`."""
        W: gl.constexpr = p.shape[0]
        T: gl.constexpr = p.shape[1]
        mma: gl.constexpr = p.type.layout
        moved = gl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], p.dtype, True, 2
        )
        moved = moved.reshape([W, T // 8, 8, 8]).permute([0, 1, 3, 2]).reshape([W, T, 8])
        return gl.convert_layout(moved, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)

    @gluon.jit
    def _scale_min(affine, BF16: gl.constexpr):
        """float32 scale and min of 16 bits each, packed in int32."""
        if BF16:
            scale = (affine << 16).to(gl.float32, bitcast=True)
            minimum = (affine & -65536).to(gl.float32, bitcast=True)
        else:
            scale = affine.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            minimum = (affine >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        return scale, minimum

    @gluon.jit
    def _power(exponent):
        """2^exponent of int32 in [-126, 127]."""
        return ((exponent + 127) << 23).to(gl.float32, bitcast=True)

    @gluon.jit
    def _exponent(x):
        """Least e with |x| < 2^e, for normal x; int32."""
        return ((x.to(gl.int32, bitcast=True) >> 23) & 255) - 126

    @gluon.constexpr_function
    def _tile_layout(warps, transposed, tile):
        """Shared rows of 32 bytes, 64 a warp, 16-byte halves swizzled so that copies and ldmatrix meet no conflict.

        Four tokens fill a line of 128 bytes, as they do in memory: a copy that scattered them would ask L2 for every
        half row alone. Half h of token 8g + i is in column (2i + h) & 7 ^ g of its line, so that the eight tokens
        8g + i of an 8 x 8 matrix lie in different banks. `tile`: as [W, 64, 16] in the order 8i + g (or its
        transpose), otherwise as [64 W, 16] in the order of tokens.
        """
        bases = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0], [4, 0], [8, 8], [17, 0], [34, 0]]
        out = []
        for token, word in bases:
            if tile:
                row = (token >> 3) | (token & 7) << 3
                out.append([0, word, row] if transposed else [0, row, word])
            else:
                out.append([token, word])
        for bit in range(warps.bit_length() - 1):
            out.append([1 << bit, 0, 0] if tile else [64 << bit, 0])
        return gl.SharedLinearLayout(out)

    @gluon.constexpr_function
    def _byte_layout(warps):
        """The tile of `_tile_layout` as bytes, [W, 64, 32]."""
        words = _tile_layout(warps, False, True).offset_bases
        return gl.SharedLinearLayout([[0, 0, 1]] + [[warp, row, 2 * word] for warp, row, word in words])

    @gluon.constexpr_function
    def _affine_layout(warps, tile):
        """int32 a token: as [W, 64] in the order of a tile, otherwise as [64 W]."""
        bits = warps.bit_length() - 1
        if tile:
            bases = [[0, 8], [0, 16], [0, 32], [0, 1], [0, 2], [0, 4]] + [[1 << bit, 0] for bit in range(bits)]
        else:
            bases = [[1 << bit] for bit in range(6 + bits)]
        return gl.SharedLinearLayout(bases)

    @gluon.constexpr_function
    def _copy_layout(warps):
        """16 bytes a lane, each warp its own 64 rows."""
        bits = warps.bit_length() - 1
        return gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [16, 0], [32, 0]],
            [[0, 8], [1, 0], [2, 0], [4, 0], [8, 0]],
            [[64 << bit, 0] for bit in range(bits)],
            [],
            [64 * warps, 16],
        )

    @gluon.constexpr_function
    def _copy_affine_layout(warps):
        bits = warps.bit_length() - 1
        return gl.DistributedLinearLayout(
            [[1], [2]], [[4], [8], [16], [32], [0]], [[64 << bit] for bit in range(bits)], [], [64 * warps]
        )

    @gluon.constexpr_function
    def _query_layout(warps):
        """[W, 8, 32] such that the even and odd channels are B operands of planes J and J + 4."""
        bits = warps.bit_length() - 1
        return gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [0, 0, 16]],
            [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
            [[1 << bit, 0, 0] for bit in range(bits)],
            [],
            [warps, 8, 32],
        )

    @gluon.constexpr_function
    def _sum_bases(warps):
        bases = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 8], [0, 4, 16]]
        return bases + [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]

    @gluon.constexpr_function
    def _sum_layout(warps):
        """float32 [W, 8, 32], swizzled for accumulators that are written two channels at a time."""
        return gl.SharedLinearLayout(_sum_bases(warps))

    @gluon.constexpr_function
    def _sum_rows_layout(warps):
        """Four of them as [W, 8, 128]."""
        return gl.SharedLinearLayout([*_sum_bases(warps), [0, 0, 32], [0, 0, 64]])

    @gluon.constexpr_function
    def _add_layout(warps):
        """[W, 8, 128]: a row a warp, all of W in one thread."""
        bits = warps.bit_length() - 1
        registers = [[0, 0, 1], [0, 0, 2]] + [[1 << bit, 0, 0] for bit in range(bits)]
        registers += [[0, 1 << bit, 0] for bit in range(bits, 3)]
        lanes = [[0, 0, 4 << bit] for bit in range(5)]
        return gl.DistributedLinearLayout(
            registers, lanes, [[0, 1 << bit, 0] for bit in range(bits)], [], [warps, 8, 128]
        )

    @gluon.jit
    def _copy_tile(
        buffers, stage, k_codes, k_affine, v_codes, v_affine, start, stop, W: gl.constexpr
    ):  # one group of copies; rows from `stop` on, rounded up to 4, are not read
        N: gl.constexpr = 64 * W
        layout: gl.constexpr = _copy_layout(W)
        k_words, k_pairs, v_words, v_pairs = buffers
        row = gl.arange(0, N, layout=gl.SliceLayout(1, layout))
        word = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
        offset = row[:, None] * 16 + word[None, :]
        token = gl.arange(0, N, layout=_copy_affine_layout(W))
        base = start.to(gl.int64)
        if start + N <= stop:
            async_copy.async_copy_global_to_shared(k_words.index(stage), k_codes + base * 16 + offset)
            async_copy.async_copy_global_to_shared(k_pairs.index(stage), k_affine + base + token)
            async_copy.async_copy_global_to_shared(v_words.index(stage), v_codes + base * 16 + offset)
            async_copy.async_copy_global_to_shared(v_pairs.index(stage), v_affine + base + token)
        else:
            left = gl.multiple_of((stop - start + 3) // 4 * 4, 4)
            rows = (row < left)[:, None]
            async_copy.async_copy_global_to_shared(k_words.index(stage), k_codes + base * 16 + offset, mask=rows)
            async_copy.async_copy_global_to_shared(k_pairs.index(stage), k_affine + base + token, mask=token < left)
            async_copy.async_copy_global_to_shared(v_words.index(stage), v_codes + base * 16 + offset, mask=rows)
            async_copy.async_copy_global_to_shared(v_pairs.index(stage), v_affine + base + token, mask=token < left)

    @gluon.jit
    def _query_operands(x, mma: gl.constexpr):
        """B operands [W, 16, 8] of the even and of the odd channels of float16 [W, 8, 32]."""
        W: gl.constexpr = x.shape[0]
        low, high = gl.split(x.reshape([W, 8, 16, 2]))
        operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
        low = gl.convert_layout(low.permute([0, 2, 1]), operand, assert_trivial=True)
        high = gl.convert_layout(high.permute([0, 2, 1]), operand, assert_trivial=True)
        return low, high

    @gluon.jit
    def _round(x):
        """Nearest int32 of |x| < 2^22."""
        return (x + 12582912.0).to(gl.int32, bitcast=True) - 0x4B400000

    @gluon.jit
    def _query_bytes(x, mma: gl.constexpr):
        """B operand int8 [W, 32, 8] of int32 [W, 8, 32], even rows its high bytes, odd rows its low ones."""
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))[None, :][:, :, None]
        high = (x + 128) >> 8
        x = gl.where(column % 2 == 0, high, x - high * 256).to(gl.int8)
        return gl.convert_layout(x.permute([0, 2, 1]), gl.DotOperandLayout(1, mma, 4), assert_trivial=True)

    @gluon.jit
    def _spread(x, other, layout: gl.constexpr):
        """[W, 4] to the even columns of [W, 8], `other` to the odd ones."""
        return gl.convert_layout(gl.join(x, other).reshape([x.shape[0], 8]), layout, assert_trivial=True)

    @gluon.jit
    def _join_planes(low, high, shift, factor, j: gl.constexpr):
        """Planes j and j + 4, [W, 16, 8] each, as channels 32 j, 32 j + 1, ...: [W, 8, 32]."""
        W: gl.constexpr = low.shape[0]
        factor = factor * (16777216.0 / (1 << (2 * j)))
        low = gl.fma(low, factor, shift)
        high = gl.fma(high, factor, shift)
        return gl.join(low, high).permute([0, 2, 1, 3]).reshape([W, 8, 32])

    @gluon.jit
    def _store_combined(
        acc, stats, o0, o1, o2, o3, o4, o5, o6, o7, base, weight, offset,
        STEP: gl.constexpr, M: gl.constexpr, D: gl.constexpr,
    ):  # fmt: skip
        """The sum of the warps' results: through shared memory, so that one thread adds them and rows leave whole."""
        W: gl.constexpr = base.shape[0]
        common = gl.max(base, axis=0)
        factor = _exp2(base - common[None, :])
        total = gl.sum(weight * factor, axis=0)
        shift = (offset * factor)[:, None, :]
        factor = factor[:, None, :]
        buffer = gl.allocate_shared_memory(gl.float32, [4, W, 8, 32], _sum_layout(W))
        for j in gl.static_range(4):
            if j == 0:
                x = _join_planes(o0, o4, shift, factor, 0)
            elif j == 1:
                x = _join_planes(o1, o5, shift, factor, 1)
            elif j == 2:
                x = _join_planes(o2, o6, shift, factor, 2)
            else:
                x = _join_planes(o3, o7, shift, factor, 3)
            buffer.index(j).store(x)
        layout: gl.constexpr = _add_layout(W)
        x = gl.sum(buffer._reinterpret(gl.float32, [W, 8, 128], _sum_rows_layout(W)).load(layout), axis=0)
        row = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(0, layout)))
        channel = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
        mask = (row < M * STEP) & (row % STEP == 0)
        gl.store(acc + (row // STEP)[:, None] * D + channel[None, :], x, mask=mask[:, None])
        row = gl.arange(0, 8, layout=common.type.layout)
        mask = (row < M * STEP) & (row % STEP == 0)
        gl.store(stats + row // STEP * 2, gl.where(total > 0, common, float("-inf")), mask=mask)
        gl.store(stats + row // STEP * 2 + 1, total, mask=mask)

    @gluon.jit
    def _load_queries(q, j: gl.constexpr, W: gl.constexpr, STEP: gl.constexpr, M: gl.constexpr, D: gl.constexpr):
        layout: gl.constexpr = _query_layout(W)
        warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        channel = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        offset = (warp[:, None] * 0 + row[None, :] // STEP)[:, :, None] * D + (32 * j + channel)[None, None, :]
        return gl.load(q + offset, mask=(row < M * STEP)[None, :, None] & (offset >= 0), other=0.0)

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
            gl.allocate_shared_memory(gl.int16, [STAGES, N, 16], _tile_layout(W, False, False)),
            gl.allocate_shared_memory(gl.int32, [STAGES, N], _affine_layout(W, False)),
            gl.allocate_shared_memory(gl.int16, [STAGES, N, 16], _tile_layout(W, False, False)),
            gl.allocate_shared_memory(gl.int32, [STAGES, N], _affine_layout(W, False)),
        )
        k_words, k_pairs, v_words, v_pairs = buffers

        early = (first + STAGES - 1) * N <= settled
        if PDL:
            if early:
                for stage in gl.static_range(STAGES - 1):
                    if first + stage < last:
                        _copy_tile(buffers, stage, k_codes, k_affine, v_codes, v_affine, (first + stage) * N, stop, W)
                    async_copy.commit_group()
            _wait()
        if not (PDL and early):
            for stage in gl.static_range(STAGES - 1):
                if first + stage < last:
                    _copy_tile(buffers, stage, k_codes, k_affine, v_codes, v_affine, (first + stage) * N, stop, W)
                async_copy.commit_group()

        x0 = _load_queries(q, 0, W, STEP, M, D)
        x1 = _load_queries(q, 1, W, STEP, M, D)
        x2 = _load_queries(q, 2, W, STEP, M, D)
        x3 = _load_queries(q, 3, W, STEP, M, D)
        largest = gl.maximum(gl.maximum(gl.abs(x0), gl.abs(x1)), gl.maximum(gl.abs(x2), gl.abs(x3)))
        if INT8:
            largest = gl.maximum(gl.max(largest, axis=2), 1e-30)
            norm = (32000.0 / largest)[:, :, None]
            d0 = _round(x0 * norm)
            d1 = _round(x1 * (norm * 0.25))
            d2 = _round(x2 * norm)
            d3 = _round(x3 * (norm * 0.25))
            total = gl.sum(d0 + d2 + 4 * (d1 + d3), axis=2).to(gl.float32)
            unit = gl.convert_layout(largest * (1.0 / 32000), column_layout)
            total = gl.convert_layout(total, column_layout)
            unit = gl.convert_layout(gl.split(unit.reshape([W, 4, 2]))[0], row_layout, assert_trivial=True)
            total = gl.convert_layout(gl.split(total.reshape([W, 4, 2]))[0], row_layout, assert_trivial=True)
            q0 = _query_bytes(d0, mma)
            q1 = _query_bytes(d1, mma)
            q2 = _query_bytes(d2, mma)
            q3 = _query_bytes(d3, mma)
        else:
            exponent = gl.minimum(gl.maximum(_exponent(gl.max(largest, axis=2)), -100), 100)
            norm = _power(13 - exponent)[:, :, None]
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
                _power(exponent + 11), column_layout
            )  # logit = unit * (scale q.code + min sum(q))
            total = gl.convert_layout(total, column_layout)
            q0, q4 = _query_operands(d0, mma)
            q1, q5 = _query_operands(d1, mma)
            q2, q6 = _query_operands(d2, mma)
            q3, q7 = _query_operands(d3, mma)

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
                _copy_tile(buffers, free, k_codes, k_affine, v_codes, v_affine, ahead * N, stop, W)
            async_copy.commit_group()

            if INT8:
                keys = k_words.index(slot)._reinterpret(gl.int8, [W, T, 32], _byte_layout(W))
                keys = keys.load(gl.DotOperandLayout(0, mma, 4))
                x = gl.zeros([W, T, 8], gl.int32, mma)
                x = mma_v2(_bytes(keys, 0), q0, x)
                x = mma_v2(_bytes(keys, 1), q1, x)
                keys = _high_codes(keys)
                x = mma_v2(_bytes(keys, 0), q2, x)
                x = mma_v2(_bytes(keys, 1), q3, x)
                high, low = gl.split(x.reshape([W, T, 4, 2]))
                s = (high * 256 + low).to(gl.float32)
            else:
                words = (
                    k_words.index(slot)._reinterpret(gl.int16, [W, T, 16], _tile_layout(W, False, True)).load(a_layout)
                )
                s = gl.zeros([W, T, 8], gl.float32, mma)
                s = mma_v2(_codes(words, 0), q0, s)
                s = mma_v2(_codes(words, 1), q1, s)
                s = mma_v2(_codes(words, 2), q2, s)
                s = mma_v2(_codes(words, 3), q3, s)
                words = _high_bytes(words)
                s = mma_v2(_codes(words, 0), q4, s)
                s = mma_v2(_codes(words, 1), q5, s)
                s = mma_v2(_codes(words, 2), q6, s)
                s = mma_v2(words.to(gl.float16, bitcast=True), q7, s)
            pairs = k_pairs.index(slot)._reinterpret(gl.int32, [W, T], _affine_layout(W, True)).load(token_layout)
            scale, minimum = _scale_min(pairs, BF16)
            s = gl.fma(s, scale[:, :, None], minimum[:, :, None] * total[:, None, :])
            pairs = v_pairs.index(slot)._reinterpret(gl.int32, [W, T], _affine_layout(W, True)).load(token_layout)
            if tile * N + N > sure:
                position = tile * N + token
                s = gl.where(position[:, :, None] < bound[None, :][:, None, :], s, float("-inf"))
                pairs = gl.where(position < stop, pairs, 0)

            scale, minimum = _scale_min(pairs, BF16)
            peak = gl.maximum(peak, gl.max(s, axis=1) * unit)
            level = gl.maximum(level, gl.max(scale, axis=1))
            shift = gl.convert_layout((_exponent(level) - 14).to(gl.float32), gl.SliceLayout(1, row_layout), True)
            new_base = peak + shift[:, None]
            shrink = _exp2(base - new_base)
            base = new_base
            p = _exp2(gl.fma(s, unit[:, None, :], -base[:, None, :]))
            lanes = gl.convert_layout(shrink, gl.SliceLayout(1, blocks), True)[:, None, :]
            weight = gl.fma(weight, lanes, p.reshape([W, T // 8, 8, C]).sum(1))
            offset = gl.fma(offset, lanes, (p * minimum[:, :, None]).reshape([W, T // 8, 8, C]).sum(1))
            p = p * scale[:, :, None]
            if INT8:
                p = gl.join(p, gl.zeros_like(p)).reshape([W, T, 8])
                p = gl.convert_layout(p, mma, assert_trivial=True)
                shrink = _spread(shrink, gl.full_like(shrink, 1.0), column_layout)
            p = _transpose_blocks(p.to(gl.float16))

            words = v_words.index(slot)._reinterpret(gl.int16, [W, 16, T], _tile_layout(W, True, True)).load(a_layout)
            shrink = shrink[:, None, :]
            o0 = mma_v2(_codes(words, 0), p, o0 * shrink)
            o1 = mma_v2(_codes(words, 1), p, o1 * shrink)
            o2 = mma_v2(_codes(words, 2), p, o2 * shrink)
            o3 = mma_v2(_codes(words, 3), p, o3 * shrink)
            words = _high_bytes(words)
            o4 = mma_v2(_codes(words, 0), p, o4 * shrink)
            o5 = mma_v2(_codes(words, 1), p, o5 * shrink)
            o6 = mma_v2(_codes(words, 2), p, o6 * shrink)
            o7 = mma_v2(words.to(gl.float16, bitcast=True), p, o7 * shrink)
            free = slot
            slot = gl.where(slot + 1 == STAGES, 0, slot + 1)

        weight = gl.convert_layout(weight.sum(1), row_layout)
        offset = gl.convert_layout(offset.sum(1), row_layout)
        if INT8:
            weight = _spread(weight, weight, column_layout)
            offset = _spread(offset, offset, column_layout)
            base = _spread(base, base, column_layout)
        o3 -= o2
        o2 -= o1
        o1 -= o0
        o7 -= o6
        o6 -= o5
        o5 -= o4
        _store_combined(acc, stats, o0, o1, o2, o3, o4, o5, o6, o7, base, weight, offset, STEP, M, D)

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
        exponent = gl.minimum(gl.maximum(_exponent(gl.max(gl.abs(x), axis=1)), -100), 100)
        query_operand = (x * _power(13 - exponent)[:, None, :]).to(dtype)
        unit = gl.convert_layout(_power(exponent - 13), row_layout)

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
            shrink = _exp2(peak - new_peak)
            peak = new_peak
            p = _exp2(s - peak[:, None, :])
            weight = weight * shrink + gl.sum(p, axis=1)
            p = _transpose_blocks(p.to(dtype))
            async_copy.wait_group(0)
            transposed = values._reinterpret(dtype, [W, T, D], tiled).permute([0, 2, 1])
            out = mma_v2(transposed.load(a_layout), p, out * shrink[:, None, :])

        common = gl.max(peak, axis=0)
        factor = _exp2(peak - common[None, :])
        total = gl.sum(weight * factor, axis=0)
        x = gl.sum(out * factor[:, None, :], axis=0)
        row = gl.arange(0, 8, layout=gl.SliceLayout(0, x.type.layout))
        channel = gl.arange(0, D, layout=gl.SliceLayout(1, x.type.layout))
        gl.store(acc + (row * D)[None, :] + channel[:, None], x, mask=(row < M)[None, :])
        row = gl.arange(0, 8, layout=common.type.layout)
        gl.store(stats + 2 * row, gl.where(total > 0, common, float("-inf")), mask=row < M)
        gl.store(stats + 2 * row + 1, total, mask=row < M)

    @gluon.jit(do_not_specialize=["n", "splits", "exact"])
    def _attend_kernel(
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
            _launch_dependents()
        length = gl.load(lengths + batch)
        floor = gl.maximum(gl.load(floors + batch), 0)
        pair = pair.to(gl.int64)
        q += pair * (M * D)
        acc += (pair * splits + split) * (M * D)
        stats += (pair * splits + split) * (M * 2)
        if split < exact:
            if PDL:
                _wait()
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


def supports(size: int, rows: int, groups: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `decode_split` takes heads of this size, query rows a KV head, groups and dtype of the windows."""
    shape = size == 128 and 1 <= rows <= ROWS and groups == 1 and dtype in (torch.float16, torch.bfloat16)
    return AVAILABLE and shape and capability(device) >= (8, 0)


@functools.cache
def choose_splits(pairs: int, capacity: int, slots: int, places: int) -> tuple[int, int]:
    """How many programs each of `pairs` KV heads gets, and how many of them take the `slots` of sink and ring.

    `places` programs run at once. Programs come in whole waves, so the best count is the one whose waves are fullest:
    it depends on shapes alone. A program should have two tiles of history at least.
    """

    def exact(splits: int) -> int:  # their share of the bytes
        weight = 7 * slots * EXACT_COST
        share = round(splits * weight / (weight + max(capacity, 1)))
        return max(1, min(share, -(-slots // EXACT_TOKENS), splits - 1))

    most = min(max(places // pairs, MOST_SPLITS), capacity // (4 * WARP_TOKENS) + 8)
    counts = range(2, max(2, most) + 1)
    splits = min(counts, key=lambda count: (-(-count * pairs // places) / (count - exact(count)), -count))
    return splits, exact(splits)


def decode_split(
    query: Tensor,
    k_codes: Tensor,
    k_affine: Tensor,
    v_codes: Tensor,
    v_affine: Tensor,
    sink_keys: Tensor,
    sink_values: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
    lengths: Tensor,
    floors: Tensor,
    *,
    queries: int,
    recent_tokens: int,
    splits: int | None = None,
    exact: int | None = None,
    warps: int = 2,
    stages: int = 2,
    registers: int | None = 168,
    exact_tokens: int = EXACT_TOKENS,
    int8: bool | None = None,
    launch_pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend.attend_split` for a step, where `supports` says so.

    Args:
        query: [B, H_kv, M, D] float32, rotated, times scaling and log2(e); row `g * queries + i`.
        k_codes: [B, H_kv, C, D/4] uint8, C a multiple of 4; v_codes alike, with the same strides.
        k_affine: [B, H_kv, C, 1, 2] of 16 bits; v_affine alike.
        v_codes: as k_codes.
        v_affine: as k_affine.
        sink_keys: [B, H_kv, sink, D] of 16 bits, contiguous, as the other windows are.
        sink_values: as sink_keys.
        recent_keys: [B, H_kv, R, D], the ring.
        recent_values: as recent_keys.
        lengths: [B] int32, tokens before this step.
        floors: [B] int32, tokens that are in the history whatever the window says.
        queries: new tokens, already in sink, ring and history.
        recent_tokens: of the window.
        splits: programs that share one KV head's tokens, and `exact` how many of them take sink and ring; chosen
            together unless both are given.
        exact: see splits.
        warps: of a program; they share its tokens.
        stages: tiles of history in flight.
        registers: of a thread, at most.
        exact_tokens: of sink and ring that a program takes at once.
        int8: keys on integer tensor cores, for M <= 4.
        launch_pdl: start before the launch before this one has ended, whose results are waited for. Earlier are read:
            lengths, floors, and history that was there before this step.

    Returns:
        tuple: as from `attend.attend_split`.
    """
    batch, heads, rows, size = query.shape
    sink, ring, capacity = sink_keys.shape[2], recent_keys.shape[2], k_codes.shape[2]
    if splits is None or exact is None:
        places = PROGRAMS * processors(query.device)
        splits, exact = choose_splits(batch * heads, capacity, sink + ring, places)
    launch_pdl = dependent_launches(query.device) if launch_pdl is None else launch_pdl
    partial = query.new_empty(batch, heads, splits, rows, size)
    stats = query.new_empty(batch, heads, splits, rows, 2)
    codes, affine = k_codes.view(torch.int16), k_affine.view(torch.int32)
    options: dict[str, Any] = {"maxnreg": registers} if registers else {}
    with device_guard(query):
        _attend_kernel[(splits, batch * heads)](
            query, sink_keys, sink_values, recent_keys, recent_values,
            codes, affine, v_codes.view(torch.int16), v_affine.view(torch.int32),
            lengths, floors, partial, stats, queries, heads, sink, recent_tokens, ring, splits, exact,
            codes.stride(0), codes.stride(1), affine.stride(0), affine.stride(1),
            M=rows, D=size, W=warps, STAGES=stages, E=exact_tokens, BF16=k_affine.dtype == torch.bfloat16,
            PDL=launch_pdl, INT8=2 * rows <= ROWS if int8 is None else int8, num_warps=warps,
            **options, **dependent_launch(launch_pdl),
        )  # fmt: skip
    return partial, stats
