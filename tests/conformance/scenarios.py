"""What people do with a cache, each on any model: 16 bits against DynamicCache, 2 bits against a recomputed state.

To add a row to docs/compatibility.md, write a function here; to add a family, an entry in tests/tiny.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch
from test_patch import Packed, logits, relative_error, rotations_for, tokens
from tiny import tiny_model, tiny_tokenizer, two_layers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, PreTrainedModel, StaticCache, TextIteratorStreamer, pipeline
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.integrations.gguf.utils import GgufLinear

from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, patch_model, unpatch_model
from oscar_hf._compat import cache_argument, set_attention

WINDOWS = {"recipe": "balanced", "sink_tokens": 4, "recent_tokens": 8}
EXACT, TWO_BITS = OscarConfig(bits=16, **WINDOWS), OscarConfig(**WINDOWS)
KINDS = ["16 bits", "2 bits", "2 bits, fixed"]
ONLINE = {"gemma4_text", "phi3", "qwen3_5_text", "qwen3_next"}  # their value rotations cannot be absorbed
PROMPT = 28  # tokens: more than the windows, fewer than a tiny model's sliding window


@dataclass
class Case:
    """A patched tiny model, which no scenario changes."""

    family: str
    model: PreTrainedModel
    rotations: RotationSet

    def cache(self, kind: str) -> Any:
        """An empty cache. Of the kinds, 16 bits must do what "stock" does."""
        if kind == "stock":
            return DynamicCache(config=self.model.config)
        config = EXACT if kind == "16 bits" else TWO_BITS
        return OscarQuantizedCache(self.model, config=config, max_cache_len=96 if "fixed" in kind else None)

    def pairs(self) -> Iterator[tuple[str, Any, Any]]:
        """For each kind its name, an empty cache, and another whose results it must give."""
        for kind in KINDS:
            yield kind, self.cache(kind), self.cache("stock" if kind == "16 bits" else kind)

    def feed(self, cache: Any, ids: Tensor, *chunks: int, mask: Tensor | None = None, first: int = 0) -> Tensor:
        """Logits of tokens in chunks (default: in one)."""
        return logits(self.model, ids, cache, mask, list(chunks) or [ids.shape[1]], first)

    def generate(self, cache: Any, new: int = 8, **settings: Any) -> Any:
        """What `generate` returns, in full."""
        torch.manual_seed(0)
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **settings}
        given = {} if cache is None else {cache_argument(self.model): cache}
        return self.model.generate(**given, return_dict_in_generate=True, output_logits=True, **settings)


def make_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_model(family, dtype=dtype, **two_layers(family))


@lru_cache(maxsize=1)
def make_case(family: str) -> Case:
    torch.manual_seed(0)
    model = make_model(family)
    rotations = rotations_for(model)
    return Case(family, patch_model(model, rotations, TWO_BITS), rotations)


SCENARIOS: dict[str, Callable[[Case], None]] = {}


def scenario(function: Callable[[Case], None]) -> Callable[[Case], None]:
    SCENARIOS[function.__name__.replace("_", " ")] = function
    return function


def same(got: Tensor, expected: Tensor, kind: str, allowed: float = 1e-3) -> None:
    error = relative_error(got.float(), expected.float())
    assert error < allowed, f"{kind}: relative error {error:.2g} of the logits, allowed {allowed:.2g}"


# The model


@scenario
def patch_and_unpatch(case: Case) -> None:
    """A patched model has the same logits, with any cache or none; unpatched, its weights are the same bit for bit."""
    model, ids = make_model(case.family), tokens(2, 40)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    expected = logits(model, ids, DynamicCache(config=model.config), chunks=[40])
    for recipe in ("oscar", "balanced"):
        patch_model(model, rotations_for(model, recipe), EXACT)
        assert bool(model._oscar_patch.absorbed) == (case.family not in ONLINE)
        for cache in (DynamicCache(config=model.config), OscarQuantizedCache(model)):
            same(logits(model, ids, cache, chunks=[21, 15, 1, 1, 1, 1]), expected, recipe, 1e-4)
        with torch.no_grad():
            same(model(ids, use_cache=False).logits, expected, recipe, 1e-4)
        unpatch_model(model)
        assert model.config._attn_implementation == attention and not hasattr(model.config, "oscar")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@scenario
def chunks_and_steps(case: Case) -> None:
    """A prompt in chunks, then tokens one by one."""
    ids, chunks = tokens(2, 51), (20, 7, 20, 1, 1, 1, 1)
    expected = case.feed(case.cache("stock"), ids, *chunks)
    same(case.feed(case.cache("16 bits"), ids, *chunks), expected, "16 bits", 1e-4)
    expected = case.feed(case.cache("2 bits"), ids, *chunks)
    same(case.feed(case.cache("2 bits, fixed"), ids, *chunks), expected, "2 bits, fixed")


@scenario
def other_attention(case: Case) -> None:
    """Under another attention implementation the cache gives it all keys and values, unpacked."""
    ids, chunks = tokens(2, 44), (30, 12, 1, 1)
    expected = {kind: case.feed(cache, ids, *chunks) for kind, _, cache in case.pairs()}
    set_attention(case.model, "eager")
    try:
        for kind, cache, _ in case.pairs():
            same(case.feed(cache, ids, *chunks), expected[kind], kind)
    finally:
        set_attention(case.model, "oscar")


def half(case: Case, dtype: torch.dtype) -> None:
    model, ids, chunks = make_model(case.family, dtype), tokens(1, 44), [38, 3, 1, 1, 1]
    expected = logits(model, ids, DynamicCache(config=model.config), chunks=chunks)
    single = make_model(case.family)
    noise = relative_error(expected.float(), logits(single, ids, DynamicCache(config=single.config), chunks=chunks))
    patch_model(model, case.rotations, TWO_BITS)
    got = logits(model, ids, OscarQuantizedCache(model, config=EXACT), chunks=chunks)
    assert got.dtype == dtype
    same(got, expected, "16 bits", 3 * noise)
    growing, fixed = (
        logits(model, ids, OscarQuantizedCache(model, max_cache_len=length), chunks=chunks) for length in (None, 64)
    )
    same(fixed, growing, "2 bits, fixed", 3 * noise)


@scenario
def float16(case: Case) -> None:
    """Weights and windows in float16."""
    half(case, torch.float16)


@scenario
def bfloat16(case: Case) -> None:
    """Weights and windows in bfloat16."""
    half(case, torch.bfloat16)


@scenario
def compiled_steps(case: Case) -> None:
    """Decode steps under torch.compile(fullgraph=True), fixed storage, a second cache without compiling again."""
    ids = tokens(2, PROMPT + 4)

    def run(make: Callable[[], Any]) -> tuple[list[Tensor], list[int]]:
        """Logits with two caches in turn, and how often there was a compilation until the end of each."""
        torch._dynamo.reset()
        counter, results, counts = CompileCounter(), [], []
        step = torch.compile(case.model.forward, backend=counter, fullgraph=True)
        for _ in range(2):
            cache = make()
            outputs = [case.feed(cache, ids[:, :PROMPT])]
            for position in range(PROMPT, ids.shape[1]):
                where = torch.full((2, 1), position)
                given = {cache_argument(case.model): cache, "position_ids": where}
                with torch.no_grad():
                    outputs.append(step(input_ids=ids[:, position : position + 1], **given).logits)
            results.append(torch.cat(outputs, 1))
            counts.append(counter.frame_count)
        torch._dynamo.reset()
        return results, counts

    results, counts = run(lambda: case.cache("2 bits, fixed"))
    expected = case.feed(case.cache("2 bits"), ids, PROMPT, 1, 1, 1, 1)
    for result in results:
        same(result, expected, "2 bits, fixed")
    if counts != [1, 1]:  # transformers' own sliding-window layers count in Python, so each step may compile
        assert any(getattr(layer, "is_sliding", False) for layer in case.cache("stock").layers)
        _, stock = run(lambda: StaticCache(config=case.model.config, max_cache_len=96))
        assert all(ours <= theirs for ours, theirs in zip(counts, stock, strict=True))


# Quantised weights


def packs(case: Case, kind: type[nn.Module], pack: Callable[[nn.Linear], nn.Module], unpack: Callable) -> None:
    """A model of packed linear layers does what the model with the unpacked weights does; nothing is absorbed."""
    model, plain, ids = make_model(case.family), make_model(case.family), tokens(2, 44)
    for name, module in [*model.named_modules()]:
        for child, linear in module.named_children():
            if type(linear) is nn.Linear and child != "lm_head" and linear.in_features % 32 == 0:
                setattr(module, child, pack(linear))
                dense = plain.get_submodule(f"{name}.{child}" if name else child)
                dense.weight.data.copy_(unpack(getattr(module, child)))

    def forward(self: nn.Module, states: Tensor) -> Tensor:  # the kernels of packed weights need a GPU
        return nn.functional.linear(states, unpack(self).to(states.dtype), self.bias)

    chunks = [38, 3, 1, 1, 1]
    with mock.patch.object(kind, "forward", forward):
        expected = logits(plain, ids, DynamicCache(config=plain.config), chunks=chunks)
        for one in (model, plain):
            patch_model(one, case.rotations, TWO_BITS)
        assert not model._oscar_patch.absorbed
        exact, packed, dense = (
            logits(one, ids, OscarQuantizedCache(one, config=config), chunks=chunks)
            for one, config in ((model, EXACT), (model, TWO_BITS), (plain, TWO_BITS))
        )
    same(exact, expected, "16 bits", 1e-4)
    same(packed, dense, "2 bits", 1e-2)  # a code at the edge may fall on the other side


@scenario
def packed_linear_layers(case: Case) -> None:
    """Linear layers without a dense weight, as of bitsandbytes, GPTQ and AWQ: rotations are applied online."""
    packs(case, Packed, Packed, lambda module: module.packed)


@scenario
def fp8_linear_layers(case: Case) -> None:
    """transformers' FP8Linear with a scale per 32 x 32 block, the format of GLM-4.7-FP8 and MiniMax-M2."""

    def pack(linear: nn.Linear) -> nn.Module:
        out, size = linear.weight.shape
        module = FP8Linear(size, out, block_size=(32, 32), has_bias=linear.bias is not None)
        padded = nn.functional.pad(linear.weight.data, (0, -size % 32, 0, -out % 32))
        scale = padded.unflatten(1, (-1, 32)).unflatten(0, (-1, 32)).abs().amax((1, 3)) / 448
        module.weight_scale_inv.data.copy_(scale)
        module.weight.data.copy_((linear.weight.data / spread(scale, out, size)).to(torch.float8_e4m3fn))
        module.bias = linear.bias
        return module.eval()

    def spread(scale: Tensor, out: int, size: int) -> Tensor:
        return scale.repeat_interleave(32, 0)[:out].repeat_interleave(32, 1)[:, :size]

    packs(case, FP8Linear, pack, lambda m: m.weight.float() * spread(m.weight_scale_inv, *m.weight.shape))


