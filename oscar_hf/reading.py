"""Store new tokens of a layer and attend to all it holds: a step by kernels, a chunk row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .kernels import attend_blocks, exact_attention
from .kernels.reference import QUERY_BLOCK, Block
from .quantization import dequantize
from .storage import PackedSpan, Span, Tiers
from .transform import Transform

CHUNK_QUERIES = 2048  # of one launch over a quantised history: bounds its partial results


@dataclass(frozen=True)
class Logits:
    """What a model does to its logits.

    Args:
        scaling: their factor; None: D ** -0.5.
        softcap: they become `softcap * tanh(logits / softcap)`.
        sinks: [H_q], one more logit a head in the softmax's denominator (gpt-oss).
    """

    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def factor(self, head_dim: int) -> float:
        """The factor on the logits of heads with so many channels."""
        return head_dim**-0.5 if self.scaling is None else self.scaling

    @property
    def see_the_mean(self) -> bool:
        """Whether taking the mean off keys changes more than a constant in each row's softmax."""
        return self.softcap is not None or self.sinks is not None


def can_step(tiers: Tiers, tokens: int) -> bool:
    """Whether the kernels of a decode step take so many new tokens, all real, in every row."""
    config = tiers.config
    return config.bits == 2 and 1 <= tokens <= config.rollback and (tiers.fixed or kernels.available(tiers.like))


def attend_step(
    tiers: Tiers, transform: Transform, query: Tensor, key: Tensor, value: Tensor, logits: Logits
) -> Tensor:
    """Store a few tokens in each row and attend as if they had come one by one, rows of any lengths together.

    Args:
        tiers: what is stored; with fixed storage, the caller has seen to there being room.
        transform: the layer's.
        query: [B, H_q, n, D] in the model's basis.
        key: [B, H_kv, n, D].
        value: the same.
        logits: what the model does to them.

    Returns:
        Tensor: [B, H_q, n, D] in the query's dtype, contiguous as [B, n, H_q, D].
    """
    if not tiers.fixed:
        tiers.reserve(query.shape[2])
    config = tiers.config
    shared = _attend_prefixes(tiers, transform, query, logits)
    step: Any = torch.ops.oscar_hf.step if torch.compiler.is_compiling() else kernels.step
    output = step(
        query,
        key,
        value,
        *transform.tensors(key.device),
        *tiers.tensors(),
        config.recent_tokens,
        logits.factor(query.shape[-1]),
        logits.softcap,
        logits.sinks,
        config.k_clip,
        config.v_clip,
        config.scale_rule,
        *(tiers.history.metric or (None, None)),
        config.k_search,
        config.k_stretch,
        **shared,
    )
    if not tiers.fixed:
        tiers.stepped(query.shape[2])
    return output.transpose(1, 2)


def attend_chunk(
    tiers: Tiers, transform: Transform, rows: slice, query: Tensor, key: Tensor, value: Tensor, logits: Logits
) -> Tensor:
    """`attend_step` for any number of new tokens, in rows of equal length: [b, H_q, n, D].

    A prompt's tokens, and those of a longer chunk, see each other exactly (with `config.exact_chunks`).
    """
    config, size, count = tiers.config, query.shape[-1], query.shape[2]
    start = tiers.lengths[rows][0]
    if start == 0 and config.exact_chunks and not tiers.prefixes:
        output = exact_attention(
            query, key, value, scaling=logits.scaling, softcap=logits.softcap, sink_logits=logits.sinks
        )
        store(tiers, transform, rows, key, value)
        return output
    exact = config.exact_chunks and count > max(1, config.rollback)
    keys, values = transform.keys(key), transform.values(value)
    grouped = query.unflatten(1, (key.shape[1], -1))  # [b, H_kv, G, n, D]
    if exact and config.bits == 2 and kernels.available(key):
        held = [*tiers.exact(rows), Span(start, keys, values)]
        states = [torch.cat(parts, 2) for parts in zip(*((span.keys, span.values) for span in held), strict=True)]
        history = tiers.flushed[rows][0]
        output = torch.empty_like(query.transpose(1, 2))  # [b, n, H_q, D]
        for first in range(0, count, CHUNK_QUERIES):
            last = min(first + CHUNK_QUERIES, count)
            part = grouped[:, :, :, first:last].flatten(2, 3)
            kernels.attend_history(
                transform.queries(part),
                [buffer[rows] for buffer in tiers.history.buffers()],
                [state[:, :, : state.shape[2] - count + last] for state in states],
                output[:, first:last],
                tokens=history,
                scaling=logits.factor(size),
                softcap=logits.softcap,
                sink_logits=logits.sinks,
                offset=transform.mean_logits(part, logits.factor(size)) if logits.see_the_mean else None,
                v_rotation=transform.tensors(key.device)[3],
                prefixes=[prefix.select(rows) for prefix in tiers.prefixes],
            )
        tiers.append(rows, keys, values)
        return output.transpose(1, 2)
    output = torch.empty_like(grouped, dtype=torch.float32)
    sinks = None
    if logits.sinks is not None:
        sinks = logits.sinks.float().view(1, key.shape[1], -1, 1).expand(grouped.shape[:-1])
    for first, last, blocks in _blocks(tiers, rows, keys, values, grouped.shape[2], exact):
        part = grouped[:, :, :, first:last].flatten(2, 3)  # [b, H_kv, G n, D]
        result = attend_blocks(
            transform.queries(part).mul_(logits.factor(size)),
            blocks,
            logits.softcap,
            None if sinks is None else sinks[..., first:last].flatten(2),
            transform.mean_logits(part, logits.factor(size)) if logits.see_the_mean else None,
        )
        output[:, :, :, first:last] = transform.undo_values(result).unflatten(2, (-1, last - first))
    return output.flatten(1, 2).to(query.dtype)


