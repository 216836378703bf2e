"""The command line's zoo: list, info, pull, verify, push; and export to other engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .zoo import Entry

app = typer.Typer(no_args_is_help=True, help="Rotation sets that someone made: find, fetch, check and give back.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="An entry of the zoo, or a model id.")]
Set = Annotated[str, typer.Argument(metavar="DIR|NAME", help="A folder of rotations, a hub path or a zoo name.")]
Hub = Annotated[str | None, typer.Option("--zoo", metavar="hub|modelscope", show_default="where it is pinned")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def _entry(name: str) -> Entry:
    from .zoo import named

    return named(name)


def _hub(name: str | None) -> str | None:
    if name not in (None, "hub", "huggingface", "modelscope"):
        raise ValueError(f"{name!r} is no hub; choose hub or modelscope.")
    return "huggingface" if name == "hub" else name


def _print(facts: Any, as_json: bool) -> None:
    """JSON, or one fact a row."""
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if isinstance(value, list):
            value = "\n".join(map(_line, value))
        elif isinstance(value, dict):
            value = "\n".join(f"{key}: {_line(item)}" for key, item in value.items())
        table.add_row(name.replace("_", " "), _line(value))
    Console(highlight=False, markup=False).print(table)


def _line(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """Show what there is, and what of it is on this machine.

    Example:

    - `oscar-hf zoo list`
    """
    from .zoo import zoo_index

    index = zoo_index()
    if as_json:
        _print({n: {"state": e.state, "models": list(e.models), "about": e.about} for n, e in index.items()}, True)
        return
    table = Table("name", "state", "about")
    for name, entry in index.items():
        table.add_row(name, entry.state, entry.about)
    Console(highlight=False, markup=False).print(table)


@app.command()
def info(name: Name, as_json: Json = False) -> None:
    """Show an entry: where it is published, its settings, results and caveats.

    Example:

    - `oscar-hf zoo info Qwen/Qwen3-8B`
    """
    entry = _entry(name)
    facts: dict[str, Any] = {"name": entry.name, "state": entry.state, "about": entry.about}
    facts["models"] = list(entry.models)
    facts["sources"] = [
        f"{source.url} ({'pinned' if source.pinned else 'unpinned'}{f'; {source.about}' * (source.hub != 'git')})"
        if source.about
        else f"{source.url} ({'pinned' if source.pinned else 'unpinned'})"
        for source in entry.sources
    ]
    _print({**facts, **entry.recipe}, as_json)


@app.command()
def pull(
    name: Name,
    hub: Hub = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch or commit to trust, where none is pinned.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Take published files from here, not from a hub.")
    ] = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Accept files in --from for which no checksum is recorded.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fetch a set, check it, and keep it for patch_model, online or not.

    Examples:

    - `oscar-hf zoo pull qwen3-8b --revision main`

    - `oscar-hf zoo pull qwen3.5-4b --from rotations/calibrated`
    """
    from .zoo import pull, verify

    entry = _entry(name)
    path = pull(entry, zoo=_hub(hub), revision=revision, folder=folder, unverified=unverified)
    _print({"path": str(path), **verify(entry)}, as_json)


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Entries.", show_default="all")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the sets on this machine against the index; exit code 1 if one is not what it should be.

    Example:

    - `oscar-hf zoo verify`
    """
    from .zoo import verify, zoo_index

    entries = [_entry(name) for name in names] if names else list(zoo_index().values())
    rows, failed = [], False
    for entry in entries:
        try:
            rows.append(verify(entry))
        except (ValueError, OSError) as error:
            rows.append({"name": entry.name, "state": entry.state, "verified": False, "error": str(error)})
            failed = True
    if as_json:
        _print(rows, True)
    else:
        table = Table("name", "state", "verified", "note")
        for row in rows:
            note = row.get("error") or row.get("note") or f"digest {row['digest'][:16]}"
            table.add_row(row["name"], row["state"], "yes" if row["verified"] else "no", note)
        Console(highlight=False, markup=False).print(table)
    if failed:
        raise typer.Exit(1)


@app.command()
def push(
    rotations: Set,
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository to publish it in.")],
    hub: Annotated[str, typer.Option("--to", metavar="hub|modelscope")] = "hub",
    licence: Annotated[str | None, typer.Option("--license", "--licence", metavar="ID", help="Such as mit.")] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSON for the card: {"kl": ..., "needle": ..., "command": ...}.'),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Upload. Without it, only show what would be.")] = False,
    as_json: Json = False,
) -> None:
    """Publish a set with a model card. Uploads nothing without --yes.

    Example:

    - `oscar-hf zoo push rotations me/Qwen3-8B-rotations --licence mit`
    """
    from .hub import read_json
    from .zoo import find_rotations

    facts = find_rotations(rotations).push_to_hub(
        repo,
        hub=_hub(hub) or "huggingface",
        licence=licence,
        measured=read_json(measured) if measured else None,
        private=private,
        dry_run=not yes,
    )
    if as_json:
        _print(facts, True)
        return
    card = facts.pop("card")
    _print({**facts, "address": facts["address"] or "nothing was uploaded; --yes does it"}, False)
    if not yes:
        typer.echo(card)


def export(
    rotations: Set,
    target: Annotated[str, typer.Option("--to", metavar="sglang|llamacpp|upstream", help="Engine.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="Folder; for llamacpp the GGUF to write.")],
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For llamacpp: the model, which is copied.")
    ] = None,
    version: Annotated[int, typer.Option(min=1, max=2, help="For upstream: 1 per layer, 2 per KV head.")] = 1,
) -> None:
    """Write a set as another engine reads it, and print how to start that engine.

    Examples:

    - `oscar-hf export qwen3-8b --to sglang --out rotations`

    - `oscar-hf export rotations --to llamacpp --gguf model.gguf --out model-oscar.gguf`
    """
    from .zoo import find_rotations

    if target not in ("sglang", "llamacpp", "upstream"):
        raise ValueError(f"--to {target}: choose sglang, llamacpp or upstream.")
    if (target == "llamacpp") != (gguf is not None):
        raise ValueError("--gguf FILE goes with --to llamacpp, and with nothing else.")
    found = find_rotations(rotations)
    if target == "upstream":
        from .formats import write_upstream

        typer.echo("\n".join(map(str, write_upstream(found, out, version))))
    elif target == "sglang":
        from .export import to_sglang

        server = to_sglang(found, out)
        for note in server.notes:
            typer.echo(note, err=True)
        typer.echo(str(server))
    elif gguf is not None:
        from .export import to_llamacpp

        typer.echo(str(to_llamacpp(found, gguf, out)))
