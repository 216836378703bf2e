"""Write kernels against their twins in plain torch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from oscar_hf.kernels.append import rotate_and_append  # noqa: E402
from oscar_hf.kernels.reference_write import (  # noqa: E402
    quantize_into_reference,
    rotate_and_append_reference,
    write_chunk_reference,
)
from oscar_hf.kernels.write import quantize_into, write_chunk  # noqa: E402
from oscar_hf.quantization import Quantized, dequantize  # noqa: E402

# The interpreter computes nan and inf in numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-16}
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def buffers(
    batch: int, heads: int, size: int, *, dtype: torch.dtype, affine: torch.dtype = HALF, groups: int = 1,
    sink: int = 4, ring: int = 24, capacity: int = 160,
) -> dict[str, Tensor]:  # fmt: skip
    """All buffers of a layer, poisoned: windows and affine with NaN, codes with noise; history head-major, strided."""
    windows = {
        f"{part}_{name}": torch.full((batch, heads, slots, size), float("nan"), dtype=dtype)
        for part, slots in (("sink", sink), ("recent", ring))
        for name in ("keys", "values")
    }
    history = {}
    for name in "kv":
        codes = torch.randint(0, 256, (batch, heads, capacity + 3, size // 4), dtype=torch.uint8)
        history[f"{name}_codes"] = codes[:, :, :capacity]
        parts = torch.full((batch, heads, capacity + 3, groups, 2), float("nan"), dtype=affine)
        history[f"{name}_affine"] = parts[:, :, :capacity]
    return {**windows, **history}


def states(*shape: int, dtype: torch.dtype) -> Tensor:
    """Rows [B, H, n, D] as a projection leaves them: a transposed view, with NaN behind every row."""
    batch, heads, n, size = shape
    whole = torch.full((batch, n + 1, heads, size + 16), float("nan"), dtype=dtype)
    whole[:, :n, :, :size] = torch.randn(batch, n, heads, size)
    return whole[:, :n, :, :size].transpose(1, 2)


def rotation(size: int, *outer: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*outer, size, size))[0].contiguous()


def moved(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """Copies on the device; strides stay."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        base = x._base if x._base is not None else x
        return base.clone().to(device).as_strided(x.shape, x.stride(), x.storage_offset())

    return {name: copy(x) for name, x in arguments.items()}


