"""2-bit KV cache for Hugging Face transformers by attention-aware rotations (OSCAR, arXiv 2605.17757)."""

from .cache import OscarQuantizedCache
from .calibration import calibrate
from .config import OscarConfig, Recipe
from .memory import CacheMemory
from .patch import patch_model, save_patched, unpatch_model
from .rotation import LayerRotation, RotationSet

__version__ = "0.1.0"

__all__ = [
    "CacheMemory",
    "LayerRotation",
    "OscarConfig",
    "OscarQuantizedCache",
    "Recipe",
    "RotationSet",
    "calibrate",
    "patch_model",
    "save_patched",
    "unpatch_model",
]