def attend_rows(
    tiers: Tiers, transform: Transform, new: Tensor | None, query: Tensor, key: Tensor, value: Tensor, logits: Logits
) -> Tensor:
    """`attend_chunk` for rows of any lengths; `new` as in `row_groups`, and zeros at padding."""
    groups = row_groups(tiers, new, key.shape[2])
    if len(groups) == 1 and groups[0] == (slice(None), None):
        return attend_chunk(tiers, transform, slice(None), query, key, value, logits)
    output = torch.zeros_like(query)
    for rows, tokens in groups:
        q, k, v = (pick(states[rows], tokens) for states in (query, key, value))
        result = attend_chunk(tiers, transform.rows(rows), rows, q, k, v, logits)
        if tokens is None:
            output[rows] = result
        else:
            output[rows] = output[rows].index_copy(2, tokens, result)
    return output


def row_groups(tiers: Tiers, new: Tensor | None, count: int) -> list[tuple[slice, Tensor | None]]:
    """Rows that can be handled together, with the indices of their new tokens (None: all).

    `new` [B, count] bool says which of `count` new columns are real; None: all.
    """
    batch = tiers.like.shape[0]
    if count == 0:
        return []
    if new is None:
        if tiers.uniform:
            return [(slice(None), None)]
        return [(slice(row, row + 1), None) for row in range(batch)]
    tokens = [new[row].nonzero().squeeze(-1) for row in range(batch)]
    return [(slice(row, row + 1), tokens[row]) for row in range(batch) if len(tokens[row])]


def pick(states: Tensor, tokens: Tensor | None) -> Tensor:
    """Tokens [n] of states [b, H, T, D]; None: all of them."""
    return states if tokens is None else states.index_select(2, tokens.to(states.device))


def _attend_prefixes(tiers: Tiers, transform: Transform, query: Tensor, logits: Logits) -> dict[str, Tensor]:
    """Attention of queries [B, H_q, n, D] to what rows share, for kernels to go on from."""
    if not tiers.prefixes:
        return {}
    factor = logits.factor(query.shape[-1])
    query = query.unflatten(1, (tiers.like.shape[1], -1)).flatten(2, 3)  # [B, H_kv, G n, D]
    return kernels.attend_prefixes(
        transform.queries(query),
        tiers.prefixes,
        tiers.like,
        scaling=factor,
        softcap=logits.softcap,
        offset=transform.mean_logits(query, factor) if logits.see_the_mean else None,
    )


