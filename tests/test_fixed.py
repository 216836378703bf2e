"""Fixed storage: the same results as growing storage, decode steps that compile once, and clear errors when full."""

from __future__ import annotations

import copy

import pytest
import torch
from test_patch import generate, relative_error, rotations_for, tokens
from tiny import tiny_model
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from oscar_hf import OscarConfig, OscarQuantizedCache, patch_model
from oscar_hf._compat import cache_argument

SMALL = OscarConfig(recipe="balanced", sink_tokens=4, recent_tokens=8)
SEARCHING = OscarConfig(recipe="search", sink_tokens=4, recent_tokens=8)


def patched(
    family: str = "qwen3", device: str = "cpu", dtype: torch.dtype = torch.float32, config: OscarConfig = SMALL
) -> PreTrainedModel:
    model = tiny_model(family)
    rotations = rotations_for(model, config.recipe)
    return patch_model(model.to(device, dtype), rotations, config)


@torch.no_grad()
def run(model: PreTrainedModel, ids: Tensor, cache, step=None, prompt: int = 40, size: int = 1) -> Tensor:
    """Logits of a prompt, then of steps of `size` tokens, through `step` (default: the model)."""
    name = cache_argument(model)
    outputs = [model(ids[:, :prompt], **{name: cache}).logits]
    for start in range(prompt, ids.shape[1], size):
        part = ids[:, start : start + size]
        positions = torch.arange(start, start + part.shape[1], device=ids.device).expand(part.shape)
        outputs.append((step or model)(input_ids=part, position_ids=positions, **{name: cache}).logits.clone())
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("config", [SMALL, SEARCHING], ids=["rounded", "searched"])
def test_fixed_equals_growing(family: str, size: int, config: OscarConfig) -> None:
    model, ids = patched(family, config=config), tokens(2, 60)
    expected = run(model, ids, OscarQuantizedCache(model), size=size)
    cache = OscarQuantizedCache(model, max_cache_len=60)
    assert relative_error(run(model, ids, cache, size=size), expected) < 3e-5  # one other code would be 1e-3
    assert cache.get_seq_length() == 60 and cache.oscar_layers[0].tiers.lengths == [60, 60]


def test_several_tokens_at_once_equal_single_steps() -> None:
    model, ids = patched(), tokens(2, 64)
    single = run(model, ids, OscarQuantizedCache(model))
    for size in (2, 8):
        for length in (None, 64):
            assert (
                relative_error(run(model, ids, OscarQuantizedCache(model, max_cache_len=length), size=size), single)
                < 1e-5
            )


def test_generate_with_padding_and_a_second_prompt() -> None:
    model, ids = patched(), tokens(3, 50)
    mask = torch.stack([torch.arange(50) >= pad for pad in (0, 9, 30)]).long()
    cache = OscarQuantizedCache(model, max_cache_len=80)
    for _ in range(2):
        expected = generate(model, ids, OscarQuantizedCache(model), attention_mask=mask)
        assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)
        addresses = [tensor.data_ptr() for tensor in cache.oscar_layers[0].tiers.tensors()]
        cache.reset()
        ids = ids.flip(0)
    assert addresses == [tensor.data_ptr() for tensor in cache.oscar_layers[0].tiers.tensors()]


def test_continuing_crop_rows_and_copies() -> None:
    model, ids = patched(), tokens(3, 70)
    fixed, growing = OscarQuantizedCache(model, max_cache_len=90), OscarQuantizedCache(model)
    name = cache_argument(model)
    for cache in (fixed, growing):
        run(model, ids[:, :60], cache)
        cache.crop(-7)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    twin = copy.deepcopy(fixed)
    with torch.no_grad():
        outputs = [model(ids[:, 53:], **{name: cache}).logits for cache in (fixed, growing, twin)]
    assert relative_error(outputs[0], outputs[1]) < 1e-5 and relative_error(outputs[2], outputs[1]) < 1e-5
    assert fixed.get_seq_length() == growing.get_seq_length() == 70


def test_a_full_cache_refuses_before_it_stores() -> None:
    model, ids = patched(), tokens(1, 40)
    cache = OscarQuantizedCache(model, max_cache_len=50)
    with pytest.raises(ValueError, match="max_cache_len=50"):
        generate(model, ids, cache)  # 24 new tokens
    assert cache.get_seq_length() == 0
    run(model, ids, cache)
    before = [tensor.clone() for tensor in cache.oscar_layers[0].tiers.tensors()]
    with torch.no_grad(), pytest.raises(ValueError, match="11 more do not fit"):
        model(tokens(1, 11), **{cache_argument(model): cache})
    for tensor, old in zip(cache.oscar_layers[0].tiers.tensors(), before, strict=True):
        assert tensor.reshape(-1).view(torch.uint8).equal(old.reshape(-1).view(torch.uint8))
    with torch.no_grad():
        model(tokens(1, 10), **{cache_argument(model): cache})
    assert cache.get_seq_length() == 50


