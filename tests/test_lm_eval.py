"""lm-evaluation-harness: scores and texts read the quantised cache, on local tasks and a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel

from oscar_hf import OscarQuantizedCache, RotationSet, calibrate, lm_eval, patch_model, unpatch_model
from oscar_hf._compat import cache_argument
from oscar_hf.lm_eval import OscarLM

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROOT = Path(__file__).parents[1]
WINDOWS: dict[str, Any] = {"sink_tokens": 4, "recent_tokens": 8}
STORY = "The tide came in at noon, and the boats that had lain on the mud since dawn began to lift, one by one."
CONTEXTS = [STORY, STORY[:70], f"{STORY} {STORY}", STORY[20:]]
CONTINUATIONS = [" The fishermen sang.", "b", " A gull cried over the harbour wall.", " Noon."]


@pytest.fixture
def rotations() -> RotationSet:
    return calibrate(tiny_model("llama", vocab_size=512), [STORY * 8], tiny_tokenizer(), progress=False)


def make(model: PreTrainedModel | None = None, **kwargs: Any) -> OscarLM:
    model = model or tiny_model("llama", vocab_size=512)
    return OscarLM(model, tokenizer=tiny_tokenizer(), **kwargs)


def scores(lm: HFLM) -> list[float]:
    requests = [
        Instance("loglikelihood", {}, pair, index)
        for index, pair in enumerate(zip(CONTEXTS, CONTINUATIONS, strict=True))
    ]
    return [score for score, _ in lm.loglikelihood(requests, disable_tqdm=True)]


def texts(lm: HFLM) -> list[str]:
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, settings), index) for index, text in enumerate(CONTEXTS)]
    return lm.generate_until(requests, disable_tqdm=True)


@torch.no_grad()
def token_by_token(lm: OscarLM) -> list[float]:
    """The scores by feeding one token at a time, each row alone, to a cache as generation uses it."""
    sums = []
    for context, continuation in zip(CONTEXTS, CONTINUATIONS, strict=True):
        ids, first = lm.tok_encode(context + continuation), len(lm.tok_encode(context))
        cache, total = OscarQuantizedCache(lm.model, config=lm.config_of_cache), 0.0
        for position, token in enumerate(ids[:-1]):
            logits = lm.model(torch.tensor([[token]]), **{cache_argument(lm.model): cache}).logits[0, -1]
            if position + 1 >= first:
                total += logits.log_softmax(-1)[ids[position + 1]].item()
        sums.append(total)
    return sums


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_loglikelihood_reads_what_decoding_would_read(family: str) -> None:
    """In float64, where next to no value lies so near the middle of two levels that rounding decides its code."""
    one, other = (tiny_model(family, vocab_size=512, dtype=torch.float64) for _ in range(2))
    lm = make(one, recipe="hadamard", batch_size=3, chunk_tokens=37, **WINDOWS)
    got = scores(lm)
    assert got == pytest.approx(token_by_token(lm), abs=1e-3)
    unquantised = scores(make(other, cache="dynamic"))
    assert all(abs(a - b) > 0.02 for a, b in zip(got, unquantised, strict=True))


def test_rows_and_chunks_do_not_matter(rotations: RotationSet) -> None:
    model = tiny_model("llama", vocab_size=512)
    alone = scores(make(model, rotations=rotations, batch_size=1, **WINDOWS))
    for settings in ({"batch_size": 4}, {"batch_size": "auto", "max_batch_size": 4, "max_length": 256}):
        assert scores(make(model, **settings, **WINDOWS)) == pytest.approx(alone, abs=1e-3)
    for chunk in (1, 50):
        assert scores(make(model, batch_size=2, chunk_tokens=chunk, **WINDOWS)) == pytest.approx(alone, abs=1e-3)


def test_the_baseline_is_the_harness_s_own_model() -> None:
    stock = HFLM(tiny_model("llama", vocab_size=512), tokenizer=tiny_tokenizer(), batch_size=2)
    baseline = make(cache="dynamic", batch_size=2)
    assert scores(baseline) == scores(stock)
    assert texts(baseline) == texts(stock)
    exact = make(recipe="hadamard", bits=16, batch_size=2, **WINDOWS)
    assert scores(exact) == pytest.approx(scores(stock), abs=1e-3)
    assert texts(exact) == texts(stock)


@pytest.mark.parametrize("max_cache_len", [None, 256])
def test_generation_takes_a_new_cache_for_each_batch(
    rotations: RotationSet, max_cache_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", vocab_size=512)
    alone = texts(make(model, rotations=rotations, **WINDOWS))
    lm = make(model, batch_size=2, max_cache_len=max_cache_len, **WINDOWS)
    caches, new_cache = [], lm.new_cache

    def remembered(**changes: Any) -> Any:
        caches.append(new_cache(**changes))
        return caches[-1]

    monkeypatch.setattr(lm, "new_cache", remembered)
    assert texts(lm) == alone
    assert len({id(cache) for cache in caches}) == len(caches) == 2
    for cache in caches:
        memory = cache.memory()
        assert memory.history and cache.oscar_layers[0].batch_size == 2
        assert (cache.oscar_layers[0].max_cache_len) == max_cache_len
    assert alone != texts(make(cache="dynamic"))


def test_bad_arguments_are_refused_before_anything_changes(rotations: RotationSet) -> None:
    model = tiny_model("llama", vocab_size=512)
    for wrong, message in [
        ({"cache": "static"}, "cache='static'"),
        ({"cache": "dynamic", "recipe": "hadamard"}, "takes no rotations"),
        ({"cache": "dynamic", "sink_tokens": 8}, "takes no rotations"),
        ({"recipe": "naive", "rotations": rotations}, "needs no rotations"),
        ({"recipe": "best"}, "recipe='best'"),
        ({"recipe": "oscar", "rotations": rotations}, "made by the recipe 'balanced'"),
        ({"rotations": rotations, "bits": 3}, "bits=3"),
        ({"rotations": rotations, "chunk_tokens": 0}, "chunk_tokens=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(model, **wrong)
        assert getattr(model, "_oscar_patch", None) is None
    make(model, rotations=rotations, recipe="balanced")
    with pytest.raises(ValueError, match="made by the recipe"):
        make(model, recipe="oscar")
    unpatch_model(model)


# The harness's own way, offline


def write_tasks(folder: Path) -> None:
    """Two tasks on local JSON: one scores choices, one generates."""
    folder.mkdir()
    rows = [
        {"text": text, "choices": [CONTINUATIONS[i], CONTINUATIONS[i - 1]], "label": i % 2}
        for i, text in enumerate(CONTEXTS)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / "cache"}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
    (folder / "choice.yaml").write_text(f"""task: local_choice{common}
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
""")
    (folder / "continue.yaml").write_text(f"""task: local_continue{common}
