"""One layer of the cache: sink and recent window in the model's dtype, the history between them in 2 bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .config import OscarConfig
from .kernels import attend_blocks, exact_attention
from .kernels.reference import QUERY_BLOCK, Block
from .rotation import LayerRotation
from .storage import History


class Transform:
    """A layer's rotations on the devices that use them; one object serves all caches of a patched model."""

    def __init__(self, rotation: LayerRotation, absorbed: bool = False):
        self.rotation = rotation
        self.absorbed = absorbed  # the projections carry v_rotation already
        self._placed: dict[torch.device, dict[str, Tensor]] = {}

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        if device not in self._placed:
            tensors = {name: tensor.to(device, torch.float32) for name, tensor in self.rotation.tensors().items()}
            tensors.setdefault("q_rotation", tensors["k_rotation"])
            self._placed[device] = tensors
        return self._placed[device]

    def keys(self, keys: Tensor) -> Tensor:
        """`(k - k_mean) k_rotation`, [B, H_kv, n, D] in the dtype given."""
        placed, rotated = self._on(keys.device), keys.float()
        if "k_mean" in placed:
            rotated = rotated - placed["k_mean"].unsqueeze(1)
        return (rotated @ placed["k_rotation"]).to(keys.dtype)

    def undo_keys(self, keys: Tensor) -> Tensor:
        """Stored keys back in the model's basis."""
        placed = self._on(keys.device)
        restored = keys.float() @ placed["q_rotation"].mT
        return (restored + placed["k_mean"].unsqueeze(1) if "k_mean" in placed else restored).to(keys.dtype)

    def values(self, values: Tensor) -> Tensor:
        """`v v_rotation`, unless the projections have done it."""
        return values if self.absorbed else self._times(values, "v_rotation")

    def undo_values(self, values: Tensor) -> Tensor:
        """The inverse of `values`, for stored values and for attention outputs of a KV head."""
        if self.absorbed:
            return values
        return (values.float() @ self._on(values.device)["v_rotation"].mT).to(values.dtype)

    def _times(self, states: Tensor, name: str) -> Tensor:
        return (states.float() @ self._on(states.device)[name]).to(states.dtype)

    def queries(self, queries: Tensor) -> Tensor:
        """`q q_rotation` for queries [B, H_kv, n, D], float32."""
        return queries.float() @ self._on(queries.device)["q_rotation"]

    def mean_logits(self, queries: Tensor) -> Tensor | None:
        """`q . k_mean`, [B, H_kv, n]: what every logit loses because the mean was taken off the keys."""
        mean = self._on(queries.device).get("k_mean")
        return None if mean is None else (queries.float() @ mean.unsqueeze(-1)).squeeze(-1)


class OscarLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer, stored per row from its first real token.

    A row's token `t` is in the sink if `t < sink_tokens`, else in the history once `recent_tokens` newer ones have
    come, else in the recent window, a ring with `t` at slot `t % recent_tokens`. Padding is not stored.

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
        self.padding: Tensor | None = None  # mask of the coming forward, for the dense fallback
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next update may have another batch size, dtype or device."""
        self.is_initialized = False
        self.seen = 0  # columns, padding included
        self.columns: Tensor | None = None  # [B, seen] bool, which are real; None: all
        self.lengths: list[int] = []  # tokens of each row
        self.flushed: list[int] = []  # of which in the history
        self.windows: dict[str, Tensor] = {}
        self.history: History | None = None
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
        batch, heads, _, size = key_states.shape
        for part, tokens in (("sink", self.config.sink_tokens), ("recent", self.config.recent_tokens)):
            for name, like in (("keys", key_states), ("values", value_states)):
                self.windows[f"{part}_{name}"] = like.new_empty(batch, heads, tokens, size)
        self.history = History(self.config, key_states)
        self.lengths, self.flushed = [0] * batch, [0] * batch
        self.is_initialized = True

    # What transformers calls

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values [B, H_kv, n, D], after RoPE. See the class for what comes back."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError("OscarQuantizedCache holds no gradients: run under torch.no_grad(), or without a cache.")
        self._check_states(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.fused:
            if self._staged:
                raise RuntimeError(
                    "Keys were given to the cache but never reached oscar attention: the last forward failed halfway, "
                    "or this model changes keys after the cache. Call cache.reset(), or use another attention "
                    "implementation."
                )
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
        for rows, tokens in self._row_groups(new, count):
            keys, values = (_pick(states[rows], tokens) for states in (key_states, value_states))
            self._append(rows, self.transform.keys(keys), self.transform.values(values))
        first = self.seen == 0
        self._extend_columns(new, count)
        if first:
            return key_states, value_states
        if past is None:
            return self._dense()
        return torch.cat([past[0], key_states], 2), torch.cat([past[1], value_states], 2)

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
        new = self._new_columns(mask, key.shape[2])
        self._staged = False
        settings: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sink_logits": sink_logits}
        groups = self._row_groups(new, key.shape[2])
        if len(groups) == 1 and groups[0] == (slice(None), None):
            output = self._attend_rows(slice(None), query, key, value, **settings)
        else:
            output = torch.zeros_like(query)
            for rows, tokens in groups:
                parts = (_pick(states[rows], tokens) for states in (query, key, value))
                result = self._attend_rows(rows, *parts, **settings)
                if tokens is None:
                    output[rows] = result
                else:
                    output[rows] = output[rows].index_copy(2, tokens, result)
        self._extend_columns(new, key.shape[2])
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
        return len(self.lengths)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest `-tokens_to_remove` columns; a positive number is the length to keep (transformers < 5.15).

        Tokens that had left the window stay quantised.
        """
        count = int(tokens_to_remove)
        remove = min(self.seen, -count if count <= 0 else max(0, self.seen - count))
        if remove == 0:
            return
        removed = [remove] * len(self.lengths)
        if self.columns is not None:
            removed = self.columns[:, self.seen - remove :].sum(1).tolist()
            self.columns = self.columns[:, : self.seen - remove]
        self.seen -= remove
        self.lengths = [length - count for length, count in zip(self.lengths, removed, strict=True)]
        kept = [max(0, length - self.config.sink_tokens) for length in self.lengths]
        self.flushed = [min(pair) for pair in zip(self.flushed, kept, strict=True)]

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may come more than once."""
        if not self.is_initialized:
            return
        assert self.history is not None
        self.history.select(rows)
        self.windows = {name: window.index_select(0, rows.to(window.device)) for name, window in self.windows.items()}
        order = rows.tolist()
        self.lengths, self.flushed = [self.lengths[row] for row in order], [self.flushed[row] for row in order]
        if self.columns is not None:
            self.columns = self.columns.index_select(0, rows.to(self.columns.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of `beam_idx`, for beam search."""
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.select_rows(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` (numbers or a bool mask) name."""
        self.select_rows(torch.arange(len(self.lengths), device=indices.device)[indices])

    def offload(self) -> None:
        """Not supported: the history is small; place layers with `device_map` instead."""
        raise NotImplementedError("OscarQuantizedCache does not offload; its layers live where their keys do.")

    prefetch = offload

    def __deepcopy__(self, memo: dict[int, Any]) -> OscarLayer:
        """Copy what is stored; share transforms and the model's config."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        for name in ("lengths", "flushed", "windows", "history"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    def buffers(self) -> list[Tensor]:
        """Every tensor that holds keys and values."""
        return [*self.windows.values(), *(self.history.buffers() if self.history else [])]

    # Rows and columns

    def _check_states(self, keys: Tensor) -> None:
        if not self.is_initialized:
            return
        held = self.windows["sink_keys"]
        expected = (held.shape[0], held.shape[1], held.shape[3], held.dtype, held.device)
        given = (keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype, keys.device)
        if expected != given:
            names = ("batch size", "KV heads", "head_dim", "dtype", "device")
            odd = [f"{n} {g} instead of {e}" for n, g, e in zip(names, given, expected, strict=True) if g != e]
            raise ValueError(f"This cache was filled with other keys: {', '.join(odd)}. Use a new cache, or reset().")

    def _new_columns(self, mask: Tensor | None, count: int) -> Tensor | None:
        """Which of `count` new columns are real, [B, count] bool, or None for all; checks the columns before them."""
        if mask is None:
            return None
        if mask.shape[1] != self.seen + count:
            raise ValueError(
                f"The attention mask has {mask.shape[1]} columns, but the cache holds {self.seen} and {count} are new. "
                "Is this cache filled by another prompt? Use a new one, or reset()."
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
            shape, device = (len(self.lengths), count), (new if new is not None else self.columns).device  # type: ignore[union-attr]
            if new is None:
                new = torch.ones(shape, dtype=torch.bool, device=device)
            old = self.columns
            if old is None:
                old = torch.ones(len(self.lengths), self.seen, dtype=torch.bool, device=device)
            self.columns = torch.cat([old.to(device), new], dim=1)
        self.seen += count

    def _row_groups(self, new: Tensor | None, count: int) -> list[tuple[slice, Tensor | None]]:
        """Rows that can be handled together, with the indices of their new tokens (None: all)."""
        batch = len(self.lengths)
        if count == 0:
            return []
        if new is None:
            if len(set(self.lengths)) == len(set(self.flushed)) == 1:
                return [(slice(None), None)]
            return [(slice(row, row + 1), None) for row in range(batch)]
        tokens = [new[row].nonzero().squeeze(-1) for row in range(batch)]
        return [(slice(row, row + 1), tokens[row]) for row in range(batch) if len(tokens[row])]

    # Storing and reading rows of equal length

    def _append(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Store transformed keys and values [b, H_kv, n, D] and flush to the history what leaves the window."""
        assert self.history is not None
        sink, recent = self.config.sink_tokens, self.config.recent_tokens
        start, flushed = self.lengths[rows][0], self.flushed[rows][0]
        stop = start + keys.shape[2]
        leaving = range(sink + flushed, max(sink + flushed, stop - recent))  # tokens that go to the history
        self.history.reserve(flushed + len(leaving))
        if leaving:
            pieces = []
            for name, new in (("keys", keys), ("values", values)):
                ring = self._ring(rows, name, leaving.start, min(start, leaving.stop))
                pieces.append(torch.cat([ring, new[:, :, max(0, leaving.start - start) : max(0, leaving.stop - start)]], 2))
            self.history.write(rows, flushed, *pieces)
        for name, new in (("keys", keys), ("values", values)):
            if start < sink:
                self.windows[f"sink_{name}"][rows, :, start : min(stop, sink)] = new[:, :, : sink - start]
            first = max(start, leaving.stop)
            if first < stop:
                slots = torch.arange(first, stop, device=new.device) % recent
                self.windows[f"recent_{name}"][rows].index_copy_(2, slots, new[:, :, first - start :])
        for row in range(*rows.indices(len(self.lengths))):
            self.lengths[row], self.flushed[row] = stop, flushed + len(leaving)

    def _ring(self, rows: slice, name: str, start: int, stop: int) -> Tensor:
        """Tokens `start` to `stop` of the recent window, in order (a copy)."""
        window = self.windows[f"recent_{name}"][rows]
        count = max(0, stop - start)
        if count == 0:
            return window[:, :, :0]
        slots = torch.arange(start, stop, device=window.device) % window.shape[2]
        return window.index_select(2, slots)

    def _exact(self, rows: slice, ordered: bool = True) -> Iterator[tuple[range, Tensor, Tensor]]:
        """What sink and window hold, with the tokens' positions; a full window unordered needs no copy."""
        sink, length, flushed = self.config.sink_tokens, self.lengths[rows][0], self.flushed[rows][0]
        stored = min(sink, length)
        if stored:
            yield range(stored), *(self.windows[f"sink_{name}"][rows, :, :stored] for name in ("keys", "values"))
        if length > sink + flushed:
            start = sink + flushed
            if not ordered and length - start == self.config.recent_tokens:
                yield range(start, length), *(self.windows[f"recent_{name}"][rows] for name in ("keys", "values"))
            else:
                yield range(start, length), *(self._ring(rows, name, start, length) for name in ("keys", "values"))

    def _attend_rows(self, rows: slice, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        """`attend` for rows of equal length, without padding."""
        keys, values = self.transform.keys(key), self.transform.values(value)
        if self.lengths[rows][0] == 0 and self.config.exact_chunks:
            output = exact_attention(query, key, value, **settings)
            self._append(rows, keys, values)
            return output
        batch, heads, count, size = query.shape
        kv_heads = key.shape[1]
        scaling = size**-0.5 if settings["scaling"] is None else settings["scaling"]
        grouped = query.reshape(batch, kv_heads, -1, count, size)  # [b, H_kv, G, n, D]
        sinks = settings["sink_logits"]
        if sinks is not None:
            sinks = sinks.float().view(1, kv_heads, -1, 1).expand(grouped.shape[:-1])
        output = torch.empty_like(grouped, dtype=torch.float32)
        for start, stop, blocks in self._read(rows, keys, values, query.shape[1] // kv_heads):
            part = grouped[:, :, :, start:stop].flatten(2, 3)  # [b, H_kv, G n, D]
            logits = None if sinks is None else sinks[..., start:stop].flatten(2)
            if logits is not None and (mean := self.transform.mean_logits(part)) is not None:
                logits = logits - scaling * mean
            rotated = self.transform.queries(part).mul_(scaling)
            result = attend_blocks(rotated, blocks, settings["softcap"], logits)
            output[:, :, :, start:stop] = self.transform.undo_values(result).unflatten(2, (-1, stop - start))
        return output.view(batch, heads, count, size).to(query.dtype)

    def _read(self, rows: slice, keys: Tensor, values: Tensor, groups: int) -> Iterator[tuple[int, int, Iterator[Block]]]:
        """Store new tokens, then give for each block of queries what it sees."""
        assert self.history is not None
        count = keys.shape[2]
        if count == 1:
            self._append(rows, keys, values)
            exact = [(k, v, None) for _, k, v in self._exact(rows, ordered=False)]
            history = ((k, v, None) for _, k, v in self.history.blocks(rows, self.flushed[rows][0]))
            yield 0, 1, iter([*exact, *history])
            return
        start, flushed = self.lengths[rows][0], self.flushed[rows][0]
        held = [*self._exact(rows), (range(start, start + count), keys, values)]
        device = keys.device
        positions = torch.cat([torch.arange(span.start, span.stop, device=device) for span, _, _ in held])
        exact_keys, exact_values = (torch.cat([piece[part] for piece in held], 2) for part in (1, 2))
        self._append(rows, keys, values)
        for first in range(0, count, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, count)
            query_positions = torch.arange(start + first, start + last, device=device)
            yield first, last, self._chunk_blocks(
                rows, flushed, query_positions, positions, exact_keys, exact_values, groups
            )

    def _chunk_blocks(self, rows, flushed, query_positions, positions, keys, values, groups) -> Iterator[Block]:  # type: ignore[no-untyped-def]
        """Exact tokens and quantised history, as the queries at `query_positions` see them."""
        assert self.history is not None
        sink, recent = self.config.sink_tokens, self.config.recent_tokens
        behind = query_positions[:, None] - positions
        visible = behind >= 0
        if not self.config.exact_chunks:
            visible &= (behind < recent) | (positions < sink)
        yield keys, values, visible.repeat(groups, 1)
        for _, old_keys, old_values in self.history.blocks(rows, flushed):
            yield old_keys, old_values, None
        if not self.config.exact_chunks:  # tokens that left the window within this chunk
            for first, new_keys, new_values in self.history.blocks(rows, self.flushed[rows][0], flushed):
                indices = torch.arange(first, first + new_keys.shape[2], device=keys.device)
                yield new_keys, new_values, (query_positions[:, None] - (sink + indices) >= recent).repeat(groups, 1)

    def _dense(self) -> tuple[Tensor, Tensor]:
        """All keys and values [B, H_kv, seen, D] in the model's basis and dtype, zeros at padding."""
        assert self.history is not None
        like = self.windows["sink_keys"]
        shape = (len(self.lengths), like.shape[1], self.seen, like.shape[3])
        dense = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2)]
        uniform = self.columns is None and len(set(self.lengths)) == len(set(self.flushed)) == 1
        batch = len(self.lengths)
        for rows in [slice(None)] if uniform else [slice(row, row + 1) for row in range(batch)]:
            if not self.lengths[rows][0]:
                continue
            places = None
            if self.columns is not None:
                places = self.columns[rows].squeeze(0).nonzero().squeeze(-1).to(like.device)
            pieces = [(span.start, keys, values) for span, keys, values in self._exact(rows)]
            history = self.history.blocks(rows, self.flushed[rows][0])
            pieces += [(self.config.sink_tokens + first, keys, values) for first, keys, values in history]
            for first, *states in pieces:
                span = slice(first, first + states[0].shape[2])
                for target, piece, undo in zip(
                    dense, states, (self.transform.undo_keys, self.transform.undo_values), strict=True
                ):
                    restored = undo(piece).to(target.dtype)
                    if places is None:
                        target[rows, :, span] = restored
                    else:
                        target[rows].index_copy_(2, places[span], restored)
        return dense[0], dense[1]


def _pick(states: Tensor, tokens: Tensor | None) -> Tensor:
    """Tokens [n] of states [b, H, T, D]; None: all of them."""
    return states if tokens is None else states.index_select(2, tokens.to(states.device))
