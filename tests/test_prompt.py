"""Recipe "prompt": transforms fitted to each sequence at prefill, whatever is done with the cache."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from test_fixed import run
from test_patch import generate, relative_error, rotations_for, tokens
from tiny import tiny_model
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, patch_model, unpatch_model
from oscar_hf._compat import cache_argument, set_attention
from oscar_hf.contenders import parse_contender
from oscar_hf.fitting import FIRST, PRIOR_TOKENS, RIDGE, RowTransform, fit, metric_of, query_moment, sample
from oscar_hf.matrices import balanced_transform, hadamard
from oscar_hf.prompt import PromptLayer, _tell
from oscar_hf.search import Metric

SMALL = OscarConfig(recipe="prompt", sink_tokens=4, recent_tokens=8)
SEARCHING = SMALL.replace(k_search=1)
EXACT = OscarConfig(sink_tokens=4, recent_tokens=8, bits=16)
CONFIGS = pytest.mark.parametrize("config", [SMALL, SEARCHING], ids=["rounded", "searched"])


def patched(family: str = "qwen3", config: OscarConfig = SMALL, rotations: RotationSet | str = "prompt"):
    return patch_model(tiny_model(family), rotations, config)


@torch.no_grad()
def go_on(model: PreTrainedModel, ids: Tensor, cache: OscarQuantizedCache, mask: Tensor | None = None) -> Tensor:
    return model(ids, attention_mask=mask, **{cache_argument(model): cache}).logits


def feed(model, ids: Tensor, cache: OscarQuantizedCache, prompt: int = 0, mask: Tensor | None = None) -> Tensor:
    """Logits of a prompt and of single tokens that go on from what the cache holds; padding has no positions."""
    past = int(cache.get_seq_length())
    mask = torch.ones(len(ids), past + ids.shape[1], dtype=torch.long) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    stops = [*([prompt] if prompt else []), *range(prompt + 1, ids.shape[1] + 1)]
    parts, start = [], 0
    for stop in stops:
        seen = slice(past + start, past + stop)
        given = {"attention_mask": mask[:, : past + stop], "position_ids": positions[:, seen]}
        with torch.no_grad():
            parts.append(model(ids[:, start:stop], **given, **{cache_argument(model): cache}).logits)
        start = stop
    return torch.cat(parts, 1)


def rows_of(cache: OscarQuantizedCache, layer: int = -1) -> RowTransform:
    rows = cache.oscar_layers[layer].rows
    assert rows is not None
    return rows


def states(batch: int = 2, kv_heads: int = 3, count: int = 400, size: int = 16) -> tuple[Tensor, Tensor]:
    """Queries and keys whose channels differ in size, about a large mean."""
    spread = torch.logspace(-1, 1, size)
    keys = torch.randn(batch, kv_heads, count, size) * spread + 20 * torch.randn(1, kv_heads, 1, size)
    return torch.randn(batch, 2 * kv_heads, count, size) * spread.flip(0).roll(3), keys


# The fit


def test_the_fit_is_what_its_formula_says() -> None:
    queries, keys = states()
    k_mean, k_rotation, q_rotation = fit(keys, query_moment(queries, 3))
    size, ridge = 16, RIDGE * (1 + PRIOR_TOKENS / 400)
    for row in range(2):
        for head in range(3):
            used = keys[row, head, FIRST:].double().numpy()
            asked = queries[row, 2 * head : 2 * head + 2].flatten(0, 1).double().numpy()
            moments = np.cov(used.T, bias=True), asked.T @ asked / len(asked)
            s, c = (scipy.linalg.cholesky(m * size / np.trace(m) + ridge * np.eye(size), lower=True) for m in moments)
            expected = c @ scipy.linalg.inv(s).T @ hadamard(size).numpy()
            np.testing.assert_allclose(k_mean[row, head], used.mean(0), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(k_rotation[row, head], expected, rtol=1e-3, atol=1e-3)
    eye = torch.eye(size).expand(2, 3, size, size)
    torch.testing.assert_close(k_rotation @ q_rotation.mT, eye, rtol=1e-5, atol=1e-5)


def error(k_rotation: Tensor, q_rotation: Tensor, keys: Tensor, queries: Tensor) -> float:
    """What an isotropic quantiser's error of logits goes as."""
    left = (k_rotation.double().mT @ keys @ k_rotation.double()).diagonal(dim1=-2, dim2=-1).sum(-1)
    right = (q_rotation.double().mT @ queries @ q_rotation.double()).diagonal(dim1=-2, dim2=-1).sum(-1)
    return (left * right).sqrt().mean().item()