output_type: generate_until
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: [], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""")


@pytest.fixture
def checkpoint(tmp_path: Path, rotations: RotationSet) -> SimpleNamespace:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tiny_model("llama", vocab_size=512).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rotations.save_pretrained(tmp_path / "rotations")
    write_tasks(tmp_path / "tasks")
    return SimpleNamespace(folder=tmp_path, model=tmp_path / "model", rotations=tmp_path / "rotations")


def command(checkpoint: SimpleNamespace, out: str, *further: str) -> list[str]:
    """Arguments of the command line."""
    settings = f"pretrained={checkpoint.model},rotations={checkpoint.rotations},sink_tokens=4,recent_tokens=8"
    tasks = ["--tasks", "local_choice,local_continue", "--include_path", str(checkpoint.folder / "tasks")]
    saving = ["--output_path", str(checkpoint.folder / out), "--log_samples", "--device", "cpu"]
    return ["--model_args", settings, *tasks, *saving, *further]


def read(folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Results, and the responses of each task in the order of its documents."""
    results = json.loads(next(folder.rglob("results_*.json")).read_text())
    samples = {}
    for file in folder.rglob("samples_*.jsonl"):
        rows = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda row: row["doc_id"])
        samples[file.name.split("_20")[0]] = [row["resps"] for row in rows]
    return results, samples


@pytest.mark.parametrize("chat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_command_line(checkpoint: SimpleNamespace, chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = command(checkpoint, "out", "--batch_size", "2", *(["--apply_chat_template"] if chat else []))
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
    lm_eval.main()
    results, samples = read(checkpoint.folder / "out")
    assert results["config"]["model"] == "oscar-hf"
    assert results["config"]["cache_config"]["recent_tokens"] == 8
    assert results["config"]["rotations"] == RotationSet.from_pretrained(checkpoint.rotations).digest()
    assert set(samples) == {"samples_local_choice", "samples_local_continue"}

    model = patch_model(tiny_model("llama", vocab_size=512), checkpoint.rotations)
    lm = OscarLM(model, tokenizer=str(checkpoint.model), **WINDOWS)
    again = simple_evaluate(
        model=lm,
        tasks=["local_choice", "local_continue"],
        task_manager=TaskManager(include_path=str(checkpoint.folder / "tasks"), include_defaults=False),
        apply_chat_template=chat,
    )
    for task, rows in again["samples"].items():
        expected = samples[f"samples_{task}"]
        for row, saved in zip(sorted(rows, key=lambda row: row["doc_id"]), expected, strict=True):
            if task == "local_continue":
                assert row["resps"] == saved
            else:
                got = [float(score) for ((score, _),) in row["resps"]]
                assert got == pytest.approx([float(score) for ((score, _),) in saved], abs=1e-3)
        assert not chat or rows[0]["arguments"][0][0].startswith("<user>")


@pytest.mark.slow
def test_two_processes_give_the_scores_of_one(checkpoint: SimpleNamespace) -> None:
    """Each takes half of the documents; `torchrun` and `accelerate launch` set the same environment."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    logs = {}
    for name, launch in (
        ("one", []),
        ("two", ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]),
    ):
        line = [sys.executable, "-m", *launch, "oscar_hf.lm_eval", *command(checkpoint, name)]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        logs[name] = done.stdout + done.stderr
    assert "Building contexts for local_choice on rank 1" in logs["two"]
    assert "on rank 1" not in logs["one"]
    (one, responses), (two, others) = (read(checkpoint.folder / name) for name in ("one", "two"))
    assert responses == others
    assert {task: row["alias"] for task, row in one["results"].items()} == {
        task: row["alias"] for task, row in two["results"].items()
    }
    for task, row in one["results"].items():
        for metric in ("acc,none", "exact_match,none"):
            assert two["results"][task].get(metric) == row.get(metric)


def test_the_model_is_ours_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(lm_eval, "cli_evaluate", lambda: seen.append(sys.argv[1:]))
    for arguments in (["--tasks", "x"], ["run", "--tasks", "x"], ["--model", "hf"], ["-M", "hf"], ["ls", "tasks"], []):
        monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
        lm_eval.main()
        ours = "x" in arguments
        assert seen[-1] == arguments + (["--model", "oscar-hf"] if ours else [])
