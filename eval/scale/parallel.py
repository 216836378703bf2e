"""A model over several GPUs: equal to one, what it costs, and what a failing rank does.

    python -m eval.scale.parallel all --gpus 2 --out parallel.json

starts `torchrun` for what needs it. Without GPUs the same runs on the CPU, by gloo, at toy size (`--model tiny
--contexts 1K`). Checkpoints are written here: a small random one, and one of the large shape whose file is all holes,
filled with random weights once each process holds its part.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from eval.scale.common import Results, fill, prefill
from eval.speed import common
from eval.speed.common import DEVICE, attempt, cache_bytes, decode, make_cache, numbers, release
from oscar_hf import OscarConfig, OscarQuantizedCache, patch_model, plan
from oscar_hf._compat import cache_argument
from oscar_hf.gpus import GPUS
from oscar_hf.parallel import local, tensor_parallel

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 2048,
}  # fmt: skip
PATIENCE_S = 180
app = typer.Typer()


# Checkpoints


def hollow_checkpoint(config: Any, folder: Path) -> None:
    """A safetensors checkpoint of zeros that takes no room on a disk."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        size = 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config.dtype = "bfloat16"
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


@torch.no_grad()
def fill_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Random weights in place, in every process its own part."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            local(parameter).normal_(0, 0.02)
        else:
            local(parameter).fill_(1)
    return model.eval()


def load(folder: str, how: str) -> PreTrainedModel:
    """The checkpoint over all GPUs, `"tensor"` or `"layers"`, or on `"one"`."""
    settings: dict[str, Any] = {"one": {"device_map": DEVICE.type}, "tensor": tensor_parallel(folder)}.get(how, {})
    if how == "layers":
        settings = {"device_map": "balanced" if DEVICE.type == "cuda" else "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **settings).eval()


# Equality


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, batch: int, steps: int) -> Tensor:
    """Of a prompt of 512 tokens, rows but the first left-padded, and of single steps: [steps + 1, B, vocabulary]."""
    generator = torch.Generator().manual_seed(batch)
    prompt = torch.randint(3, model.config.vocab_size, (batch, 512), generator=generator)
    following = torch.randint(3, model.config.vocab_size, (steps, batch, 1), generator=generator)
    device = model.get_input_embeddings().weight.device
    mask = torch.ones(batch, 512 + steps, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : 40 * row] = 0
    position = mask.cumsum(1).sub(1).clamp_min(0)
    found = []
    for step in range(steps + 1):
        tokens = following[step - 1] if step else prompt
        seen = 512 + step
        output = model(
            tokens.to(device),
            attention_mask=mask[:, :seen].to(device),
            position_ids=position[:, seen - tokens.shape[1] : seen].to(device),
            logits_to_keep=1,
            **{cache_argument(model): cache},
        )
        found.append(output.logits[:, -1].float().cpu())
    return torch.stack(found)


def all_logits(model: PreTrainedModel, steps: int) -> dict[str, Tensor]:
    """Of the small model with each kind of cache and batch."""
    found = {f"dynamic-{batch}": logits(model, DynamicCache(config=model.config), batch, steps) for batch in (1, 4)}
    patch_model(model, common.random_rotations(model))
    config = OscarConfig("balanced", sink_tokens=16, recent_tokens=64)
    for name, settings in (("16 bits", {"bits": 16}), ("2 bits", {})):
        for batch in (1, 4):
            cache = OscarQuantizedCache(model, config=config.replace(**settings))
            found[f"{name}-{batch}"] = logits(model, cache, batch, steps)
    return found


@app.command()
def equality(folder: str, how: str, steps: int, out: Path) -> None:
    """Save the small model's logits; one process of them."""
    found = all_logits(load(folder, how), steps)
    if RANK == 0:
        torch.save(found, out)
    _leave()


# Speed


