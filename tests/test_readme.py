"""Every block of the README runs, on a tiny model in place of the real one; its tables are those of the results."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

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


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


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
    assert len(commands) == 7
    Path("book.txt").write_text("A long story, told once. " * 30)
    for command in commands:
        arguments = [str(tiny_checkpoint) if part == MODEL else part for part in shlex.split(command)[1:]]
        if arguments[0] == "calibrate":
            arguments += ["--tokens", "600"]
        if arguments[0] == "generate":
            arguments += ["--max-new-tokens", "4", "--no-chat"]
        if arguments[0] == "eval":
            settings = "--lengths 600 --sequences 1 --trials 1 --first 400 --calibration-tokens 600"
            arguments += settings.split()
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_are_made_from_the_results(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert render(text, DOCUMENTS[document]) == text