@scenario
def gguf_blocks(case: Case) -> None:
    """transformers' GgufLinear, weights as Q8_0 blocks."""

    def pack(linear: nn.Linear) -> nn.Module:
        out, size = linear.weight.shape
        module = GgufLinear(size, out, int(gguf.GGMLQuantizationType.Q8_0), bias=linear.bias is not None)
        blocks = gguf.quantize(linear.weight.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
        module.weight.data.copy_(torch.from_numpy(blocks))
        module.bias = linear.bias
        return module.eval()

    q8 = gguf.GGMLQuantizationType.Q8_0
    packs(case, GgufLinear, pack, lambda module: torch.from_numpy(gguf.dequantize(module.weight.data.numpy(), q8)))


# generate


def generates(case: Case, chunks: tuple[int, ...] = (PROMPT,), **settings: Any) -> None:
    """16 bits write what the stock cache does; 2 bits have the logits that a new cache has for what they wrote."""
    ids = tokens(2, PROMPT)
    settings = {"input_ids": ids, **settings}
    expected, exact = (case.generate(case.cache(kind), **settings) for kind in ("stock", "16 bits"))
    assert torch.equal(exact.sequences, expected.sequences), "16 bits: other text"
    for kind in KINDS[1:]:
        output = case.generate(case.cache(kind), **settings)
        new = output.sequences[:, -8:]
        prompt = ids.repeat_interleave(len(new) // len(ids), 0)
        replayed = case.feed(case.cache(kind), torch.cat([prompt, new[:, :-1]], 1), *chunks, *[1] * 7)[:, -8:]
        if settings.get("num_beams"):
            scores = replayed.log_softmax(-1).gather(2, new[..., None]).sum((1, 2))
            same(output.sequences_scores, scores, kind)
        else:
            same(torch.stack(output.logits, 1), replayed, kind)


@scenario
def greedy(case: Case) -> None:
    """Greedy decoding of a batch."""
    generates(case)


@scenario
def sampled(case: Case) -> None:
    """Sampling, several sequences a prompt."""
    generates(case, do_sample=True, temperature=0.8, top_p=0.9, num_return_sequences=2)


@scenario
def beams(case: Case) -> None:
    """Beam search, several beams returned."""
    generates(case, num_beams=3, num_return_sequences=2, length_penalty=0.0, output_scores=True)


@scenario
def prefill_chunk_size(case: Case) -> None:
    """generate(prefill_chunk_size=...)."""
    generates(case, chunks=(11, 11, 6), prefill_chunk_size=11)


@scenario
def inputs_embeds(case: Case) -> None:
    """Embeddings instead of tokens."""
    embeds = case.model.get_input_embeddings()(tokens(2, PROMPT)).detach()
    expected, exact = (case.generate(case.cache(kind), inputs_embeds=embeds) for kind in ("stock", "16 bits"))
    assert torch.equal(exact.sequences, expected.sequences), "16 bits: other text"
    growing, fixed = (case.generate(case.cache(kind), inputs_embeds=embeds) for kind in KINDS[1:])
    same(torch.stack(fixed.logits), torch.stack(growing.logits), "2 bits, fixed")


@scenario
def cache_by_default(case: Case) -> None:
    """generate without a cache uses a 2-bit one; use_cache=False none."""
    ids = tokens(1, PROMPT)
    output, expected = (case.generate(cache, input_ids=ids) for cache in (None, case.cache("2 bits")))
    used = output.cache if cache_argument(case.model) == "cache" else output.past_key_values
    assert isinstance(used, OscarQuantizedCache) and used.config == TWO_BITS
    assert torch.equal(output.sequences, expected.sequences)
    without, stock = (
        case.generate(cache, input_ids=ids, **extra)
        for cache, extra in ((None, {"use_cache": False}), (case.cache("stock"), {}))
    )
    assert torch.equal(without.sequences, stock.sequences)


def speculates(case: Case, kinds: list[str], repeats: int = 4, **how: Any) -> None:
    ids = torch.randint(3, 128, (1, 7)).repeat(1, repeats)  # a lookup finds its candidates in it
    # a prompt is attended to exactly, and with it the candidates that come in its forward: here as single steps are
    config = TWO_BITS.replace(exact_chunks=False)
    for kind in kinds:
        length = 96 if "fixed" in kind else None
        texts = []
        for extra in ({}, how):
            chosen = EXACT if kind == "16 bits" else config
            cache = OscarQuantizedCache(case.model, config=chosen, max_cache_len=length)
            texts.append(case.generate(cache, 14, input_ids=ids, **extra).sequences)
        assert torch.equal(*texts), f"{kind}: other text than greedy"


@scenario
def prompt_lookup(case: Case) -> None:
    """Prompt-lookup decoding: token for token what greedy decoding writes."""
    speculates(case, KINDS[:2], prompt_lookup_num_tokens=4)


@scenario
def prompt_lookup_in_fixed_storage(case: Case) -> None:
    """The same in a cache made with max_cache_len."""
    speculates(case, KINDS[2:], prompt_lookup_num_tokens=4)


@scenario
def assisted(case: Case) -> None:
    """Assisted decoding, candidates mostly refused and all accepted: token for token greedy."""
    # an assistant with sliding windows must stay in them: transformers 5.17 fails else, with its own cache too
    for assistant, repeats in ((assistant_model(), 4), (case.model, 2)):
        schedule = assistant.generation_config.num_assistant_tokens_schedule
        number = assistant.generation_config.num_assistant_tokens
        # candidates of one forward must fit what can be taken back: 8 tokens here, 32 by default
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.num_assistant_tokens = 4
        try:
            speculates(case, KINDS[:2], repeats, assistant_model=assistant)
        finally:
            assistant.generation_config.num_assistant_tokens_schedule = schedule
            assistant.generation_config.num_assistant_tokens = number


@lru_cache(maxsize=1)
def assistant_model() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=1)


@scenario
def streamer_and_pipeline(case: Case) -> None:
    """A TextIteratorStreamer, and pipeline("text-generation")."""
    tokenizer, text = tiny_tokenizer(letters=124), "Thequickbrownfoxjumpsoverthelazydog,againandagain."
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    size = inputs["input_ids"].shape[1]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    output = case.generate(None, **inputs, streamer=streamer).sequences[0, size:]
    assert "".join(streamer) == tokenizer.decode(output)
    writer = pipeline("text-generation", model=case.model, tokenizer=tokenizer)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_full_text": False}
    written = writer(text, **settings)[0]["generated_text"]
    assert written == tokenizer.decode(output, skip_special_tokens=True)


# Batches


@scenario
def left_padding(case: Case) -> None:
    """A row's logits alone equal its logits in a padded batch."""
    ids, pads = tokens(3, 44), [0, 5, 17]
    mask = torch.stack([torch.arange(44) >= pad for pad in pads]).long()
    for kind, cache, _ in case.pairs():
        together = case.feed(cache, ids, 28, 12, 1, 1, 1, 1, mask=mask)
        for row, pad in enumerate(pads):
            alone = case.cache("stock" if kind == "16 bits" else kind)
            chunks = (28 - pad, 12, 1, 1, 1, 1)
            expected = case.feed(alone, ids[row : row + 1, pad:], *chunks, first=pad)
            same(together[row, pad:], expected[0], f"{kind}, {pad} pads")


def rows(case: Case, change: Callable[[Any], None], order: list[int]) -> None:
    """After `change`, a cache goes on like one that was given the rows in `order`."""
    ids = tokens(3, PROMPT + 4)
    for kind, cache, other in case.pairs():
        case.feed(cache, ids[:, :PROMPT])
        change(cache)
        got = case.feed(cache, ids[order, PROMPT:], 2, 1, 1)
        expected = case.feed(other, ids[order], PROMPT, 2, 1, 1)[:, PROMPT:]
        same(got, expected, kind)


@scenario
def reorder_cache(case: Case) -> None:
    """Rows in another order, one of them twice."""
    rows(case, lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2])


