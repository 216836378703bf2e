"""What is refused in any family, and that nothing has changed after it."""

from __future__ import annotations

import pickle

import pytest
import torch
import transformers
from test_patch import generate, logits, relative_error, rotations_for, tokens
from tiny import tiny_model
from transformers import GenerationConfig

from oscar_hf import OscarConfig, OscarQuantizedCache, patch_model, unpatch_model
from oscar_hf._compat import check_crop, recorded_states

SMALL = OscarConfig(recipe="balanced", sink_tokens=4, recent_tokens=8)


def test_speculating_on_a_filled_cache() -> None:
    model, ids = tiny_model("llama"), tokens(1, 48)
    patch_model(model, rotations_for(model), SMALL)
    cache = OscarQuantizedCache(model)
    logits(model, ids[:, :-1], cache, chunks=[47])
    with pytest.raises(ValueError, match="feeds the whole prompt"):
        generate(model, ids, cache, prompt_lookup_num_tokens=6)
    assert cache.get_seq_length() == 47


def test_a_pickled_cache_in_another_model() -> None:
    model, ids = tiny_model("llama"), tokens(1, 48)
    rotations = rotations_for(model)
    patch_model(model, rotations, SMALL)
    cache = OscarQuantizedCache(model)
    logits(model, ids, cache, chunks=[48])
    data, more = pickle.dumps(cache), tokens(1, 3)
    expected = logits(model, more, cache, chunks=[3])

    stranger = tiny_model("llama")  # its values are not rotated
    with pytest.raises(RuntimeError, match="A pickled cache"):
        logits(stranger, more, pickle.loads(data), chunks=[3])
    with pytest.raises(RuntimeError, match="A pickled cache"):
        generate(stranger, torch.cat([ids, more], 1), pickle.loads(data))
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    patch_model(other, rotations, SMALL)
    with pytest.raises(ValueError, match="another model or other rotations"):
        logits(other, more, pickle.loads(data), chunks=[3])
    unpatch_model(model)
    with pytest.raises(RuntimeError, match="A pickled cache"):
        logits(model, more, pickle.loads(data), chunks=[3])

    patch_model(stranger, rotations, SMALL)
    assert relative_error(logits(stranger, more, pickle.loads(data), chunks=[3]), expected) < 1e-5


def test_a_pickled_cache_of_an_unpatched_model() -> None:
    model, ids = tiny_model("llama"), tokens(1, 50)
    cache = OscarQuantizedCache(model, rotations_for(model), SMALL)
    logits(model, ids[:, :47], cache, chunks=[47])
    again = pickle.loads(pickle.dumps(cache))
    expected, got = (logits(model, ids[:, 47:], held, chunks=[1, 1, 1]) for held in (cache, again))
    assert relative_error(got, expected) < 1e-6


@pytest.mark.skipif(transformers.__version__ < "5.24", reason="its sliding layers that record take no chunks at all")
def test_what_was_recorded_can_be_taken_back() -> None:
    model, ids = tiny_model("gemma2"), tokens(1, 60)  # a sliding window of 32
    patch_model(model, rotations_for(model), SMALL)
    cache = OscarQuantizedCache(model)
    cache.activate_past_recording()
    logits(model, ids[:, :50], cache, chunks=[45, 5])
    cache.crop(-5)
    straight = OscarQuantizedCache(model)
    logits(model, ids[:, :45], straight, chunks=[45])
    expected = logits(model, ids[:, 50:], straight, chunks=[1] * 10)
    assert relative_error(logits(model, ids[:, 50:], cache, chunks=[1] * 10), expected) < 1e-3


def test_recording_that_began_too_late() -> None:
    model, ids = tiny_model("gemma2"), tokens(1, 50)
    patch_model(model, rotations_for(model), SMALL)
    cache = OscarQuantizedCache(model)
    logits(model, ids, cache, chunks=[50])
    cache.activate_past_recording()
    logits(model, tokens(1, 2), cache, chunks=[2])
    with pytest.raises(ValueError, match="keeps 33 of 52 tokens"):
        cache.crop(-3)
    assert cache.get_seq_length() == 52 == cache.layers[0].get_seq_length()
    cache.crop(-2)
    assert cache.get_seq_length() == 50 == cache.layers[0].get_seq_length()


@pytest.mark.parametrize("chunks", [[20], [16, 4], [19, 1]])
def test_a_linear_layer_takes_back_no_more_than_it_recorded(chunks: list[int]) -> None:
    """Nothing before transformers 5.25, which records the states of the last forward's newest tokens."""
    model, ids = tiny_model("qwen3_next"), tokens(1, 23)
    patch_model(model, rotations_for(model), SMALL.replace(recent_tokens=32))
    cache, kept = OscarQuantizedCache(model), 3 if recorded_states() else 0
    cache.activate_past_recording(*([kept] if kept else []))
    logits(model, ids[:, :20], cache, chunks=chunks)
    limit = "no more than 3" if kept else "none"
    with pytest.raises(ValueError, match=f"one state for all tokens, and {limit if chunks[-1] > 1 else ''}"):
        cache.crop(-kept - 1)
    assert cache.get_seq_length() == 20
    taken = min(kept, chunks[-1])
    cache.crop(-taken)
    fresh = OscarQuantizedCache(model)
    logits(model, ids[:, : 20 - taken], fresh, chunks=20 - taken)
    one, other = (logits(model, ids[:, 20:], each, chunks=1) for each in (cache, fresh))
    assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("seen, remove, fits", [(20, 20, True), (32, 5, True), (33, 1, False), (60, 4, False)])
def test_fixed_sliding_windows_take_back_until_they_are_full(seen: int, remove: int, fits: bool) -> None:
    model = tiny_model("gemma2")
    layer = OscarQuantizedCache(model, rotations_for(model), SMALL, max_cache_len=96).layers[0]
    if fits:
        check_crop(layer, seen, remove)
    else:
        with pytest.raises(ValueError, match=f"keeps 32 of {seen}"):
            check_crop(layer, seen, remove)


def test_continuous_batching() -> None:
    """It has a paged cache of its own; refused by transformers, and the patched model is as it was."""
    model = tiny_model("llama")
    patch_model(model, rotations_for(model))
    prompt = tokens(1, 20)
    before = generate(model, prompt)
    settings = GenerationConfig(max_new_tokens=4, eos_token_id=1, pad_token_id=0)
    with pytest.raises(ValueError, match="oscar"):
        model.generate_batch([[3, 4, 5], [6, 7]], generation_config=settings, progress_bar=False)
    assert torch.equal(generate(model, prompt), before)
