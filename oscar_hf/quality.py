"""What a cache costs in accuracy: KL to the unquantised model, perplexity, and how sure the figures are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ._compat import cache_argument, input_device

BLOCK = 128  # neighbouring positions are alike, so they are drawn together
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean with the bounds between which 95 of 100 bootstrap resamples have theirs."""

    mean: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """All three, by name."""
        return asdict(self)


def bootstrap(values: Sequence[Sequence[float]] | Sequence[Tensor], *, block: int = 1, seed: int = 0) -> Estimate:
    """Mean of values, with a percentile bootstrap over blocks of neighbours.

    Args:
        values: groups of numbers, such as one per sequence; a block never spans two of them.
        block: neighbours that are drawn together.
        seed: of the resamples, so that contenders measured on the same positions are resampled alike.

    Raises:
        ValueError: no values.
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in values]
    blocks = [a[first : first + block] for a in arrays for first in range(0, len(a), block)]
    if not blocks:
        raise ValueError("There are no values to average.")
    sums, counts = (np.array([f(part) for part in blocks]) for f in (np.sum, len))
    drawn = np.random.default_rng(seed).integers(len(blocks), size=(RESAMPLES, len(blocks)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, prefix: bool = False) -> list[int]:
    """Ids of a text without special tokens; with `prefix`, after those that the tokenizer begins a text with."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if prefix and bos is not None and tokenizer("a")["input_ids"][0] == bos:
        return [bos, *ids]
    return ids


def cut_sequences(
    tokenizer: PreTrainedTokenizerBase, text: str, length: int, count: int, offset: int = 0
) -> list[Tensor]:
    """Token ids [length] of `count` pieces of a text that follow each other, each begun as the tokenizer begins one.

    Args:
        tokenizer: the model's.
        text: long enough.
        length: of a sequence, its first special token included.
        count: of sequences.
        offset: tokens of the text to leave out first, which keeps a part of it for tuning.

    Raises:
        ValueError: the text is too short.
    """
    ids, begin = token_ids(tokenizer, text), token_ids(tokenizer, "", prefix=True)
    size = length - len(begin)
    if len(ids) < offset + count * size:
        raise ValueError(f"The text has {len(ids)} tokens; {count} x {length} after the first {offset} need more.")
    starts = range(offset, offset + count * size, size)
    return [torch.tensor(begin + ids[start : start + size]) for start in starts]


@torch.no_grad()
def chunk_logits(
    model: PreTrainedModel, ids: Tensor, cache: Cache, chunk: int, first: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Feed a sequence [n] to a model through a cache, chunk by chunk.

    Yields:
        tuple: a position, and float32 logits [m, vocabulary] from it on; positions before `first` are left out.
    """
    name, device = cache_argument(model), input_device(model)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk].to(device)
        keep = min(len(part), start + len(part) - first)
        logits = model(part[None], logits_to_keep=max(1, keep), **{name: cache}).logits[0]
        if keep > 0:
            yield start + len(part) - keep, logits[-keep:].float()


def reference_logits(model: PreTrainedModel, ids: Tensor, cache: Cache, first: int, chunk: int) -> Tensor:
    """Logits [n - first, vocabulary] float32 of the unquantised model, on the device that it answers on."""
    return torch.cat([logits for _, logits in chunk_logits(model, ids, cache, chunk, first)])


def divergence(
    model: PreTrainedModel, ids: Tensor, expected: Tensor, cache: Cache, chunk: int
) -> tuple[Tensor, Tensor]:
    """How a model with this cache differs from the reference, position by position.

    Args:
        model: made ready for the cache.
        ids: [n], one sequence.
        expected: [n - first, vocabulary] logits of the reference.
        cache: empty.
        chunk: tokens of a forward. A position reads the history that decoding would give it if the cache was made
            with `exact_chunks=False`.

    Returns:
        tuple: KL(reference || model) in nats [n - first], and the negative log-likelihood of the next token, of all
        but the last position.
    """
    first = len(ids) - len(expected)
    divergences, losses = [], []
    for start, logits in chunk_logits(model, ids, cache, chunk, first):
        q = logits.log_softmax(-1)
        p = expected[start - first : start - first + len(q)].to(q.device).log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        following = ids[start + 1 : start + 1 + len(q), None].to(q.device)
        losses.append(-q[: len(following)].gather(1, following).squeeze(1))
    return torch.cat(divergences).cpu(), torch.cat(losses).cpu()


def negative_log_likelihood(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each next token [m - 1], given logits [m, vocabulary] at the last m of these positions."""
    following = ids[len(ids) - len(logits) + 1 :, None].to(logits.device)
    return -logits[:-1].log_softmax(-1).gather(1, following).squeeze(1).cpu()


def perplexity(losses: Sequence[Tensor], seed: int = 0) -> Estimate:
    """`exp` of the mean of negative log-likelihoods, and of its bounds."""
    mean = bootstrap(losses, block=BLOCK, seed=seed)
    return Estimate(*(float(np.exp(value)) for value in (mean.mean, mean.low, mean.high)))
