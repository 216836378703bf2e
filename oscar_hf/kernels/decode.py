"""The quickest decode attention, for the commonest shapes: tensor cores of NVIDIA sm_80 and later, in Gluon.

`attend.attend_split` computes the same for any shape.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .launch import capability, dependent_launch, dependent_launches, device_guard, processors

try:
    from .gluon_decode import attend_kernel

    AVAILABLE = True
except (ImportError, AttributeError):
    AVAILABLE = False

ROWS = 8  # query rows of a KV head: N of the matrix instruction
WARP_TOKENS = 64  # history tokens of one warp and iteration
EXACT_TOKENS = 64  # sink and ring tokens of one program and iteration
EXACT_COST = 2.0  # time of their bytes to time of as many of the history
PROGRAMS = 6  # of two warps, that a multiprocessor holds at once
MOST_SPLITS = 16  # of a large batch: more would only write more partial results


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
        attend_kernel[(splits, batch * heads)](
            query, sink_keys, sink_values, recent_keys, recent_values,
            codes, affine, v_codes.view(torch.int16), v_affine.view(torch.int32),
            lengths, floors, partial, stats, queries, heads, sink, recent_tokens, ring, splits, exact,
            codes.stride(0), codes.stride(1), affine.stride(0), affine.stride(1),
            M=rows, D=size, W=warps, STAGES=stages, E=exact_tokens, BF16=k_affine.dtype == torch.bfloat16,
            PDL=launch_pdl, INT8=2 * rows <= ROWS if int8 is None else int8, num_warps=warps,
            **options, **dependent_launch(launch_pdl),
        )  # fmt: skip
    return partial, stats