def unpack_all(tiers: Tiers, transform: Transform, seen: int, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """All keys and values [B, H_kv, seen, D] in the model's basis and dtype, zeros at padding.

    `columns` [B, seen] bool says which are real; None: all, in rows of any length.
    """
    like = tiers.like
    keys, values = (like.new_zeros(*like.shape[:2], seen, like.shape[3]) for _ in range(2))
    together = tiers.uniform and columns is None
    for rows in [slice(None)] if together else [slice(row, row + 1) for row in range(like.shape[0])]:
        real = None if columns is None else columns[rows.start].nonzero().squeeze(-1)
        own = transform.rows(rows)

        def place(
            start: int,
            span: Span | PackedSpan,
            rows: slice = rows,
            real: Tensor | None = real,
            own: Transform = own,
        ) -> None:
            at = torch.arange(start, start + span.stop - span.start, device=like.device)
            at = at if real is None else real[start : start + len(at)]
            for held, states, undo in (
                (keys, span.keys, own.undo_keys),
                (values, span.values, own.undo_values),
            ):
                plain = states if isinstance(states, Tensor) else dequantize(states)
                held[rows].index_copy_(2, at, undo(plain).to(like.dtype).expand_as(held[rows, :, : len(at)]))

        sink, shared = tiers.config.sink_tokens, tiers.prefix_tokens
        for span in tiers.exact(rows):
            place(span.start + (shared if span.start >= sink else 0), span)
        for packed in tiers.shared_blocks(rows):
            place(sink + packed.start, packed)
        for packed in tiers.history.blocks(rows, tiers.flushed[rows][0]):
            place(sink + shared + packed.start, packed)
    return keys, values


def store(tiers: Tiers, transform: Transform, rows: slice, key: Tensor, value: Tensor) -> None:
    """Rotate and store keys and values [b, H_kv, n, D] of rows of one length."""
    if tiers.config.bits != 2 or tiers.history.metric is not None or not kernels.available(key):
        tiers.append(rows, transform.keys(key), transform.values(value))
        return
    config = tiers.config
    row = rows.indices(len(tiers.lengths))[0]
    start = tiers.lengths[row]
    leaving = tiers.leaving(row, key.shape[2])
    tiers.make_room(leaving.stop - config.sink_tokens)
    old = tiers.recent(rows, leaving.start, min(start, leaving.stop))
    for span in old:
        tiers.history.write(rows, span.start - config.sink_tokens, span.keys, span.values)
    k_mean, k_rotation, _, v_rotation = transform.tensors(key.device)
    kernels.write_chunk(
        key,
        value,
        *(window[rows] for window in tiers.windows.values()),
        *(buffer[rows] for buffer in tiers.history.buffers()),
        k_mean=k_mean,
        k_rotation=k_rotation,
        v_rotation=v_rotation,
        start=start,
        flushed=leaving.stop - config.sink_tokens,
        k_clip=config.k_clip,
        v_clip=config.v_clip,
        scale_rule=config.scale_rule,
    )
    tiers.stored(rows, start + key.shape[2])


def _blocks(
    tiers: Tiers, rows: slice, keys: Tensor, values: Tensor, groups: int, exact: bool
) -> Iterator[tuple[int, int, Iterator[Block]]]:
    """Store new tokens, then give, for each block of queries, its first and last and what it sees."""
    row, count = rows.indices(len(tiers.lengths))[0], keys.shape[2]
    if count == 1:
        tiers.append(rows, keys, values)
        history = [*tiers.shared_blocks(rows), *tiers.history.blocks(rows, tiers.flushed[row])]
        spans: list[Span | PackedSpan] = [*tiers.exact(rows), *history]
        yield 0, 1, ((span.keys, span.values, None) for span in spans)
        return
    length, flushed = tiers.lengths[row], tiers.flushed[row]
    held = [*tiers.exact(rows), Span(length, keys, values)]
    positions = torch.cat([torch.arange(span.start, span.stop, device=keys.device) for span in held])
    kept = Span(0, torch.cat([span.keys for span in held], 2), torch.cat([span.values for span in held], 2))
    tiers.append(rows, keys, values)
    for first in range(0, count, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, count)
        queries = torch.arange(length + first, length + last, device=keys.device)
        blocks = _chunk_blocks(tiers, rows, queries, kept, positions, flushed, exact)
        yield first, last, ((k, v, seen if seen is None else seen.repeat(groups, 1)) for k, v, seen in blocks)


def _chunk_blocks(
    tiers: Tiers, rows: slice, queries: Tensor, kept: Span, positions: Tensor, flushed: int, exact: bool
) -> Iterator[Block]:
    """What queries at these positions see: exact tokens at theirs, and the history.

    `flushed` tokens were in the history before this chunk.
    """
    config, row = tiers.config, rows.indices(len(tiers.lengths))[0]
    sink, recent = config.sink_tokens, config.recent_tokens
    behind = queries[:, None] - positions
    visible = behind >= 0
    if not exact:
        visible &= (behind < recent) | (positions < sink)
    used = visible.any(0).nonzero().squeeze(-1)
    if len(used):
        yield kept.keys.index_select(2, used), kept.values.index_select(2, used), visible[:, used]
    for packed in (*tiers.shared_blocks(rows), *tiers.history.blocks(rows, flushed)):
        yield packed.keys, packed.values, None
    if not exact:  # tokens that left the window within this chunk
        reached = min(tiers.flushed[row], int(queries[-1]) - recent - sink + 1)
        for packed in tiers.history.blocks(rows, reached, flushed):
            left = sink + torch.arange(packed.start, packed.stop, device=queries.device)
            yield packed.keys, packed.values, queries[:, None] - left >= recent
