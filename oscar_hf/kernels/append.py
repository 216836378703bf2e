"""A decoding step's bookkeeping in one Triton launch: rotate, append to the windows, quantise what leaves them.

`reference_write` has the same function in plain torch.
"""

# ruff: noqa: SIM300 (constexpr parameters are capitals, which the rule takes for constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantization import SATURATION
from .launch import LOG2E, dependent_launch, device_guard
from .quantize import by_head, keep, packs, quantize_rows, sizes


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
    quantize_rows(
        h0, h1, h2, h3, codes + index * Q, affine + index * (2 * GROUPS), inside,
        D, QUARTER, GROUPS, KEEP, INNER, LIMIT, ring.dtype.element_ty, PACKED,
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
    PACKED: tl.constexpr, WAIT: tl.constexpr, FLUSH_KEYS: tl.constexpr,
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
                if FLUSH_KEYS:
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
    flush_keys: bool = True,
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
        flush_keys: whether keys that leave the window are quantised here; no: `search.search_step` has done it.
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
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *by_head(k_mean, 1),
            *by_head(q_rotation, 2), *by_head(k_rotation, 2), *by_head(v_rotation, 2),
            *(stride for part in packed for stride in part.stride()[:2]), *sink_keys.stride()[:2],
            *recent_keys.stride()[:2], scaling * LOG2E, n, k_codes.shape[2],
            **sizes(head_dim), G=group, GROUPS=k_affine.shape[3], K_KEEP=keep(head_dim, k_clip),
            V_KEEP=keep(head_dim, v_clip), INNER=scale_rule == "inner_product", LIMIT=SATURATION[k_affine.dtype],
            SINKS=sink_keys.shape[2], RING=recent_keys.shape[2], RECENT=recent, MEAN=k_mean is not None,
            Q_ROTATED=q_rotation is not None, K_ROTATED=k_rotation is not None, V_ROTATED=v_rotation is not None,
            BLOCK=triton.next_power_of_2(n), Q_ROWS=q_rows, ROWS=rows, COLUMNS=columns, PACKED=packs(query),
            WAIT=launch_pdl, FLUSH_KEYS=flush_keys, num_warps=4, **dependent_launch(launch_pdl),
        )  # fmt: skip
    return q_buf
