"""The command line: calibrate, patch, generate, inspect, plan. torch and transformers are imported inside commands."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from . import __version__, cli_cache, cli_choice, cli_eval, cli_plan, cli_zoo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.status import Status
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from .rotation import RotationSet


class Commands(TyperGroup):
    """Commands whose expected errors become one red line on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # both are RuntimeErrors
            raise
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            message = f"Error: {' '.join(str(error).split()) or type(error).__name__}"
            Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_cache.app, name="cache")
app.add_typer(cli_zoo.app, name="zoo")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a Hub id or a .gguf file.")]
Rotations = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|NAME",
        help="A folder that calibrate wrote, an entry of the RotationZoo, or prompt: fitted to each prompt.",
        show_default="saved with the model, else the zoo's",
    ),
]
Dtype = Annotated[str, typer.Option(help="torch dtype of the model; auto: its checkpoint's.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="cpu, cuda:1, auto, ...", show_default="the first GPU, else the CPU")
]
OWN = "the rotations'"
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oscar-hf {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """2-bit KV cache for Hugging Face transformers by attention-aware rotations.

    Fit rotations to a model with **calibrate**, look at them with **inspect**, try them with **generate --compare**,
    and write a model that carries them with **patch**. **plan** tells what fits on which GPU.
    """


@app.command()
def calibrate(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the rotation set to.")],
    corpus: Annotated[
        str, typer.Option(metavar="pydoc|FILE|DATASET", help="Python's own manual, .txt or .jsonl, or a data set.")
    ] = "pydoc",
    tokens: Annotated[int, typer.Option(min=1, help="How much of the corpus to use.")] = 20_000,
    recipe: Annotated[str, typer.Option(metavar="balanced|search|oscar|hadamard|naive|prompt")] = "balanced",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Change a setting of the recipe, for ablations; may come again."
        ),
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="Longest sequence in one forward.")] = 4096,
    choose: Annotated[
        bool, typer.Option("--choose", help="Choose alpha, clips and scale rule per layer on held-out tokens.")
    ] = False,
    target_kl: Annotated[
        float | None, typer.Option(min=0.0, help="Choose the smallest recent window with this KL, in nats.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw what --choose gained (needs matplotlib).")
    ] = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    name: Annotated[
        str | None, typer.Option(metavar="MODEL_ID", help="What to call the model in the set.", show_default="MODEL")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit rotations to a model and save them.

    The model runs once over the corpus (twice with recipe oscar); 20,000 tokens are enough.

    Examples:

    - `oscar-hf calibrate Qwen/Qwen3-8B --out rotations`

    - `oscar-hf calibrate ./model.gguf --corpus notes.txt --recipe oscar --out rotations`

    - `oscar-hf calibrate ./model --set alpha=0.75 --set k_clip=0.92 --out rotations`

    - `oscar-hf calibrate ./model --choose --plot choice.png --target-kl 0.03 --out rotations`
    """
    from .calibration import calibrate
    from .config import get_recipe, parse_setting
    from .corpus import read_corpus
    from .loading import display_name

    changes = dict(map(parse_setting, settings or [])) | ({"choose": True} if choose else {})
    if plot is not None and not get_recipe(recipe, **changes).choose:
        raise ValueError("--plot shows what --choose gained; give both.")
    texts = read_corpus(corpus)
    texts = chain([next(texts, "")], texts)  # a corpus that is not there is noticed before the model is loaded
    out.mkdir(parents=True, exist_ok=True)
    loaded, tokenizer = _load(model, dtype, device_map, as_json)
    rotations = calibrate(
        loaded,
        texts,
        tokenizer,
        tokens=tokens,
        recipe=recipe,
        sequence_length=sequence_length,
        target_kl=target_kl,
        progress=not as_json,
        corpus=Path(corpus).name if Path(corpus).is_file() else corpus,
        **changes,
    )
    rotations.provenance["model"] = name or display_name(model)
    rotations.save_pretrained(out)
    if plot is not None:
        cli_choice.draw(rotations, plot)
    _report({"path": str(out), **describe(rotations)}, as_json)
    if not as_json and cli_choice.choices(rotations):
        Console(highlight=False).print(cli_choice.table(rotations))


@app.command()
def patch(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the checkpoint to.")],
    rotations: Rotations = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint whose value projections are rotated, with the rotation set and the tokenizer in it.

    `from_pretrained(DIR)` and `patch_model(model)` bring the 2-bit cache back. Without oscar-hf the checkpoint gives
    the original model's output.

    Example:

    - `oscar-hf patch Qwen/Qwen3-8B --rotations rotations --out Qwen3-8B-oscar`
    """
    from .patch import save_patched

    found = _found(rotations)
    if out.exists() and Path(model).exists() and out.samefile(model):
        raise ValueError(f"--out {out} is the model's own folder; choose another, the original would be overwritten.")
    out.mkdir(parents=True, exist_ok=True)
    loaded, tokenizer = _load(model, dtype, device_map, as_json)
    with _status(f"Patching {model}"):
        _patch(loaded, model, found)
    with _status(f"Writing {out}"):
        save_patched(loaded, out)
        tokenizer.save_pretrained(out)
    _report({"path": str(out), **_describe_path(str(out))[1]}, as_json)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="Text to answer or to go on from.")] = None,
    file: Annotated[Path | None, typer.Option(metavar="PATH", help="Read the prompt from a UTF-8 file.")] = None,
    rotations: Rotations = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    compare: Annotated[bool, typer.Option("--compare", help="Also run without OSCAR, and show both.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Put the prompt in the tokenizer's chat template, if it has one.")
    ] = True,
    sink_tokens: Annotated[int | None, typer.Option(help="First tokens kept exactly.", show_default=OWN)] = None,
    recent_tokens: Annotated[int | None, typer.Option(help="Newest tokens kept exactly.", show_default=OWN)] = None,
    bits: Annotated[int | None, typer.Option(help="2, or 16 to keep the history exactly.", show_default=OWN)] = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    as_json: Json = False,
) -> None:
    """Generate greedily with a 2-bit cache, and show what it held.

    Examples:

    - `oscar-hf generate Qwen/Qwen3-8B --rotations rotations --file report.txt --compare`

    - `oscar-hf generate ./Qwen3-8B-oscar --prompt "Why is the sky blue?" --json`
    """
    from transformers import DynamicCache

    from .cache import OscarQuantizedCache
    from .generation import comparison, timed_generate

    if (prompt is None) == (file is None):
        raise ValueError("Give the prompt either as --prompt TEXT or as --file PATH.")
    text = file.read_text(encoding="utf-8") if file else prompt
    found = _found(rotations)
    loaded, tokenizer = _load(model, dtype, device_map, as_json)
    if chat and tokenizer.chat_template:
        messages, settings = [{"role": "user", "content": text}], {"return_dict": True, "return_tensors": "pt"}
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **settings)
    else:
        inputs = tokenizer(text, return_tensors="pt")
    if not inputs["input_ids"].shape[1]:
        raise ValueError("The prompt is empty.")
    inputs = {key: inputs[key].to(loaded.device) for key in ("input_ids", "attention_mask") if key in inputs}

    runs = {}
    if compare:
        cache: Cache = DynamicCache(config=loaded.config)
        with _status("Generating, unquantised") as status:
            runs["unquantised"] = timed_generate(loaded, tokenizer, inputs, cache, max_new_tokens, status)
    with _status(f"Patching {model}"):
        _patch(loaded, model, found)
    changes = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens, "bits": bits}
    config = OscarQuantizedCache(loaded).config
    config = config.replace(**{key: value for key, value in changes.items() if value is not None})
    cache = OscarQuantizedCache(loaded, config=config)
    with _status("Generating, OSCAR") as status:
        runs["OSCAR"] = timed_generate(loaded, tokenizer, inputs, cache, max_new_tokens, status)

    if as_json:
        measured = {label: asdict(run) for label, run in runs.items()}
        _print_json({"model": model, "config": config.to_dict(), "runs": measured})
        return
    if not compare:
        typer.echo(runs["OSCAR"].text)
    Console(stderr=not compare).print(comparison(runs, with_text=compare))


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A rotation folder, a patched model or a zoo name.")],
    as_json: Json = False,
) -> None:
    """Show what a rotation set or a patched checkpoint holds, and whether it is sound.

    Example:

    - `oscar-hf inspect rotations`
    """
    rotations, facts = _describe_path(path)
    _report({"path": path, **facts}, as_json)
    if not as_json and cli_choice.choices(rotations):
        Console(highlight=False).print(cli_choice.table(rotations))


