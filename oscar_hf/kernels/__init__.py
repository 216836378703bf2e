"""Writing and reading the stored format: Triton where the tensors are on a GPU, plain torch elsewhere.

`reference` and `reference_write` are the definitions, and the path on the CPU.
"""

from .dispatch import attend_history, attend_prefixes, available, quantize_into, search_into, step, write_chunk
from .reference import attend_blocks, exact_attention

__all__ = [
    "attend_blocks",
    "attend_history",
    "attend_prefixes",
    "available",
    "exact_attention",
    "quantize_into",
    "search_into",
    "step",
    "write_chunk",
]
