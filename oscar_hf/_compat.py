"""What differs between transformers versions, and what is private to transformers: here, and nowhere else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import causal_mask_function, sdpa_mask

__all__ = ["causal_mask_function", "sdpa_mask"]


def text_config(model_or_config: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the decoder that the cache serves: the same object that its attention modules read."""
    config = model_or_config.config if isinstance(model_or_config, PreTrainedModel) else model_or_config
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"Expected a transformers model or configuration, not {type(model_or_config).__name__}.")
    return config.get_text_config(decoder=True)


def cache_layers(config: PreTrainedConfig, max_cache_len: int | None = None) -> tuple[list[Any], set[int]]:
    """Stock cache layers for a text configuration, and the indices of those with full attention.

    With `max_cache_len` the layers are a StaticCache's.

    Raises:
        ValueError: an architecture whose cache this project cannot hold, by name.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder model, which OSCAR does not support; use EncoderDecoderCache.")
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{kind} has multi-head latent attention (kv_lora_rank={config.kv_lora_rank}), whose cache OSCAR does not "
            "support; use DynamicCache."
        )
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    if shared and "full_attention" in config.layer_types[-shared:]:
        raise ValueError(
            f"{kind} has full-attention layers that share the keys of another layer (num_kv_shared_layers={shared}), "
            "which OSCAR does not support; use DynamicCache."
        )
    layers = DynamicCache(config=config).layers
    full = {index for index, layer in enumerate(layers) if type(layer) is DynamicLayer}
    if not full:
        raise ValueError(f"{kind} has no full-attention layer, so there is no history to quantise; use DynamicCache.")
    if max_cache_len is not None:
        layers = StaticCache(config=config, max_cache_len=max_cache_len).layers
    return layers, full


def architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """What must agree between a model and its rotations: shapes of its full-attention layers, and its rotary base.

    Raises:
        ValueError: an architecture that `cache_layers` refuses, or layers of several shapes.
    """
    _, full = cache_layers(config)
    every = getattr(config, "per_layer_config", None)  # since transformers 5.14: Gemma 4's layers have two head sizes
    layers = [config if every is None else every[index] for index in sorted(full)]
    shapes = [_shape(layer) for layer in layers]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"{config.model_type} has full-attention layers of several shapes, which OSCAR does not support; "
            "use DynamicCache."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    facts = {
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(layers[0], "intermediate_size", None),
        **shapes[0],
        "rope_theta": rope.get("rope_theta") if isinstance(rope, dict) else None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _shape(layer: PreTrainedConfig) -> dict[str, int]:
    heads = layer.num_attention_heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
        "head_dim": getattr(layer, "head_dim", None) or layer.hidden_size // heads,
    }


def check_crop(layer: Any, seen: int, remove: int) -> None:
    """Raise ValueError if a stock layer that has seen so many tokens cannot take the newest `remove` back."""
    if not remove:
        return
    advice = "Copy the cache before such tokens (copy.deepcopy), or reset() it and give it the shorter text."
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        kept = _states_kept(layer)
        if kept < remove:
            limit = f"no more than {kept}" if kept else "none"
            raise ValueError(
                f"Linear-attention layers hold one state for all tokens, and {limit} can be removed. {advice}"
            )
        return
    if isinstance(layer, StaticLayer):
        held, fits = layer.max_cache_len, seen <= layer.max_cache_len
    else:
        held = layer.keys.shape[-2]
        fits = not layer.is_sliding or held - remove >= min(layer.sliding_window - 1, seen - remove)
    if not fits:
        raise ValueError(
            f"A sliding-window layer keeps {held} of {seen} tokens: not enough without the newest {remove}. {advice}"
        )


def _states_kept(layer: LinearAttentionCacheLayerMixin) -> int:
    """How many tokens back a linear layer's recorded states reach; 0 before transformers 5.25."""
    if not (layer.is_croppable and layer.record_past and all(layer.has_previous_state.values())):
        return 0
    reach = [layer.conv_states[i].shape[-1] - size for i, size in layer.conv_kernel_size.items()]
    used = [i for i, there in layer.is_recurrent_states_initialized.items() if there]
    # the oldest state may be of before a whole forward: `recorded_states`
    reach += [min(len(layer.recurrent_states_history[i]), layer.recurrent_states_to_keep - 1) for i in used]
    return max(0, min(reach))


def crop_layer(layer: Any, remove: int) -> None:
    """Take the newest tokens back from a stock layer that `check_crop` has let pass."""
    if isinstance(layer, StaticLayer) and not hasattr(layer, "crop"):  # transformers 5.17
        layer.cumulative_length.sub_(remove)
        layer.cumulative_length_int -= remove
    elif remove or getattr(layer, "record_past", False):
        layer.crop(-remove)


