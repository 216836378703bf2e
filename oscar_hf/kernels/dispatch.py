"""Which kernel runs, and what the compiler has to know of a decode step.

A step, up to a few tokens a row, is `step`: the quick `decode` or the portable `attend`, then `merge`. A chunk is
`attend_history`: flash attention over unpacked blocks where `chunk.supports` says so (many queries, 16 bits, an NVIDIA
GPU, no softcap), the portable `attend` for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..sharing import Prefix
from . import reference
from .launch import LOG2E, dependent_launches
from .reference_write import (
    quantize_into_reference,
    rotate_and_append_reference,
    search_into_reference,
    search_step_reference,
)

try:
    from . import append, attend, chunk, decode, merge, search
    from . import write as writing

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
ON_CPU = False
"""Set by tests, with Triton's interpreter: kernels take tensors on the CPU too."""


def available(tensor: Tensor) -> bool:
    """Whether Triton kernels run where this tensor is."""
    return HAS_TRITON and (tensor.device.type == "cuda" or ON_CPU)


def quantize_into(rows: Tensor, codes: Tensor, affine: Tensor, *, clip: float, scale_rule: str) -> None:
    """Quantise rows [b, H_kv, n, D] into codes [b, H_kv, n, D/4] and affine [b, H_kv, n, groups, 2]."""
    write = writing.quantize_into if available(rows) else quantize_into_reference
    write(rows, codes, affine, 0, clip=clip, scale_rule=scale_rule)


def search_into(
    rows: Tensor,
    metric: Tensor,
    factor: Tensor,
    codes: Tensor,
    affine: Tensor,
    *,
    clip: float,
    sweeps: int,
    stretch: float,
) -> None:
    """`quantize_into` by search in a metric [H_kv, D, D] or [D, D], with its factor (`search.Metric`)."""
    write = search.search_into if available(rows) else search_into_reference
    write(rows, metric, factor, codes, affine, clip=clip, sweeps=sweeps, stretch=stretch)


def write_chunk(
    keys: Tensor,
    values: Tensor,
    sink_keys: Tensor,
    sink_values: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
    k_codes: Tensor,
    k_affine: Tensor,
    v_codes: Tensor,
    v_affine: Tensor,
    **settings: Any,
) -> None:
    """Rotate and store a chunk; on a GPU. See `write.write_chunk`."""
    writing.write_chunk(
        keys,
        values,
        sink_keys=sink_keys,
        sink_values=sink_values,
        recent_keys=recent_keys,
        recent_values=recent_values,
        k_codes=k_codes,
        k_affine=k_affine,
        v_codes=v_codes,
        v_affine=v_affine,
        **settings,
    )


def attend_history(
    query: Tensor,
    history: Sequence[Tensor],
    exact: Sequence[Tensor],
    output: Tensor,
    *,
    tokens: int,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    offset: Tensor | None,
    v_rotation: Tensor | None,
    prefixes: Sequence[Prefix] = (),
) -> None:
    """Attention of a chunk's queries to a quantised history, unpacked as it is read, and to exact tokens; on a GPU.

    Args:
        query: [b, H_kv, G n, D] float32, rotated; row `g * n + i`.
        history: codes and affine of keys, then of values, [b, H_kv, capacity, ...].
        exact: keys and values [b, H_kv, E, D], in order, the last `n` the queries' own.
        output: [b, n, H_q, D]; written.
        tokens: of the history, seen by all queries.
        scaling: factor on the logits.
        softcap: as in `reference.attend_blocks`.
        sink_logits: [H_q].
        offset: [b, H_kv, G n] float32, added to the logits.
        v_rotation: undone on the output; None: nothing to undo.
        prefixes: of b rows, seen by all queries besides.
    """
    settings: dict[str, Any] = {"tokens": tokens, "scaling": scaling, "sink_logits": sink_logits, "offset": offset}
    settings |= {"v_rotation": v_rotation, "prefixes": prefixes}
    if chunk.supports(output.shape[1], query.shape[3], exact[0].dtype, softcap, query.device):
        chunk.attend(query, history, exact, output, **settings)
    else:
        attend_history_portable(query, history, exact, output, softcap=softcap, **settings)


