"""What calibration chooses by tokens that it was not fitted to: each layer's quantiser, and the recent window."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from ._compat import input_device, text_config
from .attention import evaluating, observe
from .calibration import LayerStatistics, fit_layer
from .config import OscarConfig, Recipe, ScaleRule
from .contenders import Contender
from .quality import divergence, reference_logits
from .quantization import dequantize, quantize
from .rotation import LayerRotation, RotationSet
from .transform import Transform

logger = logging.getLogger(__name__)

ALPHAS = (0.5, 0.75, 1.0)
CLIPS = (0.88, 0.92, 0.94, 0.96, 1.0)
SCALE_RULES: tuple[ScaleRule, ...] = ("minmax", "inner_product")
QUERIES = 128
"""Of each sequence, evenly spaced among those that have a history."""
HISTORY = 256
"""Tokens behind the windows that a sequence must have to count."""
WINDOWS = (64, 128, 256, 512, 1024, 2048, 4096)
CHUNK = 512


@dataclass(frozen=True)
class LayerChoice:
    """What was chosen for one layer.

    Args:
        alpha: of its balanced transform (`Recipe.alpha`).
        k_clip: as in `OscarConfig`.
        v_clip: as in `OscarConfig`.
        scale_rule: as in `OscarConfig`.
        before: relative error of attention outputs on the held-out tokens, with the recipe's settings: root of the
            squared error over the squared output, of `QUERIES` queries a sequence that read a quantised history.
        after: the same with those chosen.
    """

    alpha: float
    k_clip: float
    v_clip: float
    scale_rule: ScaleRule
    before: float
    after: float


class Held:
    """Attention of some queries of one forward, whose history can be swapped for a quantised one.

    Args:
        query: [B, H_q, n, D], of causal attention without padding.
        key: [B, H_kv, n, D].
        value: the same.
        config: its windows say what is history.
        scaling: factor on the logits.
        softcap: as in `kernels.reference.attend_blocks`.
        sink_logits: [H_q].
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        config: OscarConfig,
        scaling: float | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ):
        kv_heads, count, size = key.shape[1:]
        first = config.sink_tokens + config.recent_tokens
        picked = torch.linspace(first, count - 1, min(QUERIES, count - first), device=key.device).long()
        self.query = query.index_select(2, picked).float().unflatten(1, (kv_heads, -1))  # [B, H_kv, G, N, D]
        self.key, self.value = key.float(), value.float()
        self.scaling, self.softcap = size**-0.5 if scaling is None else scaling, softcap
        self.sink_logits = None if sink_logits is None else sink_logits.float().view(kv_heads, -1, 1, 1)
        place = torch.arange(count, device=key.device)
        behind = picked[:, None] - place
        self.unseen = behind < 0
        self.history = (behind >= config.recent_tokens) & (place >= config.sink_tokens)
        self.logits = self._logits(self.key)
        self.weights = self._weights(self.logits)
        self.output = self.weights @ self.value.unsqueeze(2)

    def _logits(self, key: Tensor) -> Tensor:
        logits = self.query @ key.unsqueeze(2).mT * self.scaling
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def _weights(self, logits: Tensor) -> Tensor:
        logits = logits.masked_fill(self.unseen, -torch.inf)
        total = logits.logsumexp(-1, keepdim=True)
        if self.sink_logits is not None:
            total = torch.logaddexp(total, self.sink_logits)
        return (logits - total).exp()

    def error(self, key: Tensor | None = None, value: Tensor | None = None) -> float:
        """Squared error of the outputs with these keys and values, like the model's own, in the history."""
        weights = self.weights
        if key is not None:
            weights = self._weights(torch.where(self.history, self._logits(key), self.logits))
        output = weights @ self.value.unsqueeze(2)
        if value is not None:
            output += (weights * self.history) @ (value - self.value).unsqueeze(2)
        return (output - self.output).square().sum().item()


def stored_keys(transform: Transform, key: Tensor, config: OscarConfig) -> Tensor:
    """Keys [B, H_kv, n, D] as they come back from a cache with these settings, float32."""
    stored = quantize(
        transform.keys(key),
        clip=config.k_clip,
        **_common(config),
        metric=transform.metric(key.device) if config.searches else None,
        sweeps=config.k_search,
        stretch=config.k_stretch,
    )
    return transform.undo_keys(dequantize(stored))


