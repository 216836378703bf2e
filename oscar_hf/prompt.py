"""A layer of the cache that fits its transform to each sequence: recipe "prompt"."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ._compat import architecture, cache_layers, text_config
from .fitting import RowTransform
from .layer import OscarLayer
from .loading import display_name
from .reading import pick, row_groups
from .rotation import RotationSet
from .storage import differences
from .transform import Transform

NAME = "prompt"  # of the recipe, in place of a rotation set's


class PromptLayer(OscarLayer):
    """An OscarLayer that needs no calibration: each row's keys wait as they are until the first would be quantised.

    Then mean and transform are fitted to all of the row's keys at hand, and to the queries seen so far: to the whole
    prompt where it comes in one forward. The windows are transformed, and all goes on as with a calibrated set. With
    fixed storage the first forward is what is fitted to, however short, since its decode steps may be compiled.

    A fit stays whatever is cropped, until `reset`. Queries of tokens that were taken back before it count in it.
    Under another attention implementation than "oscar" queries are not seen, and only the mean is fitted.
    """

    @property
    def rows(self) -> RowTransform | None:
        """The rows' transforms; None before the first forward, and in a layer that stays in 16 bits."""
        return self.transform if isinstance(self.transform, RowTransform) else None

    def reset(self) -> None:
        super().reset()
        if self.rows is not None and self.tiers is None:
            self.transform: Transform = self.given
        elif self.rows is not None:
            self.rows.clear()

    def hold(self, *, exact: bool) -> None:
        if self.rows is not None:
            if not exact:
                self.config = self.settings
                return
            self.transform = self.given
        super().hold(exact=exact)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.given.check(key_states)
        fresh = self.tiers is None or bool(differences(self.tiers.like, key_states))
        if not self.exact and (fresh or self.rows is None):
            searches = self.config.searches
            self.transform = RowTransform(self.given, key_states, searches=searches, fixed=self.fixed)
        super().lazy_initialization(key_states, value_states)

    def prepare(self, new: Tensor | None, key: Tensor, query: Tensor | None = None, scaling: float = 1.0) -> None:
        """Fit the rows whose history begins with these states."""
        if self.rows is not None and not self.rows.complete:
            alike = not any(self.rows.fitted) and len(set(self.rows.seen)) == 1
            for rows, tokens in row_groups(self.tiers, new, key.shape[2]):
                single = [slice(row, row + 1) for row in range(*rows.indices(self.batch_size))]
                for part in [rows] if alike else single:
                    if not self.rows.fitted[part.indices(self.batch_size)[0]]:
                        asked = None if query is None else pick(query[part], tokens)
                        self._prepare_rows(part, pick(key[part], tokens), asked)
        super().prepare(new, key, query, scaling)

    def _prepare_rows(self, rows: slice, key: Tensor, query: Tensor | None) -> None:
        """Look at new states [b, H, n, D] of rows that are not fitted, and fit them if their history begins."""
        transform: RowTransform = self.rows  # type: ignore[assignment]
        if query is not None:
            transform.see(rows, query)
        if not self.fixed and not self.tiers.leaving(rows.indices(self.batch_size)[0], key.shape[2]):
            return
        held = self.tiers.exact(rows)
        transform.fit(rows, torch.cat([*(span.keys for span in held), key], 2))
        if held:
            self.tiers.make_room(0)  # windows of its own
            fitted = transform.rows(rows)
            for name in ("sink_keys", "recent_keys"):
                window = self.tiers.windows[name]
                window[rows] = fitted.keys(window[rows])
        self._share_metric()

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Take the fit from a file: what `RowTransform.state` gave, under "fit".

        Raises:
            ValueError: it is malformed.
            KeyError: something of it is missing.
        """
        if self.rows is not None:
            held = {name: tensors[f"fit.{name}"] for name in (*self.rows.held, "moments") if f"fit.{name}" in tensors}
            self.rows.restore(held, facts["fit"])
            self._share_metric()

    def _share_metric(self) -> None:
        """Have the history written in the metrics of the rows as they are now."""
        if self.rows is not None and self.config.searches:
            self.tiers.history.metric = self.rows.metric(self.tiers.like.device)

    def select_rows(self, rows: Tensor) -> None:
        if self.is_initialized and self.rows is not None:
            self.transform = self.rows.select(rows)
        super().select_rows(rows)
        if self.is_initialized:
            self._share_metric()

    def fork(self, copies: int, leader: OscarLayer | None = None) -> OscarLayer:
        twin: PromptLayer = super().fork(copies, leader)
        if self.rows is not None and self.is_initialized:
            twin.transform = self.rows.select(torch.arange(self.batch_size).repeat_interleave(copies))
            twin._share_metric()
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> OscarLayer:
        twin: PromptLayer = super().__deepcopy__(memo)
        if self.rows is not None:
            twin.transform = self.rows.__deepcopy__(memo)
            if twin.tiers is not None:
                twin._share_metric()
            if self.fixed and self.is_initialized:
                twin._mark_static()
        return twin


def prompt_rotations(model_or_config: PreTrainedModel | PreTrainedConfig, *, told: bool = True) -> RotationSet:
    """The set of a model whose caches fit the keys themselves; V takes a Hadamard.

    Args:
        model_or_config: any supported model.
        told: whether somebody asked for it. Otherwise a line is logged, once for each model's name.
    """
    config = text_config(model_or_config)
    name = getattr(model_or_config, "name_or_path", "") or config.model_type
    if not told:
        _tell(name)
    shapes = architecture(config)
    rotations = RotationSet.without_data(cache_layers(config)[1], shapes["head_dim"], NAME, model=display_name(name))
    rotations.architecture = shapes
    return rotations


@cache
def _tell(name: str) -> None:
    logging.getLogger(__name__).warning(
        "No rotations for %s: its 2-bit caches are fitted to each prompt (recipe 'prompt'). `oscar-hf calibrate` "
        "makes rotations that need no fitting.",
        display_name(name),
    )
