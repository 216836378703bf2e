"""Several processes that share a model by tensor parallelism, started as torchrun would, for test_parallel."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, calibrate, patch_model, unpatch_model
from oscar_hf._compat import cache_argument
from oscar_hf.parallel import local, tensor_parallel

CONFIG = OscarConfig("balanced", sink_tokens=4, recent_tokens=8)
TOKENS = torch.randint(3, 120, (2, 60), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: PreTrainedModel, cache: OscarQuantizedCache) -> Tensor:
    """Of a prompt in two chunks, of which one row starts with padding, and of single steps."""
    mask = torch.ones_like(TOKENS)
    mask[1, :5] = 0
    position = mask.cumsum(1).sub(1).clamp_min(0)
    parts, start = [], 0
    for count in (40, 12, *[1] * 8):
        span = slice(start, start + count)
        settings = {"attention_mask": mask[:, : span.stop], "position_ids": position[:, span]}
        parts.append(model(TOKENS[:, span], **settings, **{cache_argument(model): cache}).logits)
        start = span.stop
    return torch.cat(parts, 1)[:, 5:]


def answers(model: PreTrainedModel, rotations: RotationSet) -> dict[str, Tensor]:
    """What one process and several must agree on; the model ends as it began."""
    before = [local(parameter).clone() for parameter in model.parameters()]
    found = {"unpatched": logits(model, OscarQuantizedCache(model, rotations, CONFIG))}
    patch_model(model, rotations, CONFIG)
    cache = OscarQuantizedCache(model)
    found["absorbed"] = torch.tensor(model._oscar_patch.absorbed)
    found["patched"] = logits(model, cache)
    found["generated"] = model.generate(TOKENS, max_new_tokens=6, do_sample=False)
    found["heads"] = torch.tensor(cache.oscar_layers[0].tiers.like.shape[1])
    unpatch_model(model)
    assert all(map(torch.equal, before, (local(parameter) for parameter in model.parameters())))
    return found


def rank(number: int, folders: list[Path]) -> None:
    """All checkpoints in turn."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, **tensor_parallel(str(folder))).eval()
        rotations = RotationSet.from_pretrained(folder / "rotations")
        torch.save(answers(model, rotations), folder / f"rank{number}.pt")
        if (folder / "colwise").exists():
            try:
                calibrate(model, [TOKENS[0]], progress=False)
            except ValueError as error:
                assert "one process" in str(error)
            else:
                raise AssertionError("calibrated with some of the heads")
    torch.distributed.destroy_process_group()


def main(folders: list[Path]) -> int:
    """Start all ranks, which share what is imported; 1 if one fails."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank, args=(number, folders)) for number in range(int(os.environ["WORLD_SIZE"]))]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
        ranks[0].join(0.1)
    for process in ranks:
        process.terminate()
        process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
