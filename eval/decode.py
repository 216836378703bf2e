"""Time per decoded token and bytes of a cache, beside DynamicCache, in the shape of any model.

    python -m eval.decode MODEL --context 4096

Weights play no part in speed, so a configuration is enough: MODEL may be a directory or Hub id (only its configuration
is read) or a GGUF file. Both caches run under the same model in one process, step by step in turn; the figures are
medians.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from eval.record import save_results
from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, patch_model
from oscar_hf._compat import architecture, cache_argument, cache_layers, text_config
from oscar_hf.loading import display_name, load_model


@torch.no_grad()
def fill(model: PreTrainedModel, cache: Any, tokens: torch.Tensor, chunk: int = 1024) -> None:
    """Prefill in chunks."""
    for part in tokens.split(chunk):
        model(part[None], logits_to_keep=1, **{cache_argument(model): cache})


@torch.no_grad()
def step(model: PreTrainedModel, cache: Any, token: torch.Tensor) -> float:
    """Seconds of one decode step."""
    start = time.perf_counter()
    model(token.view(1, 1), **{cache_argument(model): cache})
    if token.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(
    model: Annotated[str, typer.Argument(help="Directory, Hub id or GGUF file.")],
    context: Annotated[int, typer.Option(help="Tokens before the first timed step.")] = 4096,
    steps: Annotated[int, typer.Option(help="Timed steps of each cache.")] = 40,
    dtype: str = "float32",
    out: Annotated[Path, typer.Option(help="JSON file for the results.")] = Path("eval/results/decode.json"),
) -> None:
    """Measure one model shape at one context length."""
    if model.endswith(".gguf"):
        network, _ = load_model(model, dtype=dtype)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        config = AutoConfig.from_pretrained(model)
        with torch.device(device):
            network = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    config = text_config(network)
    _, full = cache_layers(config)
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (context + steps + 3,), device=network.device)
    # one model serves both: with DynamicCache, a patched model runs stock attention on exact keys
    stock = DynamicCache(config=config)
    fill(network, stock, tokens[:context])
    patch_model(network, RotationSet.without_data(full, architecture(config)["head_dim"]), OscarConfig(), check=False)
    oscar = OscarQuantizedCache(network)
    fill(network, oscar, tokens[:context])
    times: dict[str, list[float]] = {"DynamicCache": [], "OSCAR": []}
    for token in tqdm(tokens[context:], desc="Decoding", unit=" step"):
        for name, cache in (("DynamicCache", stock), ("OSCAR", oscar)):
            times[name].append(step(network, cache, token))
    seconds = {name: statistics.median(values[3:]) for name, values in times.items()}
    memory = oscar.memory()
    table = Table(
        "cache", "ms per token", "MB", "bits per element", title=f"{display_name(model)}, {context} tokens, {dtype}"
    )
    bits = 8 * torch.finfo(getattr(torch, dtype)).bits / 8
    table.add_row("DynamicCache", f"{1e3 * seconds['DynamicCache']:.1f}", f"{memory.dense / 1e6:.1f}", f"{bits:g}")
    table.add_row("OSCAR", f"{1e3 * seconds['OSCAR']:.1f}", f"{memory.total / 1e6:.1f}", f"{memory.bits:.2f}")
    Console().print(table)
    save_results(
        out,
        {
            "model": display_name(model),
            "context": context,
            "dtype": dtype,
            "steps": steps,
            "seconds_per_token": seconds,
            "ratio": seconds["OSCAR"] / seconds["DynamicCache"],
            "memory": memory.to_dict(),
        },
    )


if __name__ == "__main__":
    typer.run(main)
