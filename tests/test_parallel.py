"""A model over several processes by tensor parallelism, and over several devices by accelerate's placement."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import parallel_worker
import pytest
import torch
from parallel_worker import CONFIG, TOKENS, answers, logits
from tiny import tiny_config, tiny_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from eval.speed.common import random_rotations
from oscar_hf import OscarQuantizedCache, RotationSet, patch_model, unpatch_model
from oscar_hf.parallel import tensor_parallel

ROOT = Path(__file__).parents[1]


def rotations_for(model: PreTrainedModel) -> RotationSet:
    """Transforms of every kind, each KV head with its own."""
    rotations = random_rotations(model)
    generator = torch.Generator().manual_seed(3)
    for layer in rotations.layers.values():
        heads, size, _ = layer.k_rotation.shape
        object.__setattr__(layer, "v_rotation", torch.linalg.qr(torch.randn(heads, size, size, generator=generator)).Q)
    return rotations


def checkpoint(folder: Path, family: str, **changes: object) -> PreTrainedModel:
    model = tiny_model(family, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2, **changes)
    model.save_pretrained(folder)
    rotations_for(model).save_pretrained(folder / "rotations")
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def torchrun(count: int, *arguments: object) -> None:
    """Run the worker in so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }  # fmt: skip
    command = [sys.executable, parallel_worker.__file__, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_together_equal_one_process(tmp_path: Path, ranks: int) -> None:
    folders = {
        "qwen2": tmp_path / "colwise",
        "minimax_m2": tmp_path / "gathered",
    }  # biases; heads kept whole by the plan
    expected = {}
    for family, folder in folders.items():
        model = checkpoint(folder, family)
        expected[family] = answers(model, RotationSet.from_pretrained(folder / "rotations"))
    (folders["qwen2"] / "colwise").touch()
    torchrun(ranks, *folders.values())
    for family, folder in folders.items():
        for rank in range(ranks):
            found = torch.load(folder / f"rank{rank}.pt", weights_only=True)
            assert found["absorbed"].tolist() == expected[family]["absorbed"].tolist() == [0, 1]
            assert int(found["heads"]) == (4 // ranks if family == "qwen2" else 4)
            for name in ("unpatched", "patched"):
                error = (found[name] - expected[family][name]).norm() / expected[family][name].norm()
                assert error < 2e-3, (family, name, rank, error)  # sums in another order move a code now and then
            assert torch.equal(found["generated"], expected[family]["generated"])


@pytest.mark.parametrize(
    ("family", "size", "words"),
    [
        ("qwen3", 4, "num_key_value_heads=2.*over 4.*Start 2"),
        ("qwen3", 3, "num_attention_heads=4 and"),
        ("phi3", 3, "=4"),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_loading(family: str, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tensor_parallel(tiny_config(family), size)


def test_one_process_needs_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor_parallel(tiny_config("qwen3"), 1) == {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert tensor_parallel(tiny_config("qwen3")).keys() & {"distributed_config", "tp_plan"}
    config = tiny_config("qwen3")
    config.base_model_tp_plan = None
    with pytest.raises(ValueError, match="no tensor-parallel plan"):
        tensor_parallel(config)


def test_a_cache_from_the_configuration_meets_some_of_the_heads() -> None:
    model = tiny_model("qwen3")
    cache = OscarQuantizedCache(model.config, rotations_for(model), CONFIG)
    with pytest.raises(ValueError, match="make the cache from the model"):
        cache.update(torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 16), 0)


# Placement


def test_layers_on_cpu_and_disk(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", "qwen3")
    rotations = RotationSet.from_pretrained(tmp_path / "model" / "rotations")
    expected = logits(patch_model(model, rotations, CONFIG), OscarQuantizedCache(model))
    places = dict.fromkeys(
        ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0"), "cpu"
    )
    placed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map={**places, "model.layers.1": "disk"}, offload_folder=tmp_path / "disk"
    ).eval()
    assert placed.model.layers[1].self_attn.v_proj.weight.device.type == "meta"
    patch_model(placed, rotations, CONFIG)
    assert placed._oscar_patch.absorbed == [0]  # what lies on a disk is rotated as it is used
    cache = OscarQuantizedCache(placed)
    assert (logits(placed, cache) - expected).norm() / expected.norm() < 2e-3
    for layer in cache.oscar_layers:
        assert list(layer.transform._placed) == [torch.device("cpu")]
        assert all(buffer.device.type == "cpu" for buffer in layer.buffers())
    generated = placed.generate(TOKENS, max_new_tokens=6, do_sample=False)
    assert torch.equal(generated, model.generate(TOKENS, max_new_tokens=6, do_sample=False))
    unpatch_model(placed)


class Allocated(TorchDispatchMode):
    """Bytes of all storages that operations have made and that are still held; and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self.held = {key: pair for key, pair in self.held.items() if not pair[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return result


@pytest.mark.parametrize("reversible", [False, True])
def test_patching_holds_no_second_copy_of_the_weights(reversible: bool) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=8, head_dim=64)
    layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    rotations = RotationSet.without_data(set(range(8)), 64)
    with Allocated() as allocated:
        patch_model(model, rotations, CONFIG, reversible=reversible, check=False)
    assert model._oscar_patch.absorbed == list(range(8))
    copies = sum(copy.untyped_storage().nbytes() for _, copy in model._oscar_patch.saved)
    assert bool(copies) is reversible
    assert allocated.peak < copies + layer


def test_a_failed_check_rotates_back_where_nothing_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    before = [parameter.clone() for parameter in model.parameters()]

    def fail(*_: object) -> None:
        raise RuntimeError("other logits")

    monkeypatch.setattr("oscar_hf.patch._check", fail)
    with pytest.raises(RuntimeError, match="other logits"):
        patch_model(model, rotations_for(model), CONFIG, reversible=False)
    assert not hasattr(model, "_oscar_patch")
    for parameter, original in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, original, rtol=1e-5, atol=1e-6)
