"""plan: what is reckoned from a configuration is what a model and its caches then take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from typer.testing import CliRunner

from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, patch_model, plan
from oscar_hf._compat import architecture, cache_argument, cache_layers, text_config
from oscar_hf.cli import app
from oscar_hf.gpus import GPUS, find_gpu
from oscar_hf.memory import tensors_in
from oscar_hf.shape import model_shape, read_config
from oscar_hf.storage import Tiers, grown

ARCHITECTURES = Path(__file__).parent / "fixtures" / "architectures"
CONFIG = OscarConfig("hadamard", sink_tokens=4, recent_tokens=16)
CHUNK, CONTEXT, NEW = 40, 90, 3


def held_bytes(cache: Any) -> int:
    """What all tensors of a cache occupy, each storage once."""
    if isinstance(cache, OscarQuantizedCache):
        return cache.memory().total
    storages = [tensor.untyped_storage() for layer in cache.layers for tensor in tensors_in(vars(layer))]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def run(model: PreTrainedModel, cache: Any, batch: int = 2, new: int = NEW) -> Any:
    """A prompt in chunks, then single tokens."""
    tokens = torch.randint(3, 120, (batch, CONTEXT + new))
    with torch.no_grad():
        for part in (*tokens[:, :CONTEXT].split(CHUNK, 1), *tokens[:, CONTEXT:].split(1, 1)):
            model(part, **{cache_argument(model): cache})
    return cache


def patched(family: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    model = tiny_model(family, dtype=dtype)
    facts = architecture(model.config)
    rotations = RotationSet.without_data(cache_layers(model.config)[1], facts["head_dim"])
    return patch_model(model, rotations, CONFIG, check=False)


def planned(family: str, **changes: Any) -> Any:
    settings = {"batch": 2, "new_tokens": NEW, "chunk": CHUNK, "config": CONFIG, "dtype": "bfloat16", **changes}
    return plan(tiny_config(family), CONTEXT, **settings)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt_oss", "glm4_moe", "qwen3_next"])
def test_weights_and_caches_take_what_was_planned(family: str) -> None:
    found = planned(family)
    stock = tiny_model(family, dtype=torch.bfloat16)
    weights = {t.untyped_storage().data_ptr(): t for t in (*stock.parameters(), *stock.buffers())}
    measured = sum(t.untyped_storage().nbytes() for t in weights.values())
    assert found.oscar.weights == pytest.approx(measured, rel=1e-2)  # `to` has rounded float32 buffers
    assert found.bf16.cache == held_bytes(run(stock, DynamicCache(config=stock.config)))

    model = patched(family)
    memory = run(model, OscarQuantizedCache(model)).memory()
    for name in ("sink", "recent", "history", "slack", "other", "total"):
        expected = getattr(found.oscar, "cache" if name == "total" else name)
        assert expected == getattr(memory, name), name


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_fixed_storage(family: str) -> None:
    found = planned(family, fixed=True)
    model = patched(family)
    assert run(model, OscarQuantizedCache(model, max_cache_len=CONTEXT + NEW)).memory().total == found.oscar.cache
    stock = tiny_model(family, dtype=torch.bfloat16)
    static = run(stock, StaticCache(config=stock.config, max_cache_len=CONTEXT + NEW))
    assert held_bytes(static) == pytest.approx(found.bf16.cache, abs=64)


@pytest.mark.parametrize("chunk", [None, 7, 64])
def test_growth_depends_on_how_the_prompt_comes(chunk: int | None) -> None:
    tiers = Tiers(CONFIG, torch.empty(1, 2, 0, 16))
    states = torch.randn(1, 2, 700, 16)
    for part in states.split(chunk or 700, 2):
        tiers.append(slice(None), part, part)
    for _ in range(30):
        tiers.append(slice(None), states[:, :, :1], states[:, :, :1])
    found = plan(tiny_config("qwen3"), 700, chunk=chunk, new_tokens=30, config=CONFIG, dtype="float32")
    row = 3 * 2 * 2 * (16 // 4 + 4)
    assert found.oscar.history + found.oscar.slack == row * tiers.history.capacity
    assert found.oscar.slack < 0.08 * found.oscar.history + 32 * row


def test_grown_is_what_reserve_does() -> None:
    tiers = Tiers(CONFIG, torch.empty(1, 1, 0, 16))
    capacity = 0
    for tokens in (0, 1, 32, 33, 500, 501, 400):
        capacity = grown(capacity, tokens)
        tiers.history.reserve(tokens)
        assert tiers.history.capacity == capacity >= tokens


@pytest.mark.parametrize("name", sorted(path.stem for path in ARCHITECTURES.glob("*.json")))
def test_models_of_the_zoo(name: str) -> None:
    sizes = {  # of the published models, in billions of parameters
        "glm-4.7-fp8": 353, "minimax-m2.7": 229, "qwen3-30b-a3b": 30.5, "qwen3-32b": 32.8,
        "qwen3-4b-thinking-2507": 4.0, "qwen3-8b": 8.2, "qwen3-8b-longbench": 8.2, "qwen3.5-35b-a3b": 34.7,
    }  # fmt: skip
    found = plan(str(ARCHITECTURES / f"{name}.json"), 131072, 4, gpu="h200:4")
    if name in sizes:
        assert found.parameters / 1e9 == pytest.approx(sizes[name], rel=0.02)
    fp8 = name in ("glm-4.7-fp8", "minimax-m2.7")
    each = 1 if fp8 else 2
    total = found.oscar.weights * 4
    if (
        transformers.__version__ < "5.24" and total > 1.05 * each * found.parameters
    ):  # plans that keep embeddings whole
        config = text_config(AutoConfig.from_pretrained(ARCHITECTURES / f"{name}.json"))
        total -= 3 * 2 * config.vocab_size * config.hidden_size
    assert total == pytest.approx(each * found.parameters, rel=0.05)
    assert found.oscar.total < found.bf16.total and found.oscar.milliseconds < found.bf16.milliseconds
    assert found.oscar.largest_batch > 4 * found.bf16.largest_batch


def test_fp8_takes_what_transformers_makes_of_it() -> None:
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config = tiny_config("qwen3_moe", hidden_size=256, intermediate_size=384, moe_intermediate_size=128)
    quantization = FineGrainedFP8Config(modules_to_not_convert=["lm_head", "mlp.gate"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        replace_with_fp8_linear(model, quantization.modules_to_not_convert, quantization)
    real = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    config.quantization_config = {**quantization.to_dict(), "quant_method": "fp8"}
    assert model_shape(config, "bfloat16").weights == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.19),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4.13),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.03),
        ({"quant_method": "gguf"}, 16),
    ],
)
def test_bits_of_quantised_weights(quantization: dict[str, Any], bits: float) -> None:
    config = tiny_config("llama", hidden_size=1024, intermediate_size=1024, head_dim=256)
    plain = model_shape(config, "bfloat16")
    config.quantization_config = quantization
    linear = 3 * (1024 * 1024 * 5 + 1024 * 512 * 2)
    assert 16 - 8 * (plain.weights - model_shape(config, "bfloat16").weights) / linear == pytest.approx(bits, abs=0.02)


def test_unknown_quantisation_is_named_and_can_be_overruled() -> None:
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "hqq"}
    with pytest.raises(ValueError, match="'hqq'.*weight_bytes"):
        plan(config, 1000)
    assert plan(config, 1000, weight_bytes=123_456).oscar.weights == 123_456


def test_limits_fit_and_one_more_does_not() -> None:
    found = plan(str(ARCHITECTURES / "qwen3-8b.json"), 32768, 2, gpu="4090")
    usable = found.gpu.usable
    for kind in ("oscar", "bf16"):
        limits = getattr(found, kind)
        assert found.footprint(kind, context=limits.largest_context).total <= usable
        assert found.footprint(kind, context=limits.largest_context + 4096).total > usable
        if limits.largest_batch:
            assert found.footprint(kind, batch=limits.largest_batch).total <= usable
        assert found.footprint(kind, batch=limits.largest_batch + 1).total > usable


def test_roofline_of_qwen3_8b() -> None:
    """By hand: 15.1 GB of weights, and 36 layers of 8 heads of 128 channels in 16 or 2.25 bits, at 4.8 TB/s."""
    found = plan(str(ARCHITECTURES / "qwen3-8b.json"), 100_000, new_tokens=0, gpu="h200")
    elements = 2 * 36 * 8 * 128 * 100_000
    assert found.bf16.milliseconds == pytest.approx((15.14e9 + 2 * elements) / 4.8e9, rel=0.01)
    assert found.oscar.milliseconds == pytest.approx((15.14e9 + elements * 2.25 / 8) / 4.8e9, rel=0.01)


def test_several_gpus() -> None:
    config = tiny_config("qwen3", num_hidden_layers=4, vocab_size=64)
    one, two = (plan(config, 131072, gpu=f"h200:{count}") for count in (1, 2))
    assert two.split == "heads"
    assert two.oscar.cache == pytest.approx(one.oscar.cache / 2, rel=1e-3)
    assert two.oscar.weights == pytest.approx(one.oscar.weights / 2, rel=0.15)  # embeddings are not split everywhere
    assert two.oscar.milliseconds == pytest.approx(one.oscar.milliseconds / 2, rel=0.03)
    layers = plan(config, 131072, gpu="h200:2", split="layers")
    assert layers.split == "layers" and layers.oscar.milliseconds == one.oscar.milliseconds
    assert plan(config, 131072, gpu="h200:3").split == "layers"  # 2 heads
    with pytest.raises(ValueError, match="multiple of GPUs"):
        plan(config, 131072, gpu="h200:3", split="tensor")
    gathered = plan(str(ARCHITECTURES / "minimax-m2.7.json"), 131072, gpu="h200:2")
    assert gathered.split == "weights" and "whole cache" in " ".join(gathered.notes)


@pytest.mark.parametrize("name", GPUS)
def test_gpus_by_name(name: str) -> None:
    assert find_gpu(name).gib > 10 and find_gpu(f"{name}:3").count == 3


@pytest.mark.parametrize("name", ["h201", "h200:0", "h200:x", "h200:-1", "GiB@5", ""])
def test_gpus_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="known here"):
        find_gpu(name)


def test_a_gpu_of_ones_own() -> None:
    gpu = find_gpu("48GiB@864:4")
    assert (gpu.gib, gpu.gbps, gpu.count) == (48, 864, 4)
    assert find_gpu("48gib").gbps == 0
    assert plan(tiny_config("llama"), 1000, gpu="48GiB").oscar.milliseconds is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context": 0}, "context=0"),
        ({"batch": True}, "batch=True"),
        ({"chunk": 0}, "chunk=0"),
        ({"new_tokens": -1}, "new_tokens=-1"),
        ({"split": "rows"}, "split='rows'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"config": OscarConfig(group_size=12)}, "group_size=12"),
    ],
)
def test_bad_numbers(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(tiny_config("llama"), **changes)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    (tmp_path / "b.json").write_text('{"model_type": "nonsense"}')
    for name in ("a", "b"):
        with pytest.raises(ValueError, match="no configuration"):
            read_config(str(tmp_path / f"{name}.json"))
    with pytest.raises(FileNotFoundError):
        read_config(str(tmp_path / "c.json"))
    with pytest.raises(FileNotFoundError):
        read_config(str(tmp_path / "c.gguf"))


def test_architectures_that_are_refused() -> None:
    with pytest.raises(ValueError, match="latent attention"):
        plan(AutoConfig.for_model("deepseek_v3"), 1000)


# Command line


def test_command_prints_a_table_json_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, picture = tmp_path / "model", tmp_path / "memory.png"
    tiny_config("qwen3").save_pretrained(folder)
    command = ["plan", str(folder), "--context", "4K", "--batch", "2", "--gpu", "4090:2"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "largest context at batch 2" in shown.output and "2 x 4090" in shown.output
    result = CliRunner().invoke(app, [*command, "--json", "--plot", str(picture)])
    facts = json.loads(result.stdout)
    assert facts == json.loads(json.dumps(plan(str(folder), 4096, 2, gpu="4090:2").to_dict()))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_refuses_in_one_line() -> None:
    for arguments, words in ((["--gpu", "h201"], "'h201' is no GPU"), (["--context", "many"], "no number of tokens")):
        result = CliRunner().invoke(app, ["plan", str(ARCHITECTURES / "qwen3-8b.json"), *arguments])
        assert result.exit_code and words in " ".join(result.output.split()), result.output


def test_rotations_fitted_to_each_row() -> None:
    config = CONFIG.replace(recipe="prompt")
    model = tiny_model("llama", dtype=torch.bfloat16)
    patch_model(model, "prompt", config, check=False)
    memory = run(model, OscarQuantizedCache(model)).memory()
    assert (
        planned("llama", config=config).oscar.rotations == memory.rotations + 3 * 4 * 16 * 16
    )  # and a V in each layer
