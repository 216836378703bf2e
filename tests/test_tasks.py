"""The paper's tables as commands: names that the harness knows, settings that it and transformers understand."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

pytest.importorskip("lm_eval")

import lm_eval
import typer
from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager

from eval.tasks import SETTINGS, arguments, main, yarn
from oscar_hf import OscarQuantizedCache, calibrate, patch_model
from oscar_hf.zoo import zoo_index

ARCHITECTURES = Path(__file__).parent / "fixtures" / "architectures"
PAIRS = [(model, table) for model in SETTINGS["models"] for table in SETTINGS["tables"]]


def test_every_task_is_in_the_harness() -> None:
    """Of its folders only those that matter are read: reading all takes a minute."""
    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders = [str(tasks / name) for name in ("aime", "gpqa", "humaneval", "minerva_math", "ruler")]
    known = TaskManager(include_path=folders, include_defaults=False).all_tasks
    assert {task for table in SETTINGS["tables"].values() for task in table["tasks"]} <= set(known)
    here = {path for absent in SETTINGS["absent"] for path in tasks.rglob(f"*{absent}*")}
    assert not here, f"the harness has {here} now: put it into the table, and out of `absent`"


@pytest.mark.parametrize("model, table", PAIRS)
def test_the_harness_understands_the_command(model: str, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lm_eval", *arguments(model, table, seed=3)])
    config = EvaluatorConfig.from_cli(HarnessCLI().parse_args())
    facts, what = SETTINGS["models"][model], SETTINGS["tables"][table]
    assert config.tasks == what["tasks"]
    assert config.model == "oscar-hf"
    assert config.model_args["pretrained"] == facts["id"]
    assert config.metadata.get("max_seq_lengths") == ([what["length"]] if "length" in what else None)
    if table == "five":
        expected = {**facts["sampling"], "do_sample": True, "max_gen_toks": 32768, "until": [facts["end"]]}
        assert config.gen_kwargs == expected
        assert config.model_args["max_length"] >= 40960
    stretched = config.model_args.get("rope_parameters")
    assert (stretched is not None) == (config.model_args["max_length"] > facts["native"])
    assert config.model_args["max_length"] <= config.model_args.get("max_position_embeddings", facts["native"])


def test_models_are_the_zoo_s() -> None:
    index = zoo_index()
    for name, facts in SETTINGS["models"].items():
        assert facts["id"] in index[name].models
        known = json.loads((ARCHITECTURES / f"{name}.json").read_text())
        assert facts["native"] == known.get("max_position_embeddings", facts["native"])
        if "yarn" in facts:
            assert facts["yarn"]["rope_theta"] == known["rope_theta"]


def test_yarn_only_beyond_the_native_window() -> None:
    model = SETTINGS["models"]["qwen3-8b"]
    assert yarn(model, 40960) == {}
    assert yarn(model, 40961)["rope_parameters"]["factor"] == 4.0
    with pytest.raises(ValueError, match="131072 positions at most, not 131073"):
        yarn(model, 131073)
    with pytest.raises(ValueError, match="positions at most"):
        yarn(SETTINGS["models"]["glm-4.7-fp8"], 1 << 20)


def test_yarn_reaches_the_model(tmp_path: Path) -> None:
    """As HFLM hands it on: the frequencies are YaRN's, and rotations made without it still fit."""
    stock = tiny_model("qwen3", max_position_embeddings=64, rope_theta=1e6)
    rotations = calibrate(stock, [], recipe="hadamard")
    stock.save_pretrained(tmp_path)
    theta = AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"]
    facts = {"id": "tiny", "native": 64, "yarn": {"factor": 4.0, "original": 48, "rope_theta": theta}}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **yarn(facts, 192))
    assert model.config.max_position_embeddings == 192
    rotary, plain = model.model.rotary_emb, stock.model.rotary_emb
    assert rotary.attention_scaling > 1
    assert not torch.allclose(rotary.inv_freq, plain.inv_freq)
    patch_model(model, rotations)
    ids = torch.arange(100)[None] % 128
    with torch.no_grad():
        assert model(ids, use_cache=False).logits.isfinite().all()
    assert OscarQuantizedCache(model).oscar_layers


def test_command() -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["qwen3-8b", "ruler-64k", "--cache", "dynamic", "--processes", "2"])
    assert result.exit_code == 0
    printed = shlex.split(result.stdout.splitlines()[-1])
    assert printed[:6] == ["accelerate", "launch", "--num_processes", "2", "-m", "oscar_hf.lm_eval"]
    assert printed[6:] == arguments("qwen3-8b", "ruler-64k", cache="dynamic")
    assert json.loads(printed[printed.index("--model_args") + 1])["cache"] == "dynamic"
    for wrong in (["gpt-5", "five"], ["qwen3-8b", "six"], ["qwen3-8b", "five", "--model-args", "{"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2
