"""All benchmarks in turn, each with its defaults: `python -m eval.speed`, or some: `--parts kernel,chunk`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from eval.speed import common

PARTS = {
    "kernel": [],
    "chunk": [],
    "prefill": [],
    "throughput": [],
    "decode": ["--models", "qwen3-8b,qwen3-4b,qwen3-32b"],
}


def main(
    parts: Annotated[str, typer.Option(help="Which to run, in this order.")] = ",".join(PARTS),
    out: Annotated[Path, typer.Option(help="Folder for results and plots.")] = common.RESULTS,
) -> None:
    """Run every part in a process of its own, then plot."""
    for part in parts.split(","):
        start = time.perf_counter()
        command = [sys.executable, "-m", f"eval.speed.{part}", "--out", str(out), *PARTS[part]]
        status = subprocess.run(command, check=False).returncode
        print(f"{part}: status {status}, {time.perf_counter() - start:.0f} s", flush=True)
    subprocess.run([sys.executable, "-m", "eval.speed.plots", "--folder", str(out)], check=False)


if __name__ == "__main__":
    typer.run(main)
