"""Results as JSON, with the machine and versions they were measured on."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from oscar_hf import __version__

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """Processor, GPU and versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "oscar_hf": __version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def save_results(path: Path, results: dict[str, Any]) -> None:
    """Write results with the machine and the command; arguments, and those in a list, lose their folders."""
    script = Path(sys.argv[0]).resolve().with_suffix("")
    parts = script.relative_to(ROOT).parts if script.is_relative_to(ROOT) else ("eval", script.name)
    module = ".".join(part for part in parts if part != "__main__")
    arguments = (",".join(Path(item).name for item in argument.split(",")) for argument in sys.argv[1:])
    command = " ".join([f"python -m {module}", *arguments])
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": command, "machine": machine(), **results}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
