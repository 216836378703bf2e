"""The RotationZoo: its index and recipes, how a model finds its set, and pulling and verifying one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tiny import tiny_model
from transformers import AutoConfig

import oscar_hf.zoo
from oscar_hf import OscarConfig, RotationSet, patch_model
from oscar_hf._compat import architecture, cache_layers, text_config
from oscar_hf.hub import Pin, Source
from oscar_hf.rotation import CONFIG_NAME, WEIGHTS_NAME, LayerRotation
from oscar_hf.zoo import (
    Entry,
    base_models,
    check_files,
    find_rotations,
    finish,
    pull,
    resolve,
    store_folder,
    verify,
    zoo_folder,
    zoo_index,
)

INDEX = zoo_index()
ARCHITECTURES = Path(__file__).parent / "fixtures" / "architectures"
UPSTREAM = {
    "qwen3-4b-thinking-2507": "qwen3-4b-thinking-2507",
    "qwen3-8b-longbench": "qwen3-8b-longbench",
    "qwen3.5-4b": "qwen3.5-4b",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is pulled into the cache of whoever runs the tests."""
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))


def write_index(folder: Path, **entries: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.json").write_text(json.dumps(entries))
    return folder


# Index and recipes


@pytest.mark.parametrize("name", [name for name, entry in INDEX.items() if entry.folder])
def test_every_bundled_set_is_sound_and_found_by_its_models(name: str) -> None:
    entry = INDEX[name]
    rotations = find_rotations(name)
    assert rotations.architecture and rotations.provenance["tokens"] > 0
    assert rotations.provenance["model"] in entry.models
    for model in entry.models:
        assert find_rotations(model.upper()).digest() == rotations.digest()
    assert set(entry.files) == {CONFIG_NAME, WEIGHTS_NAME}
    assert verify(entry) == {"name": name, "state": "bundled", "digest": rotations.digest(), "verified": True}


def test_readme_of_the_zoo_has_every_entry() -> None:
    text = (zoo_folder() / "README.md").read_text(encoding="utf-8")
    for name, entry in INDEX.items():
        assert f"| `{name}` |" in text
        assert all(source.repo in text for source in entry.sources if source.repo)


def test_no_two_entries_claim_a_model() -> None:
    models = [model.lower() for entry in INDEX.values() for model in entry.models]
    assert len(models) == len(set(models))


@pytest.mark.parametrize("name", [name for name, entry in INDEX.items() if entry.recipe])
def test_recipes_fit_the_models_configurations(name: str) -> None:
    recipe = INDEX[name].recipe
    OscarConfig.from_dict(recipe["config"])
    assert recipe["caveats"] and recipe["results"]
    if not recipe["architecture"]:
        assert recipe["layers"] is None
        return
    facts = json.loads((ARCHITECTURES / f"{name}.json").read_text())
    config = text_config(AutoConfig.for_model(facts.pop("model_type"), **facts))
    real = architecture(config)
    assert recipe["architecture"] == {key: real[key] for key in recipe["architecture"]}
    _, full = cache_layers(config)
    layers = range(real["num_hidden_layers"]) if recipe["layers"] == "all" else recipe["layers"]
    assert set(layers) == full
    OscarConfig.from_dict(recipe["config"]).groups(real["head_dim"])


def test_published_figures_of_the_paper() -> None:
    """Reference, section a: folders, clips and scores."""
    expected = {
        "qwen3-4b-thinking-2507": ("seq20000_prompt83_group128", 36, 0.92, 67.27, 67.17),
        "qwen3-8b": ("seq20000_prompt83_group128", 36, 0.92, 56.67, 55.56),
        "qwen3-32b": ("seq16000_prompt69_group128", 64, 0.96, 58.49, 60.4),
        "glm-4.7-fp8": ("seq10000_prompt43_group128", 92, 0.92, 73.23, 73.57),
    }
    for name, (folder, layers, v_clip, baseline, oscar) in expected.items():
        entry, recipe = INDEX[name], INDEX[name].recipe
        assert {source.repo for source in entry.sources if source.repo} == {
            "Zhongzhu/OSCAR-RotationZoo",
            "togethercomputer/OSCAR-RotationZoo",
        }
        assert entry.sources[0].folder.endswith(f"/{folder}")
        assert recipe["architecture"]["num_hidden_layers"] == layers
        assert (recipe["config"]["k_clip"], recipe["config"]["v_clip"]) == (0.96, v_clip)
        assert (recipe["results"][0]["baseline"], recipe["results"][0]["oscar"]) == (baseline, oscar)


# Resolution


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("qwen/qwen3-8b/", "qwen3-8b"),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b"),
        ("Qwen/Qwen3-8B-AWQ", "qwen3-8b"),
        ("Qwen/Qwen3-32B-GPTQ-Int4", "qwen3-32b"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b"),
        ("RedHatAI/Qwen3-8B-quantized.w4a16", "qwen3-8b"),
        ("RedHatAI/Qwen3-32B-FP8-dynamic", "qwen3-32b"),
        ("bartowski/Qwen3-4B-Thinking-2507-GGUF", "qwen3-4b-thinking-2507"),
        ("Qwen3-4B-Thinking-2507-Q4_K_M", "qwen3-4b-thinking-2507"),
        ("Qwen3-4B-Thinking-2507.IQ3_XXS", "qwen3-4b-thinking-2507"),
        ("mlx-community/Qwen3.5-4B-MLX-8bit", "qwen3.5-4b"),
        ("zai-org/GLM-4.7", "glm-4.7-fp8"),
        ("someone/GLM-4.7-AWQ", "glm-4.7-fp8"),
        ("someone/Qwen3-8B", None),
        ("Qwen/Qwen3-8B-Base", None),
        ("Qwen/Qwen3-4B", None),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", None),
    ],
)
def test_models_and_their_quantised_variants(name: str, entry: str | None) -> None:
    found = resolve(name, INDEX)
    assert (found and found.name) == entry


