"""The paper's tables, each as one command of the lm-evaluation-harness: printed, or run.

    python -m eval.tasks qwen3-8b five
    python -m eval.tasks qwen3-8b ruler-64k --run

Tasks, models and settings are in `eval/tasks.yaml`.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

SETTINGS = yaml.safe_load((Path(__file__).parent / "tasks.yaml").read_text(encoding="utf-8"))
PROMPT = 8192  # tokens that a question may have beside its answer's
SLACK = 256  # RULER's lengths include the answer, but not the words that begin it


def reach(model: dict[str, Any]) -> int:
    """Positions that a model can have, stretched or not."""
    stretch = model.get("yarn")
    return int(stretch["factor"] * stretch["original"]) if stretch else model["native"]


def yarn(model: dict[str, Any], length: int) -> dict[str, Any]:
    """What `from_pretrained` needs to run a model at `length` positions: nothing, or YaRN.

    Raises:
        ValueError: the model cannot be stretched so far.
    """
    if length <= model["native"]:
        return {}
    if length > reach(model):
        raise ValueError(f"{model['id']} has {reach(model)} positions at most, not {length}.")
    stretch = model["yarn"]
    rope = {"rope_type": "yarn", "rope_theta": stretch["rope_theta"], "factor": stretch["factor"]}
    rope["original_max_position_embeddings"] = stretch["original"]
    return {"rope_parameters": rope, "max_position_embeddings": reach(model)}


def arguments(
    model: str,
    table: str,
    *,
    cache: str = "oscar",
    model_args: dict[str, Any] | None = None,
    batch_size: str = "1",
    seed: int = 0,
    upstream: bool = False,
) -> list[str]:
    """Arguments of `python -m oscar_hf.lm_eval` for a table of the paper.

    Args:
        model: a name in `tasks.yaml`.
        table: the same.
        cache: "oscar", or "dynamic" for the unquantised row of the table.
        model_args: further arguments of OscarLM.
        batch_size: a number, or "auto"; rows of a table should share it.
        seed: of sampling.
        upstream: sample as OSCAR's own script did, not as the model's card says.

    Raises:
        ValueError: an unknown name, or more positions than the model has.
    """
    for kind, name in (("models", model), ("tables", table)):
        if name not in SETTINGS[kind]:
            raise ValueError(f"{name!r} is not in eval/tasks.yaml; its {kind} are {', '.join(SETTINGS[kind])}.")
    facts, what = SETTINGS["models"][model], SETTINGS["tables"][table]
    length = what.get("length", 0)
    wanted = length + SLACK if length else what["max_gen_toks"] + PROMPT
    window = max(length, min(wanted, reach(facts) if length else facts["native"]))
    settings = {"pretrained": facts["id"], "max_length": window, **yarn(facts, window)}
    settings |= {"cache": "dynamic"} if cache == "dynamic" else {}
    line = ["--tasks", ",".join(what["tasks"])]
    if what.get("chat"):
        settings["think_end_token"] = "</think>"
        line += ["--apply_chat_template", "--num_fewshot", "0", "--confirm_run_unsafe_code"]
    if what.get("sampled"):
        sampling = SETTINGS["upstream"] if upstream else facts["sampling"]
        generation = {"do_sample": True, **sampling, "max_gen_toks": what["max_gen_toks"], "until": [facts["end"]]}
        line += ["--gen_kwargs", json.dumps(generation)]
    if length:
        line += ["--metadata", json.dumps({"max_seq_lengths": [length]})]
    settings |= model_args or {}
    line = ["--model", "oscar-hf", "--model_args", json.dumps(settings), *line]
    out = f"eval/results/lm-eval/{model}-{table}-{cache}-{seed}"
    return [*line, "--batch_size", batch_size, "--seed", str(seed), "--log_samples", "--output_path", out]


def main(
    model: Annotated[str, typer.Argument(help=", ".join(SETTINGS["models"]))],
    table: Annotated[str, typer.Argument(help=", ".join(SETTINGS["tables"]))],
    run: Annotated[bool, typer.Option("--run", help="Run the command instead of printing it.")] = False,
    cache: Annotated[str, typer.Option(metavar="oscar|dynamic", help="dynamic: unquantised.")] = "oscar",
    model_args: Annotated[str, typer.Option(metavar="JSON", help="Further arguments of OscarLM.")] = "{}",
    batch_size: Annotated[str, typer.Option(metavar="N|auto")] = "1",
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    upstream: Annotated[bool, typer.Option("--upstream", help="Sample as OSCAR's own script did.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="GPUs, each with a copy of the model.")] = 1,
) -> None:
    """Print, or run, the command for one table of the paper."""
    try:
        further = json.loads(model_args)
        line = arguments(
            model, table, cache=cache, model_args=further, batch_size=batch_size, seed=seed, upstream=upstream
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    many = ["accelerate", "launch", "--num_processes", str(processes)] if processes > 1 else []
    start = ["-m", "accelerate.commands.accelerate_cli", *many[1:]] if many else []
    if run:
        raise typer.Exit(subprocess.call([sys.executable, *start, "-m", "oscar_hf.lm_eval", *line]))
    for note in SETTINGS["tables"][table].get("notes", ()):
        typer.echo(f"# {note}", err=True)
    typer.echo(shlex.join([*(many or ["python"]), "-m", "oscar_hf.lm_eval", *line]))


if __name__ == "__main__":
    typer.run(main)
