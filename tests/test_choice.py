"""What calibration chooses on held-out tokens: per layer, and the window."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, calibrate
from oscar_hf.choice import HISTORY, Held, choose_window, hold_out, stored_keys, stored_values
from oscar_hf.config import get_recipe
from oscar_hf.quantization import dequantize
from oscar_hf.rotation import CONFIG_NAME
from oscar_hf.transform import Transform

SMALL = OscarConfig(sink_tokens=2, recent_tokens=5)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (count,), generator=torch.manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def chosen(model: PreTrainedModel) -> RotationSet:
    return calibrate(model, [tokens(600), tokens(700, 1)], recipe="balanced", choose=True, progress=False)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_error_is_that_of_attention_with_a_mixed_history(softcap: float | None, sinks: bool) -> None:
    generator = torch.manual_seed(0)
    query, key, value, off = (torch.randn(1, h, 23, 8, generator=generator) for h in (4, 2, 2, 2))
    sink_logits = torch.randn(4, generator=generator) if sinks else None
    held = Held(query, key, value, SMALL, 0.5, softcap, sink_logits)
    assert held.error() == held.error(key, value) == 0

    def output(head: int, place: int, keys: Tensor, values: Tensor) -> Tensor:
        mixed = [
            (keys if 2 <= i <= place - 5 else key, values if 2 <= i <= place - 5 else value) for i in range(place + 1)
        ]
        logits = torch.stack([query[0, head, place] @ k[0, head // 2, i] for i, (k, _) in enumerate(mixed)]) * 0.5
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        if sink_logits is not None:
            logits = torch.cat([logits, sink_logits[head : head + 1]])
        weights = logits.softmax(0)
        return sum(w * v[0, head // 2, i] for w, (i, (_, v)) in zip(weights, enumerate(mixed), strict=False))

    for keys, values in ((key + off, value), (key, value + off), (key + off, value - off)):
        pairs = ((head, place) for head in range(4) for place in range(7, 23))
        expected = sum((output(*p, keys, values) - output(*p, key, value)).square().sum().item() for p in pairs)
        given = (None if keys is key else keys, None if values is value else values)
        assert held.error(*given) == pytest.approx(expected, rel=1e-4)


def test_stored_states_are_those_of_a_cache(model: PreTrainedModel, chosen: RotationSet) -> None:
    """With the layer's own settings: what a cache holds is what the choice was made by."""
    cache = OscarQuantizedCache(model, chosen, chosen.config.replace(sink_tokens=0, recent_tokens=0))
    layer, states = cache.oscar_layers[1], torch.randn(1, 2, 40, 16, generator=torch.manual_seed(0))
    layer.update(states, states * 2)
    config, transform = chosen.layer_config(1), Transform(chosen.layers[1])
    (span,) = layer.tiers.history.blocks(slice(0, 1), 40)
    keys, values = dequantize(span.keys), dequantize(span.values)
    torch.testing.assert_close(transform.undo_keys(keys), stored_keys(transform, states, config))
    torch.testing.assert_close(transform.undo_values(values), stored_values(transform, states * 2, config))


def test_held_out_tokens_are_not_fitted_to() -> None:
    least = 64 + 256 + HISTORY
    for lengths, expected in (
        ([4096, 4096, 3000], ([4096, 4096, 3000 - 1119], [1119])),
        ([2000], ([2000 - least], [least])),
        ([3000, 100], ([3000 - least], [least])),
        ([8000, 600, 600], ([8000, 600 - least], [600, least])),
        ([8000, 600], ([8000 - least], [600, least])),
    ):
        fitted, held = hold_out(list(torch.arange(sum(lengths)).split(lengths)), OscarConfig())
        assert not {*torch.cat(fitted).tolist()} & {*torch.cat(held).tolist()}
        assert (list(map(len, fitted)), list(map(len, held))) == expected
    for lengths in ([least], [500, 500, 500]):
        with pytest.raises(ValueError, match="too few to hold out"):
            hold_out([torch.arange(n) for n in lengths], OscarConfig())


