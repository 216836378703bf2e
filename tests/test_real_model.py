"""SmolLM2-135M-Instruct, the real weights: right answers, small caches, bearable time. Minutes, so only on demand."""

from __future__ import annotations

import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from eval.decode import fill, step
from eval.demo import FACTS, ask, model_file, spread
from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, calibrate, patch_model, unpatch_model
from oscar_hf.cli import app
from oscar_hf.corpus import read_corpus
from oscar_hf.loading import load_model
from oscar_hf.zoo import find_rotations, zoo_folder

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
            torch.testing.assert_close(made.layers[index].tensors()[name], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the set is of the manual of Python 3.11")
def test_the_bundled_set_comes_from_the_documented_command(tmp_path: Path) -> None:
    page = (zoo_folder() / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^oscar-hf calibrate (?:.*\\\n)*.*$", page, re.MULTILINE)
    assert command is not None
    words = shlex.split(command[0])[1:]
    words[words.index("SmolLM2-135M-Instruct.Q4_1.gguf")] = model_file()
    words[words.index("--out") + 1] = str(tmp_path)
    result = CliRunner().invoke(app, [*words, "--device-map", "cpu"])
    assert result.exit_code == 0, result.output
    made, kept = RotationSet.from_pretrained(tmp_path), find_rotations("smollm2-135m-instruct")
    assert made.provenance["model"] == kept.provenance["model"] and made.config == kept.config
    for index, layer in kept.layers.items():
        for name, tensor in layer.tensors().items():
            assert torch.allclose(made.layers[index].tensors()[name], tensor, rtol=0, atol=1e-6), (index, name)
