"""A cache on disk: a long context is computed once, and opened again in another process or on another device."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ._compat import architecture, text_config
from .fitting import RowTransform
from .layer import OscarLayer
from .parallel import DTensor, local
from .prompt import PromptLayer
from .quantization import FORMAT_VERSION

if TYPE_CHECKING:
    from .cache import OscarQuantizedCache

FILE_VERSION = 1
WEIGHTS_NAME, FACTS_NAME = "oscar_cache.safetensors", "oscar_cache.json"
MAX_FACTS_BYTES = 1 << 24
SAMPLE = 16


def fingerprint(model: nn.Module) -> str | None:
    """SHA-256 over a sample of a model's weights, of those that patching leaves alone; None where some are offloaded.

    It tells fine-tunes apart, whose caches have the same shapes.
    """
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if "v_proj" in name or "o_proj" in name:
            continue
        if parameter.device.type == "meta":
            return None
        if isinstance(parameter, DTensor):  # another rank holds other heads
            sha.update(f"{name} {parameter.placements} {parameter.device_mesh.get_coordinate()}".encode())
        if parameter.dim() == 1 or "embed" in name:
            sample = local(parameter).flatten()
            sample = sample[:: max(1, sample.numel() // SAMPLE)][:SAMPLE].float().cpu()
            sha.update(name.encode() + sample.numpy().tobytes())
    return sha.hexdigest()


def save_cache(cache: OscarQuantizedCache, directory: str | os.PathLike) -> Path:
    """Write a cache as safetensors and JSON, through a temporary folder, so that there is a whole one or none.

    Args:
        cache: between two forwards.
        directory: made, or replaced if it holds a cache.

    Returns:
        Path: the directory.

    Raises:
        ValueError: an empty cache, or a directory that holds something else.
    """
    target = Path(directory)
    if not cache.oscar_layers[0].is_initialized or not int(cache.get_seq_length()):
        raise ValueError("This cache is empty; run a prompt through the model first.")
    if target.exists() and not ((target / FACTS_NAME).is_file() or not any(target.iterdir())):
        raise ValueError(f"{target} holds other files than a cache; choose another folder.")
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, OscarLayer):
            held, facts = layer_state(layer)
            tensors |= {f"{index}.{name}": tensor for name, tensor in held.items()}
            layers.append({"kind": "oscar", **facts})
        else:
            layers.append({"kind": type(layer).__name__, "state": _pack(vars(layer), str(index), tensors)})
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as name:
        folder = Path(name) / "cache"
        folder.mkdir()
        weights = folder / WEIGHTS_NAME
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, weights)
        facts = {
            "version": FILE_VERSION,
            "format": FORMAT_VERSION,
            "architecture": architecture(cache.text_config),
            "rotations": cache.digest,
            "model": cache.fingerprint,
            "config": cache.config.to_dict(),
            "tokens": int(cache.get_seq_length()),
            "sha256": _sha256(weights),
            "layers": layers,
        }
        (folder / FACTS_NAME).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        if target.exists():
            shutil.move(target, Path(name) / "old")
        os.replace(folder, target)
    return target


def read_facts(directory: str | os.PathLike) -> dict[str, Any]:
    """The JSON half of a saved cache, checked for version and structure; the tensors are not read.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: not a cache, or of another version.
    """
    path = Path(directory) / FACTS_NAME
    for file in (path, Path(directory) / WEIGHTS_NAME):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not there; a saved cache is {FACTS_NAME} and {WEIGHTS_NAME}.")
    if path.stat().st_size > MAX_FACTS_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, allowed {MAX_FACTS_BYTES}: not a cache's.")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}).") from error
    versions = (facts.get("version"), facts.get("format")) if isinstance(facts, dict) else None
    if versions != (FILE_VERSION, FORMAT_VERSION):
        raise ValueError(
            f"{path}: versions {versions}, this oscar-hf reads {(FILE_VERSION, FORMAT_VERSION)}; compute it anew."
        )
    kinds = {"architecture": dict, "config": dict, "layers": list, "sha256": str, "tokens": int}
    for key, kind in kinds.items():
        if not isinstance(facts.get(key), kind):
            raise ValueError(f"{path}: {key!r} is missing or malformed.")
    return facts


def load_cache(cache: OscarQuantizedCache, model: PreTrainedModel, directory: Path, facts: dict[str, Any]) -> None:
    """Fill an empty cache of `model` from a folder.

    Raises:
        ValueError: a cache of another model, other rotations or another kind of storage, or a damaged file; the cache
            is to be thrown away then.
    """
    weights = directory / WEIGHTS_NAME
    expected = {
        "architecture": architecture(text_config(model)),
        "rotations": cache.digest,
        "model": cache.fingerprint if facts.get("model") is not None else None,
    }
    for key, value in expected.items():
        if value is not None and facts.get(key) != value:
            what = {"architecture": "another architecture", "rotations": "other rotations", "model": "other weights"}
            raise ValueError(f"{directory} was saved from a model with {what[key]} than this one's.")
    kinds = ["oscar" if isinstance(layer, OscarLayer) else type(layer).__name__ for layer in cache.layers]
    if [layer.get("kind") for layer in facts["layers"]] != kinds:
        raise ValueError(
            f"{directory} holds other layers than this cache; was it saved with max_cache_len, or without?"
        )
    if _sha256(weights) != facts["sha256"]:
        raise ValueError(f"{weights} is damaged or cut short; copy or compute it again.")
    devices = _layer_devices(model)
    try:
        with safe_open(weights, "pt") as file:
            names = set(file.keys())
            for index, (layer, saved) in enumerate(zip(cache.layers, facts["layers"], strict=True)):
                device = devices.get(index, model.device)
                prefix = f"{index}."
                held = {n[len(prefix) :]: file.get_tensor(n).to(device) for n in names if n.startswith(prefix)}
                if isinstance(layer, OscarLayer):
                    restore_layer(layer, held, saved)
                else:
                    vars(layer).update(_unpack(saved["state"], str(index), held, device))
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{directory} is not what its JSON says ({type(error).__name__}: {error}).") from error


def layer_state(layer: OscarLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a file has to hold of a layer: tensors without slack, and counts."""
    tiers = layer.tiers.whole()
    lengths = tiers.lengths
    used, sink = max(tiers.flushed), min(layer.config.sink_tokens, max(lengths))
    tensors = {name: window[:, :, :sink] if "sink" in name else window for name, window in tiers.windows.items()}
    for name, buffers in (("keys", tiers.history.keys), ("values", tiers.history.values)):
        tensors |= {f"{name}.{part}": buffer[:, :, :used] for part, buffer in enumerate(buffers)}
    if layer.columns is not None:
        tensors["columns"] = layer.columns
    facts = {"lengths": lengths, "floors": tiers.floors, "seen": layer.seen, "exact": layer.exact}
    if isinstance(layer.transform, RowTransform):
        held, facts["fit"] = layer.transform.state()
        tensors |= {f"fit.{name}": tensor for name, tensor in held.items()}
    return tensors, facts


