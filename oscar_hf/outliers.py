"""Layers that two bits cannot hold: how far off their logits are, and which stay in 16 bits."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .config import OscarConfig
from .quantization import dequantize, quantize
from .transform import Transform

if TYPE_CHECKING:
    from .layer import OscarLayer

SAMPLE = 256  # tokens that are looked at
FEWEST = 8  # tokens that tell something
BOUND = 4.0  # nats, rms, of the error of logits; on SmolLM2: balanced .3 to 1.1, oscar .7 to 2.1, naive .9 to 3.9
DROWNED = 1.25  # error of logits over 1 nat, or of keys where there are no queries, to what they differ by
FIRST = 4  # tokens left out where there are enough: they are never quantised, and often unlike all others


class LogitError(NamedTuple):
    """What quantising the keys does to a layer's logits.

    Args:
        noise: root mean square of the error, in nats, less what is the same for all keys of a query.
        signal: root mean square of the logits about their mean over keys: what attention goes by.
    """

    noise: float
    signal: float

    @property
    def reason(self) -> str | None:
        """Why 2 bits cannot hold the layer; None: they can."""
        if self.noise <= BOUND and self.noise <= max(1.0, DROWNED * self.signal):
            return None
        return (
            f"2-bit keys put its logits off by {self.noise:.1f} nats (rms), and they differ by {self.signal:.1f} "
            f"(bounds: {BOUND:g} nats, or {DROWNED:g} times what they differ by)"
        )


def sample(states: Tensor) -> Tensor:
    """At most `SAMPLE` tokens of states [B, H, n, D], evenly spaced: [H, B m, D] float32."""
    count = states.shape[2]
    first = min(FIRST, count - 1)
    picked = torch.linspace(first, count - 1, min(SAMPLE, count - first), device=states.device).long()
    return states.index_select(2, picked).transpose(0, 1).flatten(1, 2).float()


def logit_error(
    transform: Transform, config: OscarConfig, queries: Tensor, keys: Tensor, scaling: float
) -> LogitError:
    """Quantise some keys and see what some queries make of them.

    Args:
        transform: the layer's.
        config: how keys are quantised.
        queries: [H_q, N, D] in the model's basis, after RoPE, float32.
        keys: [H_kv, M, D], the same.
        scaling: factor on the logits.
    """
    keys = transform.keys(keys)
    stored = quantize(
        keys,
        clip=config.k_clip,
        group_size=config.group_size,
        scale_rule=config.scale_rule,
        scale_dtype=getattr(torch, config.scale_dtype),
        metric=transform.metric(keys.device) if config.searches else None,
        sweeps=config.k_search,
        stretch=config.k_stretch,
    )
    queries = transform.queries(queries.unflatten(0, (keys.shape[0], -1)).flatten(1, 2)) * scaling  # [H_kv, G N, D]
    signal, noise = (queries @ states.mT for states in (keys, dequantize(stored) - keys))
    return LogitError(*((x - x.mean(-1, keepdim=True)).square().mean().sqrt().item() for x in (noise, signal)))


def judge(layer: OscarLayer, key: Tensor, query: Tensor | None = None, scaling: float = 1.0) -> None:
    """Before a layer quantises any keys of a model for the first time: see whether 2 bits can hold them.

    Where not, the layer goes on in 16 bits, as it does in later caches, and a warning says so. Fixed storage cannot
    change any more, so only later caches do. Layers that calibration has judged are not looked at.

    Args:
        layer: whose history is empty, or nothing is done; growing ones are judged when it is about to begin.
        key: [B, H_kv, n, D], about to be stored.
        query: [B, H_q, n, D]; None: the channels of the keys stand for logits.
        scaling: factor on the logits.
    """
    tiers, transform, config = layer.tiers, layer.transform, layer.config
    if transform.judged or config.bits != 2 or any(tiers.flushed):
        return
    if not layer.fixed and max(tiers.lengths) + key.shape[2] <= config.sink_tokens + config.recent_tokens:
        return
    rows, own = transform.exemplar()
    key = key[rows]
    if not len(key):
        return
    if key.shape[2] < SAMPLE and any(tiers.lengths):  # of one row: windows and what comes
        row = rows.start or 0
        held = [own.undo_keys(span.keys) for span in tiers.exact(slice(row, row + 1))]
        key = torch.cat([*held, key[:1]], 2)
    keys = sample(key)
    if layer.fixed and keys.shape[1] < FEWEST:
        return
    if query is None:
        channels = torch.eye(key.shape[3], device=key.device).expand(key.shape[1], -1, -1)
        noise, signal = logit_error(own, config, channels, keys, 1.0)
        off = f"2 bits put its keys off by {noise:.2g} (rms), and they differ by {signal:.2g}"
        reason = None if noise <= DROWNED * signal else off
    else:
        reason = logit_error(own, config, sample(query[rows]), keys, scaling).reason
    transform.judged = True
    if reason is None:
        return
    transform.bits = 16
    if layer.fixed:
        warn(layer.index, reason, "call reset(), or make a new cache, which keeps it in 16 bits")
    else:
        layer.keep_exactly()
        warn(layer.index, reason, "it is kept in 16 bits")


def warn(layer: int | None, reason: str, held: str) -> None:
    """Tell that a layer is beyond 2 bits, and what is done about it."""
    name = "A layer" if layer is None else f"Layer {layer}"
    text = f"{name}: {reason}; {held}. The recipe 'balanced' of calibrate(), which takes off the keys' mean, may do."
    warnings.warn(text, stacklevel=2)
