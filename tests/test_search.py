"""Codes chosen by what their error costs: against brute force, by hand, and at the edges of the format."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_layer import KV_HEADS, SIZE, feed, make_layer, random_rotation, random_states
from tiny import tiny_model
from torch import Tensor

from oscar_hf import OscarConfig, OscarQuantizedCache, calibrate, patch_model, unpatch_model
from oscar_hf._compat import cache_argument
from oscar_hf.layer import OscarLayer
from oscar_hf.quantization import SATURATION, Quantized, dequantize, quantize, unpack
from oscar_hf.rotation import LayerRotation
from oscar_hf.search import Metric, search
from oscar_hf.transform import Transform

TOKENS = torch.randint(3, 128, (1200,), generator=torch.manual_seed(3))


def metric(size: int, *leading: int, spread: float = 2.0) -> Metric:
    """Of trace `size`, with eigenvalues over some orders of magnitude."""
    vectors = torch.linalg.qr(torch.randn(*leading, size, size, dtype=torch.float64)).Q
    matrix = (vectors * torch.logspace(0, -spread, size, dtype=torch.float64)) @ vectors.mT
    return Metric.of(matrix * size / matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None])


def cost(x: Tensor, rows: Quantized | Tensor, metric: Metric) -> Tensor:
    """`e G e'` of each row, float64."""
    error = (rows if isinstance(rows, Tensor) else dequantize(rows)).double() - x.double()
    return ((error @ metric.matrix.double()) * error).sum(-1)


def by_hand(x: np.ndarray, clip: float, matrix: np.ndarray, sweeps: int, stretch: float) -> tuple[np.ndarray, ...]:
    """One row in float64, channel by channel: codes, scale, min."""
    bound = np.sort(np.abs(x))[min(math.floor(clip * len(x)), len(x) - 1)] if clip < 1 else np.inf
    clipped = np.clip(x, -bound, bound)
    low, scale = clipped.min(), max(np.ptp(clipped), 1e-8) / 3
    upper = np.linalg.cholesky(np.linalg.inv(matrix)).T
    left, codes = x.copy(), np.zeros(len(x))
    for i in range(len(x)):
        codes[i] = np.clip(np.floor((left[i] - low) / scale + 0.5), 0, 3)
        error = left[i] - (codes[i] * scale + low)
        left[i:] -= error / upper[i, i] * upper[i, i:]
    for _ in range(sweeps):
        basis = np.stack([codes, np.ones(len(x))])
        if np.ptp(codes) > 0:
            fitted = np.linalg.solve(basis @ matrix @ basis.T, basis @ matrix @ x)
            scale, low = fitted if fitted[0] > 0 else (scale, low)
        for i in range(len(x)):
            gradient = matrix[i] @ (x - codes * scale - low)
            codes[i] = np.clip(np.floor(codes[i] + gradient / matrix[i, i] / scale + 0.5), 0, 3)
    overlap = x @ matrix @ (codes * scale + low)
    gain = np.clip(x @ matrix @ x / overlap, 0.5, 2) ** stretch if overlap > 0 else 1.0
    return codes, scale * gain, low * gain


@pytest.mark.parametrize(("size", "clip"), [(4, 1.0), (16, 0.92), (20, 1.0), (64, 0.92), (80, 0.96), (128, 0.94)])
@pytest.mark.parametrize(("sweeps", "stretch"), [(0, 0.0), (1, 1.0), (3, 1.2)])
def test_agrees_with_one_row_by_hand(size: int, clip: float, sweeps: int, stretch: float) -> None:
    metrics = metric(size, 2)
    x = torch.randn(2, 8, size) + 0.3
    rows = quantize(x, clip=clip, metric=metrics, sweeps=sweeps, stretch=stretch)
    different = 0
    for head, row in product(range(2), range(8)):
        matrix = metrics.matrix[head].double().numpy()
        codes, scale, low = by_hand(x[head, row].double().numpy(), clip, matrix, sweeps, stretch)
        if (unpack(rows.codes[head, row]).numpy() != codes).any():
            different += 1  # a tie, or nearly one
        else:
            assert rows.affine[head, row, 0].tolist() == pytest.approx([scale, low], rel=2e-3, abs=1e-3)
    assert different <= 1


@pytest.mark.parametrize(
    ("matrix", "codes"),
    [
        # channels alike and alone: nearest codes, ties up
        ([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]], [0, 1, 2, 3]),
        # what counts is the sum of the middle two, 2.8: the second makes up for the first
        ([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.99, 0.0], [0.0, 0.99, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]], [0, 1, 2, 3]),
        # and here their difference, .0
        ([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, -0.99, 0.0], [0.0, -0.99, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]], [0, 1, 1, 3]),
    ],
)
def test_error_feedback_goldens(matrix: list[list[float]], codes: list[int]) -> None:
    x = torch.tensor([[0.0, 1.4, 1.4 if matrix[1][2] else 1.5, 3.0]])
    rows = quantize(x, metric=Metric.of(torch.tensor(matrix)), sweeps=0)
    assert unpack(rows.codes)[0].tolist() == codes
    assert rows.affine[0, 0].tolist() == [1.0, 0.0]


def test_a_sweep_refits_scale_and_min() -> None:
    """Codes 0 1 1 3; the line of least squares through (0, 0), (1, .8), (1, .8), (3, 3) is code * 1.0211 - .1263."""
    rows = quantize(torch.tensor([[0.0, 0.8, 0.8, 3.0]]), metric=Metric.of(torch.eye(4)), sweeps=1)
    assert unpack(rows.codes)[0].tolist() == [0, 1, 1, 3]
    assert rows.affine[0, 0].tolist() == pytest.approx([9.7 / 9.5, 1.15 - 1.25 * 9.7 / 9.5], rel=1e-3)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.2])
def test_stretch_is_a_power_of_the_shrinkage(exponent: float) -> None:
    metrics, x = metric(64), torch.randn(20, 64)
    plain, stretched = (
        quantize(x, clip=0.92, metric=metrics, stretch=value, scale_dtype=torch.float16) for value in (0.0, exponent)
    )
    weighted = x @ metrics.matrix
    ratio = (weighted * x).sum(-1) / (weighted * dequantize(plain)).sum(-1)
    expected = plain.affine.float() * ratio[:, None, None] ** exponent
    assert torch.equal(stretched.codes, plain.codes)
    torch.testing.assert_close(stretched.affine.float(), expected, rtol=2e-3, atol=1e-5)
    if exponent == 1:
        inner = (weighted * dequantize(stretched)).sum(-1)
        torch.testing.assert_close(inner, (weighted * x).sum(-1), rtol=3e-3, atol=0)


def test_at_four_channels_nearly_as_good_as_every_code_tried() -> None:
    """Against the least cost of all 4^4 codes, each with its own least-squares scale and min."""
    metrics, x = metric(4), torch.randn(200, 4, dtype=torch.float64)
    matrix, least = metrics.matrix.double().numpy(), np.full(200, np.inf)
    for codes in product(range(4), repeat=4):
        basis = np.stack([codes, np.ones(4)]).astype(float)
        gram = basis @ matrix @ basis.T
        solved = np.linalg.lstsq(gram, basis @ matrix @ x.numpy().T, rcond=None)[0]
        error = x.numpy() - solved.T @ basis
        costs = ((error @ matrix) * error).sum(-1)
        least = np.where(solved[0] >= 0, np.minimum(least, costs), least)
    codes, scale, low = (
        part.double()
        for part in search(
            x.float(),
            (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)).float() / 3,
            x.amin(-1, keepdim=True).float(),
            metrics,
            8,
            0.0,
        )
    )
    found = cost(x, codes * scale + low, metrics).numpy()
    own = ((x.numpy() @ matrix) * x.numpy()).sum(-1)
    assert (found >= least - 1e-5 * own).all()
    assert np.median(found / own) < 2 * np.median(least / own) + 1e-4
    assert (found <= least + 0.01 * own).mean() > 0.7


@pytest.mark.parametrize("size", [16, 64, 128])
def test_costs_less_than_rounding_and_less_with_each_sweep(size: int) -> None:
    metrics, x = metric(size, 3), torch.randn(3, 100, size) * torch.logspace(-1, 1, 100)[:, None]
    costs = [cost(x, quantize(x, clip=0.96, metric=metrics, sweeps=sweeps), metrics) for sweeps in range(5)]
    for before, after in zip(costs, costs[1:], strict=False):
        assert (after <= before * (1 + 1e-2)).all()  # but for rounding scale and min to 16 bits
        assert after.mean() < before.mean() * (1 + 1e-3)
    plain = cost(x, quantize(x, clip=0.96), metrics)
    assert (costs[3] < plain).float().mean() > 0.95
    assert costs[3].mean() < 0.6 * plain.mean()


def test_rows_do_not_depend_on_each_other() -> None:
    metrics, x = metric(64, 2), torch.randn(3, 2, 50, 64)
    together = quantize(x, clip=0.92, metric=metrics, stretch=1.2)
    same = 0
    for place in product(range(3), range(2), range(50)):
        batch, head, row = place
        alone = quantize(
            x[batch, head, row : row + 1],
            clip=0.92,
            metric=Metric(metrics.matrix[head], metrics.factor[head]),
            stretch=1.2,
        )
        same += torch.equal(alone.codes[0], together.codes[place])
    assert same >= 299  # sums of other lengths round otherwise, which can decide a tie


def test_a_strided_input_and_a_half_one_are_stored_alike() -> None:
    metrics, x = metric(32, 2), torch.randn(32, 2, 9).half()
    expected = quantize(x.permute(1, 2, 0).contiguous().float(), metric=metrics)
    assert torch.equal(quantize(x.permute(1, 2, 0), metric=metrics).codes, expected.codes)


@pytest.mark.parametrize("scale_dtype", SATURATION)
@pytest.mark.parametrize("clip", [1.0, 0.92])
def test_nothing_becomes_infinite(clip: float, scale_dtype: torch.dtype) -> None:
    x = torch.randn(12, 64)
    x[0], x[1], x[2] = 0, 1, -60000
    x[3] *= 1e-12
    x[4] *= 1e30
    x[5, 7] = math.inf
    x[6, ::2], x[6, 1::2] = math.inf, -math.inf
    x[7, 1:] = 0
    x[8, :] = 0
    x[8, 3] = 1e38
    x[9] = 1e-40
    x[10] = 3.4e38
    rows = quantize(x, clip=clip, scale_dtype=scale_dtype, metric=metric(64), stretch=1.2)
    assert rows.affine.isfinite().all()
    values = dequantize(rows)
    assert values.isfinite().all()
    assert (values[0] == 0).all()
    constant = x[:3].clamp(-SATURATION[scale_dtype], SATURATION[scale_dtype])
    torch.testing.assert_close(values[:3], constant, rtol=2.0**-8, atol=1e-7)
    assert values[3].abs().max() < 1e-7 and values[9].abs().max() < 1e-7


def test_groups_smaller_than_a_row_are_refused() -> None:
    x = torch.randn(5, 64)
    assert quantize(x, group_size=64, metric=metric(64)).codes.shape == (5, 16)
    with pytest.raises(ValueError, match="group_size=32: a search needs one group a row"):
        quantize(x, group_size=32, metric=metric(64))


def test_a_metric_is_positive_definite_and_shared_by_copies() -> None:
    metrics = metric(32, 2)
    factor = metrics.factor.double()
    identity = torch.eye(32).double().expand(2, -1, -1)
    torch.testing.assert_close(factor.mT @ factor @ metrics.matrix.double(), identity, rtol=0, atol=1e-5)
    assert torch.equal(factor, factor.triu())
    assert copy.deepcopy({"held": metrics})["held"].matrix is metrics.matrix
    for odd in (torch.zeros(4, 4), torch.diag(torch.tensor([1.0, 1.0, -1.0, 1.0]))):
        with pytest.raises(ValueError, match="positive definite"):
            Metric.of(odd)


# In a layer and a cache

SMALL = OscarConfig(recipe="search", sink_tokens=5, recent_tokens=12)


def searching_rotation() -> LayerRotation:
    return replace(random_rotation(), k_metric=metric(SIZE, KV_HEADS).matrix)


def searching_layer(max_cache_len: int | None = None, config: OscarConfig = SMALL) -> OscarLayer:
    text_config = SimpleNamespace(_attn_implementation="oscar")
    return OscarLayer(Transform(searching_rotation()), config, text_config, max_cache_len)


def history(layer: OscarLayer, row: int = 0) -> list[Quantized]:
    """Keys and values of a row's history."""
    tiers = layer.tiers
    count = tiers.flushed[row]
    return [
        Quantized(*(b[row : row + 1, :, :count] for b in held)) for held in (tiers.history.keys, tiers.history.values)
    ]


