"""Texts to calibrate on: Python's own manual, files, or a data set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

DEFAULT_CORPUS = "pydoc"


def read_corpus(name: str = DEFAULT_CORPUS) -> Iterator[str]:
    """Texts of a corpus.

    Args:
        name: `"pydoc"`, the language reference that every Python carries (about 190,000 tokens of English and code);
            a `.txt` file, taken as one text; a `.jsonl` file with a "text" in each line; or a data set for
            `datasets.load_dataset`, as `NAME`, `NAME:SPLIT` or `NAME/CONFIG:SPLIT` with a "text" column.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: a file without texts, or another kind of file.
    """
    if name == DEFAULT_CORPUS:
        from pydoc_data.topics import topics

        yield from (topics[key] for key in sorted(topics))
        return
    path = Path(name)
    if path.suffix in (".txt", ".jsonl"):
        if not path.is_file():
            raise FileNotFoundError(f"Corpus {name} is not there.")
        try:
            texts = [path.read_text(encoding="utf-8")] if path.suffix == ".txt" else _json_lines(path)
            found = False
            for text in texts:
                found |= bool(text.strip())
                yield text
        except UnicodeDecodeError as error:
            raise ValueError(f"Corpus {name} is not text in UTF-8 ({error}).") from error
        if not found:
            raise ValueError(f"Corpus {name} holds no text.")
        return
    if path.exists():
        raise ValueError(f"Corpus {name}: a file must end in .txt or .jsonl.")
    yield from _dataset(name)


def _json_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    text = json.loads(line)["text"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise ValueError(f'{path}, line {number}: no JSON object with a "text".')
                yield text


def _dataset(name: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"Corpus {name!r} is no file; to read it as a data set, install oscar-hf[eval].") from error
    path, _, split = name.partition(":")
    owner_and_name, config = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:])
    for row in load_dataset(owner_and_name, config or None, split=split or "train", streaming=True):
        yield str(row["text"])
