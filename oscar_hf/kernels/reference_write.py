"""The functions of `quantize` in plain torch, row by row: what they are tested against, and the path on the CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..quantization import quantize
from ..search import Metric


def _rotated(x: Tensor, mean: Tensor | None, rotation: Tensor | None) -> Tensor:
    """`(x - mean) rotation` of [B, H, n, D], float32."""
    x = x.float()
    if mean is not None:
        x = x - mean.unsqueeze(-2)
    return x if rotation is None else x @ rotation


def _store_windows(rows: Tensor, sink: Tensor, ring: Tensor, start: int) -> None:
    """Tokens `start`, `start + 1`, ..., [..., n, D], into sink and ring [..., sink | R, D]."""
    sinks, slots = sink.shape[-2], ring.shape[-2]
    stop = start + rows.shape[-2]
    if start < sinks:
        sink[..., start : min(stop, sinks), :] = rows[..., : sinks - start, :]
    first = max(start, sinks, stop - slots)
    if first < stop:
        places = torch.arange(first, stop, device=rows.device) % slots
        ring[..., places, :] = rows[..., first - start :, :]


def quantize_into_reference(
    rows: Tensor, codes: Tensor, affine: Tensor, start: int, *, clip: float = 1.0, scale_rule: str = "minmax"
) -> None:
    """Quantise rows [..., n, D] into places `start`, `start + 1`, ... of codes [..., C, D/4] and affine
    [..., C, groups, 2]; those from C on are dropped."""
    capacity = codes.shape[-2]
    size = rows.shape[-1] // affine.shape[-2]
    rows = rows[..., : max(0, capacity - start), :]
    if not rows.numel():
        return
    stored = quantize(rows, clip=clip, group_size=size, scale_rule=scale_rule, scale_dtype=affine.dtype)
    codes[..., start : start + rows.shape[-2], :] = stored.codes
    affine[..., start : start + rows.shape[-2], :, :] = stored.affine


def search_into_reference(
    rows: Tensor,
    metric: Tensor,
    factor: Tensor,
    codes: Tensor,
    affine: Tensor,
    start: int = 0,
    *,
    clip: float,
    sweeps: int,
    stretch: float,
) -> None:
    """`quantize_into_reference` by search in the metric [..., D, D], by row, by head or one for all, whose
    `Metric.factor` is `factor`."""
    rows = rows[..., : max(0, codes.shape[-2] - start), :]
    if not rows.numel():
        return
    stored = quantize(
        rows, clip=clip, scale_dtype=affine.dtype, metric=Metric(metric, factor), sweeps=sweeps, stretch=stretch
    )
    codes[..., start : start + rows.shape[-2], :] = stored.codes
    affine[..., start : start + rows.shape[-2], :, :] = stored.affine


def search_step_reference(
    ring: Tensor,
    metric: Tensor,
    factor: Tensor,
    codes: Tensor,
    affine: Tensor,
    lengths: Tensor,
    floors: Tensor,
    *,
    n: int,
    sinks: int,
    recent: int,
    clip: float,
    sweeps: int,
    stretch: float,
) -> None:
    """Quantise by search the keys that leave the ring [B, H, R, D] when `n` tokens come to rows of `lengths` tokens;
    the ring holds them before and after, since it has `n` spare slots."""
    for row, (length, floor) in enumerate(zip(lengths.tolist(), floors.tolist(), strict=True)):
        first, last = (max(floor, tokens - sinks - recent, 0) for tokens in (length, length + n))
        places = torch.arange(sinks + first, sinks + last, device=ring.device) % ring.shape[2]
        leaving = ring[row][:, places]
        own = Metric(metric, factor).rows(row)
        search_into_reference(leaving, *own, codes[row], affine[row], first, clip=clip, sweeps=sweeps, stretch=stretch)


def write_chunk_reference(
    keys: Tensor,
    values: Tensor,
    *,
    k_mean: Tensor | None,
    k_rotation: Tensor | None,
    v_rotation: Tensor | None,
    start: int,
    flushed: int,
    sink_keys: Tensor,
    sink_values: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
    k_codes: Tensor,
    k_affine: Tensor,
    v_codes: Tensor,
    v_affine: Tensor,
    k_clip: float,
    v_clip: float,
    scale_rule: str,
) -> None:
    """`write_chunk` in plain torch."""
    sinks = sink_keys.shape[2]
    for x, mean, rotation, sink, ring, codes, affine, clip in (
        (keys, k_mean, k_rotation, sink_keys, recent_keys, k_codes, k_affine, k_clip),
        (values, None, v_rotation, sink_values, recent_values, v_codes, v_affine, v_clip),
    ):
        rows = _rotated(x, mean, rotation).to(x.dtype)
        _store_windows(rows, sink, ring, start)
        first = max(sinks, start)
        leaving = rows[:, :, first - start : max(sinks + flushed, first) - start]
        quantize_into_reference(leaving, codes, affine, first - sinks, clip=clip, scale_rule=scale_rule)


def rotate_and_append_reference(
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
    """`rotate_and_append` in plain torch; `launch_pdl` means nothing here."""
    batch, _, n, head_dim = query.shape
    heads, sinks, slots = key.shape[1], sink_keys.shape[2], recent_keys.shape[2]
    grouped = query.unflatten(1, (heads, -1))  # [B, H, G, n, D]
    queries = _rotated(grouped.flatten(2, 3), None, q_rotation) * (scaling * math.log2(math.e))
    for x, mean, rotation, sink, ring, codes, affine, clip in (
        (key, k_mean, k_rotation, sink_keys, recent_keys, k_codes, k_affine, k_clip),
        (value, None, v_rotation, sink_values, recent_values, v_codes, v_affine, v_clip),
    ):
        rows = _rotated(x, mean, rotation).to(x.dtype)
        for row, (length, floor) in enumerate(zip(lengths.tolist(), floors.tolist(), strict=True)):
            first, last = (max(floor, tokens - sinks - recent, 0) for tokens in (length, length + n))
            places = torch.arange(sinks + first, sinks + last, device=key.device) % slots
            if flush_keys or x is not key:
                quantize_into_reference(
                    ring[row][:, places], codes[row], affine[row], first, clip=clip, scale_rule=scale_rule
                )
            _store_windows(rows[row], sink[row], ring[row], length)
    return queries.contiguous()
