"""The matrices that transforms are made of: Hadamard, bit reversal, eigenbases, the balanced transform, the metric."""

from __future__ import annotations

import torch
from torch import Tensor

METRIC_RIDGE = 0.1


def _power_of_two(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size


def hadamard(size: int) -> Tensor:
    """Orthonormal Sylvester Hadamard matrix [size, size], float64.

    Where `size` is not a power of two: block-diagonal, of equal blocks of the largest power of two that divides it.
    """
    block = _power_of_two(size)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
    return torch.block_diag(*[matrix] * (size // block))


def bit_reversal(size: int) -> Tensor:
    """Index permutation [size]: entry `i` is `i` with its bits in reverse order.

    Where `size` is m times a power of two, entries `m r`, `m r + 1`, ... are the bit-reversed r of Hadamard blocks
    0, 1, ..., so that neighbours come from different blocks.
    """
    block = _power_of_two(size)
    reversed_bits = torch.zeros(block, dtype=torch.long)
    for bit in range(block.bit_length() - 1):
        reversed_bits = reversed_bits << 1 | torch.arange(block) >> bit & 1
    return (reversed_bits[:, None] + torch.arange(size // block) * block).flatten()


def compose_rotation(covariance: Tensor) -> Tensor:
    """`U H P`: eigenvectors of a covariance [..., D, D], Hadamard, bit reversal; orthogonal, float64.

    Eigenvalues ascend, and column j of the result is column `D - 1 - bit_reversal[j]` of `U H`: the published
    order (reference, section a). Where H has several blocks, each gets every m-th eigenvector.
    """
    size = covariance.shape[-1]
    blocks = size // _power_of_two(size)
    eigenvectors = torch.linalg.eigh(covariance.double()).eigenvectors
    interleaved = torch.arange(size).view(-1, blocks).T.flatten()
    return (eigenvectors[..., interleaved] @ hadamard(size))[..., size - 1 - bit_reversal(size)]


def matrix_power(matrix: Tensor, exponent: float) -> Tensor:
    """A power of symmetric positive definite matrices [..., D, D]."""
    values, vectors = torch.linalg.eigh(matrix)
    tiny = torch.finfo(matrix.dtype).tiny
    return (vectors * values.clamp_min(tiny).pow(exponent).unsqueeze(-2)) @ vectors.mT


def geometric_mean(a: Tensor, b: Tensor, weight: float = 0.5) -> Tensor:
    """`a^1/2 (a^-1/2 b a^-1/2)^weight a^1/2` of symmetric positive definite matrices [..., D, D]: from a to b."""
    root, inverse_root = matrix_power(a, 0.5), matrix_power(a, -0.5)
    return root @ matrix_power(inverse_root @ b @ inverse_root, weight) @ root


def balanced_transform(keys: Tensor, queries: Tensor, alpha: float, ridge: float, balance: float = 0.5) -> Tensor:
    """`M ** (alpha / 2) H`, M the geometric mean of `keys^-1` and `queries`, covariances [..., D, D], by `balance`.

    With an isotropic quantiser, alpha 1 and balance 1/2 give the least error of logits (design, method.md,
    section 2). One that takes `error_metric` into account does better with smaller ones.
    """

    def regularized(covariance: Tensor) -> Tensor:
        size = covariance.shape[-1]
        trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        identity = torch.eye(size, dtype=covariance.dtype)
        return covariance * torch.where(trace > 0, size / trace, 0.0) + ridge * identity

    mean = geometric_mean(torch.linalg.inv(regularized(keys.double())), regularized(queries.double()), balance)
    return matrix_power(mean, alpha / 2) @ hadamard(keys.shape[-1])


def error_metric(q_rotation: Tensor, queries: Tensor) -> Tensor:
    """What an error of a stored key costs: the matrix `G` [..., D, D] of the mean squared error `e G e'` of logits.

    Args:
        q_rotation: [..., D, D].
        queries: second moment of queries [..., D, D], in the model's basis.

    Returns:
        Tensor: float64, symmetric, trace D; a tenth of it is the identity, against what calibration did not see.
    """
    rotation = q_rotation.double()
    metric = rotation.mT @ queries.double() @ rotation
    metric = (metric + metric.mT) / 2
    trace = metric.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    identity = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    metric = torch.where(trace > 0, metric * (metric.shape[-1] / trace), identity)
    return (1 - METRIC_RIDGE) * metric + METRIC_RIDGE * identity
