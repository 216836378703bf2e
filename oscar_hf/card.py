"""The model card of a published rotation set."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rotation import RotationSet

_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")


def printable(text: object) -> str:
    """`text` on one line, without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def _cell(value: object) -> str:
    """A value as code in a table."""
    text = json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else str(value)
    return "`" + printable(text).replace("`", "'").replace("|", "/") + "`"


def model_card(
    rotations: RotationSet, url: str, *, licence: str | None = None, measured: dict[str, Any] | None = None
) -> str:
    """A card that says what a set is for, how it was made and how good it is.

    Args:
        rotations: the set.
        url: where it will be, as `patch_model` takes it.
        licence: an identifier such as `mit`; None leaves the field out.
        measured: `kl`, `needle`, ... with the `command` that measured them.

    Raises:
        ValueError: a licence that is no identifier, or figures without the command.
    """
    if licence is not None and not _LICENCE.fullmatch(licence):
        raise ValueError(f"licence={licence!r} must be an identifier, such as mit or apache-2.0.")
    if measured is not None and not (isinstance(measured, dict) and measured.get("command") and len(measured) > 1):
        raise ValueError(f"measured={measured!r} must be figures and the command that measured them.")
    facts, config = rotations.provenance, rotations.config
    model = printable(facts.get("model", "unknown"))
    header = ["library_name: oscar-hf", "tags: [oscar, kv-cache, quantization]"]
    header += [f"license: {licence}"] if licence else []
    header += [f"base_model: {json.dumps(model)}"] if "/" in model else []
    address = url if "@" in url else f"{url}@main"
    rows = {
        "model": model,
        "method": f"OSCAR (arXiv 2605.17757), recipe {config.recipe}",
        "corpus": facts.get("corpus", "unknown"),
        "tokens": facts.get("tokens", "unknown"),
        "layers": f"{len(rotations.layers)}, head_dim {next(iter(rotations.layers.values())).head_dim}",
        "in 16 bits": ", ".join(map(str, rotations.exact_layers)) or "none",
        "storage": config.to_dict(),
        "architecture": rotations.architecture,
        "digest": rotations.digest(),
    }
    lines = ["---", *header, "---", "", f"# Rotations for a 2-bit KV cache: {model}", ""]
    lines += ["```python", "from oscar_hf import patch_model", "", f'patch_model(model, "{address}")', "```", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows.items()), ""]
    lines += ["## Measured", ""]
    if measured is None:
        lines += ["Nothing yet. Compare a text with and without: `oscar-hf generate MODEL --rotations DIR --compare`."]
    else:
        figures = {name: value for name, value in measured.items() if name != "command"}
        lines += [
            "| | |",
            "|---|---|",
            *(f"| {printable(name)} | {_cell(value)} |" for name, value in figures.items()),
        ]
        lines += ["", f"by {_cell(measured['command'])}"]
    return "\n".join(lines) + "\n"
