"""Out to other engines: SGLang's files and command, a GGUF that the gguf package reads, and what is refused."""

from __future__ import annotations

import shlex
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eval.demo import model_file
from oscar_hf import export
from oscar_hf.config import OscarConfig
from oscar_hf.export import INTERLEAVED, to_llamacpp, to_sglang
from oscar_hf.formats import read_rotations
from oscar_hf.loading import load_model
from oscar_hf.rotation import LayerRotation, RotationSet

gguf = pytest.importorskip("gguf", reason="needs the gguf package")

SIZE, HEADS, LAYERS, WIDTH = 16, 2, 3, 64
ARCHITECTURE = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_key_value_heads": HEADS}


def orthogonal(size: int = SIZE, *leading: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*leading, size, size, dtype=torch.float64)).Q.float()


def rotation_set(layers: int = LAYERS, size: int = SIZE, **settings: Any) -> RotationSet:
    made = {index: LayerRotation(orthogonal(size), orthogonal(size)) for index in range(layers)}
    return RotationSet(made, OscarConfig("oscar", **settings), dict(ARCHITECTURE), {"model": "owner/tiny"})


def write_gguf(
    path: Path,
    architecture: str = "qwen3",
    *,
    layers: int = LAYERS,
    facts: dict[str, int] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    alignment: int = 32,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_custom_alignment(alignment)
    defaults = {"block_count": layers, "embedding_length": WIDTH, "attention.head_count": 4}
    defaults |= {"attention.head_count_kv": HEADS, "attention.key_length": SIZE}
    for name, value in {**defaults, **(facts or {})}.items():
        writer.add_uint32(name if name.startswith("split.") else f"{architecture}.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ö", "c" * 300])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_bool("general.flag", True)
    for index in range(layers):
        writer.add_tensor(f"blk.{index}.attn_k.weight", np.random.randn(HEADS * SIZE, WIDTH).astype(np.float32))
    packed = gguf.quantize(np.random.randn(5, 96).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "source.gguf")


# SGLang


def test_sglang_command(tmp_path: Path) -> None:
    rotations = rotation_set(sink_tokens=128, recent_tokens=2048, scale_dtype="bfloat16", group_size=8)
    server = to_sglang(rotations, tmp_path / "out put")
    folder = tmp_path / "out put"
    assert server.files == (folder / "k_rotation.pt", folder / "v_rotation.pt")
    assert read_rotations(folder).digest() == rotations.digest()
    assert server.environment == {
        "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
        "SGLANG_MIXED_KV_PREFIX_TOKENS": "128",
        "SGLANG_MIXED_KV_RECENT_TOKENS": "2048",
        "SGLANG_MIXED_KV_SCALE_DTYPE": "bfloat16",
        "SGLANG_OSCAR_K_ROTATION_PATH": str(folder / "k_rotation.pt"),
        "SGLANG_OSCAR_V_ROTATION_PATH": str(folder / "v_rotation.pt"),
        "SGLANG_OSCAR_K_CLIP_RATIO": "0.96",
        "SGLANG_OSCAR_V_CLIP_RATIO": "0.92",
    }
    assert shlex.join(server.command) == (
        "python -m sglang.launch_server --model-path owner/tiny --kv-cache-dtype int2 --kv-cache-quant-group-size 8 "
        "--prefill-attention-backend fa3 --decode-attention-backend triton"
    )
    assert server.notes == ()
    words = shlex.split(str(server).replace("\\\n", ""))
    assert words == [*(f"{name}={value}" for name, value in server.environment.items()), *server.command]


def test_sglang_defaults(tmp_path: Path) -> None:
    server = to_sglang(replace(rotation_set(k_clip=1.0), provenance={}), tmp_path)
    assert server.environment["SGLANG_OSCAR_K_CLIP_RATIO"] == "0"
    assert server.command[server.command.index("--kv-cache-quant-group-size") + 1] == str(SIZE)
    assert "MODEL" in server.command
    assert "mine" in to_sglang(rotation_set(), tmp_path, model="mine").command


