"""The RotationZoo: rotation sets by model name, from this package or a folder."""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .rotation import CONFIG_NAME, RotationSet


def zoo_folder() -> Path:
    """Where this installation keeps its zoo: inside the package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "rotation_zoo"
    return inside if inside.is_dir() else package.parent / "rotation_zoo"


def zoo_index() -> dict[str, dict[str, Any]]:
    """The zoo's entries by name; each has `models` (ids it serves), `folder` and `about`."""
    return json.loads((zoo_folder() / "index.json").read_text(encoding="utf-8"))


def find_rotations(name: str | os.PathLike) -> RotationSet:
    """The rotation set that a folder, a zoo entry or a model id stands for.

    Raises:
        FileNotFoundError: nothing of that name; the message lists what is near.
    """
    path = Path(name)
    if (path / CONFIG_NAME).is_file():
        return RotationSet.from_pretrained(path)
    index = zoo_index()
    wanted = str(name).rstrip("/").lower()
    for entry, facts in index.items():
        if wanted in {entry.lower(), *(model.lower() for model in facts["models"])}:
            return RotationSet.from_pretrained(zoo_folder() / facts["folder"])
    names = {entry.lower(): entry for entry in index}
    near = [names[name] for name in get_close_matches(wanted.rsplit("/", 1)[-1], names, n=3, cutoff=0.4)]
    near = near or sorted(index)
    raise FileNotFoundError(
        f"No rotations for {str(name)!r}: neither a folder with {CONFIG_NAME} nor in the RotationZoo "
        f"(nearest: {', '.join(near) or 'it is empty'}). Make them with `oscar-hf calibrate MODEL --out DIR`."
    )