@scenario
def batch_repeat_interleave(case: Case) -> None:
    """Each row twice."""
    rows(case, lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])


@scenario
def batch_select_indices(case: Case) -> None:
    """Some of the rows."""
    rows(case, lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1])


@scenario
def reset(case: Case) -> None:
    """An emptied cache takes another prompt, of another batch size."""
    ids = tokens(3, PROMPT + 2)
    for kind, cache, other in case.pairs():
        case.feed(cache, tokens(2, 45), 40, 1, 1, 1, 1, 1)
        cache.reset()
        assert cache.get_seq_length() == 0
        same(case.feed(cache, ids, PROMPT, 1, 1), case.feed(other, ids, PROMPT, 1, 1), kind)


# Time


def crops(case: Case, length: int, keep: int, argument: Callable[[int, int], Any]) -> None:
    """After a crop from `length` to `keep` tokens, a cache goes on as one that was never given more."""
    ids, more = tokens(2, length), tokens(2, 4)
    for kind, cache, other in case.pairs():
        case.feed(cache, ids, keep, length - keep) if 0 < keep < length else case.feed(cache, ids)
        try:
            cache.crop(argument(length, keep))
        except (RuntimeError, ValueError, NotImplementedError):  # refused: nothing has changed
            case.feed(other, ids, keep, length - keep)
            same(case.feed(cache, more, 2, 1, 1), case.feed(other, more, 2, 1, 1), kind)
            raise
        assert cache.get_seq_length() == keep
        whole = torch.cat([ids[:, :keep], more], 1)
        expected = case.feed(other, whole, *[keep] * (keep > 0), 2, 1, 1)[:, -4:]
        same(case.feed(cache, more, 2, 1, 1), expected, kind)


