"""Out to engines that serve many users: upstream's SGLang by a pair of files, llama.cpp by tensors in a GGUF.

A GGUF has `blk.N.attn_{k,v}_rot.weight`, float32 [D, D], transposed (reference, section f). Its header is read here,
within bounds, and not by the `gguf` package, which takes memory a hundredfold of what a hostile header says.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import OscarConfig
from .formats import MAX_HEAD_DIM, check_shared, check_total, checked, more_than_shared, replacing, write_upstream
from .rotation import LayerRotation, RotationSet

MAX_HEADER_BYTES = 1 << 26
PAGE_TOKENS = 8

# llama.cpp's RoPE turns pairs of neighbouring channels in these architectures, so their files hold the two halves of
# a head that transformers pairs interleaved; in the others channels are in the order of transformers.
INTERLEAVED = {"llama", "deci", "granite", "granitemoe", "smollm3", "arcee"}
IN_ORDER = {
    *("falcon", "gemma", "gemma2", "gemma3", "gemma4", "glm4moe", "gpt-oss", "minimax-m2", "nemotron", "olmo2"),
    *("phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "stablelm", "starcoder2"),
}
ARCHITECTURE_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}
F32 = 0
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class ServerCommand:
    """How to start an engine with exported rotations; `str()` is the line for a shell.

    Args:
        command: program and arguments.
        environment: variables to add to the environment.
        files: what was written.
        notes: what the engine does otherwise than this set asks for.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " \\\n  ".join([*variables, shlex.join(self.command)])


def to_sglang(rotations: RotationSet, folder: str | os.PathLike, *, model: str | None = None) -> ServerCommand:
    """Write the pair of files for upstream's SGLang, version 1 if it can hold the set, else 2.

    Args:
        rotations: the set.
        folder: for `k_rotation.pt` and `v_rotation.pt`.
        model: what to serve; default: the model that the set names, or the word MODEL.

    Raises:
        ValueError: the set is unsound, or the engine cannot store by its settings; nothing is written.
    """
    rotations.validate()
    config, notes = rotations.config, []
    sizes = {layer.head_dim for layer in rotations.layers.values()}
    size = max(sizes)
    group = config.group_size or size
    for name, tokens in (("sink_tokens", config.sink_tokens), ("recent_tokens", config.recent_tokens)):
        if tokens % PAGE_TOKENS:
            raise ValueError(f"{name}={tokens}: SGLang's windows are multiples of {PAGE_TOKENS} tokens; change it.")
    if len(sizes) > 1 or size & (size - 1) or group & (group - 1) or group > size:
        raise ValueError(
            f"head_dim={sorted(sizes)} in groups of {group}: SGLang takes one head_dim, and powers of 2 for both."
        )
    if config.bits != 2:
        raise ValueError(f"bits={config.bits}: SGLang's int2 stores 2 bits; export a set with bits=2.")
    if config.scale_rule != "minmax":
        notes.append(f"SGLang stores by min and max; scale_rule={config.scale_rule!r} is not applied, so measure it.")
    if config.k_search:
        notes.append("SGLang rounds each channel by itself; k_search is not applied, so measure it.")
    if any(layer.settings for layer in rotations.layers.values()):
        notes.append("SGLang has one clip for all layers; those chosen by layer are not applied, so measure it.")
    if rotations.exact_layers:
        layers = ", ".join(map(str, rotations.exact_layers))
        notes.append(f"SGLang stores layers {layers} in 2 bits too, which cannot hold their keys: measure it.")
    version = 2 if any(map(more_than_shared, rotations.layers.values())) else 1
    if version == 2:
        notes.append("Format version 2 (a matrix per KV head) needs an OSCAR-SGLang that reads it; older ones do not.")
    keys, values = write_upstream(rotations, Path(folder).resolve(), version)
    named = rotations.provenance.get("model")
    if model is None:
        model = named if isinstance(named, str) and re.fullmatch(r"[\w/][\w./ -]*", named, re.ASCII) else "MODEL"
    clips = {side: "0" if clip == 1 else f"{clip:g}" for side, clip in (("K", config.k_clip), ("V", config.v_clip))}
    environment = {
        "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
        "SGLANG_MIXED_KV_PREFIX_TOKENS": str(config.sink_tokens),
        "SGLANG_MIXED_KV_RECENT_TOKENS": str(config.recent_tokens),
        "SGLANG_MIXED_KV_SCALE_DTYPE": config.scale_dtype,
        "SGLANG_OSCAR_K_ROTATION_PATH": str(keys),
        "SGLANG_OSCAR_V_ROTATION_PATH": str(values),
        "SGLANG_OSCAR_K_CLIP_RATIO": clips["K"],
        "SGLANG_OSCAR_V_CLIP_RATIO": clips["V"],
    }
    command = ["python", "-m", "sglang.launch_server", "--model-path", model, "--kv-cache-dtype", "int2"]
    command += ["--kv-cache-quant-group-size", str(group)]
    command += ["--prefill-attention-backend", "fa3", "--decode-attention-backend", "triton"]
    return ServerCommand(tuple(command), environment, (keys, values), tuple(notes))