@pytest.mark.parametrize(
    ("card", "bases"),
    [
        ("---\nbase_model: Qwen/Qwen3-8B\n---\n", ["Qwen/Qwen3-8B"]),
        ("---\nbase_model:\n- Qwen/Qwen3-8B\n---\n", ["Qwen/Qwen3-8B"]),
        ("---\nbase_model: [a/b, c/d]\n---\n", []),
        ("---\nbase_model: ../../etc/passwd\n---\n", []),
        ("---\nbase_model: 'a/b\\x07'\n---\n", []),
        ("---\nbase_model: {a: b}\n---\n", []),
        ("---\nbase_model: !!python/object/apply:os.system ['true']\n---\n", []),
        ("---\n" + "[" * 1000 + "\n---\n", []),
        ("---\nbase_model: [\n---\n", []),
        ("no front matter", []),
    ],
)
def test_base_model_of_a_card(tmp_path: Path, card: str, bases: list[str]) -> None:
    (tmp_path / "README.md").write_text(card)
    assert list(base_models(str(tmp_path))) == bases


def test_base_model_of_a_card_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nbase_model: a/b\n---\n" + " " * (1 << 20))
    assert list(base_models(str(tmp_path))) == []


def test_fine_tunes_and_adapters_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, file, text in [
        ("tune", "README.md", "---\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\n---\n"),
        ("adapter", "adapter_config.json", '{"base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}'),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
        expected = find_rotations("smollm2-135m-instruct").digest()
        assert find_rotations(name).digest() == expected
        assert find_rotations(tmp_path / name).digest() == expected


def test_patch_model_finds_the_set_of_a_fine_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "tune")
    (tmp_path / "tune" / "README.md").write_text("---\nbase_model: owner/tiny\n---\n")
    rotations = RotationSet.without_data({0, 1, 2}, 16)
    rotations.save_pretrained(tmp_path / "zoo" / "tiny")
    write_index(tmp_path / "zoo", tiny={"models": ["owner/tiny"], "folder": "tiny"})
    monkeypatch.setattr(oscar_hf.zoo, "zoo_folder", lambda: tmp_path / "zoo")
    model.name_or_path = str(tmp_path / "tune")
    assert patch_model(model)._oscar_patch.digest == rotations.digest()


