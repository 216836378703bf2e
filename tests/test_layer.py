"""One layer against its definition: what is stored, who sees what, and every way of feeding it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from oscar_hf.config import OscarConfig
from oscar_hf.layer import OscarLayer
from oscar_hf.matrices import compose_rotation, hadamard
from oscar_hf.quantization import dequantize, quantize
from oscar_hf.rotation import LayerRotation
from oscar_hf.storage import Span
from oscar_hf.transform import Transform

HEADS, KV_HEADS, SIZE = 6, 2, 16
SMALL = OscarConfig(recipe="balanced", sink_tokens=5, recent_tokens=12)


def random_rotation(balanced: bool = True) -> LayerRotation:
    covariance = torch.randn(KV_HEADS, SIZE, SIZE)
    orthogonal = compose_rotation(covariance @ covariance.mT).float()
    if not balanced:
        return LayerRotation(orthogonal[0], hadamard(SIZE).float())
    stretch = torch.rand(KV_HEADS, SIZE) + 0.5
    return LayerRotation(
        orthogonal * stretch.unsqueeze(-2), orthogonal, orthogonal / stretch.unsqueeze(-2), torch.randn(KV_HEADS, SIZE)
    )


def make_layer(
    config: OscarConfig = SMALL, rotation: LayerRotation | None = None, attention: str = "oscar"
) -> OscarLayer:
    return OscarLayer(
        Transform(rotation or random_rotation()), config, SimpleNamespace(_attn_implementation=attention)
    )


def random_states(tokens: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, HEADS, tokens, SIZE),
        torch.randn(batch, KV_HEADS, tokens, SIZE) * 2 + 1,
        torch.randn(batch, KV_HEADS, tokens, SIZE),
    )


def feed(
    layer: OscarLayer, states: tuple[Tensor, ...], chunks: list[int], mask: Tensor | None = None, **settings
) -> Tensor:
    """Run query, key and value states through the layer in chunks; outputs side by side."""
    outputs, start = [], layer.get_seq_length()
    for query, key, value in zip(*(part.split(chunks, 2) for part in states), strict=True):
        key, value = layer.update(key, value)
        start += query.shape[2]
        outputs.append(layer.attend(query, key, value, None if mask is None else mask[:, :start], **settings))
    return torch.cat(outputs, 2)


def stored(layer: OscarLayer, row: int = 0) -> list[Tensor]:
    """Everything a row holds, in order of its tokens."""
    rows, tiers = slice(row, row + 1), layer.tiers
    history = [buffer[rows, :, : tiers.flushed[row]] for buffer in tiers.history.buffers()]
    return history + [part for span in tiers.exact(rows) for part in (span.keys, span.values)]


def by_definition(layer: OscarLayer, states: tuple[Tensor, ...], softcap=None, sinks=None) -> Tensor:
    """Token by token in the model's basis: sink and last `recent_tokens` exact, all between quantised."""
    config, transform = layer.config, layer.transform
    query, key, value = states
    rounded = []
    for rotated, undo, clip in (
        (transform.keys(key), transform.undo_keys, config.k_clip),
        (transform.values(value), transform.undo_values, config.v_clip),
    ):
        rows = quantize(rotated, clip=clip, group_size=config.group_size, scale_rule=config.scale_rule)
        rounded.append(undo(dequantize(rows) if config.bits == 2 else rotated))
    tokens = key.shape[2]
    group = HEADS // KV_HEADS
    output = torch.zeros_like(query)
    for t in range(tokens):
        exact = torch.tensor([s < config.sink_tokens or t - s < config.recent_tokens for s in range(t + 1)])
        keys, values = (
            torch.where(exact[:, None], states[:, :, : t + 1], lossy[:, :, : t + 1]).repeat_interleave(group, 1)
            for states, lossy in zip((key, value), rounded, strict=True)
        )
        logits = (query[:, :, t : t + 1] @ keys.mT) * SIZE**-0.5
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        if sinks is not None:
            logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
        output[:, :, t : t + 1] = logits.softmax(-1)[..., : t + 1] @ values
    return output