@dataclass
class GGUFHeader:
    """What a GGUF says before its tensors' data.

    Args:
        version: 2 or 3, little-endian.
        count: of metadata entries.
        metadata: the entries as they are in the file.
        infos: what describes the tensors, as it is in the file.
        data: where data begins, in bytes.
        size: of the file, in bytes.
        values: the entries that are numbers or strings, by key.
        tensors: dimensions (fastest first), type and offset after `data`, by name.
    """

    version: int
    count: int
    metadata: bytes = b""
    infos: bytes = b""
    data: int = 0
    size: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)

    @property
    def alignment(self) -> int:
        """Every tensor begins at a multiple of it."""
        return self.values.get("general.alignment", 32)

    def padding(self, size: int) -> int:
        """Bytes from `size` to the next multiple of `alignment`."""
        return -size % self.alignment

    def number(self, key: str) -> int | None:
        """Whole number among the architecture's metadata; None where there is none, or one per layer."""
        value = self.values.get(f"{self.values.get('general.architecture')}.{key}")
        return value if type(value) is int and value > 0 else None

    def rotations(self) -> dict[tuple[int, str], str]:
        """Names of the rotation tensors by layer and side, `"k"` or `"v"`."""
        matches = (re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.attn_([kv])_rot\.weight", name) for name in self.tensors)
        return {(int(match[1]), match[2]): match[0] for match in matches if match}


class _Cursor:
    """Reads little-endian values one after the other, and never past the end."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0

    def take(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.content, self.place)
        self.place += struct.calcsize(f"<{kind}")
        return value

    def skip(self, size: int) -> bytes:
        if size > len(self.content) - self.place:
            raise struct.error
        self.place += size
        return self.content[self.place - size : self.place]

    def text(self) -> str:
        return self.skip(self.take("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """A number or string; None for an array, which is passed over."""
        if kind in SCALARS:
            return self.take(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"metadata of type {kind}, which GGUF does not have.")
        kind, count = self.take("I"), self.take("Q")
        if kind in SCALARS:
            self.skip(count * struct.calcsize(f"<{SCALARS[kind]}"))
        elif kind == STRING:
            for _ in range(count):
                self.skip(self.take("Q"))
        else:
            raise ValueError(f"an array of type {kind}, which no model has.")
        return None


def read_header(path: Path) -> GGUFHeader:
    """The header of a GGUF.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no GGUF of version 2 or 3, cut short, or its header takes more than 64 MiB.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file.")
    with path.open("rb") as file:
        cursor = _Cursor(file.read(MAX_HEADER_BYTES))
    try:
        if cursor.skip(4) != b"GGUF" or (version := cursor.take("I")) not in (2, 3):
            raise ValueError("not a little-endian GGUF of version 2 or 3.")
        tensors, count = cursor.take("Q"), cursor.take("Q")
        header = GGUFHeader(version, count, size=path.stat().st_size)
        start = cursor.place
        for _ in range(count):
            key = cursor.text()
            header.values[key] = cursor.value(cursor.take("I"))
        header.metadata, start = cursor.content[start : cursor.place], cursor.place
        for _ in range(tensors):
            name, dims = cursor.text(), cursor.take("I")
            if name in header.tensors or not dims <= 4:
                raise ValueError(f"tensor {name[:80]!r} comes twice, or has {dims} dimensions.")
            shape = tuple(cursor.take("Q") for _ in range(dims))
            header.tensors[name] = (shape, cursor.take("I"), cursor.take("Q"))
        header.infos = cursor.content[start : cursor.place]
        alignment = header.alignment
        if type(alignment) is not int or not 0 < alignment <= 1 << 16 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={alignment!r} is no power of 2.")
        header.data = cursor.place + header.padding(cursor.place)
    except struct.error as error:
        raise ValueError(f"{path}: cut short, or its header takes more than {MAX_HEADER_BYTES} bytes.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return header


def read_gguf(path: Path) -> RotationSet:
    """The rotations in a GGUF, in transformers' order of channels.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, has no rotations, or they are not what they should be.
    """
    header = read_header(path)
    names = header.rotations()
    layers = sorted({layer for layer, _ in names})
    try:
        if not layers:
            raise ValueError("has no attn_k_rot and attn_v_rot tensors; give a GGUF with rotations.")
        lone = [layer for layer in layers if not {(layer, "k"), (layer, "v")} <= names.keys()]
        if lone:
            raise ValueError(f"layers {lone[:8]} have only one of attn_k_rot and attn_v_rot.")
        for name in names.values():
            shape, kind, offset = header.tensors[name]
            if len(shape) != 2 or shape[0] != shape[1] or not 0 < shape[0] <= MAX_HEAD_DIM or kind != F32:
                raise ValueError(f"{name} has dimensions {list(shape)} and type {kind}, not [D, D] in float32 (0).")
            if offset + 4 * prod(shape) > header.size - header.data:
                raise ValueError(f"{name} is beyond the end of the file; it is cut short.")
        check_total(sum(prod(header.tensors[name][0]) for name in names.values()))
        matrices = {}
        with path.open("rb") as file:
            for place, name in names.items():
                (size, _), _, offset = header.tensors[name]
                file.seek(header.data + offset)
                content = bytearray(file.read(4 * size * size))
                matrices[place] = torch.frombuffer(content, dtype=torch.float32).view(size, size).T.contiguous()
        for layer in layers:
            matrix = matrices[layer, "k"]
            matrices[layer, "k"] = matrix[_channels(header, len(matrix)).argsort()]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    found = {layer: LayerRotation(matrices[layer, "k"], matrices[layer, "v"]) for layer in layers}
    return checked(path, RotationSet(found, OscarConfig("oscar"), provenance={"format": "gguf"}))


def _channels(header: GGUFHeader, size: int) -> Tensor:
    """For each channel of a key in the GGUF, which of transformers' channels it is; [size]."""
    name = header.values.get("general.architecture")
    if name in INTERLEAVED:
        return torch.arange(size).view(2, -1).T.flatten()
    if name in IN_ORDER:
        return torch.arange(size)
    raise ValueError(f"architecture {str(name)[:80]!r}: in what order llama.cpp has its keys' channels is not known.")


def to_llamacpp(rotations: RotationSet, source_gguf: str | os.PathLike, target_gguf: str | os.PathLike) -> Path:
    """Write a copy of a GGUF that has the rotations; metadata and weights are copied as they are.

    Args:
        rotations: one orthogonal matrix per layer for K and for V.
        source_gguf: the model, in one file.
        target_gguf: the copy.

    Raises:
        FileNotFoundError: no such source.
        ImportError: the `gguf` package, which knows the sizes of quantised weights, is not installed.
        ValueError: the set does not fit the model, or llama.cpp cannot hold it; nothing is written.
    """
    source, target = Path(source_gguf), Path(target_gguf)
    rotations.validate()
    check_shared(rotations, "llama.cpp", "calibrate with recipe 'oscar'")
    header = read_header(source)
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} is the source itself; write to another file.")
    try:
        _check_whole(header)
        _check_fits(rotations, header)
        added = {}
        for index, layer in sorted(rotations.layers.items()):
            keys = layer.k_rotation[_channels(header, layer.head_dim)]
            for side, matrix in (("k", keys), ("v", layer.v_rotation)):
                transposed = matrix.detach().cpu().float().T.contiguous()
                added[f"blk.{index}.attn_{side}_rot.weight"] = (
                    len(matrix),
                    transposed.numpy().astype("<f4").tobytes(),
                )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    start = header.size - header.data
    offset = start + header.padding(start)
    infos = header.infos
    for name, (size, content) in added.items():
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IQQIQ", 2, size, size, F32, offset)
        offset += len(content) + header.padding(len(content))
    head = b"GGUF" + struct.pack("<IQQ", header.version, len(header.tensors) + len(added), header.count)
    head += header.metadata + infos
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as old, replacing(target) as new:
        new.write(head + bytes(header.padding(len(head))))
        old.seek(header.data)
        shutil.copyfileobj(old, new, 1 << 24)
        new.write(bytes(header.padding(start)))
        for _, content in added.values():
            new.write(content + bytes(header.padding(len(content))))
    return target


def _check_whole(header: GGUFHeader) -> None:
    """Raise ValueError unless all weights are in the file: what is missing would be taken from the rotations."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise ImportError('Writing a GGUF needs the gguf package: pip install "oscar-hf[demo]".') from error
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    if header.values.get("split.count", 1) not in (0, 1):
        raise ValueError("one of several parts; merge them with llama-gguf-split first.")
    if header.rotations():
        raise ValueError("has rotations already; start from the GGUF without them.")
    if not header.tensors:
        raise ValueError("has no tensors; give a model.")
    for name, (shape, kind, offset) in header.tensors.items():
        if kind not in sizes:
            raise ValueError(
                f"tensor {name[:80]!r} has type {kind}, which this gguf package does not know; update it."
            )
        elements, size = sizes[kind]
        if offset + prod(shape) // elements * size > header.size - header.data:
            raise ValueError(f"tensor {name[:80]!r} is beyond the end of the file; it is cut short, fetch it again.")


def _check_fits(rotations: RotationSet, header: GGUFHeader) -> None:
    """Raise ValueError unless the set has the layers and shapes of the model in the GGUF."""
    facts = {name: header.number(key) for name, key in ARCHITECTURE_KEYS.items()}
    blocks, drafting = facts["num_hidden_layers"], header.number("nextn_predict_layers") or 0
    facts["num_hidden_layers"] = blocks and blocks - drafting
    for name, theirs in facts.items():
        ours = rotations.architecture.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            raise ValueError(f"{name} is {ours!r} in the rotations and {theirs!r} here; take this model's rotations.")
    heads, width = facts["num_attention_heads"], facts["hidden_size"]
    size = header.number("attention.key_length") or (width // heads if heads and width else None)
    for index, layer in rotations.layers.items():
        if size and layer.head_dim != size:
            raise ValueError(f"layer {index}: rotations for head_dim {layer.head_dim}, and {size} here.")
    attention = _layers_with("attn_k", header) or _layers_with("attn_qkv", header)
    attention = {index for index in attention if index < (facts["num_hidden_layers"] or index + 1)}
    extra = sorted(set(rotations.layers) - attention)
    if extra:
        raise ValueError(f"layers {extra[:8]} of the rotations have no attention here; take this model's rotations.")
    missing = sorted(attention - set(rotations.layers))
    if missing and header.number("attention.sliding_window") is None:
        raise ValueError(f"the rotations lack layers {missing[:8]} of this model; take its own.")


def _layers_with(weight: str, header: GGUFHeader) -> set[int]:
    """Blocks that have a weight of that name; hybrid models call something else `attn_qkv` in their other layers."""
    matches = (re.fullmatch(rf"blk\.(\d{{1,5}})\.{weight}\.weight", name) for name in header.tensors)
    return {int(match[1]) for match in matches if match}