@app.command()
def speed(folder: str, how: str, contexts: str, out: Path) -> None:
    """Time a token and count memory at each context, with BF16 and OSCAR caches, in this process and all others."""
    model = fill_weights(load(folder, how))
    rows = []
    for kind in ("dynamic", "oscar"):
        release()
        if kind == "oscar":
            common.reset_peak()
            before = _memory()
            common.patch(model)
            rows.append({"how": how, "kind": "patch", "over_the_model": _over(before)})
        for context in numbers(contexts):
            chunk = min(1024, context // 2)

            def measure(kind: str = kind, context: int = context, chunk: int = chunk) -> dict[str, Any]:
                cache = make_cache(kind, model, context)
                fill(cache, model, 1, context - chunk, chunk)
                common.reset_peak()
                device = model.get_input_embeddings().weight.device
                prefill(model, cache, torch.zeros(1, chunk, dtype=torch.long, device=device), chunk, context - chunk)
                row = decode(model, model, cache, 1, context, steps=10, repeats=3)
                row.pop("peak_bytes")
                return {**row, "cache": cache_bytes(cache), "transfers": transfers(model, cache, context + 35)}

            rows.append({"how": how, "kind": kind, "context": context, **attempt(measure), "peaks": _peaks()})
            release()
    if RANK == 0:
        out.write_text(json.dumps(rows))
    _leave()


@torch.no_grad()
def transfers(model: PreTrainedModel, cache: Any, position: int) -> dict[str, int] | None:
    """Copies between devices, and from and to the host, in one step."""
    if DEVICE.type != "cuda":
        return None
    device = model.get_input_embeddings().weight.device
    token, where = (torch.full((1, 1), value, dtype=torch.long, device=device) for value in (0, position))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(token, position_ids=where, attention_mask=None, use_cache=True, **{cache_argument(model): cache})
        torch.cuda.synchronize()
    copies = ("Memcpy PtoP", "Memcpy HtoD", "Memcpy DtoH")
    return {name: sum(e.count for e in profile.key_averages() if e.key.startswith(name)) for name in copies}


def _memory() -> list[int]:
    return [torch.cuda.memory_allocated(index) for index in range(_devices())]


def _devices() -> int:
    return torch.cuda.device_count() if DEVICE.type == "cuda" else 0


def _over(before: list[int]) -> list[int]:
    return [torch.cuda.max_memory_allocated(index) - held for index, held in enumerate(before)]


def _peaks() -> list[int]:
    """The most that each GPU held: those of this process, and of the other ranks."""
    mine = [torch.cuda.max_memory_allocated(index) for index in range(_devices())]
    if not dist.is_initialized():
        return mine
    all_of_them: list[Any] = [None] * WORLD
    dist.all_gather_object(all_of_them, max(mine, default=0))
    return all_of_them


# A rank that fails


@app.command()
def failing(folder: str) -> None:
    """The last rank refuses its own prompt in the middle of decoding; the others must end too."""
    model = load(folder, "tensor")
    patch_model(model, common.random_rotations(model))
    cache = OscarQuantizedCache(model)
    tokens = torch.full((1, 64), 5, dtype=torch.long, device=model.device)
    for step in range(64):
        if RANK == WORLD - 1 and step == 8:
            raise RuntimeError(f"rank {RANK} fails on purpose")
        with torch.no_grad():
            model(tokens if step == 0 else tokens[:, :1], **{cache_argument(model): cache})
    _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# All of it


def launch(count: int, *arguments: object, patience: float = 600) -> subprocess.CompletedProcess[str]:
    """A command of this module, in `count` processes, or in one that sees all GPUs."""
    module = ["-m", "eval.scale.parallel", *map(str, arguments)]
    if count > 1:
        module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *module]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}
    command = [sys.executable, *module]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        words = process.communicate(timeout=patience)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # ranks too, which torchrun started
        process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, words, "")


def _tail(done: subprocess.CompletedProcess[str]) -> str | None:
    return None if done.returncode == 0 else (done.stdout + done.stderr)[-1500:]


@app.command("all")
def run_all(
    gpus: int = 2,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(common.SHAPES)}.")] = "qwen3-32b",
    contexts: str = "32K,100K",
    parts: str = "equality,failing,speed",
    steps: Annotated[int, typer.Option(help="Single steps whose logits are compared.")] = 64,
    out: Path = Path("parallel.json"),
) -> None:
    """Run the parts named, each in processes of its own."""
    results = Results(out, gpus=gpus, model=model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = folder / "small"
        settings = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings), dtype=dtype).save_pretrained(small)
        if "equality" in parts:
            found = {}
            for how, count in (("one", 1), ("tensor", gpus), ("layers", 1)):
                file = folder / f"{how}.pt"
                done = launch(count, "equality", small, how, steps, file)
                if done.returncode:
                    results.add(part="equality", how=how, error=_tail(done))
                    continue
                found[how] = torch.load(file, weights_only=True)
                for key, expected in found.get("one", {}).items():
                    difference = (found[how][key] - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
                    agree = (found[how][key].argmax(-1) == expected.argmax(-1)).float().mean().item()
                    row = {"prefill": difference[0].item(), "decode": difference[1:].max().item(), "same_token": agree}
                    results.add(part="equality", how=how, cache=key, **row)
        if "failing" in parts:
            start = time.perf_counter()
            try:
                done = launch(gpus, "failing", small, patience=PATIENCE_S)
                words = done.stdout + done.stderr
                facts = {"ended": True, "status": done.returncode, "named": "fails on purpose" in words}
            except subprocess.TimeoutExpired:
                facts = {"ended": False}
            results.add(part="failing", seconds=time.perf_counter() - start, **facts)
        if "speed" in parts:
            config = common.model_config(model)
            hollow_checkpoint(config, folder / "large")
            gpu = next(
                (key for key in GPUS if DEVICE.type == "cuda" and key in torch.cuda.get_device_name().lower()), ""
            )
            for how, count in (("tensor", gpus), ("layers", 1), ("one", 1)):
                file = folder / f"speed-{how}.json"
                done = launch(count, "speed", folder / "large", how, contexts, file)
                if done.returncode:
                    results.add(part="speed", how=how, error=_tail(done))
                    continue
                for row in json.loads(file.read_text()):
                    if "context" in row and gpu:
                        split = {"one": "auto", "tensor": "tensor", "layers": "layers"}[how]
                        number = 1 if how == "one" else gpus
                        made = plan(
                            config, row["context"], gpu=f"{gpu}:{number}", split=split, new_tokens=35, chunk=1024
                        )
                        said = made.oscar if row["kind"] == "oscar" else made.bf16
                        row |= {"planned": said.total, "roofline_ms": said.milliseconds}
                    results.add(part="speed", **row)


if __name__ == "__main__":
    app()
