"""The blocks of docs/zoo.md run: a tiny model, a hub on the loopback, a stand-in for ModelScope."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import Hub
from test_hub import a_set, hub, modelscope, sha256  # noqa: F401  (fixtures)
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

import oscar_hf.zoo
from oscar_hf.cli import app

ZOO = (Path(__file__).parents[1] / "docs" / "zoo.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", ZOO, re.DOTALL)


@pytest.fixture
def setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub, modelscope: SimpleNamespace  # noqa: F811
) -> Path:  # fmt: skip
    """A folder with what the page takes for granted, and a zoo whose sets are a tiny model's."""
    rotations, files = a_set(tmp_path / "published", model="owner/tiny")
    hub.repos["owner/sets"] = {f"sets/{name}": data for name, data in files.items()}
    unknown, known = {name: {} for name in files}, {n: {"size": len(d), "sha256": sha256(d)} for n, d in files.items()}
    place = {"repo": "owner/name", "folder": "sets", "files": unknown}
    index = {
        "tiny": {"models": ["owner/tiny"], "folder": "published"},
        "qwen3-8b": {
            "models": ["Qwen/Qwen3-8B"],
            "sources": [{**place, "hub": "huggingface", "repo": "owner/sets"}, {**place, "hub": "modelscope"}],
        },
        "qwen3.5-4b": {"models": [], "sources": [{"hub": "git", "repo": "owner/code", "files": known}]},
    }
    (tmp_path / "index.json").write_text(json.dumps(index))
    shutil.copytree(tmp_path / "published", tmp_path / "rotations" / "calibrated")
    tiny_model("llama", vocab_size=512).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    measured = {"kl": 0.05, "needle": "10 of 10", "command": "python -m eval.demo --facts 10"}
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    monkeypatch.setattr(oscar_hf.zoo, "zoo_folder", lambda: tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_of_the_zoo(setting: Path) -> None:
    model = tiny_model("llama")
    model.name_or_path = "owner/tiny"
    for block in blocks("python"):
        exec(compile(block, "docs/zoo.md", "exec"), {"model": model})
    assert model._oscar_patch is not None


def test_commands_of_the_zoo(setting: Path, hub: Hub) -> None:  # noqa: F811
    export = pytest.importorskip("test_export")
    facts = {"embedding_length": 64, "attention.head_count_kv": 2, "attention.key_length": 16}
    export.write_gguf(setting / "model.gguf", "llama", layers=3, facts=facts)
    lines = [line.partition("  #")[0] for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 11
    for line in lines:
        words = [str(setting / "model") if word == "Qwen/Qwen3-8B" else word for word in shlex.split(line)]
        assert words[0] == "oscar-hf"
        if words[1] == "calibrate":
            shutil.rmtree(setting / words[-1], ignore_errors=True)
            words += ["--tokens", "600"]
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert "README.md" in hub.repos["me/Qwen3-8B-rotations"]
    assert (setting / "model-oscar.gguf").is_file()
