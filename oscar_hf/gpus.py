"""GPUs by name: what memory, bandwidth and arithmetic a plan may count on."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30
HEADROOM = 0.04  # of the memory: the driver's context, libraries, and what fragmentation wastes


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, and how many of them.

    Args:
        name: as in `GPUS`, or what was asked for.
        gib: memory of one, as the driver reports it, in GiB.
        gbps: memory bandwidth of one, in GB/s; 0 if unknown.
        tflops: dense 16-bit matrix products of one, in TFLOP/s; 0 if unknown.
        count: how many.
    """

    name: str
    gib: float
    gbps: float = 0.0
    tflops: float = 0.0
    count: int = 1

    @property
    def usable(self) -> int:
        """Bytes of one that tensors can take."""
        return int(self.gib * (1 - HEADROOM) * GIB)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178.4, 8000, 2250),
        Gpu("h200", 139.8, 4800, 989),
        Gpu("gh200", 94.5, 4000, 989),
        Gpu("h100", 79.2, 3350, 989),
        Gpu("h100-pcie", 79.2, 2039, 756),
        Gpu("h20", 95.6, 4000, 148),
        Gpu("a100", 79.2, 2039, 312),
        Gpu("a100-40", 39.4, 1555, 312),
        Gpu("mi300x", 191.5, 5300, 1307),
        Gpu("l40s", 44.4, 864, 362),
        Gpu("l4", 22.0, 300, 121),
        Gpu("a10", 22.1, 600, 125),
        Gpu("rtx6000-ada", 47.4, 960, 364),
        Gpu("a6000", 47.5, 768, 155),
        Gpu("5090", 31.4, 1792, 209),
        Gpu("4090", 23.5, 1008, 165),
        Gpu("3090", 23.6, 936, 71),
        Gpu("t4", 14.6, 320, 65),
    )
}


def find_gpu(name: str) -> Gpu:
    """`"h200"`, `"h200:2"` for two of them, or `"48GiB@864:4"` (memory, GB/s) for one that is not in the table.

    Raises:
        ValueError: no such GPU or count; says which there are.
    """
    kind, _, number = name.lower().partition(":")
    own = re.fullmatch(r"(\d+(?:\.\d+)?)gi?b(?:@(\d+(?:\.\d+)?))?", kind)
    gpu = Gpu(kind, float(own[1]), float(own[2] or 0)) if own else GPUS.get(kind.removeprefix("rtx"))
    gpu = gpu or GPUS.get(kind)
    if gpu is None or (number and not number.isdecimal()) or number == "0":
        raise ValueError(
            f"{name!r} is no GPU that is known here: {', '.join(GPUS)}, each with :2 and so on for several; for "
            "another write its memory and GB/s, as in 48GiB@864."
        )
    return Gpu(gpu.name, gpu.gib, gpu.gbps, gpu.tflops, int(number or 1))