@pytest.mark.parametrize("chunks", [[60], [1] * 60, [20, 3, 37], [1, 9, 9, 41]])
@pytest.mark.parametrize("max_cache_len", [None, 64])
def test_a_layer_searches_its_keys_and_only_them(chunks: list[int], max_cache_len: int | None) -> None:
    layer, states = searching_layer(max_cache_len), random_states(60, batch=2)
    feed(layer, states, chunks)
    transform, rows = layer.transform, slice(SMALL.sink_tokens, 60 - SMALL.recent_tokens)
    matrices = Metric.of(transform.rotation.k_metric)  # type: ignore[arg-type]
    keys, values = transform.keys(states[1]), transform.values(states[2])
    expected = quantize(keys[:, :, rows], clip=0.92, metric=matrices, sweeps=1, stretch=1.2)
    plain = quantize(values[:, :, rows], clip=0.92, scale_rule="inner_product")
    for row in range(2):
        held, held_values = history(layer, row)
        same = (held.codes == expected.codes[row : row + 1]).all(-1).float().mean()
        assert same > 0.98  # rotating one token or many rounds otherwise, which can decide a tie
        torch.testing.assert_close(dequantize(held_values), dequantize(plain)[row : row + 1], rtol=0.02, atol=0.02)
        error = cost(keys[row : row + 1, :, rows], held, matrices).mean()
        assert error < 0.7 * cost(keys, quantize(keys, clip=0.92, scale_rule="inner_product"), matrices).mean()