def test_zoo_of_a_folder(tmp_path: Path) -> None:
    one, two = RotationSet.without_data({0}, 16), RotationSet.without_data({0, 1}, 16)
    one.provenance["model"] = "owner/one"
    one.save_pretrained(tmp_path / "first")
    two.save_pretrained(tmp_path / "second")
    (tmp_path / "third").symlink_to(tmp_path / "first")
    assert find_rotations("owner/one", zoo=tmp_path).digest() == one.digest()
    assert find_rotations("owner/One-AWQ", zoo=str(tmp_path)).digest() == one.digest()
    assert find_rotations("second", zoo=tmp_path).digest() == two.digest()
    with pytest.raises(FileNotFoundError, match=r"nearest: first\)"):
        find_rotations("third", zoo=tmp_path)
    write_index(tmp_path, only={"models": [], "folder": "second"})
    with pytest.raises(FileNotFoundError, match=r"nearest: only\)"):
        find_rotations("owner/one", zoo=tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder; a zoo is"):
        find_rotations("owner/one", zoo=tmp_path / "nowhere")


# Unpinned, and files at hand


def test_unpinned_sets_are_not_fetched_by_themselves() -> None:
    for call in (lambda: find_rotations("Qwen/Qwen3-8B"), lambda: pull("qwen3-8b")):
        with pytest.raises(ValueError, match="qwen3-8b: unpinned.*--revision main"):
            call()
    facts = verify(INDEX["qwen3-8b"])
    assert facts == {
        "name": "qwen3-8b",
        "state": "unpinned",
        "digest": None,
        "verified": False,
        "note": "unpinned: no checksum is recorded",
    }
    with pytest.raises(FileNotFoundError, match="minimax-m2.7: no files are recorded"):
        pull("minimax-m2.7")
    with pytest.raises(FileNotFoundError, match="qwen3-8b: no files are recorded on gitlab"):
        pull("qwen3-8b", zoo="gitlab")
    with pytest.raises(FileNotFoundError, match=r"'qwen3-7b'.*nearest: qwen3-8b"):
        pull("qwen3-7b")
    assert not list(store_folder().glob("*")) and not list(store_folder().glob(".*"))


@pytest.fixture
def readable() -> None:
    pytest.importorskip("oscar_hf.formats")


@pytest.mark.parametrize("name", UPSTREAM)
def test_published_files_at_hand(readable: None, shared_data: Path, name: str) -> None:
    folder = shared_data / "upstream_rotations" / UPSTREAM[name]
    installed = pull(name, folder=folder)
    assert installed == store_folder() / name
    rotations = find_rotations(name)
    assert rotations.architecture == INDEX[name].recipe["architecture"]
    assert rotations.config == OscarConfig.from_dict(INDEX[name].recipe["config"])
    assert verify(INDEX[name]) == {
        "name": name,
        "state": "installed",
        "digest": rotations.digest(),
        "verified": True,
    }
    published = torch.load(next(folder.glob("k_*.pt")), weights_only=True)["layers"]
    assert all(
        torch.equal(rotations.layers[index].k_rotation, layer["rotation"]) for index, layer in published.items()
    )
    for model in INDEX[name].models:
        assert find_rotations(f"{model}-FP8").digest() == rotations.digest()


def test_files_of_another_model_of_the_same_shape(readable: None, shared_data: Path) -> None:
    folder = shared_data / "upstream_rotations" / "qwen3-8b-longbench"
    with pytest.raises(ValueError, match="SHA-256 is e3bc55c7.*but aa3fcade.* is due"):
        pull("qwen3-4b-thinking-2507", folder=folder)
    with pytest.raises(ValueError, match="no checksum is recorded.*--unverified"):
        pull("qwen3-8b", folder=folder)
    assert not list(store_folder().glob("*"))
    pull("qwen3-8b", folder=folder, unverified=True)
    assert not verify(INDEX["qwen3-8b"])["verified"]
    with pytest.raises(ValueError, match="hidden_size is 4096 in the rotations and 64 in the model"):
        patch_model(tiny_model("qwen3"), find_rotations("qwen3-8b"))


def test_symlinked_and_missing_files_at_hand(readable: None, shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "upstream_rotations" / "qwen3.5-4b"
    (tmp_path / "k_rotation.pt").symlink_to(folder / "k_rotation.pt")
    with pytest.raises(ValueError, match=r"k_rotation\.pt is a symlink"):
        pull("qwen3.5-4b", folder=tmp_path)
    (tmp_path / "k_rotation.pt").unlink()
    with pytest.raises(ValueError, match="No such file"):
        pull("qwen3.5-4b", folder=tmp_path)
    shutil.copy(folder / "k_rotation.pt", tmp_path)
    (tmp_path / "v_rotation.pt").write_bytes((folder / "v_rotation.pt").read_bytes()[:-1])
    with pytest.raises(ValueError, match="2111292 bytes, but 2111293 are due"):
        pull("qwen3.5-4b", folder=tmp_path)
    assert not list(store_folder().glob("*")) and not list(store_folder().glob(".*"))


def test_layers_and_shapes_are_checked_against_the_recipe() -> None:
    entry = INDEX["qwen3.5-4b"]
    layer = LayerRotation(torch.eye(256), torch.eye(256))
    finish(entry, RotationSet(dict.fromkeys(range(3, 32, 4), layer)))
    with pytest.raises(ValueError, match=r"qwen3.5-4b: .*lack full-attention layers \[31\]"):
        finish(entry, RotationSet(dict.fromkeys(range(3, 28, 4), layer)))
    with pytest.raises(ValueError, match=r"qwen3.5-4b: .*have layers \[0\]"):
        finish(entry, RotationSet(dict.fromkeys([0, *range(3, 32, 4)], layer)))
    small = LayerRotation(torch.eye(128), torch.eye(128))
    with pytest.raises(ValueError, match="qwen3.5-4b: Layer 3: rotations for head_dim 128, but the model's is 256"):
        finish(entry, RotationSet(dict.fromkeys(range(3, 32, 4), small)))
    heads = LayerRotation(torch.eye(256).repeat(2, 1, 1), torch.eye(256))
    with pytest.raises(ValueError, match=r"qwen3.5-4b: Layer 3: k_rotation has shape \[2, 256, 256\], expected"):
        finish(entry, RotationSet(dict.fromkeys(range(3, 32, 4), heads)))


# Hostile indices


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"folder": "../outside"}, "no plain path"),
        ({"folder": "/etc"}, "no plain path"),
        ({"folder": "a/../../b"}, "no plain path"),
        ({"folder": "a\\..\\b"}, "no plain path"),
        ({"folder": "C:/windows"}, "no plain path"),
        ({"folder": "a\x00b"}, "no plain path"),
        ({"folder": "a\nb"}, "no plain path"),
        ({"folder": ["a"]}, "no plain path"),
        ({"folder": "link"}, "is a symlink"),
        ({"folder": "link/inner"}, "is a symlink"),
        ({"recipe": "../recipe.json"}, "no plain path"),
        ({"recipe": "nothing.json"}, "is no plain file"),
        ({"recipe": "deep.json"}, "not JSON"),
        ({"recipe": "knobs.json"}, "Unknown OscarConfig setting 'shell'"),
        ({"recipe": "layers.json"}, "layers="),
        ({"files": {"../x": {}}}, "no plain path"),
        ({"files": {"x": {"sha256": "00"}}}, "is no SHA-256"),
        ({"files": {"x": {"size": -1}}}, "size=-1"),
        ({"files": {"x": {"size": True}}}, "size=True"),
        ({"files": {"x": {"size": 1 << 40}}}, "size="),
        ({"files": {"x": {"url": "http://elsewhere"}}}, "expected size and sha256"),
        ({"files": ["x"]}, "files an object"),
        ({"models": "a/b"}, "must be a list of model ids"),
        ({"models": ["a/b/c"]}, "must be a list of model ids"),
        ({"models": ["a/b\x1b[2J"]}, "must be a list of model ids"),
        ({"code": "import os"}, "an entry has"),
        ({"sources": {}, "models": [], "folder": None, "endpoint": "http://elsewhere"}, "an entry has"),
        ({"sources": [{"hub": "http://elsewhere", "repo": "a/b"}]}, "is not one of"),
        ({"sources": [{"hub": "huggingface", "repo": "http://elsewhere/a"}]}, "no repository OWNER/NAME"),
        ({"sources": [{"hub": "huggingface", "repo": "../a"}]}, "no repository OWNER/NAME"),
        ({"sources": [{"hub": "huggingface", "repo": "a/b", "endpoint": "http://elsewhere"}]}, "a source has"),
        ({"sources": [{"hub": "huggingface", "repo": "a/b", "revision": "../main"}]}, "no revision"),
        ({"sources": [{"hub": "huggingface", "repo": "a/b", "revision": "main\n"}]}, "no revision"),
        ({"sources": [{"hub": "huggingface", "repo": "a/b", "folder": "*"}]}, "no plain path"),
        ({"sources": [{"hub": "huggingface", "repo": "a/b", "files": {"../x.pt": {}}}]}, "no file name"),
        (
            {"sources": [{"hub": "huggingface", "repo": "a/b", "files": {f"x{i}.pt": {} for i in range(17)}}]},
            "at most",
        ),
        (["folder"], "an entry has"),
    ],
)
def test_hostile_index(tmp_path: Path, entry: Any, message: str) -> None:
    (tmp_path / "outside").mkdir()
    RotationSet.without_data({0}, 16).save_pretrained(tmp_path / "outside")
    folder = write_index(tmp_path / "zoo", victim=entry)
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "knobs.json").write_text('{"config": {"recipe": "oscar", "shell": "true"}}')
    (folder / "layers.json").write_text('{"config": {"recipe": "oscar"}, "layers": {"0": 1}}')
    with pytest.raises(ValueError, match=message) as caught:
        zoo_index(folder)
    assert "victim" in str(caught.value) or ".json" in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "a/b", "", "a\x07", ".hidden", "a" * 200, "a..b"])