@scenario
def crop_into_the_window(case: Case) -> None:
    """crop(-n), as an int and as a tensor, n up to what leaves no trace; and crop(0)."""
    for count in (0, 8):
        crops(case, PROMPT, PROMPT - count, lambda length, keep: keep - length)
    crops(case, PROMPT, PROMPT - 5, lambda length, keep: torch.tensor(keep - length))


@scenario
def crop_into_the_sink(case: Case) -> None:
    """crop to three tokens: the cache goes on as one that was never given more."""
    crops(case, PROMPT, 3, lambda length, keep: torch.tensor(keep - length))


@scenario
def crop_to_nothing(case: Case) -> None:
    """crop to no token at all: the cache is as new."""
    crops(case, 45, 0, lambda length, keep: keep - length)


@scenario
def crop_into_the_history(case: Case) -> None:
    """crop to 14 of 28 tokens: at 16 bits as if never given, at 2 bits those quantised stay so, in any steps."""
    ids, more = tokens(2, PROMPT), tokens(2, 4)
    stock = case.feed(case.cache("stock"), torch.cat([ids[:, :14], more], 1), 14, 2, 1, 1)[:, 14:]
    results = {}
    for steps in ((14,), (3, 11)):
        for kind in KINDS:
            cache = case.cache(kind)
            case.feed(cache, ids)
            for step in steps:
                cache.crop(-step)
            assert cache.get_seq_length() == 14
            got = case.feed(cache, more, 2, 1, 1)
            same(got, stock if kind == "16 bits" else results.setdefault("2 bits", got), f"{kind}, {steps}")


