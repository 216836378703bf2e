"""Transforms fitted to the sequence at hand: recipe "prompt", which needs no calibration.

Any `A` with `A A'` between the inverse of the keys' covariance S and the queries' second moment C lets errors of
stored keys fall where few queries look (`matrices.balanced_transform`). What is left free is spent on a cheap one:
with `L_C L_C' = C` and `L_S L_S' = S`, both scaled to mean eigenvalue 1 and shrunk,

    A = L_C L_S^-T H,    A^-T = L_C^-T L_S H,

two Cholesky factors, two triangular solves and four products of [D, D] a head. Nothing waits for the device.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from .matrices import error_metric, hadamard
from .search import Metric
from .transform import Transform

SAMPLE = 1024  # keys and queries of a forward that are looked at
FIRST = 4  # tokens left out where there are enough: they are never quantised, and often unlike all others
RIDGE = 4.0  # of both moments; it makes A about as strong as the balanced transform with alpha 1/2
PRIOR_TOKENS = 2500  # what the ridge is doubled by: RoPE has few tokens say little of those at other positions
PRIOR_RIDGE = 16.0  # the same where calibration has balanced the moments already
MEAN_TOKENS = 2000  # what calibration counts for in the keys' mean


def sample(states: Tensor, limit: int = SAMPLE) -> Tensor:
    """At most `limit` tokens of states [B, H, n, D], evenly spaced, without the first few if there are enough."""
    count = states.shape[2]
    first = FIRST if count > 4 * FIRST else 0
    step = -(-(count - first) // limit)
    return states[:, :, first::step]


def query_moment(queries: Tensor, kv_heads: int) -> Tensor:
    """Mean of q'q over the tokens and query heads of each KV head: [B, H_q, n, D] -> [B, H_kv, D, D] float32."""
    rows = queries.unflatten(1, (kv_heads, -1)).flatten(2, 3).float()
    return rows.mT @ rows / rows.shape[2]


