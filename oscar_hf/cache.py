"""OscarQuantizedCache: what a user hands to `generate`, and what a patched model uses by itself."""

from __future__ import annotations

import copy
import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticSlidingWindowLayer

from . import attention as _attention  # noqa: F401  (registers "oscar")
from ._compat import (
    architecture,
    cache_layers,
    check_crop,
    crop_layer,
    recorded_states,
    recording,
    text_config,
    unwrap_cache_preparation,
    wrap_cache_preparation,
)
from .cache_file import fingerprint, load_cache, read_facts, save_cache
from .config import OscarConfig
from .fitting import RowTransform
from .layer import OscarLayer
from .memory import CacheMemory, measure
from .parallel import local_heads
from .prompt import PromptLayer, prompt_rotations
from .rotation import RotationSet, absorbed_layers
from .transform import Transform


class OscarQuantizedCache(Cache):
    """A key-value cache with a 16-bit sink, a 2-bit history and a 16-bit recent window.

    Sliding-window, linear and other layers of hybrid models keep transformers' own cache layers.

    Args:
        model_or_config: a patched model, whose rotations and settings it takes; or any model or configuration.
        rotations: a RotationSet made for this model. None: those that the model is patched with; where it is not
            patched, each sequence's keys are fitted to itself (recipe "prompt"), which a logged line says.
        config: storage settings (default: the patched model's, else the rotations').
        max_cache_len: allocate for so many tokens at once. Then `generate` compiles the model's decode steps into
            CUDA graphs, as it does for StaticCache. None: grow with the text.

    Raises:
        ValueError: rotations of another model, an architecture that is not supported, or, later, more
            tokens than `max_cache_len`, before anything is stored.
        RuntimeError: on a forward with gradients, or after one that failed halfway.

    Example:
        >>> cache = OscarQuantizedCache(model)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
        >>> print(cache.memory())
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        rotations: RotationSet | None = None,
        config: OscarConfig | None = None,
        *,
        max_cache_len: int | None = None,
    ):
        model_config = text_config(model_or_config)
        layers, full = cache_layers(model_config, max_cache_len)
        patch = getattr(model_or_config, "_oscar_patch", None)
        if patch is not None:
            if rotations is not None and rotations.digest() != patch.digest:
                raise ValueError(
                    "This model is patched with other rotations; leave `rotations` out, or unpatch_model() first."
                )
            rotations, transforms, config, digest = (
                patch.rotations, patch.transforms, config or patch.config, patch.digest
            )  # fmt: skip
        else:
            rotations = rotations or prompt_rotations(model_or_config, told=config is not None and config.fits)
            rotations.check_fits(full, architecture(model_config))
            transforms = _shared_transforms(model_or_config, rotations, full)
            digest = rotations.digest()
        self.config, self.digest = rotations.settings(config), digest
        self.text_config = model_config
        is_model = isinstance(model_or_config, PreTrainedModel)
        self.fingerprint = (
            patch.fingerprint if patch is not None else fingerprint(model_or_config) if is_model else None
        )
        if max_cache_len is not None:
            _check_fixed(self.config, max_cache_len)
        leader = None
        kind = PromptLayer if self.config.fits else OscarLayer
        for index in sorted(full):
            own = rotations.layer_config(index, self.config)
            layers[index] = kind(transforms[index], own, model_config, max_cache_len, leader, index)
            leader = leader or layers[index]
        super().__init__(layers=layers)
        self._emptied: int | None = None  # batch size before a reset that nothing has followed yet
        if isinstance(model_or_config, PreTrainedModel) and patch is None:
            attach(model_or_config)

    @property
    def oscar_layers(self) -> list[OscarLayer]:
        """The layers whose history is quantised."""
        return [layer for layer in self.layers if isinstance(layer, OscarLayer)]

    @property
    def fused(self) -> bool:
        """Whether attention reads the packed history in place (a patched model under "oscar" attention)."""
        return self.oscar_layers[0].fused

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H_kv, n, D] of a layer; see `OscarLayer.update` for what comes back."""
        self._renew(key_states.shape[0])
        layer = self.layers[layer_idx]
        if isinstance(layer, OscarLayer) and not torch.compiler.is_compiling():
            if layer.fixed:
                if layer.leader is None:
                    layer.check_room(key_states.shape[2])
            elif layer.leader is not None:
                expected = layer.leader.seen - key_states.shape[2]
                if layer.seen != expected:
                    raise RuntimeError(
                        f"Layer {layer_idx} holds {layer.seen} tokens where {expected} were expected: an earlier "
                        "forward failed halfway. Call cache.reset() and start over."
                    )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Store the state of a linear layer's convolution, as transformers does."""
        self._renew(conv_states.shape[0])
        return super().update_conv_state(conv_states, *args, **kwargs)

    def activate_past_recording(self, recurrent_states_to_keep: int | None = None) -> None:
        """Let stock layers keep what is needed to take their newest tokens back; `generate` calls it to speculate."""
        super().activate_past_recording(**recorded_states(recurrent_states_to_keep))

    def reset(self) -> None:
        """Forget everything. The next prompts use the same storage, or, if of another batch size, their own."""
        super().reset()
        first = self.oscar_layers[0]
        if not first.fixed:
            self._replace_stock_layers()
        elif first.tiers is not None:
            self._emptied = first.tiers.like.shape[0]

    def _renew(self, batch: int) -> None:
        """The first states after a reset: stock layers of fixed storage are made anew for another batch size."""
        if torch.compiler.is_compiling():
            return
        if self.unbound:
            raise RuntimeError(
                "A pickled cache goes on only in a model that is patched with the same rotations; patch it first, or "
                "use cache.save(folder) and OscarQuantizedCache.load(folder, model)."
            )
        if self._emptied not in (None, batch):
            self._replace_stock_layers()
        self._emptied = None

    def _replace_stock_layers(self) -> None:
        layers, _ = cache_layers(self.text_config, self.oscar_layers[0].max_cache_len)
        for index, (old, new) in enumerate(zip(self.layers, layers, strict=True)):
            if not isinstance(old, OscarLayer):
                self.layers[index] = new
                if (recorded := recording(old)) is not None:
                    new.activate_past_recording(**recorded)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest `-tokens_to_remove` tokens; a positive number is the length to keep (old meaning).

        Raises:
            ValueError: a linear or sliding-window layer has forgotten what came before; nothing is removed.
        """
        count, seen = int(tokens_to_remove), int(self.get_seq_length())
        count = max(min(0, count - seen) if count > 0 else count, -seen)
        if count == -seen:
            return self.reset()
        stock = [layer for layer in self.layers if not isinstance(layer, OscarLayer)]
        for layer in stock:
            check_crop(layer, seen, -count)
        for layer in stock:
            crop_layer(layer, -count)
        for layer in reversed(self.oscar_layers):  # the first counts columns for the others
            layer.crop(count)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.oscar_layers[0].is_initialized:
            self.reorder_cache(torch.arange(self.oscar_layers[0].batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` (numbers or a bool mask) name."""
        if self.oscar_layers[0].is_initialized:
            self.reorder_cache(torch.arange(self.oscar_layers[0].batch_size, device=indices.device)[indices])

    def set_padding(self, attention_mask: Tensor | None) -> None:
        """Tell which columns, of those stored and those of the next forward, are real: [B, seen + n], 0 is padding.

        Only needed under another attention implementation than "oscar", and only for a cache made from a
        configuration: a cache made from a model is told by the model. Without it padding is stored like text, which
        is masked all the same but takes up the sink.
        """
        for layer in self.oscar_layers:
            layer.padding = attention_mask

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Columns seen so far, padding included; a tensor while compiling."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if layer_idx == 0 and not isinstance(layer, OscarLayer):
            return self.oscar_layers[0].get_seq_length()
        return super().get_seq_length(layer_idx)

    def check_prompt(self, prompt: Tensor | int, total: int = -1) -> None:
        """Raise ValueError unless a prompt continues what is stored, and there is room.

        Args:
            prompt: the whole prompt's padding mask [B, n], or its number of tokens without padding; -1 if unknown.
            total: tokens that will have to fit; -1 if unknown.
        """
        first = self.oscar_layers[0]
        seen, length = first.seen, prompt if isinstance(prompt, int) else prompt.shape[1]
        if seen and 0 <= length <= seen:
            raise ValueError(
                f"This cache holds {seen} tokens, but the prompt has {length}: it was filled by another prompt. "
                "Pass the whole conversation, or a new cache, or call cache.reset()."
            )
        if seen and length >= 0 and first.fixed:  # its attention masks show new columns only
            mask = torch.ones(first.batch_size, length) if isinstance(prompt, int) else prompt
            first.check_columns(mask[:, :seen].to(first.tiers.like.device, torch.bool))
        if total >= 0:
            first.check_room(total - seen)

    def save(self, directory: str | os.PathLike) -> Path:
        """Write what is held to a folder, as safetensors and JSON; see `cache_file.save_cache`."""
        return save_cache(self, directory)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike,
        model: PreTrainedModel,
        rotations: RotationSet | None = None,
        *,
        max_cache_len: int | None = None,
    ) -> OscarQuantizedCache:
        """Open a cache that `save` wrote, on the model's devices.

        Args:
            directory: what `save` was given.
            model: the model it was computed with; patched, or `rotations` are given.
            rotations: as for a new cache.
            max_cache_len: fixed storage of so many tokens; a hybrid model's cache must have been saved so.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: another model, other rotations, another version, or a damaged file.
        """
        facts = read_facts(directory)
        cache = cls(model, rotations, OscarConfig.from_dict(facts["config"]), max_cache_len=max_cache_len)
        load_cache(cache, model, Path(directory), facts)
        return cache

    def fork(self, copies: int = 1) -> OscarQuantizedCache:
        """A cache with `copies` of each row, side by side, that shares this one's history instead of copying it.

        Both go on on their own, and what each adds is its own. The history stays shared whatever comes; windows and
        the newest few hundred tokens are copied once rows differ (at once if this cache has several rows).

        Args:
            copies: of each row, 1 or more.

        Raises:
            ValueError: no such number, or fixed storage, whose addresses cannot be shared.
            RuntimeError: the last forward failed halfway.

        Example:
            >>> model(**context, past_key_values=cache)
            >>> model.generate(**prompt, past_key_values=cache.fork(8), num_return_sequences=8, do_sample=True)
        """
        if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
            raise ValueError(f"copies={copies!r} must be a whole number, 1 or more.")
        first = self.oscar_layers[0]
        if first.fixed:
            raise ValueError(
                "Fixed storage cannot be shared: fork a cache made without max_cache_len, "
                "or copy this one (copy.deepcopy, then batch_repeat_interleave)."
            )
        if len({layer.seen for layer in self.oscar_layers}) > 1:
            raise RuntimeError("An earlier forward failed halfway. Call cache.reset() and start over.")
        rows = torch.arange(first.batch_size if first.is_initialized else 0).repeat_interleave(copies)
        layers: list[Any] = []
        leader: OscarLayer | None = None
        for layer in self.layers:
            if isinstance(layer, OscarLayer):
                layers.append(layer.fork(copies, leader))
                leader = leader or layers[-1]
            else:
                layers.append(copy.deepcopy(layer))
                if copies > 1 and len(rows):
                    layers[-1].reorder_cache(rows)
        twin = copy.copy(self)
        twin.layers = layers
        return twin

    def memory(self) -> CacheMemory:
        """What is held, byte by byte."""
        return measure(self)

    def __copy__(self) -> OscarQuantizedCache:
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> OscarQuantizedCache:
        """Copy what is stored; transforms and the model's configuration are shared."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """All but the model's configuration: a pickled cache belongs to no model until one that fits is given it."""
        layers = [copy.copy(layer) for layer in self.layers]
        for layer in layers:
            if isinstance(layer, OscarLayer):
                layer.text_config = None
                rows = layer.transform
                layer.transform = rows.bind(None) if isinstance(rows, RowTransform) else None  # type: ignore[assignment]
                layer.leader = layers[self.layers.index(layer.leader)] if layer.leader else None
        return {**vars(self), "layers": layers, "text_config": None}

    @property
    def unbound(self) -> bool:
        """Whether this came out of a pickle and has met no model yet."""
        return self.text_config is None

    def bind(self, model: PreTrainedModel) -> None:
        """Go on in this model, after a pickle.

        Raises:
            ValueError: its weights or rotations are not those that the cache was computed with.
        """
        patch = getattr(model, "_oscar_patch", None)
        groups = vars(model).get("_oscar_transforms", {})
        transforms = patch.transforms if patch and patch.digest == self.digest else groups.get(self.digest)
        if transforms is None or self.fingerprint not in (None, fingerprint(model)):
            raise ValueError("This pickled cache was computed with another model or other rotations; make a new one.")
        self.text_config = text_config(model)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, OscarLayer):
                layer.text_config, layer.given = self.text_config, transforms[index]
                rows = layer.transform.bind(layer.given) if isinstance(layer.transform, RowTransform) else layer.given
                layer.transform = layer.given.unrotated() if layer.exact else rows


