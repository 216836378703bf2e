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
    matrix = metric.matrix
    z = ((x - minimum) / scale).mT.contiguous()  # [..., D, n], channels one below the other
    codes = _feedback(z, metric.factor)
    ones = matrix.sum(-1, keepdim=True)  # [..., D, 1]
    projected = matrix @ z
    a, b = torch.ones_like(scale).mT, torch.zeros_like(minimum).mT  # [..., 1, n]
    for _ in range(sweeps):
        product = matrix @ codes
        a, b = _refit(z, codes, product, ones, a, b)
        _descend(codes, (projected - ones * b) / a - product, matrix)
    minimum, scale, codes = minimum + scale * b.mT, scale * a.mT, codes.mT
    weighted = x @ matrix
    own = (weighted * x).sum(-1, keepdim=True)
    ratio = own / (weighted * (codes * scale + minimum)).sum(-1, keepdim=True)
    ratio = torch.where(ratio > 0, ratio.clamp(1 / MAX_STRETCH, MAX_STRETCH).pow(stretch), 1.0)
    return codes, scale * ratio, minimum * ratio


def _feedback(z: Tensor, factor: Tensor) -> Tensor:
    """Codes [..., D, n] of positions [..., D, n]; later channels make up for the errors of earlier ones."""
    shares = factor / factor.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    left, codes = z + 0.5, []
    for start in range(0, z.shape[-2], BLOCK):
        stop = start + BLOCK
        block, chosen = left[..., start:stop, :], []
        weights = shares[..., start:stop, start:stop, None].unbind(-3)
        for i, here in enumerate(block.split(1, -2)):
            code = here.floor().clamp_(0, 3)
            chosen.append(code)
            block[..., i + 1 :, :].addcmul_(weights[i][..., i + 1 :, :], here - code - 0.5, value=-1)
        codes.append(torch.cat(chosen, -2))
        left[..., stop:, :] -= shares[..., start:stop, stop:].mT @ (block - codes[-1] - 0.5)
    return torch.cat(codes, -2)


def _refit(z: Tensor, codes: Tensor, product: Tensor, ones: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The `a` and `b` [..., 1, n] for which `a codes + b` is nearest to `z`; `product` is the matrix times codes."""
    cc, c1, cz = ((product * other).sum(-2, keepdim=True) for other in (codes, torch.ones_like(codes), z))
    one, oz = ones.sum(-2, keepdim=True), (ones * z).sum(-2, keepdim=True)
    determinant = cc * one - c1 * c1
    new = (cz * one - c1 * oz) / determinant
    better = (determinant > 1e-6 * cc * one) & (new > 0) & new.isfinite()
    a = torch.where(better, new, a)
    return a, torch.where(better, (oz - c1 * a) / one, b)


def _descend(codes: Tensor, residual: Tensor, matrix: Tensor) -> None:
    """One sweep over codes [..., D, n], in place; `residual` [..., D, n] is the matrix times what they lack."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    shares = matrix / diagonal
    best = residual / diagonal + codes + 0.5  # where each code would be, the others being what they are
    for start in range(0, codes.shape[-2], BLOCK):
        stop = start + BLOCK
        block, held, chosen = best[..., start:stop, :], codes[..., start:stop, :], []
        weights = shares[..., start:stop, start:stop, None].unbind(-2)
        for i, (here, old) in enumerate(zip(block.split(1, -2), held.split(1, -2), strict=True)):
            code = here.floor().clamp_(0, 3)
            chosen.append(code)
            block[..., i + 1 :, :].addcmul_(weights[i][..., i + 1 :, :], code - old, value=-1)
        new = torch.cat(chosen, -2)
        best[..., stop:, :] -= shares[..., stop:, start:stop] @ (new - held)
        held.copy_(new)
