"""Hubs: fetching from a loopback server, offline, hostile and broken content, racing installs, publishing."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import COMMIT, Hub, serve
from huggingface_hub import constants
from safetensors.torch import save
from tiny import tiny_model
from typer.testing import CliRunner

import oscar_hf.hub
import oscar_hf.zoo
from oscar_hf import RotationSet, patch_model
from oscar_hf.card import model_card
from oscar_hf.cli import app
from oscar_hf.hub import Pin, Source, fetch, install, push, take
from oscar_hf.rotation import CONFIG_NAME, WEIGHTS_NAME
from oscar_hf.zoo import find_rotations, pull, store_folder, verify, zoo_index

REPO = "owner/name"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def a_set(folder: Path, layers: int = 3, size: int = 16, **provenance: Any) -> tuple[RotationSet, dict[str, bytes]]:
    """A small set, and its files."""
    rotations = RotationSet.without_data(set(range(layers)), size, **provenance)
    rotations.save_pretrained(folder)
    return rotations, {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, that huggingface_hub takes for its own, and empty caches."""
    from huggingface_hub.utils import close_session

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))  # before retries
    with serve(Hub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
        close_session()
        yield hub
        close_session()


@pytest.fixture
def zoo(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RotationSet:
    """A zoo whose entry "tiny" is pinned to a set on the hub, in the folder "sets/tiny"; "loose" is not."""
    rotations, files = a_set(tmp_path / "published", model="owner/tiny")
    hub.repos[REPO] = {f"sets/tiny/{name}": data for name, data in files.items()} | {"README.md": b"hello"}
    source = {"hub": "huggingface", "repo": REPO, "folder": "sets/tiny", "revision": COMMIT}
    pins = {name: {"size": len(data), "sha256": sha256(data)} for name, data in files.items()}
    loose = {**source, "revision": None, "files": dict.fromkeys(files, {})}
    index = {
        "tiny": {"models": ["owner/tiny"], "sources": [{**source, "files": pins}]},
        "loose": {"models": ["owner/loose"], "sources": [loose]},
    }
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "index.json").write_text(json.dumps(index))
    monkeypatch.setattr(oscar_hf.zoo, "zoo_folder", lambda: tmp_path / "zoo")
    return rotations


def leftovers() -> list[str]:
    return [path.name for path in store_folder().iterdir()] if store_folder().is_dir() else []


# Fetching


def test_pinned_set_is_fetched_by_the_models_id_and_kept(hub: Hub, zoo: RotationSet) -> None:
    model = tiny_model("llama")
    model.name_or_path = "owner/tiny"
    patch_model(model)
    assert model._oscar_patch.digest == zoo.digest()
    assert len(hub.downloads()) == 2
    assert all(f"/{COMMIT}/sets/tiny/" in line for line in hub.downloads())
    assert leftovers() == ["tiny"]
    assert verify(zoo_index()["tiny"])["verified"]
    hub.requests.clear()
    assert find_rotations("owner/tiny").digest() == zoo.digest()
    assert not hub.requests


def test_fine_tune_on_the_hub(hub: Hub, zoo: RotationSet) -> None:
    hub.repos["someone/tune"] = {"README.md": b"---\nbase_model: another/tune\n---\n"}
    hub.repos["another/tune"] = {"README.md": b"---\nbase_model: owner/tiny\n---\n"}
    assert find_rotations("someone/tune").digest() == zoo.digest()
    hub.repos["a/loop"] = {"README.md": b"---\nbase_model: b/loop\n---\n"}
    hub.repos["b/loop"] = {"README.md": b"---\nbase_model: a/loop\n---\n"}
    with pytest.raises(FileNotFoundError, match="No rotations for 'a/loop'"):
        find_rotations("a/loop")


def test_offline_from_the_hubs_cache(hub: Hub, zoo: RotationSet, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(FileNotFoundError, match=r"hf://owner/name@.*/sets/tiny is not in the cache, and offline"):
            pull("tiny")
    pull("tiny")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", constants.HF_ASSETS_CACHE + "2")
    assert find_rotations("tiny").digest() == zoo.digest()
    assert not hub.requests


def test_hub_path(hub: Hub, zoo: RotationSet, monkeypatch: pytest.MonkeyPatch) -> None:
    rotations = find_rotations(f"hf://{REPO}@main/sets/tiny")
    assert rotations.digest() == zoo.digest()
    assert rotations.provenance["source"]["files"].keys() == {CONFIG_NAME, WEIGHTS_NAME}
    assert find_rotations(f"hf://{REPO}@main").digest() == zoo.digest()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_rotations(f"hf://{REPO}@main/sets/tiny").digest() == zoo.digest()


def test_unpinned_needs_a_revision(hub: Hub, zoo: RotationSet) -> None:
    for call in (lambda: pull("loose"), lambda: find_rotations("owner/loose", zoo="hub")):
        with pytest.raises(ValueError, match="loose: unpinned.*--revision main"):
            call()
    assert not hub.requests
    pull("loose", revision="main")
    assert find_rotations("owner/loose").digest() == zoo.digest()
    facts = verify(zoo_index()["loose"])
    assert facts["digest"] == zoo.digest() and not facts["verified"]
    assert facts["note"] == "unpinned: no checksum is recorded"


def test_files_in_several_folders(hub: Hub, zoo: RotationSet) -> None:
    files = hub.repos[REPO]
    files.update({f"other/{name.rsplit('/')[-1]}": data for name, data in list(files.items()) if "sets" in name})
    with pytest.raises(ValueError, match=r"several folders \(other, sets/tiny\); name one of them"):
        find_rotations(f"hf://{REPO}@main")
    assert find_rotations(f"hf://{REPO}@main/sets").digest() == zoo.digest()


@pytest.mark.parametrize(
    ("misbehave", "error", "message"),
    [
        ({"repos": {}}, FileNotFoundError, "no such repository, or it is private"),
        ({"gated": {REPO}}, PermissionError, "is gated: accept its terms there, then `hf auth login`"),
        ({"repos": {REPO: {"README.md": b""}}}, FileNotFoundError, "has no oscar_config.json"),
        ({"broken": 418}, OSError, "hf://owner/name@.*418"),
        ({"cut": 100}, OSError, "owner/name|consistency|size"),
        ({"sizes": {f"sets/tiny/{WEIGHTS_NAME}": 1 << 40}}, ValueError, "1099511627776 bytes, allowed 1073741824"),
    ],
)
def test_hubs_that_do_not_give(
    hub: Hub, zoo: RotationSet, misbehave: dict[str, Any], error: type, message: str
) -> None:
    vars(hub).update(misbehave)
    with pytest.raises(error, match=message):
        pull("tiny")
    assert leftovers() == []


def test_no_revision_of_that_name(hub: Hub, zoo: RotationSet) -> None:
    with pytest.raises(FileNotFoundError, match="it has no revision 'v9'"):
        pull("loose", revision="v9")
    with pytest.raises(ValueError, match="is no revision"):
        pull("loose", revision="../main")


def test_no_network(hub: Hub, zoo: RotationSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FileNotFoundError, match="is not in the cache, and the hub cannot be reached"):
        pull("tiny")
    assert leftovers() == []


def test_huggingface_hub_by_its_own_environment(hub: Hub, zoo: RotationSet, tmp_path: Path) -> None:
    """In a process of its own, which knows the server by HF_ENDPOINT alone."""
    code = "from oscar_hf.cli import app; app()"
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", f"hf://{REPO}@main/sets/tiny", "--json"],
        env={**environment, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.endpoint},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["digest"] == zoo.digest()


def test_pulling_by_the_command_line(hub: Hub, zoo: RotationSet) -> None:
    def run(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["zoo", *arguments])
        assert result.exit_code == code, result.output
        return result

    assert "pinned" in run("list").stdout
    assert json.loads(run("list", "--json").stdout)["tiny"]["state"] == "pinned"
    facts = json.loads(run("pull", "owner/tiny-AWQ", "--json").stdout)
    assert facts["digest"] == zoo.digest() and facts["state"] == "installed" and facts["verified"]
    assert "loose: unpinned" in run("pull", "loose", code=1).stderr
    assert "nearest: tiny" in run("pull", "tinny", code=1).stderr
    assert "is no hub" in run("pull", "loose", "--zoo", "gitlab", code=1).stderr
    assert "sets/tiny" in run("info", "tiny", "--json").stdout
    assert "not recorded" not in run("info", "tiny").stdout
    assert [row["verified"] for row in json.loads(run("verify", "--json").stdout)] == [True, False]
    (Path(facts["path"]) / WEIGHTS_NAME).write_bytes(b"damaged")
    rows = json.loads(run("verify", "--json", code=1).stdout)
    assert "damaged or cut short" in rows[0]["error"] and not rows[0]["verified"]
    assert "damaged" in run("verify", "tiny", code=1).stdout


# What is fetched is not trusted


class Malicious:
    def __reduce__(self) -> tuple:
        return (os.system, ("touch executed",))


def safetensors_header(header: dict[str, Any] | bytes, body: bytes = b"") -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + body


def weights(**changes: torch.Tensor) -> bytes:
    tensors = {f"layers.{i}.{kind}_rotation": torch.eye(16) for i in range(3) for kind in "kv"}
    return save({**tensors, **{name.replace("__", "."): tensor for name, tensor in changes.items()}})


BAD = torch.eye(16)
BAD[0, 0] = float("nan")
INF = torch.eye(16)
INF[0, 1] = float("inf")
SKEWED = torch.eye(16)
SKEWED[0, 1] = 0.5
STEEP = torch.diag(torch.logspace(0, 5, 16))
F32 = {"dtype": "F32", "shape": [16, 16], "data_offsets": [0, 1024]}


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (WEIGHTS_NAME, b"", "damaged or cut short"),
        (WEIGHTS_NAME, weights()[:-1], "damaged or cut short"),
        (WEIGHTS_NAME, weights() + b"x", "damaged or cut short"),
        (WEIGHTS_NAME, pickle.dumps(Malicious()), "damaged or cut short"),
        (WEIGHTS_NAME, (1 << 62).to_bytes(8, "little") + b"{}", "damaged or cut short"),
        (WEIGHTS_NAME, safetensors_header(b"[" * 1000), "damaged or cut short"),
        (
            WEIGHTS_NAME,
            safetensors_header({"layers.0.k_rotation": {**F32, "shape": [1 << 30, 1 << 30]}}),
            "damaged or cut short",
        ),
        (WEIGHTS_NAME, safetensors_header({"layers.0.k_rotation": {**F32, "data_offsets": [0, 1 << 40]}}), "damaged"),
        (WEIGHTS_NAME, save({}), "without layers"),
        (WEIGHTS_NAME, weights(layers__0__k_rotation=BAD), "NaN, infinities"),
        (WEIGHTS_NAME, weights(layers__1__v_rotation=INF), "Layer 1: v_rotation holds NaN"),
        (WEIGHTS_NAME, weights(layers__0__k_rotation=torch.eye(16).int()), "no floating-point numbers"),
        (WEIGHTS_NAME, weights(layers__0__k_rotation=SKEWED), "k_rotation is not orthogonal"),
        (WEIGHTS_NAME, weights(layers__2__v_rotation=torch.zeros(16, 16)), "v_rotation is not orthogonal"),
        (
            WEIGHTS_NAME,
            weights(layers__0__k_rotation=STEEP, layers__0__q_rotation=torch.linalg.inv(STEEP).T.contiguous()),
            "condition number",
        ),
        (WEIGHTS_NAME, weights(layers__0__k_rotation=torch.eye(8)), "has shape"),
        (WEIGHTS_NAME, weights(layers__0__k_rotation=torch.ones(16)), "which is no transform's"),
        (WEIGHTS_NAME, weights(layers__99999999__k_rotation=torch.eye(16)), "unexpected tensor"),
        (WEIGHTS_NAME, save({"../../x": torch.eye(16)}), "unexpected tensor"),
        (WEIGHTS_NAME, save({"layers.0.k_rotation": torch.eye(16)}), "lacks k_rotation or v_rotation"),
        (CONFIG_NAME, b"\xff\xfe", "not JSON"),
        (CONFIG_NAME, b"[" * 100_000, "not JSON"),
        (CONFIG_NAME, b'{"version": 99}', "format version 99"),
        (CONFIG_NAME, b" " * (2 << 20), "allowed 1048576"),
        (CONFIG_NAME, b'{"version": 1, "config": {"sink_tokens": -1}, "architecture": {}, "provenance": {}}', "sink"),
        (CONFIG_NAME, b'{"version": 1, "config": {"x": 1}, "architecture": {}, "provenance": {}}', "Unknown"),
    ],
)
def test_hostile_sets(
    hub: Hub, zoo: RotationSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.repos[REPO][f"sets/tiny/{name}"] = data
    with pytest.raises((ValueError, OSError), match=message) as caught:
        pull("loose", revision="main")
    assert name in str(caught.value)
    assert leftovers() == []
    assert not (tmp_path / "executed").exists()


def test_pickles_and_zip_bombs(hub: Hub, zoo: RotationSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("oscar_hf.formats")
    monkeypatch.chdir(tmp_path)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("archive/data/0", b"\0" * (64 << 20))
    malicious = io.BytesIO()
    torch.save({"format_version": 1, "layers": Malicious()}, malicious)
    for data in (pickle.dumps(Malicious()), malicious.getvalue(), bomb.getvalue(), b"", b"PK\x03\x04"):
        hub.repos[REPO] = {f"{kind}_rotation.pt": data for kind in "kv"}
        with pytest.raises((ValueError, OSError)):
            find_rotations(f"hf://{REPO}@main")
    assert not (tmp_path / "executed").exists()


def test_other_content_than_pinned(hub: Hub, zoo: RotationSet, tmp_path: Path) -> None:
    """A sound set, of the same size to the byte, is still not the one that was pinned."""
    other = RotationSet.from_pretrained(tmp_path / "published")
    layer = other.layers[0]
    other.layers[0] = type(layer)(-layer.k_rotation, layer.v_rotation)
    other.save_pretrained(tmp_path / "other")
    hub.repos[REPO][f"sets/tiny/{WEIGHTS_NAME}"] = (tmp_path / "other" / WEIGHTS_NAME).read_bytes()
    with pytest.raises(ValueError, match=rf"{WEIGHTS_NAME}: its SHA-256 is .* is due; it was not used"):
        pull("tiny")
    assert leftovers() == []
    hub.repos[REPO][f"sets/tiny/{WEIGHTS_NAME}"] = b"short"
    hub.repos[REPO].pop("README.md")


def test_cache_that_was_changed(hub: Hub, zoo: RotationSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull("tiny")
    (cached,) = (tmp_path / "cache").rglob(WEIGHTS_NAME)
    data = bytearray(cached.read_bytes())
    data[-1] ^= 1
    cached.resolve().write_bytes(data)
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets2"))
    with pytest.raises(ValueError, match="its SHA-256 is"):
        pull("tiny")
    assert leftovers() == []


def test_set_of_another_model_of_the_same_shape(hub: Hub, zoo: RotationSet, tmp_path: Path) -> None:
    rotations, _ = a_set(tmp_path / "foreign")
    model = tiny_model("llama")
    rotations.architecture = {"model_type": "llama", "num_hidden_layers": 3, "head_dim": 16, "rope_theta": 5e5}
    with pytest.raises(ValueError, match="made for another model.*rope_theta is 500000.0 in the rotations"):
        patch_model(model, rotations)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    target = tmp_path / "target"
    with pytest.raises(ValueError, match="is a symlink"):
        take(tmp_path / "link", target, Pin(), follow=False)
    with pytest.raises(ValueError, match="is no plain file"):
        take(Path("/dev/zero"), target, Pin())
    target.unlink()
    with pytest.raises(ValueError, match="3 bytes, but 2 are due"):
        take(tmp_path / "real", target, Pin(size=2))
    target.unlink()
    assert take(tmp_path / "real", target, Pin(3, sha256(b"abc"))) == sha256(b"abc")
    with pytest.raises(FileExistsError):
        take(tmp_path / "real", target, Pin())


# Putting in place


def test_two_at_once(tmp_path: Path) -> None:
    """Whoever comes second finds the first's, or replaces it: there is always one whole set."""
    sets = [a_set(tmp_path / str(i), layers=1 + i % 2)[0] for i in range(6)]
    barrier = threading.Barrier(len(sets))

    def put(rotations: RotationSet) -> Path:
        barrier.wait()
        return install(rotations, tmp_path / "store" / "set")

    with ThreadPoolExecutor(len(sets)) as pool:
        assert set(pool.map(put, sets)) == {tmp_path / "store" / "set"}
    assert RotationSet.from_pretrained(tmp_path / "store" / "set").digest() in {s.digest() for s in sets}
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["set"]


def test_two_pulls_at_once(hub: Hub, zoo: RotationSet) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: pull("tiny"), range(4))) == {store_folder() / "tiny"}
    assert leftovers() == ["tiny"]
    assert find_rotations("tiny").digest() == zoo.digest()


@pytest.mark.parametrize("before", [False, True])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    rotations, _ = a_set(tmp_path / "a")
    target = tmp_path / "store" / "set"
    old = install(a_set(tmp_path / "b", layers=1)[0], target) if before else None

    def full(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"partly")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("oscar_hf.rotation.save_file", full)
    with pytest.raises(OSError, match=r"could not be written \(.*No space left on device\); nothing was installed"):
        install(rotations, target)
    assert [path.name for path in target.parent.iterdir()] == (["set"] if before else [])
    if old:
        assert len(RotationSet.from_pretrained(old).layers) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_disk_full_while_copying(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"abc" * (1 << 20))
    full = Path("/dev/full")
    with pytest.raises(OSError), pytest.MonkeyPatch.context() as patch:
        real = Path.open
        patch.setattr(Path, "open", lambda self, mode: real(full if mode == "xb" else self, mode.replace("x", "w")))
        take(tmp_path / "real", tmp_path / "target", Pin())


def test_store_that_is_a_symlink(tmp_path: Path) -> None:
    rotations, _ = a_set(tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "set").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a symlink"):
        install(rotations, tmp_path / "set")
    assert not list((tmp_path / "elsewhere").iterdir())


# ModelScope


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for ModelScope's package: its functions as they are called here, over a folder."""
    state = types.SimpleNamespace(root=tmp_path / "ms", calls=[], size=10)
    _, files = a_set(state.root / "sets")

    class HubApi:
        def get_model_files(self, model_id: str, revision: str, recursive: bool) -> list[dict[str, Any]]:
            if model_id != REPO:
                raise RuntimeError("404")
            return [{"Path": f"sets/{name}", "Size": state.size, "Type": "blob"} for name in files]

        def create_repo(self, repo_id: str, **options: Any) -> None:
            state.calls.append(("create", repo_id, options))

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
            state.calls.append(("upload", repo_id, sorted(os.listdir(folder_path))))

    def snapshot_download(model_id: str, *, revision: str, allow_patterns: list, local_files_only: bool) -> str:
        state.calls.append(("download", model_id, revision, local_files_only))
        return str(state.root)

    api = types.ModuleType("modelscope.hub.api")
    api.HubApi = HubApi  # type: ignore[attr-defined]
    download = types.ModuleType("modelscope.hub.snapshot_download")
    download.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", api)
    monkeypatch.setitem(sys.modules, "modelscope.hub.snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return state


def test_modelscope(modelscope: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(find_rotations(f"modelscope://{REPO}@master/sets").layers) == 3
    assert modelscope.calls == [("download", REPO, "master", False)]
    with pytest.raises(ConnectionError, match="modelscope://owner/other@master: RuntimeError: 404"):
        find_rotations("modelscope://owner/other@master")
    modelscope.size = 1 << 40
    with pytest.raises(ValueError, match="1099511627776 bytes, allowed"):
        find_rotations(f"modelscope://{REPO}@master/sets")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    find_rotations(f"modelscope://{REPO}@master/sets")
    assert modelscope.calls[-1] == ("download", REPO, "master", True)


def test_modelscope_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"oscar-hf\[modelscope\]"):
        fetch(Source("modelscope", REPO), tmp_path, revision="master")


# Giving back


def test_push_is_a_dry_run_and_then_a_commit(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rotations, files = a_set(tmp_path / "a", model="owner/tiny", corpus="pydoc", tokens=600)
    measured = {"kl": 0.05, "needle": "10 of 10", "command": "python -m eval.demo --facts 10"}
    facts = rotations.push_to_hub("me/set", licence="mit", measured=measured)
    assert facts["address"] is None and not hub.requests
    assert facts["files"][WEIGHTS_NAME] == {"size": len(files[WEIGHTS_NAME])}
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    facts = rotations.push_to_hub("me/set", licence="mit", measured=measured, dry_run=False)
    assert facts["address"] and COMMIT in facts["address"]
    published = hub.repos["me/set"]
    assert facts["files"] == {n: {"size": len(data), "sha256": sha256(data)} for n, data in published.items()}
    assert published[CONFIG_NAME] == files[CONFIG_NAME]
    card = published["README.md"].decode()
    for part in ("license: mit", 'base_model: "owner/tiny"', "`pydoc`", "`600`", "`0.05`", "eval.demo --facts 10"):
        assert part in card
    assert 'patch_model(model, "hf://me/set@main")' in card
    assert find_rotations("hf://me/set@main").digest() == rotations.digest()


def test_push_by_the_command_line(tmp_path: Path, modelscope: types.SimpleNamespace) -> None:
    a_set(tmp_path / "a")
    (tmp_path / "measured.json").write_text('{"kl": 0.1, "command": "x"}')
    arguments = ["zoo", "push", str(tmp_path / "a"), "me/set", "--to", "modelscope"]
    result = CliRunner().invoke(app, [*arguments, "--measured", str(tmp_path / "measured.json")])
    assert result.exit_code == 0, result.output
    assert "nothing was uploaded" in result.stdout and "modelscope://me/set@main" in result.stdout
    assert not modelscope.calls
    result = CliRunner().invoke(app, [*arguments, "--yes", "--private", "--json"])
    assert json.loads(result.stdout)["address"] == "modelscope://me/set"
    assert modelscope.calls[0] == (
        "create",
        "me/set",
        {"repo_type": "model", "visibility": "private", "exist_ok": True},
    )
    assert modelscope.calls[1] == ("upload", "me/set", ["README.md", CONFIG_NAME, WEIGHTS_NAME])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repo": "noslash"}, "no repository"),
        ({"repo": "../../x"}, "no repository"),
        ({"hub": "gitlab"}, "is not one of"),
        ({"licence": "mit\nmodel: x"}, "must be an identifier"),
        ({"measured": {"kl": 1}}, "the command that measured them"),
        ({"measured": ["kl"]}, "the command that measured them"),
    ],
)
def test_push_refuses(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    rotations, _ = a_set(tmp_path)
    with pytest.raises(ValueError, match=message):
        push(rotations, **{"repo": "me/set", **options})


def test_card_cannot_be_broken_out_of(tmp_path: Path) -> None:
    rotations, _ = a_set(tmp_path, model='a/b"\n---\nlicense: x\x1b[2J', corpus="`|\n# Heading")
    card = model_card(rotations, "hf://me/set")
    assert card.count("\n---\n") == 1 and "\x1b" not in card
    assert not any(line.startswith(("license", "# Heading")) for line in card.splitlines())
