import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import torch
import transformers
from tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.llama import modeling_llama

import oscar_hf.calibration
import oscar_hf.zoo
from oscar_hf import calibrate, patch_model, unpatch_model
from oscar_hf.calibration import LayerStatistics, collect_statistics, fit_layer, history_attention
from oscar_hf.config import OscarConfig, Recipe, get_recipe
from oscar_hf.corpus import read_corpus
from oscar_hf.matrices import bit_reversal, hadamard
from oscar_hf.rotation import RotationSet
from oscar_hf.zoo import find_rotations

SIZE, KV_HEADS, GROUPS = 16, 2, 2
SEQUENCES = [torch.randint(3, 128, (length,), generator=torch.manual_seed(1)) for length in (70, 41)]
OSCAR = [
    {},
    {"value_target": "output"},
    {"per_head": True},
    {"per_head": True, "value_target": "output"},
    {"key_mean": True},
    {"k_transform": "hadamard"},
    {"v_transform": "hadamard"},
    {"k_transform": "identity", "v_transform": "identity"},
]
BALANCED = [
    {},
    {"per_head": False},
    {"key_mean": False},
    {"per_head": False, "key_mean": False},
    {"alpha": 0.0},
    {"alpha": 1.0},
    {"ridge": 0.0},
    {"ridge": 10.0},
    {"v_transform": "eigen"},
    {"v_transform": "eigen", "value_target": "output", "per_head": False},
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def fresh() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(128)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def as_text(ids: Tensor) -> str:
    return " ".join(f"w{index}" for index in ids.tolist())


def fit(model: PreTrainedModel, data: Any = SEQUENCES, *args: Any, **settings: Any) -> RotationSet:
    return calibrate(model, data, *args, progress=False, **settings)


# The fit, against a direct computation


class Direct:
    """All q, k, v of one layer, and the moments of a KV head computed from them in one go."""

    def __init__(self, states: list[tuple[np.ndarray, ...]]):
        self.states = states

    def rows(self, part: int, head: int) -> np.ndarray:
        heads = slice(head * GROUPS, (head + 1) * GROUPS) if part == 0 else slice(head, head + 1)
        return np.concatenate([sequence[part][heads].reshape(-1, SIZE) for sequence in self.states])

    def queries(self, head: int) -> np.ndarray:
        rows = self.rows(0, head)
        return rows.T @ rows / len(rows)

    def keys(self, head: int, centred: bool) -> np.ndarray:
        rows = self.rows(1, head)
        return np.cov(rows.T, bias=True) if centred else rows.T @ rows / len(rows)

    def values(self, head: int, target: str) -> np.ndarray:
        if target == "score":
            keys, values = self.rows(1, head), self.rows(2, head)
            weights = np.einsum("ti,ij,tj->t", keys, self.queries(head), keys)
            return np.einsum("t,ti,tj->ij", weights / weights.sum(), values, values)
        outputs = []
        for query, key, value in self.states:
            logits = query[head * GROUPS : (head + 1) * GROUPS] @ key[head].T / SIZE**0.5
            logits[:, np.triu(np.ones(logits.shape[1:], dtype=bool), 1)] = -np.inf
            outputs.append((scipy.special.softmax(logits, axis=-1) @ value[head]).reshape(-1, SIZE))
        rows = np.concatenate(outputs)
        return rows.T @ rows / len(rows)


@pytest.fixture(scope="module")
def direct(model: PreTrainedModel) -> dict[int, Direct]:
    """What the model's own eager attention is given, layer by layer."""
    states: dict[int, list] = {}
    eager = modeling_llama.eager_attention_forward

    def capture(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        arrays = tuple(t[0].double().numpy() for t in (query, key, value))
        states.setdefault(module.layer_idx, []).append(arrays)
        return eager(module, query, key, value, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(modeling_llama, "eager_attention_forward", capture)
        for ids in SEQUENCES:
            model(ids[None], use_cache=False)
    assert [len(states[index]) for index in range(3)] == [2, 2, 2]
    return {index: Direct(layer) for index, layer in states.items()}


def assert_close(ours: Tensor, theirs: np.ndarray, tolerance: float = 1e-4) -> None:
    expected = torch.as_tensor(theirs)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=tolerance * expected.abs().max().item())


def assert_fitted(transform: str, rotation: Tensor, moment: np.ndarray) -> None:
    """`rotation` is U H P of the moment, whatever signs U's columns have, or no function of it at all."""
    if transform != "eigen":
        expected = hadamard(SIZE) if transform == "hadamard" else torch.eye(SIZE, dtype=torch.float64)
        assert_close(rotation, expected.numpy(), 1e-6)
        return
    spread = torch.empty(SIZE, SIZE, dtype=torch.float64)
    spread[:, SIZE - 1 - bit_reversal(SIZE)] = rotation.double()
    eigenvectors = (spread @ hadamard(SIZE).T).numpy()
    eigenvalues = np.linalg.eigvalsh(moment)
    assert np.diff(eigenvalues).min() > 0
    assert_close(torch.as_tensor(eigenvectors.T @ moment @ eigenvectors), np.diag(eigenvalues))


def balanced(keys: np.ndarray, queries: np.ndarray, alpha: float, ridge: float) -> np.ndarray:
    keys, queries = (moment / np.trace(moment) * SIZE + ridge * np.eye(SIZE) for moment in (keys, queries))
    root = scipy.linalg.sqrtm(keys)
    inverse = np.linalg.inv(root)
    mean = (inverse @ scipy.linalg.sqrtm(root @ queries @ root) @ inverse).real
    return scipy.linalg.fractional_matrix_power(mean, alpha / 2).real @ hadamard(SIZE).numpy()


@pytest.mark.parametrize(
    "recipe",
    [
        *(get_recipe("oscar", **changes) for changes in OSCAR),
        *(get_recipe("balanced", **changes) for changes in BALANCED),
    ],
    ids=lambda recipe: "-".join(map(str, vars(recipe).values())),
)
def test_fit_is_direct(model: PreTrainedModel, direct: dict[int, Direct], recipe: Recipe) -> None:
    rotations = fit(model, recipe=recipe)
    assert list(rotations.layers) == [0, 1, 2]
    for index, layer in rotations.layers.items():
        states = direct[index]
        heads = range(KV_HEADS)
        queries = [states.queries(head) for head in heads]
        keys = [states.keys(head, recipe.key_mean) for head in heads]
        values = [states.values(head, recipe.value_target) for head in heads]
        if not recipe.per_head:
            queries, keys, values = ([sum(moments) / KV_HEADS] for moments in (queries, keys, values))
        parts = range(len(queries))
        k_rotation, v_rotation = (t.expand(len(parts), -1, -1) for t in (layer.k_rotation, layer.v_rotation))
        for part in parts:
            assert_fitted(recipe.v_transform, v_rotation[part], values[part])
            if recipe.k_transform == "balanced":
                expected = balanced(keys[part], queries[part], recipe.alpha, recipe.ridge)
                assert_close(k_rotation[part], expected, 1e-3)
            else:
                assert_fitted(recipe.k_transform, k_rotation[part], queries[part])
        assert (layer.q_rotation is None) == (recipe.k_transform != "balanced")
        per_head_keys = recipe.per_head and recipe.k_transform in ("eigen", "balanced")
        assert layer.k_rotation.dim() == (3 if per_head_keys else 2)
        assert layer.v_rotation.dim() == (3 if recipe.per_head and recipe.v_transform == "eigen" else 2)
        assert (layer.k_mean is None) != recipe.key_mean
        if layer.k_mean is not None:
            assert_close(layer.k_mean, np.stack([states.rows(1, head).mean(0) for head in heads]))


def attention_to_history(
    query: np.ndarray, key: np.ndarray, sink: int, recent: int, scale: float, softcap: float | None, sinks: np.ndarray
) -> np.ndarray:
    """Weights [n, n] of one head, zero for what is no history."""
    logits = query @ key.T * scale
    logits = logits if softcap is None else np.tanh(logits / softcap) * softcap
    logits[np.triu(np.ones(logits.shape, dtype=bool), 1)] = -np.inf
    weights = scipy.special.softmax(np.concatenate([logits, sinks[:, None]], 1), axis=-1)[:, :-1]
    behind = np.arange(len(query))[:, None] - np.arange(len(key))
    return weights * ((behind >= recent) & (np.arange(len(key)) >= sink))


@pytest.mark.parametrize("softcap, with_sinks", [(None, False), (3.0, False), (None, True)])
@pytest.mark.parametrize("windows", [(4, 8), (0, 1), (3, 0), (40, 30), (64, 256)])
@pytest.mark.parametrize("block", [1 << 24, 700])
def test_attention_to_history(
    windows: tuple[int, int], softcap: float | None, with_sinks: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oscar_hf.calibration, "ATTENTION_BLOCK", block)
    query, key, *_ = random_states(2, 50)
    sinks = torch.randn(KV_HEADS * GROUPS) if with_sinks else None
    paid, received = history_attention(query, key, *windows, scaling=0.3, softcap=softcap, sink_logits=sinks)
    for batch in range(2):
        total = np.zeros((KV_HEADS, 50))
        for head in range(KV_HEADS * GROUPS):
            sink = np.full(50, -np.inf if sinks is None else sinks[head].item())
            q, k = query[batch, head].double().numpy(), key[batch, head // GROUPS].double().numpy()
            weights = attention_to_history(q, k, *windows, 0.3, softcap, sink)
            np.testing.assert_allclose(paid[batch, head].numpy(), weights.sum(1), atol=1e-5)
            total[head // GROUPS] += weights.sum(0)
        np.testing.assert_allclose(received[batch].numpy(), total, atol=1e-4)


def test_search_recipe_is_direct(model: PreTrainedModel, direct: dict[int, Direct]) -> None:
    """Moments by attention to the history, in windows that leave one; all but the second sequence's 1 token."""
    recipe = get_recipe("search")
    windows = OscarConfig(sink_tokens=10, recent_tokens=30)
    statistics = collect_statistics(model, SEQUENCES, history=windows, progress=False)
    for index, states in direct.items():
        layer = fit_layer(statistics[index], recipe)
        for head in range(KV_HEADS):
            moment, mean, total = np.zeros((SIZE, SIZE)), np.zeros(SIZE), 0.0
            for query, key, _ in states.states:
                for q in query[head * GROUPS : (head + 1) * GROUPS]:
                    none = np.full(len(q), -np.inf)
                    weights = attention_to_history(q, key[head], 10, 30, SIZE**-0.5, None, none)
                    moment += (q * weights.sum(1)[:, None]).T @ q
                    mean += weights.sum(0) @ key[head]
                    total += weights.sum()
            moment, mean = moment / total, mean / total
            assert layer.k_mean is not None and layer.k_metric is not None and layer.q_rotation is not None
            assert_close(layer.k_mean[head], mean)
            keys, queries = (
                part / np.trace(part) * SIZE + 0.1 * np.eye(SIZE) for part in (states.keys(head, True), moment)
            )
            root = scipy.linalg.sqrtm(keys).real
            power = scipy.linalg.fractional_matrix_power(root @ queries @ root, 0.25).real
            middle = np.linalg.inv(root) @ power @ np.linalg.inv(root)
            expected = scipy.linalg.fractional_matrix_power(middle, 0.375).real @ hadamard(SIZE).numpy()
            assert_close(layer.k_rotation[head], expected, 1e-3)
            inverse = np.linalg.inv(expected)
            metric = inverse @ moment @ inverse.T
            assert_close(layer.k_metric[head], 0.9 * metric * SIZE / np.trace(metric) + 0.1 * np.eye(SIZE), 1e-3)
        layer.validate(index, KV_HEADS)


def test_a_weighted_fit_needs_weighted_statistics(model: PreTrainedModel) -> None:
    statistics = collect_statistics(model, SEQUENCES, progress=False)
    with pytest.raises(ValueError, match="collected with history="):
        fit_layer(statistics[0], get_recipe("search"))


def test_sequences_without_a_history_are_weighed_alike(model: PreTrainedModel, direct: dict[int, Direct]) -> None:
    rotations = fit(model, recipe="search")  # 70 and 41 tokens fit into the windows
    plain = fit(model, recipe="search", history_weighted=False)
    for index, layer in rotations.layers.items():
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, plain.layers[index].tensors()[name]), name
        assert layer.k_mean is not None
        assert_close(layer.k_mean, np.stack([direct[index].rows(1, head).mean(0) for head in range(KV_HEADS)]))
    assert rotations.config == OscarConfig("search")
    assert rotations.config.k_search == 1 and rotations.config.k_stretch == 1.2


def test_a_key_mean_does_not_change_softmax(model: PreTrainedModel, direct: dict[int, Direct]) -> None:
    for index, layer in fit(model).layers.items():
        layer.validate(index, KV_HEADS)
        assert layer.q_rotation is not None and layer.k_mean is not None
        for head in range(KV_HEADS):
            queries, keys = (torch.as_tensor(direct[index].rows(part, head)) for part in (0, 1))
            mean = layer.k_mean[head].double()
            stored = (keys - mean) @ layer.k_rotation[head].double()
            logits = queries @ layer.q_rotation[head].double() @ stored.T
            torch.testing.assert_close(
                logits, queries @ (keys - mean).T, rtol=0, atol=1e-4 * logits.abs().max().item()
            )
            plain = torch.softmax(queries @ keys.T / SIZE**0.5, -1)
            torch.testing.assert_close(torch.softmax(logits / SIZE**0.5, -1), plain, rtol=0, atol=1e-4)
            assert stored.mean(0).abs().max() < 1e-4 * stored.abs().max()


# Statistics


def random_states(batch: int, tokens: int, groups: int = GROUPS) -> tuple[Tensor, ...]:
    """Query, key, value and output, the keys away from zero."""
    heads = (KV_HEADS * groups, KV_HEADS, KV_HEADS, KV_HEADS * groups)
    return tuple(torch.randn(batch, count, tokens, SIZE) + 0.3 for count in heads)


def tensors_of(statistics: LayerStatistics) -> dict[str, Tensor]:
    return {name: value for name, value in vars(statistics).items() if isinstance(value, Tensor)}


def gathered(*states: tuple[Tensor, ...]) -> LayerStatistics:
    statistics = LayerStatistics(KV_HEADS, SIZE, torch.device("cpu"))
    for query, key, _, output in states:
        statistics.add(query, key, output)
    moment = statistics.query_moment()
    for _, key, value, _ in states:
        statistics.add_scored(key, value, moment)
    return statistics


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("groups", [1, 3])
def test_streaming_equals_one_pass(groups: int, batch: int) -> None:
    states = random_states(batch, 50, groups)
    pieces = zip(*(t.split([1, 7, 30, 12], dim=2) for t in states), strict=True)
    streamed, whole = gathered(*pieces), gathered(states)
    assert streamed.tokens == whole.tokens == 50 * batch
    for name, tensor in tensors_of(whole).items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(tensors_of(streamed)[name], tensor, rtol=1e-12, atol=1e-12)


def test_statistics_are_means_over_tokens_and_query_heads() -> None:
    query, key, value, output = states = random_states(2, 9)
    statistics = gathered(states)
    for head in range(KV_HEADS):
        q, o = (t[:, head * GROUPS : (head + 1) * GROUPS].double().reshape(-1, SIZE) for t in (query, output))
        k, v = (t[:, head].double().reshape(-1, SIZE) for t in (key, value))
        assert_close(statistics.query_moment()[head], (q.T @ q / len(q)).numpy(), 1e-12)
        assert_close(statistics.key_mean()[head], k.mean(0).numpy(), 1e-12)
        assert_close(statistics.key_covariance(False)[head], (k.T @ k / len(k)).numpy(), 1e-12)
        assert_close(statistics.key_covariance(True)[head], np.cov(k.T.numpy(), bias=True), 1e-12)
        assert_close(statistics.value_moment("output")[head], (o.T @ o / len(o)).numpy(), 1e-12)
        weights = (k @ statistics.query_moment()[head] * k).sum(-1)
        expected = (v * (weights / weights.mean())[:, None]).T @ v / len(v)
        assert_close(statistics.value_moment("score")[head], expected.numpy(), 1e-12)


def test_memory_does_not_depend_on_tokens() -> None:
    for tokens in (1, 300):
        statistics = gathered(*[random_states(1, tokens)] * 3)
        stored = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(statistics).values())
        assert stored == 8 * (5 * KV_HEADS * SIZE * SIZE + 2 * KV_HEADS * SIZE + 2 * KV_HEADS)


# calibrate: models and data


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_hybrid_models_get_rotations_for_full_attention_only(family: str) -> None:
    hybrid = tiny_model(family)
    rotations = fit(hybrid, recipe="oscar")
    assert list(rotations.layers) == [1, 3]
    assert rotations.architecture["model_type"] == family
    assert list(collect_statistics(hybrid, SEQUENCES, progress=False)) == [1, 3]


def test_texts_are_joined_and_cut(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = torch.cat(SEQUENCES)
    by_tokens = fit(model, list(ids[:90].split(32)))
    texts = [as_text(piece) for piece in ids.split([5, 60, 3, 43])]
    by_text = fit(model, iter(texts), tokenizer, sequence_length=32, tokens=90)
    assert by_text.digest() == by_tokens.digest()
    assert by_text.provenance["tokens"] == 90
    assert fit(model, as_text(ids), tokenizer, sequence_length=32, tokens=90).digest() == by_tokens.digest()


def test_token_tensors_are_cut_but_not_joined(model: PreTrainedModel) -> None:
    apart = fit(model, [SEQUENCES[0][:40], SEQUENCES[0][40:], SEQUENCES[1]])
    assert fit(model, [SEQUENCES[0], SEQUENCES[1].int()], sequence_length=41).digest() != apart.digest()
    assert fit(model, [SEQUENCES[0], SEQUENCES[1].int()], sequence_length=40).provenance["tokens"] == 111
    whole, pieces = SEQUENCES[0], SEQUENCES[0].split(40)
    assert fit(model, whole, sequence_length=40).digest() == fit(model, pieces).digest()


def test_no_more_data_is_read_than_needed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    read = []

    def endless() -> Iterator[str]:
        while True:
            read.append(len(read))
            yield as_text(SEQUENCES[0])

    assert fit(model, endless(), tokenizer, tokens=100, sequence_length=64).provenance["tokens"] == 100
    assert len(read) <= 3


def test_sequences_stay_within_the_models_limit(tokenizer: PreTrainedTokenizerFast) -> None:
    short = tiny_model("llama", max_position_embeddings=24)
    rotations = fit(short, as_text(torch.cat(SEQUENCES)), tokenizer)
    assert rotations.provenance["sequence_length"] == 24
    assert rotations.digest() == fit(short, torch.cat(SEQUENCES).split(24)).digest()


def test_empty_texts_are_skipped(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["", as_text(SEQUENCES[0]), ""]
    assert fit(model, texts, tokenizer).digest() == fit(model, SEQUENCES[0]).digest()


def test_result_goes_with_the_model_and_its_recipe(model: PreTrainedModel, tmp_path: Path) -> None:
    rotations = fit(model, recipe="balanced", k_clip=0.9, alpha=0.75)
    assert rotations.config == OscarConfig("balanced", k_clip=0.9)
    assert rotations.architecture == {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
    }
    rotations.check_fits({0, 1, 2}, rotations.architecture)
    rotations.save_pretrained(tmp_path)
    assert RotationSet.from_pretrained(tmp_path).digest() == rotations.digest()


def test_provenance_is_complete(model: PreTrainedModel) -> None:
    rotations = fit(model, recipe="oscar", corpus="numbers", sequence_length=64, tokens=100, v_clip=0.9)
    provenance = json.loads(json.dumps(rotations.provenance))
    assert set(provenance.pop("logit_error")) == {"0", "1", "2"}
    assert provenance == {
        "model": "llama",
        "revision": None,
        "dtype": "float32",
        "corpus": "numbers",
        "tokens": 100,
        "sequence_length": 64,
        "recipe": vars(get_recipe("oscar", v_clip=0.9)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def test_provenance_names_no_folder_of_this_machine(fresh: PreTrainedModel, tmp_path: Path) -> None:
    fresh.save_pretrained(tmp_path / "my-model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "my-model", dtype=torch.float32)
    provenance = fit(loaded).provenance
    assert str(tmp_path) not in json.dumps(provenance)
    assert provenance["model"] == "my-model"


def test_recipe_may_be_given_as_an_object(model: PreTrainedModel) -> None:
    assert (
        fit(model, recipe=get_recipe("oscar", per_head=True)).digest()
        == fit(model, recipe="oscar", per_head=True).digest()
    )


def test_recipe_may_have_a_name_of_its_own(model: PreTrainedModel) -> None:
    rotations = fit(model, recipe=Recipe("mine", v_transform="hadamard", k_clip=0.9))
    assert (rotations.config.recipe, rotations.config.k_clip) == ("mine", 0.9)


# calibrate: errors, and what stays as it was


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["some text"], {}, "tokenizer"),
        ([[SEQUENCES[0], "some text"]], {"tokens": 500}, "tokenizer"),
        ([SEQUENCES[0][:31]], {}, "31 tokens; head_dim 16 needs 32"),
        ([SEQUENCES], {"tokens": 31}, "31 tokens"),
        ([SEQUENCES], {"tokens": -5}, "0 tokens"),
        ([[]], {}, "0 tokens"),
        ([SEQUENCES], {"recipe": "best"}, "recipe='best'"),
        ([SEQUENCES], {"strength": 0.5}, "'strength'"),
        ([SEQUENCES], {"alpha": 7.0}, "alpha=7.0"),
        ([SEQUENCES], {"recipe": get_recipe("oscar"), "alpha": 0.5}, "not both"),
    ],
)
def test_bad_arguments(model: PreTrainedModel, arguments: list, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(model, *arguments, **settings)


@pytest.mark.parametrize("length", [0, -1])
def test_bad_sequence_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    for data in (SEQUENCES, as_text(SEQUENCES[0])):
        with pytest.raises(ValueError, match=f"sequence_length={length}"):
            fit(model, data, tokenizer, sequence_length=length)


def test_patched_model_is_refused(fresh: PreTrainedModel) -> None:
    before = fit(fresh).digest()
    patch_model(fresh, RotationSet.without_data({0, 1, 2}, SIZE))
    with pytest.raises(ValueError, match="rotated already"):
        fit(fresh)
    assert fit(unpatch_model(fresh)).digest() == before


def test_checkpoint_with_rotated_weights_is_refused(fresh: PreTrainedModel) -> None:
    fresh.config.oscar = {"digest": "0" * 64, "absorbed": [0]}
    with pytest.raises(ValueError, match="rotated already"):
        fit(fresh)


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_model_that_produces_nan_is_refused(fresh: PreTrainedModel, value: float, projection: str) -> None:
    attention: Any = fresh.model.layers[1].self_attn
    with torch.no_grad():
        getattr(attention, projection).weight[3, 3] = value
    for recipe in ("balanced", "oscar"):
        with pytest.raises(ValueError, match="Layer 1: .*NaN.*float32"):
            fit(fresh, recipe=recipe)
    assert state(fresh).attention == "eager"


def state(model: PreTrainedModel) -> SimpleNamespace:
    """All that calibration could leave behind."""
    return SimpleNamespace(
        attention=model.config._attn_implementation,
        training={name: module.training for name, module in model.named_modules()},
        attributes={name: sorted(vars(module)) for name, module in model.named_modules()},
        hooks=[len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        weights={name: (tensor.data_ptr(), tensor._version) for name, tensor in model.state_dict().items()},
        gradients=[p.requires_grad for p in model.parameters()],
        config=model.config.to_dict(),
    )


class Interruption(Exception):
    pass


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("failing_call", [None, 1, 2, 3, 4])
def test_model_is_left_as_it_was(fresh: PreTrainedModel, failing_call: int | None, training: bool) -> None:
    fresh.train(training)
    calls = []

    def fail(*_: Any) -> None:
        assert not fresh.training
        calls.append(fresh.config._attn_implementation)
        if len(calls) == failing_call:
            raise Interruption

    fresh.model.layers[2].mlp.register_forward_pre_hook(fail)
    before = state(fresh)
    if failing_call is None:
        fit(fresh, recipe="oscar")
        assert calls == ["oscar"] * 4
    else:
        with pytest.raises(Interruption):
            fit(fresh, recipe="oscar")
    assert state(fresh) == before


def test_modules_in_different_modes_are_left_so(fresh: PreTrainedModel) -> None:
    fresh.train()
    fresh.model.layers[1].eval()
    before = state(fresh)
    fit(fresh)
    assert state(fresh) == before


def test_other_attention_implementations_come_back(fresh: PreTrainedModel) -> None:
    eager = fit(fresh)
    fresh.set_attn_implementation("sdpa")
    assert fit(fresh).digest() == eager.digest()
    assert fresh.config._attn_implementation == "sdpa"


def test_calibration_keeps_no_graph(fresh: PreTrainedModel) -> None:
    rotations = fit(fresh)
    assert all(p.grad is None for p in fresh.parameters())
    assert not any(t.requires_grad for layer in rotations.layers.values() for t in layer.tensors().values())
    assert torch.is_grad_enabled()


# Corpora


def test_default_corpus_is_there() -> None:
    texts = list(read_corpus())
    assert len(texts) > 50
    assert all(isinstance(text, str) for text in texts)
    assert sum(map(len, texts)) > 300_000
    assert texts == list(read_corpus("pydoc"))


def test_text_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Größe\n\nzwei", encoding="utf-8")
    assert list(read_corpus(str(path))) == ["Größe\n\nzwei"]


def test_json_lines_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "eins ü"}\n\n   \n{"id": 3, "text": "two\\nlines"}\n', encoding="utf-8")
    assert list(read_corpus(str(path))) == ["eins ü", "two\nlines"]


@pytest.mark.parametrize("line", ["{", "text", "[1]", "3", "null", '"text"', '{"body": "x"}'])
def test_bad_json_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n')
    texts = read_corpus(str(path))
    assert next(texts) == "good"
    with pytest.raises(ValueError) as error:
        next(texts)
    assert str(path) in str(error.value) and "line 3" in str(error.value)


@pytest.mark.parametrize("value", ["null", "[]", "3"])
def test_json_line_whose_text_is_no_text_is_named(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": {value}}}\n')
    with pytest.raises(ValueError, match="line 1"):
        list(read_corpus(str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl"])
def test_missing_corpus_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        list(read_corpus(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["a.csv", ""])
def test_corpus_of_another_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.csv").write_text("text\n")
    with pytest.raises(ValueError, match=r"\.txt or \.jsonl"):
        list(read_corpus(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_corpus_file_without_texts(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n")
    with pytest.raises(ValueError, match=name):
        list(read_corpus(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_corpus_file_that_is_not_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=name):
        list(read_corpus(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:test", ("owner/name", None, "test")),
        ("owner/name/config:test", ("owner/name", "config", "test")),
        ("name", ("name", None, "train")),
    ],
)
def test_data_sets_are_streamed(monkeypatch: pytest.MonkeyPatch, name: str, asked: tuple) -> None:
    module = ModuleType("datasets")

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> list[dict]:
        assert streaming
        assert (path, config, split) == asked
        return [{"text": "one"}, {"text": "two", "id": 2}]

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert list(read_corpus(name)) == ["one", "two"]


def test_data_set_without_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"owner/name.*oscar-hf\[eval\]"):
        list(read_corpus("owner/name"))


# RotationZoo


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, RotationSet]:
    """A zoo of two entries, each of another size."""
    entries = {"Tiny-135M-Instruct": ["Owner/Tiny-135M-Instruct", "other/tiny-gguf"], "LLAMA-3B-CHAT": []}
    sets = {name: RotationSet.without_data({0}, 2**power) for power, name in enumerate(entries, 2)}
    for name, rotations in sets.items():
        rotations.save_pretrained(tmp_path / "zoo" / name.lower())
    index = {n: {"models": ids, "folder": n.lower(), "about": "test"} for n, ids in entries.items()}
    (tmp_path / "zoo" / "index.json").write_text(json.dumps(index))
    monkeypatch.setattr(oscar_hf.zoo, "zoo_folder", lambda: tmp_path / "zoo")
    return sets


@pytest.mark.parametrize(
    "name",
    [
        "Tiny-135M-Instruct",
        "tiny-135m-instruct",
        "Owner/Tiny-135M-Instruct",
        "owner/tiny-135m-instruct/",
        "other/Tiny-GGUF",
    ],
)
def test_rotations_are_found_by_entry_and_model_id(zoo: dict[str, RotationSet], name: str) -> None:
    assert find_rotations(name).digest() == zoo["Tiny-135M-Instruct"].digest()


def test_folder_goes_before_the_zoo(
    zoo: dict[str, RotationSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RotationSet.without_data({0}, 32)
    own.save_pretrained(tmp_path / "Tiny-135M-Instruct")
    assert find_rotations(tmp_path / "Tiny-135M-Instruct").digest() == own.digest()
    monkeypatch.chdir(tmp_path)
    assert find_rotations("Tiny-135M-Instruct").digest() == own.digest()


def test_unknown_name_lists_what_is_near(zoo: dict[str, RotationSet]) -> None:
    with pytest.raises(FileNotFoundError, match="'owner/Tiny-136M'.*nearest: Tiny-135M-Instruct.*calibrate"):
        find_rotations("owner/Tiny-136M")
    with pytest.raises(FileNotFoundError, match=r"nearest: LLAMA-3B-CHAT, Tiny-135M-Instruct\)"):
        find_rotations("zzz")


def test_what_is_near_does_not_depend_on_case(zoo: dict[str, RotationSet]) -> None:
    with pytest.raises(FileNotFoundError, match=r"nearest: LLAMA-3B-CHAT\)"):
        find_rotations("llama-3b-cat")


def test_empty_zoo_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.json").write_text("{}")
    monkeypatch.setattr(oscar_hf.zoo, "zoo_folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="'owner/model'.*it is empty"):
        find_rotations("owner/model")


def test_damaged_folder_is_no_missing_name(tmp_path: Path) -> None:
    RotationSet.without_data({0}, 16).save_pretrained(tmp_path)
    (tmp_path / "oscar_rotations.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="oscar_rotations.safetensors is not there"):
        find_rotations(tmp_path)
