"""KL of 2-bit caches to the unquantised model, recipe by recipe: the table of the README.

    python -m eval.reproduce MODEL --calibration essays_calibration.txt --text wikitext2_test.txt

Each query reads the history quantised behind its own recent window, as when decoding token by token
(`exact_chunks=False`), so one forward over the text measures every position. KL is averaged over the last half of
each sequence, in nats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.record import save_results
from oscar_hf import OscarConfig, OscarQuantizedCache, RotationSet, patch_model, unpatch_model
from oscar_hf._compat import architecture, cache_argument, text_config
from oscar_hf.calibration import collect_statistics, fit_layer
from oscar_hf.config import Recipe, get_recipe
from oscar_hf.loading import display_name, load_model

RECIPES = {
    "naive INT2": get_recipe("naive"),
    "Hadamard, no clip": get_recipe("hadamard"),
    "oscar (published)": get_recipe("oscar"),
    "balanced": get_recipe("balanced"),
    "search": get_recipe("search"),
}


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: Tensor, first: int, cache: Any = None) -> Tensor:
    """Log-probabilities [n - first, vocabulary] of the positions from `first` on."""
    extra = {} if cache is None else {cache_argument(model): cache}
    logits = model(ids[None], logits_to_keep=len(ids) - first, use_cache=cache is not None, **extra).logits[0]
    return logits.float().log_softmax(-1)


def quantised_kl(
    model: PreTrainedModel,
    rotations: RotationSet,
    config: OscarConfig,
    sequences: list[Tensor],
    expected: list[Tensor],
) -> tuple[float, float]:
    """Mean KL to `expected`, and perplexity, of the model with a cache of this configuration."""
    patch_model(model, rotations, config, check=False)
    kl = loss = 0.0
    for ids, reference in zip(sequences, expected, strict=True):
        first = len(ids) - len(reference)
        got = log_probabilities(model, ids, first, OscarQuantizedCache(model))
        kl += (reference.exp() * (reference - got)).sum(-1).mean().item() / len(sequences)
        loss -= got[:-1].gather(1, ids[first + 1 :, None]).mean().item() / len(sequences)
    unpatch_model(model)
    return kl, float(torch.tensor(loss).exp())


def main(
    model: Annotated[str, typer.Argument(help="Directory, Hub id or GGUF file.")],
    calibration: Annotated[Path, typer.Option(help="Text to calibrate on.")],
    text: Annotated[Path, typer.Option(help="Text to measure on.")],
    tokens: Annotated[int, typer.Option(help="Length of a sequence to measure.")] = 2048,
    sequences: Annotated[int, typer.Option(help="Number of sequences to measure.")] = 2,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens to calibrate on, in sequences of 4096.")] = 24_576,
    dtype: str = "float32",
    out: Annotated[Path, typer.Option(help="JSON file for the results.")] = Path("eval/results/reproduce.json"),
) -> None:
    """Measure every recipe on one model."""
    network, tokenizer = load_model(model, dtype=dtype)

    def encode(path: Path, count: int) -> Tensor:
        ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
        if len(ids) < count:
            raise typer.BadParameter(f"{path} has {len(ids)} tokens, {count} are needed.")
        return ids[:count].to(network.device)

    measured = list(encode(text, tokens * sequences).split(tokens))
    calibrated = list(encode(calibration, calibration_tokens).split(4096))
    statistics = collect_statistics(network, calibrated, scored_values=True, history=OscarConfig())
    expected = [log_probabilities(network, ids, tokens // 2) for ids in measured]

    def rotations(recipe: Recipe) -> RotationSet:
        layers = {index: fit_layer(layer, recipe) for index, layer in statistics.items()}
        return RotationSet(layers, architecture=architecture(text_config(network)))

    rows = []
    for name, recipe in tqdm(RECIPES.items(), desc="Measuring", unit=" recipe"):
        config = OscarConfig.of(recipe).replace(exact_chunks=False)
        kl, perplexity = quantised_kl(network, rotations(recipe), config, measured, expected)
        rows.append({"recipe": name, "kl": kl, "perplexity": perplexity, "config": config.to_dict()})
    losses = [-x[:-1].gather(1, i[-len(x) + 1 :, None]).mean() for x, i in zip(expected, measured, strict=True)]
    unquantised = float(torch.stack(losses).mean().exp())

    table = Table("recipe", "KL", "perplexity", title=f"{display_name(model)}, {tokens} tokens")
    table.add_row("unquantised", "0", f"{unquantised:.2f}")
    for row in rows:
        table.add_row(row["recipe"], f"{row['kl']:.3f}", f"{row['perplexity']:.2f}")
    Console().print(table)
    save_results(
        out,
        {
            "model": display_name(model),
            "tokens": tokens,
            "sequences": sequences,
            "calibration": f"{calibration.name}, {calibration_tokens} tokens",
            "text": text.name,
            "unquantised_perplexity": unquantised,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    typer.run(main)