def _check_fixed(config: OscarConfig, max_cache_len: int) -> None:
    if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1:
        raise ValueError(f"max_cache_len={max_cache_len!r} must be a number of tokens, or None to grow.")
    if config.bits != 2 or config.recent_tokens < 1:
        raise ValueError(
            f"max_cache_len needs 2 bits and a recent window, not bits={config.bits}, "
            f"recent_tokens={config.recent_tokens}; leave it out, and the cache grows."
        )


def _shared_transforms(
    model_or_config: PreTrainedModel | PreTrainedConfig, rotations: RotationSet, full: set[int]
) -> dict[int, Transform]:
    """Transforms for a model that is not patched; its caches share them, and patch_model retires them."""
    absorbed = absorbed_layers(getattr(model_or_config, "config", model_or_config), rotations, full) or []
    heads = local_heads(model_or_config) if isinstance(model_or_config, PreTrainedModel) else None
    transforms = {index: Transform(layer, index in absorbed, heads) for index, layer in rotations.layers.items()}
    if not isinstance(model_or_config, PreTrainedModel):
        return transforms
    shared = vars(model_or_config).setdefault("_oscar_transforms", {})
    return shared.setdefault(rotations.digest(), transforms)


def attach(model: PreTrainedModel) -> None:
    """Tell caches of this model about padding, and see to what `generate` is given; once per model."""
    if not hasattr(model, "_oscar_hook"):
        model._oscar_hook = model.register_forward_pre_hook(_tell_padding, with_kwargs=True)
        wrap_cache_preparation(model, _prepare_cache)


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`."""
    if hasattr(model, "_oscar_hook"):
        model._oscar_hook.remove()
        del model._oscar_hook
        unwrap_cache_preparation(model)


def _tell_padding(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    cache = next((v for v in (*kwargs.values(), *args) if isinstance(v, OscarQuantizedCache)), None)
    if cache is not None and cache.unbound:
        cache.bind(model)
    if cache is not None and not cache.fused:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        mask = given.get("attention_mask")
        cache.set_padding(mask if isinstance(mask, Tensor) and mask.dim() == 2 else None)


def _prepare_cache(
    model: PreTrainedModel, cache: Any | None, prompt: Tensor | int, total: int, free: bool, assisted: bool
) -> Any | None:
    if isinstance(cache, OscarQuantizedCache):
        if cache.unbound:
            cache.bind(model)
        if assisted and any(isinstance(layer, StaticSlidingWindowLayer) for layer in cache.layers):
            raise ValueError(
                "With an assistant or prompt lookup tokens are taken back, which the sliding-window layers of fixed "
                "storage cannot; make the cache without max_cache_len."
            )
        if assisted and cache.oscar_layers[0].seen:
            raise ValueError(
                "With an assistant or prompt lookup, transformers feeds the whole prompt again, whatever the cache "
                "holds; pass an empty cache, or generate without speculation."
            )
        cache.check_prompt(prompt, total)
    patch = getattr(model, "_oscar_patch", None)
    if cache is None and free and patch is not None and patch.default_cache:
        return OscarQuantizedCache(model)
    return cache
