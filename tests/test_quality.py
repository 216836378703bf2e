"""The quality harness against the definitions: KL, perplexity, bounds, needles; chunks against single tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache
from typer.testing import CliRunner

from oscar_hf import OscarConfig, RotationSet, calibrate
from oscar_hf._compat import cache_argument
from oscar_hf.cli import app
from oscar_hf.cli_eval import make_plan
from oscar_hf.config import Recipe
from oscar_hf.contenders import Contender, parse_contender
from oscar_hf.evaluation import Plan, evaluate, summary
from oscar_hf.quality import bootstrap, cut_sequences, divergence, negative_log_likelihood, reference_logits
from oscar_hf.retrieval import QUOTED, TASKS, Haystack, Trial, answers, batches

WINDOWS = {"sink_tokens": 4, "recent_tokens": 16}
WORDS = ["fox", "dog", "owl", "cat", "hen", "bee"]
PROSE = " ".join(f"The {word} of age {n} walked over the hill." for n, word in enumerate(WORDS * 12))


def contender(recipe: str = "hadamard", head_dim: int = 16, layers: int = 3, **settings: object) -> Contender:
    rotations = RotationSet.without_data(set(range(layers)), head_dim, recipe)
    return Contender(recipe, rotations, OscarConfig(recipe, **{**WINDOWS, **settings}))


def fresh(model) -> Cache:
    return DynamicCache(config=model.config)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=260, eos_token_id=None)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 259, (90,))


def test_divergence_by_definition(model, ids: Tensor) -> None:
    first = 40
    with torch.no_grad():
        p = model(ids[None]).logits[0].double().softmax(-1)
    expected = reference_logits(model, ids, fresh(model), first, chunk=32)
    torch.testing.assert_close(expected.softmax(-1).double(), p[first:], rtol=1e-4, atol=1e-6)
    quantised = contender()
    with quantised.caches(model) as make:
        with torch.no_grad():
            logits = model(ids[None], **{cache_argument(model): make()}).logits[0]
        kl, losses = divergence(model, ids, expected, make(), chunk=32)
    q = logits.double().softmax(-1)
    by_hand = (p * (p.log() - q.log())).sum(-1)[first:]
    torch.testing.assert_close(kl.double(), by_hand, rtol=1e-3, atol=1e-5)
    assert by_hand.mean() > 0.01
    likelihood = torch.stack([q[i, ids[i + 1]].log() for i in range(first, len(ids) - 1)])
    torch.testing.assert_close(losses.double(), -likelihood, rtol=1e-4, atol=1e-5)
    unquantised = torch.stack([p[i, ids[i + 1]].log() for i in range(first, len(ids) - 1)])
    torch.testing.assert_close(negative_log_likelihood(expected, ids).double(), -unquantised, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_chunks_read_what_single_tokens_read(family: str) -> None:
    model = tiny_model(family)
    ids = torch.randint(3, 127, (120,))
    layers = [i for i, kind in enumerate(getattr(model.config, "layer_types", None) or []) if kind[0] == "f"]
    rotations = RotationSet.without_data(set(layers or range(3)), 16)
    quantised = Contender("", rotations, OscarConfig("hadamard", **WINDOWS))
    expected = reference_logits(model, ids, fresh(model), 30, chunk=120)
    measured = {}
    for chunk in (1, 50, 120):
        with quantised.caches(model) as make:
            measured[chunk] = divergence(model, ids, expected, make(), chunk)
    for chunk in (50, 120):
        for one, many in zip(measured[1], measured[chunk], strict=True):
            torch.testing.assert_close(many, one, rtol=1e-2, atol=2e-3)  # a code may fall the other way
            torch.testing.assert_close(many.mean(), one.mean(), rtol=1e-3, atol=1e-4)
    with quantised.caches(
        model, exact_prefill=True
    ) as make:  # where a prompt sees itself exactly, it is another thing
        kl, _ = divergence(model, ids, expected, make(), chunk=120)
    assert kl.mean() < 0.01 * measured[1][0].mean()


def test_bounds_hold_the_mean_and_shrink_with_data() -> None:
    draw = torch.Generator().manual_seed(1)
    small, large = (torch.rand(size, generator=draw).tolist() for size in (40, 4000))
    for values in (small, large):
        estimate = bootstrap([values])
        assert estimate.mean == pytest.approx(sum(values) / len(values))
        deviation = math.sqrt(1 / 12 / len(values))
        assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * deviation, rel=0.35)
    assert bootstrap([small], seed=3) == bootstrap([small], seed=3) != bootstrap([small], seed=4)
    runs = [[float(i // 20 % 2) for i in range(400)]]  # neighbours are alike: single draws would claim too much
    narrow, wide = bootstrap(runs), bootstrap(runs, block=20)
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    assert bootstrap([[1.0] * 3, [0.0]], block=2).mean == 0.75
    with pytest.raises(ValueError, match="no values"):
        bootstrap([])


def test_sequences_are_begun_as_the_tokenizer_begins_them() -> None:
    tokenizer = tiny_tokenizer()
    text = "abcdefghijklmnopqrstuvwxyz"
    assert [tokenizer.decode(s) for s in cut_sequences(tokenizer, text, 5, 2, offset=1)] == ["bcdef", "ghijk"]
    with pytest.raises(ValueError, match="has 26 tokens; 3 x 10"):
        cut_sequences(tokenizer, text, 10, 3)


def test_trials_hide_what_they_ask_for() -> None:
    tokenizer = tiny_tokenizer()
    hay = Haystack(PROSE, tokenizer)
    for task in TASKS:
        trials = hay.trials(task, 2000, 5, seed=1)
        assert [trial.depth for trial in trials] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
        for trial in trials:
            assert len(trial.ids) == trial.length == 2000
            prompt = tokenizer.decode(trial.ids)
            for value in trial.expected:
                assert value in prompt
            text, sought = prompt[: -trial.question], "VAR" if task == "tracking" else trial.expected[0]
            if task == "quote":  # neither half of the passage need be unique
                text, sought = ("".join(part.split()) for part in (text, prompt[-QUOTED:] + sought))
            hidden = text.index(sought)
            assert hidden / len(text) == pytest.approx(trial.depth, abs=0.15)
            if task != "tracking":
                assert trial.expected[0] not in prompt[-trial.question :]
        again = hay.trials(task, 2000, 5, seed=1)
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(trials, again, strict=True))
        assert not torch.equal(trials[0].ids, hay.trials(task, 2000, 5, seed=2)[0].ids)
    assert len(hay.trials("multivalue", 2000, 1)[0].expected) == 4
    with pytest.raises(ValueError, match="too short"):
        hay.trials("single", 200, 1)
    with pytest.raises(ValueError, match="choose one of single"):
        hay.trials("triple", 2000, 1)
    with pytest.raises(ValueError, match="ten at least"):
        Haystack("One. Two.", tokenizer)


@pytest.mark.parametrize(
    ("task", "expected", "answer", "score"),
    [
        ("single", ("1234567",), " 1234567. Or 7654321", 1),
        ("single", ("1234567",), " 123456", 0),
        ("single", ("1234567",), " 12345678", 0),
        ("multikey", ("1234567",), " 7654321, not 1234567", 0),
        ("multivalue", ("11", "22", "33", "44"), "11, 33 and 333", 0.5),
        ("tracking", ("ABC", "DEF"), "VAR ABC = VAR DEF", 1),
        ("quote", ("the quick brown fox",), "the quick red fox", 0.5),
        ("quote", ("the quick brown fox",), "the quick brown fox and more", 1),
        ("quote", ("the quick brown fox",), "", 0),
    ],
)
def test_scores(task: str, expected: tuple[str, ...], answer: str, score: float) -> None:
    assert Trial(task, 1, 0, torch.tensor([1]), 1, expected).score(answer) == score


def test_answers_are_those_of_generate(model) -> None:
    tokenizer = tiny_tokenizer()
    trials = Haystack(PROSE, tokenizer).trials("single", 700, 3)
    for chunk in (None, 100):
        said = [text for part in batches(trials, 2) for text in answers(model, tokenizer, part, fresh(model), chunk)]
        for trial, text in zip(trials, said, strict=True):
            ids = model.generate(trial.ids[None], max_new_tokens=16, do_sample=False, eos_token_id=None)[0, 700:]
            assert text == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_answer_ends_where_the_model_ends_it(model) -> None:
    tokenizer = tiny_tokenizer()
    trials = Haystack(PROSE, tokenizer).trials("single", 700, 3)
    whole = answers(model, tokenizer, trials, fresh(model), None)
    ids = model.generate(trials[0].ids[None], max_new_tokens=4, do_sample=False, eos_token_id=None)[0, 700:]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(ids[2]))
    short = answers(model, tokenizer, trials, fresh(model), None)
    assert len(short[0]) < len(whole[0])
    assert whole[0].startswith(short[0])


def never(recipe: Recipe) -> RotationSet:
    raise AssertionError("nothing is to be fitted")


def test_what_a_person_writes(tmp_path: Path) -> None:
    asked = []

    def fit(recipe: Recipe) -> RotationSet:
        asked.append(recipe)
        return RotationSet({}, OscarConfig(recipe.name, k_clip=recipe.k_clip))

    found = parse_contender("balanced:alpha=1:k_clip=0.9:group_size=32:recent_tokens=128", fit)
    assert asked[0].alpha == 1 and asked[0].k_clip == 0.9
    assert found.config is not None and found.config.group_size == 32 and found.config.recent_tokens == 128
    assert found.config.k_clip == 0.9
    assert parse_contender("unquantised", never).rotations is None
    quanto = parse_contender("quanto2:residual_length=256", never)
    assert (quanto.backend, dict(quanto.stock)) == ("quanto", {"nbits": 2, "residual_length": 256})
    RotationSet.without_data({0, 1}, 16).save_pretrained(tmp_path)
    saved = parse_contender(f"{tmp_path}:bits=16", never)
    assert saved.config is not None and saved.config.bits == 16 and saved.name == f"{tmp_path.name}:bits=16"
    for text, message in (
        ("balanced:alhpa=1", "no setting 'alhpa'"),
        ("balanced:alpha", "write NAME=VALUE"),
        ("hqq2:bits=2", "no setting 'bits'; it has axis_key"),
        ("unquantised:bits=2", "it has none"),
        (f"{tmp_path}:alpha=1", "no setting 'alpha'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_contender(text, fit)
    with pytest.raises(FileNotFoundError, match="nothing"):
        parse_contender("nothing", never)


def test_plans() -> None:
    assert make_plan("kl,needle", "512,1024", first=100).tasks == ("kl", "single")
    assert make_plan("all", "512", first=0).tasks == ("kl", *TASKS)
    for arguments, message in (
        (("kl,needles", "512"), "task='needles'"),
        (("kl", "4K"), "whole numbers"),
        (("kl", "0"), "length=0"),
        (("kl", "4096,1024"), "first=1024 leaves nothing to measure of 1024"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan(*arguments)


def test_evaluate(model) -> None:
    tokenizer = tiny_tokenizer()
    plan = Plan(("kl", "single", "quote"), (300, 700), sequences=2, first=100, trials=4, batch=3, chunk=128)
    field = [contender("hadamard"), contender("naive"), Contender("exact", *_exact())]
    stock = parse_contender("quanto3", never)  # no backend has it, so that it is skipped whatever is installed
    with pytest.raises(ValueError, match="too short"):
        evaluate(model, tokenizer, field, plan, text=PROSE * 2, haystack=PROSE, progress=False)
    plan = Plan(("kl", "single", "quote"), (700, 800), sequences=2, first=100, trials=4, batch=3, chunk=128)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    results = evaluate(model, tokenizer, [*field, stock], plan, text=PROSE * 2, haystack=PROSE, progress=False)
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    json.dumps(results)
    rows = {(row["cache"], row["task"], row["length"]): row for row in results["rows"]}
    assert len(rows) == len(results["rows"]) == 4 * 3 * 2
    assert "skipped" in results["caches"]["quanto3"]
    assert results["caches"]["hadamard"]["bits_per_element"] == 4
    for length in (700, 800):
        kl = {
            cache: rows[cache, "kl", length]["kl"]["mean"] for cache in ("unquantised", "exact", "hadamard", "naive")
        }
        assert kl["unquantised"] == 0 and kl["exact"] < 1e-6 < 1e-2 < kl["hadamard"]
        exact, quantised = (rows[cache, "kl", length]["perplexity"]["mean"] for cache in ("exact", "hadamard"))
        assert exact == pytest.approx(rows["unquantised", "kl", length]["perplexity"]["mean"], rel=1e-4)
        assert quantised != pytest.approx(exact, rel=1e-3)
        assert rows["hadamard", "kl", length]["positions"] == 2 * (length - 100)
        said = {cache: [t["answer"] for t in rows[cache, "quote", length]["trials"]] for cache in kl}
        assert said["exact"] == said["unquantised"] != said["hadamard"]
        for cache in kl:
            row = rows[cache, "quote", length]
            assert row["score"]["mean"] == pytest.approx(sum(t["score"] for t in row["trials"]) / 4)
    assert summary(results).row_count == 4 and "quanto3 was skipped" in str(summary(results).caption)
    with pytest.raises(ValueError, match="a name of its own"):
        evaluate(model, tokenizer, [field[0], field[0]], plan, text=PROSE, haystack=PROSE)


def _exact() -> tuple[RotationSet, OscarConfig]:
    rotations = RotationSet.without_data({0, 1, 2}, 16)
    return rotations, OscarConfig("hadamard", bits=16, **WINDOWS)


@pytest.mark.parametrize("name", ["quanto2", "hqq4"])
def test_stock_quantised_caches(model, name: str) -> None:
    pytest.importorskip({"q": "optimum.quanto", "h": "hqq"}[name[0]])
    model = tiny_model("llama", head_dim=64)
    ids = torch.randint(3, 127, (300,))
    expected = reference_logits(model, ids, fresh(model), 200, chunk=300)
    stock = parse_contender(name, never)
    with stock.caches(model) as make:
        kl, _ = divergence(model, ids, expected, make(), stock.chunk_limit or 0)
    assert 1e-4 < kl.mean() < 10


def test_command_line(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama", vocab_size=260), tiny_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(PROSE * 3)
    (tmp_path / "other.txt").write_text("Quite another text, for fitting. " * 60)
    rotations = calibrate(model, [(tmp_path / "other.txt").read_text()], tokenizer, progress=False)
    rotations.save_pretrained(tmp_path / "rotations")
    caches = f"naive,balanced:recent_tokens=32,{tmp_path / 'rotations'}:recent_tokens=32"
    texts = ["--text", tmp_path / "text.txt", "--calibration", tmp_path / "other.txt"]
    settings = ["--caches", caches, "--lengths", "600", "--sequences", "1", "--trials", "2", "--first", "400"]
    command = ["eval", tmp_path / "model", *texts, *settings, "--tasks", "kl,needle"]
    done = CliRunner().invoke(app, [str(part) for part in [*command, "--json"]])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert results["model"] == "model" and results["text"] == "text.txt" and results["calibration"] == "other.txt"
    assert len(results["caches"]) == 4 and len(results["rows"]) == 8
    kl = {row["cache"]: row["kl"]["mean"] for row in results["rows"] if row["task"] == "kl"}
    assert kl["unquantised"] == 0 < kl["naive"]
    fitted, given = (kl[name] for name in ("balanced:recent_tokens=32", "rotations:recent_tokens=32"))
    assert given == pytest.approx(fitted, rel=1e-3) != pytest.approx(kl["naive"], rel=1e-3)
    shown = CliRunner().invoke(app, [str(part) for part in command])
    assert shown.exit_code == 0 and "perplexity" in shown.stdout and "of 2" in shown.stdout
    wrong = CliRunner().invoke(app, ["eval", str(tmp_path / "model"), "--tasks", "needle"])
    assert wrong.exit_code == 1 and "--text FILE" in wrong.stderr
    assert "Examples" in CliRunner().invoke(app, ["eval", "--help"]).stdout
