"""SmolLM2-135M-Instruct, the real weights: right answers, small caches, bearable time. Minutes, so only on demand."""

from __future__ import annotations

import statistics

import pytest
import torch
from transformers import DynamicCache

from eval.decode import fill, step
from eval.demo import FACTS, ask, model_file, spread
from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, calibrate, patch_model, unpatch_model
from oscar_hf.corpus import read_corpus
from oscar_hf.loading import load_model
from oscar_hf.zoo import find_rotations

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    model, tokenizer = load_model(model_file(), dtype="float32", device_map="cpu")
    return model, tokenizer


def test_ten_facts_at_ten_depths(smollm2) -> None:
    model, tokenizer = smollm2
    patch_model(model, find_rotations("smollm2-135m-instruct"))
    answers = {
        fact: ask(model, tokenizer, fact, depth, lambda: OscarQuantizedCache(model))[0]
        for fact, depth in zip(FACTS, spread(len(FACTS)), strict=True)
    }
    unpatch_model(model)
    assert all(fact.is_in(answer) for fact, answer in answers.items()), answers


def test_cache_of_4096_tokens(smollm2) -> None:
    model, tokenizer = smollm2
    patch_model(model, find_rotations("smollm2-135m-instruct"))
    cache = OscarQuantizedCache(model)
    fill(model, cache, torch.randint(0, 49152, (4096,)))
    memory = cache.memory()
    unpatch_model(model)
    assert memory.history == 2 * 30 * 3 * 64 * (4096 - 320) * 2.5 / 8
    assert memory.sink == 2 * 30 * 3 * 64 * 64 * 4 and memory.recent == 2 * 30 * 3 * 64 * 256 * 4
    assert memory.slack <= 0.1 * memory.history


def test_decode_time_at_4096_tokens(smollm2) -> None:
    model, _ = smollm2
    tokens = torch.randint(0, 49152, (4096 + 20,))
    stock = DynamicCache(config=model.config)
    fill(model, stock, tokens[:4096])
    patch_model(model, RotationSet.without_data(set(range(30)), 64), OscarConfig())
    oscar = OscarQuantizedCache(model)
    fill(model, oscar, tokens[:4096])
    times = [(step(model, stock, token), step(model, oscar, token)) for token in tokens[4096:]]
    unpatch_model(model)
    before, after = (statistics.median(part[3:]) for part in zip(*times, strict=True))
    assert after <= 2.5 * before, (before, after)


def test_the_zoo_set_is_what_its_command_makes(smollm2) -> None:
    model, tokenizer = smollm2
    published = find_rotations("smollm2-135m-instruct")
    made = calibrate(model, read_corpus("pydoc"), tokenizer, progress=False)
    for index, layer in published.layers.items():
        for name, tensor in layer.tensors().items():
            torch.testing.assert_close(made.layers[index].tensors()[name], tensor, rtol=0, atol=1e-6)
