"""Caches to compare, each under one name: this project's by recipe or rotation set, and transformers' own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import Cache

from ._compat import architecture, text_config
from .cache import OscarQuantizedCache
from .config import RECIPES, OscarConfig, Recipe, get_recipe, parse_setting
from .patch import patch_model, unpatch_model
from .rotation import RotationSet
from .zoo import find_rotations

UNQUANTISED = "unquantised"
STOCK_CHUNK = 64  # so that a QuantizedCache's queries read what it has quantised, at the speed of 64 tokens a forward

Fit = Callable[[Recipe], RotationSet]


@dataclass(frozen=True)
class Contender:
    """A cache to measure.

    Args:
        name: what tables call it.
        rotations: of an OscarQuantizedCache; None: one of transformers' caches.
        config: its storage settings.
        backend: `"hqq"` or `"quanto"`, of a QuantizedCache; None, without rotations: DynamicCache.
        stock: further arguments of QuantizedCache.
    """

    name: str
    rotations: RotationSet | None = None
    config: OscarConfig | None = None
    backend: str | None = None
    stock: tuple[tuple[str, Any], ...] = ()

    @property
    def chunk_limit(self) -> int | None:
        """Tokens that may come in one forward for every query to read what decoding would; None: any number."""
        return STOCK_CHUNK if self.backend else None

    def bits_per_element(self, model: PreTrainedModel) -> float:
        """Bits of one element of the history, scale and min included."""
        if self.config is not None:
            return self.config.bits_per_element(architecture(text_config(model))["head_dim"])
        if self.backend is None:
            return 8.0 * model.dtype.itemsize
        settings = dict(self.stock)
        return settings["nbits"] + 2 * 8 * model.dtype.itemsize / settings.get("q_group_size", 64)

    def facts(self, model: PreTrainedModel) -> dict[str, Any]:
        """What a result should say about it, as JSON-ready values."""
        facts: dict[str, Any] = {"bits_per_element": self.bits_per_element(model)}
        if self.rotations is not None and self.config is not None:
            facts |= {"config": self.config.to_dict(), "rotations": self.rotations.provenance}
        elif self.backend:
            facts["config"] = {"backend": self.backend, **dict(self.stock)}
        return facts

    @contextmanager
    def caches(self, model: PreTrainedModel, *, exact_prefill: bool = False) -> Iterator[Callable[[], Cache]]:
        """The model made ready for this cache, and a function that makes an empty one; the model is then as before.

        Args:
            model: not patched.
            exact_prefill: tokens of one forward see each other exactly. False: each reads the quantised history.

        Raises:
            ImportError: the backend of a QuantizedCache is not installed.
            ValueError: a model that the cache does not serve.
        """
        config = text_config(model)
        if self.backend is not None:
            settings = dict(self.stock)

            def make() -> Cache:
                return QuantizedCache(self.backend, config, **settings)

            make()  # what is missing is noticed now
            yield make
        elif self.rotations is None or self.config is None:
            yield lambda: DynamicCache(config=config)
        else:
            patch_model(model, self.rotations, self.config.replace(exact_chunks=exact_prefill), check=False)
            try:
                yield lambda: OscarQuantizedCache(model)
            finally:
                unpatch_model(model)


def parse_contender(text: str, fit: Fit) -> Contender:
    """A contender by what a person writes: `NAME` or `NAME:SETTING=VALUE:...`.

    Args:
        text: NAME is a recipe (`balanced:alpha=1:group_size=32`), a folder of rotations or a zoo name
            (`rotations:recent_tokens=512`, or `rotations:recipe=prompt`, fitted on from there), `unquantised`, or
            `hqq` or `quanto` with a number of bits (`hqq2`, `quanto4:residual_length=256`). Settings are those of
            Recipe and OscarConfig, or of QuantizedCache.
        fit: makes a recipe's rotations for the model at hand.

    Raises:
        ValueError: no such setting or value.
        FileNotFoundError: a name that is none of these.
    """
    name, *parts = text.split(":")
    settings = dict(map(parse_setting, parts))
    if name == UNQUANTISED:
        _only(settings, set(), name)
        return Contender(text)
    if match := re.fullmatch(r"(hqq|quanto)([1-8])", name):
        _only(settings, {"axis_key", "axis_value", "q_group_size", "residual_length"}, name)
        axes = {"axis_key": 1, "axis_value": 1} if match[1] == "hqq" else {}
        stock = {"nbits": int(match[2]), **axes, **settings}
        return Contender(text, backend=match[1], stock=tuple(stock.items()))
    storage = {field.name for field in fields(OscarConfig)} - {"recipe", "exact_chunks"}
    fitted = {field.name for field in fields(Recipe)} - {"name"}
    if name in RECIPES:
        _only(settings, storage | fitted, name)
        recipe = get_recipe(name, **{key: value for key, value in settings.items() if key in fitted})
        rotations = fit(recipe)
    else:
        storage.add("recipe")
        _only(settings, storage, name)
        rotations = find_rotations(name)
        if Path(name).exists():  # tables and results name no folder of this machine
            text = ":".join([Path(name).resolve().name, *parts])
    stored = {key: value for key, value in settings.items() if key in storage}
    return Contender(text, rotations, rotations.config.replace(**stored))


def _only(settings: dict[str, Any], known: set[str], name: str) -> None:
    unknown = sorted(set(settings) - known)
    if unknown:
        has = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise ValueError(f"{name} has no setting {', '.join(map(repr, unknown))}; {has}.")
