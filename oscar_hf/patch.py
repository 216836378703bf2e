"""patch_model: rotate the value projections where that is exact, and let attention read the packed history."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ._compat import architecture, cache_argument, cache_layers, input_device, set_attention, text_config
from .attention import evaluating, observe
from .cache import OscarQuantizedCache, attach, detach
from .cache_file import fingerprint
from .config import OscarConfig
from .parallel import DTensor, held, local, local_heads
from .prompt import NAME, prompt_rotations
from .rotation import RotationSet, absorbed_layers
from .transform import Transform
from .zoo import find_rotations

ROTATIONS_FOLDER = "oscar"
PROBE_TOKENS = 12
CHECK_CONFIG = OscarConfig(sink_tokens=1, recent_tokens=2, bits=16)
CHECK_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


LAYER_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}


class Marker(dict):
    """What a live patched model's configuration says under "oscar"; from a file it is read as a plain dict."""


@dataclass
class Patch:
    """What `patch_model` did to a model, and how to undo it."""

    rotations: RotationSet
    digest: str
    config: OscarConfig
    default_cache: bool
    transforms: dict[int, Transform]
    absorbed: list[int]
    previous_attention: str
    fingerprint: str | None
    rotated_on_disk: bool = False
    reversible: bool = True
    saved: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)


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
    zoo: str | os.PathLike | None = None,
    absorb: bool = True,
    default_cache: bool = True,
    reversible: bool = True,
    check: bool = True,
    fallback: bool = True,
) -> PreTrainedModel:
    """Make a model read and write 2-bit caches. Changes the model in place; `unpatch_model` undoes it.

    The value rotation is multiplied into `v_proj` and `o_proj` of each layer where a probe shows that nothing stands
    between them and the attention function; elsewhere (gated attention, packed weights, fused projections,
    offloaded weights) it is applied as values are written and read. Patching again with the same rotations changes
    nothing but the settings given.

    Args:
        model: a decoder from transformers.
        rotations: a RotationSet, a folder that holds one, a name in the RotationZoo, or `"prompt"`, which has each
            sequence's keys fitted to itself. None: those saved with the model by `oscar-hf patch`, else the zoo's for
            this model, else `"prompt"`, which a logged line says.
        config: storage settings (default: the rotations'). With `OscarConfig(recipe="prompt")` calibrated rotations
            are where fitting to each sequence starts from.
        zoo: where names are looked up: None (this package, what was pulled, then the hubs), "hub", "modelscope", or a
            folder of sets.
        absorb: False applies the value rotation online everywhere.
        default_cache: `model.generate(...)` without a cache uses an OscarQuantizedCache.
        reversible: keep the original weights of rotated projections in CPU memory, for `unpatch_model`. False needs
            memory for one layer's at a time.
        check: compare a few steps, with a cache that stores exactly, with the unpatched model's.
        fallback: False raises FileNotFoundError where there are no rotations for the model.

    Returns:
        PreTrainedModel: the same object.

    Raises:
        ValueError: rotations that do not fit, or an architecture that is not supported; the model is unchanged.
        RuntimeError: the check failed; the model is as it was (without `reversible`, to rounding).
    """
    model_config = text_config(model)
    _, full = cache_layers(model_config)
    patch: Patch | None = getattr(model, "_oscar_patch", None)
    if patch is not None:
        config = patch.rotations.settings(config or patch.config)
        config.groups(architecture(model_config)["head_dim"])
        if rotations is not None and _find(model, rotations, zoo).digest() != patch.digest:
            raise ValueError("This model is patched with other rotations; call unpatch_model(model) first.")
        patch.config, patch.default_cache = config, default_cache
        return model
    if isinstance(getattr(model.config, "oscar", None), Marker):
        raise ValueError(
            "This model shares its configuration object with a patched model, and so its attention implementation; "
            "load it anew, or give it a configuration of its own."
        )
    try:
        rotations = _find(model, rotations, zoo)
    except FileNotFoundError:
        if rotations is not None or not fallback:
            raise
        rotations = prompt_rotations(model, told=config is not None and config.fits)
    rotations.check_fits(full, architecture(model_config))
    config = rotations.settings(config)
    config.groups(architecture(model_config)["head_dim"])
    on_disk = absorbed_layers(model.config, rotations, full)
    digest = rotations.digest()
    rotated: list[int] = []

    try:
        with evaluating(model):
            # ordinary tokens: the first of a vocabulary are often unused, and a model's logits for them mere noise
            tokens = torch.linspace(0.1, 0.9, PROBE_TOKENS, device=input_device(model))
            tokens = tokens.mul(model_config.vocab_size).long()
            expected = _steps(model, tokens, DynamicCache(config=model_config)) if check else None
            whole = _whole(model, tokens) if check else None
            seen = _probe(model, tokens)
            if set(seen) != full:
                odd = sorted(set(seen) ^ full)
                raise ValueError(f"{type(model).__name__} does not run layers {odd} through transformers' attention.")
            absorbed = on_disk
            if absorbed is None:
                absorbed = [index for index in sorted(full) if absorb and seen[index].absorbable]
            heads = local_heads(model)
            transforms = {
                index: Transform(layer, index in absorbed, heads) for index, layer in rotations.layers.items()
            }
            previous = set_attention(model, "oscar")
            patch = Patch(
                rotations, digest, config, default_cache, transforms, absorbed, previous, fingerprint(model),
                on_disk is not None,
            )  # fmt: skip
            model._oscar_patch = patch
            if on_disk is None:
                for index in absorbed:
                    _rotate_layer(model, seen[index].module, rotations.layers[index].v_rotation, patch, reversible)
                    rotated.append(index)
                model.config.oscar = Marker(digest=digest, absorbed=absorbed)
            attach(model)
            if expected is not None and whole is not None:
                _check(model, tokens, expected, whole)
    except BaseException:
        if getattr(model, "_oscar_patch", None) is not None:
            if not reversible:
                for index in rotated:
                    _rotate(seen[index].module, rotations.layers[index].v_rotation.mT, None)
            unpatch_model(model)
        raise
    if not reversible and absorbed:
        patch.reversible = patch.rotated_on_disk
    _retire(*vars(model).pop("_oscar_transforms", {}).values())
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `patch_model`: weights bit for bit, attention implementation, generate. Returns the same model.

    A model loaded from a checkpoint that `oscar-hf patch` wrote keeps its rotated weights, which give the same output.
    Caches made meanwhile can no longer be used.

    Raises:
        ValueError: the model is not patched, or was patched with `reversible=False`.
    """
    patch: Patch | None = getattr(model, "_oscar_patch", None)
    if patch is None:
        raise ValueError(f"This {type(model).__name__} is not patched.")
    if not patch.reversible:
        raise ValueError("This model was patched with reversible=False; load it again instead.")
    with torch.no_grad():
        for parameter, original in patch.saved:
            local(parameter).copy_(original)
    detach(model)
    set_attention(model, patch.previous_attention)
    if isinstance(getattr(model.config, "oscar", None), Marker):
        del model.config.oscar
    del model._oscar_patch
    _retire(patch.transforms)
    return model


def _retire(*groups: dict[int, Transform]) -> None:
    """Caches that use these transforms hold values of other projections than the model's now."""
    for transforms in groups:
        for transform in transforms.values():
            transform.retired = True


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