def test_a_fork_and_a_copy_go_on_searching() -> None:
    layer = searching_layer()
    feed(layer, random_states(90), [90])
    twin, expected = layer.fork(2), copy.deepcopy(layer)
    expected.batch_repeat_interleave(2)
    assert expected.tiers.history.metric is layer.tiers.history.metric
    states = random_states(40, 2)
    torch.testing.assert_close(feed(twin, states, [20] + [1] * 20), feed(expected, states, [20] + [1] * 20))


def test_without_sweeps_or_with_16_bits_no_metric_is_needed() -> None:
    for changes in ({"k_search": 0}, {"bits": 16}):
        config = SMALL.replace(**changes)
        layer = make_layer(config, random_rotation())
        feed(layer, random_states(60), [60])
        assert layer.tiers.history.metric is None


def test_settings_are_refused_before_anything_changes() -> None:
    model = tiny_model()
    plain, searching = (calibrate(model, TOKENS, recipe=name, progress=False) for name in ("balanced", "search"))
    config = searching.config.replace(sink_tokens=4, recent_tokens=8)
    before = [parameter.clone() for parameter in model.parameters()]
    for rotations, settings, message in (
        (plain, config, r"k_metric in every layer.*\[0, 1, 2\].*calibrate with recipe 'search', or set k_search=0"),
        (searching, config.replace(group_size=8), "k_search=1 needs one group per head, but group_size=8"),
    ):
        with pytest.raises(ValueError, match=message):
            patch_model(model, rotations, settings)
    with pytest.raises(ValueError, match="k_metric in every layer"):
        OscarQuantizedCache(model, plain, config)
    assert all(map(torch.equal, before, model.parameters()))
    patch_model(model, searching, config)
    with pytest.raises(ValueError, match="group_size=8"):
        patch_model(model, config=config.replace(group_size=8))
    assert patch_model(model, config=config.replace(k_search=0, group_size=8)) is model


@torch.no_grad()
def test_searched_caches_lose_less_than_rounded_ones() -> None:
    """The whole way, on a tiny model: calibrated, patched, decoded; logits against the unquantised model's."""
    model, ids = tiny_model(), TOKENS[:400]
    exact = model(ids[None]).logits
    errors = {}
    rotations = calibrate(model, TOKENS, recipe="search", progress=False)
    for sweeps in (0, 3):
        config = rotations.config.replace(sink_tokens=4, recent_tokens=8, k_search=sweeps, v_clip=1.0)
        patch_model(model, rotations, config)
        cache = OscarQuantizedCache(model, config=config.replace(exact_chunks=False))
        logits = model(ids[None], **{cache_argument(model): cache}).logits
        errors[sweeps] = ((logits - exact).norm() / exact.norm()).item()
        unpatch_model(model)
    assert errors[3] < errors[0]
