"""Models by directory, Hub id or GGUF file, with their tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    name: str, *, dtype: str = "auto", device_map: str | None = None, **kwargs: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        name: a directory, a Hub id, or the path of a `.gguf` file (needs the `gguf` package).
        dtype: a torch dtype's name; "auto": the checkpoint's, which for GGUF is float32 on the CPU and bfloat16 else.
        device_map: as for `from_pretrained`; default: the first GPU, or the CPU.
        **kwargs: for `from_pretrained`.

    Raises:
        FileNotFoundError: a `.gguf` file that is not there.
        ValueError: no such dtype.
    """
    device_map = device_map or ("cuda:0" if torch.cuda.is_available() else "cpu")
    source, file = name, {}
    if name.endswith(".gguf"):
        path = Path(name)
        if not path.is_file():
            raise FileNotFoundError(f"{name} is not there.")
        source, file = str(path.parent), {"gguf_file": path.name}
        if dtype == "auto":
            dtype = "float32" if device_map == "cpu" else "bfloat16"
    if dtype not in ("auto", "float64", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype!r} cannot be run here; try float32, bfloat16 or float16.")
    tokenizer = AutoTokenizer.from_pretrained(source, **file)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device_map, **file, **kwargs)
    if file:
        _forget_gguf(model)
    return model.eval(), tokenizer


def _forget_gguf(model: PreTrainedModel) -> None:
    """Take off transformers' mark of a GGUF file, with which a model is not saved, unless weights are still packed."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and all(tensor.is_floating_point() for tensor in model.state_dict().values()):
        quantizer.remove_quantization_config(model)


def display_name(name: str) -> str:
    """A model's name without the folders of this machine: the Hub id, or the last part of a local path."""
    path = Path(name)
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if name and (path.is_absolute() or path.exists()) else name