@scenario
def crop_to_a_length(case: Case) -> None:
    """crop(n) in the meaning it had before transformers 5.15: the number of tokens to keep."""
    crops(case, PROMPT, PROMPT - 6, lambda length, keep: keep)
    crops(case, PROMPT, PROMPT, lambda length, keep: length + 10)


@scenario
def crop_past_a_sliding_window(case: Case) -> None:
    """crop(-4) of 45 tokens."""
    crops(case, 45, 41, lambda length, keep: keep - length)


@scenario
def several_questions(case: Case) -> None:
    """Several questions over deep copies of one cached context, in any order."""
    context, questions = tokens(1, 40), [tokens(1, size) for size in (5, 1, 12)]
    for kind, cache, _ in case.pairs():
        case.feed(cache, context)
        expected = []
        for question in questions:
            whole = torch.cat([context, question], 1)
            expected.append(
                case.feed(case.cache("stock" if kind == "16 bits" else kind), whole, 40, question.shape[1])[:, 40:]
            )
        for index in (2, 0, 1, 0):
            same(case.feed(copy.deepcopy(cache), questions[index]), expected[index], f"{kind}, question {index}")
        assert cache.get_seq_length() == 40


@scenario
def fork(case: Case) -> None:
    """Several continuations that share one context's history; the context itself goes on too."""
    context, more = tokens(1, 40), tokens(3, 4)
    for kind in KINDS[:2]:
        cache, other = case.cache(kind), case.cache("stock" if kind == "16 bits" else kind)
        case.feed(cache, context)
        forked = cache.fork(3)
        expected = case.feed(other, torch.cat([context.expand(3, -1), more], 1), 40, 2, 1, 1)[:, 40:]
        same(case.feed(forked, more, 2, 1, 1), expected, kind)
        same(case.feed(cache, more[:1], 2, 1, 1), expected[:1], f"{kind}, the context")


