"""Tiny random models of many families, built from their configurations: no network, no weights."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": MOE,
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1], "use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 32},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **LINEAR,
        "shared_expert_intermediate_size": 32,
        **MOE,
    },
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_5_text": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, **LINEAR},
    "glm4": {},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
    },
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5},
}

MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
# What this project does not hold: type of model, changes to its configuration.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, sliding window in every layer": ("mistral", {"sliding_window": 32}),
    "gemma3n_text": ("gemma3n_text", {**SHARED, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4}),
    "gemma4_text with shared keys": ("gemma4_text", {**SHARED, "global_head_dim": 32}),
    "deepseek_v3": ("deepseek_v3", MLA),
    "glm4_moe_lite": ("glm4_moe_lite", MLA),
}


def tiny_config(family: str, **changes: Any) -> Any:
    """The family's configuration at toy size."""
    return AutoConfig.for_model(family, **{**BASE, **FAMILIES.get(family, {}), **changes})


def tiny_model(family: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model in evaluation mode whose projections, biases and norms are all away from their defaults."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith(".sinks"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.5 / parameter.shape[-1] ** 0.5))
    return model.to(dtype).eval()


def two_layers(family: str) -> dict[str, Any]:
    """Changes with which a family's model has two layers only, of every kind that it has."""
    lists = {name: value[:2] for name, value in FAMILIES.get(family, {}).items() if isinstance(value, list)}
    return {"num_hidden_layers": 2, **lists}


def tiny_tokenizer(letters: int = 256) -> PreTrainedTokenizerFast:
    """One token a byte, after the special tokens of `BASE`; with fewer letters some bytes have none."""
    alphabet = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:letters]]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