@pytest.mark.parametrize("length", [1, 4, 5, 6, 16, 17, 18, 29, 30, 97])
@pytest.mark.parametrize("bits", [2, 16])
def test_single_steps_attend_as_defined(length: int, bits: int) -> None:
    layer, states = make_layer(SMALL.replace(bits=bits)), random_states(length, batch=2)
    torch.testing.assert_close(feed(layer, states, [1] * length), by_definition(layer, states), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group_size", [4, 8, None])
@pytest.mark.parametrize("sink, recent", [(0, 0), (0, 7), (5, 0), (5, 1), (64, 256)])
def test_any_windows_and_groups(group_size: int | None, sink: int, recent: int) -> None:
    config = SMALL.replace(group_size=group_size, sink_tokens=sink, recent_tokens=recent, exact_chunks=False)
    layer, states = make_layer(config), random_states(60)
    torch.testing.assert_close(feed(layer, states, [1] * 60), by_definition(layer, states), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap, with_sinks", [(5.0, False), (None, True), (5.0, True)])
@pytest.mark.parametrize("balanced", [True, False])
def test_softcap_and_sink_logits_see_the_key_mean(softcap: float | None, with_sinks: bool, balanced: bool) -> None:
    sinks = torch.randn(HEADS) if with_sinks else None
    config = SMALL.replace(exact_chunks=False)
    layer, states = make_layer(config, random_rotation(balanced)), random_states(70)
    outputs = feed(layer, states, [30, 38, 1, 1], softcap=softcap, sink_logits=sinks)
    torch.testing.assert_close(outputs, by_definition(layer, states, softcap, sinks), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunks", [[300], [7] * 42 + [6], [100] * 3, [256, 44], [1, 298, 1]])
def test_chunks_without_exact_chunks_equal_single_steps(chunks: list[int]) -> None:
    rotation, states = random_rotation(), random_states(300)
    steps = make_layer(SMALL, rotation)
    expected = feed(steps, states, [1] * 300)
    layer = make_layer(SMALL.replace(exact_chunks=False), rotation)
    torch.testing.assert_close(feed(layer, states, chunks), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [7, 100, 256, 1])
def test_any_chunking_stores_the_same_codes(batch: int, size: int) -> None:
    tokens, rotation, config = 1000, random_rotation(), OscarConfig(recipe="balanced")
    states = random_states(tokens, batch)
    whole, pieces = make_layer(config, rotation), make_layer(config, rotation)
    feed(whole, states, [tokens])
    feed(pieces, states, [size] * (tokens // size) + ([tokens % size] if tokens % size else []))
    assert whole.tiers.flushed == pieces.tiers.flushed == [tokens - 320] * batch
    for row in range(batch):
        for one, other in zip(stored(whole, row), stored(pieces, row), strict=True):
            if one.dtype == torch.uint8:
                assert torch.equal(one, other)
            else:  # a matrix product of one row may round otherwise than one of many
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_first_prefill_is_exact_and_chunks_see_each_other_exactly() -> None:
    layer, states = make_layer(), random_states(90)
    exact = make_layer(SMALL.replace(bits=16), layer.transform.rotation)
    torch.testing.assert_close(feed(layer, states, [90]), feed(exact, states, [90]), rtol=1e-5, atol=1e-5)
    more = random_states(40)
    first = feed(layer, tuple(part[:, :, :1] for part in more), [1])
    assert not torch.allclose(first, feed(exact, tuple(part[:, :, :1] for part in more), [1]), atol=1e-3)


def test_padded_rows_equal_rows_alone() -> None:
    rotation, tokens = random_rotation(), 80
    pads = [0, 13, 70]
    states = random_states(tokens, batch=3)
    mask = torch.stack([torch.arange(tokens) >= pad for pad in pads])
    together = make_layer(SMALL, rotation)
    outputs = feed(together, states, [50, 28, 1, 1], mask)
    for row, pad in enumerate(pads):
        alone = make_layer(SMALL, rotation)
        own = tuple(part[row : row + 1, :, pad:] for part in states)
        chunks = [50 - pad, 28, 1, 1] if pad < 50 else [78 - pad, 1, 1]
        torch.testing.assert_close(outputs[row : row + 1, :, pad:], feed(alone, own, chunks), rtol=1e-4, atol=1e-5)
        for one, other in zip(stored(together, row), stored(alone), strict=True):
            assert torch.equal(one, other)


def test_holes_in_the_mask_are_not_stored() -> None:
    rotation, tokens = random_rotation(), 60
    states, mask = random_states(tokens), torch.rand(1, tokens) > 0.3
    mask[:, -1] = True
    layer, dense = make_layer(SMALL, rotation), make_layer(SMALL, rotation)
    outputs = feed(layer, states, [40, 20], mask)
    real = mask[0].nonzero().squeeze(-1)
    kept = tuple(part[:, :, real] for part in states)
    first = int(mask[0, :40].sum())
    torch.testing.assert_close(outputs[:, :, real], feed(dense, kept, [first, len(real) - first]))


@pytest.mark.parametrize("padded", [False, True])
def test_dense_fallback_returns_what_is_stored(padded: bool) -> None:
    tokens, batch = 70, 3
    rotation, states = random_rotation(), random_states(tokens, batch)
    mask = torch.stack([torch.arange(tokens) >= pad for pad in (0, 9, 40)]) if padded else None
    fused, dense = make_layer(SMALL, rotation), make_layer(SMALL, rotation, attention="sdpa")
    outputs = feed(fused, states, [50, 18, 1, 1], mask)
    start = 0
    for size, query, key, value in zip(
        [50, 18, 1, 1], *(part.split([50, 18, 1, 1], 2) for part in states), strict=True
    ):
        dense.padding = None if mask is None else mask[:, : start + size]
        keys, values = dense.update(key, value)
        assert keys.shape[2] == values.shape[2] == dense.get_seq_length() == start + size
        visible = torch.ones(size, start + size, dtype=torch.bool).tril(start)[None, None]
        if mask is not None:
            visible = visible & mask[:, None, None, : start + size]
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, enable_gqa=True
        )
        real = torch.ones(batch, size, dtype=torch.bool) if mask is None else mask[:, start : start + size]
        got = outputs[:, :, start : start + size]
        for row in range(batch):
            torch.testing.assert_close(got[row][:, real[row]], expected[row][:, real[row]], rtol=1e-4, atol=1e-4)
        start += size


@pytest.mark.parametrize("remove", [0, 1, 11, 12, 13, 40, 52, 57, 60, 99])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_crop_forgets_the_newest_tokens(remove: int, as_tensor: bool) -> None:
    layer, states = make_layer(), random_states(60)
    feed(layer, states, [60])
    before = copy.deepcopy(layer)
    layer.crop(torch.tensor(-remove) if as_tensor else -remove)
    kept = max(0, 60 - remove)
    assert layer.get_seq_length() == kept and layer.tiers.lengths == [kept]
    position = torch.arange(kept)[:, None]  # what the ring still holds is exact again once it is in the window
    exact = (position < 5) | ((position >= kept - 12) & (position >= 60 - 24))
    for held, old, given in zip(layer._dense(), before._dense(), states[1:], strict=True):
        expected = torch.where(exact, given[:, :, :kept], old[:, :, :kept])
        torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-5)
    again = random_states(3)
    assert feed(layer, again, [3]).isfinite().all()
    assert layer.get_seq_length() == kept + 3


@pytest.mark.parametrize("chunks, remove", [([1] * 60, 12), ([48, 12], 5), ([20, 40], 1)])
def test_a_short_rollback_leaves_no_trace(chunks: list[int], remove: int) -> None:
    rotation, states, more = random_rotation(), random_states(60), random_states(7)
    rolled, straight = make_layer(SMALL, rotation), make_layer(SMALL, rotation)
    feed(rolled, states, chunks)
    rolled.crop(-remove)
    feed(straight, tuple(part[:, :, : 60 - remove] for part in states), [60 - remove])
    torch.testing.assert_close(feed(rolled, more, [4, 1, 1, 1]), feed(straight, more, [1] * 7), rtol=1e-4, atol=1e-5)
    for one, other in zip(stored(rolled), stored(straight), strict=True):
        torch.testing.assert_close(one, other)


def test_crop_to_a_length_in_the_old_meaning() -> None:
    layer = make_layer()
    feed(layer, random_states(60), [60])
    layer.crop(100)
    assert layer.get_seq_length() == 60
    layer.crop(45)
    assert layer.get_seq_length() == 45


@pytest.mark.parametrize(
    "change, order",
    [
        (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ],
)
def test_rows_move_whole(change, order: list[int]) -> None:
    layer, mask = make_layer(), torch.stack([torch.arange(60) >= pad for pad in (0, 20, 55)])
    feed(layer, random_states(60, 3), [60], mask)
    before = copy.deepcopy(layer)
    change(layer)
    assert layer.batch_size == len(order)
    for row, source in enumerate(order):
        for one, other in zip(stored(layer, row), stored(before, source), strict=True):
            assert torch.equal(one, other)
    states = random_states(2, len(order))
    grown = torch.cat([mask[order], torch.ones(len(order), 2, dtype=torch.bool)], 1)
    assert feed(layer, states, [1, 1], grown).isfinite().all()


def test_deepcopy_diverges_and_shares_only_the_transform() -> None:
    layer = make_layer()
    feed(layer, random_states(50), [50])
    twin = copy.deepcopy(layer)
    before = [part.clone() for part in stored(layer)]
    feed(twin, random_states(20), [20])
    assert twin.transform is layer.transform and twin.text_config is layer.text_config
    assert layer.get_seq_length() == 50
    for one, other in zip(stored(layer), before, strict=True):
        assert torch.equal(one, other)


def test_unused_storage_is_never_read() -> None:
    rotation, states = random_rotation(), random_states(90)
    clean, poisoned = make_layer(SMALL, rotation), make_layer(SMALL, rotation)
    expected = feed(clean, states, [3, 30, 57])
    poisoned.lazy_initialization(states[1], states[2])
    outputs = []
    start = 0
    for size in (3, 30, 57):
        poisoned.tiers.history.reserve(start + 200)
        rows = slice(None)
        kept = [Span(begin, keys.clone(), values.clone()) for begin, keys, values in poisoned.tiers.exact(rows)]
        for window in poisoned.tiers.windows.values():
            window.fill_(float("nan"))
        for span in kept:
            for name, part in (("keys", span.keys), ("values", span.values)):
                kind, slots = ("sink", range(span.start, span.stop)) if span.start == 0 else ("recent", None)
                if kind == "sink":
                    continue
                poisoned.tiers.windows[f"recent_{name}"][:, :, [t % 24 for t in range(span.start, span.stop)]] = part
        if start:
            sink = min(start, 5)
            fresh = (clean.transform.keys(states[1][:, :, :sink]), clean.transform.values(states[2][:, :, :sink]))
            for name, part in zip(("keys", "values"), fresh, strict=True):
                poisoned.tiers.windows[f"sink_{name}"][:, :, :sink] = part
        for buffer in poisoned.tiers.history.buffers():
            slack = buffer[:, :, poisoned.tiers.flushed[0] :]
            slack.fill_(float("nan") if slack.is_floating_point() else 255)
        part = tuple(s[:, :, start : start + size] for s in states)
        outputs.append(feed(poisoned, part, [size]))
        start += size
    torch.testing.assert_close(torch.cat(outputs, 2), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_float32(dtype: torch.dtype) -> None:
    rotation, states = random_rotation(), random_states(80)
    states = tuple(part.to(dtype) for part in states)
    exact = feed(make_layer(SMALL, rotation), tuple(part.float() for part in states), [60, 18, 1, 1])
    half = feed(make_layer(SMALL, rotation), states, [60, 18, 1, 1])
    assert half.dtype == dtype
    error = (half.float() - exact).norm() / exact.norm()
    assert error < 0.05


def test_non_contiguous_states() -> None:
    rotation, states = random_rotation(), random_states(50)
    strided = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in states)
    assert not strided[0].is_contiguous()
    expected = feed(make_layer(SMALL, rotation), states, [40, 10])
    assert torch.equal(feed(make_layer(SMALL, rotation), strided, [40, 10]), expected)


def test_growth_keeps_slack_small() -> None:
    layer = make_layer(SMALL.replace(sink_tokens=0, recent_tokens=0))
    for _ in range(40):
        feed(layer, random_states(64), [64])
        used, capacity = layer.tiers.flushed[0], layer.tiers.history.capacity
        assert used <= capacity <= used * 1.0625 + 32


class TestRefusals:
    def test_gradients(self) -> None:
        _, key, value = random_states(4)
        with pytest.raises(RuntimeError, match="no_grad"):
            make_layer().update(key.requires_grad_(), value)

    def test_keys_that_never_reached_attention(self) -> None:
        layer, (_, key, value) = make_layer(), random_states(4)
        layer.update(key, value)
        with pytest.raises(RuntimeError, match="reset"):
            layer.update(key, value)
        layer.reset()
        layer.update(key, value)

    @pytest.mark.parametrize(
        "odd, words",
        [
            (lambda k: k.repeat(2, 1, 1, 1), "batch size 2 instead of 1"),
            (lambda k: k.double(), "float64"),
            (lambda k: k[..., :8], "head_dim 8 instead of 16"),
            (lambda k: k.repeat(1, 2, 1, 1), "KV heads 4 instead of 2"),
        ],
    )
    def test_other_states_than_those_held(self, odd, words: str) -> None:
        layer, states = make_layer(), random_states(30)
        feed(layer, states, [30])
        before = [part.clone() for part in stored(layer)]
        with pytest.raises(ValueError, match=words):
            layer.update(odd(states[1]), odd(states[2]))
        assert layer.get_seq_length() == 30
        assert all(map(torch.equal, stored(layer), before))

    def test_rotations_of_another_head_size_and_mla(self) -> None:
        with pytest.raises(ValueError, match="another model"):
            make_layer().update(torch.randn(1, 2, 3, 32), torch.randn(1, 2, 3, 32))
        with pytest.raises(ValueError, match="MLA"):
            make_layer().update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 8))

    @pytest.mark.parametrize("columns", [29, 31, 60])
    def test_masks_of_another_length(self, columns: int) -> None:
        layer, states = make_layer(), random_states(30)
        key, value = layer.update(states[1], states[2])
        with pytest.raises(ValueError, match=f"{columns} columns"):
            layer.attend(states[0], key, value, torch.ones(1, columns, dtype=torch.bool))

    def test_masks_that_change_the_past(self) -> None:
        layer, states = make_layer(), random_states(30)
        feed(layer, states, [30])
        key, value = layer.update(states[1][:, :, :1], states[2][:, :, :1])
        mask = torch.ones(1, 31, dtype=torch.bool)
        mask[0, 3] = False
        with pytest.raises(ValueError, match="changed"):
            layer.attend(states[0][:, :, :1], key, value, mask)

    def test_dense_chunks_without_exact_chunks(self) -> None:
        layer = make_layer(SMALL.replace(exact_chunks=False), attention="sdpa")
        _, key, value = random_states(4)
        with pytest.raises(ValueError, match="exact_chunks"):
            layer.update(key, value)

    def test_offloading(self) -> None:
        with pytest.raises(NotImplementedError, match="device_map"):
            make_layer().offload()


@pytest.mark.parametrize("least", [5, 256])  # queries that flash attention takes: the second chunk's 14, or none
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_kernels_in_a_layer(padded: bool, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is not in use")
    rotation, states, chunks = random_rotation(), random_states(45, 2), [26, 14, 3, 1, 1]
    mask = torch.stack([torch.arange(45) >= pad for pad in (0, 9)]) if padded else None
    plain, kernels = make_layer(SMALL, rotation), make_layer(SMALL, rotation)
    expected = feed(plain, states, chunks, mask)
    monkeypatch.setattr("oscar_hf.kernels.dispatch.ON_CPU", True)
    monkeypatch.setattr("oscar_hf.kernels.chunk.MIN_QUERIES", least)
    # a scale may be rounded to its neighbour
    torch.testing.assert_close(feed(kernels, states, chunks, mask), expected, rtol=2e-3, atol=2e-3)
    for row in range(2):
        for one, other in zip(stored(kernels, row), stored(plain, row), strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-3, atol=1e-4)