@scenario
def several_turns(case: Case) -> None:
    """A conversation in one cache, turn by turn, through generate."""
    first, second = tokens(2, PROMPT), tokens(2, 5)
    stock = None
    for kind in ("stock", *KINDS):
        cache = case.cache(kind)
        written = case.generate(cache, 6, input_ids=first).sequences
        longer = torch.cat([written, second], 1)  # not without a mask: a pad token may be among what was written
        output = case.generate(cache, 6, input_ids=longer, attention_mask=torch.ones_like(longer))
        if kind == "stock":
            stock = output
        elif kind == "16 bits":
            assert torch.equal(output.sequences, stock.sequences), "16 bits: other text"
        else:
            replayed = case.feed(case.cache(kind), output.sequences[:, :-1], PROMPT, *[1] * 5, 6, *[1] * 5)
            same(torch.stack(output.logits, 1), replayed[:, -6:], kind)


@scenario
def two_caches(case: Case) -> None:
    """Two caches on one model, token by token in turn."""
    prompts = [tokens(1, 30), tokens(2, 33)]
    for kind in KINDS:
        caches, parts = [case.cache(kind) for _ in prompts], [[], []]
        for start, stop in ((0, 28), (28, 29), (29, 30)):
            for index, ids in enumerate(prompts):
                parts[index].append(case.feed(caches[index], ids[:, start:stop]))
        for ids, got in zip(prompts, parts, strict=True):
            alone = case.feed(case.cache("stock" if kind == "16 bits" else kind), ids[:, :30], 28, 1, 1)
            same(torch.cat(got, 1), alone, kind)


