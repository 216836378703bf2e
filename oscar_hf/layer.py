"""One layer of the cache: sink and recent window in the model's dtype, the history between them in 2 bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .config import OscarConfig
from .kernels import attend_blocks, exact_attention
from .kernels.reference import QUERY_BLOCK, Block
from .quantization import dequantize
from .storage import PackedSpan, Span, Tiers
from .transform import Transform


class OscarLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer, stored per row from its first real token.

    Tokens are counted per row from its first real one; padding is not stored.

    Under the "oscar" attention implementation `update` only marks the keys with this layer, and `attend` stores and
    reads them, since only the attention function sees the padding mask. Under any other implementation `update`
    stores them and returns all keys and values, unpacked, in the model's basis.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, transform: Transform, config: OscarConfig, text_config: Any):
        super().__init__()
        self.transform = transform
        self.config = config
        self.text_config = text_config
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next update may have another batch size, dtype or device."""
        self.is_initialized = False
        self.tiers: Tiers = None  # type: ignore[assignment]  # until the first update
        self.padding: Tensor | None = None  # mask of the coming forward, for the dense fallback
        self.seen = 0  # columns, padding included
        self.columns: Tensor | None = None  # [B, seen] bool, which are real; None: all
        self._staged = False

    @property
    def fused(self) -> bool:
        """Whether the model's attention function is ours, so that `attend` will follow `update`."""
        return getattr(self.text_config, "_attn_implementation", None) == "oscar"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the windows in the shape, dtype and device of [B, H_kv, n, D] states."""
        if key_states.shape[-1] != value_states.shape[-1]:
            raise ValueError(
                f"Keys of {key_states.shape[-1]} and values of {value_states.shape[-1]} channels (MLA?) "
                "are not supported; use DynamicCache for this model."
            )
        if key_states.shape[-1] != self.transform.rotation.head_dim:
            raise ValueError(
                f"Rotations for head_dim {self.transform.rotation.head_dim} met keys of {key_states.shape[-1]} "
                "channels; they belong to another model."
            )
        self.config.groups(key_states.shape[-1])
        self.tiers = Tiers(self.config, key_states)
        self.is_initialized = True

    # What transformers calls

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values [B, H_kv, n, D], after RoPE. See the class for what comes back."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "OscarQuantizedCache holds no gradients: run under torch.no_grad(), or without a cache."
            )
        if self.transform.retired:
            raise RuntimeError(
                "This cache was made before its model was patched or unpatched, which changed the values it gives; "
                "make a new cache."
            )
        if self._staged:
            raise RuntimeError(
                "Keys were given to the cache but never reached oscar attention: the last forward failed halfway, "
                "or this model changes keys after the cache. Call cache.reset(), or use another attention "
                "implementation."
            )
        self._check_states(key_states)
        if not self.seen:
            self.lazy_initialization(key_states, value_states)
        if self.fused:
            self._staged = True
            key_states = key_states.view_as(key_states)
            key_states._oscar_layer = self  # type: ignore[attr-defined]
            return key_states, value_states
        return self._update_dense(key_states, value_states)

    def _update_dense(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store, and return what any other attention function may attend to: [B, H_kv, seen + n, D]."""
        count = key_states.shape[2]
        if count > 1 and not self.config.exact_chunks:
            raise ValueError(
                "exact_chunks=False shows each query another cache, which only oscar attention can: patch the model, "
                'set its attention implementation to "oscar", or feed one token at a time.'
            )
        new, self.padding = self._new_columns(self.padding, count), None
        past = self._dense() if count > 1 and self.seen else None
        self._staged = True  # an error from here on leaves the layer half-written
        for rows, tokens in self._row_groups(new, count):
            keys, values = (_pick(states[rows], tokens) for states in (key_states, value_states))
            self.tiers.append(rows, self.transform.keys(keys), self.transform.values(values))
        first = self.seen == 0
        self._extend_columns(new, count)
        self._staged = False
        if first:
            return key_states, value_states
        if past is None:
            return self._dense()
        return torch.cat([past[0], key_states], 2), torch.cat([past[1], value_states], 2)

    def unstage(self) -> None:
        """Forget keys that `update` was given and that attention refused before anything was stored."""
        self._staged = False

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys and values and attend to all that is stored.

        Args:
            query: [B, H_q, n, D] in the model's basis, after RoPE.
            key: [B, H_kv, n, D], the new tokens only.
            value: the same.
            mask: [B, seen + n] bool, False is padding; None: no padding.
            scaling: factor on the logits (default D ** -0.5).
            softcap: as in `kernels.reference.attend_blocks`.
            sink_logits: [H_q], attention-sink logits (gpt-oss).

        Returns:
            Tensor: [B, H_q, n, D] in the query's dtype; zeros at padding.
        """
        if not self._staged:
            raise NotImplementedError(
                "Layers that share the keys of another layer are not supported by oscar attention; "
                "use another attention implementation for this model."
            )
        self._staged = False
        new = self._new_columns(mask, key.shape[2])  # a refusal leaves the layer as it was
        self._staged = True  # an error from here on leaves it half-written
        settings: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sink_logits": sink_logits}
        groups = self._row_groups(new, key.shape[2])
        if len(groups) == 1 and groups[0] == (slice(None), None):
            output = self._attend_rows(slice(None), query, key, value, **settings)
        else:
            output = torch.zeros_like(query)
            for rows, tokens in groups:
                q, k, v = (_pick(states[rows], tokens) for states in (query, key, value))
                result = self._attend_rows(rows, q, k, v, **settings)
                if tokens is None:
                    output[rows] = result
                else:
                    output[rows] = output[rows].index_copy(2, tokens, result)
        self._extend_columns(new, key.shape[2])
        self._staged = False
        return output

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the columns that a mask for `query_length` new ones covers."""
        if isinstance(query_length, Tensor):  # cache_position, transformers < 5.4
            query_length = query_length.shape[0]
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: grows without bound."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    @property
    def batch_size(self) -> int:
        if not self.is_initialized:
            raise AttributeError("batch_size is not known before the first update")
        return len(self.tiers.lengths)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest `-tokens_to_remove` columns; a positive number is the length to keep (old meaning).

        Tokens that had left the window stay quantised: after a rollback of n, up to n tokens that decoding alone
        would still hold exactly are not.
        """
        count = int(tokens_to_remove)
        remove = min(self.seen, -count if count <= 0 else max(0, self.seen - count))
        if remove == 0:
            return
        counts = [remove] * self.batch_size
        if self.columns is not None:
            counts = self.columns[:, self.seen - remove :].sum(1).tolist()
            self.columns = self.columns[:, : self.seen - remove] if remove < self.seen else None
        self.seen -= remove
        self.tiers.crop(counts)

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may come more than once."""
        if not self.is_initialized:
            return
        self.tiers.select(rows)
        if self.columns is not None:
            self.columns = self.columns.index_select(0, rows.to(self.columns.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of `beam_idx`, for beam search."""
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.is_initialized:
            self.select_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` (numbers or a bool mask) name."""
        if self.is_initialized:
            self.select_rows(torch.arange(self.batch_size, device=indices.device)[indices])

    def offload(self) -> None:
        """Not supported: the history is small."""
        raise NotImplementedError(
            "OscarQuantizedCache does not offload itself; place the model's layers with device_map instead."
        )

    prefetch = offload

    def __deepcopy__(self, memo: dict[int, Any]) -> OscarLayer:
        """Copy what is stored; share transforms and the model's config."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        if self.is_initialized:
            twin.tiers = copy.deepcopy(self.tiers, memo)
        return twin

    def buffers(self) -> list[Tensor]:
        """Every tensor that holds keys and values."""
        return self.tiers.buffers() if self.is_initialized else []

    # Rows and columns

    def _check_states(self, keys: Tensor) -> None:
        if not self.seen:
            return
        held = self.tiers.like
        expected = (held.shape[0], held.shape[1], held.shape[3], held.dtype, held.device)
        given = (keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype, keys.device)
        if expected != given:
            names = ("batch size", "KV heads", "head_dim", "dtype", "device")
            odd = [f"{n} {g} instead of {e}" for n, g, e in zip(names, given, expected, strict=True) if g != e]
            raise ValueError(f"This cache holds other keys: {', '.join(odd)}. Use a new cache, or reset().")

    def _new_columns(self, mask: Tensor | None, count: int) -> Tensor | None:
        """Which of `count` new columns are real, [B, count] bool, or None for all; checks the columns before them."""
        if mask is None:
            return None
        if mask.shape[1] != self.seen + count:
            raise ValueError(
                f"The attention mask has {mask.shape[1]} columns, but the cache holds {self.seen} and {count} are "
                "new. Is this cache filled by another prompt? Use a new one, or reset()."
            )
        mask = mask.to(torch.bool)
        if self.seen:
            past = mask[:, : self.seen]
            known = self.columns.to(past.device) if self.columns is not None else True
            if not bool((past == known).all()):
                raise ValueError(
                    "The attention mask changed for columns that are already stored; padding must stay as it was."
                )
        new = mask[:, self.seen :]
        return None if bool(new.all()) else new

    def _extend_columns(self, new: Tensor | None, count: int) -> None:
        if new is not None or self.columns is not None:
            all_real = torch.ones(self.batch_size, self.seen + count, dtype=torch.bool, device=self.tiers.like.device)
            past = all_real[:, : self.seen] if self.columns is None else self.columns
            new = all_real[:, self.seen :] if new is None else new.to(past.device)
            self.columns = torch.cat([past, new], dim=1)
        self.seen += count

    def _row_groups(self, new: Tensor | None, count: int) -> list[tuple[slice, Tensor | None]]:
        """Rows that can be handled together, with the indices of their new tokens (None: all)."""
        batch = self.batch_size
        if count == 0:
            return []
        if new is None:
            if self.tiers.uniform:
                return [(slice(None), None)]
            return [(slice(row, row + 1), None) for row in range(batch)]
        tokens = [new[row].nonzero().squeeze(-1) for row in range(batch)]
        return [(slice(row, row + 1), tokens[row]) for row in range(batch) if len(tokens[row])]

    # Reading rows of equal length

    def _attend_rows(
        self,
        rows: slice,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """`attend` for rows of equal length, without padding."""
        keys, values = self.transform.keys(key), self.transform.values(value)
        if self.tiers.lengths[rows][0] == 0 and self.config.exact_chunks:
            output = exact_attention(query, key, value, scaling=scaling, softcap=softcap, sink_logits=sink_logits)
            self.tiers.append(rows, keys, values)
            return output
        kv_heads = key.shape[1]
        grouped = query.unflatten(1, (kv_heads, -1))  # [b, H_kv, G, n, D]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        sinks = None
        if sink_logits is not None:
            sinks = sink_logits.float().view(1, kv_heads, -1, 1).expand(grouped.shape[:-1])
        output = torch.empty_like(grouped, dtype=torch.float32)
        for start, stop, blocks in self._read(rows, keys, values, grouped.shape[2]):
            part = grouped[:, :, :, start:stop].flatten(2, 3)  # [b, H_kv, G n, D]
            result = attend_blocks(
                self.transform.queries(part).mul_(scaling),
                blocks,
                softcap,
                None if sinks is None else sinks[..., start:stop].flatten(2),
                self.transform.mean_logits(part, scaling) if softcap or sinks is not None else None,
            )
            output[:, :, :, start:stop] = self.transform.undo_values(result).unflatten(2, (-1, stop - start))
        return output.flatten(1, 2).to(query.dtype)

    def _read(
        self, rows: slice, keys: Tensor, values: Tensor, groups: int
    ) -> Iterator[tuple[int, int, Iterator[Block]]]:
        """Store new tokens, then give, for each block of queries, its first and last and what it sees."""
        count = keys.shape[2]
        if count == 1:
            self.tiers.append(rows, keys, values)
            history = self.tiers.history.blocks(rows, self.tiers.flushed[rows][0])
            spans = chain[Span | PackedSpan](self.tiers.exact(rows, ordered=False), history)
            yield 0, 1, ((span.keys, span.values, None) for span in spans)
            return
        length, flushed = self.tiers.lengths[rows][0], self.tiers.flushed[rows][0]
        held = [*self.tiers.exact(rows), Span(length, keys, values)]
        positions = torch.cat([torch.arange(span.start, span.stop, device=keys.device) for span in held])
        exact = Span(0, torch.cat([span.keys for span in held], 2), torch.cat([span.values for span in held], 2))
        self.tiers.append(rows, keys, values)
        for first in range(0, count, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, count)
            queries = torch.arange(length + first, length + last, device=keys.device)
            blocks = self._chunk_blocks(rows, queries, exact, positions, flushed)
            yield first, last, ((k, v, seen if seen is None else seen.repeat(groups, 1)) for k, v, seen in blocks)

    def _chunk_blocks(
        self, rows: slice, queries: Tensor, exact: Span, positions: Tensor, flushed: int
    ) -> Iterator[Block]:
        """What queries at these positions see: exact tokens at theirs, and the history.

        `flushed` tokens were in the history before this chunk.
        """
        sink, recent = self.config.sink_tokens, self.config.recent_tokens
        behind = queries[:, None] - positions
        visible = behind >= 0
        if not self.config.exact_chunks:
            visible &= (behind < recent) | (positions < sink)
        used = visible.any(0).nonzero().squeeze(-1)
        if len(used):
            yield exact.keys.index_select(2, used), exact.values.index_select(2, used), visible[:, used]
        for packed in self.tiers.history.blocks(rows, flushed):
            yield packed.keys, packed.values, None
        if not self.config.exact_chunks:  # tokens that left the window within this chunk
            reached = min(self.tiers.flushed[rows][0], int(queries[-1]) - recent - sink + 1)
            for packed in self.tiers.history.blocks(rows, reached, flushed):
                left = sink + torch.arange(packed.start, packed.stop, device=queries.device)
                yield packed.keys, packed.values, queries[:, None] - left >= recent

    def _dense(self) -> tuple[Tensor, Tensor]:
        """All keys and values [B, H_kv, seen, D] in the model's basis and dtype, zeros at padding."""
        tiers, like = self.tiers, self.tiers.like
        keys, values = (like.new_zeros(*like.shape[:2], self.seen, like.shape[3]) for _ in range(2))
        together = tiers.uniform and self.columns is None
        for rows in [slice(None)] if together else [slice(row, row + 1) for row in range(self.batch_size)]:
            real = None if self.columns is None else self.columns[rows.start].nonzero().squeeze(-1).to(like.device)
            for span in tiers.exact(rows):
                self._place(keys, values, rows, real, span)
            for packed in tiers.history.blocks(rows, tiers.flushed[rows][0]):
                states = (p if isinstance(p, Tensor) else dequantize(p) for p in (packed.keys, packed.values))
                self._place(keys, values, rows, real, Span(self.config.sink_tokens + packed.start, *states))
        return keys, values

    def _place(self, keys: Tensor, values: Tensor, rows: slice, real: Tensor | None, span: Span) -> None:
        """Put a span, back in the model's basis, at its columns; `real` are the columns that hold tokens."""
        columns = (
            torch.arange(span.start, span.stop, device=keys.device) if real is None else real[span.start : span.stop]
        )
        keys[rows].index_copy_(2, columns, self.transform.undo_keys(span.keys).to(keys.dtype))
        values[rows].index_copy_(2, columns, self.transform.undo_values(span.values).to(values.dtype))


def _pick(states: Tensor, tokens: Tensor | None) -> Tensor:
    """Tokens [n] of states [b, H, T, D]; None: all of them."""
    return states if tokens is None else states.index_select(2, tokens.to(states.device))
