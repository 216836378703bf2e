"""patch_model: rotate the value projections where that is exact, and let attention read the packed history."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ._compat import architecture, cache_argument, cache_layers, set_attention, text_config
from .attention import evaluating, observe
from .cache import OscarQuantizedCache, attach
from .config import OscarConfig
from .rotation import RotationSet
from .transform import Transform
from .zoo import find_rotations

ROTATIONS_FOLDER = "oscar"
PROBE_TOKENS = 12
CHECK_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass
class Patch:
    """What `patch_model` did to a model, and how to undo it."""

    rotations: RotationSet
    digest: str
    config: OscarConfig
    transforms: dict[int, Transform]
    absorbed: list[int]
    previous_attention: str
    saved: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    detach: Callable[[], None] = lambda: None
    rotated_on_disk: bool = False


@dataclass
class _Seen:
    """One attention module as a probe saw it."""

    module: nn.Module
    absorbable: bool


def patch_model(
    model: PreTrainedModel,
    rotations: RotationSet | str | os.PathLike | None = None,
    config: OscarConfig | None = None,
    *,
    absorb: bool = True,
    default_cache: bool = True,
    reversible: bool = True,
    check: bool = True,
) -> PreTrainedModel:
    """Make a model read and write 2-bit caches. Changes the model in place; `unpatch_model` undoes it.

    The value rotation is multiplied into `v_proj` and `o_proj` of each layer where a probe shows that nothing stands
    between them and the attention function; elsewhere (gated attention, packed weights, fused projections,
    offloaded weights) it is applied as values are written and read. Patching again with the same rotations changes
    nothing but the settings given.

    Args:
        model: a decoder from transformers.
        rotations: a RotationSet, a folder that holds one, or a name in the RotationZoo. None: those saved with the
            model by `oscar-hf patch`, else the zoo's for this model.
        config: storage settings (default: the rotations').
        absorb: False applies the value rotation online everywhere.
        default_cache: `model.generate(...)` without a cache uses an OscarQuantizedCache.
        reversible: keep the original weights of rotated projections in CPU memory, for `unpatch_model`.
        check: compare a few steps, with a cache that stores exactly, with the unpatched model's.

    Returns:
        PreTrainedModel: the same object.

    Raises:
        ValueError: rotations that do not fit, or an architecture that is not supported; the model is unchanged.
        RuntimeError: the check failed; the model is as it was.
    """
    model_config = text_config(model)
    _, full = cache_layers(model_config)
    saved = getattr(model.config, "oscar", None)
    if not isinstance(rotations, RotationSet):
        rotations = _find(model, rotations, saved)
    digest = rotations.digest()
    patch: Patch | None = getattr(model, "_oscar_patch", None)
    if patch is not None:
        if patch.digest != digest:
            raise ValueError("This model is patched with other rotations; call unpatch_model(model) first.")
        patch.config = config or patch.config
        return model
    rotations.check_fits(full, architecture(model_config))
    config = config or rotations.config
    config.groups(architecture(model_config)["head_dim"])
    on_disk = _absorbed_on_disk(saved, digest)

    try:
        with evaluating(model):
            tokens = torch.arange(1, PROBE_TOKENS + 1, device=model.device) % model_config.vocab_size
            expected = _steps(model, tokens, DynamicCache(config=model_config)) if check else None
            seen = _probe(model, tokens)
            if set(seen) != full:
                odd = sorted(set(seen) ^ full)
                raise ValueError(f"{type(model).__name__} does not run layers {odd} through transformers' attention.")
            absorbed = on_disk
            if absorbed is None:
                absorbed = [index for index in sorted(full) if absorb and seen[index].absorbable]
            patch = Patch(
                rotations,
                digest,
                config,
                {index: Transform(layer, index in absorbed) for index, layer in rotations.layers.items()},
                absorbed,
                set_attention(model, "oscar"),
                rotated_on_disk=on_disk is not None,
            )
            model._oscar_patch = patch
            if on_disk is None:
                for index in absorbed:
                    _rotate(
                        seen[index].module,
                        rotations.layers[index].v_rotation,
                        patch.saved if reversible else None,
                    )
                model.config.oscar = {"digest": digest, "absorbed": absorbed}
            patch.detach = attach(model, (lambda: OscarQuantizedCache(model)) if default_cache else lambda: None)
            if expected is not None:
                _check(model, tokens, expected)
    except BaseException:
        if getattr(model, "_oscar_patch", None) is not None:
            unpatch_model(model)
        raise
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `patch_model`: weights bit for bit, attention implementation, generate. Returns the same model.

    A model loaded from a checkpoint that `oscar-hf patch` wrote keeps its rotated weights, which give the same output.

    Raises:
        ValueError: the model is not patched, or was patched with `reversible=False`.
    """
    patch: Patch | None = getattr(model, "_oscar_patch", None)
    if patch is None:
        raise ValueError(f"This {type(model).__name__} is not patched.")
    if patch.absorbed and not patch.saved and not patch.rotated_on_disk:
        raise ValueError("This model was patched with reversible=False; load it again instead.")
    with torch.no_grad():
        for parameter, original in patch.saved:
            parameter.copy_(original)
    patch.detach()
    set_attention(model, patch.previous_attention)
    if not patch.rotated_on_disk and hasattr(model.config, "oscar"):
        del model.config.oscar
    del model._oscar_patch
    return model


def save_patched(model: PreTrainedModel, directory: str | os.PathLike, **kwargs: Any) -> None:
    """Write a patched model with its rotation set: weights as they are, the set in the subfolder "oscar".

    `from_pretrained` then `patch_model(model)` brings it back without rotating twice; used without oscar-hf, the
    checkpoint gives the original model's output.

    Args:
        model: patched.
        directory: as for `save_pretrained`.
        **kwargs: for `save_pretrained`.
    """
    patch: Patch | None = getattr(model, "_oscar_patch", None)
    if patch is None:
        raise ValueError("Only a patched model has rotations to save; call patch_model first.")
    model.save_pretrained(directory, **kwargs)
    rotations = RotationSet(**{**vars(patch.rotations), "config": patch.config})
    rotations.save_pretrained(Path(directory) / ROTATIONS_FOLDER)


def _find(model: PreTrainedModel, name: str | os.PathLike | None, saved: Any) -> RotationSet:
    """The rotations that a folder or zoo name stands for; None: those beside the model's weights, or the zoo's."""
    beside = Path(model.name_or_path) / ROTATIONS_FOLDER if model.name_or_path else None
    if name is None and saved is not None and beside is not None and beside.is_dir():
        return RotationSet.from_pretrained(beside)
    return find_rotations(name if name is not None else model.name_or_path)


def _absorbed_on_disk(saved: Any, digest: str) -> list[int] | None:
    """Layers whose weights were rotated before they were saved; None: none were."""
    if saved is None:
        return None
    if not isinstance(saved, dict) or not isinstance(saved.get("absorbed"), list):
        raise ValueError(f"The model's configuration has a malformed entry oscar={saved!r}.")
    if saved.get("digest") != digest:
        raise ValueError(
            "This checkpoint's projections were rotated with other rotations than those given; "
            'use the set saved beside it (subfolder "oscar"), or the original checkpoint.'
        )
    return list(saved["absorbed"])


@torch.no_grad()
def _steps(model: PreTrainedModel, tokens: Tensor, cache: Any) -> Tensor:
    """Logits [n, vocabulary] of a prefill in two chunks and two single steps."""
    half = len(tokens) // 2
    chunks = tokens.split([half, len(tokens) - half - 2, 1, 1])
    return torch.cat([model(chunk[None], **{cache_argument(model): cache}).logits[0].float() for chunk in chunks])


def _check(model: PreTrainedModel, tokens: Tensor, expected: Tensor) -> None:
    exact = OscarConfig(sink_tokens=1, recent_tokens=2, bits=16)
    logits = _steps(model, tokens, OscarQuantizedCache(model, config=exact))
    error = ((logits - expected).norm() / expected.norm()).item()
    allowed = CHECK_TOLERANCE.get(model.dtype, 0.1)
    if not error <= allowed:
        raise RuntimeError(
            f"{type(model).__name__} with rotations gives other logits than without: relative error {error:.2g}, "
            f"allowed {allowed:g} in {model.dtype}. The model is unpatched again; please report its architecture."
        )


@torch.no_grad()
def _probe(model: PreTrainedModel, tokens: Tensor) -> dict[int, _Seen]:
    """Run a few tokens and see, layer by layer, whether values and outputs pass untouched by anything between."""
    seen: dict[int, _Seen] = {}
    projections: dict[nn.Module, Tensor] = {}
    _, full = cache_layers(text_config(model))

    def observer(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        index: int = module.layer_idx  # type: ignore[assignment]
        if index not in full:
            return
        seen[index] = _Seen(module, False)
        v_proj, o_proj = getattr(module, "v_proj", None), getattr(module, "o_proj", None)
        if not (_is_plain(v_proj) and _is_plain(o_proj)) or v_proj not in projections:
            return
        projected = projections[v_proj].unflatten(-1, (value.shape[1], value.shape[3])).transpose(1, 2)
        if projected.shape != value.shape or not torch.equal(projected, value):
            return
        flat = output.transpose(1, 2).flatten(2)

        def compare(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[index].absorbable = args[0].shape == flat.shape and torch.equal(args[0], flat)
            hook.remove()

        hook = o_proj.register_forward_pre_hook(compare)  # type: ignore[union-attr]

    def remember(module: nn.Module, _: Any, output: Tensor) -> None:
        projections[module] = output

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(getattr(module, "v_proj", None), nn.Module):
                stack.callback(module.v_proj.register_forward_hook(remember).remove)
        stack.enter_context(observe(model, observer))
        model(tokens[None], use_cache=False)
    counts = _parameter_counts(model)
    for item in seen.values():
        if item.absorbable:
            item.absorbable = all(counts[id(p)] == 1 for p in _projections(item.module))
    return seen


def _is_plain(module: Any) -> bool:
    """A linear layer whose weights are all there, in a dtype that can be multiplied in place."""
    if type(module) is not nn.Linear or hasattr(module, "parametrizations"):
        return False
    offloaded = getattr(getattr(module, "_hf_hook", None), "offload", False)
    usual = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    return not offloaded and all(
        type(p) is nn.Parameter and p.device.type != "meta" and p.dtype in usual for p in module.parameters()
    )


def _projections(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.v_proj.parameters()  # type: ignore[union-attr]
    yield module.o_proj.weight  # type: ignore[union-attr, misc]


def _parameter_counts(model: nn.Module) -> dict[int, int]:
    """How many modules use each parameter."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


@torch.no_grad()
def _rotate(module: nn.Module, rotation: Tensor, saved: list[tuple[nn.Parameter, Tensor]] | None) -> None:
    """`v_proj` gives `v R` and `o_proj` takes it: in float64, cast once."""
    if saved is not None:
        saved.extend((parameter, parameter.detach().to("cpu", copy=True)) for parameter in _projections(module))
    v_proj: nn.Linear = module.v_proj  # type: ignore[assignment]
    o_proj: nn.Linear = module.o_proj  # type: ignore[assignment]
    size = rotation.shape[-1]
    rotation = rotation.to(v_proj.weight.device, torch.float64)
    heads = v_proj.out_features // size
    per_head = rotation.expand(heads, size, size)  # [H_kv, D, D]
    for parameter in v_proj.parameters():
        states = parameter.double().view(heads, size, -1)
        parameter.copy_((per_head.mT @ states).view_as(parameter))
    groups = o_proj.in_features // size // heads
    weight = o_proj.weight.double().view(-1, heads, groups, size).permute(1, 2, 0, 3)  # [H_kv, G, out, D]
    rotated = weight @ per_head.to(weight.device)[:, None]
    o_proj.weight.copy_(rotated.permute(2, 0, 1, 3).reshape_as(o_proj.weight))
