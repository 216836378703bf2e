"""Calibration: run a model over text, keep running second moments, fit the transforms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ._compat import architecture, cache_layers, input_device, text_config
from .attention import evaluating, observe
from .config import OscarConfig, Recipe, get_recipe
from .loading import display_name
from .outliers import logit_error, sample, warn
from .parallel import local_heads
from .rotation import LayerRotation, RotationSet, balanced_transform, compose_rotation, hadamard
from .transform import Transform


class LayerStatistics:
    """Running float64 sums of one layer, per KV head; their size does not depend on the number of tokens.

    After RoPE: second moments of queries and keys, the sum of keys, second moments of attention outputs, and, once
    `score_values` knows the query moments, of values weighted by `k C_Q k'`.
    """

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.tokens = 0
        self.queries, self.keys, self.outputs, self.scored = (zeros(kv_heads, head_dim, head_dim) for _ in range(4))
        self.key_sum = zeros(kv_heads, head_dim)
        self.score_sum = zeros(kv_heads)
        self.sample: tuple[Tensor, Tensor] | None = None  # queries and keys of the longest sequence

    def add(self, query: Tensor, key: Tensor, output: Tensor) -> None:
        """Add the states [B, H, n, D] of one forward."""
        kv_heads = key.shape[1]
        if self.sample is None or key.shape[2] >= self.sample[1].shape[1]:
            self.sample = sample(query), sample(key)
        key = _rows(key, kv_heads)
        self.tokens += key.shape[1]
        self.keys += key.mT @ key
        self.key_sum += key.sum(1)
        for total, states in ((self.queries, query), (self.outputs, output)):
            rows = _rows(states, kv_heads)
            total += rows.mT @ rows * (key.shape[1] / rows.shape[1])  # mean over the queries of a KV head

    def add_scored(self, key: Tensor, value: Tensor, query_moment: Tensor) -> None:
        """Second pass: values [B, H_kv, n, D] weighted by `w = k C_Q k'`, C_Q [H_kv, D, D]."""
        key, value = _rows(key, key.shape[1]), _rows(value, key.shape[1])
        weight = ((key @ query_moment) * key).sum(-1, keepdim=True)
        self.scored += (value * weight).mT @ value
        self.score_sum += weight.sum((1, 2))

    @property
    def query_moment(self) -> Tensor:
        """C_Q [H_kv, D, D], the mean of q'q over tokens and the query heads of a KV head."""
        return self.queries / self.tokens

    @property
    def key_mean(self) -> Tensor:
        """[H_kv, D]."""
        return self.key_sum / self.tokens

    def key_covariance(self, centred: bool) -> Tensor:
        """[H_kv, D, D]; about the mean if `centred`."""
        moment, mean = self.keys / self.tokens, self.key_mean
        return moment - mean.unsqueeze(2) * mean.unsqueeze(1) if centred else moment

    def value_moment(self, target: str) -> Tensor:
        """[H_kv, D, D]: of attention outputs, or of score-weighted values with weights of mean 1."""
        if target == "output":
            return self.outputs / self.tokens
        return self.scored / self.score_sum.clamp_min(1e-12)[:, None, None]


