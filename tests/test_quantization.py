import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oscar_hf.config import OscarConfig
from oscar_hf.quantization import MAX_STRETCH, Quantized, clip_index, dequantize, pack, quantize, unpack

HEAD_DIMS = [64, 80, 96, 128, 192, 256]
SIZES = [(size, group) for size in HEAD_DIMS for group in range(4, size + 1, 4) if size % group == 0]
RULES = ["minmax", "inner_product"]
SCALE_DTYPES = [torch.float16, torch.bfloat16]
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # relative, of one rounding
SUBNORMAL = {torch.float16: 2.0**-25, torch.bfloat16: 0.0}  # absolute, of one rounding


def oracle(x: Tensor, clip: float, group_size: int, rule: str) -> tuple[np.ndarray, ...]:
    """The format in float64: positions before rounding [rows, D], scales and mins [rows, G]."""
    exact = clipped = x.double().numpy()
    size = x.shape[-1]
    if clip < 1:
        threshold = np.sort(np.abs(exact), axis=-1)[:, [min(math.floor(clip * size), size - 1)]]
        clipped = np.clip(exact, -threshold, threshold)
    exact, clipped = (rows.reshape(len(x), -1, group_size) for rows in (exact, clipped))
    low = clipped.min(-1, keepdims=True)
    scale = np.maximum(clipped.max(-1, keepdims=True) - low, 1e-8) / 3
    positions = (clipped - low) / scale + 0.5
    if rule == "inner_product":
        levels = np.clip(np.floor(positions), 0, 3) * scale + low
        mean, level_mean = exact.mean(-1, keepdims=True), levels.mean(-1, keepdims=True)
        energy = ((exact - mean) ** 2).sum(-1, keepdims=True)
        overlap = ((exact - mean) * (levels - level_mean)).sum(-1, keepdims=True)
        gain = np.clip(energy / overlap, 1 / MAX_STRETCH, MAX_STRETCH)
        low, scale = (low - level_mean) * gain + mean, scale * gain
    return positions.reshape(len(x), -1), scale[..., 0], low[..., 0]


def rows(count: int, size: int) -> Tensor:
    """Rows with an offset and a heavy tail, of different magnitudes."""
    x = torch.randn(count, size) + 0.5 * torch.randn(count, 1)
    return x * torch.logspace(-2, 2, count)[:, None] * (1 + 4 * (torch.rand(count, size) > 0.97))


@pytest.mark.parametrize(
    ("head_dim", "clip", "index"),
    [(128, 0.96, 122), (128, 0.92, 117), (64, 0.96, 61), (64, 0.94, 60), (80, 0.96, 76), (4, 0.01, 0)],
)
def test_clip_index_goldens(head_dim: int, clip: float, index: int) -> None:
    assert clip_index(head_dim, clip) == index


@pytest.mark.parametrize(("clip", "clipped"), [(0.96, 5), (0.92, 10), (1.0, 0)])
def test_clip_flattens_the_largest_entries_of_a_row(clip: float, clipped: int) -> None:
    x = torch.arange(1.0, 129.0)[torch.randperm(128)]
    values = dequantize(quantize(x, clip=clip))
    assert values.max().item() == pytest.approx(128 - clipped, abs=0.1)
    assert values.min().item() == 1


