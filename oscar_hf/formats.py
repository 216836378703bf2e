"""Rotations in any format to a RotationSet, and back to upstream's pair of `.pt` files.

Version 1 holds one matrix per layer, version 2 one per KV head, with `q_rotation` and `k_mean` where there are any
(reference, section a). Files are taken for hostile: nothing in them is executed, and sizes are looked at before use.
"""

from __future__ import annotations

import io
import os
import re
import reprlib
import secrets
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .config import OscarConfig
from .rotation import CONFIG_NAME, TOLERANCE, LayerRotation, RotationSet

MAX_FILE_BYTES = 1 << 28
MAX_PICKLE_BYTES = 1 << 20
MAX_LAYER = 99_999
MAX_HEAD_DIM = 1024
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KEY_TENSORS = {"rotation": "k_rotation", "q_rotation": "q_rotation", "k_mean": "k_mean"}
VALUE_TENSORS = {"rotation": "v_rotation", "o_rotation": "o_rotation"}


def read_rotations(
    path: str | os.PathLike, *, values: str | os.PathLike | None = None, model_config: Any = None
) -> RotationSet:
    """A rotation set in any of the formats known here.

    Args:
        path: our folder, a folder with upstream's `k_rotation*.pt` and `v_rotation*.pt`, the former file, or a
            `.gguf` file with tensors `blk.N.attn_{k,v}_rot.weight`.
        values: upstream's V file, where it is not the only one beside the K file.
        model_config: the model's configuration, to check the set against and to take its architecture from.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file is damaged, too large, not what it should be, or does not fit the model; names the file.
    """
    path = Path(path)
    if values is None and (path / CONFIG_NAME).is_file():
        rotations = RotationSet.from_pretrained(path)
    elif path.suffix == ".gguf":
        from .export import read_gguf

        rotations = read_gguf(path)
    else:
        rotations = _read_pair(*_find_pair(path, values))
    if model_config is not None:
        from ._compat import architecture, cache_layers, text_config

        config = text_config(model_config)
        facts = architecture(config)
        rotations.check_fits(cache_layers(config)[1], facts)
        rotations.architecture = rotations.architecture or facts
    return rotations


def write_upstream(rotations: RotationSet, folder: str | os.PathLike, version: int = 1) -> list[Path]:
    """Write `k_rotation.pt` and `v_rotation.pt`, float32, for upstream's engines; eigenvalues are not kept.

    Args:
        rotations: the set.
        folder: made if it is not there; files of these names in it are replaced.
        version: 1, one orthogonal matrix per layer; or 2, one matrix per KV head, shared ones repeated.

    Returns:
        list[Path]: the K file and the V file.

    Raises:
        ValueError: the set is unsound, or the version cannot hold it; nothing is written.
    """
    if version not in (1, 2):
        raise ValueError(f"version={version!r} is not known; choose 1 (per layer) or 2 (per KV head).")
    rotations.validate()
    if version == 1:
        check_shared(rotations, "Format version 1", "write version 2")
    sides: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for index, layer in sorted(rotations.layers.items()):
        count = None if version == 1 else _heads(layer) or rotations.architecture.get("num_key_value_heads")
        if version == 2 and (type(count) is not int or not 0 < count <= MAX_HEAD_DIM):
            raise ValueError(
                f"Layer {index}: version 2 has a matrix per KV head, and how many there are is not known; read the "
                "set with model_config, or write version 1."
            )
        for side, names in zip(sides, (KEY_TENSORS, VALUE_TENSORS), strict=True):
            tensors = {name: getattr(layer, ours, None) for name, ours in names.items()}
            side[index] = {"layer_id": index, **{n: _dense(n, t, count) for n, t in tensors.items() if t is not None}}
    grouping = "layer" if version == 1 else "per_kv_head"
    paths = [Path(folder) / "k_rotation.pt", Path(folder) / "v_rotation.pt"]
    Path(folder).mkdir(parents=True, exist_ok=True)
    with replacing(paths[0]) as keys, replacing(paths[1]) as values:
        for file, objective, side in zip((keys, values), _objectives(rotations), sides, strict=True):
            header = {"format_version": version, "objective": objective, "source_grouping": grouping}
            torch.save({**header, "layers": side}, file)
    return paths