def _rows(states: Tensor, kv_heads: int) -> Tensor:
    """[B, H, n, D] -> [H_kv, rows, D] float64, all the queries of a KV head one below the other."""
    batch, heads, count, size = states.shape
    grouped = states.double().view(batch, kv_heads, heads // kv_heads, count, size)
    return grouped.transpose(0, 1).reshape(kv_heads, -1, size)


def fit_layer(statistics: LayerStatistics, recipe: Recipe) -> LayerRotation:
    """The transforms of one layer (design, method.md)."""
    size = statistics.key_sum.shape[-1]

    def shared(moment: Tensor) -> Tensor:
        return (moment if recipe.per_head else moment.mean(0)).cpu()

    queries = shared(statistics.query_moment)
    if recipe.k_transform == "balanced":
        keys = shared(statistics.key_covariance(recipe.key_mean))
        k_rotation = balanced_transform(keys, queries, recipe.alpha, recipe.ridge)
    else:
        k_rotation = _orthogonal(recipe.k_transform, queries, size)
    v_rotation = _orthogonal(recipe.v_transform, shared(statistics.value_moment(recipe.value_target)), size)
    inverse = torch.linalg.inv(k_rotation).mT if recipe.k_transform == "balanced" else None
    mean = statistics.key_mean if recipe.key_mean else None
    tensors = (k_rotation, v_rotation, inverse, mean)
    return LayerRotation(*(None if t is None else t.float().cpu().contiguous() for t in tensors))  # type: ignore[arg-type]


def keep_outliers(rotations: RotationSet, statistics: dict[int, LayerStatistics], scaling: dict[int, float]) -> None:
    """Set layers that 2 bits cannot hold to 16, by the tokens seen; what was found goes into the provenance."""
    errors = {}
    for index, layer in rotations.layers.items():
        queries, keys = statistics[index].sample  # type: ignore[misc]
        error = logit_error(Transform(layer), rotations.config, queries, keys, scaling[index])
        errors[str(index)] = round(error.noise, 3)
        if error.reason:
            rotations.layers[index] = replace(layer, bits=16)
            warn(index, error.reason, "it stays in 16 bits")
    rotations.provenance["logit_error"] = errors


def _orthogonal(transform: str, moment: Tensor, size: int) -> Tensor:
    if transform == "eigen":
        return compose_rotation(moment)
    return hadamard(size) if transform == "hadamard" else torch.eye(size, dtype=torch.float64)


@torch.no_grad()
def collect_statistics(
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    *,
    scored_values: bool = False,
    progress: bool = True,
) -> dict[int, LayerStatistics]:
    """Statistics of all full-attention layers over token-id sequences.

    Args:
        model: run as it is, one sequence at a time.
        sequences: token ids [n], one forward each.
        scored_values: a second pass for the values weighted by `k C_Q k'`.
        progress: show a progress bar.

    Returns:
        dict: statistics by layer index.
    """
    _, full = cache_layers(text_config(model))
    layers: dict[int, LayerStatistics] = {}

    def gather(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        index: int = module.layer_idx  # type: ignore[assignment]
        if index in full:
            if index not in layers:
                layers[index] = LayerStatistics(key.shape[1], key.shape[3], key.device)
            layers[index].add(query, key, output)

    def score(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        index: int = module.layer_idx  # type: ignore[assignment]
        if index in full:
            layers[index].add_scored(key, value, layers[index].query_moment)

    decoder = model.base_model  # the head's logits are not needed
    passes = [gather, score] if scored_values else [gather]
    total = sum(len(ids) for ids in sequences) * len(passes)
    bar = tqdm(total=total, desc="Calibrating", unit=" tokens", unit_scale=True, disable=not progress)
    with evaluating(model), bar:
        for observer in passes:
            with observe(model, observer):
                for ids in sequences:
                    decoder(input_ids=ids[None].to(input_device(model)), use_cache=False)
                    bar.update(len(ids))
    return layers


def calibrate(
    model: PreTrainedModel,
    data: str | Tensor | Iterable[str | Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tokens: int = 20_000,
    recipe: str | Recipe = "balanced",
    sequence_length: int = 4096,
    progress: bool = True,
    corpus: str | None = None,
    **changes: Any,
) -> RotationSet:
    """Fit rotations to a model.

    Args:
        model: not patched; runs once over the data, twice where the recipe's value target is `"score"`.
        data: texts, which are joined and cut into sequences, or token ids [n], each a sequence of its own.
        tokenizer: needed for texts.
        tokens: how many to use; less if there are fewer.
        recipe: a name in `config.RECIPES`, or a Recipe.
        sequence_length: longest sequence in one forward; the model's own limit if that is lower.
        progress: show a progress bar.
        corpus: name of the data, for the provenance.
        **changes: settings of the recipe to change, for ablations (`alpha=0.75`, `per_head=False`, ...).

    Returns:
        RotationSet: with the architecture it fits and where it is from.

    Raises:
        ValueError: a patched model, no tokenizer for texts, too little data, NaN statistics, unknown settings.
    """
    if isinstance(recipe, str):
        recipe = get_recipe(recipe, **changes)
    elif changes:
        raise ValueError("Change settings of a recipe given by name, or give a Recipe; not both.")
    if getattr(model, "_oscar_patch", None) is not None or getattr(model.config, "oscar", None) is not None:
        raise ValueError("This model's projections are rotated already; calibrate the original model.")
    if local_heads(model) is not None:
        raise ValueError("This process holds some of the model's heads; calibrate with one process, and device_map.")
    if sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length} must be a positive number of tokens.")
    config = text_config(model)
    limit = min(sequence_length, getattr(config, "max_position_embeddings", sequence_length))
    if not recipe.needs_data:
        full = cache_layers(config)[1]
        rotations = RotationSet.without_data(full, architecture(config)["head_dim"], recipe)
        rotations.architecture = architecture(config)
        rotations.provenance["model"] = display_name(model.name_or_path) or config.model_type
        return rotations
    sequences = list(_sequences(data, tokenizer, tokens, limit))
    used, size = sum(len(ids) for ids in sequences), architecture(config)["head_dim"]
    if used < 2 * size:
        raise ValueError(f"Calibration data has {used} tokens; head_dim {size} needs {2 * size} at least.")
    scored = recipe.v_transform == "eigen" and recipe.value_target == "score"
    statistics = collect_statistics(model, sequences, scored_values=scored, progress=progress)
    if missing := sorted(cache_layers(config)[1] - set(statistics)):
        raise ValueError(f"{type(model).__name__} does not run layers {missing} through transformers' attention.")
    for index, layer in statistics.items():
        if not all(bool(t.isfinite().all()) for t in (layer.queries, layer.keys, layer.outputs)):
            raise ValueError(f"Layer {index}: queries, keys or values are NaN or infinite in {model.dtype}.")
    settings = vars(recipe)
    rotations = RotationSet(
        {index: fit_layer(layer, recipe) for index, layer in sorted(statistics.items())},
        OscarConfig(recipe.name, k_clip=recipe.k_clip, v_clip=recipe.v_clip, scale_rule=recipe.scale_rule),
        architecture(config),
        {
            "model": display_name(model.name_or_path) or config.model_type,
            "revision": getattr(model.config, "_commit_hash", None),
            "dtype": str(model.dtype).removeprefix("torch."),
            "corpus": corpus or "unnamed",
            "tokens": used,
            "sequence_length": limit,
            "recipe": dict(settings),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )
    scaling = {
        module.layer_idx: getattr(module, "scaling", size**-0.5)
        for module in model.modules()
        if getattr(module, "layer_idx", None) in statistics
    }
    keep_outliers(rotations, statistics, scaling)
    rotations.validate()
    return rotations


def _sequences(
    data: str | Tensor | Iterable[str | Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: int,
    limit: int,
) -> Iterator[Tensor]:
    """Token ids [n <= limit], `tokens` in all; texts are joined, id tensors kept apart."""
    items = [data] if isinstance(data, (str, Tensor)) else data
    left, pending = tokens, torch.empty(0, dtype=torch.long)
    for item in items:
        if isinstance(item, Tensor):
            pieces = item.flatten().long().split(limit)
        elif tokenizer is None:
            raise ValueError("Texts need a tokenizer: calibrate(model, texts, tokenizer).")
        else:
            piece = item[: 64 * left]  # no token is that long
            ids = tokenizer(piece + "\n\n", return_tensors="pt", verbose=False)["input_ids"][0]
            pending = torch.cat([pending, ids])
            whole = len(pending) // limit * limit
            pieces, pending = pending[:whole].split(limit) if whole else (), pending[whole:]
        for piece in pieces:
            if left > 0 and len(piece):
                yield piece[:left]
                left -= len(piece)
        if left <= 0:
            return
    if len(pending):
        yield pending[:left]
