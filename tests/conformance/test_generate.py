"""Every way `generate` uses a cache: 16 bits against DynamicCache, 2 bits against single greedy steps in 2 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_patch import rotations_for, tokens
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, TextIteratorStreamer, pipeline

from oscar_hf import OscarConfig, OscarQuantizedCache, patch_model
from oscar_hf._compat import cache_argument

FAMILIES = ["llama", "qwen2", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "smollm3", "phi3"]
WINDOWS = {"recipe": "balanced", "sink_tokens": 4, "recent_tokens": 24}
EXACT, TWO_BITS = OscarConfig(bits=16, **WINDOWS), OscarConfig(**WINDOWS)


def make_model(family: str) -> PreTrainedModel:
    model = tiny_model(family)
    return patch_model(model, rotations_for(model), TWO_BITS)


def caches(model: PreTrainedModel) -> dict[str, Callable[[], Any]]:
    return {
        "stock": lambda: DynamicCache(config=model.config),
        "16 bits": lambda: OscarQuantizedCache(model, config=EXACT),
        "2 bits": lambda: OscarQuantizedCache(model),
        "2 bits, fixed": lambda: OscarQuantizedCache(model, max_cache_len=160),
    }


def generate(model: PreTrainedModel, cache: Any, new: int = 24, **kwargs: Any) -> Tensor:
    torch.manual_seed(0)
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **kwargs}
    return model.generate(**{cache_argument(model): cache}, **settings)


def repetitive(batch: int = 1) -> Tensor:
    """A prompt in which a lookup finds its candidates."""
    return torch.randint(3, 128, (batch, 12)).repeat(1, 4)


SCENARIOS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "several returned": {"num_beams": 4, "num_return_sequences": 2},
    "sampled several": {"do_sample": True, "num_return_sequences": 3},
    "chunked prompt": {"prefill_chunk_size": 11},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_generate_what_the_stock_cache_does(family: str, scenario: str) -> None:
    model, ids = make_model(family), tokens(2, 50)
    made = caches(model)
    expected, got = (
        generate(model, made[name](), input_ids=ids, **SCENARIOS[scenario]) for name in ("stock", "16 bits")
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "smollm3", "phi3"])
def test_speculative_decoding_in_two_bits_is_greedy(family: str, fixed: bool) -> None:
    model, ids = make_model(family), repetitive()
    # a prompt is attended to exactly, and with it the candidates that come in its forward: here as single steps are
    config = TWO_BITS.replace(exact_chunks=False)

    def speculate(**how: Any) -> Tensor:
        cache = OscarQuantizedCache(model, config=config, max_cache_len=160 if fixed else None)
        return generate(model, cache, new=40, input_ids=ids, **how)

    expected = speculate()
    assert torch.equal(speculate(prompt_lookup_num_tokens=6), expected)
    for assistant in (tiny_model(family, num_hidden_layers=1), model):  # mostly refused, all accepted
        # candidates of one forward must fit what can be taken back: 24 tokens here, 32 by default
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assert torch.equal(speculate(assistant_model=assistant), expected)


def test_speculating_on_a_filled_cache_is_refused() -> None:
    model, ids = make_model("llama"), repetitive()
    cache = OscarQuantizedCache(model)
    with torch.no_grad():
        model(ids[:, :-1], **{cache_argument(model): cache})
    with pytest.raises(ValueError, match="feeds the whole prompt"):
        generate(model, cache, input_ids=ids, prompt_lookup_num_tokens=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_instead_of_tokens(family: str) -> None:
    model, ids = make_model(family), tokens(2, 40)
    embeds = model.get_input_embeddings()(ids)
    made = caches(model)
    expected, got = (generate(model, made[name](), inputs_embeds=embeds) for name in ("stock", "16 bits"))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["16 bits", "2 bits", "2 bits, fixed"])
def test_several_questions_over_one_context_in_any_order(name: str) -> None:
    model, context = make_model("llama"), tokens(1, 60)
    questions = [torch.cat([context, tokens(1, size)], 1) for size in (5, 1, 9)]
    make = caches(model)[name]
    read = make()
    with torch.no_grad():
        model(context, **{cache_argument(model): read})
    alone = []
    for question in questions:
        own = make()
        with torch.no_grad():
            model(context, **{cache_argument(model): own})
        alone.append(generate(model, own, input_ids=question))
    for index in (2, 0, 1, 0):
        assert torch.equal(generate(model, copy.deepcopy(read), input_ids=questions[index]), alone[index])
    assert read.get_seq_length() == 60


def test_two_caches_on_one_model_do_not_meet() -> None:
    model, prompts = make_model("llama"), [tokens(1, 40), tokens(2, 33)]
    name = cache_argument(model)
    alone = [generate(model, OscarQuantizedCache(model), new=12, input_ids=ids) for ids in prompts]
    held = [OscarQuantizedCache(model) for _ in prompts]
    texts = list(prompts)
    for _ in range(12):  # token by token, in turn
        for index, cache in enumerate(held):
            new = texts[index][:, cache.get_seq_length() :]
            with torch.no_grad():
                logits = model(new, **{name: cache}).logits[:, -1]
            logits[:, 2] = -float("inf")  # as min_new_tokens does
            texts[index] = torch.cat([texts[index], logits.argmax(-1, keepdim=True)], 1)
    assert all(map(torch.equal, texts, alone))


def test_streamer_and_pipeline() -> None:
    model, tokenizer = tiny_model("llama", vocab_size=512), tiny_tokenizer()
    patch_model(model, rotations_for(model), TWO_BITS)
    text = "The quick brown fox jumps over the lazy dog, again and again."
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    output = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False, streamer=streamer)
    new = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "".join(streamer) == new
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_full_text": False}
    assert writer(text, **settings)[0]["generated_text"] == tokenizer.decode(
        output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
