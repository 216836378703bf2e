"""Attention of many queries to a quantised history by flash attention, over rows unpacked once for all of them.

`attend` unpacks in registers, again for every 64 query rows. For a long chunk it is quicker to unpack a block of the
history into 16 bits once, to let the library's flash attention read it, and to put such blocks together by the
logarithms of their sums.

Rows of the batch are handled in turn, so that memory does not grow with it: an unpacked block takes
`2 H_kv UNPACK_BLOCK D` elements of 16 bits at most (64 MiB with 8 heads of 128 channels), and a row's n queries take
`12 H_q n D` bytes besides what they came in (`planning` counts both).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sharing import Prefix
from .attend import _affine, _dequantized, _value
from .launch import UNPACK_BLOCK, capability, device_guard

MIN_QUERIES = 256  # new tokens a row; fewer do not pay for unpacking
BLOCK_TOKENS = 64  # of one program that unpacks
MAX_HEAD_DIM = 256  # of flash attention, in steps of 8


def supports(queries: int, size: int, dtype: torch.dtype, softcap: float | None, device: torch.device) -> bool:
    """Whether `attend` takes a chunk of so many queries of `size` channels; on the CPU, for tests, in any dtype."""
    if queries < MIN_QUERIES or softcap is not None or size % 8 or size > MAX_HEAD_DIM:
        return False
    if device.type == "cpu":
        return True
    flash = capability(device) >= (8, 0) and torch.backends.cuda.is_flash_attention_available()
    return flash and dtype in (torch.float16, torch.bfloat16)


@triton.jit(do_not_specialize=["tokens"])
def _unpack(
    codes, affine, output, tokens, codes_head, codes_token, affine_head, output_head,
    QUARTER: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Some tokens of one KV head: a byte's four codes belong to channels a quarter of a row apart."""
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.arange(0, BQ)
    inside, tokens64 = index < tokens, index.to(tl.int64)
    mask = inside[:, None] & (columns < QUARTER)[None, :]
    packed = tl.load(
        codes + head * codes_head + tokens64[:, None] * codes_token + columns[None, :], mask=mask, other=0
    )
    affine += head * affine_head
    place = output + head * output_head + tokens64[:, None] * (4 * QUARTER) + columns[None, :]
    for plane in tl.static_range(4):
        if GROUPS == 1:
            scale, minimum = _affine(affine, tokens64, inside, GROUPS)
            code = _value((packed >> (2 * plane)) & 3, 1.0, 2.0, False)
            values = code * scale[:, None] + minimum[:, None]
        else:
            values = _dequantized(packed, affine, tokens64, inside, columns, plane, 1.0, 2.0, QUARTER, GROUPS, False)
        values = tl.minimum(tl.maximum(values, -LIMIT), LIMIT)
        tl.store(place + plane * QUARTER, values.to(output.dtype.element_ty), mask=mask)


def unpack(codes: Tensor, affine: Tensor, output: Tensor) -> None:
    """`quantization.dequantize` into memory that is there.

    Args:
        codes: [1, H_kv, n, D/4] uint8; a view, rows of a head one after the other.
        affine: [1, H_kv, n, groups, 2], likewise.
        output: [1, H_kv, n, D] of any dtype, likewise; written.
    """
    _, heads, tokens, size = output.shape
    quarter = size // 4
    with device_guard(output):
        _unpack[(triton.cdiv(tokens, BLOCK_TOKENS), heads)](
            codes, affine, output, tokens, codes.stride(1), codes.stride(2), affine.stride(1), output.stride(1),
            QUARTER=quarter, BQ=max(16, triton.next_power_of_2(quarter)), BN=BLOCK_TOKENS, GROUPS=affine.shape[3],
            LIMIT=torch.finfo(output.dtype).max, num_warps=4,
        )  # fmt: skip


def unpacked_dtype(dtype: torch.dtype, scale_dtype: torch.dtype) -> torch.dtype:
    """What a history is unpacked to in a model's dtype: float16, where its scales are, has bfloat16's missing bits.

    No stored value is beyond its range then, which those with bfloat16 scales may be.
    """
    return torch.float16 if (dtype, scale_dtype) == (torch.bfloat16, torch.float16) else dtype


