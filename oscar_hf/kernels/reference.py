"""Attention in plain torch: exact for a prompt's own keys, blockwise for keys that are unpacked as they are read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantization import Quantized, code_values, dequantize, from_byte_order, to_byte_order

QUERY_BLOCK = 512
LOG2E = math.log2(math.e)

Rows = Tensor | Quantized
Block = tuple[Rows, Rows, Tensor | None]
"""Keys and values [B, H_kv, n, D], plain or packed, and which query rows see them, [N, n] bool, or None for all."""


def _products(query: Tensor, keys: Rows) -> Tensor:
    """`query keys'`, [B, H_kv, N, D] with [B, H_kv, n, D]; of packed keys only the codes are multiplied:

    `q (scale code + min)' = scale (q code') + min sum(q)`. Keys [1, ...] are those of every row of the batch.
    """
    batch = query.shape[0]
    if batch > (keys if isinstance(keys, Tensor) else keys.codes).shape[0]:
        return unfold(_products(fold(query), keys), batch)
    if isinstance(keys, Tensor):
        return query @ keys.float().mT
    if keys.affine.shape[-2] > 1:
        return query @ dequantize(keys).mT
    scale, minimum = keys.affine.float().squeeze(-2).mT.split(1, dim=-2)  # [B, H_kv, 1, n]
    products = to_byte_order(query) @ code_values(keys.codes).mT
    return torch.addcmul(products.mul_(scale), query.sum(-1, keepdim=True), minimum)


def _combine(weights: Tensor, values: Rows) -> Tensor:
    """`weights values`, [B, H_kv, N, n] with [B or 1, H_kv, n, D]: `sum_n (p scale) code + sum_n p min`."""
    batch = weights.shape[0]
    if batch > (values if isinstance(values, Tensor) else values.codes).shape[0]:
        return unfold(_combine(fold(weights), values), batch)
    if isinstance(values, Tensor):
        return weights @ values.float()
    if values.affine.shape[-2] > 1:
        return weights @ dequantize(values)
    scale, minimum = values.affine.float().squeeze(-2).split(1, dim=-1)  # [B, H_kv, n, 1]
    combined = (weights * scale.mT) @ code_values(values.codes)
    return from_byte_order(combined) + weights @ minimum


def fold(x: Tensor) -> Tensor:
    """[B, H, N, ...] -> [1, H, B N, ...]"""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def unfold(x: Tensor, batch: int) -> Tensor:
    """The inverse of `fold`."""
    return x.squeeze(0).unflatten(1, (batch, -1)).transpose(0, 1)


def attend_blocks(
    query: Tensor,
    blocks: Iterable[Block],
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """Attention over keys and values that arrive block by block (online softmax, float32).

    Args:
        query: [B, H_kv, N, D] float32, already scaled; N counts the queries of all heads of a KV head.
        blocks: keys, values and visibility; only one block is held at a time.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        sink_logits: [B, H_kv, N], one more logit in each row's softmax whose value is zero.
        offset: [B, H_kv, N], added to a row's logits: what key-mean removal took off them. Softmax alone does not
            see it, but softcap and sink logits do.

    Returns:
        Tensor: [B, H_kv, N, D] float32; zeros for a row that sees nothing.
    """
    rows = query.shape[:-1]
    peak = query.new_full((*rows, 1), float("-inf")) if sink_logits is None else sink_logits.unsqueeze(-1).clone()
    total = torch.zeros_like(peak) if sink_logits is None else torch.ones_like(peak)
    output = torch.zeros_like(query)
    for keys, values, visible in blocks:
        logits = _products(query, keys)  # [B, H_kv, N, n]
        if offset is not None:
            logits += offset.unsqueeze(-1)
        if softcap is not None:
            logits = torch.tanh_(logits.div_(softcap)).mul_(softcap)
        if visible is not None:
            logits = logits.masked_fill_(~visible, float("-inf"))
        new_peak = torch.maximum(peak, logits.amax(-1, keepdim=True))
        base = new_peak.masked_fill(new_peak == float("-inf"), 0.0)  # a row that has seen nothing stays at zero
        weights = logits.sub_(base).exp_()
        shrink = (peak - base).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = torch.addcmul(_combine(weights, values), output, shrink)
        peak = new_peak
    return output / total.masked_fill(total == 0, 1.0)


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Causal attention on unquantised keys and values; the last query sees the last key.

    Args:
        query: [B, H_q, Q, D].
        key: [B, H_kv, K, D], K >= Q.
        value: [B, H_kv, K, D].
        mask: None, [B, K] bool (False is padding), or [B or 1, H or 1, Q, K] bool or additive, which then replaces
            the causal mask.
        scaling: factor on the logits (default D ** -0.5).
        softcap: as in `attend_blocks`.
        sink_logits: [H_q], one logit a head in the softmax's denominator (gpt-oss).

    Returns:
        Tensor: [B, H_q, Q, D] in the query's dtype; zeros for queries on padding.
    """
    queries, length = query.shape[2], key.shape[2]
    if mask is not None and mask.dim() == 2 and queries == length:
        return _by_row(query, key, value, mask, scaling=scaling, softcap=softcap, sink_logits=sink_logits)
    if softcap is not None or sink_logits is not None:
        return _materialized(query, key, value, mask, scaling, softcap, sink_logits)
    if mask is None and (queries == 1 or queries == length):
        causal = queries > 1
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=True)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # with a mask, SDPA's own grouping is slow on GPUs
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    visible = _visible(query, key, mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)