def fit(
    keys: Tensor,
    queries: Tensor | None,
    *,
    prior: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and transforms of one sequence a row.

    Args:
        keys: [B, H_kv, n, D] in the model's basis, after RoPE; all of them real.
        queries: their second moment [B, H_kv, D, D] float32 (`query_moment`); None: not known, and the mean is all
            that is fitted.
        prior: `k_mean` [H_kv, D], `k_rotation` and `q_rotation` [H_kv, D, D] or [D, D] from calibration, without which
            the prior is the identity.

    Returns:
        tuple: `k_mean` [B, H_kv, D], `k_rotation` and `q_rotation` [B, H_kv, D, D], float32.
    """
    tokens, size = keys.shape[2], keys.shape[3]
    keys = sample(keys).float()
    mean = keys.mean(2)
    mean = torch.where(mean.isfinite(), mean, 0.0)  # what overflowed spoils no other token
    eye = torch.eye(size, device=keys.device)
    ridge = (RIDGE if prior is None else PRIOR_RIDGE) * (1 + PRIOR_TOKENS / tokens)
    if prior is None:
        centred = keys - mean.unsqueeze(2)
    else:
        k_mean, k_rotation, q_rotation = prior
        mean = (tokens * mean + MEAN_TOKENS * k_mean) / (tokens + MEAN_TOKENS)
        centred = (keys - mean.unsqueeze(2)) @ k_rotation
        if queries is not None:
            queries = q_rotation.mT @ queries @ q_rotation
    if queries is None:
        k_part = q_part = eye.expand(*mean.shape, size)
    else:
        moments = torch.stack([centred.mT @ centred, queries])
        trace = moments.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        moments = torch.where((trace > 0) & trace.isfinite(), moments * (size / trace), 0.0) + ridge * eye
        factors, _ = torch.linalg.cholesky_ex(moments)
        inverses = torch.linalg.solve_triangular(factors, eye.expand_as(factors), upper=False)
        k_part, q_part = factors[1] @ inverses[0].mT, inverses[1].mT @ factors[0]
    if prior is None:
        mixing = _mixing(size, keys.device)
        return mean, k_part @ mixing, q_part @ mixing
    return mean, k_rotation @ k_part, q_rotation @ q_part  # which are mixed already


@cache
@torch.inference_mode(False)
def _mixing(size: int, device: torch.device) -> Tensor:
    """The Hadamard matrix on a device, where it stays: copying one there waits for what the device is doing."""
    return hadamard(size).to(device, torch.float32)


def metric_of(q_rotation: Tensor, queries: Tensor) -> Metric:
    """What errors of stored keys cost (`rotation.error_metric`), with its factor; nothing waits for the device."""
    matrix = error_metric(q_rotation, queries)
    lower, _ = torch.linalg.cholesky_ex(matrix.flip(-1, -2))  # matrix = U U' with U upper
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor = torch.linalg.solve_triangular(lower.flip(-1, -2), eye.expand_as(matrix), upper=True)
    return Metric(matrix.float().contiguous(), factor.float().contiguous())


class RowTransform(Transform):
    """A layer's transform with one entry a row of the batch: the identity until the row is fitted.

    Args:
        given: the layer's otherwise: its values' rotation, and the prior where it was calibrated.
        like: states [B, H_kv, _, D].
        searches: whether a metric is needed.
        fixed: tensors keep their addresses.
    """

    def __init__(self, given: Transform, like: Tensor, *, searches: bool, fixed: bool):
        self.given, self.fixed, self.absorbed = given, fixed, given.absorbed
        batch, heads, _, size = like.shape
        with torch.inference_mode(False):
            eye = torch.eye(size, device=like.device).repeat(batch, heads, 1, 1)
            self.held = {
                "k_mean": eye.new_zeros(batch, heads, size),
                "k_rotation": eye,
                "q_rotation": eye.clone(),
            }
            if searches:
                self.held |= {"k_metric": eye.clone(), "k_factor": eye.clone()}
            self.moments: Tensor | None = torch.zeros_like(eye)  # of queries, of rows that are not fitted
        self.seen = [0] * batch  # tokens in them
        self.fitted = [False] * batch

    def clear(self) -> None:
        """Forget every fit."""
        eye = torch.eye(self.held["k_rotation"].shape[-1], device=self.held["k_rotation"].device)
        rows = range(len(self.fitted))
        self._put(
            slice(None), {n: torch.zeros_like(t) if n == "k_mean" else eye.expand_as(t) for n, t in self.held.items()}
        )
        self.moments = torch.zeros_like(self.held["k_rotation"])
        self.seen, self.fitted = [0 for _ in rows], [False for _ in rows]

    @property
    def bits(self) -> Literal[2, 16]:
        """2, or 16 where some cache of this model found that the layer needs it."""
        return self.given.bits

    @bits.setter
    def bits(self, bits: Literal[2, 16]) -> None:
        self.given.bits = bits

    @property
    def judged(self) -> bool:
        """Whether that is known."""
        return self.given.judged

    @judged.setter
    def judged(self, judged: bool) -> None:
        self.given.judged = judged

    @property
    def complete(self) -> bool:
        """Whether all rows are fitted."""
        return all(self.fitted)

    def unrotated(self) -> Transform:
        return self.given.unrotated()

    def check(self, keys: Tensor) -> None:
        self.given.check(keys)

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        return {"v_rotation": self.given._on(device)["v_rotation"], **self.held}

    def metric(self, device: torch.device) -> Metric:
        return Metric(self.held["k_metric"], self.held["k_factor"])

    def rows(self, rows: slice) -> RowTransform:
        if rows == slice(None):
            return self
        twin = copy.copy(self)
        twin.held = {name: tensor[rows] for name, tensor in self.held.items()}
        return twin

    def exemplar(self) -> tuple[slice, Transform]:
        row = self.fitted.index(True) if any(self.fitted) else len(self.fitted)
        twin = copy.copy(self)
        twin.held = {name: tensor[row] for name, tensor in self.held.items()} if any(self.fitted) else {}
        return slice(row, row + 1), twin

    def see(self, rows: slice, queries: Tensor) -> None:
        """Take the queries [b, H_q, n, D] of rows that are not fitted yet into account."""
        if self.moments is None:
            raise RuntimeError("These rows are fitted already.")
        first = rows.indices(len(self.fitted))[0]
        past, new = self.seen[first], queries.shape[2]
        moment = query_moment(sample(queries), self.moments.shape[1])
        moments = self.moments.clone()
        moments[rows] = moments[rows] * (past / (past + new)) + moment * (new / (past + new))
        self.moments = moments
        for row in range(*rows.indices(len(self.fitted))):
            self.seen[row] = past + new

    def fit(self, rows: slice, keys: Tensor) -> None:
        """Fit rows to all their keys so far, [b, H_kv, n, D] in the model's basis."""
        spans = range(*rows.indices(len(self.fitted)))
        queries = self.moments[rows] if self.moments is not None and self.seen[spans[0]] else None
        k_mean, k_rotation, q_rotation = fit(keys, queries, prior=self._prior(keys.device))
        new = {"k_mean": k_mean, "k_rotation": k_rotation, "q_rotation": q_rotation}
        if "k_metric" in self.held:
            known = (
                queries if queries is not None else torch.eye(keys.shape[3], device=keys.device).expand_as(k_rotation)
            )
            new["k_metric"], new["k_factor"] = metric_of(q_rotation, known)
        self._put(rows, new)
        self.fitted = [fitted or row in spans for row, fitted in enumerate(self.fitted)]
        if self.complete:
            self.moments = None

    def _prior(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
        """What calibration says, where it took off a mean and balanced the rest."""
        if self.given.rotation.k_mean is None or self.given.rotation.q_rotation is None:
            return None
        placed = self.given._on(device)
        return placed["k_mean"], placed["k_rotation"], placed["q_rotation"]

    @torch.inference_mode(False)
    def _put(self, rows: slice, new: dict[str, Tensor]) -> None:
        """Replace rows: in place in fixed storage, whose addresses stay, else in tensors that no other cache has."""
        for name, tensor in new.items():
            if self.fixed:
                self.held[name][rows] = tensor
            elif len(tensor) == len(self.fitted):
                self.held[name] = tensor.clone(memory_format=torch.contiguous_format)
            else:
                held = self.held[name].clone(memory_format=torch.contiguous_format)
                held[rows] = tensor
                self.held[name] = held

    def select(self, rows: Tensor) -> RowTransform:
        """For these rows, in this order; in place where storage is fixed and the shape stays."""
        order = rows.tolist()
        twin = copy.copy(self)
        twin.fitted, twin.seen = [self.fitted[row] for row in order], [self.seen[row] for row in order]
        one = len(self.fitted) == 1 and not self.fixed

        @torch.inference_mode(False)
        def chosen(tensor: Tensor) -> Tensor:
            if one:
                return tensor.expand(len(order), *tensor.shape[1:])
            taken = tensor.index_select(0, rows.to(tensor.device))
            return tensor.copy_(taken) if self.fixed and taken.shape == tensor.shape else taken

        twin.held = {name: chosen(tensor) for name, tensor in self.held.items()}
        twin.moments = None if self.moments is None or all(twin.fitted) else chosen(self.moments)
        return twin

    def bind(self, given: Transform | None) -> RowTransform:
        """The same with another layer's transform behind it, or None: in and after a pickle."""
        twin = copy.copy(self)
        twin.given, twin.absorbed = given, given is not None and given.absorbed  # type: ignore[assignment]
        return twin

    def buffers(self) -> list[Tensor]:
        """Every tensor that is held."""
        return [*self.held.values(), *([] if self.moments is None else [self.moments])]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a file has to hold: tensors and facts."""
        tensors = dict(self.held) if self.moments is None else {**self.held, "moments": self.moments}
        return tensors, {"fitted": self.fitted, "seen": self.seen}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """The inverse of `state`.

        Raises:
            ValueError: other rows than these, or none.
        """
        fitted, seen, rows = facts["fitted"], facts["seen"], len(self.fitted)
        known = all(type(f) is bool for f in fitted) and all(type(s) is int and s >= 0 for s in seen)
        if not known or len(fitted) != rows or len(seen) != rows:
            raise ValueError("Its fitted transforms are malformed.")
        for name, held in self.held.items():
            if tensors[name].shape != held.shape or tensors[name].dtype != held.dtype:
                raise ValueError(f"Its fitted {name} is not that of its windows.")
        self._put(slice(None), {name: tensors[name] for name in self.held})
        self.fitted, self.seen, self.moments = fitted, seen, None if all(fitted) else tensors["moments"]

    def __deepcopy__(self, memo: dict[int, Any]) -> RowTransform:
        """Rows of its own; what they were made from is shared."""
        twin = copy.copy(self)
        twin.held = copy.deepcopy(self.held, memo)
        twin.moments, twin.seen, twin.fitted = copy.deepcopy(self.moments, memo), list(self.seen), list(self.fitted)
        return twin
