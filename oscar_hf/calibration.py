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
from .matrices import balanced_transform, compose_rotation, error_metric, hadamard
from .outliers import logit_error, sample, warn
from .parallel import local_heads
from .rotation import TENSORS, LayerRotation, RotationSet
from .transform import Transform

ATTENTION_BLOCK = 1 << 24  # attention weights held at a time


class LayerStatistics:
    """Running float64 sums of one layer, per KV head; their size does not depend on the number of tokens.

    After RoPE: second moments of queries and keys, the sum of keys, second moments of attention outputs; once
    `add_scored` knows the query moments, of values weighted by `k C_Q k'`; and, by `add_history`, the second moment of
    queries and the sum of keys by the attention that goes from one to the other.
    """

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.tokens = self.weighed = 0  # seen by `add`, and by `add_history`
        self.queries, self.keys, self.outputs, self.scored, self.history_queries = (
            zeros(kv_heads, head_dim, head_dim) for _ in range(5)
        )
        self.key_sum, self.history_keys = (zeros(kv_heads, head_dim) for _ in range(2))
        self.score_sum, self.history_sum = (zeros(kv_heads) for _ in range(2))
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

    def add_history(self, query: Tensor, key: Tensor, config: OscarConfig, **logits: Any) -> None:
        """Add queries by the attention they pay to what would be their history, and keys by what they receive of it.

        A sequence that fits into sink and recent window has no history, and adds nothing.
        """
        kv_heads = key.shape[1]
        paid, received = history_attention(query, key, config.sink_tokens, config.recent_tokens, **logits)
        queries, keys = _rows(query, kv_heads), _rows(key, kv_heads)
        self.history_queries += (queries * _rows(paid.unsqueeze(-1), kv_heads)).mT @ queries
        weight = _rows(received.unsqueeze(-1), kv_heads)
        self.history_keys += (keys * weight).sum(1)
        self.history_sum += weight.sum((1, 2))
        self.weighed += keys.shape[1]

    def query_moment(self, weighted: bool = False) -> Tensor:
        """C_Q [H_kv, D, D], the mean of q'q over tokens and the query heads of a KV head.

        `weighted` by attention to the history, where any sequence had one.
        """
        plain = self.queries / self.tokens
        return self._by_history(self.history_queries, plain) if weighted else plain

    def key_mean(self, weighted: bool = False) -> Tensor:
        """[H_kv, D]; `weighted` by the attention received as history, where any sequence had one."""
        plain = self.key_sum / self.tokens
        return self._by_history(self.history_keys, plain) if weighted else plain

    def _by_history(self, total: Tensor, plain: Tensor) -> Tensor:
        if self.weighed != self.tokens:
            raise ValueError("A history-weighted recipe needs statistics that were collected with history=...")
        weight = self.history_sum.view(-1, *[1] * (total.dim() - 1))
        return torch.where(weight > 0, total / weight, plain)

    def key_covariance(self, centred: bool) -> Tensor:
        """[H_kv, D, D]; about the mean if `centred`."""
        moment, mean = self.keys / self.tokens, self.key_mean()
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