def _find(
    model: PreTrainedModel, rotations: RotationSet | str | os.PathLike | None, zoo: str | os.PathLike | None = None
) -> RotationSet:
    """A set as it is, that of a folder or name, or, for None, the one beside the model's weights or the zoo's."""
    if isinstance(rotations, RotationSet):
        return rotations
    if rotations == NAME:
        return prompt_rotations(model)
    if rotations is not None:
        return find_rotations(rotations, zoo)
    if not model.name_or_path:
        raise FileNotFoundError(
            "This model has no name to find rotations by; pass rotations=..., made by `oscar-hf calibrate`."
        )
    if getattr(model.config, "oscar", None) is not None and zoo is None:
        folder = Path(model.name_or_path)
        if not folder.is_dir():
            revision = getattr(model.config, "_commit_hash", None)
            pattern = f"{ROTATIONS_FOLDER}/*"
            folder = Path(snapshot_download(model.name_or_path, revision=revision, allow_patterns=pattern))
        return RotationSet.from_pretrained(folder / ROTATIONS_FOLDER)
    return find_rotations(model.name_or_path, zoo)


@torch.no_grad()
def _steps(model: PreTrainedModel, tokens: Tensor, cache: Any) -> Tensor:
    """Logits [n, vocabulary] of a prefill in two chunks and two single steps."""
    half = len(tokens) // 2
    chunks = tokens.split([half, len(tokens) - half - 2, 1, 1])
    return torch.cat([model(chunk[None], **{cache_argument(model): cache}).logits[0].float() for chunk in chunks])