def test_every_layer_gets_no_worse_and_says_so(chosen: RotationSet, tmp_path: Path) -> None:
    report = chosen.provenance["choice"]
    assert report["tokens"] == 576 and chosen.provenance["tokens"] == 1300 - 576
    assert sorted(map(int, report["layers"])) == sorted(chosen.layers)
    for index, layer in chosen.layers.items():
        row, config = report["layers"][str(index)], chosen.layer_config(index)
        assert 0 < row["after"] <= row["before"] < 1
        assert (row["k_clip"], row["v_clip"], row["scale_rule"]) == (config.k_clip, config.v_clip, config.scale_rule)
        assert set(layer.settings) == {
            n for n in ("k_clip", "v_clip", "scale_rule") if row[n] != getattr(chosen.config, n)
        }
    assert any(layer.settings for layer in chosen.layers.values())
    assert any(row["after"] < row["before"] for row in report["layers"].values())
    chosen.save_pretrained(tmp_path)
    again = RotationSet.from_pretrained(tmp_path)
    assert again.digest() == chosen.digest() and again.provenance == chosen.provenance
    assert [layer.settings for layer in again.layers.values()] == [layer.settings for layer in chosen.layers.values()]
    layers = {index: replace(layer, settings={}) for index, layer in chosen.layers.items()}
    assert replace(chosen, layers=layers).digest() != chosen.digest()


def test_caches_take_each_layers_settings(model: PreTrainedModel, chosen: RotationSet) -> None:
    cache = OscarQuantizedCache(model, chosen)
    assert [layer.config for layer in cache.oscar_layers] == [chosen.layer_config(index) for index in chosen.layers]
    asked = OscarQuantizedCache(model, chosen, chosen.config.replace(v_clip=0.77))
    for index, layer in enumerate(asked.oscar_layers):
        assert layer.config.v_clip == 0.77 and layer.config.k_clip == chosen.layer_config(index).k_clip


@pytest.mark.parametrize(
    "wrong",
    ['{"9": {}}', '{"0": 1}', "[{}]", '{"x": {}}', '{"0": {"k_clip": 2}}', '{"0": {"sink_tokens": 1}}', '{"00": {}}'],
)
def test_malformed_settings_are_refused(chosen: RotationSet, tmp_path: Path, wrong: str) -> None:
    chosen.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / CONFIG_NAME).read_text())
    settings["layer_settings"] = json.loads(wrong)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="[Ll]ayer"):
        RotationSet.from_pretrained(tmp_path)


def test_the_smallest_window_that_reaches_a_kl(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    rotations = calibrate(model, [tokens(1200)], recipe="balanced", target_kl=10.0, progress=False)
    assert rotations.config.recent_tokens == 64 and not caplog.records
    assert rotations.provenance["tokens"] == 1200 - 576
    found = choose_window(model, rotations, 0.0, [tokens(640, 3)], progress=False)
    assert list(found) == [64, 128] and rotations.config.recent_tokens == 128 and found[128] < found[64]
    assert "No recent window reached a KL of 0: 128 tokens" in caplog.text
    target = (found[64] + found[128]) / 2
    choose_window(model, rotations, target, [tokens(640, 3)], progress=False)
    assert rotations.config.recent_tokens == 128
    assert rotations.provenance["window"]["kl"] == {str(w): round(kl, 6) for w, kl in found.items()}
    assert getattr(model, "_oscar_patch", None) is None


def test_a_recipe_that_needs_no_data_can_be_given_a_window(model: PreTrainedModel) -> None:
    rotations = calibrate(model, [tokens(1200)], recipe="hadamard", target_kl=10.0, progress=False)
    assert rotations.config.recipe == "hadamard" and rotations.provenance["window"]["target_kl"] == 10.0


def test_search_is_chosen_for_as_it_stores(model: PreTrainedModel) -> None:
    rotations = calibrate(model, [tokens(1300)], recipe=replace(get_recipe("search"), choose=True), progress=False)
    rows = rotations.provenance["choice"]["layers"].values()
    assert all(row["after"] <= row["before"] for row in rows)
    assert all(layer.k_metric is not None for layer in rotations.layers.values())