def stored_values(transform: Transform, value: Tensor, config: OscarConfig) -> Tensor:
    """Values [B, H_kv, n, D] as they come back, float32."""
    stored = quantize(transform.values(value), clip=config.v_clip, **_common(config))
    return transform.undo_values(dequantize(stored))


def _common(config: OscarConfig) -> dict[str, Any]:
    dtype = getattr(torch, config.scale_dtype)
    return {"group_size": config.group_size, "scale_rule": config.scale_rule, "scale_dtype": dtype}


class _Candidates:
    """One layer: transforms by alpha, and the squared errors of each setting so far."""

    def __init__(self, fits: dict[float, LayerRotation], recipe: Recipe, config: OscarConfig):
        self.transforms = {alpha: Transform(layer) for alpha, layer in fits.items()}
        self.config, self.start = config, (recipe.alpha, config.k_clip, config.v_clip, config.scale_rule)
        self.chosen = self.start
        self.keys: dict[tuple[float, float, ScaleRule], float] = {}
        self.values: dict[tuple[float, ScaleRule], float] = {}
        self.before = self.after = self.signal = 0.0

    def _config(self, k_clip: float, v_clip: float, rule: ScaleRule) -> OscarConfig:
        return self.config.replace(k_clip=k_clip, v_clip=v_clip, scale_rule=rule)

    def try_all(self, held: Held) -> None:
        """Add the errors of keys alone and of values alone, which hardly interact."""
        _, k_clip, v_clip, _ = self.start
        for clip, rule in product(sorted({*CLIPS, v_clip}), SCALE_RULES):
            stored = stored_values(self.transforms[self.start[0]], held.value, self._config(k_clip, clip, rule))
            self.values[clip, rule] = self.values.get((clip, rule), 0.0) + held.error(value=stored)
        for (alpha, transform), clip in product(self.transforms.items(), sorted({*CLIPS, k_clip})):
            error = None
            for rule in SCALE_RULES:
                if error is None or not self.config.searches:  # which chooses codes and levels in its own way
                    error = held.error(stored_keys(transform, held.key, self._config(clip, v_clip, rule)))
                self.keys[alpha, clip, rule] = self.keys.get((alpha, clip, rule), 0.0) + error

    def choose(self) -> None:
        """Take the settings of the least error."""
        best = []
        for rule in SCALE_RULES:
            alpha, k_clip, _ = min((k for k in self.keys if k[2] == rule), key=self.keys.__getitem__)
            v_clip, _ = min((v for v in self.values if v[1] == rule), key=self.values.__getitem__)
            error = self.keys[alpha, k_clip, rule] + self.values[v_clip, rule]
            best.append((error, (alpha, k_clip, v_clip, rule)))
        self.chosen = min(best)[1]

    def compare(self, held: Held) -> None:
        """Add the errors of the recipe's settings and of those chosen, keys and values together."""
        self.signal += held.output.square().sum().item()
        self.before += self._both(held, self.start)
        self.after += self._both(held, self.chosen)

    def _both(self, held: Held, settings: tuple[float, float, float, ScaleRule]) -> float:
        transform, config = self.transforms[settings[0]], self._config(*settings[1:])
        return held.error(stored_keys(transform, held.key, config), stored_values(transform, held.value, config))

    def outcome(self) -> LayerChoice:
        """The choice; the recipe's settings where no others are better together."""
        before, after = ((error / self.signal) ** 0.5 for error in (self.before, self.after))
        if not after < before:
            return LayerChoice(*self.start, before, before)
        return LayerChoice(*self.chosen, before, after)


def hold_out(
    sequences: Sequence[Tensor], config: OscarConfig, share: float = 0.1
) -> tuple[list[Tensor], list[Tensor]]:
    """Cut a share of the tokens off the end: what to fit to, and what to choose by.

    Args:
        sequences: token ids, each [n].
        config: its windows; what is cut off is long enough to have a history.
        share: of all tokens.

    Raises:
        ValueError: too few tokens.
    """
    least = config.sink_tokens + config.recent_tokens + HISTORY
    total = sum(map(len, sequences))
    wanted = max(int(total * share), least)
    fitted, held = list(sequences), []
    while wanted > 0 and fitted:
        last = fitted.pop()
        if len(last) >= least:
            taken = min(len(last), max(wanted, least))
            held.append(last[-taken:])
            wanted -= taken
            if len(last) > taken:
                fitted.append(last[:-taken])
        else:
            wanted -= len(last)  # too short to choose by, and left out
    if not held or not fitted:
        raise ValueError(
            f"{total} tokens are too few to hold out a sequence of {least} (sink, recent window and {HISTORY} of "
            "history) and fit to the rest; give more tokens, or do not choose."
        )
    return fitted, held


