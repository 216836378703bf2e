"""The search kernel against its twin in plain torch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_kernels_write import BRAIN, DEVICES, HALF, SINGLE, buffers, moved, states
from torch import Tensor

from oscar_hf.kernels.reference_write import search_into_reference, search_step_reference
from oscar_hf.kernels.search import search_into, search_step
from oscar_hf.quantization import Quantized, dequantize
from oscar_hf.search import Metric

# The interpreter computes nan and inf in numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def make_metric(*shape: int) -> dict[str, Tensor]:
    """A metric [*shape, D, D] of queries in a few directions."""
    size = shape[-1]
    queries = torch.randn(*shape[:-1], size // 4, size) * 2
    metric = Metric.of(0.9 * queries.mT @ queries / size + 0.1 * torch.eye(size))
    return {"metric": metric.matrix, "factor": metric.factor}


def assert_equal_to_ties(got: dict[str, Any], expected: dict[str, Any], rows: Tensor) -> None:
    """Equal but for rows where a sum in another order has tipped a code; these are as good by their error."""
    ours, theirs = (Quantized(side["codes"].cpu(), side["affine"].cpu()) for side in (got, expected))
    written = ~theirs.affine.isnan().flatten(-2).any(-1)
    assert torch.equal(~ours.affine.isnan().flatten(-2).any(-1), written)
    assert torch.equal(ours.codes[~written], theirs.codes[~written])
    tipped = written & (ours.codes != theirs.codes).any(-1)
    assert tipped.sum() <= 1 + 0.02 * written.sum()
    same = written & ~tipped
    unit = {HALF: 4e-3, BRAIN: 2e-2}[theirs.affine.dtype]
    torch.testing.assert_close(ours.affine[same].float(), theirs.affine[same].float(), rtol=unit, atol=1e-4)
    matrix = expected["metric"].expand(*rows.shape[:2], *expected["metric"].shape[-2:])
    costs = []
    for side in (ours, theirs):
        error = (dequantize(side)[:, :, : rows.shape[2]] - rows.float()).nan_to_num()
        costs.append(((error @ matrix) * error).sum(-1)[written[:, :, : rows.shape[2]]].mean())
    torch.testing.assert_close(*costs, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("n", "size", "dtype", "affine", "outer", "sweeps", "clip"),
    [
        (5, 128, BRAIN, HALF, (1, 2), 1, 0.92),
        (4, 64, HALF, HALF, (2, 1), 3, 0.92),
        (1, 96, SINGLE, BRAIN, (1, 1), 1, 0.94),
        (3, 80, BRAIN, HALF, (), 0, 1.0),
        (3, 32, HALF, BRAIN, (2, 1), 2, 0.9),
        (5, 64, BRAIN, HALF, (2, 2), 1, 0.93),
    ],
)
def test_search_into(
    n: int, size: int, dtype: torch.dtype, affine: torch.dtype, outer: tuple[int, ...], sweeps: int, clip: float,
    device: str,
) -> None:  # fmt: skip
    """Strided rows and places; a metric by row, by head or for all; nothing written outside."""
    batch, heads = outer or (1, 2)
    made = buffers(batch, heads, size, dtype=dtype, affine=affine, capacity=12)
    rows = states(batch, heads, n, size, dtype=dtype)
    if n > 2:
        rows[:, :, 1] = 0.0
        rows[:, :, 2] = 7.0
    given = {
        "rows": rows, "codes": made["k_codes"], "affine": made["k_affine"],
        **make_metric(*(outer if clip == 0.93 else outer[1:]), size),
        "start": 4, "clip": clip, "sweeps": sweeps, "stretch": 1.2,
    }  # fmt: skip
    got, expected = moved(given, device), moved(given, "cpu")
    search_into(**got)
    search_into_reference(**expected)
    for side in (got, expected):
        side["codes"], side["affine"] = side["codes"][:, :, 4:], side["affine"][:, :, 4:]
    assert_equal_to_ties(got, expected, rows)


def test_rows_that_saturate(device: str) -> None:
    rows = torch.randn(1, 1, 4, 32)
    rows[0, 0, 1, 3], rows[0, 0, 2, 5] = 1e20, -1e20
    made = buffers(1, 1, 32, dtype=SINGLE, capacity=4)
    given = {
        "rows": rows, "codes": made["k_codes"], "affine": made["k_affine"], **make_metric(32), "clip": 0.92,
        "sweeps": 1, "stretch": 1.0,
    }  # fmt: skip
    got, expected = moved(given, device), moved(given, "cpu")
    search_into(**got)
    search_into_reference(**expected)
    assert bool(got["affine"].isfinite().all())
    torch.testing.assert_close(got["affine"].cpu(), expected["affine"], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("n, outer", [(1, (2,)), (3, (2,)), (3, (4, 2))])
def test_search_step(n: int, outer: tuple[int, ...], device: str) -> None:
    """Rows of every kind: nothing leaves, the first leaves, around the ring, above a floor, beyond the capacity."""
    size, recent, spare, capacity = 32, 16, 8, 40
    made = buffers(4, 2, size, dtype=BRAIN, ring=recent + spare, capacity=capacity)
    ring = made["recent_keys"].copy_(torch.randn(made["recent_keys"].shape))
    given = {
        "ring": ring, "codes": made["k_codes"], "affine": made["k_affine"], **make_metric(*outer, size),
        "lengths": torch.tensor([3, 20, 41, 59], dtype=torch.int32),
        "floors": torch.tensor([0, 0, 22, 0], dtype=torch.int32),
        "n": n, "sinks": 4, "recent": recent, "clip": 0.92, "sweeps": 1, "stretch": 1.2,
    }  # fmt: skip
    got, expected = moved(given, device), moved(given, "cpu")
    search_step(**got)
    search_step_reference(**expected)
    assert torch.equal(got["codes"].cpu()[0], given["codes"][0])
    assert bool(torch.isfinite(expected["affine"][1, :, 0].float()).all())
    torch.testing.assert_close(got["codes"].cpu(), expected["codes"], rtol=0, atol=0)
    torch.testing.assert_close(got["affine"].cpu(), expected["affine"], equal_nan=True, rtol=4e-3, atol=1e-4)