@scenario
def one_config_for_two_models(case: Case) -> None:
    """One OscarConfig for caches of two models: neither sees the other's shapes, and the object stays as it was."""
    shared, ids = TWO_BITS.replace(), tokens(1, 36)
    before = shared.to_dict()
    expected = case.feed(case.cache("2 bits"), ids, 33, 1, 1, 1)
    other = make_other()
    logits(other, ids, OscarQuantizedCache(other, config=shared), chunks=[36])
    same(case.feed(OscarQuantizedCache(case.model, config=shared), ids, 33, 1, 1, 1), expected, "2 bits")
    assert shared.to_dict() == before


@lru_cache(maxsize=1)
def make_other() -> PreTrainedModel:
    model = tiny_model("llama", head_dim=32, num_hidden_layers=1)
    return patch_model(model, rotations_for(model))


@scenario
def pickle_and_torch_save(case: Case) -> None:
    """A pickled cache, and one through torch.save, goes on in the model it is of."""
    ids = tokens(2, 44)
    for kind, cache, other in case.pairs():
        case.feed(cache, ids[:, :40])
        expected = case.feed(other, ids, 40, 2, 1, 1)[:, 40:]
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        for again in (pickle.loads(pickle.dumps(cache)), torch.load(file, weights_only=False)):
            same(case.feed(again, ids[:, 40:], 2, 1, 1), expected, kind)


@scenario
def save_and_load(case: Case, folder: Path) -> None:
    """cache.save and OscarQuantizedCache.load."""
    ids = tokens(2, 44)
    for number, (kind, cache, other) in enumerate(case.pairs()):
        case.feed(cache, ids[:, :40])
        expected = case.feed(other, ids, 40, 2, 1, 1)[:, 40:]
        path = cache.save(folder / str(number))
        again = OscarQuantizedCache.load(path, case.model, max_cache_len=96 if "fixed" in kind else None)
        same(case.feed(again, ids[:, 40:], 2, 1, 1), expected, kind)