def history_attention(
    query: Tensor,
    key: Tensor,
    sink: int,
    recent: int,
    scaling: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """How much of each query's attention goes to the history, and how much each key receives as part of it.

    The history of a query are the keys behind the `sink` first ones and `recent` or more before it.

    Args:
        query: [B, H_q, n, D], of causal attention without padding.
        key: [B, H_kv, n, D].
        sink: tokens that never are history.
        recent: newest tokens of each query that are not yet.
        scaling: factor on the logits (default D ** -0.5).
        softcap: as in `kernels.reference.attend_blocks`.
        sink_logits: [H_q].

    Returns:
        tuple: [B, H_q, n] and [B, H_kv, n] float32; the latter over all queries and query heads of a KV head.
    """
    (batch, heads, count, size), kv_heads = query.shape, key.shape[1]
    paid, received = (key.new_zeros(batch, n, count, dtype=torch.float32) for n in (heads, kv_heads))
    keys, grouped = key.float().unsqueeze(2), query.float().unflatten(1, (kv_heads, -1))  # [B, H_kv, G, n, D]
    rows = max(1, ATTENTION_BLOCK // (batch * heads * count))
    for first in range(sink + recent, count, rows):
        last = min(first + rows, count)
        logits = grouped[:, :, :, first:last] @ keys[:, :, :, :last].mT * (size**-0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        place = torch.arange(last, device=key.device)
        behind = torch.arange(first, last, device=key.device)[:, None] - place
        total = logits.masked_fill_(behind < 0, -torch.inf).logsumexp(-1, keepdim=True)
        if sink_logits is not None:
            total = torch.logaddexp(total, sink_logits.float().view(kv_heads, -1, 1, 1))
        weights = (logits - total).exp_() * ((behind >= recent) & (place >= sink))
        paid[:, :, first:last] = weights.sum(-1).flatten(1, 2)
        received[:, :, :last] += weights.sum((2, 3))
    return paid, received


def fit_layer(statistics: LayerStatistics, recipe: Recipe) -> LayerRotation:
    """The transforms of one layer (design, method.md)."""
    size = statistics.key_sum.shape[-1]

    def shared(moment: Tensor) -> Tensor:
        return (moment if recipe.per_head else moment.mean(0)).cpu()

    queries = shared(statistics.query_moment(recipe.history_weighted))
    if recipe.k_transform == "balanced":
        keys = shared(statistics.key_covariance(recipe.key_mean))
        k_rotation = balanced_transform(keys, queries, recipe.alpha, recipe.ridge, recipe.balance)
    else:
        k_rotation = _orthogonal(recipe.k_transform, queries, size)
    v_rotation = _orthogonal(recipe.v_transform, shared(statistics.value_moment(recipe.value_target)), size)
    inverse = torch.linalg.inv(k_rotation).mT if recipe.k_transform == "balanced" else None
    mean = statistics.key_mean(recipe.history_weighted) if recipe.key_mean else None
    metric = error_metric(k_rotation if inverse is None else inverse, queries) if recipe.k_search else None
    tensors = (k_rotation, v_rotation, inverse, mean, metric)
    held = (None if t is None else t.float().cpu().contiguous() for t in tensors)
    return LayerRotation(**dict(zip(TENSORS, held, strict=True)))  # type: ignore[arg-type]


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
    history: OscarConfig | None = None,
    progress: bool = True,
) -> dict[int, LayerStatistics]:
    """Statistics of all full-attention layers over token-id sequences.

    Args:
        model: run as it is, one sequence at a time.
        sequences: token ids [n], one forward each.
        scored_values: a second pass for the values weighted by `k C_Q k'`.
        history: also weigh queries and keys by the attention to the history, as a cache with these windows has it.
        progress: show a progress bar.

    Returns:
        dict: statistics by layer index.
    """
    _, full = cache_layers(text_config(model))
    layers: dict[int, LayerStatistics] = {}

    def gather(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logits: dict[str, Any]
    ) -> None:
        index: int = module.layer_idx  # type: ignore[assignment]
        if index in full:
            if index not in layers:
                layers[index] = LayerStatistics(key.shape[1], key.shape[3], key.device)
            layers[index].add(query, key, output)
            if history is not None:
                layers[index].add_history(query, key, history, **logits)

    def score(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, output: Tensor, _: Any) -> None:
        index: int = module.layer_idx  # type: ignore[assignment]
        if index in full:
            layers[index].add_scored(key, value, layers[index].query_moment())

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
    target_kl: float | None = None,
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
        target_kl: hold out a tenth of the tokens, and set the smallest recent window whose KL to the unquantised model
            is at most so many nats on them.
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
    if not recipe.needs_data and target_kl is None:
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
    settings = OscarConfig.of(recipe)
    held: list[Tensor] = []
    if recipe.choose or target_kl is not None:
        from .choice import choose_quantizers, choose_window, hold_out

        sequences, held = hold_out(sequences, settings)
    history = settings if recipe.history_weighted else None
    statistics = collect_statistics(model, sequences, scored_values=scored, history=history, progress=progress)
    if missing := sorted(cache_layers(config)[1] - set(statistics)):
        raise ValueError(f"{type(model).__name__} does not run layers {missing} through transformers' attention.")
    for index, layer in statistics.items():
        if not all(bool(t.isfinite().all()) for t in (layer.queries, layer.keys, layer.outputs)):
            raise ValueError(f"Layer {index}: queries, keys or values are NaN or infinite in {model.dtype}.")
    rotations = RotationSet(
        {index: fit_layer(layer, recipe) for index, layer in sorted(statistics.items())},
        settings,
        architecture(config),
        {
            "model": display_name(model.name_or_path) or config.model_type,
            "revision": getattr(model.config, "_commit_hash", None),
            "dtype": str(model.dtype).removeprefix("torch."),
            "corpus": corpus or "unnamed",
            "tokens": sum(map(len, sequences)),
            "sequence_length": limit,
            "recipe": dict(vars(recipe)),
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
    if recipe.choose:
        choose_quantizers(model, rotations, statistics, recipe, held, progress)
    rotations.validate()
    if target_kl is not None:
        choose_window(model, rotations, target_kl, held, progress)
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
