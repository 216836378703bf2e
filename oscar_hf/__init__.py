"""2-bit KV cache for Hugging Face transformers by attention-aware rotations (OSCAR, arXiv 2605.17757)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import OscarQuantizedCache
    from .calibration import calibrate
    from .config import OscarConfig, Recipe
    from .memory import CacheMemory
    from .parallel import tensor_parallel
    from .patch import patch_model, save_patched, unpatch_model
    from .planning import Plan, plan
    from .rotation import LayerRotation, RotationSet

__version__ = "0.1.0"

__all__ = [
    "CacheMemory",
    "LayerRotation",
    "OscarConfig",
    "OscarQuantizedCache",
    "Plan",
    "Recipe",
    "RotationSet",
    "calibrate",
    "patch_model",
    "plan",
    "save_patched",
    "tensor_parallel",
    "unpatch_model",
]

_HOMES = {
    "cache": ["OscarQuantizedCache"],
    "calibration": ["calibrate"],
    "config": ["OscarConfig", "Recipe"],
    "memory": ["CacheMemory"],
    "parallel": ["tensor_parallel"],
    "patch": ["patch_model", "save_patched", "unpatch_model"],
    "planning": ["Plan", "plan"],
    "rotation": ["LayerRotation", "RotationSet"],
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `oscar-hf --help` needs neither torch nor transformers."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