@pytest.mark.parametrize("length", [0, -1, True, 3.5])
def test_a_length_that_is_none(length) -> None:
    with pytest.raises(ValueError, match="max_cache_len"):
        OscarQuantizedCache(patched(), max_cache_len=length)


@pytest.mark.parametrize("changes", [{"bits": 16}, {"recent_tokens": 0}])
def test_settings_that_fixed_storage_has_not(changes: dict) -> None:
    with pytest.raises(ValueError, match="leave it out"):
        OscarQuantizedCache(patched(), config=SMALL.replace(**changes), max_cache_len=64)


def test_padding_among_what_is_stored_must_stay_as_it_was() -> None:
    model, ids = patched(), tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    cache = OscarQuantizedCache(model, max_cache_len=100)
    generate(model, ids, cache, attention_mask=mask)
    longer = torch.ones(2, 60, dtype=torch.long)
    with pytest.raises(ValueError, match="padding must stay"):
        generate(model, tokens(2, 60), cache, attention_mask=longer)


def compiles_once(model: PreTrainedModel, ids: Tensor, **options) -> list[int]:
    """Run two caches, and one of them again, through a compiled step; how many graphs there were after each."""
    torch._dynamo.reset()
    counters.clear()
    expected = run(model, ids, OscarQuantizedCache(model))
    step = torch.compile(model.forward, fullgraph=True, **options)
    caches = [OscarQuantizedCache(model, max_cache_len=64) for _ in range(2)]
    graphs = []
    for cache in (*caches, caches[0]):
        cache.reset()
        error = relative_error(run(model, ids, cache, step).float(), expected.float())
        assert error < (3e-5 if model.dtype == torch.float32 else 3e-2)
        assert cache.get_seq_length() == 60
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["inductor"]["cudagraph_skips"]
    return graphs


@pytest.mark.parametrize("config", [SMALL, SEARCHING], ids=["rounded", "searched"])
def test_a_step_compiles_whole_and_once(config: OscarConfig) -> None:
    first, *later = compiles_once(patched(config=config), tokens(2, 60), backend="aot_eager")
    assert later == [first, first]


def test_prompts_and_padding_do_not_compile() -> None:
    model, ids = patched(), tokens(1, 8)
    cache = OscarQuantizedCache(model, max_cache_len=64)
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="(?s)Run the prompt without torch.compile"):
        step(input_ids=ids, **{cache_argument(model): cache})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text"])
def test_cuda_graphs(family: str, dtype: torch.dtype) -> None:
    first, *later = compiles_once(patched(family, "cuda", dtype), tokens(2, 60).cuda(), mode="reduce-overhead")
    assert later == [first, first]


@pytest.mark.gpu
def test_generate_compiles_by_itself() -> None:
    torch._dynamo.reset()
    counters.clear()
    model, ids = patched(device="cuda"), tokens(2, 50).cuda()
    expected = generate(model, ids, OscarQuantizedCache(model))
    graphs = []
    for _ in range(3):
        assert torch.equal(generate(model, ids, OscarQuantizedCache(model, max_cache_len=80)), expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] and graphs == [graphs[0]] * 3 and not counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "qwen3_next", "phi3"])
@pytest.mark.parametrize("padded", [False, True])
def test_kernels_equal_plain_torch(family: str, padded: bool) -> None:
    model, ids = patched(family), tokens(3, 150)
    mask = torch.ones_like(ids)
    if padded:
        mask = torch.stack([torch.arange(150) >= pad for pad in (0, 9, 38)]).long()
    name = cache_argument(model)
    outputs = []
    for device in ("cpu", "cuda"):
        model.to(device)
        cache, parts, start = OscarQuantizedCache(model), [], 0
        for size in (60, 40, 46, 1, 2, 1):
            stop = start + size
            given = {name: cache, "attention_mask": mask[:, :stop].to(device)}
            with torch.no_grad():
                parts.append(model(ids[:, start:stop].to(device), **given).logits.cpu())
            start = stop
        outputs.append(torch.cat(parts, 1)[mask.bool()])
    assert relative_error(outputs[1], outputs[0]) < 1e-2  # a code at the edge may fall on the other side
