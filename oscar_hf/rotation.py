"""The transforms of a layer, and the set of them that a model needs.

Row vectors throughout. A layer stores `(k - k_mean) k_rotation` and `v v_rotation`, and reads with
`q q_rotation`, so that `q q_rotation ((k - k_mean) k_rotation)' = q (k - k_mean)'`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import OscarConfig, Recipe, get_recipe
from .matrices import hadamard

WEIGHTS_NAME = "oscar_rotations.safetensors"
CONFIG_NAME = "oscar_config.json"
FILE_VERSION = 1
MAX_CONFIG_BYTES = 1 << 20
TOLERANCE = 1e-3
MAX_CONDITION = 1e4
TENSORS = ("k_rotation", "v_rotation", "q_rotation", "k_mean", "k_metric")
LAYER_SETTINGS = ("k_clip", "v_clip", "scale_rule")
"""Of an OscarConfig, what a layer may have of its own."""
MAX_METRIC_CONDITION = 1e6


@dataclass(frozen=True)
class LayerRotation:
    """The transforms of one attention layer, float32 on the CPU.

    Args:
        k_rotation: [D, D], or [H_kv, D, D] for one per KV head.
        v_rotation: the same; orthogonal.
        q_rotation: inverse transpose of `k_rotation`; None if `k_rotation` is orthogonal and serves both.
        k_mean: [H_kv, D], taken off every key; None for no mean.
        k_metric: [D, D] or [H_kv, D, D]: what errors of stored keys cost (`error_metric`), for `OscarConfig.k_search`.
        bits: 2, or 16 for a layer whose keys 2 bits cannot hold (`outliers`), whatever the cache's settings.
        settings: what this layer has of `LAYER_SETTINGS` in place of the set's, chosen for it by calibration.
    """

    k_rotation: Tensor
    v_rotation: Tensor
    q_rotation: Tensor | None = None
    k_mean: Tensor | None = None
    k_metric: Tensor | None = None
    bits: Literal[2, 16] = 2
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.k_rotation.shape[-1]

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def validate(self, layer: int, num_kv_heads: int | None = None) -> None:
        """Raise ValueError unless shapes agree, all is finite and the transforms undo each other."""
        for name, tensor in self.tensors().items():
            if tensor.dim() not in ((2,) if name == "k_mean" else (2, 3)) or not tensor.numel():
                raise ValueError(f"Layer {layer}: {name} has shape {list(tensor.shape)}, which is no transform's.")
        size = self.head_dim
        heads = {num_kv_heads} if num_kv_heads else {t.shape[0] for t in self.tensors().values() if t.dim() == 3}
        if self.k_mean is not None and not num_kv_heads:
            heads.add(self.k_mean.shape[0])
        if len(heads) > 1:
            raise ValueError(f"Layer {layer}: transforms for different numbers of KV heads, {sorted(heads)}.")
        count = next(iter(heads), None)
        for name, tensor in self.tensors().items():
            shapes = [(count, size)] if name == "k_mean" else [(size, size), (count, size, size)]
            if tuple(tensor.shape) not in shapes:
                expected = " or ".join(str(list(shape)) for shape in shapes if None not in shape)
                raise ValueError(f"Layer {layer}: {name} has shape {list(tensor.shape)}, expected {expected}.")
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise ValueError(f"Layer {layer}: {name} holds NaN, infinities or no floating-point numbers.")
        for name, left, right in (
            ("k_rotation", self.k_rotation, self.k_rotation if self.q_rotation is None else self.q_rotation),
            ("v_rotation", self.v_rotation, self.v_rotation),
        ):
            residual = left.double() @ right.double().mT - torch.eye(size, dtype=torch.float64)
            error = residual.abs().max().item()
            if error > TOLERANCE:
                kind = "the inverse transpose of q_rotation" if left is not right else "orthogonal"
                raise ValueError(f"Layer {layer}: {name} is not {kind}: off by {error:.2g}, allowed {TOLERANCE:g}.")
        if self.k_metric is not None:
            metric = self.k_metric.double()
            if not torch.allclose(metric, metric.mT, rtol=0, atol=TOLERANCE * metric.abs().max().item()):
                raise ValueError(f"Layer {layer}: k_metric is not symmetric; calibrate again.")
            eigenvalues = torch.linalg.eigvalsh(metric)
            if not bool((eigenvalues[..., 0] * MAX_METRIC_CONDITION > eigenvalues[..., -1]).all()):
                raise ValueError(
                    f"Layer {layer}: k_metric is not positive definite: eigenvalues from "
                    f"{eigenvalues.min().item():.2g} to {eigenvalues.max().item():.2g}; calibrate again."
                )
        condition = torch.linalg.cond(self.k_rotation.double()).max().item()
        if condition > MAX_CONDITION:
            raise ValueError(
                f"Layer {layer}: k_rotation has condition number {condition:.2g}, allowed {MAX_CONDITION:g}; "
                "calibrate with a larger ridge or a smaller alpha."
            )


@dataclass
class RotationSet:
    """The transforms of a model's attention layers, the storage settings they were made for, and where they are from.

    Args:
        layers: transforms by layer index; a hybrid model has gaps.
        config: storage settings that go with these rotations.
        architecture: what must agree with a model for the set to fit it (`_compat.architecture`); empty: unknown.
        provenance: model id, corpus, tokens, recipe and its settings; for people and model cards.
    """

    layers: dict[int, LayerRotation]
    config: OscarConfig = field(default_factory=OscarConfig)
    architecture: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        recipe, model = self.config.recipe, self.provenance.get("model", "unknown model")
        return f"RotationSet({len(self.layers)} layers, recipe={recipe!r}, model={model!r})"

    def validate(self) -> None:
        """Raise ValueError unless there are layers and each is sound."""
        if not self.layers:
            raise ValueError("A RotationSet without layers fits no model.")
        for index, layer in self.layers.items():
            layer.validate(index)
            if unknown := sorted(set(layer.settings) - set(LAYER_SETTINGS)):
                raise ValueError(f"Layer {index}: settings {unknown}; a layer may have {', '.join(LAYER_SETTINGS)}.")
            try:
                self.layer_config(index)
            except ValueError as error:
                raise ValueError(f"Layer {index}: {error}") from error
        self.check_settings(self.config)

    def layer_config(self, index: int, config: OscarConfig | None = None) -> OscarConfig:
        """Storage settings of one layer: its own, except where `config` changes those of the set for all layers.

        Keys that are fitted in the cache are not those that a layer's settings were chosen by.
        """
        config = config or self.config
        own = () if config.fits else self.layers[index].settings.items()
        return config.replace(**{n: v for n, v in own if getattr(config, n) == getattr(self.config, n)})

    def settings(self, config: OscarConfig | None) -> OscarConfig:
        """These storage settings, or those that the rotations were made for; checked.

        A set that leaves the keys to the cache has them fitted under any recipe's settings.
        """
        if config is None:
            config = self.config
        elif self.config.recipe == "prompt":
            config = config.replace(recipe="prompt")
        self.check_settings(config)
        return config

    def check_settings(self, config: OscarConfig) -> None:
        """Raise ValueError unless these rotations have what storage settings need."""
        missing = [index for index, layer in self.layers.items() if layer.bits == 2 and layer.k_metric is None]
        if config.searches and not config.fits and missing:
            raise ValueError(
                f"k_search={config.k_search} needs a k_metric in every layer, and these rotations have none in layers "
                f"{missing}: calibrate with recipe 'search', or set k_search=0."
            )

    def check_fits(self, layers: set[int], architecture: dict[str, Any]) -> None:
        """Raise ValueError unless the set was made for a model with these full-attention layers and architecture."""
        differences = [
            f"{key} is {theirs!r} in the rotations and {architecture[key]!r} in the model"
            for key, theirs in self.architecture.items()
            if key in architecture and architecture[key] != theirs
        ]
        if differences:
            raise ValueError(
                f"These rotations were made for another model ({self.provenance.get('model', 'unknown')}): "
                f"{'; '.join(differences)}. Calibrate this model, or choose its own set."
            )
        missing, extra = sorted(layers - set(self.layers)), sorted(set(self.layers) - layers)
        if missing:
            raise ValueError(f"The rotations lack full-attention layers {missing} of this model; calibrate it anew.")
        if extra:
            raise ValueError(f"The rotations have layers {extra}, which in this model are no full-attention layers.")
        sizes = {index: layer.head_dim for index, layer in self.layers.items()}
        if architecture.get("head_dim") and set(sizes.values()) != {architecture["head_dim"]}:
            index, size = next((i, s) for i, s in sizes.items() if s != architecture["head_dim"])
            raise ValueError(
                f"Layer {index}: rotations for head_dim {size}, but the model's is {architecture['head_dim']}."
            )
        for index, layer in self.layers.items():
            layer.validate(index, architecture.get("num_key_value_heads"))

    @property
    def exact_layers(self) -> list[int]:
        """Layers that stay in 16 bits."""
        return [index for index, layer in sorted(self.layers.items()) if layer.bits == 16]

    def digest(self) -> str:
        """SHA-256 over all transforms, exact layers and layers' settings: equal sets have equal digests."""
        sha = hashlib.sha256()
        for index in sorted(self.layers):
            if self.layers[index].bits != 2:
                sha.update(f"{index}.bits{self.layers[index].bits}".encode())
            for name, value in sorted(self.layers[index].settings.items()):
                sha.update(f"{index}.{name}={value!r}".encode())
            for name, tensor in sorted(self.layers[index].tensors().items()):
                sha.update(f"{index}.{name}{list(tensor.shape)}".encode())
                sha.update(tensor.float().contiguous().numpy().tobytes())
        return sha.hexdigest()

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Write `oscar_rotations.safetensors` and `oscar_config.json`."""
        self.validate()
        settings = {
            "version": FILE_VERSION,
            "config": self.config.to_dict(),
            "architecture": self.architecture,
            "provenance": self.provenance,
        }
        if self.exact_layers:
            settings["exact_layers"] = self.exact_layers
        if own := {str(index): layer.settings for index, layer in self.layers.items() if layer.settings}:
            settings["layer_settings"] = own
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"layers.{index}.{name}": tensor.float().contiguous().clone()
            for index, layer in self.layers.items()
            for name, tensor in layer.tensors().items()
        }
        # one key: safetensors writes several in any order, and a set would have another checksum each time
        save_file(tensors, directory / WEIGHTS_NAME, metadata={"oscar_version": str(FILE_VERSION)})
        (directory / CONFIG_NAME).write_text(text, encoding="utf-8")

    def push_to_hub(self, repo_id: str, **options: Any) -> dict[str, Any]:
        """Publish the set with a generated model card; a dry run unless `dry_run=False`. Options: `hub.push`."""
        from .hub import push

        return push(self, repo_id, **options)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike) -> RotationSet:
        """Read and check a set that `save_pretrained` wrote.

        Raises:
            FileNotFoundError: one of the two files is not there.
            ValueError: a file is cut, malformed, of another version, or its matrices are not what they should be.
        """
        path, weights = Path(directory) / CONFIG_NAME, Path(directory) / WEIGHTS_NAME
        for file in (path, weights):
            if not file.is_file():
                raise FileNotFoundError(f"{file} is not there; a RotationSet is {CONFIG_NAME} and {WEIGHTS_NAME}.")
        try:
            settings = _read_settings(path)
            config = OscarConfig.from_dict(settings["config"])
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error
        try:
            layers = _read_layers(weights)
            for index in settings.get("exact_layers", []):
                layers[index] = replace(layers[index], bits=16)
            for name, own in settings.get("layer_settings", {}).items():
                layers[int(name)] = replace(layers[int(name)], settings=own)
            rotations = cls(layers, config, settings["architecture"], settings["provenance"])
            rotations.validate()
        except KeyError as error:
            raise ValueError(f"{path} names layer {error}, which {WEIGHTS_NAME} lacks.") from error
        except SafetensorError as error:
            raise ValueError(f"{weights} is damaged or cut short ({error}); fetch or calibrate it again.") from error
        except ValueError as error:
            raise ValueError(f"{weights}: {error}") from error
        return rotations

    @classmethod
    def without_data(
        cls, layers: set[int], head_dim: int, recipe: str | Recipe = "hadamard", **provenance: Any
    ) -> RotationSet:
        """A set for a recipe that needs no calibration (`"hadamard"`, `"naive"`, `"prompt"`)."""
        recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
        if recipe.needs_data:
            raise ValueError(f"Recipe {recipe.name!r} is fitted to data: use calibrate().")
        matrices = {name: torch.eye(head_dim) for name in ("identity", "prompt")}
        matrices["hadamard"] = hadamard(head_dim).float()
        layer = LayerRotation(matrices[recipe.k_transform], matrices[recipe.v_transform])
        return cls(
            dict.fromkeys(sorted(layers), layer),
            OscarConfig.of(recipe),
            provenance={"recipe": recipe.name, **provenance},
        )


def absorbed_layers(model_config: Any, rotations: RotationSet, full: set[int]) -> list[int] | None:
    """Layers whose weights were rotated before a checkpoint was saved, by the model's configuration; None: none were.

    Raises:
        ValueError: they were rotated with other rotations than these, or the entry is malformed.
    """
    saved = getattr(model_config, "oscar", None)
    if saved is None:
        return None
    layers = saved.get("absorbed") if isinstance(saved, dict) else None
    if not isinstance(layers, list) or not all(type(index) is int and index in full for index in layers):
        raise ValueError(f"The model's configuration has a malformed entry oscar={saved!r}.")
    if saved.get("digest") != rotations.digest():
        raise ValueError(
            "This checkpoint's projections were rotated with other rotations than those given; "
            'use the set saved beside it (subfolder "oscar"), or the original checkpoint.'
        )
    return layers


def _read_settings(path: Path) -> dict[str, Any]:
    """The JSON half of a RotationSet, checked for version and structure."""
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise ValueError(f"{size} bytes, allowed {MAX_CONFIG_BYTES}: not a RotationSet's.")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON ({error}).") from error
    if not isinstance(settings, dict) or settings.get("version") != FILE_VERSION:
        version = settings.get("version") if isinstance(settings, dict) else None
        raise ValueError(f"format version {version!r}, this oscar-hf reads {FILE_VERSION}; update it?")
    for key in ("config", "architecture", "provenance"):
        if not isinstance(settings.get(key), dict):
            raise ValueError(f"{key!r} is missing or no object.")
    exact = settings.get("exact_layers", [])
    if not isinstance(exact, list) or not all(type(index) is int for index in exact):
        raise ValueError(f"'exact_layers' is {exact!r}, no list of layers.")
    own = settings.get("layer_settings", {})
    if not isinstance(own, dict) or not all(
        re.fullmatch(r"0|[1-9]\d{0,5}", n) and type(v) is dict for n, v in own.items()
    ):
        raise ValueError("'layer_settings' is no object of objects by layer.")
    return settings


def _read_layers(path: Path) -> dict[int, LayerRotation]:
    """The safetensors half."""
    layers: dict[int, dict[str, Tensor]] = {}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            match = re.fullmatch(rf"layers\.(0|[1-9]\d{{0,5}})\.({'|'.join(TENSORS)})", key)
            if match is None:
                raise ValueError(f"unexpected tensor {key!r}; is this a RotationSet?")
            tensor = file.get_tensor(key)
            if not tensor.is_floating_point():
                raise ValueError(f"{key} holds {tensor.dtype}, no floating-point numbers.")
            layers.setdefault(int(match[1]), {})[match[2]] = tensor.float()
    for index, tensors in layers.items():
        if not {"k_rotation", "v_rotation"} <= set(tensors):
            raise ValueError(f"layer {index} lacks k_rotation or v_rotation.")
    return {index: LayerRotation(**tensors) for index, tensors in sorted(layers.items())}  # type: ignore[arg-type]
