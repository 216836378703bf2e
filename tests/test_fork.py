"""Forks: caches and rows that share a history, against caches that hold it each for themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from test_layer import feed, make_layer, random_states
from tiny import tiny_model
from torch import Tensor

import oscar_hf.kernels.dispatch as dispatch
from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, patch_model
from oscar_hf._compat import cache_argument
from oscar_hf.layer import OscarLayer

SMALL = OscarConfig(recipe="balanced", sink_tokens=5, recent_tokens=12)


def occupied(*caches: OscarQuantizedCache) -> int:
    """Bytes of all distinct storages of keys and values."""
    tensors = [
        tensor
        for cache in caches
        for layer in cache.oscar_layers
        for tensor in (*layer.buffers(), *(b for prefix in layer.tiers.prefixes for b in prefix.buffers()))
    ]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def assert_same_state(one: OscarLayer, other: OscarLayer) -> None:
    assert one.seen == other.seen
    for held, expected in zip(one._dense(), other._dense(), strict=True):
        torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-5)


def repeated(layer: OscarLayer, copies: int) -> OscarLayer:
    """What a fork must equal: a copy of everything."""
    twin = copy.deepcopy(layer)
    twin.batch_repeat_interleave(copies)
    return twin


def rows_of(states: Iterable[Tensor], batch: int) -> tuple[Tensor, ...]:
    return tuple(part[:batch] for part in states)


@pytest.mark.parametrize("batch, copies", [(1, 1), (1, 4), (2, 1), (2, 3)])
@pytest.mark.parametrize("bits", [2, 16])
def test_a_fork_equals_a_copy_whatever_comes(batch: int, copies: int, bits: int) -> None:
    layer = make_layer(SMALL.replace(bits=bits))
    feed(layer, random_states(90, batch), [90])
    expected, twin = repeated(layer, copies), layer.fork(copies)
    assert_same_state(twin, expected)
    assert twin.tiers.prefix_tokens and twin.tiers.prefix_tokens % layer.tiers.ring == 0
    for chunks in ([1], [3], [40], [1, 1, 13]):
        states = random_states(sum(chunks), batch * copies)
        given = [feed(each, states, chunks) for each in (twin, expected)]
        torch.testing.assert_close(*given, rtol=1e-5, atol=1e-5)
        assert_same_state(twin, expected)


@pytest.mark.parametrize("batch", [1, 2])
def test_neither_writes_into_the_other(batch: int) -> None:
    layer = make_layer()
    feed(layer, random_states(100, batch), [100])
    alone, forks = copy.deepcopy(layer), [layer.fork(2) for _ in range(3)]
    twins = [repeated(alone, 2) for _ in forks]
    for step in range(30):
        for index, (fork, twin) in enumerate(zip(forks, twins, strict=True)):
            if step % 3 == index:
                states = random_states(1 + step, 2 * batch)
                feed(fork, states, [1 + step])
                feed(twin, states, [1 + step])
        states = random_states(1, batch)
        feed(layer, states, [1])
        feed(alone, states, [1])
    assert_same_state(layer, alone)
    for fork, twin in zip(forks, twins, strict=True):
        assert_same_state(fork, twin)


@pytest.mark.parametrize("count", [1, 11, 12, 13, 30, 60, 84, 88, 95, 100])
@pytest.mark.parametrize("later", [0, 20])
def test_crop_below_what_is_shared(count: int, later: int) -> None:
    layer = make_layer()
    feed(layer, random_states(100), [100])
    expected, twin = repeated(layer, 2), layer.fork(2)
    states = random_states(later, 2)
    for each in (twin, expected):
        if later:
            feed(each, states, [later])
        each.crop(-count - later)
    if count < 100:
        assert_same_state(twin, expected)
    states = random_states(50, 2)
    torch.testing.assert_close(feed(twin, states, [20, 30]), feed(expected, states, [20, 30]))
    assert_same_state(twin, expected)
    if not later:
        feed(layer, random_states(9), [9])


def test_rows_of_a_fork_are_selected_and_forked_again() -> None:
    layer = make_layer()
    feed(layer, random_states(100, 2), [100])
    expected, twin = repeated(layer, 2), layer.fork(2)
    for order in ([3, 0, 0, 2], [1, 1], [0, 1, 1, 0, 0]):
        for each in (twin, expected):
            each.reorder_cache(torch.tensor(order))
        states = random_states(40, len(order))
        torch.testing.assert_close(feed(twin, states, [1, 39]), feed(expected, states, [1, 39]))
        assert_same_state(twin, expected)
    again, copied = twin.fork(2), repeated(expected, 2)
    assert len(again.tiers.prefixes) == 2
    for each in (again, copied):
        each.batch_select_indices(torch.tensor([1, 5, 8]))
        each.crop(-70)
    assert_same_state(again, copied)


def test_a_fork_of_a_fork_that_nobody_wrote_to() -> None:
    layer = make_layer()
    feed(layer, random_states(100), [100])
    expected, first = repeated(layer, 6), layer.fork(2)
    before = first.tiers.windows["recent_keys"].untyped_storage().data_ptr()
    twin = first.fork(3)
    assert twin.tiers.windows["recent_keys"].untyped_storage().data_ptr() == before
    states = random_states(64, 6)
    torch.testing.assert_close(feed(twin, states, [1, 63]), feed(expected, states, [1, 63]))
    assert_same_state(twin, expected)
    assert_same_state(first, repeated(layer, 2))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("written", [False, True])
def test_copies_of_forks(how: str, written: bool) -> None:
    layer = make_layer()
    feed(layer, random_states(100), [100])
    expected, twin = repeated(layer, 3), layer.fork(3)
    if written:
        states = random_states(30, 3)
        feed(twin, states, [30])
        feed(expected, states, [30])
    again = copy.deepcopy(twin) if how == "deepcopy" else pickle.loads(pickle.dumps(twin))
    feed(twin, random_states(50, 3), [50])
    assert_same_state(again, expected)
    states = random_states(9, 3)
    torch.testing.assert_close(feed(again, states, [9]), feed(expected, states, [9]))


def test_padding_and_rows_of_many_lengths() -> None:
    layer = make_layer()
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[0, :37] = False
    feed(layer, random_states(100, 2), [100], mask)
    expected, twin = repeated(layer, 2), layer.fork(2)
    mask = torch.cat([mask.repeat_interleave(2, 0), torch.ones(4, 30, dtype=torch.bool)], 1)
    states = random_states(30, 4)
    torch.testing.assert_close(feed(twin, states, [29, 1], mask), feed(expected, states, [29, 1], mask))
    assert_same_state(twin, expected)


@pytest.mark.parametrize(
    "batch, chunks, settings, least",
    [
        (1, [2], {"softcap": 5.0, "sink_logits": torch.ones(6)}, 256),
        (2, [1], {}, 256),
        (2, [14], {"sink_logits": torch.ones(6)}, 14),
        pytest.param(1, [14, 1], {}, 256, marks=pytest.mark.slow),
        pytest.param(2, [1, 14, 2], {}, 256, marks=pytest.mark.slow),
        pytest.param(2, [1, 14, 2], {}, 14, marks=pytest.mark.slow),
    ],
)
def test_kernels_read_what_rows_share(
    batch: int, chunks: list[int], settings: dict[str, Any], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, against plain torch; chunks of `least` tokens by flash attention."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU")
    monkeypatch.setattr("oscar_hf.kernels.chunk.MIN_QUERIES", least)
    layer = make_layer()
    feed(layer, random_states(60, batch), [60])
    expected, twin = layer.fork(2), layer.fork(2)
    assert twin.tiers.prefix_tokens == 24
    for chunk in chunks:
        states = random_states(chunk, len(expected.tiers.lengths))
        plain = feed(expected, states, [chunk], **settings)
        monkeypatch.setattr(dispatch, "ON_CPU", True)
        torch.testing.assert_close(feed(twin, states, [chunk], **settings), plain, rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(dispatch, "ON_CPU", False)
        for each in (twin, expected):
            each.reorder_cache(torch.arange(2 * batch - 1, -1, -1))


# Caches


def hadamard_set(model: Any) -> RotationSet:
    config = model.config
    full = set(range(config.num_hidden_layers))
    return RotationSet.without_data(full, config.head_dim)


@torch.no_grad()
def run(model: Any, ids: Tensor, cache: OscarQuantizedCache) -> Tensor:
    return model(ids, **{cache_argument(model): cache}).logits


@pytest.mark.parametrize("patched", [True, False])
def test_eight_answers_to_one_context(patched: bool) -> None:
    model = tiny_model()
    rotations = hadamard_set(model)
    if patched:
        patch_model(model, rotations, SMALL)
    context, question = torch.randint(3, 128, (1, 150)), torch.randint(3, 128, (8, 7))
    cache = OscarQuantizedCache(model, None if patched else rotations, SMALL)
    run(model, context, cache)
    expected = copy.deepcopy(cache)
    expected.batch_repeat_interleave(8)
    prompt = torch.cat([context.expand(8, -1), question], 1)
    name, settings = cache_argument(model), {"max_new_tokens": 16, "do_sample": False}
    given = model.generate(prompt, **{name: cache.fork(8)}, **settings)
    assert torch.equal(given, model.generate(prompt, **{name: expected}, **settings))
    one = model.generate(prompt[2:3], **{name: cache.fork()}, **settings)  # and one by one
    assert torch.equal(one[0], given[2, : one.shape[1]])
    settings = {"num_return_sequences": 4, "do_sample": True, "max_new_tokens": 8}
    many = model.generate(prompt[:1], **{name: cache.fork(4)}, **settings)
    assert len(many) == 4 and len({tuple(row.tolist()) for row in many}) > 1


def test_memory_of_eight_forks_of_4096_tokens() -> None:
    model = tiny_model(head_dim=128, hidden_size=128, num_key_value_heads=1, dtype=torch.bfloat16)
    patch_model(model, hadamard_set(model))
    cache = OscarQuantizedCache(model)
    run(model, torch.randint(3, 128, (1, 4096)), cache)
    one = occupied(cache)
    assert one == pytest.approx(cache.memory().total, rel=0.01)
    many = cache.fork(8)
    assert occupied(cache, many) <= 1.2 * one
    memory = many.memory()
    assert memory.total <= 1.2 * one and memory.history_bits == pytest.approx(2.25)
    assert memory.tokens == 4096 and memory.elements == 8 * cache.memory().elements
    run(model, torch.randint(3, 128, (8, 1)), many)  # they differ: windows of their own, the history still shared
    rows = many.oscar_layers[0].tiers
    windows = sum(w.untyped_storage().nbytes() for layer in many.oscar_layers for w in layer.tiers.windows.values())
    assert rows.windows["recent_keys"].stride(0) > 0 and rows.prefix_tokens >= 3456
    assert occupied(many) < windows + 1.8 * one
    assert many.memory().total == pytest.approx(occupied(many), rel=0.01)
    assert cache.memory().total == pytest.approx(occupied(cache), rel=0.01)


def test_forks_are_saved_whole(tmp_path: Any) -> None:
    model = tiny_model()
    patch_model(model, hadamard_set(model), SMALL)
    cache = OscarQuantizedCache(model)
    run(model, torch.randint(3, 128, (1, 120)), cache)
    fork = cache.fork(3)
    run(model, torch.randint(3, 128, (3, 9)), fork)
    for index, each in enumerate((cache, fork)):
        each.save(tmp_path / str(index))
        again = OscarQuantizedCache.load(tmp_path / str(index), model)
        for layer, expected in zip(again.oscar_layers, each.oscar_layers, strict=True):
            assert not layer.tiers.prefixes
            assert_same_state(layer, expected)
        ids = torch.randint(3, 128, (1 + 2 * index, 25))
        torch.testing.assert_close(run(model, ids, again), run(model, ids, each), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_layers_that_are_not_quantised_are_copied(family: str) -> None:
    model = tiny_model(family)
    full = {1, 3}
    patch_model(model, RotationSet.without_data(full, 16), SMALL)
    cache = OscarQuantizedCache(model)
    run(model, torch.randint(3, 128, (1, 90)), cache)
    alone, fork = copy.deepcopy(cache), cache.fork(2)
    new = torch.randint(3, 128, (2, 14))
    given = [run(model, part, fork) for part in new.split([1, 13], 1)]
    for row in range(2):
        twin = copy.deepcopy(alone)
        for output, part in zip(given, new[row : row + 1].split([1, 13], 1), strict=True):
            torch.testing.assert_close(output[row], run(model, part, twin)[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run(model, new[:1], cache), run(model, new[:1], alone), rtol=1e-4, atol=1e-4)


def test_empty_caches_fork_and_what_cannot_is_refused() -> None:
    model = tiny_model()
    patch_model(model, hadamard_set(model), SMALL)
    cache = OscarQuantizedCache(model)
    empty = cache.fork(3)
    ids = torch.randint(3, 128, (3, 50))
    assert torch.equal(run(model, ids, empty), run(model, ids, cache))
    for copies in (0, -1, True, 1.5, None):
        with pytest.raises(ValueError, match="whole number"):
            cache.fork(copies)
    with pytest.raises(ValueError, match="without max_cache_len"):
        OscarQuantizedCache(model, max_cache_len=100).fork(2)
    cache.oscar_layers[1]._staged = True
    with pytest.raises(RuntimeError, match="reset"):
        cache.fork(2)
    cache.reset()
    fork = cache.fork()
    run(model, ids[:1], fork)
    fork.reset()
    assert fork.get_seq_length() == cache.get_seq_length() == 0
