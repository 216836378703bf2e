"""Choosing 2-bit codes by what their error costs: error feedback, then coordinate descent in a metric.

Rounding each channel by itself is best only if all channels count alike. Where an error `e` of a row costs `e G e'`,
codes are chosen together: the first ones by error feedback (GPTQ; equally, Babai's nearest plane), improved by sweeps
in which scale and min are refitted by least squares and each code in turn takes its best value. What is stored has the
same format as ever, and is read as ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 16  # channels, after which later ones hear of the changes by one product
MAX_STRETCH = 2.0


class Metric(NamedTuple):
    """What errors of stored rows cost.

    Args:
        matrix: [..., D, D] float32, symmetric and positive definite; an error `e` of a row costs `e matrix e'`.
        factor: [..., D, D] float32, upper triangular, `factor' factor = matrix^-1`.
    """

    matrix: Tensor
    factor: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Metric:
        """The metric of a matrix [..., D, D]; its factor is computed in float64.

        Raises:
            ValueError: a matrix that is not positive definite.
        """
        inverse, failed = torch.linalg.inv_ex(matrix.double())
        factor, odd = torch.linalg.cholesky_ex(inverse)
        if bool((failed + odd).any()):
            raise ValueError("A metric must be positive definite.")
        return cls(matrix.float().contiguous(), factor.mT.float().contiguous())

    def rows(self, rows: slice | int) -> Metric:
        """For some rows of a batch: their part of matrices [B, H, D, D]; others serve all rows."""
        return self if self.matrix.dim() < 4 else Metric(self.matrix[rows], self.factor[rows])

    def __deepcopy__(self, memo: dict[int, Any]) -> Metric:
        return self  # not state of whoever holds it


def search(
    x: Tensor, scale: Tensor, minimum: Tensor, metric: Metric, sweeps: int, stretch: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and min of rows, by their error in a metric.

    Arithmetic is float32, in units of the scale given: `z = (x - minimum) / scale`, whose codes are those of `z`
    rounded half up and clamped to 0..3.

    1. Channel by channel, the code of `z_i` is taken, and `(z_i - code) factor_ij / factor_ii` off each later `z_j`.
    2. `sweeps` times: `z ~ a code + b` by least squares in the metric (`a` and `b` stay as they were where that is
       singular or `a` is not positive); then, with `w = (z - b) / a`, channel by channel the code of
       `code_i + ((w - codes) matrix)_i / matrix_ii`.
    3. Scale and min times `(<x, x> / <x, x^>) ** stretch`, of inner products in the metric; the ratio is clamped to
       `MAX_STRETCH` and its inverse, and 1 where it is not positive.

    Args:
        x: rows [..., n, D] float32.
        scale: [..., n, 1], of the first codes; positive.
        minimum: the same.
        metric: of shape [..., D, D], one for the rows of each leading index.
        sweeps: how many.
        stretch: 0 leaves the least squares' scale.

    Returns:
        tuple: codes [..., n, D] float32, scale and min [..., n, 1].
    """
    matrix, factor = metric
    unit = factor / factor.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    feedback = torch.linalg.solve_triangular(unit.mT, torch.eye(x.shape[-1], device=x.device), upper=False)
    z = ((x - minimum) / scale).mT.contiguous()  # [..., D, n], channels one below the other
    codes = _in_turn(feedback @ z, feedback)
    rates = matrix / matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    later, offset, projected = rates.triu(1), rates.sum(-1, keepdim=True), rates @ z
    a, b = torch.ones_like(scale).mT, torch.zeros_like(minimum).mT  # [..., 1, n]
    for _ in range(sweeps):
        a, b = _refit(z, codes, matrix, a, b)
        codes = _in_turn((projected - offset * b) / a - later @ codes, rates)
    minimum, scale, codes = minimum + scale * b.mT, scale * a.mT, codes.mT
    weighted = x @ matrix
    own = (weighted * x).sum(-1, keepdim=True)
    ratio = own / (weighted * (codes * scale + minimum)).sum(-1, keepdim=True)
    ratio = torch.where(ratio > 0, ratio.clamp(1 / MAX_STRETCH, MAX_STRETCH).pow(stretch), 1.0)
    return codes, scale * ratio, minimum * ratio


def _in_turn(position: Tensor, weights: Tensor) -> Tensor:
    """Channel by channel, the code nearest to `position` less `weights` times the codes of channels before.

    Args:
        position: [..., D, n].
        weights: [..., D, D], of which only what is below the diagonal counts.

    Returns:
        Tensor: codes [..., D, n].
    """
    left, codes = position + 0.5, []
    for start in range(0, position.shape[-2], BLOCK):
        stop, chosen = start + BLOCK, []
        block = left[..., start:stop, :]
        columns = weights[..., start:stop, start:stop].tril(-1).unsqueeze(-1).unbind(-2)
        for here, column in zip(block.split(1, -2), columns, strict=True):
            chosen.append(here.floor().clamp_(0, 3))
            block.addcmul_(column, chosen[-1], value=-1)
        codes.append(torch.cat(chosen, -2))
        left[..., stop:, :] -= weights[..., stop:, start:stop] @ codes[-1]
    return torch.cat(codes, -2)


def _refit(z: Tensor, codes: Tensor, matrix: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The `a` and `b` [..., 1, n] for which `a codes + b` is nearest to `z` in the metric."""
    product, ones = matrix @ codes, matrix.sum(-1, keepdim=True)  # the matrix times codes, and times ones
    cc, c1, cz = (part.sum(-2, keepdim=True) for part in (product * codes, product, product * z))
    one, oz = ones.sum(-2, keepdim=True), (ones * z).sum(-2, keepdim=True)
    determinant = cc * one - c1 * c1
    new = (cz * one - c1 * oz) / determinant
    better = (determinant > 1e-6 * cc * one) & (new > 0) & new.isfinite()
    a = torch.where(better, new, a)
    return a, torch.where(better, (oz - c1 * a) / one, b)