def assert_same(got: Tensor, expected: Tensor, name: str, units: int = 0) -> None:
    """Equal bits, or at most `units` apart in the last place; poison that was not overwritten is equal too."""
    got = got.cpu()
    if got.dtype == torch.uint8 or not units:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
        assert torch.equal(got.view(bits), expected.view(bits)), name
        return
    assert torch.equal(got.isnan(), expected.isnan()), name
    steps = (got.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    near = (got.float() - expected.float()).abs() < 1e-5
    assert bool(((steps <= units) | near).all()), name


def assert_buffers(
    got: dict[str, Any], expected: dict[str, Any], *, exact: bool, rule: str, dtype: torch.dtype
) -> None:
    for name in ("sink_keys", "sink_values", "recent_keys", "recent_values"):
        if exact:
            assert_same(got[name], expected[name], name)
        else:
            tolerance = {"rtol": 2 * UNIT[dtype], "atol": UNIT[dtype]}
            torch.testing.assert_close(got[name].cpu(), expected[name], equal_nan=True, **tolerance)
    for name in "kv":
        codes, affine = f"{name}_codes", f"{name}_affine"
        if exact:
            units = 0 if rule == "minmax" and expected[affine].dtype == HALF else 1
            assert_same(got[codes], expected[codes], codes)
            assert_same(got[affine], expected[affine], affine, units)
            continue
        ours, theirs = (Quantized(side[codes].cpu(), side[affine].cpu()) for side in (got, expected))
        written = ~theirs.affine.isnan().flatten(-2).any(-1)
        assert torch.equal(~ours.affine.isnan().flatten(-2).any(-1), written)
        assert torch.equal(ours.codes[~written], theirs.codes[~written])
        error = (dequantize(ours) - dequantize(theirs))[written].abs()
        if error.numel():
            assert error.max() < 1.1 * theirs.affine[written].float()[..., 0].max()
            assert error.mean() < 4 * UNIT[dtype]


def adversarial(size: int, dtype: torch.dtype) -> Tensor:
    """Rows [1, 1, 16, D] on which a clip threshold or a code is easily got wrong."""
    x = torch.randn(1, 1, 16, size)
    rows = x[0, 0]
    rows[0] = 0
    rows[1] = 3.25
    rows[2] = 0
    rows[2, 5] = 1000.0
    rows[3] = 1e-40
    rows[4] *= 1e-9
    rows[5] = torch.randint(-3, 4, (size,)).float()
    rows[6, 3] = 1e30
    rows[7, : size // 2 + 3] = 0
    rows[8] *= 1e-41
    rows[9] = torch.arange(size) % 7
    rows[10, 1] = -600.0
    rows[11] = -0.0
    rows[12] = torch.randn(size).sign()
    rows[13] = 100 + torch.randn(size)
    rows[14] = 2.0 ** (torch.arange(size) % 16 - 8)  # wider, codes are nearer to ties than products are exact
    rows[15, 0] = float("inf")
    return x.to(dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "affine", "clip", "rule", "groups"),
    [
        (128, BRAIN, HALF, 0.94, "inner_product", 1),
        (128, HALF, HALF, 0.92, "minmax", 1),
        (64, SINGLE, HALF, 0.9, "minmax", 1),
        (80, BRAIN, BRAIN, 0.96, "minmax", 1),
        (96, HALF, HALF, 0.5, "inner_product", 3),
        (192, BRAIN, HALF, 1.0, "inner_product", 1),
        (256, SINGLE, BRAIN, 0.97, "inner_product", 8),
        (256, BRAIN, HALF, 0.999, "minmax", 2),
    ],
)
def test_quantize_adversarial_rows(
    size: int, dtype: torch.dtype, affine: torch.dtype, clip: float, rule: str, groups: int, device: str
) -> None:
    rows = adversarial(size, dtype)
    if rule == "inner_product":
        rows[0, 0, 8] = rows[0, 0, 4]  # squares of denormals underflow in either order
    made = buffers(1, 1, size, dtype=dtype, affine=affine, groups=groups)
    got, expected = moved(made, device), moved(made, "cpu")
    quantize_into(rows.to(device), got["k_codes"], got["k_affine"], 5, clip=clip, scale_rule=rule)
    quantize_into_reference(rows, expected["k_codes"], expected["k_affine"], 5, clip=clip, scale_rule=rule)
    units = 0 if rule == "minmax" and affine == HALF else 1
    assert_same(got["k_codes"], expected["k_codes"], "codes")
    assert_same(got["k_affine"], expected["k_affine"], "affine", units)


def test_quantize_not_a_number(device: str) -> None:
    """A row of NaN spoils itself alone."""
    rows = torch.randn(1, 1, 8, 128, dtype=HALF)
    made = buffers(1, 1, 128, dtype=HALF)
    expected = moved(made, "cpu")
    quantize_into_reference(rows, expected["k_codes"], expected["k_affine"], 0, clip=0.94)
    rows[0, 0, 3] = float("nan")
    got = moved(made, device)
    quantize_into(rows.to(device), got["k_codes"], got["k_affine"], 0, clip=0.94)
    others = [row for row in range(160) if row != 3]
    assert torch.equal(got["k_codes"].cpu()[:, :, others], expected["k_codes"][:, :, others])


def test_quantize_stops_at_the_capacity(device: str) -> None:
    rows = torch.randn(1, 2, 9, 64, dtype=HALF)
    made = buffers(1, 2, 64, dtype=HALF, capacity=10)
    got, expected = moved(made, device), moved(made, "cpu")
    quantize_into(rows.to(device), got["v_codes"], got["v_affine"], 6)
    quantize_into_reference(rows, expected["v_codes"], expected["v_affine"], 6)
    for name in ("v_codes", "v_affine"):
        strided = [side[name]._base for side in (got, expected)]
        assert_same(strided[0], strided[1], name)


@pytest.mark.parametrize(
    ("n", "start", "heads", "size", "dtype", "affine", "groups", "rule", "clip"),
    [
        (1, 0, 2, 64, HALF, HALF, 1, "minmax", 1.0),
        (1, 40, 1, 128, BRAIN, HALF, 1, "inner_product", 0.94),
        (63, 0, 1, 128, BRAIN, HALF, 1, "inner_product", 0.94),
        (127, 2, 1, 96, HALF, HALF, 2, "minmax", 0.92),
        (129, 5, 1, 80, BRAIN, BRAIN, 1, "inner_product", 0.92),
        (129, 0, 1, 192, SINGLE, HALF, 1, "minmax", 0.95),
    ],
)
def test_write_chunk(
    n: int, start: int, heads: int, size: int, dtype: torch.dtype, affine: torch.dtype, groups: int, rule: str,
    clip: float, device: str,
) -> None:  # fmt: skip
    """As they come: bits are equal, poison included."""
    batch = 2 if n == 1 else 1
    made = buffers(batch, heads, size, dtype=dtype, affine=affine, groups=groups)
    given = {
        **made, "keys": states(batch, heads, n, size, dtype=dtype),
        "values": states(batch, heads, n, size, dtype=dtype),
        "k_mean": None, "k_rotation": None, "v_rotation": None, "start": start,
        "flushed": max(start + n - 4 - 20, 0), "k_clip": clip, "v_clip": min(1.0, clip + 0.02), "scale_rule": rule,
    }  # fmt: skip
    got, expected = moved(given, device), moved(given, "cpu")
    write_chunk(**got)
    write_chunk_reference(**expected)
    assert_buffers(got, expected, exact=True, rule=rule, dtype=dtype)


@pytest.mark.parametrize(
    ("n", "size", "dtype", "outer", "mean", "absorbed"),
    [
        (40, 128, BRAIN, (2,), True, True),
        (65, 64, HALF, (), True, False),
        (16, 96, SINGLE, (2, 2), True, False),
        (14, 192, BRAIN, (2,), True, True),
    ],
)
def test_write_chunk_rotated(
    n: int, size: int, dtype: torch.dtype, outer: tuple[int, ...], mean: bool, absorbed: bool, device: str
) -> None:
    batch, heads = (1, *outer)[-2:] if outer else (1, 1)
    made = buffers(batch, heads, size, dtype=dtype)
    given = {
        **made, "keys": states(batch, heads, n, size, dtype=dtype),
        "values": states(batch, heads, n, size, dtype=dtype),
        "k_mean": torch.randn(*(outer or (heads,)), size) if mean else None, "k_rotation": rotation(size, *outer),
        "v_rotation": None if absorbed else rotation(size, *outer), "start": 3, "flushed": n - 10, "k_clip": 0.94,
        "v_clip": 0.92, "scale_rule": "minmax",
    }  # fmt: skip
    got, expected = moved(given, device), moved(given, "cpu")
    write_chunk(**got)
    write_chunk_reference(**expected)
    assert_buffers(got, expected, exact=False, rule="minmax", dtype=dtype)


@pytest.mark.parametrize(
    ("n", "heads", "group", "size", "dtype", "outer", "mean", "absorbed", "groups", "rule"),
    [
        (1, 2, 4, 128, BRAIN, (2,), True, True, 1, "inner_product"),
        (1, 1, 3, 96, HALF, None, False, True, 2, "minmax"),
        (8, 1, 1, 64, SINGLE, (), True, False, 1, "minmax"),
        (5, 1, 2, 80, BRAIN, (4, 1), True, False, 1, "minmax"),
        (3, 1, 1, 256, HALF, (1,), True, True, 4, "inner_product"),
    ],
)
def test_rotate_and_append(
    n: int, heads: int, group: int, size: int, dtype: torch.dtype, outer: tuple[int, ...] | None, mean: bool,
    absorbed: bool, groups: int, rule: str, device: str,
) -> None:  # fmt: skip
    """Rows of every kind: across the sink's end, flushing at 0, above a floor, and beyond the capacity."""
    capacity, recent, spare = 40, 16, 8
    lengths, floors = [3, 19, 41, 59], [0, 0, 26, 0]
    made = buffers(4, heads, size, dtype=dtype, groups=groups, ring=recent + spare, capacity=capacity)
    for name in ("recent_keys", "recent_values"):
        made[name].copy_(torch.randn(made[name].shape))
    turn = None if outer is None else rotation(size, *outer)
    given = {
        **made, "query": states(4, heads * group, n, size, dtype=dtype),
        "key": states(4, heads, n, size, dtype=dtype), "value": states(4, heads, n, size, dtype=dtype),
        "lengths": torch.tensor(lengths, dtype=torch.int32), "floors": torch.tensor(floors, dtype=torch.int32),
        "k_mean": torch.randn(*(outer or (heads,)), size) if mean else None, "q_rotation": turn, "k_rotation": turn,
        "v_rotation": None if absorbed else turn, "recent": recent, "scaling": size**-0.5, "k_clip": 0.94,
        "v_clip": 1.0, "scale_rule": rule,
    }  # fmt: skip
    got, expected = moved(given, device), moved(given, "cpu")
    ours, theirs = rotate_and_append(**got), rotate_and_append_reference(**expected)
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)
    for name in ("sink_keys", "sink_values", "recent_keys", "recent_values"):  # new rows: a rounding apart at most
        tolerance = {"rtol": 2 * UNIT[dtype], "atol": UNIT[dtype]} if outer is not None else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(got[name].cpu(), expected[name], equal_nan=True, **tolerance)
        if name.startswith("recent"):
            same = (got[name].cpu() == given[name]).all(-1)
            for row, length in enumerate(lengths):
                new = {token % (recent + spare) for token in range(length, length + n)}
                assert bool(same[row][:, [slot for slot in range(recent + spare) if slot not in new]].all()), name
        got[name] = expected[name]
    assert_buffers(got, expected, exact=True, rule=rule, dtype=dtype)  # history: of ring rows, so of equal bits
    for name in ("k_codes", "v_affine"):  # what lies behind the capacity
        assert_same(got[name]._base, expected[name]._base, name, 0 if name == "k_codes" else 1)
    assert torch.equal(got["lengths"].cpu(), given["lengths"])