def attend_history_portable(
    query: Tensor,
    history: Sequence[Tensor],
    exact: Sequence[Tensor],
    output: Tensor,
    *,
    tokens: int,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    offset: Tensor | None,
    v_rotation: Tensor | None,
    prefixes: Sequence[Prefix] = (),
) -> None:
    """`attend_history` by the portable kernel, for any chunk."""
    queries = output.shape[1]
    shared = attend_prefixes(query, prefixes, exact[0], scaling=scaling, softcap=softcap, offset=offset)
    k_codes, k_affine, v_codes, v_affine = history
    keys, values = exact
    results = attend.attend_split(
        query * (scaling * LOG2E),
        k_codes,
        k_affine,
        v_codes,
        v_affine,
        keys,
        values,
        keys,
        values,
        None,
        None,
        queries=queries,
        splits=1,
        window_splits=0,
        history=tokens,
        softcap=softcap,
        offset=None if offset is None else offset * LOG2E,
    )
    results = _joined((shared.get("partial"), shared.get("stats")), results)
    merge.merge(*results, output, queries=queries, sink_logits=sink_logits, v_rotation=v_rotation)


def attend_prefixes(
    query: Tensor,
    prefixes: Sequence[Prefix],
    like: Tensor,
    *,
    scaling: float,
    softcap: float | None,
    offset: Tensor | None,
) -> dict[str, Tensor]:
    """Attention to history that rows share, which all queries see; on a GPU.

    Rows that read the same are handled as more query rows of one, so that its bytes are read once for all of them.

    Args:
        query: [B, H_kv, M, D] float32, rotated.
        prefixes: of B rows.
        like: states [B, H_kv, _, D] of the model's dtype.
        scaling: factor on the logits.
        softcap: as in `reference.attend_blocks`.
        offset: [B, H_kv, M] float32, added to the logits.

    Returns:
        dict: `partial` and `stats` as from `attend.attend_split`; empty if there are no prefixes.
    """
    results: tuple[Any, Any] = (None, None)
    query, offset = query * (scaling * LOG2E), None if offset is None else offset * LOG2E
    for prefix in prefixes:
        groups = list(prefix.groups())
        splits = attend.chunk_splits(query.shape, len(groups), prefix.tokens, query.device)
        pieces = []
        nothing = like[:1, :, :0]
        for source, rows in groups:
            k_codes, k_affine, v_codes, v_affine = (buffer[source : source + 1] for buffer in prefix.buffers())
            piece = attend.attend_split(
                reference.fold(query[rows]),
                k_codes,
                k_affine,
                v_codes,
                v_affine,
                nothing,
                nothing,
                nothing,
                nothing,
                None,
                None,
                queries=1,
                splits=splits,
                history=prefix.tokens,
                softcap=softcap,
                offset=None if offset is None else reference.fold(offset[rows]),
            )
            # [1, H_kv, S, b M, ...] -> [b, H_kv, S, M, ...]
            pieces.append([x.squeeze(0).unflatten(2, (len(rows), -1)).movedim(2, 0) for x in piece])
        order = torch.tensor([row for _, rows in groups for row in rows]).argsort().to(query.device)
        partial, stats = (
            parts[0] if len(groups) == 1 else torch.cat(parts)[order] for parts in zip(*pieces, strict=True)
        )
        results = _joined(results, (partial, stats))
    return {} if results[0] is None else {"partial": results[0], "stats": results[1]}


