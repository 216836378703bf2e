"""Putting the splits of an attention together, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import dependent_launch, device_guard


@triton.jit(do_not_specialize=["queries", "rows_total", "splits"])
def _merge(
    partial, stats, sink_logits, v_rotation, output, lengths, queries, rows_total, splits, group, heads,
    rotation_batch, rotation_head, out_batch, out_token, out_head,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BS: tl.constexpr, SINKS: tl.constexpr, ROTATE: tl.constexpr,
    COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query row of one KV head, or some of its channels: weigh the splits, undo the value rotation, count."""
    row, pair, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = pair // heads, pair % heads
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    columns = part * BLOCK + tl.arange(0, BLOCK)
    in_columns = columns < SIZE
    steps = tl.arange(0, BS)
    base = (pair.to(tl.int64) * splits) * rows_total + row
    peak = tl.full([BS], float("-inf"), tl.float32)
    for start in range(0, splits, BS):
        place = stats + (base + (start + steps).to(tl.int64) * rows_total) * 2
        peak = tl.maximum(peak, tl.load(place, mask=start + steps < splits, other=float("-inf")))
    highest = tl.max(peak, 0)
    if SINKS:
        sink = tl.load(sink_logits + head * group + row // queries).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([BS], tl.float32)
    result = tl.zeros([BLOCK], tl.float32)
    for start in range(0, splits, BS):
        split = (start + steps).to(tl.int64)
        inside = start + steps < splits
        place = base + split * rows_total
        weight = tl.exp2(tl.load(stats + place * 2, mask=inside, other=float("-inf")) - highest)
        total += weight * tl.load(stats + place * 2 + 1, mask=inside, other=0.0)
        values = tl.load(
            partial + place[:, None] * SIZE + columns[None, :], mask=inside[:, None] & in_columns[None, :], other=0.0
        )
        result += tl.sum(values * weight[:, None], 0)
    denominator = tl.sum(total, 0)
    if SINKS:
        denominator += tl.exp2(sink - highest)
    result = result / tl.where(denominator == 0, 1.0, denominator)
    if ROTATE:  # v = stored v_rotation': one output channel is a row of v_rotation times the result
        rotation = v_rotation + batch.to(tl.int64) * rotation_batch + head * rotation_head
        outputs = tl.arange(0, BLOCK)
        matrix = tl.load(
            rotation + outputs[:, None] * SIZE + columns[None, :],
            mask=(outputs < SIZE)[:, None] & in_columns[None, :],
            other=0.0,
        )
        result = tl.sum(matrix * result[None, :], 1)
    place = batch.to(tl.int64) * out_batch + (row % queries).to(tl.int64) * out_token
    place += (head * group + row // queries).to(tl.int64) * out_head
    tl.store(output + place + columns, result.to(output.dtype.element_ty), mask=in_columns)
    if COUNT:
        first = (row == 0) & (head == 0) & (part == 0)
        tl.store(lengths + batch, tl.load(lengths + batch) + queries, mask=first)


def merge(
    partial: Tensor,
    stats: Tensor,
    output: Tensor,
    *,
    queries: int,
    sink_logits: Tensor | None = None,
    v_rotation: Tensor | None = None,
    lengths: Tensor | None = None,
    launch_pdl: bool = False,
) -> None:
    """Put the splits together.

    Args:
        partial: from `attend_split`.
        stats: from `attend_split`.
        output: [B, queries, H_q, D], any strides but contiguous channels; written.
        queries: new tokens.
        sink_logits: [H_q], one more logit a head whose value is zero.
        v_rotation: float32 [D, D], [H_kv, D, D] or [B, H_kv, D, D], undone here; None: nothing to undo.
        lengths: [B] int32, to which `queries` is added; None: not counted.
        launch_pdl: launch while the kernel before still runs.
    """
    batch, heads, splits, rows, size = partial.shape
    whole = triton.next_power_of_2(size)
    block = whole if v_rotation is not None else min(32, whole)
    rotation_strides = (0, 0)
    if v_rotation is not None:
        expanded = v_rotation.expand(batch, heads, size, size)
        rotation_strides = (expanded.stride(0), expanded.stride(1))
    with device_guard(partial):
        _merge[(rows, batch * heads, triton.cdiv(size, block))](
            partial, stats, sink_logits, v_rotation, output, lengths, queries, rows, splits, rows // queries,
            heads, *rotation_strides, output.stride(0), output.stride(1), output.stride(2),
            SIZE=size, BLOCK=block, BS=min(128 if block <= 32 else 16, max(2, triton.next_power_of_2(splits))),
            SINKS=sink_logits is not None,
            ROTATE=v_rotation is not None, COUNT=lengths is not None, PDL=launch_pdl,
            num_warps=4, **dependent_launch(launch_pdl),
        )  # fmt: skip