def _visible(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """A mask that SDPA takes: a 4D one as it is, otherwise lower-right causal and padding."""
    if mask is not None and mask.dim() == 4:
        return mask
    queries, length = query.shape[2], key.shape[2]
    causal = torch.ones(queries, length, dtype=torch.bool, device=query.device).tril(length - queries)
    return causal[None, None] if mask is None else causal & mask[:, None, None, :]


def _by_row(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: Any) -> Tensor:
    """One row at a time without its padding: no [B, 1, Q, K] mask, whatever the length."""
    output = torch.zeros_like(query)
    for row, real in enumerate(mask):
        tokens = real.nonzero().squeeze(-1)
        if len(tokens):
            q, k, v = (states[row : row + 1].index_select(2, tokens) for states in (query, key, value))
            output[row : row + 1].index_copy_(2, tokens, exact_attention(q, k, v, **settings))
    return output


def _materialized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Softcap and sink logits, which SDPA has not: blocks of queries against all keys."""
    batch, heads, queries, size = query.shape
    kv_heads, length = key.shape[1:3]
    scaling = size**-0.5 if scaling is None else scaling
    grouped = (query.float() * scaling).view(batch, kv_heads, -1, queries, size)
    visible = _visible(query, key, mask)
    sinks = None if sink_logits is None else sink_logits.float().view(1, kv_heads, -1, 1)
    outputs = []
    for start in range(0, queries, QUERY_BLOCK):
        part = grouped[..., start : start + QUERY_BLOCK, :]  # [B, H_kv, G, n, D]
        logits = part @ key.float().mT.unsqueeze(2)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        seen = visible[..., start : start + QUERY_BLOCK, :]
        seen = seen.unsqueeze(2) if seen.shape[1] == 1 else seen.unflatten(1, (kv_heads, -1))
        logits = logits.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else logits + seen
        if sinks is not None:
            extra = sinks.unsqueeze(-1).expand(batch, *part.shape[1:4], 1)
            logits = torch.cat([logits, extra], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :length].nan_to_num(0.0)
        outputs.append(weights @ value.float().unsqueeze(2))
    return torch.cat(outputs, dim=-2).view_as(query).to(query.dtype)


def attend_step(
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
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """What `attend.attend_split` and `merge.merge` compute together: see there. [B, H_kv, M, D] float32."""
    sink, ring = sink_keys.shape[2], recent_keys.shape[2]
    output = torch.empty_like(query)
    own = torch.arange(query.shape[2], device=query.device) % queries
    for row, (length, floor) in enumerate(zip(lengths.tolist(), floors.tolist(), strict=True)):
        position = length + own
        bound = (position + 1 - sink - recent_tokens).clamp_min(max(floor, 0))
        newest, last = int(bound.max()), length + queries
        stored = torch.arange(min(sink, last), device=query.device)
        recent = torch.arange(sink + int(bound.min()), max(sink + int(bound.min()), last), device=query.device)
        slots, rows = recent % ring, slice(row, row + 1)
        seen = (recent <= position[:, None]) & (recent >= sink + bound[:, None])
        history = torch.arange(newest, device=query.device) < bound[:, None]
        blocks: list[Block] = [
            (sink_keys[rows, :, : len(stored)], sink_values[rows, :, : len(stored)], stored <= position[:, None]),
            (recent_keys[rows].index_select(2, slots), recent_values[rows].index_select(2, slots), seen),
            (
                Quantized(k_codes[rows, :, :newest], k_affine[rows, :, :newest]),
                Quantized(v_codes[rows, :, :newest], v_affine[rows, :, :newest]),
                history,
            ),
        ]
        sinks = None
        if sink_logits is not None:
            sinks = sink_logits.float().view(1, query.shape[1], -1).repeat_interleave(queries, 2)
        output[rows] = attend_blocks(
            query[rows] / LOG2E,
            (block for block in blocks if block[2] is not None and block[2].shape[1]),
            softcap,
            sinks,
            None if offset is None else offset[rows],
        )
    return output