app.command()(cli_zoo.export)
app.command("eval")(cli_eval.evaluate)
app.command()(cli_plan.plan)

# Describing


def describe(rotations: RotationSet) -> dict[str, Any]:
    """What a rotation set holds and how sound it is, as JSON-ready values."""
    import torch

    eye = torch.eye(next(iter(rotations.layers.values())).head_dim, dtype=torch.float64)
    shapes: dict[str, list[list[int]]] = {}
    k_error = v_error = condition = 0.0
    for layer in rotations.layers.values():
        for name, tensor in layer.tensors().items():
            if list(tensor.shape) not in shapes.setdefault(name, []):
                shapes[name].append(list(tensor.shape))
        k, v = layer.k_rotation.double(), layer.v_rotation.double()
        q = k if layer.q_rotation is None else layer.q_rotation.double()
        k_error = max(k_error, (k @ q.mT - eye).abs().max().item())
        v_error = max(v_error, (v @ v.mT - eye).abs().max().item())
        condition = max(condition, torch.linalg.cond(k).max().item())
    return {
        "recipe": rotations.config.recipe,
        "layers": sorted(rotations.layers),
        "exact_layers": rotations.exact_layers,
        "shapes": shapes,
        "k_inverse_error": k_error,
        "v_orthogonality_error": v_error,
        "k_condition": condition,
        "bits_per_element": rotations.config.bits_per_element(eye.shape[0]),
        "digest": rotations.digest(),
        "architecture": rotations.architecture,
        "provenance": rotations.provenance,
        "config": rotations.config.to_dict(),
    }


