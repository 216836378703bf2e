"""The stored format, in plain torch: this module is its definition, and every kernel is tested against it.

A row is the `head_dim` channels of one token and KV head, after rotation. Each group of `group_size` neighbouring
channels has a scale and a min in 16 bits; each channel has a 2-bit code; `code * scale + min` is the value. Byte `i`
of a row holds the codes of channels `i`, `i + D/4`, `i + D/2` and `i + 3D/4`, from the low bits up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .search import MAX_STRETCH, Metric, search

FORMAT_VERSION = 1
SATURATION = {torch.float16: 65504.0, torch.bfloat16: 2.0**56}  # squares of a row must not overflow float32


class Quantized(NamedTuple):
    """Rows in the stored format: codes [..., D/4] uint8, and affine [..., G, 2], the scale and min of each group."""

    codes: Tensor
    affine: Tensor


def clip_index(head_dim: int, clip: float) -> int:
    """Position, among a row's sorted |x|, of the value that `clip` clips at (reference: OSCAR, section b)."""
    return min(int(clip * head_dim), head_dim - 1)


def quantize(
    x: Tensor,
    *,
    clip: float = 1.0,
    group_size: int | None = None,
    scale_rule: str = "minmax",
    scale_dtype: torch.dtype = torch.float16,
    metric: Metric | None = None,
    sweeps: int = 3,
    stretch: float = 0.0,
) -> Quantized:
    """Quantise rows to 2 bits.

    Args:
        x: rows [..., D], any floating dtype; arithmetic is float32.
        clip: clamp each row at its sorted |x| entry of index `min(floor(clip * D), D - 1)`.
        group_size: channels per scale and min (default D).
        scale_rule: `"minmax"`: levels span the clipped group. `"inner_product"`: once the codes are chosen, levels
            are stretched about the mean so that `<x - mean, x^ - mean^>` equals `|x - mean|^2`.
        scale_dtype: dtype of scale and min. Rows saturate at `SATURATION`; none becomes infinite.
        metric: [..., D, D], for rows [..., n, D]: codes, scale and min are chosen by their error in it (`search`),
            from the levels that span the clipped row; `scale_rule` does not matter then.
        sweeps: of the search.
        stretch: exponent of the search's stretch.

    Returns:
        Quantized: codes [..., D/4] and affine [..., D / group_size, 2].

    Raises:
        ValueError: a search in groups smaller than D.
    """
    head_dim = x.shape[-1]
    if metric is not None and group_size not in (None, head_dim):
        raise ValueError(f"group_size={group_size}: a search needs one group a row; set group_size=None.")
    limit = SATURATION[scale_dtype]
    x = x.float().clamp(-limit, limit)
    clipped = x
    if clip < 1:
        threshold = x.abs().kthvalue(clip_index(head_dim, clip) + 1, dim=-1, keepdim=True).values
        clipped = torch.minimum(torch.maximum(x, -threshold), threshold)
    groups = (-1, group_size or head_dim)
    x, clipped = x.unflatten(-1, groups), clipped.unflatten(-1, groups)  # [..., G, g]

    minimum = clipped.amin(-1, keepdim=True)
    scale = (clipped.amax(-1, keepdim=True) - minimum).clamp_min(1e-8) / 3
    if metric is not None:
        codes, scale, minimum = (
            part.unsqueeze(-2)
            for part in search(x.squeeze(-2), scale.squeeze(-2), minimum.squeeze(-2), metric, sweeps, stretch)
        )
        return _stored(codes, scale, minimum, limit, scale_dtype)
    codes = ((clipped - minimum) / scale + 0.5).floor_().clamp_(0, 3)
    if scale_rule == "inner_product":
        level_mean = codes.mean(-1, keepdim=True) * scale + minimum
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        overlap = (centred * (codes * scale + minimum - level_mean)).sum(-1, keepdim=True)
        gain = centred.square().sum(-1, keepdim=True) / overlap
        gain = torch.where(overlap > 0, gain.clamp(1 / MAX_STRETCH, MAX_STRETCH), 1.0)
        minimum = (minimum - level_mean) * gain + mean
        scale = scale * gain
    return _stored(codes, scale, minimum, limit, scale_dtype)


def _stored(codes: Tensor, scale: Tensor, minimum: Tensor, limit: float, scale_dtype: torch.dtype) -> Quantized:
    """Codes [..., G, g] and the scale and min [..., G, 1] of each group, as they are stored."""
    affine = torch.cat([scale, minimum], dim=-1).clamp_(-limit, limit).to(scale_dtype)  # [..., G, 2]
    return Quantized(pack(codes.flatten(-2).to(torch.uint8)), affine)


def pack(codes: Tensor) -> Tensor:
    """Four 2-bit codes to a byte: [..., D] uint8 in 0..3 -> [..., D/4] uint8."""
    low, second, third, high = codes.chunk(4, dim=-1)
    return low | second << 2 | third << 4 | high << 6


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: [..., D/4] uint8 -> [..., D] uint8 in 0..3."""
    return torch.cat([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], dim=-1)


def code_values(packed: Tensor) -> Tensor:
    """Codes as float32 in byte order, [..., D/4] uint8 -> [..., D]: channel `i + j D/4` is at `4 i + j`.

    One table look-up a byte, the quickest way to unpack on a CPU; `to_byte_order` puts other rows in this order.
    """
    shifts = torch.tensor([0, 2, 4, 6], device=packed.device)
    table = (torch.arange(256, device=packed.device)[:, None] >> shifts & 3).float()
    return torch.nn.functional.embedding(packed.int(), table).flatten(-2)


def to_byte_order(x: Tensor) -> Tensor:
    """Channels [..., D] in the order of `code_values`."""
    return x.unflatten(-1, (4, -1)).mT.flatten(-2)


def from_byte_order(x: Tensor) -> Tensor:
    """The inverse of `to_byte_order`."""
    return x.unflatten(-1, (-1, 4)).mT.flatten(-2)


def dequantize(rows: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that rows in the stored format stand for: [..., D] in `dtype`, computed in float32."""
    groups = rows.affine.shape[-2]
    scale, minimum = rows.affine.float().split(1, dim=-1)  # [..., G, 1]
    values = unpack(rows.codes).float().unflatten(-1, (groups, -1))
    limit = torch.finfo(dtype).max
    return values.mul_(scale).add_(minimum).flatten(-2).clamp_(-limit, limit).to(dtype)
