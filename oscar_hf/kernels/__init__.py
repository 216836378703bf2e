"""Attention over the stored format. `reference` is plain torch: the definition, and the path on the CPU."""

from .reference import attend_blocks, exact_attention

__all__ = ["attend_blocks", "exact_attention"]