@torch.no_grad()
def _whole(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The same logits from one forward: other roundings of the same sums."""
    return model(tokens[None], use_cache=False).logits[0].float()


def _check(model: PreTrainedModel, tokens: Tensor, expected: Tensor, whole: Tensor) -> None:
    """Raise RuntimeError unless a cache that stores exactly gives the unpatched model's logits, to rounding."""
    logits = _steps(model, tokens, OscarQuantizedCache(model, config=CHECK_CONFIG))
    allowed = CHECK_TOLERANCE.get(model.dtype, 0.1)
    if model.dtype in (torch.float16, torch.bfloat16):
        # rounding sends single tokens to other experts: most tokens of the chunks and one of the steps must agree
        noise, error = (
            max(errors[:-2].median(), errors[-2:].min()).item()
            for errors in ((other - expected).norm(dim=-1) / expected.norm(dim=-1) for other in (whole, logits))
        )
        allowed = min(0.5, max(allowed, 3 * noise))
    else:
        error = ((logits - expected).norm() / expected.norm()).item()
    if not error <= allowed:
        raise RuntimeError(_refusal(model, error, allowed, model.dtype))


@torch.no_grad()
def _probe(model: PreTrainedModel, tokens: Tensor) -> dict[int, _Seen]:
    """Run a few tokens and see, layer by layer, whether values and outputs pass untouched by anything between."""
    seen: dict[int, _Seen] = {}
    projections: dict[nn.Module, Tensor] = {}
    _, full = cache_layers(text_config(model))

    def observer(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, output: Tensor, _: Any) -> None:
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
        stack.callback(hook.remove)

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
            size = architecture(text_config(model))["head_dim"]
            item.absorbable = all(counts[id(p)] == 1 for p in _projections(item.module)) and _whole_heads(
                item.module, size
            )
    return seen


def _is_plain(module: Any) -> bool:
    """A linear layer whose weights are all there, in a dtype that can be multiplied in place."""
    if type(module) is not nn.Linear or hasattr(module, "parametrizations"):
        return False
    offloaded = getattr(getattr(module, "_hf_hook", None), "offload", False)
    usual = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    return not offloaded and all(
        type(p) in (nn.Parameter, DTensor) and p.device.type != "meta" and p.dtype in usual
        for p in module.parameters()
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


def _whole_heads(module: nn.Module, size: int) -> bool:
    """Whether this process holds whole heads of a layer's projections."""
    spans = held(module.v_proj.weight, 0), held(module.o_proj.weight, 1)  # type: ignore[union-attr, arg-type]
    return not any(span.start % size or len(span) % size for span in spans)


@torch.no_grad()
def _rotate_layer(model: nn.Module, module: nn.Module, rotation: Tensor, patch: Patch, reversible: bool) -> None:
    """`_rotate`; what is not to be reversible later is checked at once, while its weights can still be put back."""
    if reversible:
        _rotate(module, rotation, patch.saved)
        return
    v_proj: nn.Linear = module.v_proj  # type: ignore[assignment]
    o_proj: nn.Linear = module.o_proj  # type: ignore[assignment]
    groups, dtype = o_proj.weight.shape[1] // v_proj.weight.shape[0], v_proj.weight.dtype
    states = torch.randn(4, 1, v_proj.weight.shape[1], generator=torch.Generator().manual_seed(0))
    states = states.to(v_proj.weight.device, dtype)

    def through() -> Tensor:
        heads = v_proj(states).unflatten(-1, (-1, rotation.shape[-1]))
        return o_proj(heads.repeat_interleave(groups, -2).flatten(-2)).float()

    expected = through()
    saved: list[tuple[nn.Parameter, Tensor]] = []
    _rotate(module, rotation, saved)
    error = (through() - expected).norm() / expected.norm().clamp_min(1e-30)
    if not error <= LAYER_TOLERANCE[dtype]:
        for parameter, original in saved:
            local(parameter).copy_(original)
        raise RuntimeError(_refusal(model, error.item(), LAYER_TOLERANCE[dtype], dtype))


def _refusal(model: nn.Module, error: float, allowed: float, dtype: torch.dtype) -> str:
    return (
        f"{type(model).__name__} with rotations gives other logits than without: relative error {error:.2g}, "
        f"allowed {allowed:.2g} in {dtype}. The model is unpatched again; please report its architecture."
    )


@torch.no_grad()
def _rotate(module: nn.Module, rotation: Tensor, saved: list[tuple[nn.Parameter, Tensor]] | None) -> None:
    """`v_proj` gives `v R` and `o_proj` takes it: head by head in float64, cast once, whatever heads are held here."""
    if saved is not None:
        saved.extend((parameter, local(parameter).to("cpu", copy=True)) for parameter in _projections(module))
    v_proj: nn.Linear = module.v_proj  # type: ignore[assignment]
    o_proj: nn.Linear = module.o_proj  # type: ignore[assignment]
    size = rotation.shape[-1]
    heads = v_proj.weight.shape[0] // size
    per_head = rotation.to(v_proj.weight.device, torch.float64).expand(heads, size, size)  # [H_kv, D, D]
    for parameter in v_proj.parameters():
        weight = local(parameter).view(-1, size, *parameter.shape[1:])  # [heads here, D, in]
        for part, head in zip(weight, held(parameter, 0)[::size], strict=True):
            part.copy_(per_head[head // size].mT @ part.double())
    weight, groups = local(o_proj.weight), o_proj.weight.shape[1] // size // heads
    for part, head in zip(weight.split(size, 1), held(o_proj.weight, 1)[::size], strict=True):
        part.copy_(part.double() @ per_head[head // size // groups].to(part.device))  # [out, D]
