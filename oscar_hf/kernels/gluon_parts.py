"""Parts of the Gluon kernels: unpacking, layouts of tensor-core operands, copies.

A row's D/4 bytes are D/8 words of 16 bits; bits `2J, 2J + 1` of word `m` hold channel `2m + (J >> 2) + D/4 (J & 3)`.
So a masked word already is the float16 subnormal `code * 4^(J & 3) * 2^-24`, exact on tensor cores: plane `J` of a
tile is an operand [tokens, D/8], its channels are a fixed permutation of the query's, and unpacking is one `and` for
two codes. Codes are the A operand, the query rows (at most 8) are N.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

if not all(hasattr(gl, name) for name in ("SharedLinearLayout", "DistributedLinearLayout")):
    raise ImportError("This version of Triton has a Gluon without linear layouts.")


@gluon.jit
def wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def codes(words, J: gl.constexpr):
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
def high_bytes(words):
    """High byte of each word, one instruction for two words."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [words], gl.int16, True, 2)


@gluon.jit
def code_bytes(rows, J: gl.constexpr):
    """Code 0 of each byte, or four times code 1."""
    if J == 0:
        out = gl.inline_asm_elementwise("and.b32 $0, $1, 0x03030303;", "=r,r", [rows], gl.int8, True, 4)
    else:
        out = gl.inline_asm_elementwise("and.b32 $0, $1, 0x0C0C0C0C;", "=r,r", [rows], gl.int8, True, 4)
    return out


@gluon.jit
def high_codes(rows):
    return gl.inline_asm_elementwise("shr.b32 $0, $1, 4;", "=r,r", [rows], gl.int8, True, 4)


@gluon.jit
def transpose_blocks(p):
    """Weights [W, T, 8] of the accumulator's layout as the B operand: each 8 x 8 block by one `movmatrix`."""
    W: gl.constexpr = p.shape[0]
    T: gl.constexpr = p.shape[1]
    mma: gl.constexpr = p.type.layout
    moved = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], p.dtype, True, 2)
    moved = moved.reshape([W, T // 8, 8, 8]).permute([0, 1, 3, 2]).reshape([W, T, 8])
    return gl.convert_layout(moved, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def scale_min(affine, BF16: gl.constexpr):
    """float32 scale and min of 16 bits each, packed in int32."""
    if BF16:
        scale = (affine << 16).to(gl.float32, bitcast=True)
        minimum = (affine & -65536).to(gl.float32, bitcast=True)
    else:
        scale = affine.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        minimum = (affine >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return scale, minimum


@gluon.jit
def power(exponent):
    """2^exponent of int32 in [-126, 127]."""
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def exponent(x):
    """Least e with |x| < 2^e, for normal x; int32."""
    return ((x.to(gl.int32, bitcast=True) >> 23) & 255) - 126


@gluon.constexpr_function
def tile_layout(warps, transposed, tile):
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
def byte_layout(warps):
    """The tile of `_tile_layout` as bytes, [W, 64, 32]."""
    words = tile_layout(warps, False, True).offset_bases
    return gl.SharedLinearLayout([[0, 0, 1]] + [[warp, row, 2 * word] for warp, row, word in words])


@gluon.constexpr_function
def affine_layout(warps, tile):
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
    return gl.DistributedLinearLayout(registers, lanes, [[0, 1 << bit, 0] for bit in range(bits)], [], [warps, 8, 128])


@gluon.jit
def copy_tile(
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
def query_operands(x, mma: gl.constexpr):
    """B operands [W, 16, 8] of the even and of the odd channels of float16 [W, 8, 32]."""
    W: gl.constexpr = x.shape[0]
    low, high = gl.split(x.reshape([W, 8, 16, 2]))
    operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    low = gl.convert_layout(low.permute([0, 2, 1]), operand, assert_trivial=True)
    high = gl.convert_layout(high.permute([0, 2, 1]), operand, assert_trivial=True)
    return low, high


@gluon.jit
def nearest(x):
    """Nearest int32 of |x| < 2^22."""
    return (x + 12582912.0).to(gl.int32, bitcast=True) - 0x4B400000


@gluon.jit
def query_bytes(x, mma: gl.constexpr):
    """B operand int8 [W, 32, 8] of int32 [W, 8, 32], even rows its high bytes, odd rows its low ones."""
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))[None, :][:, :, None]
    high = (x + 128) >> 8
    x = gl.where(column % 2 == 0, high, x - high * 256).to(gl.int8)
    return gl.convert_layout(x.permute([0, 2, 1]), gl.DotOperandLayout(1, mma, 4), assert_trivial=True)


@gluon.jit
def spread(x, other, layout: gl.constexpr):
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
def store_combined(
    acc, stats, o0, o1, o2, o3, o4, o5, o6, o7, base, weight, offset,
    STEP: gl.constexpr, M: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The sum of the warps' results: through shared memory, so that one thread adds them and rows leave whole."""
    W: gl.constexpr = base.shape[0]
    common = gl.max(base, axis=0)
    factor = exp2(base - common[None, :])
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
def load_queries(q, j: gl.constexpr, W: gl.constexpr, STEP: gl.constexpr, M: gl.constexpr, D: gl.constexpr):
    layout: gl.constexpr = _query_layout(W)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    channel = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    offset = (warp[:, None] * 0 + row[None, :] // STEP)[:, :, None] * D + (32 * j + channel)[None, None, :]
    return gl.load(q + offset, mask=(row < M * STEP)[None, :, None] & (offset >= 0), other=0.0)