def _scaled(query: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Queries times the logits' factor, saturated: none becomes infinite."""
    limit = torch.finfo(dtype).max
    return (query * scaling).clamp_(-limit, limit).to(dtype)


def _flash(query: Tensor, keys: Tensor, values: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention [1, H, N, D] to keys and values [1, H_kv, n, D], and its log-sum-exp [1, H, N] float32."""
    if query.device.type == "cpu":
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    else:
        operator = torch.ops.aten._scaled_dot_product_flash_attention
    output, total, *_ = operator(query, keys, values, 0.0, causal, scale=1.0)
    return output, total


def _parts(
    query: Tensor, scaling: float, queries: int, keys: Tensor, values: Tensor, history: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What queries [1, H_kv, G n, D] see of disjoint tokens: outputs, and log-sum-exps [1, H_kv, G n] float32.

    The chunk's own tokens come first, causally. All others are before it, which all queries see: a KV head's G query
    heads are then so many more rows of one, and no key is read for each of them.
    """
    heads, held = keys.shape[1], keys.shape[2] - queries
    scaled = _scaled(query, scaling, keys.dtype)
    by_head = scaled.unflatten(2, (-1, queries)).flatten(1, 2)
    output, total = _flash(by_head, keys[:, :, held:], values[:, :, held:], causal=True)
    yield output.unflatten(1, (heads, -1)).flatten(2, 3), total.unflatten(1, (heads, -1)).flatten(2, 3)
    del by_head, output, total
    if held:
        yield _flash(scaled, keys[:, :, :held], values[:, :, :held])
    del scaled
    dtype = unpacked_dtype(keys.dtype, history[0][1].dtype)
    scaled = _scaled(query, scaling, dtype)
    longest = max(pieces[0].shape[2] for pieces in history)
    scratch = keys.new_empty(2, *keys.shape[:2], min(UNPACK_BLOCK, longest), keys.shape[3], dtype=dtype)
    for k_codes, k_affine, v_codes, v_affine in history:
        for first in range(0, k_codes.shape[2], UNPACK_BLOCK):
            block = slice(first, min(first + UNPACK_BLOCK, k_codes.shape[2]))
            unpacked = scratch[:, :, :, : block.stop - first]
            unpack(k_codes[:, :, block], k_affine[:, :, block], unpacked[0])
            unpack(v_codes[:, :, block], v_affine[:, :, block], unpacked[1])
            yield _flash(scaled, *unpacked)


@torch.no_grad()
def attend(
    query: Tensor,
    history: Sequence[Tensor],
    exact: Sequence[Tensor],
    output: Tensor,
    *,
    tokens: int,
    scaling: float,
    sink_logits: Tensor | None = None,
    offset: Tensor | None = None,
    v_rotation: Tensor | None = None,
    prefixes: Sequence[Prefix] = (),
) -> None:
    """`dispatch.attend_history` without a softcap, where `supports` says so; products are of 16 bits, sums of 32.

    Args:
        query: [b, H_kv, G n, D] float32, rotated; row `g * n + i`.
        history: codes and affine of keys, then of values, [b, H_kv, capacity, ...].
        exact: keys and values [b, H_kv, E, D], in order, the last `n` the queries' own. The mean is off these keys as
            it is off the history's, so that one offset is right for both.
        output: [b, n, H_q, D]; written.
        tokens: of the history, seen by all queries.
        scaling: factor on the logits.
        sink_logits: [H_q].
        offset: [b, H_kv, G n] float32, added to the logits; only sink logits feel it.
        v_rotation: undone on the output; None: nothing to undo.
        prefixes: of b rows, seen by all queries besides.
    """
    queries, (keys, values) = output.shape[1], exact
    for row in range(len(query)):
        rows = slice(row, row + 1)
        pieces = [[buffer[prefix.sources[row]].unsqueeze(0) for buffer in prefix.buffers()] for prefix in prefixes]
        pieces.append([buffer[rows, :, :tokens] for buffer in history])
        parts = _parts(query[rows], scaling, queries, keys[rows], values[rows], pieces)
        result, total = next(parts)
        result = result.float()
        for more, log_sum in parts:
            result.lerp_(more.float(), torch.sigmoid(log_sum - total).unsqueeze(-1))
            total = torch.logaddexp(total, log_sum)
        if sink_logits is not None:
            seen = total if offset is None else total + offset[rows]
            sinks = sink_logits.float().view(1, keys.shape[1], -1).repeat_interleave(queries, 2)
            result *= torch.sigmoid(seen - sinks).unsqueeze(-1)
        if v_rotation is not None:
            result = result @ v_rotation.mT
        output[rows] = result.unflatten(2, (-1, queries)).flatten(1, 2).transpose(1, 2)
