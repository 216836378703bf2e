"""What patching changes, what it refuses, and that it all goes back. Family by family: tests/conformance."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from tiny import tiny_config, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import oscar_hf.patch as patching
from oscar_hf import (
    LayerRotation,
    OscarConfig,
    OscarQuantizedCache,
    RotationSet,
    calibrate,
    patch_model,
    save_patched,
    unpatch_model,
)
from oscar_hf._compat import cache_argument, set_attention
from oscar_hf.matrices import compose_rotation

EXACT = OscarConfig(sink_tokens=5, recent_tokens=16, bits=16)
SMALL = OscarConfig(recipe="balanced", sink_tokens=5, recent_tokens=16)
CHUNKS = [40, 7, 30, 1, 1, 1]


def rotations_for(model: PreTrainedModel, recipe: str = "balanced") -> RotationSet:
    data = [torch.randint(3, 128, (200,)), torch.randint(3, 128, (90,))]
    return calibrate(model, data, recipe=recipe, progress=False)


def tokens(batch: int = 2, count: int = sum(CHUNKS)) -> Tensor:
    return torch.randint(3, 128, (batch, count))


@torch.no_grad()
def logits(
    model: PreTrainedModel, ids: Tensor, cache, mask: Tensor | None = None, chunks=None, first: int = 0
) -> Tensor:
    """Logits of all tokens, fed in chunks; `first` is the position of the first."""
    outputs, start = [], 0
    for chunk in ids.split(chunks or CHUNKS, 1):
        extra = {"position_ids": first + torch.arange(start, start + chunk.shape[1])[None]} if first else {}
        start += chunk.shape[1]
        if mask is not None:
            extra["attention_mask"] = mask[:, :start]
        outputs.append(model(chunk, **{cache_argument(model): cache}, **extra).logits)
    return torch.cat(outputs, 1)


def relative_error(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def generate(model: PreTrainedModel, ids: Tensor, cache=None, **kwargs) -> Tensor:
    given = {} if cache is None else {cache_argument(model): cache}
    return model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, **given, **kwargs)


def test_padding_in_a_model_with_linear_layers() -> None:
    model, ids = tiny_model("qwen3_next"), tokens(3)
    mask = torch.stack([torch.arange(ids.shape[1]) >= pad for pad in (0, 11, 38)]).long()
    expected = logits(model, ids, DynamicCache(config=model.config), mask)
    patch_model(model, rotations_for(model))
    exact = logits(model, ids, OscarQuantizedCache(model, config=EXACT), mask)
    assert relative_error(exact[mask.bool()], expected[mask.bool()]) < 1e-5


@pytest.mark.parametrize("batch, padded", [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 319, 320, 321, 1000])
def test_fused_dense_and_unpatched_agree(length: int, batch: int, padded: bool) -> None:
    model = tiny_model("qwen2")
    # dense keys are the same for all queries of a chunk; oscar attention takes 32 tokens or fewer as single steps
    ids, chunks = tokens(batch, length + 35), [length, 33, 1, 1]
    mask = torch.ones_like(ids)
    if padded:
        for row in range(1, batch):
            mask[row, : length * row // (batch + 1)] = 0
    rotations = rotations_for(model)
    plain = OscarQuantizedCache(model, rotations)
    set_attention(model, "sdpa")
    unpatched = logits(model, ids, plain, mask, chunks)
    patch_model(model, rotations)
    fused = logits(model, ids, OscarQuantizedCache(model), mask, chunks)
    set_attention(model, "sdpa")
    dense = logits(model, ids, OscarQuantizedCache(model), mask, chunks)
    for other in (dense, unpatched):
        for row in range(batch):
            real = mask[row].bool()
            assert relative_error(other[row, real], fused[row, real]) < 1e-4


def test_generate_uses_oscar_by_itself() -> None:
    model, ids = tiny_model(), tokens(1, 100)
    text, rotations = generate(model, ids), rotations_for(model)
    patch_model(model, rotations, EXACT)
    output = generate(model, ids, return_dict_in_generate=True)
    cache = getattr(output, "cache", None) if cache_argument(model) == "cache" else output.past_key_values
    assert isinstance(cache, OscarQuantizedCache) and cache.get_seq_length() == 123
    assert torch.equal(output.sequences, text)
    assert torch.equal(generate(model, ids, cache_implementation="static"), text)
    assert torch.equal(generate(model, ids, use_cache=False), text)
    unpatch_model(model)
    patch_model(model, rotations, EXACT, default_cache=False)
    output = generate(model, ids, return_dict_in_generate=True)
    cache = getattr(output, "cache", None) if cache_argument(model) == "cache" else output.past_key_values
    assert type(cache) is DynamicCache


def test_patched_model_serves_stock_caches_and_none() -> None:
    model, ids = tiny_model("qwen2"), tokens()
    expected = logits(model, ids, DynamicCache(config=model.config))
    patch_model(model, rotations_for(model))
    assert relative_error(logits(model, ids, DynamicCache(config=model.config)), expected) < 1e-5
    with torch.no_grad():
        assert relative_error(model(ids, use_cache=False).logits, expected) < 1e-5


def test_a_conversation_continues_and_a_filled_cache_is_refused() -> None:
    model, ids = tiny_model(), tokens(1, 50)
    patch_model(model, rotations_for(model), EXACT)
    cache = OscarQuantizedCache(model)
    first = generate(model, ids, cache)
    longer = torch.cat([first, tokens(1, 9)], 1)
    assert torch.equal(generate(model, longer, cache), generate(model, longer))
    seen = cache.get_seq_length()
    for prompt in (tokens(1, 20), tokens(1, seen)):
        with pytest.raises(ValueError, match=f"holds {seen} tokens"):
            generate(model, prompt, cache)
    assert cache.get_seq_length() == seen
    cache.reset()
    assert torch.equal(generate(model, ids, cache), first)


def test_a_filled_cache_is_refused_by_an_unpatched_model() -> None:
    model, ids = tiny_model(), tokens(1, 50)
    cache = OscarQuantizedCache(model, rotations_for(model))
    generate(model, ids, cache)
    with pytest.raises(ValueError, match="filled by another prompt"):
        generate(model, ids, cache)


def test_patching_again_changes_only_settings() -> None:
    model, rotations = tiny_model("qwen2"), None
    rotations = rotations_for(model)
    patch_model(model, rotations)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert patch_model(model, rotations, EXACT) is model
    assert OscarQuantizedCache(model).config == EXACT
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    other = copy.deepcopy(rotations)
    other.layers[0] = LayerRotation(**{**rotations.layers[0].tensors(), "v_rotation": torch.eye(16)})
    with pytest.raises(ValueError, match="other rotations"):
        patch_model(model, other)
    with pytest.raises(ValueError, match="other rotations"):
        OscarQuantizedCache(model, other)


def test_rotations_per_head_are_absorbed_too() -> None:
    model, ids = tiny_model("qwen2"), tokens()
    expected, rotations = logits(model, ids, DynamicCache(config=model.config)), rotations_for(model)
    for index, layer in rotations.layers.items():
        covariance = torch.randn(2, 16, 16)
        per_head = compose_rotation(covariance @ covariance.mT).float()
        rotations.layers[index] = LayerRotation(**{**layer.tensors(), "v_rotation": per_head})
    patch_model(model, rotations)
    assert model._oscar_patch.absorbed == [0, 1, 2]
    assert relative_error(logits(model, ids, OscarQuantizedCache(model, config=EXACT)), expected) < 1e-5


class Packed(nn.Module):
    """A linear layer that keeps its weight in another form, as quantised checkpoints do."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.register_buffer("packed", linear.weight.detach().to(torch.bfloat16))
        self.bias = linear.bias

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.packed.to(states.dtype), self.bias)


