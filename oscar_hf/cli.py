"""The command line: calibrate, patch, generate, inspect. torch and transformers are imported inside the commands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from . import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.status import Status
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
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
            message = " ".join(str(error).split()) or type(error).__name__
            Console(stderr=True, style="bold red", highlight=False).print(
                f"Error: {message}", markup=False, soft_wrap=True
            )
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a Hub id or a .gguf file.")]
Rotations = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|NAME",
        help="A folder that calibrate wrote, or an entry of the RotationZoo.",
        show_default="saved with the model, else the zoo's",
    ),
]
Dtype = Annotated[str, typer.Option(help="torch dtype of the model; auto: its checkpoint's.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="cpu, cuda:1, auto, ...", show_default="the first GPU, else the CPU")
]
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
    and write a model that carries them with **patch**.
    """


@app.command()
def calibrate(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the rotation set to.")],
    corpus: Annotated[
        str, typer.Option(metavar="pydoc|FILE|DATASET", help="Python's own manual, .txt or .jsonl, or a data set.")
    ] = "pydoc",
    tokens: Annotated[int, typer.Option(min=1, help="How much of the corpus to use.")] = 20_000,
    recipe: Annotated[str, typer.Option(metavar="balanced|oscar|hadamard|naive")] = "balanced",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Change a setting of the recipe, for ablations; may come again."
        ),
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="Longest sequence in one forward.")] = 4096,
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
    """
    from .calibration import calibrate
    from .config import get_recipe
    from .corpus import read_corpus
    from .loading import display_name

    changes = dict(_setting(text) for text in settings or [])
    get_recipe(recipe, **changes)
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
        progress=not as_json,
        corpus=Path(corpus).name if Path(corpus).is_file() else corpus,
        **changes,
    )
    rotations.provenance["model"] = name or display_name(model)
    rotations.save_pretrained(out)
    _report({"path": str(out), **describe(rotations)}, as_json)


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
    from .zoo import find_rotations

    found = find_rotations(rotations) if rotations else None
    if out.exists() and Path(model).exists() and out.samefile(model):
        raise ValueError(f"--out {out} is the model's own folder; choose another, the original would be overwritten.")
    out.mkdir(parents=True, exist_ok=True)
    loaded, tokenizer = _load(model, dtype, device_map, as_json)
    with _status(f"Patching {model}"):
        _patch(loaded, model, found)
    with _status(f"Writing {out}"):
        save_patched(loaded, out)
        tokenizer.save_pretrained(out)
    _report({"path": str(out), **_describe_path(str(out))}, as_json)


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
    sink_tokens: Annotated[
        int | None, typer.Option(help="First tokens kept exactly.", show_default="the rotations'")
    ] = None,
    recent_tokens: Annotated[
        int | None, typer.Option(help="Newest tokens kept exactly.", show_default="the rotations'")
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="2, or 16 to store the history exactly.", show_default="the rotations'")
    ] = None,
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
    from .zoo import find_rotations

    if (prompt is None) == (file is None):
        raise ValueError("Give the prompt either as --prompt TEXT or as --file PATH.")
    text = file.read_text(encoding="utf-8") if file else prompt
    found = find_rotations(rotations) if rotations else None
    loaded, tokenizer = _load(model, dtype, device_map, as_json)
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    if not inputs["input_ids"].shape[1]:
        raise ValueError("The prompt is empty.")
    inputs = {key: inputs[key].to(loaded.device) for key in ("input_ids", "attention_mask")}

    runs = {}
    if compare:
        cache: Cache = DynamicCache(config=loaded.config)
        with _status("Generating, unquantised") as status:
            runs["unquantised"] = timed_generate(loaded, tokenizer, inputs, cache, max_new_tokens, status)
    with _status(f"Patching {model}"):
        _patch(loaded, model, found)
    settings = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens, "bits": bits}
    config = OscarQuantizedCache(loaded).config
    config = config.replace(**{key: value for key, value in settings.items() if value is not None})
    cache = OscarQuantizedCache(loaded, config=config)
    with _status("Generating, OSCAR") as status:
        runs["OSCAR"] = timed_generate(loaded, tokenizer, inputs, cache, max_new_tokens, status)

    if as_json:
        settings = {"model": model, "prompt_tokens": inputs["input_ids"].shape[1], "config": config.to_dict()}
        _print_json({**settings, "runs": {label: asdict(run) for label, run in runs.items()}})
        return
    if not compare:
        typer.echo(runs["OSCAR"].text)
    Console(stderr=not compare).print(comparison(runs, with_text=compare))


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A rotation folder, a patched checkpoint or a zoo name.")
    ],
    as_json: Json = False,
) -> None:
    """Show what a rotation set or a patched checkpoint holds, and whether it is sound.

    Example:

    - `oscar-hf inspect rotations`
    """
    _report({"path": path, **_describe_path(path)}, as_json)


# Generating and measuring


@dataclass
class Run:
    """One generation and what it took.

    Args:
        text: the new tokens, decoded.
        new_tokens: how many.
        prefill_seconds: until the first new token.
        tokens_per_second: of the new tokens after the first; None if there is only one.
        cache_bytes: all that the cache holds in the end.
        bits_per_element: of all keys and values in the cache, windows and slack included.
        history_bits_per_element: of those that are quantised; None without quantisation.
    """

    text: str
    new_tokens: int
    prefill_seconds: float
    tokens_per_second: float | None
    cache_bytes: int
    bits_per_element: float
    history_bits_per_element: float | None


class Clock:
    """A streamer for `generate` that notes when each new token came."""

    def __init__(self, tell: Callable[[int], None] | None = None):
        self.start, self.times, self.tell = perf_counter(), [], tell  # type: tuple[float, list[float], Any]
        self.prompt_is_next = True

    def put(self, tokens: Tensor) -> None:
        if not self.prompt_is_next:
            self.times.append(perf_counter())
            if self.tell:
                self.tell(len(self.times))
        self.prompt_is_next = False

    def end(self) -> None:
        pass


def timed_generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, Tensor],
    cache: Cache,
    max_new_tokens: int,
    status: Status | None = None,
) -> Run:
    """Greedy generation into a cache, timed and measured.

    Args:
        model: patched if the cache is an OscarQuantizedCache.
        tokenizer: decodes what is new.
        inputs: input_ids [1, T] and attention_mask, on the model's device; the whole prompt if the cache holds some.
        cache: filled by this.
        max_new_tokens: upper limit.
        status: told how many tokens there are.
    """
    from ._compat import cache_argument

    label = str(status.status) if status else ""
    clock = Clock((lambda count: status.update(f"{label}: {count} tokens")) if status else None)
    settings = {cache_argument(model): cache, "streamer": clock, "do_sample": False, "num_beams": 1}
    ids = model.generate(**inputs, **settings, max_new_tokens=max_new_tokens)[0, inputs["input_ids"].shape[1] :]
    decoding = clock.times[-1] - clock.times[0]
    return Run(
        tokenizer.decode(ids, skip_special_tokens=True),
        len(ids),
        clock.times[0] - clock.start,
        (len(ids) - 1) / decoding if decoding else None,
        *cache_size(cache),
    )


def cache_size(cache: Cache) -> tuple[int, float, float | None]:
    """Bytes of a cache, bits per element of its keys and values, and of those in a quantised history."""
    from .cache import OscarQuantizedCache
    from .memory import _tensors

    if isinstance(cache, OscarQuantizedCache):
        memory = cache.memory()
        return memory.total, memory.bits, memory.history_bits or None
    storages = {t.untyped_storage() for layer in cache.layers for t in _tensors(vars(layer))}
    states = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    bits = 8 * sum(t.untyped_storage().nbytes() for t in states) / sum(t.numel() for t in states)
    return sum(storage.nbytes() for storage in storages), bits, None


def comparison(runs: Mapping[str, Run], with_text: bool = True) -> Table:
    """Runs side by side."""
    table = Table(show_lines=with_text)
    table.add_column()
    for label in runs:
        table.add_column(label, justify="left" if with_text else "right", overflow="fold")
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("prefill", lambda run: f"{run.prefill_seconds:.2f} s"),
        ("decode", lambda run: f"{run.tokens_per_second:.1f} tokens/s" if run.tokens_per_second else "-"),
        ("cache", lambda run: f"{run.cache_bytes:,} bytes"),
        ("bits per element", lambda run: f"{run.bits_per_element:.2f}"),
        (
            "of the history",
            lambda run: f"{run.history_bits_per_element:.2f}" if run.history_bits_per_element else "-",
        ),
    ]
    if with_text:
        rows.insert(0, ("text", lambda run: run.text.strip()))
    for label, show in rows:
        table.add_row(label, *(show(run) for run in runs.values()))
    return table