def _joined(one: tuple[Tensor | None, Tensor | None], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Partial results over disjoint tokens as splits of one; contiguous."""
    if one[0] is None or one[1] is None:
        return other
    return torch.cat([one[0], other[0]], 2).contiguous(), torch.cat([one[1], other[1]], 2).contiguous()


def attend_split(query: Tensor, *tiers: Tensor, softcap: float | None, offset: Tensor | None, **settings: Any) -> Any:
    """`attend.attend_split` for a step, by the quickest kernel that takes these shapes."""
    k_affine, recent_keys = tiers[1], tiers[6]
    plain = softcap is None and offset is None
    shape = (query.shape[3], query.shape[2], k_affine.shape[3], recent_keys.dtype, query.device)
    if plain and decode.supports(*shape):
        return decode.decode_split(query, *tiers, **settings)
    return attend.attend_split(query, *tiers, softcap=softcap, offset=offset, **settings)


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_mean: Tensor | None,
    k_rotation: Tensor,
    q_rotation: Tensor,
    v_rotation: Tensor | None,
    sink_keys: Tensor,
    sink_values: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
    k_codes: Tensor,
    k_affine: Tensor,
    v_codes: Tensor,
    v_affine: Tensor,
    lengths: Tensor,
    floors: Tensor,
    recent_tokens: int,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    k_clip: float,
    v_clip: float,
    scale_rule: str,
    k_metric: Tensor | None = None,
    k_factor: Tensor | None = None,
    k_search: int = 0,
    k_stretch: float = 1.0,
    partial: Tensor | None = None,
    stats: Tensor | None = None,
) -> Tensor:
    """Store a few tokens a row and attend, as if they had come one by one; counts them in `lengths`.

    Args:
        query: [B, H_q, n, D] in the model's basis.
        key: [B, H_kv, n, D].
        value: the same.
        k_mean: [H_kv, D] or [B, H_kv, D] float32, taken off the keys, or None.
        k_rotation: float32 [D, D], [H_kv, D, D] or [B, H_kv, D, D]; `q_rotation` and `v_rotation` (None: absorbed)
            likewise.
        q_rotation: as k_rotation.
        v_rotation: as k_rotation.
        sink_keys: [B, H_kv, sink, D]; written.
        sink_values: the same.
        recent_keys: [B, H_kv, ring, D]; written.
        recent_values: the same.
        k_codes: [B, H_kv, C, D/4] uint8; written.
        k_affine: [B, H_kv, C, groups, 2]; written.
        v_codes: as k_codes.
        v_affine: as k_affine.
        lengths: [B] int32, tokens of each row; written.
        floors: [B] int32, tokens that are in the history whatever the window says.
        recent_tokens: of the window.
        scaling: factor on the logits.
        softcap: as in `reference.attend_blocks`.
        sink_logits: [H_q].
        k_clip: as in OscarConfig; `v_clip` and `scale_rule` too.
        v_clip: as k_clip.
        scale_rule: as k_clip.
        k_metric: as k_rotation: search the codes of keys in it; None: round each channel by itself.
        k_factor: the metric's (`search.Metric`).
        k_search: as in OscarConfig; `k_stretch` too.
        k_stretch: as k_search.
        partial: what `attend_prefixes` gave for these queries, or None; on a GPU.
        stats: the same.

    Returns:
        Tensor: [B, n, H_q, D] in the query's dtype.
    """
    windows = (sink_keys, sink_values, recent_keys, recent_values)
    history = (k_codes, k_affine, v_codes, v_affine)
    batch, heads, queries, size = query.shape
    offset = None
    if k_mean is not None and (softcap is not None or sink_logits is not None):
        grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3).float()  # [B, H_kv, G n, D]
        offset = (grouped @ k_mean.unsqueeze(-1)).squeeze(-1) * scaling
    output = query.new_empty(batch, queries, heads, size)
    on_gpu = available(query)
    rotate_and_append = append.rotate_and_append if on_gpu else rotate_and_append_reference
    pdl = on_gpu and dependent_launches(query.device)
    rotated = rotate_and_append(
        query,
        key,
        value,
        k_mean=k_mean,
        k_rotation=k_rotation,
        q_rotation=q_rotation,
        v_rotation=v_rotation,
        sink_keys=sink_keys,
        sink_values=sink_values,
        recent_keys=recent_keys,
        recent_values=recent_values,
        k_codes=k_codes,
        k_affine=k_affine,
        v_codes=v_codes,
        v_affine=v_affine,
        lengths=lengths,
        floors=floors,
        recent=recent_tokens,
        scaling=scaling,
        k_clip=k_clip,
        v_clip=v_clip,
        scale_rule=scale_rule,
        flush_keys=k_metric is None,
        **({"launch_pdl": pdl} if on_gpu else {}),
    )
    if k_metric is not None and k_factor is not None:
        search_step = search.search_step if on_gpu else search_step_reference
        search_step(
            recent_keys,
            k_metric,
            k_factor,
            k_codes,
            k_affine,
            lengths,
            floors,
            n=key.shape[2],
            sinks=sink_keys.shape[2],
            recent=recent_tokens,
            clip=k_clip,
            sweeps=k_search,
            stretch=k_stretch,
        )
    settings: dict[str, Any] = {"queries": queries, "recent_tokens": recent_tokens, "softcap": softcap}
    if not on_gpu:
        result = reference.attend_step(
            rotated, *history, *windows, lengths, floors, sink_logits=sink_logits, offset=offset, **settings
        )
        if v_rotation is not None:
            result = result @ v_rotation.mT
        output.copy_(result.unflatten(2, (-1, queries)).flatten(1, 2).transpose(1, 2))
        lengths += queries
        return output
    results = attend_split(
        rotated,
        *history,
        *windows,
        lengths,
        floors,
        offset=None if offset is None else offset * LOG2E,
        launch_pdl=pdl,
        **settings,
    )
    merge.merge(
        *_joined((partial, stats), results),
        output,
        queries=queries,
        sink_logits=sink_logits,
        v_rotation=v_rotation,
        lengths=lengths,
        launch_pdl=pdl,
    )
    return output


step_op = torch.library.custom_op(
    "oscar_hf::step",
    step,
    mutates_args=(
        "sink_keys",
        "sink_values",
        "recent_keys",
        "recent_values",
        "k_codes",
        "k_affine",
        "v_codes",
        "v_affine",
        "lengths",
    ),
)


@step_op.register_fake
def _(query: Tensor, *args: object) -> Tensor:
    batch, heads, queries, size = query.shape
    return query.new_empty(batch, queries, heads, size)