def check_shared(rotations: RotationSet, what: str, instead: str) -> None:
    """Raise ValueError unless each layer is one orthogonal matrix for K and one for V."""
    if rotations.config.recipe == "prompt":
        raise ValueError(f"{what} holds rotations, and this set leaves the keys' to each cache; {instead}.")
    for index, layer in rotations.layers.items():
        if extra := more_than_shared(layer):
            raise ValueError(
                f"Layer {index}: {what} holds one orthogonal matrix per layer for K and for V, and this set has more "
                f"(its {', '.join(extra)}); {instead}."
            )


def more_than_shared(layer: LayerRotation) -> list[str]:
    """What a layer has besides one orthogonal matrix for K and one for V, by name."""
    names = ("q_rotation", "k_mean")
    return [
        name for name, tensor in layer.tensors().items() if name in names or (tensor.dim() == 3 and name != "k_metric")
    ]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` once all is written, and is gone if anything fails."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with scratch.open("xb") as file:
            yield file
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _heads(layer: LayerRotation) -> int | None:
    """Number of KV heads, where a layer shows it."""
    sizes = [tensor.shape[0] for name, tensor in layer.tensors().items() if tensor.dim() == 3 or name == "k_mean"]
    return sizes[0] if sizes else None


def _dense(name: str, tensor: Tensor, count: int | None) -> Tensor:
    """A copy in float32, [D, D] repeated for `count` heads if there is a count."""
    if count and tensor.dim() == 2 and name != "k_mean":
        tensor = tensor.expand(count, -1, -1)
    return tensor.detach().cpu().float().clone(memory_format=torch.contiguous_format)


def _objectives(rotations: RotationSet) -> tuple[str, str]:
    """Upstream's names for how K and V were fitted."""
    known = rotations.provenance.get("objective")
    if isinstance(known, dict) and isinstance(known.get("k"), str) and isinstance(known.get("v"), str):
        return known["k"], known["v"]
    recipe = rotations.config.recipe
    return ("qqt_r_h_pbr", "sst_r_h_pbr") if recipe == "oscar" else (recipe, recipe)


def _find_pair(path: Path, values: str | os.PathLike | None) -> tuple[Path, Path]:
    """The K file and the V file that a folder or a K file stands for."""
    folder = path if path.is_dir() else path.parent
    keys = [path] if not path.is_dir() else sorted(folder.glob("k_rotation*.pt"))
    found = [Path(values)] if values is not None else sorted(folder.glob("v_rotation*.pt"))
    for file in (path, *map(Path, [] if values is None else [values])):
        if not file.exists():
            raise FileNotFoundError(f"{file} is not there.")
    if len(keys) != 1 or len(found) != 1:
        names = [file.name for file in (*keys, *found)]
        raise ValueError(
            f"{path}: expected one k_rotation*.pt and one v_rotation*.pt, or {CONFIG_NAME}, and found "
            f"{reprlib.repr(names)}; name the K file, and the V file as values."
        )
    return keys[0], found[0]


def _read_pair(keys: Path, values: Path) -> RotationSet:
    k_header, k_layers = _read_file(keys, KEY_TENSORS, ("sst", "vtv"))
    v_header, v_layers = _read_file(values, VALUE_TENSORS, ("qqt", "ktk"))
    if k_layers.keys() != v_layers.keys():
        lone = reprlib.repr(sorted(k_layers.keys() ^ v_layers.keys()))
        raise ValueError(f"{keys} and {values}: layers {lone} are in one of them only; take a pair made together.")
    layers = {}
    for index, tensors in sorted(k_layers.items()):
        rotation, inverse = (v_layers[index].get(name) for name in ("v_rotation", "o_rotation"))
        layers[index] = LayerRotation(**tensors, v_rotation=rotation)  # type: ignore[arg-type]
        if inverse is not None and not _undoes(inverse, rotation):  # type: ignore[arg-type]
            raise ValueError(f"{values}: layer {index}: o_rotation does not undo rotation.")
    objective = {"k": k_header["objective"], "v": v_header["objective"]}
    config = OscarConfig("hadamard" if set(objective.values()) == {"hadamard"} else "oscar")
    versions = {"k": k_header["format_version"], "v": v_header["format_version"]}
    return checked(
        f"{keys} and {values}",
        RotationSet(layers, config, provenance={"objective": objective, "format_version": versions}),
    )


def _undoes(inverse: Tensor, rotation: Tensor) -> bool:
    """Whether a matrix is an orthogonal one or its transpose: upstream applies either way round."""
    return inverse.shape == rotation.shape and any(
        bool(((inverse - form).abs() <= TOLERANCE).all()) for form in (rotation, rotation.mT)
    )


def checked(path: Path | str, rotations: RotationSet) -> RotationSet:
    """The set, if it is sound; else ValueError with the file that it is from."""
    try:
        rotations.validate()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return rotations


def _read_file(
    path: Path, names: dict[str, str], others: tuple[str, ...]
) -> tuple[dict[str, Any], dict[int, dict[str, Tensor]]]:
    """Header and layers of one upstream file, `others` being the objectives of the other side."""
    payload = _load(path)
    try:
        if not isinstance(payload, dict) or not isinstance(payload.get("layers"), dict):
            raise ValueError('no dict with "layers"; are these rotations?')
        version, objective = payload.get("format_version"), payload.get("objective", "unknown")
        if type(version) is not int or version not in (1, 2):
            raise ValueError(f"format_version {reprlib.repr(version)}, this oscar-hf reads 1 and 2; update it?")
        if not isinstance(objective, str) or not re.fullmatch(r"[\w.+-]{1,64}", objective, re.ASCII):
            raise ValueError(f"objective {reprlib.repr(objective)} is no name.")
        if objective.startswith(others):
            raise ValueError(f"objective {objective!r}: K and V files are the wrong way round.")
        layers: dict[int, dict[str, Tensor]] = {}
        total = 0
        for key, entry in payload["layers"].items():
            index = int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,5}", key, re.ASCII) else key
            if type(index) is not int or not 0 <= index <= MAX_LAYER or index in layers:
                raise ValueError(f"layer {reprlib.repr(key)} is no layer index, or comes twice.")
            if not isinstance(entry, dict) or entry.get("layer_id", index) != index:
                raise ValueError(f"layer {index} is malformed, or says that it is another layer.")
            tensors = {n: t for n, t in entry.items() if isinstance(t, Tensor) and n != "eigenvalues"}
            allowed = list(names)[: 1 if version == 1 else None]
            if "rotation" not in tensors or set(tensors) - set(allowed):
                found = reprlib.repr(list(tensors))
                raise ValueError(f"layer {index} has tensors {found}; version {version} has {', '.join(allowed)}.")
            total += sum(tensor.numel() for tensor in tensors.values())
            check_total(total)
            layers[index] = {names[n]: _tensor(f"layer {index}: {n}", t, version) for n, t in tensors.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {"format_version": version, "objective": objective}, layers


def check_total(elements: int) -> None:
    """Raise ValueError if float32 tensors of that many elements together are larger than a file may be."""
    if elements * 4 > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes of tensors: not rotations.")


def _tensor(name: str, tensor: Tensor, version: int) -> Tensor:
    """A tensor in float32 and, where all heads are the same, for all of them at once: [D, D]."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in FLOATS:
        raise ValueError(f"{name} is {tensor.layout}, {tensor.dtype}, {tensor.device.type}, not floats in memory.")
    dims = 2 if version == 1 or name.endswith("k_mean") else 3
    if tensor.dim() != dims or not 0 < max(tensor.shape) <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; expected {dims} dimensions of at most {MAX_HEAD_DIM}."
        )
    tensor = tensor.detach().float().contiguous()
    bits = tensor.view(torch.int32)
    return tensor[0] if dims == 3 and len(tensor) > 1 and bool((bits == bits[:1]).all()) else tensor


def _load(path: Path) -> Any:
    """What `torch.save` wrote, if it can be had without running code or unpacking more than the file's size."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file.")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: more than {MAX_FILE_BYTES} bytes, which no rotations take.")
    try:
        records = zipfile.ZipFile(io.BytesIO(content)).infolist()
    except Exception as error:
        raise ValueError(f"{path}: not written by torch.save, or cut short ({error}); fetch it again.") from error
    if any(r.compress_type != zipfile.ZIP_STORED for r in records) or sum(r.file_size for r in records) > len(content):
        raise ValueError(f"{path}: holds packed data, which torch.save does not write; it was not unpacked.")
    if any(r.file_size > MAX_PICKLE_BYTES for r in records if r.filename.endswith(".pkl")):
        raise ValueError(f"{path}: its structure alone takes more than {MAX_PICKLE_BYTES} bytes: not rotations.")
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"{path}: damaged, or asks for code to be run, which was not done ({reason}).") from error