def test_hostile_names_of_entries(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="a name has letters"):
        zoo_index(write_index(tmp_path, **{name: {}}))


def test_index_that_is_no_index(tmp_path: Path) -> None:
    for text, message in [("[]", "an object of entries"), ("{", "not JSON"), (" " * (2 << 20), "allowed")]:
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            zoo_index(tmp_path)
    (tmp_path / "index.json").unlink()
    (tmp_path / "index.json").symlink_to(zoo_folder() / "index.json")
    with pytest.raises(ValueError, match="no plain file"):
        zoo_index(tmp_path)


def test_bundled_set_that_was_changed(tmp_path: Path) -> None:
    RotationSet.without_data({0}, 16).save_pretrained(tmp_path)
    entry = Entry("name", (), folder=tmp_path, files={CONFIG_NAME: Pin(sha256="0" * 64)})
    with pytest.raises(ValueError, match=r"oscar_config\.json: its SHA-256 is .* is due; it was not used"):
        check_files(entry)


@pytest.mark.parametrize(
    "url",
    [
        "hf://owner/name",
        "hf://owner/name/folder",
        "hf://owner/name@main/../../x",
        "hf://owner/name@../main",
        "hf://owner@main",
        "hf://owner/name@main/a*b",
        "hf://owner/na\x00me@main",
    ],
)
def test_hub_paths_that_are_none(url: str) -> None:
    with pytest.raises(ValueError):
        find_rotations(url)


def test_hub_path() -> None:
    source = Source.from_url("hf://owner/name@v1.0/a/b")
    assert source == Source("huggingface", "owner/name", "a/b", "v1.0")
    assert source.url == "hf://owner/name@v1.0/a/b"
    assert Source.from_url("modelscope://o/n@master").url == "modelscope://o/n@master"
