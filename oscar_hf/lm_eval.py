"""lm-evaluation-harness through the 2-bit cache: `python -m oscar_hf.lm_eval`, with the command line of `lm_eval`."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ._compat import cache_argument, text_config
from .cache import OscarQuantizedCache
from .calibration import calibrate
from .config import OscarConfig, get_recipe
from .patch import patch_model, unpatch_model
from .rotation import RotationSet

NAME = "oscar-hf"


@register_model(NAME)
class OscarLM(HFLM):
    """The harness's Hugging Face model, reading every score and every token through an OscarQuantizedCache.

    Generation gets a new cache for each batch. Log-likelihoods are computed in chunks whose queries read what decoding
    token by token would read: sink and recent window exactly, all between in 2 bits. (One forward without a cache, as
    the harness does by itself, never reads a quantised key, and its scores cannot change.)

    Args:
        pretrained: a model's directory or Hub id, or a model, which is then patched in place.
        rotations: as for `patch_model`: a RotationSet, a folder or a zoo name; None: the model's own.
        recipe: `"prompt"`, `"hadamard"` or `"naive"` need no rotations; any other name must be that of the set.
        zoo: as for `patch_model`.
        cache: `"oscar"`, or `"dynamic"` for the unquantised baseline.
        chunk_tokens: tokens in one forward of a log-likelihood; changes speed and memory, not scores.
        max_cache_len: fixed storage for generation, whose decode steps compile on a GPU; None: grow.
        **kwargs: settings of OscarConfig (default: the rotations'), and arguments of HFLM (`batch_size`, `dtype`,
            `max_length`, `tokenizer`, ...), which hands others to `from_pretrained`.

    Raises:
        ValueError: an unknown cache or setting, or rotations of another model or recipe.

    Example:
        >>> simple_evaluate(model=OscarLM("Qwen/Qwen3-8B", batch_size=8), tasks=["gsm8k"])
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        rotations: RotationSet | str | os.PathLike | None = None,
        recipe: str | None = None,
        zoo: str | os.PathLike | None = None,
        cache: str = "oscar",
        chunk_tokens: int = 512,
        max_cache_len: int | None = None,
        **kwargs: Any,
    ):
        settings = {field.name: kwargs.pop(field.name) for field in fields(OscarConfig) if field.name in kwargs}
        if cache not in ("oscar", "dynamic"):
            raise ValueError(f"cache={cache!r} is not known; choose 'oscar' or, unquantised, 'dynamic'.")
        if cache == "dynamic" and (rotations is not None or recipe or settings or max_cache_len is not None):
            raise ValueError("cache='dynamic' is the unquantised model: it takes no rotations, recipe or settings.")
        if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens!r} must be a positive number of tokens.")
        without_data = recipe is not None and not get_recipe(recipe).needs_data
        if without_data and rotations is not None:
            raise ValueError(f"recipe={recipe!r} needs no rotations; leave one of the two out.")
        OscarConfig(**settings)
        kwargs.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained, **kwargs)
        processes = getattr(self, "accelerator", None)
        if (
            processes is not None and processes.num_processes > self.world_size
        ):  # the harness shares work over GPUs only
            self._rank, self._world_size = processes.process_index, processes.num_processes
        self.cache, self.chunk_tokens, self.max_cache_len = cache, chunk_tokens, max_cache_len
        self.config_of_cache: OscarConfig | None = None
        if cache == "oscar":
            patched = getattr(self.model, "_oscar_patch", None) is not None
            if without_data:
                rotations = calibrate(self.model, [], recipe=recipe or "")
            patch_model(self.model, rotations, zoo=zoo)
            made = self.model._oscar_patch.rotations.config
            if recipe not in (None, made.recipe):
                if not patched:
                    unpatch_model(self.model)
                raise ValueError(f"These rotations were made by the recipe {made.recipe!r}, not {recipe!r}.")
            self.config_of_cache = self.model._oscar_patch.config.replace(**settings)

    def new_cache(self, **changes: Any) -> Cache:
        """An empty cache, its settings changed by `changes`."""
        if self.config_of_cache is None:
            return DynamicCache(config=text_config(self.model))
        max_cache_len = changes.pop("max_cache_len", None)
        return OscarQuantizedCache(
            self.model, config=self.config_of_cache.replace(**changes), max_cache_len=max_cache_len
        )

    @torch.no_grad()
    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocabulary] of token ids [B, T], padded on the right; no query reads what comes after it."""
        if self.config_of_cache is None:
            return super()._model_call(inps, attn_mask, labels)
        state = {cache_argument(self.model): self.new_cache(exact_chunks=False)}
        mixed = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            return torch.cat([self.model(chunk, **state).logits for chunk in inps.split(self.chunk_tokens, 1)], 1)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Token ids of prompts [B, T], padded on the left, and what follows them, by a cache of their own."""
        generation_kwargs[cache_argument(self.model)] = self.new_cache(max_cache_len=self.max_cache_len)
        return super()._model_generate(context, max_length, stop, **generation_kwargs)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results: the model, and how its cache stores."""
        facts: dict[str, Any] = {"cache": self.cache}
        if self.config_of_cache is not None:
            rotations = self.model._oscar_patch.rotations
            facts |= {"rotations": rotations.digest(), "rotations_from": rotations.provenance}
            facts |= {"cache_config": self.config_of_cache.to_dict()}
        return {**super().get_model_info(), **facts}


def main() -> None:
    """`lm_eval`, with this model unless another is named."""
    arguments = sys.argv[1:]
    named = any(a in ("-M", "-C") or a.split("=")[0] in ("--model", "--config") for a in arguments)
    if arguments and arguments[0] not in ("ls", "validate", "-h", "--help") and not named:
        sys.argv += ["--model", NAME]
    cli_evaluate()


if __name__ == "__main__":
    main()