def recorded_states(recurrent_states_to_keep: int | None = None) -> dict[str, int]:
    """What `activate_past_recording` of stock layers is to be given: nothing before transformers 5.25.

    That counts the states after a forward's newest tokens, and lets the one before the whole forward stand in for the
    state before the oldest of them: all candidates refused, its own caches go on from the wrong state. One more state
    mends it.
    """
    if not hasattr(Cache, "get_recurrent_states_to_keep"):
        return {}
    return {"recurrent_states_to_keep": (recurrent_states_to_keep or 0) + 1}


def recording(layer: Any) -> dict[str, Any] | None:
    """What `activate_past_recording` was given on this layer; None if it records nothing."""
    if not getattr(layer, "record_past", False):
        return None
    return {name: vars(layer)[name] for name in ("recurrent_states_to_keep",) if name in vars(layer)}


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: "cache" from transformers 5.24 on, "past_key_values" before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def set_attention(model: PreTrainedModel, implementation: str) -> str:
    """Switch the attention of the model's decoder alone; returns the implementation it had."""
    config = text_config(model)
    previous = config._attn_implementation
    if config is model.config:
        model.set_attn_implementation(implementation)
    else:
        name = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is config), None)
        if name is None:
            raise ValueError(f"{type(model).__name__} keeps its decoder's configuration where oscar-hf does not look.")
        model.set_attn_implementation({name: implementation})
    if config._attn_implementation != implementation:
        raise ValueError(f"{type(model).__name__} does not let its attention be set to {implementation!r}.")
    return previous


def parallel_arguments(config: PreTrainedConfig, size: int) -> dict[str, Any]:
    """What makes `from_pretrained` split a model by its plans over `size` processes."""
    try:
        from transformers.distributed import DistributedConfig

        experts = {"ep_size": size} if experts_apart(config) else {}
        return {"distributed_config": DistributedConfig(tp_plan="auto", **experts)}
    except (ImportError, TypeError):  # there since 5.11; before, it had other fields
        return {"tp_plan": "auto"}


def experts_apart(config: PreTrainedConfig) -> bool:
    """Whether experts are dealt out whole, by a plan of their own; before transformers 5.25 each was cut."""
    if not hasattr(PreTrainedModel, "_resolve_parallel_plans"):
        return False
    tensor, expert = (getattr(config, f"base_model_{kind}_plan", None) or {} for kind in ("tp", "ep"))
    return not any("experts" in name.split(".") for name in tensor) and any(
        "experts" in name.split(".") for name in expert
    )


def parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """What `parallel_arguments` splits, and how; layers are numbered `*`."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    return plan | (model.ep_plan if experts_apart(text_config(model)) else {})


def parallel_style(model: PreTrainedModel, module: str) -> str | None:
    """How the tensor-parallel plan splits the module of that name."""
    return parallel_plan(model).get(re.sub(r"\.\d+(?=\.|$)", ".*", module))


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its tokens: under accelerate's placement too, whose first weights may be elsewhere."""
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    device = model.device if device is None else torch.device("cuda", device) if isinstance(device, int) else device
    return torch.device("cpu") if torch.device(device).type == "meta" else torch.device(device)


def wrap_cache_preparation(
    model: PreTrainedModel, prepare: Callable[[PreTrainedModel, Any | None, Tensor | int, int, bool, bool], Any | None]
) -> None:
    """Let `prepare` see, and choose, the cache of every `model.generate`.

    `prepare(model, cache, prompt, total, free, assisted)` gets the user's cache or None, the whole prompt's mask or
    number of tokens (-1 if unknown), the tokens that a cache will hold at most, whether generate is free to use
    another cache, and whether candidates are verified (assisted and prompt-lookup decoding); it returns a cache, or
    None for transformers' own.
    """

    def wrapped(self: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kw: Any):
        name = cache_argument(self)
        mask = model_kwargs.get("attention_mask")
        prompt: Tensor | int = getattr(generation_config, "_mask_length", -1)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            prompt = mask
        free = generation_config.use_cache is not False and generation_config.cache_implementation is None
        mode = kw.get("generation_mode", args[0] if args else None)
        assisted = mode == GenerationMode.ASSISTED_GENERATION
        cache = prepare(self, model_kwargs.get(name), prompt, generation_config.max_length - 1, free, assisted)
        if cache is not None and model_kwargs.get(name) is None:
            model_kwargs[name] = cache
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording(recurrent_states_to_keep=generation_config.num_assistant_tokens)
        return type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kw)

    model._prepare_cache_for_generation = MethodType(wrapped, model)


def unwrap_cache_preparation(model: PreTrainedModel) -> None:
    """Undo `wrap_cache_preparation`."""
    vars(model).pop("_prepare_cache_for_generation", None)