@torch.no_grad()
def choose_quantizers(
    model: PreTrainedModel,
    rotations: RotationSet,
    statistics: dict[int, LayerStatistics],
    recipe: Recipe,
    sequences: Sequence[Tensor],
    progress: bool = True,
) -> dict[int, LayerChoice]:
    """Choose alpha, clips and scale rule of every layer by the error of its attention outputs.

    Args:
        model: not patched; runs twice over the sequences.
        rotations: fitted with the recipe; its layers get what was chosen, its provenance the report (`"choice"`).
        statistics: what it was fitted to.
        recipe: the same.
        sequences: held out, each with a history.
        progress: show a progress bar.

    Returns:
        dict: choices by layer; layers that stay in 16 bits have none.
    """
    alphas = sorted({*ALPHAS, recipe.alpha}) if recipe.k_transform == "balanced" else [recipe.alpha]
    candidates = {
        index: _Candidates(
            {
                a: layer if a == recipe.alpha else fit_layer(statistics[index], replace(recipe, alpha=a))
                for a in alphas
            },
            recipe,
            rotations.config,
        )
        for index, layer in rotations.layers.items()
        if layer.bits == 2
    }

    def run(add: str) -> None:
        def observer(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Tensor, logits: dict[str, Any]
        ) -> None:
            candidate = candidates.get(module.layer_idx)  # type: ignore[call-overload]
            if candidate is not None:
                getattr(candidate, add)(Held(query, key, value, rotations.config, **logits))

        with observe(model, observer):
            for ids in sequences:
                model.base_model(input_ids=ids[None].to(input_device(model)), use_cache=False)
                bar.update(len(ids))

    total = 2 * sum(map(len, sequences))
    bar = tqdm(total=total, desc="Choosing", unit=" tokens", unit_scale=True, disable=not progress)
    with evaluating(model), bar:
        run("try_all")
        for candidate in candidates.values():
            candidate.choose()
        run("compare")
    choices = {index: candidate.outcome() for index, candidate in candidates.items()}
    for index, choice in choices.items():
        settings = {"k_clip": choice.k_clip, "v_clip": choice.v_clip, "scale_rule": choice.scale_rule}
        settings = {name: value for name, value in settings.items() if value != getattr(rotations.config, name)}
        layer = candidates[index].transforms[choice.alpha].rotation
        rotations.layers[index] = replace(layer, settings=settings)
    rotations.provenance["choice"] = {
        "tokens": sum(map(len, sequences)),
        "layers": {str(index): asdict(choice) for index, choice in choices.items()},
    }
    return choices


def choose_window(
    model: PreTrainedModel, rotations: RotationSet, target: float, sequences: Sequence[Tensor], progress: bool = True
) -> dict[int, float]:
    """Set the smallest recent window whose KL to the unquantised model is at most `target`.

    Args:
        model: not patched.
        rotations: its config gets the window, its provenance what was measured (`"window"`).
        target: nats, mean over the later half of each sequence, of which each token reads what decoding would give it.
        sequences: held out; windows up to a quarter of the longest are tried.
        progress: show a progress bar.

    Returns:
        dict: KL by window, as far as they were tried; if none reached the target the largest is set, with a warning.
    """
    longest = max(map(len, sequences))
    windows = [window for window in WINDOWS if window <= longest // 4] or [WINDOWS[0]]
    expected = [
        reference_logits(model, ids, DynamicCache(config=text_config(model)), len(ids) // 2, CHUNK)
        for ids in sequences
    ]
    found: dict[int, float] = {}
    for window in tqdm(windows, desc="Windows", disable=not progress):
        config = rotations.config.replace(recent_tokens=window)
        with Contender("window", rotations, config).caches(model) as make:
            pairs = zip(sequences, expected, strict=True)
            kl = torch.cat([divergence(model, ids, logits, make(), CHUNK)[0] for ids, logits in pairs])
        found[window] = kl.mean().item()
        if found[window] <= target:
            break
    else:
        logger.warning(
            "No recent window reached a KL of %g: %d tokens have %.3g. Calibrate with more tokens to try longer ones.",
            target,
            window,
            found[window],
        )
    rotations.config = config
    rotations.provenance["window"] = {"target_kl": target, "kl": {str(w): round(kl, 6) for w, kl in found.items()}}
    return found