def restore_layer(layer: OscarLayer, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """The inverse of `layer_state`, on the device of the tensors.

    Raises:
        ValueError: counts or shapes that do not fit together.
    """
    ring, exact = tensors["recent_keys"], facts.get("exact", False)
    layer.hold(exact=bool(exact))
    layer.lazy_initialization(ring[:, :, :0], ring[:, :, :0])
    tiers, lengths, floors, seen = layer.tiers, facts["lengths"], facts["floors"], facts["seen"]
    counts = [*lengths, *floors, seen]
    rows = len(lengths) == len(floors) == ring.shape[0]
    if not rows or not all(type(count) is int and count >= 0 for count in counts) or seen < max(lengths):
        raise ValueError("Its counts of tokens are malformed.")
    held = max(map(tiers.flushed_of, lengths, floors))
    if ring.shape != tiers.windows["recent_keys"].shape or held != tensors["keys.0"].shape[2]:
        raise ValueError("Its windows or history are not those of its configuration.")
    if layer.max_cache_len is not None and seen > layer.max_cache_len:
        raise ValueError(f"It holds {seen} tokens, more than max_cache_len={layer.max_cache_len}.")
    for name, window in tiers.windows.items():
        window[:, :, : tensors[name].shape[2]] = tensors[name]
    if isinstance(layer, PromptLayer):
        layer.restore(tensors, facts)
    tiers.count(lengths, floors)
    tiers.history.reserve(held)
    for name, buffers in (("keys", tiers.history.keys), ("values", tiers.history.values)):
        for part, buffer in enumerate(buffers):
            buffer[:, :, :held] = tensors[f"{name}.{part}"]
    layer.resume(seen, tensors.get("columns"))


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            sha.update(block)
    return sha.hexdigest()


def _layer_devices(model: nn.Module) -> dict[int, torch.device]:
    """Where each layer's attention runs."""
    devices: dict[int, torch.device] = {}
    for module in model.modules():
        index, first = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and first is not None:
            device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            devices.setdefault(index, torch.device(device) if device is not None else first.device)
    return devices


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """What a stock cache layer holds, as JSON; its tensors go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name.partition(".")[2]}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": True}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"A stock cache layer holds {type(value).__name__}, which a cache file has no place for.")


def _unpack(value: Any, name: str, tensors: dict[str, Tensor], device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, f"{name}.{key}", tensors, device) for key, item in content}
    if kind == "list":
        return [_unpack(item, f"{name}.{index}", tensors, device) for index, item in enumerate(content)]
    if kind == "device":
        return device
    dtype = getattr(torch, content) if kind == "dtype" else None
    if not isinstance(dtype, torch.dtype):
        raise KeyError(kind)
    return dtype