@pytest.mark.parametrize("size", HEAD_DIMS)
def test_packing_puts_quarters_into_the_bits_of_a_byte(size: int) -> None:
    codes = torch.arange(4, dtype=torch.uint8).repeat_interleave(size // 4)
    assert pack(codes).tolist() == [0xE4] * (size // 4)
    first = torch.zeros(size, dtype=torch.uint8)
    first[size // 2 + 1] = 3
    assert pack(first).tolist() == [0, 0x30] + [0] * (size // 4 - 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_four_equidistant_values_are_lossless(rule: str, scale_dtype: torch.dtype) -> None:
    x = torch.tensor([-1.5, -0.5, 0.5, 1.5]).repeat_interleave(32)
    quantized = quantize(x, scale_rule=rule, scale_dtype=scale_dtype)
    assert quantized.affine.tolist() == [[1.0, -1.5]]
    assert quantized.codes.tolist() == [0xE4] * 32
    assert torch.equal(dequantize(quantized), x)


@pytest.mark.parametrize(
    ("row", "scale", "minimum", "codes"),
    [
        # levels 0 1 2 3, mean 1.5; <c, c^> = 1.5 * 1.5 * 2 + .25 * .5 * 2 = 4.75 and |c|^2 = 4.625
        ([0.0, 1.25, 1.75, 3.0], 37 / 38, 1.5 - 1.5 * 37 / 38, [0, 1, 2, 3]),
        # levels 0 1 1 3, means 1 and 1.25; <c, c^> = 1.25 + .125 * 2 + 3.5 = 5 and |c|^2 = 5.5
        ([0.0, 0.5, 0.5, 3.0], 1.1, 1 - 1.25 * 1.1, [0, 1, 1, 3]),
        ([3.0, 0.0, 0.0, 0.0], 1.0, 0.0, [3, 0, 0, 0]),
    ],
)
def test_inner_product_goldens(row: list[float], scale: float, minimum: float, codes: list[int]) -> None:
    quantized = quantize(torch.tensor(row), scale_rule="inner_product")
    assert unpack(quantized.codes).tolist() == codes
    assert quantized.affine[0].tolist() == pytest.approx([scale, minimum], rel=1e-3)


def test_ties_round_up() -> None:
    quantized = quantize(torch.tensor([0.0, 0.49, 0.5, 1.49, 1.5, 2.49, 2.5, 3.0]))
    assert unpack(quantized.codes).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@given(st.lists(st.lists(st.integers(0, 3), min_size=16, max_size=16), min_size=1, max_size=5))
def test_unpack_inverts_pack(codes: list[list[int]]) -> None:
    tensor = torch.tensor(codes, dtype=torch.uint8)
    packed = pack(tensor)
    assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, (len(codes), 4))
    assert torch.equal(unpack(packed), tensor)


def test_pack_inverts_unpack_for_every_byte() -> None:
    packed = torch.arange(256).to(torch.uint8)
    assert torch.equal(pack(unpack(packed)), packed)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [1.0, 0.96, 0.92])
@pytest.mark.parametrize(("size", "group_size"), SIZES)
def test_agrees_with_the_oracle(size: int, group_size: int, clip: float, rule: str) -> None:
    x = rows(12, size)
    quantized = quantize(x, clip=clip, group_size=group_size, scale_rule=rule)
    assert quantized.affine.shape == (12, size // group_size, 2)
    positions, scales, mins = oracle(x, clip, group_size, rule)
    codes = np.clip(np.floor(positions), 0, 3)
    tie = np.abs(positions - np.round(positions)) < 1e-4
    assert tie.mean() < 0.01
    np.testing.assert_array_equal(unpack(quantized.codes).numpy()[~tie], codes[~tie])
    spread = np.repeat(3 * scales + np.abs(mins), group_size, axis=1)
    values = codes * np.repeat(scales, group_size, axis=1) + np.repeat(mins, group_size, axis=1)
    tied_groups = np.repeat(tie.reshape(12, -1, group_size).any(-1), group_size, axis=1)
    error = np.abs(dequantize(quantized).numpy() - values)
    allowed = spread * EPSILON[torch.float16] * 1.01 + 4 * SUBNORMAL[torch.float16] + 1e-6 * spread
    assert (error <= allowed)[~tied_groups].all()


@pytest.mark.parametrize(("size", "group_size"), [(64, 64), (96, 32), (128, 128)])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_affine_is_rounded_once(size: int, group_size: int, scale_dtype: torch.dtype, rule: str) -> None:
    x = rows(12, size)
    affine = quantize(x, clip=0.96, group_size=group_size, scale_rule=rule, scale_dtype=scale_dtype).affine
    assert affine.dtype == scale_dtype
    positions, scales, mins = oracle(x, 0.96, group_size, rule)
    tied = (np.abs(positions - np.round(positions)) < 1e-4).reshape(12, -1, group_size).any(-1)
    for ours, theirs in ((affine[..., 0], scales), (affine[..., 1], mins)):
        allowed = np.abs(theirs) * EPSILON[scale_dtype] * 1.01 + SUBNORMAL[scale_dtype] + 1e-5 * scales
        assert (np.abs(ours.double().numpy() - theirs) <= allowed)[~tied].all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [1.0, 0.92])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e-12, 1000.0])
