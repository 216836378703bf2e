"""`oscar-hf cache`: compute a long context once, and see what a saved one holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Save the cache of a long context, and look into a saved one.")


@app.command("save")
def save(
    model: Annotated[str, typer.Argument(help="A directory, a Hub id or a GGUF file.")],
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="The context, UTF-8.")],
    out: Annotated[Path, typer.Option(help="Folder for the cache.")],
    rotations: Annotated[str | None, typer.Option(help="A folder, a name in the zoo, or prompt.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one forward.")] = 4096,
    dtype: Annotated[str, typer.Option(help="The model's.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a text through a model and save its 2-bit cache.

    oscar-hf cache save HuggingFaceTB/SmolLM2-135M-Instruct --text book.txt --out book-cache
    """
    import torch

    from ._compat import cache_argument, input_device
    from .cache import OscarQuantizedCache
    from .loading import load_model
    from .patch import patch_model

    network, tokenizer = load_model(model, dtype=dtype)
    patch_model(network, rotations)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"].to(input_device(network))
    cache = OscarQuantizedCache(network)
    with torch.no_grad(), typer.progressbar(ids.split(chunk, 1), label="reading", hidden=as_json) as parts:
        for part in parts:
            network(part, logits_to_keep=1, **{cache_argument(network): cache})
    cache.save(out)
    memory = cache.memory()
    typer.echo(json.dumps({"folder": str(out), **memory.to_dict()}) if as_json else f"{out}: {memory}")


@app.command("info")
def info(
    folder: Annotated[Path, typer.Argument(help="What `cache save`, or OscarQuantizedCache.save, wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a saved cache holds, and what it was computed with.

    oscar-hf cache info book-cache
    """
    from .cache_file import WEIGHTS_NAME, read_facts

    facts = read_facts(folder)
    layers = facts.pop("layers")
    quantised = [layer for layer in layers if layer.get("kind") == "oscar"]
    facts |= {
        "rows": len(quantised[0]["lengths"]) if quantised else 0,
        "quantised_layers": len(quantised),
        "other_layers": len(layers) - len(quantised),
        "bytes": (folder / WEIGHTS_NAME).stat().st_size,
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    size = facts["architecture"].get("head_dim", "?")
    typer.echo(
        f"{facts['tokens']:,} tokens, {facts['rows']} rows, {facts['quantised_layers']} quantised and "
        f"{facts['other_layers']} other layers, {facts['bytes'] / 1e6:.1f} MB\n"
        f"{facts['architecture'].get('model_type', '?')}, head_dim {size}, recipe {facts['config'].get('recipe')}, "
        f"rotations {str(facts['rotations'])[:12]}, weights {str(facts['model'])[:12]}"
    )