@pytest.mark.parametrize("model", ["--help", "$(true)", "a\nb", "", 7])
def test_sglang_does_not_serve_what_is_no_model(tmp_path: Path, model: object) -> None:
    rotations = replace(rotation_set(), provenance={"model": model})
    assert "MODEL" in to_sglang(rotations, tmp_path).command


def test_sglang_takes_version_2_where_version_1_is_too_small(tmp_path: Path) -> None:
    rotations = rotation_set(scale_rule="inner_product")
    rotations.layers[1] = replace(rotations.layers[1], k_mean=torch.randn(HEADS, SIZE))
    server = to_sglang(rotations, tmp_path)
    assert torch.load(server.files[0], weights_only=True)["format_version"] == 2
    assert read_rotations(tmp_path).digest() == rotations.digest()
    assert "inner_product" in server.notes[0] and "version 2" in server.notes[1]


def test_sglang_says_what_it_does_to_single_layers(tmp_path: Path) -> None:
    rotations = rotation_set()
    rotations.layers[0] = replace(rotations.layers[0], bits=16)
    rotations.layers[1] = replace(rotations.layers[1], settings={"k_clip": 0.9})
    notes = to_sglang(rotations, tmp_path).notes
    assert "chosen by layer are not applied" in notes[0] and "layers 0 in 2 bits" in notes[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rotation_set(sink_tokens=60), "sink_tokens=60"),
        (lambda: rotation_set(recent_tokens=100), "recent_tokens=100"),
        (lambda: rotation_set(bits=16), "bits=16"),
        (lambda: rotation_set(size=12), r"head_dim=\[12\]"),
        (lambda: rotation_set(group_size=12), "groups of 12"),
        (lambda: RotationSet({**rotation_set(1).layers, 1: rotation_set(2, 32).layers[1]}), r"head_dim=\[16, 32\]"),
        (lambda: RotationSet({0: LayerRotation(torch.ones(16, 16), orthogonal())}), "not orthogonal"),
    ],
)
def test_sglang_refuses_what_it_cannot_store(tmp_path: Path, make: Callable[[], RotationSet], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_sglang(make(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# llama.cpp


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("alignment", [32, 4096])
def test_gguf_round_trip(tmp_path: Path, architecture: str, alignment: int) -> None:
    source = write_gguf(tmp_path / "source.gguf", architecture, alignment=alignment)
    rotations = rotation_set()
    target = to_llamacpp(rotations, source, tmp_path / "new" / "target.gguf")
    assert read_rotations(target).digest() == rotations.digest()
    assert sorted(tmp_path.rglob("*.gguf*")) == [target, source]
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(target)
    assert [(k, f.contents()) for k, f in old.fields.items() if k != "GGUF.tensor_count"] == [
        (k, f.contents()) for k, f in new.fields.items() if k != "GGUF.tensor_count"
    ]
    assert len(new.tensors) == len(old.tensors) + 2 * LAYERS
    for ours, theirs in zip(new.tensors, old.tensors, strict=False):
        assert (ours.name, ours.tensor_type) == (theirs.name, theirs.tensor_type)
        assert ours.data.tobytes() == theirs.data.tobytes()
    added = {tensor.name: tensor for tensor in new.tensors[len(old.tensors) :]}
    pairs = [channel for half in range(SIZE // 2) for channel in (half, half + SIZE // 2)]
    for index, layer in rotations.layers.items():
        keys = layer.k_rotation[pairs] if architecture == "llama" else layer.k_rotation
        for side, matrix in (("k", keys), ("v", layer.v_rotation)):
            tensor = added[f"blk.{index}.attn_{side}_rot.weight"]
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
            assert tensor.data_offset % alignment == 0
            assert np.array_equal(tensor.data, matrix.T.numpy())


def test_interleaved_keys_are_those_of_the_gguf() -> None:
    """Where llama.cpp has interleaved channels, its rotated keys are those that transformers' rotation makes."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    assert "llama" in INTERLEAVED
    weight = np.random.randn(HEADS * SIZE, WIDTH)
    processor = LlamaTensorProcessor({"num_attention_heads": HEADS, "num_key_value_heads": HEADS})
    theirs = processor.process(weight, "blk.0.attn_k.weight").weights.reshape(HEADS, SIZE, WIDTH)
    header = export.GGUFHeader(3, 0, values={"general.architecture": "llama"})
    channels = export._channels(header, SIZE)
    assert np.array_equal(weight.reshape(HEADS, SIZE, WIDTH), theirs[:, channels])


@pytest.mark.parametrize("name", ["qwen3-4b-thinking-2507", "qwen3.5-4b"])
def test_published_rotations_survive_a_gguf(shared_data: Path, tmp_path: Path, name: str) -> None:
    rotations = read_rotations(shared_data / "upstream_rotations" / name)
    size = rotations.layers[3].head_dim
    blocks = max(rotations.layers) + 1
    architecture = "qwen35" if "3.5" in name else "qwen3"
    keys = {f"blk.{i}.attn_k.weight": np.zeros((size, 32), np.float32) for i in rotations.layers}
    keys |= {
        f"blk.{i}.attn_qkv.weight": np.zeros((2, 32), np.float32) for i in set(range(blocks)) - set(rotations.layers)
    }
    facts = {"block_count": blocks + 1, "nextn_predict_layers": 1, "attention.key_length": size}
    source = write_gguf(tmp_path / "source.gguf", architecture, layers=0, facts=facts, tensors=keys)
    target = to_llamacpp(rotations, source, tmp_path / "target.gguf")
    assert read_rotations(target).digest() == rotations.digest()


def test_small_file_of_rotations_alone_is_read(tmp_path: Path) -> None:
    matrix = orthogonal(4)
    tensors = {f"blk.7.attn_{side}_rot.weight": matrix.numpy() for side in "kv"}
    rotations = read_rotations(write_gguf(tmp_path / "alone.gguf", "gemma4", layers=0, tensors=tensors))
    assert list(rotations.layers) == [7]
    assert torch.equal(rotations.layers[7].k_rotation, matrix.T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: {0: layers[0], 1: layers[1]}, r"lack layers \[2\]"),
        (lambda layers: {**layers, 3: layers[0]}, r"layers \[3\] of the rotations have no attention"),
        (lambda layers: dict.fromkeys(range(3), LayerRotation(orthogonal(8), orthogonal(8))), "head_dim 8, and 16"),
        (lambda layers: {**layers, 1: replace(layers[1], k_mean=torch.zeros(HEADS, SIZE))}, "Layer 1: .*k_mean"),
        (lambda layers: {**layers, 1: replace(layers[1], v_rotation=orthogonal(SIZE, 2))}, "Layer 1: .*v_rotation"),
        (lambda layers: {**layers, 1: replace(layers[1], v_rotation=torch.ones(SIZE, SIZE))}, "not orthogonal"),
        (lambda layers: {}, "without layers"),
    ],
)
def test_rotations_that_do_not_fit_are_not_written(source: Path, change: Callable, message: str) -> None:
    rotations = rotation_set()
    rotations.layers = change(rotations.layers)
    with pytest.raises(ValueError, match=message):
        to_llamacpp(rotations, source, source.parent / "new" / "target.gguf")
    assert list(source.parent.iterdir()) == [source]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"block_count": 4}, "num_hidden_layers is 3 in the rotations and 4 here"),
        ({"embedding_length": 128}, "hidden_size is 64"),
        ({"attention.head_count_kv": 4}, "num_key_value_heads is 2"),
        ({"attention.key_length": 32}, "head_dim 16, and 32"),
        ({"split.count": 2}, "llama-gguf-split"),
    ],
)
def test_gguf_of_another_model_is_refused(tmp_path: Path, facts: dict[str, int], message: str) -> None:
    source = write_gguf(tmp_path / "source.gguf", facts=facts)
    with pytest.raises(ValueError, match=f"{source}: .*{message}"):
        to_llamacpp(rotation_set(), source, tmp_path / "target.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_layers_with_a_window_need_no_rotations(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source.gguf", "gemma3", facts={"attention.sliding_window": 512})
    rotations = rotation_set()
    del rotations.layers[1]
    assert list(read_rotations(to_llamacpp(rotations, source, tmp_path / "target.gguf")).layers) == [0, 2]


def test_gguf_refuses_itself_twice_and_without_the_package(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is the source itself"):
        to_llamacpp(rotation_set(), source, source.parent / "." / source.name)
    target = to_llamacpp(rotation_set(), source, source.parent / "target.gguf")
    with pytest.raises(ValueError, match="has rotations already"):
        to_llamacpp(rotation_set(), target, source.parent / "third.gguf")
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ImportError, match=r"oscar-hf\[demo\]"):
        to_llamacpp(rotation_set(), source, source.parent / "third.gguf")
    with pytest.raises(FileNotFoundError, match="nothing.gguf"):
        to_llamacpp(rotation_set(), source.parent / "nothing.gguf", target)
    assert sorted(source.parent.iterdir()) == [source, target]


def test_gguf_of_unknown_order_of_channels_is_refused(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source.gguf", "command-r")
    with pytest.raises(ValueError, match="'command-r': in what order"):
        to_llamacpp(rotation_set(), source, tmp_path / "target.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_full_disk_leaves_the_old_target(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = source.parent / "target.gguf"
    target.write_bytes(b"old")

    def fail(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises(OSError, match="No space"):
        to_llamacpp(rotation_set(), source, target)
    assert target.read_bytes() == b"old" and sorted(source.parent.iterdir()) == [source, target]


@pytest.mark.parametrize("cut", [3, 100, 5000])
def test_source_that_is_cut_short_is_refused(source: Path, cut: int) -> None:
    source.write_bytes(source.read_bytes()[:-cut])
    with pytest.raises(ValueError, match="beyond the end of the file"):
        to_llamacpp(rotation_set(), source, source.parent / "target.gguf")
    assert list(source.parent.iterdir()) == [source]


def test_source_without_padding_at_its_end_is_padded(source: Path) -> None:
    source.write_bytes(source.read_bytes()[:-2])
    rotations = rotation_set()
    target = to_llamacpp(rotations, source, source.parent / "target.gguf")
    assert read_rotations(target).digest() == rotations.digest()
    old, new = (gguf.GGUFReader(file).tensors for file in (source, target))
    assert all(one.data.tobytes() == other.data.tobytes() for one, other in zip(old, new, strict=False))


@pytest.mark.slow
def test_real_gguf_with_rotations_is_the_same_model(tmp_path: Path) -> None:
    source = Path(model_file())
    rotations = RotationSet({index: LayerRotation(orthogonal(64), orthogonal(64)) for index in range(30)})
    target = to_llamacpp(rotations, source, tmp_path / "target.gguf")
    assert read_rotations(target).digest() == rotations.digest()
    one, other = (
        load_model(str(file), dtype="bfloat16", device_map="cpu")[0].state_dict() for file in (source, target)
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# A GGUF that is not what it says


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def info(name: str, dims: tuple[int, ...] = (4, 4), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def raw(
    *infos: bytes,
    entries: tuple[bytes, ...] = (),
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes | None = None,
) -> bytes:
    entries = (entry("general.architecture", 8, text("qwen3")), *entries)
    head = magic + struct.pack("<IQQ", version, *(counts or (len(infos), len(entries))))
    head += b"".join(entries) + b"".join(infos)
    eye = np.eye(4, dtype="<f4").tobytes()
    return head + bytes(-len(head) % 32) + (eye + eye if data is None else data)


K, V = "blk.0.attn_k_rot.weight", "blk.0.attn_v_rot.weight"
PAIR = (info(K), info(V, offset=64))
HUGE = (1 << 64) - 1

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "magic": (raw(*PAIR, magic=b"GGML"), "not a little-endian GGUF"),
    "version 1": (raw(*PAIR, version=1), "not a little-endian GGUF"),
    "big-endian": (raw(*PAIR, version=3 << 24), "not a little-endian GGUF"),
    "many tensors": (raw(*PAIR, counts=(HUGE, 1)), "cut short|dimensions|type"),
    "many entries": (raw(*PAIR, counts=(2, HUGE)), "cut short|metadata of type"),
    "long name": (raw(*PAIR, entries=(struct.pack("<Q", HUGE),)), "cut short"),
    "long array": (raw(entries=(entry("a", 9, struct.pack("<IQ", 0, HUGE)),)), "cut short"),
    "long array of strings": (raw(entries=(entry("a", 9, struct.pack("<IQ", 8, HUGE)),)), "cut short"),
    "nested array": (raw(entries=(entry("a", 9, struct.pack("<IQ", 9, 1)),)), "array of type 9"),
    "unknown metadata": (raw(entries=(entry("a", 77, b""),)), "metadata of type 77"),
    "name in another encoding": (raw(info(K), struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40)), "utf-8"),
    "alignment 0": (raw(*PAIR, entries=(entry("general.alignment", 4, bytes(4)),)), "alignment=0"),
    "alignment 3": (raw(*PAIR, entries=(entry("general.alignment", 4, struct.pack("<I", 3)),)), "alignment=3"),
    "alignment of text": (raw(*PAIR, entries=(entry("general.alignment", 8, text("32")),)), "alignment='32'"),
    "tensor twice": (raw(info(K), info(K)), "comes twice"),
    "many dimensions": (raw(info(K, (1,) * 5)), "5 dimensions"),
    "no rotations": (raw(info("output.weight")), "has no attn_k_rot"),
    "V alone": (raw(info(V)), r"layers \[0\] have only one"),
    "per head": (raw(info(K, (4, 4, 2)), info(V)), r"dimensions \[4, 4, 2\]"),
    "not square": (raw(info(K, (4, 2)), info(V)), r"dimensions \[4, 2\]"),
    "nothing": (raw(info(K, (0, 0)), info(V)), r"dimensions \[0, 0\]"),
    "huge": (raw(info(K, (HUGE, HUGE)), info(V)), "dimensions"),
    "float16": (raw(info(K, kind=1), info(V)), "type 1"),
    "beyond the end": (raw(info(K), info(V, offset=96)), "beyond the end"),
    "far beyond the end": (raw(info(K, offset=HUGE), info(V)), "beyond the end"),
    "without data": (raw(*PAIR, data=b""), "beyond the end"),
    "many over one another": (
        raw(
            *(info(f"blk.{i}.attn_{side}_rot.weight", (1024, 1024)) for i in range(40) for side in "kv"),
            data=bytes(1 << 22),
        ),
        "bytes of tensors",
    ),
    "NaN": (raw(*PAIR, data=np.full(32, np.nan, "<f4").tobytes()), "Layer 0: k_rotation holds NaN"),
    "zeros": (raw(*PAIR, data=bytes(128)), "Layer 0: k_rotation is not orthogonal"),
    "other architecture": (
        raw(*PAIR, entries=(entry("general.architecture", 8, text("bert")),)),
        "'bert': in what order",
    ),
    "no architecture": (raw(*PAIR, entries=(entry("general.architecture", 7, b"\1"),)), "'True': in what order"),
}


def test_the_sound_one_among_the_broken_is_read(tmp_path: Path) -> None:
    (tmp_path / "sound.gguf").write_bytes(raw(*PAIR))
    assert torch.equal(read_rotations(tmp_path / "sound.gguf").layers[0].k_rotation, torch.eye(4))


@pytest.mark.parametrize("case", BROKEN)
def test_broken_gguf_is_refused(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rotations(path)
    assert type(error.value) is ValueError and str(path) in str(error.value)
    with pytest.raises(ValueError, match=str(path)):
        to_llamacpp(rotation_set(), path, tmp_path / "target.gguf")
    assert list(tmp_path.iterdir()) == [path]


def test_every_cut_of_a_header_is_refused(source: Path) -> None:
    target = to_llamacpp(rotation_set(), source, source.parent / "target.gguf")
    content = target.read_bytes()
    for size in range(0, len(content), 97):
        target.write_bytes(content[:size])
        with pytest.raises(ValueError, match="cut short"):
            read_rotations(target)


def test_header_beyond_the_limit_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_HEADER_BYTES", 200)
    with pytest.raises(ValueError, match="more than 200 bytes"):
        to_llamacpp(rotation_set(), source, source.parent / "target.gguf")