def test_constant_rows_come_back(value: float, clip: float, rule: str) -> None:
    restored = dequantize(quantize(torch.full((3, 64), value), clip=clip, scale_rule=rule))
    torch.testing.assert_close(restored, torch.full((3, 64), value), rtol=2**-11, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("outlier", [1.0, -1.0, 100.0])
def test_single_outlier(outlier: float, rule: str) -> None:
    x = torch.zeros(64)
    x[5] = outlier
    restored = dequantize(quantize(x, scale_rule=rule))
    torch.testing.assert_close(restored, x, rtol=2**-9, atol=abs(outlier) * 2**-9)
    clipped = dequantize(quantize(x, clip=0.96, scale_rule=rule))
    kept = 0.0 if rule == "minmax" else outlier / 64  # a clipped outlier still moves the mean
    torch.testing.assert_close(clipped, torch.full_like(x, kept), rtol=2**-10, atol=1e-7)


def extreme_rows(magnitude: float, size: int = 64) -> Tensor:
    """Rows that reach `magnitude`, one way or both ways."""
    one, ramp = torch.zeros(size), torch.linspace(-1, 1, size)
    one[3] = 1.0
    noise = torch.randn(size)
    shapes = [
        one,
        -one,
        ramp,
        ramp.abs(),
        torch.sign(ramp),
        torch.ones(size),
        noise / noise.abs().max(),
        ramp**9,
    ]
    return torch.stack(shapes) * magnitude


def assert_finite(quantized: Quantized, *dtypes: torch.dtype) -> None:
    assert quantized.affine.isfinite().all()
    for dtype in dtypes:
        assert dequantize(quantized, dtype).isfinite().all(), dtype


CASES = list(product(SCALE_DTYPES, RULES, [1.0, 0.92]))


@pytest.mark.parametrize(("scale_dtype", "rule", "clip"), CASES)
@pytest.mark.parametrize("magnitude", [6e4, 1e5, 1e9])
def test_large_values_stay_finite(magnitude: float, scale_dtype: torch.dtype, rule: str, clip: float) -> None:
    quantized = quantize(extreme_rows(magnitude), clip=clip, scale_rule=rule, scale_dtype=scale_dtype)
    assert_finite(quantized, torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("magnitude", "scale_dtype", "rule", "clip"),
    [(magnitude, *case) for magnitude in (1e20, 1e38, 3.4e38, math.inf) for case in CASES],
)
def test_values_at_the_end_of_float32_stay_finite(
    magnitude: float, scale_dtype: torch.dtype, rule: str, clip: float
) -> None:
    x = extreme_rows(magnitude).nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
    quantized = quantize(x, clip=clip, scale_rule=rule, scale_dtype=scale_dtype)
    assert_finite(quantized, torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("magnitude", "scale_dtype"),
    [
        *product([1e5, 1e15], SCALE_DTYPES),
        (3.4e38, torch.float16),
        (3.4e38, torch.bfloat16),
    ],
)
def test_saturated_values_keep_their_order(magnitude: float, scale_dtype: torch.dtype) -> None:
    values = dequantize(quantize(torch.linspace(-1, 1, 64) * magnitude, scale_dtype=scale_dtype))
    assert (values.diff() >= 0).all()
    assert values[0] < 0 < values[-1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_largest_float16_rows_dequantise_to_float16(scale_dtype: torch.dtype, rule: str) -> None:
    x = extreme_rows(65504.0).half()
    assert_finite(quantize(x, scale_rule=rule, scale_dtype=scale_dtype), torch.float16)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_an_outlier_of_1e5_keeps_its_row_usable(scale_dtype: torch.dtype) -> None:
    x = torch.randn(64)
    x[7] = 1e5
    reachable = min(1e5, torch.finfo(scale_dtype).max)
    unclipped = dequantize(quantize(x, scale_dtype=scale_dtype))
    assert unclipped[7].item() == pytest.approx(reachable, rel=0.01)
    clipped = dequantize(quantize(x, clip=0.96, scale_dtype=scale_dtype))
    others = torch.arange(64) != 7
    assert (clipped - x)[others].abs().max() < x[others].abs().max() / 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_arithmetic_is_float32_whatever_comes_in(dtype: torch.dtype, rule: str) -> None:
    x = rows(8, 64).to(dtype)
    narrow, wide = (quantize(states, clip=0.96, scale_rule=rule) for states in (x, x.float()))
    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.affine, wide.affine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantize_rounds_once_to_the_dtype_asked_for(dtype: torch.dtype) -> None:
    quantized = quantize(rows(8, 64))
    assert torch.equal(dequantize(quantized, dtype), dequantize(quantized).to(dtype))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("leading", [(), (0,), (5,), (2, 3), (2, 1, 3, 2)])
def test_leading_shape_is_kept(leading: tuple, rule: str) -> None:
    quantized = quantize(torch.randn(*leading, 64), clip=0.92, group_size=16, scale_rule=rule)
    assert quantized.codes.shape == (*leading, 16)
    assert quantized.affine.shape == (*leading, 4, 2)
    assert dequantize(quantized).shape == (*leading, 64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("view", "same_sums"),
    [
        (lambda: torch.randn(4, 6, 64).transpose(0, 1), True),
        (lambda: torch.randn(4, 6, 192)[:, 1::2, 64:128], True),
        (lambda: torch.randn(6, 1, 64).expand(6, 4, 64), True),
        (lambda: torch.randn(4, 64, 6).mT, False),
        (lambda: torch.randn(4, 6, 128)[..., ::2], False),
    ],
)
def test_memory_layout_does_not_matter(view: Callable[[], Tensor], same_sums: bool, rule: str) -> None:
    x = view()
    assert not x.is_contiguous()
    untouched = x.clone()
    settings = {"clip": 0.96, "group_size": 32, "scale_rule": rule}
    strided, packed = quantize(x, **settings), quantize(x.contiguous(), **settings)
    assert torch.equal(strided.codes, packed.codes)
    tolerance = 0.0 if same_sums else 2**-10  # channels far apart are summed in another order
    torch.testing.assert_close(strided.affine, packed.affine, rtol=tolerance, atol=0.0)
    assert torch.equal(x, untouched)


@pytest.mark.parametrize("rule", RULES)
def test_rows_do_not_depend_on_each_other(rule: str) -> None:
    x = rows(9, 96)
    x[4] = 1e9
    together = quantize(x, clip=0.96, group_size=48, scale_rule=rule)
    for index, row in enumerate(x):
        alone = quantize(row, clip=0.96, group_size=48, scale_rule=rule)
        assert torch.equal(together.codes[index], alone.codes)
        assert torch.equal(together.affine[index], alone.affine)


def test_groups_do_not_depend_on_each_other_without_clipping() -> None:
    x = rows(4, 128)
    whole = quantize(x, group_size=32, scale_rule="inner_product")
    for index in range(4):
        part = quantize(x[:, 32 * index : 32 * (index + 1)], scale_rule="inner_product")
        assert torch.equal(unpack(whole.codes)[:, 32 * index : 32 * (index + 1)], unpack(part.codes))
        assert torch.equal(whole.affine[:, index], part.affine[:, 0])


@pytest.mark.parametrize("clip", [1.0, 0.94, 0.92])
@pytest.mark.parametrize(("size", "group_size"), [(64, 64), (64, 16), (80, 20), (128, 128), (192, 96)])
def test_inner_product_rule_keeps_inner_products(size: int, group_size: int, clip: float) -> None:
    x = torch.randn(200, size) + 0.5 * torch.randn(200, 1)
    settings = {"clip": clip, "group_size": group_size}
    plain = quantize(x, **settings)
    stretched = quantize(x, scale_rule="inner_product", **settings)
    assert torch.equal(plain.codes, stretched.codes)
    groups, values = (t.double().unflatten(-1, (-1, group_size)) for t in (x, dequantize(stretched)))
    centred = groups - groups.mean(-1, keepdim=True)
    energy = centred.square().sum(-1)
    kept = (centred * (values - values.mean(-1, keepdim=True))).sum(-1)
    stretch = stretched.affine[..., 0].double() / plain.affine[..., 0].double()
    free = (stretch > 1.01 / MAX_STRETCH) & (stretch < 0.99 * MAX_STRETCH)
    assert free.double().mean() > 0.95
    torch.testing.assert_close((kept / energy)[free], torch.ones_like(energy[free]), rtol=0, atol=2**-10)
    torch.testing.assert_close(values.mean(-1), groups.mean(-1), rtol=0, atol=5e-3)


def test_stretch_is_bounded() -> None:
    lost = torch.randn(64) * 0.01
    lost[0] = 1000.0  # clipped away: what is left cannot carry its energy
    swollen = torch.tensor([1.4, 1.6]).repeat(128)
    swollen[:2] = torch.tensor([0.0, 3.0])  # the rest becomes 1 and 2, five times as far apart
    for row, clip, stretch in ((lost, 0.96, 2.0), (swollen, 1.0, 0.5)):
        plain, stretched = (quantize(row, clip=clip, scale_rule=rule).affine[0, 0] for rule in RULES)
        assert (stretched / plain).item() == pytest.approx(stretch, rel=2**-9)


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("size", "group_size"), [*SIZES, *((size, None) for size in HEAD_DIMS)])
def test_stored_bytes_are_the_configured_bits(size: int, group_size: int | None, scale_dtype: str) -> None:
    config = OscarConfig(group_size=group_size, scale_dtype=scale_dtype)  # type: ignore[arg-type]
    x = torch.randn(3, 5, size)
    quantized = quantize(x, group_size=config.group_size, scale_dtype=getattr(torch, config.scale_dtype))
    stored = sum(part.numel() * part.element_size() for part in quantized)
    assert 8 * stored / x.numel() == pytest.approx(config.bits_per_element(size), abs=1e-12)
