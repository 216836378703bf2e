"""One layer of the cache: sink and recent window in the model's dtype, the history between them in 2 bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .config import OscarConfig
from .outliers import judge
from .reading import Logits, attend_rows, attend_step, can_step, pick, row_groups, store, unpack_all
from .storage import Tiers, differences
from .transform import Transform


class OscarLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer, stored per row from its first real token.

    Tokens are counted per row from its first real one; padding is not stored.

    Under the "oscar" attention implementation `update` only marks the keys with this layer, and `attend` stores and
    reads them, since only the attention function sees the padding mask. Under any other implementation `update`
    stores them and returns all keys and values, unpacked, in the model's basis.

    Args:
        transform: this layer's rotations.
        config: storage settings.
        text_config: the model's, for its attention implementation.
        max_cache_len: allocate for so many columns at once (fixed storage). None: grow.
        leader: the first such layer of the cache, which checks each forward's padding mask for all of them.
        index: the layer's, for messages.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        transform: Transform,
        config: OscarConfig,
        text_config: Any,
        max_cache_len: int | None = None,
        leader: OscarLayer | None = None,
        index: int | None = None,
    ):
        super().__init__()
        self.given = self.transform = transform
        self.settings = config
        self.text_config = text_config
        self.max_cache_len = max_cache_len
        self.leader = leader
        self.index = index
        self.tiers: Tiers = None  # type: ignore[assignment]  # until the first update
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next update may have another batch size, dtype or device."""
        self.is_initialized = False
        self.hold(exact=self.given.bits == 16)
        if self.max_cache_len is None or (self.tiers is not None and self.tiers.config != self.config):
            self.tiers = None  # type: ignore[assignment]
        elif self.tiers is not None:  # kept: if the next prompts have the same shape, so do their addresses
            self.tiers.clear()
        self.padding: Tensor | None = None  # mask of the coming forward, for the dense fallback
        self.columns: Tensor | None = None  # [B, c] bool: which of the first c columns are real; later ones all are
        self._seen = 0
        self._checked: tuple[Tensor, Tensor | None] | None = None  # a forward's mask, and its new columns
        self._staged = self._started = False

    @property
    def exact(self) -> bool:
        """Whether this layer stays in 16 bits because 2 cannot hold its keys."""
        return self.config != self.settings

    @property
    def seen(self) -> int:
        """Columns so far, padding included."""
        if not self.fixed:
            return self._seen
        padding = 0 if self.columns is None else int((~self.columns[0]).sum())
        return int(self.tiers.length_tensor[0]) + padding if self.is_initialized else 0

    @property
    def fixed(self) -> bool:
        """Whether storage was allocated at once, with lengths on the device."""
        return self.max_cache_len is not None

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the model's forward with this cache."""
        return self.fixed and self.fused

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
        self.transform.check(key_states)
        self.config.groups(key_states.shape[-1])
        if self.tiers is None or differences(self.tiers.like, key_states):
            metric = self.transform.metric(key_states.device) if self.config.searches else None
            self.tiers = Tiers(self.config, key_states, self.max_cache_len, metric)
            if self.fixed:
                self._mark_static()
        self.is_initialized = True

    def _mark_static(self) -> None:
        """Tell the compiler that these tensors stay where they are; another cache's, elsewhere, may use its code."""
        tiers = self.tiers
        matrices = (*self.transform.tensors(tiers.like.device), *(tiers.history.metric or ()))
        for tensor in (*tiers.tensors(), tiers.seen_tensor, *matrices):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor, guard=False)

    # What transformers calls

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values [B, H_kv, n, D], after RoPE. See the class for what comes back."""
        if torch.compiler.is_compiling():
            if not self._started:
                raise ValueError("Run the prompt without torch.compile: only decode steps compile.")
        else:
            self._check(key_states, value_states)
        if self.fused:
            self._staged = True
            key_states = key_states.view_as(key_states)
            key_states._oscar_layer = self  # type: ignore[attr-defined]
            return key_states, value_states
        return self._update_dense(key_states, value_states)

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse what would spoil the cache, and allocate on the first update."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "OscarQuantizedCache holds no gradients: run under torch.no_grad(), or without a cache."
            )
        if self.given.retired:
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
        unlike = differences(self.tiers.like, key_states) if self._started else []
        if unlike:
            raise ValueError(f"This cache holds other keys: {', '.join(unlike)}. Use a new cache, or reset().")
        if not self._started:
            self.lazy_initialization(key_states, value_states)
            self._started = True

    def check_room(self, tokens: int) -> None:
        """Raise ValueError if fixed storage has no room for `tokens` more columns."""
        if self.fixed and self.seen + tokens > self.max_cache_len:  # type: ignore[operator]
            raise ValueError(
                f"This cache was made for max_cache_len={self.max_cache_len} tokens and holds {self.seen}; "
                f"{tokens} more do not fit. Make a larger one, or one without max_cache_len, which grows."
            )

    def _update_dense(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store, and return what any other attention function may attend to: [B, H_kv, seen + n, D]."""
        count = key_states.shape[2]
        if count > 1 and not self.config.exact_chunks:
            raise ValueError(
                "exact_chunks=False shows each query another cache, which only oscar attention can: patch the model, "
                'set its attention implementation to "oscar", or feed one token at a time.'
            )
        mask, self.padding = self.padding, None
        new = self._new_columns(mask if mask is None or not self.fixed else mask[:, -count:], count)
        self._staged = True  # an error from here on leaves the layer half-written
        self.prepare(new, key_states)
        seen = self.seen
        past = self._dense() if count > 1 and seen else None
        for rows, tokens in row_groups(self.tiers, new, count):
            keys, values = (pick(states[rows], tokens) for states in (key_states, value_states))
            store(self.tiers, self.transform.rows(rows), rows, keys, values)
        self._extend_columns(seen, new, count)
        self._staged = False
        if seen == 0:
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
        logits = Logits(scaling, softcap, sink_logits)
        if torch.compiler.is_compiling():
            return self._attend_compiled(query, key, value, mask, logits)
        self._staged = False
        new = self._new_columns(mask, key.shape[2])  # a refusal leaves the layer as it was
        self._staged = True  # an error from here on leaves it half-written
        self.prepare(new, key, query, logits.factor(key.shape[-1]))
        if new is None and can_step(self.tiers, key.shape[2]):
            output = attend_step(self.tiers, self.transform, query, key, value, logits)
            self._add_columns(key.shape[2])
        else:
            past, output = self.seen, attend_rows(self.tiers, self.transform, new, query, key, value, logits)
            self._extend_columns(past, new, key.shape[2])
        self._staged = False
        return output

    def prepare(self, new: Tensor | None, key: Tensor, query: Tensor | None = None, scaling: float = 1.0) -> None:
        """See to these states being ready to be stored: `new` as in `row_groups`, the others as in `judge`."""
        judge(self, key, query, scaling)

    def _attend_compiled(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, logits: Logits
    ) -> Tensor:
        """A decode step without a look at the device."""
        if not self.fixed or mask is not None or not can_step(self.tiers, key.shape[2]):
            raise ValueError(
                "Only decode steps compile: make the cache with max_cache_len, and pass up to "
                f"{self.config.rollback} tokens a call, none of them padding (attention_mask=None)."
            )
        output = attend_step(self.tiers, self.transform, query, key, value, logits)
        self._add_columns(key.shape[2])
        self._staged = False
        return output

    def get_seq_length(self) -> int | Tensor:
        """Columns seen so far, padding included; a tensor while compiling."""
        if torch.compiler.is_compiling() and self.fixed and self.is_initialized:
            return (self.leader or self).tiers.seen_tensor
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the columns that a mask for `query_length` new ones covers.

        With fixed storage these are the new columns alone, so that a mask's shape is the same at each step.
        """
        if isinstance(query_length, Tensor):  # cache_position, transformers < 5.4
            query_length = query_length.shape[0]
        if self.is_compileable:
            return query_length, 0 if torch.compiler.is_compiling() else self.seen
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Columns that fit; -1: grows without bound."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_max_cache_shape(self) -> int:
        """`get_max_length`, as it was called before transformers 5.13."""
        return self.get_max_length()

    @property
    def batch_size(self) -> int:
        if not self.is_initialized:
            raise AttributeError("batch_size is not known before the first update")
        return self.tiers.like.shape[0]

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest `-tokens_to_remove` columns; a positive number is the length to keep (old meaning).

        Up to `config.rollback` tokens leave no trace. After a longer rollback, tokens that had left the window stay
        quantised, though decoding alone would still hold them exactly.
        """
        count, seen = int(tokens_to_remove), self.seen
        remove = min(seen, -count if count <= 0 else max(0, seen - count))
        if remove == 0:
            return
        counts = [remove] * self.batch_size
        if self.columns is not None:
            counts = self._all_columns(seen)[:, seen - remove :].sum(1).tolist()
            self.columns = self.columns[:, : seen - remove] if remove < seen else None
        self._add_columns(-remove)
        self.tiers.crop(counts)
        self._started = remove < seen

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may come more than once."""
        if not self.is_initialized:
            return
        self.tiers.select(rows)
        if self.fixed:
            self._mark_static()
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
        twin.leader, twin._checked = copy.deepcopy(self.leader, memo), None
        twin.tiers = copy.deepcopy(self.tiers, memo)
        if self.fixed and self.is_initialized:
            twin._mark_static()
        return twin

    def hold(self, *, exact: bool) -> None:
        """Choose, before there is anything, between the cache's settings and 16 bits."""
        self.config = self.settings.exact(self.max_cache_len) if exact else self.settings
        if exact != (self.transform is not self.given):
            self.transform = self.given.unrotated() if exact else self.given

    def keep_exactly(self) -> None:
        """Go on in 16 bits; nothing has been quantised yet."""
        keys = {name: self.transform.undo_keys(w) for name, w in self.tiers.windows.items() if name.endswith("keys")}
        self.hold(exact=True)
        self.tiers.hold_exactly(self.config, keys)

    def fork(self, copies: int, leader: OscarLayer | None = None) -> OscarLayer:
        """A layer of another cache with `copies` of each row, which shares what both hold; see `Tiers.fork`."""
        if self._staged:
            raise RuntimeError("The last forward failed halfway. Call cache.reset() and start over.")
        twin = copy.copy(self)
        twin.leader, twin._checked, twin.padding = leader, None, None
        if self.is_initialized:
            twin.tiers = self.tiers.fork(copies)
        if self.columns is not None:
            twin.columns = self.columns.repeat_interleave(copies, 0)
        return twin

    def buffers(self) -> list[Tensor]:
        """Every tensor that holds keys and values, but for those of the tiers' prefixes."""
        return self.tiers.buffers() if self.is_initialized else []

    def resume(self, seen: int, columns: Tensor | None) -> None:
        """Go on from tiers that were filled by other means: `seen` columns, of which `columns` says which are real."""
        self.columns, self._started = columns, True
        self._add_columns(seen)

    # Rows and columns

    def _new_columns(self, mask: Tensor | None, count: int) -> Tensor | None:
        """Which of `count` new columns are real, [B, count] bool, or None for all; checks the columns before them.

        All layers of a cache get one mask in a forward; the first checks it, since that waits for the device.
        """
        if mask is None:
            return None
        checked = self.leader._checked if self.leader is not None else None
        if checked is None or checked[0] is not mask:
            checked = self._checked = (mask, self._check_mask(mask.to(torch.bool), count))
        return checked[1]

    def _check_mask(self, mask: Tensor, count: int) -> Tensor | None:
        seen = 0 if self.fixed else self.seen  # the mask of fixed storage has new columns only
        if mask.shape[1] != seen + count:
            raise ValueError(
                f"The attention mask has {mask.shape[1]} columns, but the cache holds {seen} and {count} are "
                "new. Is this cache filled by another prompt? Use a new one, or reset()."
            )
        if seen:
            self.check_columns(mask[:, :seen])
        new = mask[:, seen:]
        return None if bool(new.all()) else new

    def check_columns(self, mask: Tensor) -> None:
        """Raise ValueError unless a mask of the stored columns, [B, seen], says what was stored."""
        known = 0 if self.columns is None else self.columns.shape[1]
        same = mask[:, known:].all()
        if self.columns is not None:
            same &= (mask[:, :known] == self.columns.to(mask.device)).all()
        if not bool(same):
            raise ValueError(
                "The attention mask changed for columns that are already stored; padding must stay as it was."
            )

    def _all_columns(self, count: int) -> Tensor:
        """Which of the first `count` columns are real, [B, count] bool."""
        every = self.tiers.like.new_ones(self.batch_size, count, dtype=torch.bool)
        if self.columns is not None:
            every[:, : self.columns.shape[1]] = self.columns
        return every

    def _extend_columns(self, past: int, new: Tensor | None, count: int) -> None:
        """`count` columns have come after `past`; `new` [B, count] bool says which are real, None that all are."""
        if new is not None:
            self.columns = torch.cat([self._all_columns(past), new.to(self.tiers.like.device)], dim=1)
        self._add_columns(count)

    def _add_columns(self, count: int) -> None:
        """Count columns; fixed storage has its lengths, and for compiled code a count that no kernel writes."""
        if not self.fixed:
            self._seen += count
        elif self.leader is None:
            self.tiers.seen_tensor.add_(count)

    def _dense(self) -> tuple[Tensor, Tensor]:
        """All keys and values [B, H_kv, seen, D] in the model's basis and dtype, zeros at padding."""
        seen = self.seen
        return unpack_all(self.tiers, self.transform, seen, None if self.columns is None else self._all_columns(seen))
