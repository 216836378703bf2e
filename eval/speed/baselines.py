"""What "ours" is measured against: BF16 and INT2 decode attention, and a kernel that only reads.

Shapes throughout: query [B, H_q, 1, D]; keys and values [B, H, T, D], contiguous; outputs [B, H_q, 1, D] in the
query's dtype. Kernels serve the G = H_q / H query heads of a KV head in one block, split over tokens; `_merge`
combines the splits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from oscar_hf.quantization import Quantized

SDPA_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LOG2_E = 1.4426950408889634


def sdpa(backend: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`F.scaled_dot_product_attention` held to one backend."""

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return attend


@triton.jit
def _merge(acc, stats, out, splits, D: tl.constexpr, S: tl.constexpr):
    """Combine partial results acc [B H_q, splits, D] and stats [B H_q, splits, 2] = (max in base 2, sum)."""
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, D)
    peak, total = float("-inf"), 0.0
    result = tl.zeros([D], tl.float32)
    for first in range(0, splits, S):
        split = head * splits + first + tl.arange(0, S)
        here = first + tl.arange(0, S) < splits
        peaks = tl.load(stats + split * 2, mask=here, other=float("-inf"))
        totals = tl.load(stats + split * 2 + 1, mask=here, other=0.0)
        parts = tl.load(acc + split[:, None] * D + dims[None, :], mask=here[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        weights = tl.exp2(peaks - new_peak)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(totals * weights, 0)
        result = result * shrink + tl.sum(parts * weights[:, None], 0)
        peak = new_peak
    tl.store(out + head * D + dims, (result / total).to(out.dtype.element_ty))


@triton.jit
def _split_bf16(
    query, keys, values, acc, stats, length, span, factor,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attention of one KV head over tokens `span * split` and following."""
    head, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    rows, dims = tl.arange(0, M), tl.arange(0, D)
    q = tl.load(query + (head * G + rows[:, None]) * D + dims[None, :], mask=rows[:, None] < G, other=0.0)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, D], tl.float32)
    stop = tl.minimum(span * (split + 1), length)
    keys += head * length * D
    values += head * length * D
    for first in range(span * split, stop, N):
        tokens = first + tl.arange(0, N)
        here = tokens < stop
        place = tokens[:, None] * D + dims[None, :]  # within a head, 32 bits suffice
        k = tl.load(keys + place, mask=here[:, None], other=0.0)
        logits = tl.where(here[None, :], tl.dot(q, tl.trans(k)) * factor, float("-inf"))  # [M, N], base 2
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.exp2(logits - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        v = tl.load(values + place, mask=here[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        peak = new_peak
    part = (head * G + rows) * splits + split
    tl.store(acc + part[:, None] * D + dims[None, :], result, mask=rows[:, None] < G)
    tl.store(stats + part * 2, peak, mask=rows < G)
    tl.store(stats + part * 2 + 1, total, mask=rows < G)


@triton.jit
def _split_int2(
    query, key_codes, key_affine, value_codes, value_affine, acc, stats, length, span, factor,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The same on row-major codes: each tile becomes `code * scale + min` in the query's dtype, then as in BF16."""
    Q: tl.constexpr = D // 4
    head, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    rows, bytes_ = tl.arange(0, M), tl.arange(0, Q)
    q_place = query + (head * G + rows[:, None]) * D + bytes_[None, :]
    real = rows[:, None] < G
    q0 = tl.load(q_place, mask=real, other=0.0)
    q1 = tl.load(q_place + Q, mask=real, other=0.0)
    q2 = tl.load(q_place + 2 * Q, mask=real, other=0.0)
    q3 = tl.load(q_place + 3 * Q, mask=real, other=0.0)
    kind = q0.dtype
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc0 = tl.zeros([M, Q], tl.float32)
    acc1 = tl.zeros([M, Q], tl.float32)
    acc2 = tl.zeros([M, Q], tl.float32)
    acc3 = tl.zeros([M, Q], tl.float32)
    stop = tl.minimum(span * (split + 1), length)
    key_codes += head * length * Q
    value_codes += head * length * Q
    key_affine += head * length * 2
    value_affine += head * length * 2
    for first in range(span * split, stop, N):
        tokens = first + tl.arange(0, N)
        here = tokens < stop
        place = tokens[:, None] * Q + bytes_[None, :]
        codes = tl.load(key_codes + place, mask=here[:, None], other=0).to(tl.int32)  # [N, D/4]
        scale = tl.load(key_affine + tokens * 2, mask=here, other=0.0).to(tl.float32)[:, None]
        low = tl.load(key_affine + tokens * 2 + 1, mask=here, other=0.0).to(tl.float32)[:, None]
        logits = tl.dot(q0, tl.trans(((codes & 3).to(tl.float32) * scale + low).to(kind)))
        logits += tl.dot(q1, tl.trans(((codes >> 2 & 3).to(tl.float32) * scale + low).to(kind)))
        logits += tl.dot(q2, tl.trans(((codes >> 4 & 3).to(tl.float32) * scale + low).to(kind)))
        logits += tl.dot(q3, tl.trans(((codes >> 6 & 3).to(tl.float32) * scale + low).to(kind)))
        logits = tl.where(here[None, :], logits * factor, float("-inf"))  # [M, N], base 2
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.exp2(logits - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(kind)
        codes = tl.load(value_codes + place, mask=here[:, None], other=0).to(tl.int32)
        scale = tl.load(value_affine + tokens * 2, mask=here, other=0.0).to(tl.float32)[:, None]
        low = tl.load(value_affine + tokens * 2 + 1, mask=here, other=0.0).to(tl.float32)[:, None]
        acc0 = acc0 * shrink[:, None] + tl.dot(weights, ((codes & 3).to(tl.float32) * scale + low).to(kind))
        acc1 = acc1 * shrink[:, None] + tl.dot(weights, ((codes >> 2 & 3).to(tl.float32) * scale + low).to(kind))
        acc2 = acc2 * shrink[:, None] + tl.dot(weights, ((codes >> 4 & 3).to(tl.float32) * scale + low).to(kind))
        acc3 = acc3 * shrink[:, None] + tl.dot(weights, ((codes >> 6 & 3).to(tl.float32) * scale + low).to(kind))
        peak = new_peak
    part = (head * G + rows) * splits + split
    out = acc + part[:, None] * D + bytes_[None, :]
    tl.store(out, acc0, mask=real)
    tl.store(out + Q, acc1, mask=real)
    tl.store(out + 2 * Q, acc2, mask=real)
    tl.store(out + 3 * Q, acc3, mask=real)
    tl.store(stats + part * 2, peak, mask=rows < G)
    tl.store(stats + part * 2 + 1, total, mask=rows < G)


@triton.jit
def _read(data, out, size, N: tl.constexpr):
    """Sum int32 data [size], a block's share of tiles per program."""
    total = tl.zeros([N], tl.int32)
    for first in range(tl.program_id(0) * N, size, tl.num_programs(0) * N):
        place = first + tl.arange(0, N)
        total += tl.load(data + place, mask=place < size, other=0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def _scratch(query: Tensor, heads: int, length: int, splits: int, block: int) -> tuple[Tensor, Tensor, int]:
    """acc [B H_q, splits, D] and stats [B H_q, splits, 2], float32; tokens of a split."""
    tiles = -(-length // block)
    span = -(-tiles // splits) * block
    count = query.shape[0] * query.shape[1]
    acc = torch.empty(count, splits, query.shape[-1], dtype=torch.float32, device=query.device)
    return acc, acc.new_empty(count, splits, 2), span


def split_bf16(query: Tensor, keys: Tensor, values: Tensor, splits: int, block: int = 64) -> Tensor:
    """A simple split-KV kernel on keys and values in the query's dtype."""
    batch, heads, length, size = keys.shape
    groups = query.shape[1] // heads
    acc, stats, span = _scratch(query, heads, length, splits, block)
    _split_bf16[(batch * heads, splits)](
        query, keys, values, acc, stats, length, span, size**-0.5 * LOG2_E,
        G=groups, M=max(16, triton.next_power_of_2(groups)), D=size, N=block, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = torch.empty_like(query)
    _merge[(len(acc),)](acc, stats, out, splits, D=size, S=16)
    return out


def split_int2(query: Tensor, keys: Quantized, values: Quantized, splits: int, block: int = 64) -> Tensor:
    """The same on the stored format (one scale and min per row), dequantised in the loop like the published kernel."""
    batch, heads, length, _ = keys.codes.shape
    groups, size = query.shape[1] // heads, query.shape[-1]
    acc, stats, span = _scratch(query, heads, length, splits, block)
    _split_int2[(batch * heads, splits)](
        query, keys.codes, keys.affine, values.codes, values.affine, acc, stats, length, span, size**-0.5 * LOG2_E,
        G=groups, M=max(16, triton.next_power_of_2(groups)), D=size, N=block, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = torch.empty_like(query)
    _merge[(len(acc),)](acc, stats, out, splits, D=size, S=16)
    return out


def read(data: Tensor, programs: int) -> Tensor:
    """Read int32 data once: the bound of every kernel that needs these bytes. Returns partial sums [programs]."""
    out = torch.empty(programs, dtype=torch.int32, device=data.device)
    _read[(programs,)](data, out, data.numel(), N=2048, num_warps=8, num_stages=3)
    return out


def flashinfer_paged(query: Tensor, kv_heads: int, tokens: int, page: int = 16) -> Callable[[Tensor, Tensor], Tensor]:
    """FlashInfer's paged BF16 decode, tensor cores, planned for one shape: `run(query, pages)`.

    `pages` is [B * tokens / page, 2, H, page, D]; `tokens` must be a multiple of `page`.
    """
    import flashinfer

    batch, heads, _, size = query.shape
    count = tokens // page
    device = query.device
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * count
    indices = torch.arange(batch * count, dtype=torch.int32, device=device)
    last = torch.full((batch,), page, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(indptr, indices, last, heads, kv_heads, size, page, q_data_type=query.dtype, kv_data_type=query.dtype)
    return lambda q, pages: wrapper.run(q.squeeze(2), pages).unsqueeze(2)


def flashinfer_single(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """FlashInfer's decode of one row, on keys and values [1, H, T, D]."""
    import flashinfer

    output = flashinfer.single_decode_with_kv_cache(
        query[0, :, 0], keys[0], values[0], kv_layout="HND", use_tensor_cores=True
    )
    return output[None, :, None]
