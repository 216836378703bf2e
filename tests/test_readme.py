"""Every block of the README runs, on a tiny model in place of the real one; its tables are those of the results."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from eval.tables import DOCUMENTS, render
from oscar_hf import calibrate
from oscar_hf.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


SPREAD = "\n## More than one GPU\n"


def blocks(language: str, *, spread: bool = False) -> list[str]:
    """Those of the section on several GPUs, or all others."""
    before, _, section = README.partition(SPREAD)
    section, heading, after = section.partition("\n## ")
    return re.findall(rf"```{language}\n(.*?)```", section if spread else before + heading + after, re.DOTALL)


@pytest.fixture
def tiny_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model, tokenizer = tiny_model("llama", vocab_size=512), tiny_tokenizer()
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_python_blocks(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda name: {MODEL: model}[name])
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: {MODEL: tokenizer}[name])
    zoo = calibrate(model, ["Some text to calibrate on. " * 40], tokenizer, progress=False)
    zoo.save_pretrained("smollm2-135m-instruct")
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block.replace("20_000", "600"), "README.md", "exec"), names)
    assert "bits per element" in capsys.readouterr().out


def test_commands(tiny_checkpoint: Path) -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("oscar-hf ")]
    assert len(commands) == 8
    Path("book.txt").write_text("A long story, told once. " * 30)
    for command in commands:
        arguments = [str(tiny_checkpoint) if part == MODEL else part for part in shlex.split(command)[1:]]
        if arguments[0] == "calibrate":
            arguments += ["--tokens", "1300" if "--choose" in arguments else "600"]
        if arguments[0] == "generate":
            arguments += ["--max-new-tokens", "4", "--no-chat"]
        if arguments[0] == "eval":
            settings = "--lengths 600 --sequences 1 --trials 1 --first 400 --calibration-tokens 600"
            arguments += settings.split()
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output


def test_more_than_one_gpu(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for the model's name; without GPUs, on the CPU and by gloo."""

    def here(text: str) -> str:
        return text.replace("Qwen/Qwen3-32B", str(tiny_checkpoint))

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_checkpoint), tiny_tokenizer()
    calibrate(model, ["Some text to calibrate on. " * 40], tokenizer, progress=False).save_pretrained("my-rotations")
    placed, script = blocks("python", spread=True)
    names: dict[str, Any] = {}
    exec(compile(here(placed), "README.md", "exec"), names)
    assert names["cache"].oscar_layers

    Path("many.py").write_text(here(script))
    *plans, launch = (line for block in blocks("bash", spread=True) for line in block.splitlines())
    for command in plans:
        result = CliRunner().invoke(app, shlex.split(here(command))[1:])
        assert result.exit_code == 0, result.output
    program, *arguments = shlex.split(launch)
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The capital of France is") == 2


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_are_made_from_the_results(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert render(text, DOCUMENTS[document]) == text