def test_it_costs_as_little_as_the_balanced_transform() -> None:
    queries, keys = states(count=20_000)
    moment, centred = query_moment(queries, 3), (keys - keys.mean(2, keepdim=True)).double()
    covariance = centred.mT @ centred / keys.shape[2]
    _, k_rotation, q_rotation = fit(keys, moment)
    balanced = balanced_transform(covariance, moment.double(), 0.5, 0.1)
    plain = hadamard(16).expand_as(covariance)
    errors = [
        error(k, q, covariance, moment.double())
        for k, q in ((k_rotation, q_rotation), (balanced, torch.linalg.inv(balanced).mT), (plain, plain))
    ]
    assert errors[0] < 1.3 * errors[1] and errors[0] < 0.7 * errors[2]


def test_few_tokens_keep_to_the_prior() -> None:
    queries, keys = states(count=2)
    _, plain, _ = fit(keys, query_moment(queries, 3))
    assert torch.linalg.cond(plain).max() < 1.1  # nearly a Hadamard
    model_queries, model_keys = states(count=5000)
    k_mean, k_rotation, q_rotation = (part[0] for part in fit(model_keys, query_moment(model_queries, 3)))
    mean, fitted, inverse = fit(keys, query_moment(queries, 3), prior=(k_mean, k_rotation, q_rotation))
    assert relative_error(mean, k_mean.expand_as(mean)) < 0.01
    grams = (part @ part.mT for part in (fitted, k_rotation.expand_as(fitted)))
    assert relative_error(*(g / g.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] for g in grams)) < 0.05
    torch.testing.assert_close(fitted @ inverse.mT, torch.eye(16).expand_as(fitted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 1e-20, float("inf"), float("nan")])
def test_keys_without_any_spread(value: float) -> None:
    k_mean, k_rotation, q_rotation = fit(torch.full((1, 2, 30, 8), value), torch.zeros(1, 2, 8, 8))
    assert k_mean.isfinite().all()
    torch.testing.assert_close(k_rotation @ q_rotation.mT, torch.eye(8).expand_as(k_rotation))


def test_without_queries_the_mean_is_fitted() -> None:
    _, keys = states()
    k_mean, k_rotation, q_rotation = fit(keys, None)
    torch.testing.assert_close(k_mean, keys[:, :, FIRST:].mean(2))
    assert torch.equal(k_rotation, q_rotation) and torch.equal(k_rotation[1, 2], hadamard(16).float())


def test_the_metric_is_that_of_calibration() -> None:
    queries, keys = states()
    moment = query_moment(queries, 3)
    _, _, q_rotation = fit(keys, moment)
    found = metric_of(q_rotation, moment)
    expected = Metric.of(found.matrix)
    torch.testing.assert_close(found.factor, expected.factor, rtol=1e-3, atol=1e-5)
    own = found.rows(slice(1, 2))
    assert torch.equal(own.matrix, found.matrix[1:]) and expected.rows(0) is not expected
    shared = Metric.of(found.matrix[0])
    assert shared.rows(slice(0, 1)) is shared


@pytest.mark.parametrize("count, kept", [(3, 3), (16, 16), (17, 13), (2052, 1024), (2053, 683)])
def test_a_sample_is_even_and_bounded(count: int, kept: int) -> None:
    picked = sample(torch.arange(count).view(1, 1, -1, 1)).flatten()
    assert len(picked) == kept and len(picked) <= 1024
    assert len(set(picked.diff().tolist())) <= 1


# The cache


@pytest.mark.parametrize(
    "family, config",
    [("llama", SEARCHING), *((family, SMALL) for family in ("llama", "gemma2", "gpt_oss", "qwen3_next"))],
    ids=["searched", "llama", "gemma2", "gpt_oss", "qwen3_next"],
)
def test_rows_alone_in_a_padded_batch_and_fixed(family: str, config: OscarConfig) -> None:
    model, ids = patched(family, config), tokens(3, 60)
    mask = torch.stack([torch.arange(60) >= pad for pad in (0, 9, 30)]).long()
    outputs = []
    for length in (None, 60):
        cache = OscarQuantizedCache(model, max_cache_len=length)
        outputs.append(feed(model, ids, cache, 45, mask))
        assert all(layer.rows.complete for layer in cache.oscar_layers)
        for row, pad in enumerate((0, 9, 30)):
            alone = OscarQuantizedCache(model, max_cache_len=length)
            single = feed(model, ids[row : row + 1, pad:], alone, 45 - pad)
            assert relative_error(outputs[-1][row : row + 1, pad:], single) < 1e-4
    assert relative_error(outputs[1][mask.bool()], outputs[0][mask.bool()]) < 1e-4