@pytest.mark.parametrize("change", ["packed v", "packed o", "norm on values", "shared weight", "absorb=False"])
def test_online_where_absorbing_is_not_exact(change: str) -> None:
    model, ids = tiny_model("qwen2"), tokens()
    attention = model.model.layers[1].self_attn
    if change == "packed v":
        attention.v_proj = Packed(attention.v_proj)
    elif change == "packed o":
        attention.o_proj = Packed(attention.o_proj)
    elif change == "norm on values":
        attention.o_proj = nn.Sequential(nn.LayerNorm(64), attention.o_proj)
    elif change == "shared weight":
        attention.o_proj.weight = model.model.layers[0].self_attn.o_proj.weight
    expected = logits(model, ids, DynamicCache(config=model.config))
    patch_model(model, rotations_for(model), absorb=change != "absorb=False")
    absorbed = {"shared weight": [2], "absorb=False": []}.get(change, [0, 2])
    assert model._oscar_patch.absorbed == absorbed
    assert relative_error(logits(model, ids, OscarQuantizedCache(model, config=EXACT)), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, ids = tiny_model("qwen2", dtype=dtype), tokens()
    expected = logits(model, ids, DynamicCache(config=model.config)).float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    patch_model(model, rotations_for(model))
    exact = logits(model, ids, OscarQuantizedCache(model, config=EXACT))
    assert exact.dtype == dtype and relative_error(exact.float(), expected) < 0.06
    unpatch_model(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_saved_patched_model_is_not_rotated_twice(tmp_path) -> None:
    model, ids = tiny_model("qwen2"), tokens()
    expected = logits(model, ids, DynamicCache(config=model.config))
    rotations = rotations_for(model)
    patch_model(model, rotations, EXACT)
    save_patched(model, tmp_path)
    for given in (None, rotations):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert relative_error(logits(loaded, ids, DynamicCache(config=loaded.config)), expected) < 1e-5
        weight = loaded.model.layers[0].self_attn.v_proj.weight.clone()
        patch_model(loaded, given)
        assert torch.equal(loaded.model.layers[0].self_attn.v_proj.weight, weight)
        assert relative_error(logits(loaded, ids, OscarQuantizedCache(loaded, config=EXACT)), expected) < 1e-5
        unpatch_model(loaded)
        assert torch.equal(loaded.model.layers[0].self_attn.v_proj.weight, weight)
        assert relative_error(logits(loaded, ids, DynamicCache(config=loaded.config)), expected) < 1e-5
    other = rotations_for(loaded.__class__(tiny_config("qwen2")).eval())
    with pytest.raises(ValueError, match="rotated with other rotations"):
        patch_model(loaded, other)
    with pytest.raises(ValueError, match="rotated already"):
        rotations_for(loaded)


def test_memory_is_what_the_format_says() -> None:
    model = tiny_model(head_dim=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    patch_model(model, rotations_for(model))
    cache = OscarQuantizedCache(model)
    with torch.no_grad():
        model(tokens(1, 3900), **{cache_argument(model): cache})
        for _ in range(196):
            model(tokens(1, 1), **{cache_argument(model): cache})
    memory = cache.memory()
    assert memory.tokens == 4096 and memory.history_bits == 2.5
    assert memory.history == 2 * 2 * 2 * (4096 - 320) * 64 * 2.5 / 8
    assert (
        memory.sink == 2 * 2 * 2 * 64 * 64 * 4 and memory.recent == 4.5 * memory.sink
    )  # 256 tokens and 32 spare ones
    assert memory.slack <= 0.1 * memory.history
    tensors = {t.data_ptr(): t for layer in cache.layers for t in find_tensors(vars(layer)) if t.numel()}
    assert memory.total == sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def find_tensors(value, seen=None) -> list[Tensor]:
    """Every tensor reachable from a value, but for the transforms that all caches share."""
    seen = set() if seen is None else seen
    if id(value) in seen or type(value).__name__ == "Transform":
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    else:
        items = list(getattr(value, "__dict__", {}).values())
    return [tensor for item in items for tensor in find_tensors(item, seen)]


def test_patching_again_needs_no_rotations() -> None:
    model = tiny_model("qwen2")
    patch_model(model, rotations_for(model))
    patch_model(model, config=EXACT, default_cache=False)
    assert OscarQuantizedCache(model).config == EXACT and not model._oscar_patch.default_cache
    with pytest.raises(ValueError, match="group_size=12"):
        patch_model(model, config=OscarConfig(group_size=12))
    assert OscarQuantizedCache(model).config == EXACT


def test_an_unpatched_cache_knows_weights_that_were_rotated_on_disk(tmp_path) -> None:
    model, ids = tiny_model("qwen2"), tokens()
    rotations = rotations_for(model, "oscar")
    patch_model(model, rotations, SMALL)
    expected = OscarQuantizedCache(model)
    logits(model, ids, expected)
    save_patched(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for source in (loaded, loaded.config):
        cache = OscarQuantizedCache(source, rotations, SMALL)
        assert all(layer.transform.absorbed for layer in cache.oscar_layers)
    cache = OscarQuantizedCache(loaded, rotations, SMALL)
    logits(loaded, ids, cache)
    one, other = (c.oscar_layers[0].tiers.history.values[0][:, :, :40] for c in (cache, expected))
    assert (one == other).float().mean() > 0.999


def test_a_cache_filled_in_inference_mode_goes_on_outside_it() -> None:
    model, ids = tiny_model("qwen2"), tokens(1, 90)
    patch_model(model, rotations_for(model), SMALL)
    cache = OscarQuantizedCache(model)
    with torch.inference_mode():
        model(ids[:, :70], **{cache_argument(model): cache})
        cache.batch_select_indices(torch.tensor([0]))
    assert logits(model, ids[:, 70:], cache, chunks=[18, 1, 1]).isfinite().all()


def test_a_deep_copy_of_a_patched_model_stands_alone() -> None:
    model, ids = tiny_model("qwen2"), tokens(1, 60)
    patch_model(model, rotations_for(model), EXACT)
    text = generate(model, ids)
    twin = copy.deepcopy(model)
    unpatch_model(model)
    assert torch.equal(generate(twin, ids), text)
    set_attention(twin, "sdpa")
    assert torch.equal(generate(twin, ids), text)


class TestRefusals:
    @pytest.fixture
    def model(self) -> PreTrainedModel:
        return tiny_model("qwen2")

    def unchanged(self, model: PreTrainedModel) -> None:
        fresh = tiny_model("qwen2")
        assert not hasattr(model, "_oscar_patch") and not hasattr(model.config, "oscar")
        assert model.config._attn_implementation == "eager" and "_prepare_cache_for_generation" not in vars(model)
        state = fresh.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert not any(hasattr(module, "oscar_observer") for module in model.modules())

    @pytest.mark.parametrize(
        "spoil, words",
        [
            (lambda r: r.layers.pop(1), r"lack full-attention layers \[1\]"),
            (lambda r: r.layers.update({7: r.layers[0]}), r"layers \[7\]"),
            (lambda r: r.architecture.update(model_type="llama"), "'llama' in the rotations and 'qwen2' in the model"),
            (lambda r: r.architecture.update(num_hidden_layers=9), "num_hidden_layers is 9"),
            (lambda r: r.layers[0].v_rotation.mul_(2), "v_rotation is not orthogonal"),
            (lambda r: r.layers[2].k_rotation[0, 0].fill_(float("nan")), "Layer 2: k_rotation holds NaN"),
        ],
    )
    def test_rotations_that_do_not_fit(self, model: PreTrainedModel, spoil, words: str) -> None:
        rotations = rotations_for(model)
        spoil(rotations)
        for attempt in (patch_model, OscarQuantizedCache):
            with pytest.raises(ValueError, match=words):
                attempt(model, rotations)
        self.unchanged(model)

    def test_groups_that_do_not_divide(self, model: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="group_size=12 does not divide head_dim=16"):
            patch_model(model, rotations_for(model), OscarConfig(group_size=12))
        self.unchanged(model)

    def test_a_failed_check_puts_everything_back(self, model: PreTrainedModel, monkeypatch) -> None:
        monkeypatch.setattr("oscar_hf.transform.Transform.queries", lambda self, q: q.float() * 2)
        with pytest.raises(RuntimeError, match="other logits"):
            patch_model(model, rotations_for(model))
        self.unchanged(model)

    @pytest.mark.parametrize("reversible", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_wrong_absorption_is_caught_and_undone(self, dtype: torch.dtype, reversible: bool, monkeypatch) -> None:
        model = tiny_model("qwen2", dtype=dtype)
        rotations, before = rotations_for(model), {k: v.clone() for k, v in model.state_dict().items()}
        real = patching._rotate

        def forgets_the_bias(module: nn.Module, rotation: Tensor, saved: list) -> None:
            bias = module.v_proj.bias.clone()
            real(module, rotation, saved)
            module.v_proj.bias.data.copy_(bias)

        monkeypatch.setattr(patching, "_rotate", forgets_the_bias)
        with pytest.raises(RuntimeError, match="other logits"):
            patch_model(model, rotations, reversible=reversible)
        assert not hasattr(model, "_oscar_patch") and not hasattr(model.config, "oscar")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_a_shared_configuration(self, model: PreTrainedModel) -> None:
        other = type(model)(model.config).eval()
        rotations = rotations_for(model)
        patch_model(model, rotations)
        with pytest.raises(ValueError, match="shares its configuration"):
            patch_model(other, rotations)

    @pytest.mark.parametrize("patched_first", [True, False])
    def test_caches_do_not_outlive_the_projections(self, model: PreTrainedModel, patched_first: bool) -> None:
        rotations = rotations_for(model)
        if patched_first:
            patch_model(model, rotations)
        cache = OscarQuantizedCache(model, rotations)
        logits(model, tokens(), cache)
        unpatch_model(model) if patched_first else patch_model(model, rotations)
        with pytest.raises(RuntimeError, match="make a new cache"):
            logits(model, tokens(), cache)

    def test_a_refused_mask_leaves_the_cache_usable(self, model: PreTrainedModel) -> None:
        patch_model(model, rotations_for(model), EXACT)
        cache, ids = OscarQuantizedCache(model), tokens(1, 30)
        expected = logits(model, ids, OscarQuantizedCache(model), chunks=[20, 10])
        first = logits(model, ids[:, :20], cache, chunks=[20])
        with torch.no_grad():
            for mask in (torch.ones(1, 1, 10, 30, dtype=torch.bool), torch.tensor([[0] + [1] * 29])):
                with pytest.raises(ValueError, match="mask"):
                    model(ids[:, 20:], attention_mask=mask, **{cache_argument(model): cache})
        assert cache.get_seq_length() == 20
        rest = logits(model, ids[:, 20:], cache, chunks=[10])
        assert relative_error(torch.cat([first, rest], 1), expected) < 1e-6

    @pytest.mark.parametrize("attention", ["oscar", "sdpa"])
    def test_an_interrupted_write_is_not_repeated(self, model: PreTrainedModel, attention: str, monkeypatch) -> None:
        patch_model(model, rotations_for(model), SMALL)
        set_attention(model, attention)
        cache, ids = OscarQuantizedCache(model), tokens(1, 60)
        logits(model, ids, cache, chunks=[60])
        broken = {"oscar": "oscar_hf.reading.attend_blocks", "sdpa": "oscar_hf.layer.OscarLayer._extend_columns"}
        monkeypatch.setattr(broken[attention], lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            logits(model, ids[:, :5], cache, chunks=[5])
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match=r"reset"):
            logits(model, ids[:, :5], cache, chunks=[5])

    def test_no_rotations(self, model: PreTrainedModel, tmp_path) -> None:
        with pytest.raises(FileNotFoundError, match="oscar-hf calibrate"):
            patch_model(model, fallback=False)
        with pytest.raises(FileNotFoundError, match="RotationZoo"):
            patch_model(model, tmp_path)
        with pytest.raises(TypeError, match="model or configuration"):
            OscarQuantizedCache("qwen2", rotations_for(model))
        self.unchanged(model)

    def test_a_folder_of_sets_as_the_zoo(self, model: PreTrainedModel, tmp_path) -> None:
        rotations = rotations_for(model)
        rotations.save_pretrained(tmp_path / "tiny")
        with pytest.raises(FileNotFoundError, match="tiny"):
            patch_model(model, "tinny", zoo=tmp_path)
        patch_model(model, "tiny", zoo=tmp_path)
        assert model._oscar_patch.digest == rotations.digest()

    def test_unpatching_what_cannot_be(self, model: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="not patched"):
            unpatch_model(model)
        patch_model(model, rotations_for(model), reversible=False)
        with pytest.raises(ValueError, match="load it again"):
            unpatch_model(model)

    @pytest.mark.parametrize("kind, words", [("t5", "encoder-decoder"), ("deepseek_v3", "latent attention")])
    def test_architectures_by_name(self, kind: str, words: str) -> None:
        from transformers import AutoConfig

        config = AutoConfig.for_model(kind)
        rotations = rotations_for(tiny_model())
        with pytest.raises(ValueError, match=f"{kind}.*{words}"):
            OscarQuantizedCache(config, rotations)

    def test_gradients(self, model: PreTrainedModel) -> None:
        patch_model(model, rotations_for(model))
        cache = OscarQuantizedCache(model)
        with pytest.raises(RuntimeError, match="no_grad"):
            model(tokens(), **{cache_argument(model): cache})
        assert cache.get_seq_length() == 0

    def test_masks_of_four_dimensions(self, model: PreTrainedModel) -> None:
        patch_model(model, rotations_for(model))
        with torch.no_grad(), pytest.raises(ValueError, match="4D"):
            mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
            model(tokens(2, 8), attention_mask=mask, **{cache_argument(model): OscarQuantizedCache(model)})

    def test_a_forward_that_failed_halfway(self, model: PreTrainedModel, monkeypatch) -> None:
        patch_model(model, rotations_for(model))
        cache, broken = OscarQuantizedCache(model), model.model.layers[1].mlp
        monkeypatch.setattr(broken, "forward", lambda _: (_ for _ in ()).throw(OSError("out of memory")))
        with torch.no_grad():
            with pytest.raises(OSError):
                model(tokens(), **{cache_argument(model): cache})
            monkeypatch.undo()
            with pytest.raises(RuntimeError, match=r"failed.*reset"):
                model(tokens(), **{cache_argument(model): cache})
            cache.reset()
            model(tokens(), **{cache_argument(model): cache})


def test_offloaded_weights_are_rotated_online(tmp_path) -> None:
    model, ids = tiny_model("qwen2"), tokens()
    expected = logits(model, ids, DynamicCache(config=model.config))
    rotations = rotations_for(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.v_proj.weight.device.type == "meta"
    patch_model(model, rotations)
    assert model._oscar_patch.absorbed == []
    assert relative_error(logits(model, ids, OscarQuantizedCache(model, config=EXACT)), expected) < 1e-5
    unpatch_model(model)
    assert relative_error(logits(model, ids, DynamicCache(config=model.config)), expected) < 1e-5
