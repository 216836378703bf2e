"""The command line, from a model to a patched checkpoint and back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import oscar_hf
import oscar_hf.zoo
from oscar_hf import RotationSet, patch_model
from oscar_hf.cli import app
from oscar_hf.rotation import CONFIG_NAME, WEIGHTS_NAME

TEMPLATE = "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}<model>"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: object) -> dict:
    return json.loads(succeed(*arguments, "--json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `model`, a random llama with a tokenizer of bytes, its `rotations`, and `patched`, by the command line."""
    folder = tmp_path_factory.mktemp("cli")
    vocabulary = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder / "model")
    tiny_model("llama", vocab_size=len(vocabulary), eos_token_id=None).save_pretrained(folder / "model")
    (folder / "corpus.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    corpus = ["--corpus", folder / "corpus.txt", "--tokens", 1500, "--sequence-length", 500]
    succeed("calibrate", folder / "model", *corpus, "--name", "someone/tiny", "--out", folder / "rotations")
    succeed("patch", folder / "model", "--rotations", folder / "rotations", "--out", folder / "patched")
    return folder


def test_calibrate_writes_a_set_that_says_where_it_is_from(folder: Path) -> None:
    rotations = RotationSet.from_pretrained(folder / "rotations")
    assert sorted(rotations.layers) == [0, 1, 2]
    assert rotations.provenance["model"] == "someone/tiny"
    assert rotations.provenance["corpus"] == "corpus.txt"
    assert rotations.provenance["tokens"] == 1500
    assert str(folder) not in (folder / "rotations" / CONFIG_NAME).read_text()


def test_calibrate_chooses_per_layer_and_shows_it(folder: Path, tmp_path: Path) -> None:
    corpus = ["--corpus", folder / "corpus.txt", "--tokens", 1300, "--sequence-length", 650]
    options = ["--choose", "--target-kl", 20, "--out", tmp_path / "set"]
    pytest.importorskip("matplotlib")
    shown = succeed("calibrate", folder / "model", *corpus, *options, "--plot", tmp_path / "choice.png")
    assert (tmp_path / "choice.png").read_bytes().startswith(b"\x89PNG")
    rotations = RotationSet.from_pretrained(tmp_path / "set")
    report = rotations.provenance["choice"]["layers"]
    for text in (shown, succeed("inspect", tmp_path / "set")):
        assert all(f"{row['before']:.4f}" in text and f"{row['after']:.4f}" in text for row in report.values())
    assert as_json("inspect", tmp_path / "set")["provenance"]["choice"]["layers"] == report
    assert rotations.config.recent_tokens == 64
    fails("give both", "calibrate", folder / "model", "--plot", tmp_path / "no.png", "--out", tmp_path / "no")


def test_calibrate_changes_settings_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    corpus, settings = ["--corpus", folder / "corpus.txt"], ["--set", "k_clip=0.9", "--set", "per_head=true"]
    facts = as_json("calibrate", folder / "model", *corpus, "--recipe", "oscar", *settings, "--out", tmp_path)
    assert facts["provenance"]["recipe"]["k_clip"] == facts["config"]["k_clip"] == 0.9
    assert facts["shapes"] == {"k_rotation": [[2, 16, 16]], "v_rotation": [[2, 16, 16]]}
    assert facts["provenance"]["model"] == "model"


def test_inspect(folder: Path) -> None:
    facts = as_json("inspect", folder / "rotations")
    rotations = RotationSet.from_pretrained(folder / "rotations")
    assert facts["recipe"] == "balanced"
    assert facts["layers"] == [0, 1, 2]
    assert facts["digest"] == rotations.digest()
    assert facts["shapes"]["k_mean"] == [[2, 16]]
    assert 0 < facts["k_inverse_error"] < 1e-4
    assert 0 <= facts["v_orthogonality_error"] < 1e-4
    assert facts["k_condition"] > 1
    assert facts["bits_per_element"] == 4
    assert facts["architecture"]["head_dim"] == 16
    assert facts["config"] == rotations.config.to_dict()

    patched = as_json("inspect", folder / "patched")
    assert patched["absorbed_layers"] == [0, 1, 2]
    assert patched["digest"] == facts["digest"]
    table = succeed("inspect", folder / "patched")
    assert "0-2 (3)" in table
    assert "someone/tiny" in table


def test_patched_checkpoint_is_the_model_it_was(folder: Path) -> None:
    ids = torch.arange(3, 103)[None]
    original = AutoModelForCausalLM.from_pretrained(folder / "model")
    patched = AutoModelForCausalLM.from_pretrained(folder / "patched")
    weights = [model.model.layers[0].self_attn.v_proj.weight for model in (original, patched)]
    assert not torch.allclose(*weights, atol=1e-2)
    with torch.no_grad():
        torch.testing.assert_close(patched(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)


def test_patched_checkpoint_is_not_rotated_twice(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "patched")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ids = torch.arange(3, 103)[None]
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(2):
            patch_model(model)
            assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_patch_follows_base_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "model", tmp_path / "tune")
    (tmp_path / "tune" / "README.md").write_text("---\nbase_model: someone/tiny\n---\n")
    shutil.copytree(folder / "rotations", tmp_path / "zoo" / "tiny")
    index = {"tiny": {"models": ["someone/tiny"], "folder": "tiny"}}
    (tmp_path / "zoo" / "index.json").write_text(json.dumps(index))
    monkeypatch.setattr(oscar_hf.zoo, "zoo_folder", lambda: tmp_path / "zoo")
    facts = as_json("patch", tmp_path / "tune", "--out", tmp_path / "out")
    assert facts["digest"] == RotationSet.from_pretrained(folder / "rotations").digest()
    facts = as_json("patch", folder / "model", "--out", tmp_path / "other")
    assert facts["recipe"] == "prompt"


@pytest.mark.parametrize("source", ["model", "patched"])
def test_generate_compares(folder: Path, source: str) -> None:
    rotations = ["--rotations", folder / "rotations"] if source == "model" else []
    settings = ["--sink-tokens", 4, "--recent-tokens", 8, "--max-new-tokens", 6, "--compare"]
    facts = as_json("generate", folder / source, *rotations, "--prompt", "ab" * 50, *settings)
    assert facts["config"]["recent_tokens"] == 8
    unquantised, oscar = facts["runs"]["unquantised"], facts["runs"]["OSCAR"]
    assert unquantised["prompt_tokens"] == oscar["prompt_tokens"] == 100 + len("<user><model>")
    assert unquantised["new_tokens"] == oscar["new_tokens"] == 6
    assert unquantised["bits_per_element"] == 32
    assert unquantised["history_bits_per_element"] is None
    tokens = 113 + 5  # the last new token is not stored
    assert unquantised["cache_bytes"] == 3 * 2 * 2 * tokens * 16 * 4  # layers, keys and values, heads, head_dim, fp32
    assert oscar["history_bits_per_element"] == 4  # head_dim 16: 2 bits, and 32 for scale and min
    assert oscar["cache_bytes"] < unquantised["cache_bytes"] / 3
    assert oscar["tokens_per_second"] > 0

    exact = as_json("generate", folder / source, *rotations, "--prompt", "ab" * 50, *settings, "--bits", 16)
    assert exact["runs"]["OSCAR"]["text"] == exact["runs"]["unquantised"]["text"]


def test_generate_for_people(folder: Path) -> None:
    prompt = folder / "prompt.txt"
    prompt.write_text("Ein Müller")
    settings = ["--file", prompt, "--no-chat", "--max-new-tokens", 5]
    facts = as_json("generate", folder / "patched", *settings)
    assert list(facts["runs"]) == ["OSCAR"]
    assert facts["runs"]["OSCAR"]["prompt_tokens"] == len("Ein Müller".encode())
    result = run("generate", folder / "patched", *settings)
    assert result.stdout == facts["runs"]["OSCAR"]["text"] + "\n"
    assert "bits per element" in result.stderr
    assert "unquantised" in succeed("generate", folder / "patched", *settings, "--compare")


def test_version_and_help() -> None:
    assert succeed("--version") == f"oscar-hf {oscar_hf.__version__}\n"
    for command in ("calibrate", "patch", "generate", "inspect"):
        assert command in succeed("--help")
        assert "Example" in succeed(command, "--help")


def fails(message: str, *arguments: object) -> None:
    for flags in ([], ["--json"]):
        result = run(*arguments, *flags)
        assert result.exit_code == 1
        assert not result.stdout
        lines = result.stderr.splitlines()
        assert message in lines[-1], result.output
        assert lines[-1].startswith("Error: ")
        assert "Traceback" not in result.output


def test_errors_are_one_line(folder: Path, tmp_path: Path) -> None:
    model, rotations, out = folder / "model", folder / "rotations", ["--out", tmp_path / "out"]
    fails("neither a folder with oscar_config.json nor in the RotationZoo", "inspect", tmp_path / "nothing")
    fails("nothing.gguf is not there", "calibrate", tmp_path / "nothing.gguf", *out)
    fails("Corpus nothing.txt is not there", "calibrate", model, "--corpus", "nothing.txt", *out)
    fails("recipe='best' is not known", "calibrate", model, "--recipe", "best", *out)
    fails("alpha='half' must be a number", "calibrate", model, "--set", "alpha=half", *out)
    fails("write NAME=VALUE", "calibrate", model, "--set", "alpha", *out)
    fails("no setting 'alhpa'", "calibrate", model, "--set", "alhpa=1", *out)
    fails("dtype='fp8' cannot be run here", "calibrate", model, "--dtype", "fp8", *out)
    fails("no-such/model", "generate", "no-such/model", "--prompt", "a")
    fails("No rotations for 'nobody'", "generate", model, "--prompt", "a", "--rotations", "nobody")
    fails("--prompt TEXT or as --file PATH", "generate", model)
    fails("recent_tokens=-1 must be", "generate", folder / "patched", "--prompt", "a", "--recent-tokens", -1)
    fails("own folder", "patch", model, "--rotations", rotations, "--out", model)


def test_damaged_and_foreign_rotations(folder: Path, tmp_path: Path) -> None:
    rotations = RotationSet.from_pretrained(folder / "rotations")
    rotations.architecture["hidden_size"] = 65
    rotations.save_pretrained(tmp_path)
    fails(
        "made for another model (someone/tiny)",
        "patch",
        folder / "model",
        "--rotations",
        tmp_path,
        "--out",
        tmp_path / "out",
    )
    (tmp_path / WEIGHTS_NAME).write_bytes((tmp_path / WEIGHTS_NAME).read_bytes()[:-100])
    fails("damaged or cut short", "inspect", tmp_path)


def test_a_cache_is_saved_and_looked_into(folder: Path, tmp_path: Path) -> None:
    text = ["--text", folder / "corpus.txt", "--chunk", 500]
    saved = as_json("cache", "save", folder / "patched", *text, "--out", tmp_path / "context")
    facts = as_json("cache", "info", tmp_path / "context")
    assert facts["tokens"] == saved["tokens"] == len((folder / "corpus.txt").read_text())
    assert facts["rows"] == 1 and facts["quantised_layers"] == 3 and facts["config"]["recipe"] == "balanced"
    assert "1,800 tokens, 1 rows" in succeed("cache", "info", tmp_path / "context")
    assert "oscar_cache.json is not there" in run("cache", "info", folder).output