@CONFIGS
def test_tokens_are_exact_until_the_history_begins(config: OscarConfig) -> None:
    model, ids = patched(config=config), tokens(2, 40)
    exact = run(model, ids, OscarQuantizedCache(model, config=EXACT), prompt=5)
    cache = OscarQuantizedCache(model)
    waited = run(model, ids[:, :12], cache, prompt=5)
    assert relative_error(waited, exact[:, :12]) < 1e-5
    assert rows_of(cache).fitted == [False, False] and rows_of(cache).seen == [12, 12]
    after = torch.cat([go_on(model, ids[:, n : n + 1], cache) for n in range(12, 40)], 1)
    assert rows_of(cache).fitted == [True, True] and rows_of(cache).moments is None
    assert 1e-3 < relative_error(after, exact[:, 12:]) < 0.6
    chunked = OscarQuantizedCache(model)
    go_on(model, ids[:, :7], chunked), go_on(model, ids[:, 7:13], chunked)
    one = OscarQuantizedCache(model)
    go_on(model, ids[:, :13], one)
    for name, held in rows_of(one, 0).held.items():  # the first layer's keys do not depend on the cache
        torch.testing.assert_close(rows_of(chunked, 0).held[name], held, rtol=1e-3, atol=1e-4)


def test_it_is_better_than_no_fit_where_keys_have_an_offset() -> None:
    model = tiny_model("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[7] += 60.0
            layer.self_attn.k_proj.bias[15] -= 60.0
    ids = tokens(1, 300)
    expected = run(model, ids, OscarQuantizedCache(model, RotationSet.without_data({0, 1, 2}, 16), EXACT), prompt=200)
    errors = {}
    for recipe in ("prompt", "hadamard"):
        patch_model(model, RotationSet.without_data({0, 1, 2}, 16, recipe), OscarConfig(recipe=recipe, sink_tokens=4))
        config = OscarConfig(recipe=recipe, sink_tokens=4, recent_tokens=8)
        for transform in model._oscar_patch.transforms.values():
            transform.judged = recipe == "hadamard"  # which would be kept in 16 bits
        cache = OscarQuantizedCache(model, config=config)
        errors[recipe] = relative_error(run(model, ids, cache, prompt=200), expected)
        assert not cache.memory().exact_layers
        unpatch_model(model)
    assert errors["prompt"] < 0.8 * errors["hadamard"]


@CONFIGS
@pytest.mark.parametrize("length", [None, 90], ids=["growing", "fixed"])
def test_crop_keeps_the_fit_and_reset_forgets_it(config: OscarConfig, length: int | None) -> None:
    model, ids = patched(config=config), tokens(2, 60)
    cache = OscarQuantizedCache(model, max_cache_len=length)
    expected = run(model, ids, cache, prompt=40)
    held = {name: tensor.clone() for name, tensor in rows_of(cache).held.items()}
    cache.crop(-55)
    assert rows_of(cache).complete
    again = go_on(model, ids[:, 5:9], cache)
    assert relative_error(again, run(model, ids[:, :9], OscarQuantizedCache(model), prompt=5)[:, 5:]) < 0.7
    assert all(torch.equal(tensor, held[name]) for name, tensor in rows_of(cache).held.items())
    addresses = [tensor.data_ptr() for tensor in rows_of(cache).held.values()]
    cache.reset()
    other = tokens(2, 60)
    assert relative_error(run(model, other, cache), run(model, other, OscarQuantizedCache(model))) < 1e-5
    assert not torch.equal(rows_of(cache).held["k_mean"], held["k_mean"])
    if length:
        assert addresses == [tensor.data_ptr() for tensor in rows_of(cache).held.values()]
    cache.reset()
    assert torch.equal(
        run(model, ids[:1], cache), run(model, ids[:1], OscarQuantizedCache(model, max_cache_len=length))
    )
    cache.reset()
    assert relative_error(run(model, ids, cache), expected) < 1e-5


@CONFIGS
@pytest.mark.parametrize("length", [None, 90], ids=["growing", "fixed"])
@pytest.mark.parametrize("prompt", [6, 40], ids=["waiting", "fitted"])
def test_rows_and_copies_keep_their_fit(config: OscarConfig, length: int | None, prompt: int) -> None:
    model, ids = patched(config=config), tokens(3, 60)
    cache = OscarQuantizedCache(model, max_cache_len=length)
    run(model, ids[:, :prompt], cache, prompt=prompt)
    order = torch.tensor([2, 0, 0])
    for reordered in (copy.deepcopy(cache), cache):
        reordered.reorder_cache(order)
        rest = feed(model, ids[order, prompt:], reordered)
        for row, source in enumerate(order):
            single = run(model, ids[source, None], OscarQuantizedCache(model, max_cache_len=length), prompt=prompt)
            assert relative_error(rest[row], single[0, prompt:]) < 1e-4
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert rows_of(cache).held["k_mean"].shape[0] == 2 and rows_of(cache).fitted == [True, True]
    assert torch.isfinite(go_on(model, tokens(2, 5), cache)).all()


@CONFIGS
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("prompt", [6, 40], ids=["waiting", "fitted"])
def test_forks_go_on_by_themselves(config: OscarConfig, batch: int, prompt: int) -> None:
    model, ids = patched(config=config), tokens(batch, 60)
    cache = OscarQuantizedCache(model)
    run(model, ids[:, :prompt], cache, prompt=prompt)
    fork, other = cache.fork(2), tokens(2 * batch, 30)
    branch = feed(model, other, fork)
    rest = feed(model, ids[:, prompt:], cache)
    for row in range(2 * batch):
        whole = torch.cat([ids[row // 2, None, :prompt], other[row, None]], 1)
        single = run(model, whole, OscarQuantizedCache(model), prompt=prompt)
        assert relative_error(branch[row], single[0, prompt:]) < 1e-4
    alone = run(model, ids, OscarQuantizedCache(model), prompt=prompt)
    assert relative_error(rest, alone[:, prompt:]) < 1e-4
    if prompt == 40 and batch == 1:
        assert rows_of(fork).held["k_rotation"].data_ptr() == rows_of(cache).held["k_rotation"].data_ptr()


@CONFIGS
@pytest.mark.parametrize("length", [None, 90], ids=["growing", "fixed"])
@pytest.mark.parametrize("prompt", [6, 40], ids=["waiting", "fitted"])
def test_on_disk_and_pickled(config: OscarConfig, length: int | None, prompt: int, tmp_path: Path) -> None:
    model, ids = patched(config=config), tokens(2, 60)
    cache = OscarQuantizedCache(model, max_cache_len=length)
    run(model, ids[:, :prompt], cache, prompt=prompt)
    cache.save(tmp_path / "context")
    copies = [
        OscarQuantizedCache.load(tmp_path / "context", model, max_cache_len=length),
        pickle.loads(pickle.dumps(cache)),
    ]
    assert copies[0].memory().rotations == cache.memory().rotations
    copies[1].bind(model)
    expected = feed(model, ids[:, prompt:], cache)
    for twin in copies:
        assert relative_error(feed(model, ids[:, prompt:], twin), expected) < 1e-6
        assert rows_of(twin).given is model._oscar_patch.transforms[2]


def test_a_damaged_fit_is_refused(tmp_path: Path) -> None:
    model, ids = patched(), tokens(2, 40)
    cache = OscarQuantizedCache(model)
    run(model, ids, cache)
    cache.save(tmp_path / "context")
    facts = tmp_path / "context" / "oscar_cache.json"
    text = facts.read_text()
    for wrong in (text.replace('"fit"', '"fat"'), text.replace("true,\n     true", "true,\n     1")):
        assert wrong != text
        facts.write_text(wrong)
        with pytest.raises(ValueError, match=r"malformed|JSON"):
            OscarQuantizedCache.load(tmp_path / "context", model)


@CONFIGS
def test_a_step_compiles_whole_and_once(config: OscarConfig) -> None:
    model, ids = patched(config=config), tokens(2, 50)
    torch._dynamo.reset()
    counters.clear()
    expected = run(model, ids, OscarQuantizedCache(model))
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    graphs = []
    for cache in [OscarQuantizedCache(model, max_cache_len=64) for _ in range(2)]:
        for _ in range(2):
            cache.reset()
            assert relative_error(run(model, ids, cache, step), expected) < 3e-5
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4


@CONFIGS
@pytest.mark.parametrize("length", [None, 90], ids=["growing", "fixed"])
def test_inference_mode_on_and_off(config: OscarConfig, length: int | None) -> None:
    model, ids = patched(config=config), tokens(2, 60)
    expected = feed(model, ids, OscarQuantizedCache(model, max_cache_len=length), 6)
    cache = OscarQuantizedCache(model, max_cache_len=length)
    with torch.inference_mode():
        first = feed(model, ids[:, :10], cache, 6)
    middle = feed(model, ids[:, 10:11], cache)
    with torch.inference_mode():
        last = feed(model, ids[:, 11:50], cache)
    end = feed(model, ids[:, 50:], cache)
    assert relative_error(torch.cat([first, middle, last, end], 1), expected) < 1e-5
    cache.reset()
    assert relative_error(feed(model, ids, cache, 6), expected) < 1e-5


def test_padded_rows_wait_on_their_own() -> None:
    model, ids = patched(), tokens(2, 40)
    cache = OscarQuantizedCache(model)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    feed(model, ids[:, :8], cache, 8, mask[:, :8])
    assert rows_of(cache).seen == [8, 5]
    feed(model, ids[:, 8:], cache, 0, mask)
    alone = OscarQuantizedCache(model)
    feed(model, ids[1:, 3:8], alone, 5)
    feed(model, ids[1:, 8:], alone)
    torch.testing.assert_close(rows_of(cache).held["k_rotation"][1], rows_of(alone).held["k_rotation"][0])


def test_memory_counts_the_rotations() -> None:
    model, ids = patched("llama"), tokens(2, 40)
    cache = OscarQuantizedCache(model)
    run(model, ids, cache)
    matrices, means = 2 * 16 * 16, 16  # of each row and KV head
    assert cache.memory().rotations == 3 * 2 * 2 * (matrices + means) * 4
    memory = cache.memory()
    assert memory.total == sum(
        memory.to_dict()[name] for name in ("sink", "recent", "history", "slack", "rotations", "other")
    )
    assert "rotations 0.0" in str(memory)
    fixed = OscarQuantizedCache(model, max_cache_len=50)
    run(model, ids, fixed)
    assert fixed.memory().rotations == memory.rotations


def test_two_caches_on_one_model_have_fits_of_their_own() -> None:
    model, ids = patched(), tokens(2, 50)
    expected = [run(model, ids[row, None], OscarQuantizedCache(model)) for row in range(2)]
    caches = [OscarQuantizedCache(model) for _ in range(2)]
    outputs: list[list[Tensor]] = [[], []]
    for start, stop in ((0, 40), *((n, n + 1) for n in range(40, 50))):
        for row in range(2):
            outputs[row].append(go_on(model, ids[row, None, start:stop], caches[row]))
    for row in range(2):
        assert relative_error(torch.cat(outputs[row], 1), expected[row]) < 1e-5


@pytest.mark.parametrize("config", [SMALL, None], ids=["asked", "fallback"])
def test_unpatched_and_under_other_attention(config: OscarConfig | None) -> None:
    model, ids = tiny_model("llama"), tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    unpatched = OscarQuantizedCache(model, config=config)
    assert all(isinstance(layer, PromptLayer) for layer in unpatched.oscar_layers)
    go_on(model, ids[:, :50], unpatched, mask[:, :50])
    plain = go_on(model, ids[:, 50:51], unpatched, mask[:, :51])
    patch_model(model, "prompt", config)
    set_attention(model, "sdpa")
    cache = OscarQuantizedCache(model)
    go_on(model, ids[:, :50], cache, mask[:, :50])
    assert relative_error(go_on(model, ids[:, 50:51], cache, mask[:, :51]), plain) < 1e-4
    assert rows_of(cache).fitted == [config is SMALL] * 2


def test_calibrated_rotations_are_where_a_fit_starts() -> None:
    model, ids = tiny_model("qwen3"), tokens(1, 400)
    rotations = rotations_for(model)
    patch_model(model, rotations, SMALL)
    cache = OscarQuantizedCache(model)
    run(model, ids, cache, prompt=300)
    k_mean = rotations.layers[2].k_mean
    fitted = rows_of(cache).held["k_mean"][0]
    assert relative_error(fitted, k_mean) > 0 and isinstance(cache.oscar_layers[0], PromptLayer)
    balanced = OscarQuantizedCache(model, config=OscarConfig(recipe="balanced"))
    assert not any(isinstance(layer, PromptLayer) for layer in balanced.oscar_layers)
    searching = OscarQuantizedCache(model, config=SEARCHING)  # needs no metric of theirs
    assert torch.isfinite(run(model, ids[:, :30], searching, prompt=20)).all()


def test_a_layer_beyond_two_bits_stays_exact() -> None:
    model, ids = patched("qwen2"), tokens(2, 60)
    exact = run(model, ids, OscarQuantizedCache(model, config=EXACT))
    for transform in model._oscar_patch.transforms.values():
        transform.bits, transform.judged = 16, True
    cache = OscarQuantizedCache(model)
    assert relative_error(run(model, ids, cache), exact) < 1e-5
    assert cache.memory().exact_layers == (0, 1, 2) and cache.memory().rotations == 0
    twin = pickle.loads(pickle.dumps(cache))
    assert relative_error(go_on(model, ids[:, :3], twin), go_on(model, ids[:, :3], cache)) < 1e-6


def test_noise_is_found_after_the_fit_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_hf.outliers.BOUND", 1e-3)
    monkeypatch.setattr("oscar_hf.outliers.DROWNED", 1e-3)
    model, ids = patched("llama"), tokens(2, 60)
    exact = run(model, ids, OscarQuantizedCache(model, config=EXACT), prompt=6)
    monkeypatch.setattr("oscar_hf.outliers.LogitError.reason", "too far off")
    cache = OscarQuantizedCache(model)
    with pytest.warns(UserWarning, match="too far off"):
        assert relative_error(run(model, ids, cache, prompt=6), exact) < 1e-4
    assert cache.memory().exact_layers == (0, 1, 2)


# How it is asked for


def test_a_model_that_no_zoo_knows(caplog: pytest.LogCaptureFixture) -> None:
    _tell.cache_clear()
    model = tiny_model("llama")
    with pytest.raises(FileNotFoundError, match="oscar-hf calibrate"):
        patch_model(model, fallback=False)
    with caplog.at_level(logging.WARNING):
        patch_model(model)
        OscarQuantizedCache(model), OscarQuantizedCache(model)
        unpatch_model(model)
        OscarQuantizedCache(model)
    assert len(caplog.records) == 1 and "recipe 'prompt'" in caplog.text
    caplog.clear()
    assert OscarQuantizedCache(model, config=SMALL).config == SMALL and not caplog.records
    patch_model(model, "prompt")
    assert not caplog.records and model._oscar_patch.config.recipe == "prompt"
    changed = OscarQuantizedCache(model, config=OscarConfig(group_size=8))
    assert changed.config.fits and changed.config.group_size == 8
    text = generate(model, tokens(1, 400))
    assert text.shape == (1, 424)


def test_a_set_on_disk_and_a_contender(tmp_path: Path) -> None:
    model = tiny_model("llama")
    rotations = RotationSet.without_data({0, 1, 2}, 16, "prompt")
    rotations.save_pretrained(tmp_path)
    patch_model(model, tmp_path)
    assert isinstance(OscarQuantizedCache(model).oscar_layers[0], PromptLayer)
    unpatch_model(model)
    contender = parse_contender("prompt:group_size=8:k_clip=0.9", lambda recipe: rotations)
    assert contender.config is not None and (contender.config.group_size, contender.config.k_clip) == (8, 0.9)
    made = rotations_for(model)
    made.save_pretrained(tmp_path / "calibrated")
    blended = parse_contender(f"{tmp_path / 'calibrated'}:recipe=prompt", lambda recipe: rotations)
    assert blended.config is not None and blended.config.fits and blended.config.k_clip == made.config.k_clip
    with contender.caches(model) as make:
        cache = make()
        assert isinstance(cache.oscar_layers[0], PromptLayer) and not cache.config.exact_chunks
        go_on(model, tokens(1, 400), cache)
        assert rows_of(cache).fitted == [True]
