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
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
        **MOE,
    },
    "phi3": {},
}


def tiny_config(family: str, **changes: Any) -> Any:
    """The family's configuration at toy size."""
    return AutoConfig.for_model(family, **{**BASE, **FAMILIES[family], **changes})


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


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after the special tokens of `BASE`."""
    alphabet = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