def _describe_path(path: str) -> tuple[RotationSet, dict[str, Any]]:
    """The set in a folder, a zoo entry or a patched checkpoint, and `describe` of it, with what config.json says."""
    from .patch import ROTATIONS_FOLDER
    from .rotation import RotationSet
    from .zoo import find_rotations

    beside = Path(path) / ROTATIONS_FOLDER
    if not beside.is_dir():
        rotations = find_rotations(path)
        return rotations, describe(rotations)
    rotations = RotationSet.from_pretrained(beside)
    facts = describe(rotations)
    config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    oscar = config.get("oscar") if isinstance(config, dict) else None
    if not isinstance(oscar, dict) or oscar.get("digest") != facts["digest"]:
        raise ValueError(
            f"{path}: config.json says oscar={oscar!r}, but those in {beside} are "
            f"{facts['digest']!r}; write the checkpoint again with `oscar-hf patch`."
        )
    return rotations, {"absorbed_layers": oscar.get("absorbed"), **facts}


def _report(facts: dict[str, Any], as_json: bool) -> None:
    """A table of facts, one a row, or JSON."""
    if as_json:
        _print_json(facts)
        return
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _show(name, value))
    Console(highlight=False, markup=False).print(table)


def _show(name: str, value: Any) -> str:
    if name.endswith("layers"):
        return _ranges(value)
    if isinstance(value, dict):
        return "\n".join(f"{key}: {item}" for key, item in value.items() if item is not None and key != "choice")
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0-2, 5 (4)"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{listed} ({len(numbers)})" if numbers else "none"


def _print_json(facts: dict[str, Any]) -> None:
    typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))


# Loading and patching


def _load(name: str, dtype: str, device_map: str | None, as_json: bool) -> tuple[Any, Any]:
    """Model and tokenizer. transformers shows its own progress bars over downloads and GGUF files, a spinner else."""
    from transformers.utils import logging

    from .loading import load_model

    logging.set_verbosity_error()
    folder = Path(name).is_dir()
    if as_json or folder:
        logging.disable_progress_bar()
    try:
        with _status(f"Loading {name}") if folder else nullcontext():
            return load_model(name, dtype=dtype, device_map=device_map)
    except OSError as error:
        raise error if name in str(error) else OSError(f"{name} could not be loaded: {error}") from error


def _found(rotations: str | None) -> RotationSet | str | None:
    """What `patch_model` is to be given; looked up before the model is loaded."""
    from .zoo import find_rotations

    return rotations if rotations in (None, "prompt") else find_rotations(rotations)


def _patch(model: PreTrainedModel, name: str, rotations: RotationSet | str | None) -> None:
    """Patch for good, with the rotations given, those saved with the model, the zoo's, or none but the prompt's."""
    from .loading import display_name
    from .patch import patch_model

    if rotations is None and name.endswith(".gguf"):  # such a model only knows its folder
        patch_model(model, display_name(name), reversible=False)
    else:
        patch_model(model, rotations, reversible=False)


def _status(text: str) -> Status:
    """A spinner on stderr, if that is a terminal."""
    return Console(stderr=True).status(text)
