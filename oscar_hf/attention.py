"""The "oscar" attention implementation: registered with transformers, chosen model by model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ._compat import causal_mask_function, sdpa_mask, set_attention
from .kernels import exact_attention

Observer = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor, dict[str, Any]], None]
"""Gets the module, its query, key and value states [B, H, n, D] after RoPE, the output [B, H_q, n, D], and what the
model does to its logits (`exact_attention`'s `scaling`, `softcap` and `sink_logits`)."""


def oscar_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None or the padding mask for plain causal attention; a 4D mask for any other pattern.

    The padding mask is [B, kv_length], or [B, q_length] for an OSCAR cache with fixed storage, which asks for new
    columns only. None where there is no padding in it.
    """
    whole = isinstance(q_offset, int) and kv_length == q_offset + q_length and kv_offset == 0
    new_only = kv_length == q_length and (isinstance(q_offset, Tensor) or kv_offset == q_offset)
    if mask_function is causal_mask_function and local_size is None and (whole or new_only):
        if attention_mask is not None:
            attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
        if attention_mask is not None and not torch.compiler.is_compiling() and bool(attention_mask.all()):
            return None
        return attention_mask
    if kv_length != q_length:  # without a mask, the last query sees the last key: wrong for a static cache
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **kwargs,
    )


def oscar_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over an OscarLayer where `key` carries one, exact attention where it does not.

    Args:
        module: the attention module.
        query: [B, H_q, n, D].
        key: [B, H_kv, n, D] new keys that `OscarLayer.update` marked, or all keys.
        value: the same.
        attention_mask: what `oscar_mask` returned, or the user's own 4D mask.
        scaling: factor on the logits (default D ** -0.5).
        dropout: must be 0; this is for inference.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        s_aux: [H_q] attention-sink logits.
        is_causal: False is refused.
        position_bias: refused.
        **kwargs: not used; transformers passes position_ids and the like.

    Returns:
        tuple: output [B, n, H_q, D], and None for the weights.
    """
    layer = getattr(key, "_oscar_layer", None)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    others = [name for name in ("indices", "block_indices", "sinks") if kwargs.get(name) is not None]
    masked = layer is not None and attention_mask is not None and attention_mask.dim() != 2
    if layer is not None and (position_bias is not None or dropout or not causal or others or masked):
        layer.unstage()  # refused below, with nothing stored
    if position_bias is not None or dropout or not causal or others:
        odd = "a position bias" if position_bias is not None else "dropout" if dropout else "bidirectional attention"
        odd = f"{others[0]!r} (sparse attention or its own sinks)" if others else odd
        raise ValueError(f'{type(module).__name__} asks for {odd}, which "oscar" attention does not have; use "sdpa".')
    settings: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sink_logits": s_aux}
    if layer is None:
        output = exact_attention(query, key, value, attention_mask, **settings)
    elif masked:
        raise ValueError(
            "A 4D attention mask cannot be kept with a quantised history, which stores tokens without padding; "
            'pass a 2D mask, or switch this model to "sdpa" attention.'
        )
    else:
        output = layer.attend(query, key, value, attention_mask, **settings)
    observer = getattr(module, "oscar_observer", None)
    if observer is not None:
        observer(module, query, key, value, output, settings)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("oscar", oscar_attention)
AttentionMaskInterface.register("oscar", oscar_mask)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module then has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def observe(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Call `observer` after each attention of the model's decoder, which runs under "oscar" attention meanwhile."""
    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    previous = set_attention(model, "oscar")
    for module in modules:
        module.oscar_observer = observer
    try:
        yield
    finally:
        set_attention(model, previous)
        for module in modules:
            del module.oscar_observer
