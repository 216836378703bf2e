"""Other formats: exact both ways, and nothing believed of a file that is not checked."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import Tensor

from oscar_hf import formats
from oscar_hf.config import OscarConfig
from oscar_hf.formats import read_rotations, write_upstream
from oscar_hf.matrices import balanced_transform
from oscar_hf.rotation import LayerRotation, RotationSet

PUBLISHED = ["qwen3-4b-thinking-2507", "qwen3-8b-longbench", "qwen3.5-4b"]


def orthogonal(size: int = 16, *leading: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*leading, size, size, dtype=torch.float64)).Q.float()


def covariance(*shape: int) -> Tensor:
    sample = torch.randn(*shape, shape[-1], dtype=torch.float64)
    return sample @ sample.mT


def shared_set() -> RotationSet:
    return RotationSet({3: LayerRotation(orthogonal(), orthogonal()), 7: LayerRotation(orthogonal(), orthogonal())})


def per_head_set(heads: int = 2) -> RotationSet:
    transform = balanced_transform(covariance(heads, 16), covariance(heads, 16), 0.5, 0.1)
    inverse = torch.linalg.inv(transform).mT.float()
    full = LayerRotation(transform.float(), orthogonal(), inverse, torch.randn(heads, 16))
    return RotationSet(
        {0: full, 2: LayerRotation(orthogonal(16, heads), orthogonal(16, heads))}, OscarConfig("balanced")
    )


def payload(rotation: Tensor | None = None, **changes: Any) -> dict[str, Any]:
    entry = {"layer_id": 3, "rotation": orthogonal() if rotation is None else rotation, "eigenvalues": torch.ones(16)}
    header = {"format_version": 1, "objective": "qqt_r_h_pbr", "source_grouping": "layer"}
    return {**header, "layers": {3: entry}, **changes}


def entry(**changes: Any) -> dict[str, Any]:
    """A payload whose only layer has these changes."""
    return payload(layers={3: {"layer_id": 3, "rotation": orthogonal(), **changes}})


def per_head(**changes: Any) -> dict[str, Any]:
    return payload(format_version=2, layers={3: {"rotation": orthogonal(16, 2), **changes}})


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., Path]:
    """A folder with two files of these payloads, sound ones by default."""

    def write(keys: Any = None, values: Any = None) -> Path:
        torch.save(payload() if keys is None else keys, tmp_path / "k_rotation.pt")
        torch.save(payload(objective="sst_r_h_pbr") if values is None else values, tmp_path / "v_rotation.pt")
        return tmp_path

    return write


def refused(path: Path, match: str, values: Path | None = None) -> None:
    """Refused with a plain ValueError that names the file."""
    with pytest.raises(ValueError, match=match) as error:
        read_rotations(path, values=values)
    assert type(error.value) is ValueError and str(path) in str(error.value)


# Published files


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("way", ["folder", "file", "pair"])
def test_published_pair_is_read_exactly(shared_data: Path, name: str, way: str) -> None:
    folder = shared_data / "upstream_rotations" / name
    keys, values = sorted(folder.iterdir())
    rotations = read_rotations(folder if way == "folder" else keys, values=values if way == "pair" else None)
    theirs = [torch.load(file, weights_only=True)["layers"] for file in (keys, values)]
    assert list(rotations.layers) == sorted(theirs[0])
    for index, layer in rotations.layers.items():
        assert torch.equal(layer.k_rotation, theirs[0][index]["rotation"])
        assert torch.equal(layer.v_rotation, theirs[1][index]["rotation"])
        assert set(layer.tensors()) == {"k_rotation", "v_rotation"}
    assert rotations.config == OscarConfig("oscar")
    assert rotations.provenance["objective"] == {"k": "qqt_r_h_pbr", "v": "sst_r_h_pbr"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_pair_goes_back_byte_for_byte(shared_data: Path, tmp_path: Path, name: str) -> None:
    folder = shared_data / "upstream_rotations" / name
    rotations = read_rotations(folder)
    rotations.save_pretrained(tmp_path / "ours")
    written = write_upstream(read_rotations(tmp_path / "ours"), tmp_path / "theirs")
    for ours, theirs in zip(written, sorted(folder.iterdir()), strict=True):
        one, other = (torch.load(file, weights_only=True) for file in (ours, theirs))
        assert {key: one[key] for key in one if key != "layers"} == {
            key: other[key] for key in other if key != "layers"
        }
        assert list(one["layers"]) == list(other["layers"])
        for index, facts in one["layers"].items():
            assert facts["layer_id"] == other["layers"][index]["layer_id"]
            assert facts["rotation"].numpy().tobytes() == other["layers"][index]["rotation"].numpy().tobytes()


# Both ways


@pytest.mark.parametrize(("make", "version"), [(shared_set, 1), (per_head_set, 2), (lambda: per_head_set(1), 2)])
def test_round_trip(tmp_path: Path, make: Callable[[], RotationSet], version: int) -> None:
    rotations = make()
    paths = write_upstream(rotations, tmp_path / "new" / "pair", version)
    assert [path.name for path in paths] == ["k_rotation.pt", "v_rotation.pt"]
    assert sorted((tmp_path / "new" / "pair").iterdir()) == paths
    loaded = read_rotations(tmp_path / "new" / "pair")
    assert list(loaded.layers) == list(rotations.layers)
    for index, layer in rotations.layers.items():
        assert loaded.layers[index].tensors().keys() == layer.tensors().keys()
        for name, tensor in layer.tensors().items():
            assert torch.equal(*torch.broadcast_tensors(tensor, loaded.layers[index].tensors()[name]))
    again = write_upstream(loaded, tmp_path / "again", version)
    for one, other in zip(paths, again, strict=True):
        layers = [torch.load(file, weights_only=True)["layers"] for file in (one, other)]
        assert layers[0].keys() == layers[1].keys()
        for index in layers[0]:
            assert layers[0][index].keys() == layers[1][index].keys()
            assert all(
                torch.equal(tensor, layers[1][index][name])
                for name, tensor in layers[0][index].items()
                if name != "layer_id"
            )


def test_digest_survives_where_heads_share_a_matrix(tmp_path: Path) -> None:
    rotations = per_head_set()
    write_upstream(rotations, tmp_path, 2)
    assert torch.load(tmp_path / "v_rotation.pt", weights_only=True)["layers"][0]["rotation"].shape == (2, 16, 16)
    assert read_rotations(tmp_path).digest() == rotations.digest()


def test_version_2_of_shared_matrices_repeats_them_for_the_models_heads(tmp_path: Path) -> None:
    rotations = shared_set()
    with pytest.raises(ValueError, match="Layer 3: .*model_config"):
        write_upstream(rotations, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()
    rotations.architecture = {"num_key_value_heads": 4}
    keys, _ = write_upstream(rotations, tmp_path / "out", 2)
    written = torch.load(keys, weights_only=True)
    assert (written["format_version"], written["source_grouping"]) == (2, "per_kv_head")
    assert written["layers"][3]["rotation"].shape == (4, 16, 16)
    assert read_rotations(tmp_path / "out").digest() == rotations.digest()


@pytest.mark.parametrize("count", [0, -1, "4", 2.0, 10**9])
def test_version_2_does_not_believe_a_senseless_number_of_heads(tmp_path: Path, count: object) -> None:
    rotations = shared_set()
    rotations.architecture = {"num_key_value_heads": count}
    with pytest.raises(ValueError, match="is not known"):
        write_upstream(rotations, tmp_path, 2)


def test_our_folder_is_read_as_it_is(tmp_path: Path) -> None:
    rotations = per_head_set()
    rotations.save_pretrained(tmp_path)
    loaded = read_rotations(str(tmp_path))
    assert (loaded.digest(), loaded.config) == (rotations.digest(), rotations.config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float32])
def test_other_dtypes_string_keys_and_parameters(pair: Callable[..., Path], dtype: torch.dtype) -> None:
    matrix = orthogonal().to(dtype)
    folder = pair(payload(layers={"3": {"rotation": torch.nn.Parameter(matrix), "note": "x"}}))
    layer = read_rotations(folder).layers[3]
    assert torch.equal(layer.k_rotation, matrix.float()) and not layer.k_rotation.requires_grad


def test_hadamard_files_are_not_clipped(pair: Callable[..., Path]) -> None:
    both = payload(objective="hadamard")
    assert read_rotations(pair(both, both)).config == OscarConfig("hadamard")


@pytest.mark.parametrize("turn", [lambda t: t, lambda t: t.mT])
def test_o_rotation_that_undoes_the_rotation_is_accepted(pair: Callable[..., Path], turn: Callable) -> None:
    values = orthogonal(16, 2)
    layers = {3: {"rotation": values, "o_rotation": turn(values)}}
    folder = pair(per_head(), payload(format_version=2, objective="sst", layers=layers))
    assert torch.equal(read_rotations(folder).layers[3].v_rotation, values)


def test_set_is_checked_against_a_model(pair: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny_model().config
    size = config.head_dim
    layers = {i: LayerRotation(orthogonal(size), orthogonal(size)) for i in range(config.num_hidden_layers)}
    write_upstream(RotationSet(layers), tmp_path)
    rotations = read_rotations(tmp_path, model_config=config)
    assert rotations.architecture["num_key_value_heads"] == config.num_key_value_heads
    with pytest.raises(ValueError, match="lack full-attention layers"):
        read_rotations(pair(), model_config=config)


# What is refused, writing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: replace(layer, k_rotation=orthogonal(16, 2)), "its k_rotation"),
        (lambda layer: replace(layer, q_rotation=layer.k_rotation), "its q_rotation"),
        (lambda layer: replace(layer, k_mean=torch.zeros(2, 16)), "its k_mean"),
        (lambda layer: replace(layer, v_rotation=torch.ones(16, 16)), "not orthogonal"),
    ],
)
def test_what_version_1_cannot_hold_is_not_written(tmp_path: Path, change: Callable, message: str) -> None:
    rotations = shared_set()
    rotations.layers[7] = change(rotations.layers[7])
    with pytest.raises(ValueError, match=f"Layer 7: .*{message}"):
        write_upstream(rotations, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_unknown_version_is_not_written(tmp_path: Path, version: Any) -> None:
    with pytest.raises(ValueError, match=f"version={version!r}"):
        write_upstream(shared_set(), tmp_path / "out", version)


def test_failing_write_leaves_the_old_pair_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shared_set()
    files = write_upstream(before, tmp_path)
    save, calls = torch.save, []

    def fail(content: Any, file: Any) -> None:
        calls.append(file)
        save(content, file)
        if len(calls) == 2:
            raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        write_upstream(shared_set(), tmp_path)
    assert sorted(tmp_path.iterdir()) == files
    assert read_rotations(tmp_path).digest() == before.digest()


# What is refused, reading


def test_missing_and_ambiguous_files(pair: Callable[..., Path]) -> None:
    folder = pair()
    for path, values in ((folder / "none", None), (folder / "k_none.pt", None), (folder, folder / "v_none.pt")):
        with pytest.raises(FileNotFoundError, match="none.* is not there"):
            read_rotations(path, values=values)
    (folder / "v_rotation_other.pt").write_bytes(b"")
    refused(folder, "expected one .*v_rotation_other.*as values")
    (folder / "empty").mkdir()
    refused(folder / "empty", "found \\[\\]")
    with pytest.raises(FileNotFoundError, match="is no file"):
        read_rotations(folder / "k_rotation.pt", values=folder / "empty")


def test_files_of_the_wrong_side_or_of_other_layers(pair: Callable[..., Path]) -> None:
    folder = pair()
    with pytest.raises(ValueError, match="wrong way round"):
        read_rotations(folder / "v_rotation.pt", values=folder / "k_rotation.pt")
    both = payload()["layers"][3]
    refused(pair(payload(layers={3: both, 4: {**both, "layer_id": 4}})) / "k_rotation.pt", r"layers \[4\] are in one")


class Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_code_is_not_run(pair: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    folder = pair()
    content = payload(objective=Code(tmp_path / "executed"))
    if kind == "pickle":
        (folder / "k_rotation.pt").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / "k_rotation.pt", _use_new_zipfile_serialization=kind == "zip")
    refused(folder / "k_rotation.pt", "was not done" if kind == "zip" else "not written by torch.save")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("kept", [0, 1, 100, 0.3, 0.9, -1])
def test_truncated_file(pair: Callable[..., Path], kept: float) -> None:
    path = pair() / "k_rotation.pt"
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    refused(path, "not written by torch.save, or cut short")


def repacked(path: Path, compression: int, extra: dict[str, bytes]) -> None:
    records = {}
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()} | extra
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in records.items():
            new.writestr(name, content)


def test_zip_bomb_is_not_unpacked(pair: Callable[..., Path]) -> None:
    path = pair() / "k_rotation.pt"
    repacked(path, zipfile.ZIP_DEFLATED, {"k_rotation/data/0": bytes(1 << 24)})
    assert path.stat().st_size < 1 << 17
    refused(path, "packed data")


def test_records_over_one_another_are_refused(pair: Callable[..., Path]) -> None:
    path = pair() / "k_rotation.pt"
    content = path.read_bytes()
    place, count = content.index(b"PK\x01\x02"), content.count(b"PK\x01\x02")
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        directory = content[place : place + sum(46 + len(r.filename) + len(r.extra) for r in old.infolist())]
    end = bytearray(content[content.rindex(b"PK\x05\x06") :])
    total = 64 * count
    end[8:12] = total.to_bytes(2, "little") * 2
    end[12:16] = (64 * len(directory)).to_bytes(4, "little")
    end[16:20] = place.to_bytes(4, "little")
    path.write_bytes(content[:place] + directory * 64 + bytes(end))
    refused(path, "packed data")


def test_too_large_files(pair: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = pair(payload(note=["x" * 99] * 9)) / "k_rotation.pt"
    monkeypatch.setattr(formats, "MAX_PICKLE_BYTES", 100)
    refused(path, "structure alone")
    monkeypatch.setattr(formats, "MAX_FILE_BYTES", 1000)
    refused(path, "more than 1000 bytes")


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_tensor_larger_than_its_file(pair: Callable[..., Path], size: int) -> None:
    huge = torch.ones(1).expand(200, size, size) if size == 1 << 10 else torch.ones(1).expand(size, size)
    keys = payload(format_version=2 if huge.dim() == 3 else 1, layers={3: {"rotation": huge}})
    refused(pair(keys) / "k_rotation.pt", "bytes of tensors")


def with_one(value: float) -> Tensor:
    matrix = orthogonal()
    matrix[3, 4] = value
    return matrix


MALFORMED: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [1], 'no dict with "layers"'),
    "a tensor": (lambda: torch.eye(4), 'no dict with "layers"'),
    "no layers": (lambda: {"format_version": 1}, 'no dict with "layers"'),
    "layers in a list": (lambda: payload(layers=[orthogonal()]), 'no dict with "layers"'),
    "no layer": (lambda: payload(layers={}), "layers .* in one of them only"),
    "version 3": (lambda: payload(format_version=3), "format_version 3.*update"),
    "version as text": (lambda: payload(format_version="1"), "format_version '1'"),
    "version True": (lambda: payload(format_version=True), "format_version True"),
    "version a tensor": (lambda: payload(format_version=torch.ones(2)), "format_version tensor"),
    "objective a number": (lambda: payload(objective=7), "objective 7 is no name"),
    "objective with control characters": (lambda: payload(objective="qqt\x1b[2J"), "is no name"),
    "objective without end": (lambda: payload(objective="q" * 999), "is no name"),
    "layer -1": (lambda: payload(layers={-1: entry()["layers"][3]}), "layer -1 is no layer index"),
    "layer True": (lambda: payload(layers={True: entry()["layers"][3]}), "layer True"),
    "layer of text": (lambda: payload(layers={"../3": entry()["layers"][3]}), r"layer '\.\./3'"),
    "layer of a million": (lambda: payload(layers={10**6: entry()["layers"][3]}), "layer 1000000"),
    "layer twice": (lambda: payload(layers={3: entry()["layers"][3], "3": entry()["layers"][3]}), "comes twice"),
    "layer of another": (lambda: entry(layer_id=4), "layer 3 is malformed"),
    "layer a tensor": (lambda: payload(layers={3: orthogonal()}), "layer 3 is malformed"),
    "no rotation": (lambda: payload(layers={3: {"eigenvalues": torch.ones(16)}}), r"layer 3 has tensors \[\]"),
    "rotation a list": (lambda: entry(rotation=[[1.0]]), r"layer 3 has tensors \[\]"),
    "unknown tensor": (lambda: per_head(v_mean=torch.ones(2, 16)), "v_mean.*version 2 has rotation"),
    "version 1 with a mean": (lambda: entry(k_mean=torch.ones(2, 16)), "k_mean.*version 1 has rotation"),
    "K with o_rotation": (lambda: per_head(o_rotation=orthogonal(16, 2)), "o_rotation.*version 2"),
    "version 1 per head": (lambda: payload(orthogonal(16, 2)), r"shape \[2, 16, 16\]; expected 2"),
    "version 2 per layer": (lambda: per_head(rotation=orthogonal()), r"shape \[16, 16\]; expected 3"),
    "integers": (lambda: payload(torch.eye(16).long()), "int64.*not floats"),
    "complex": (lambda: payload(torch.eye(16) + 0j), "complex64"),
    "sparse": (lambda: payload(torch.eye(16).to_sparse()), "sparse"),
    "without data": (lambda: payload(torch.empty(16, 16, device="meta")), "damaged|meta"),
    "scalar": (lambda: payload(torch.tensor(1.0)), r"shape \[\]"),
    "empty": (lambda: payload(torch.ones(0, 0)), r"shape \[0, 0\]"),
    "no heads": (lambda: per_head(rotation=torch.ones(0, 16, 16)), "no transform's"),
    "not square": (lambda: payload(torch.ones(8, 16)), r"Layer 3: k_rotation has shape \[8, 16\]"),
    "head_dim of 2048": (lambda: payload(torch.eye(2048)), "at most 1024"),
    "NaN": (lambda: payload(with_one(float("nan"))), "Layer 3: k_rotation holds NaN"),
    "infinity": (lambda: payload(with_one(float("inf"))), "Layer 3: k_rotation holds NaN"),
    "beyond float32": (lambda: payload(with_one(1.0).double() * 1e300), "Layer 3: k_rotation holds NaN"),
    "not orthogonal": (lambda: payload(orthogonal() * 1.01), "Layer 3: k_rotation is not orthogonal"),
    "mean of NaN": (lambda: per_head(k_mean=torch.full((2, 16), torch.nan)), "Layer 3: k_mean holds NaN"),
    "mean of other heads": (lambda: per_head(k_mean=torch.ones(3, 16)), r"KV heads, \[2, 3\]"),
    "no inverse": (lambda: per_head(q_rotation=orthogonal(16, 2)), "inverse transpose of q_rotation"),
    "ill-conditioned": (
        lambda: per_head(
            rotation=torch.stack([torch.logspace(-2.5, 2.5, 16).diag(), torch.eye(16)]),
            q_rotation=torch.stack([torch.logspace(2.5, -2.5, 16).diag(), torch.eye(16)]),
        ),
        "condition number",
    ),
    "another size": (lambda: payload(orthogonal(8)), "Layer 3: v_rotation has shape"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused_by_name(pair: Callable[..., Path], case: str) -> None:
    make, message = MALFORMED[case]
    refused(pair(make()) / "k_rotation.pt", message)


def test_o_rotation_that_undoes_nothing(pair: Callable[..., Path]) -> None:
    for wrong in (orthogonal(16, 2), orthogonal(), torch.full((2, 16, 16), torch.nan)):
        layers = {3: {"rotation": orthogonal(16, 2), "o_rotation": wrong}}
        folder = pair(per_head(), payload(format_version=2, objective="sst", layers=layers))
        with pytest.raises(ValueError, match="o_rotation"):
            read_rotations(folder)


def test_hidden_names_of_long_errors_are_cut(pair: Callable[..., Path]) -> None:
    folder = pair(payload(format_version="9" * 100_000))
    with pytest.raises(ValueError, match="format_version") as error:
        read_rotations(folder)
    assert len(str(error.value)) < 500
