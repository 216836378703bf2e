"""What a cache holds, byte by byte."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .fitting import RowTransform

if TYPE_CHECKING:
    from .cache import OscarQuantizedCache


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a cache, all layers together.

    Args:
        tokens: columns seen, padding included.
        sink: bytes of the first tokens, 16-bit in a 16-bit model.
        recent: bytes of the recent window.
        history: bytes of the quantised history, scales and mins included.
        slack: bytes of the history's buffers that hold no token yet; after a fork also what they hold that it copied.
        other: bytes of layers that OSCAR does not quantise (sliding windows, linear attention), of padding masks and
            of token counts.
        history_elements: keys and values in the history, shared ones counted once; `8 * history / history_elements`
            are the bits of each.
        elements: keys and values in all quantised layers, row by row.
        dense: bytes that the quantised layers' tokens would take unquantised.
        rotations: bytes of transforms that were fitted to the sequences themselves (recipe "prompt"), and of what is
            kept for that until they are.
        exact_layers: layers that 2 bits cannot hold and that stay in 16, counted in all the above.
    """

    tokens: int
    sink: int
    recent: int
    history: int
    slack: int
    other: int
    history_elements: int
    elements: int
    dense: int
    rotations: int = 0
    exact_layers: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """All bytes that the cache's tensors occupy: the sum of `untyped_storage().nbytes()`."""
        return self.sink + self.recent + self.history + self.slack + self.rotations + self.other

    @property
    def history_bits(self) -> float:
        """Bits per element of the history."""
        return 8 * self.history / self.history_elements if self.history_elements else 0.0

    @property
    def bits(self) -> float:
        """Bits per element of the quantised layers, windows and slack included."""
        return 8 * (self.total - self.other) / self.elements if self.elements else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready values."""
        return {**asdict(self), "total": self.total, "bits": self.bits, "history_bits": self.history_bits}

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {getattr(self, name) / 1e6:.2f} MB"
            for name in ("history", "sink", "recent", "slack", "rotations")
            if name != "rotations" or self.rotations
        )
        return (
            f"{self.total / 1e6:.2f} MB for {self.tokens} tokens ({parts}); history {self.history_bits:.2f} and all "
            f"{self.bits:.2f} bits per element; unquantised {self.dense / 1e6:.2f} MB"
            + (f"; in 16 bits: layers {', '.join(map(str, self.exact_layers))}" if self.exact_layers else "")
        )


def measure(cache: OscarQuantizedCache) -> CacheMemory:
    """Count the storages that a cache's layers hold."""
    sink = recent = history = history_elements = elements = dense = 0
    held: dict[int, int] = {}  # bytes of each storage of histories
    layers = [layer for layer in cache.oscar_layers if layer.is_initialized]
    for layer in layers:
        tiers = layer.tiers
        for name, window in tiers.windows.items():
            size = window.untyped_storage().nbytes()
            sink, recent = (sink + size, recent) if name.startswith("sink") else (sink, recent + size)
        row = 2 * tiers.like.shape[1] * tiers.like.shape[3]  # elements of one token
        counted = [(tiers.history.buffers(), sum(tiers.flushed[: 1 if tiers.borrowed else None]))]
        counted += [(prefix.buffers(), prefix.keys[0].shape[0] * prefix.tokens) for prefix in tiers.prefixes]
        for buffers, tokens in counted:
            history += sum(map(_token_bytes, buffers)) * tokens
            history_elements += row * tokens
            held |= {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in buffers}
        tokens = sum(tiers.lengths) + tiers.prefix_tokens * layer.batch_size
        elements += row * tokens
        dense += row * tokens * tiers.like.element_size()
    others = [layer for layer in cache.layers if layer not in cache.oscar_layers]
    loose = [tensor for other in others for tensor in tensors_in(vars(other))]
    loose += [layer.columns for layer in layers if layer.columns is not None]
    loose += [tensor for layer in layers for tensor in layer.tiers.counters]
    return CacheMemory(
        int(cache.get_seq_length()),
        sink,
        recent,
        history,
        sum(held.values()) - history,
        _storage_bytes(loose),
        history_elements,
        elements,
        dense,
        _storage_bytes(
            [t for layer in layers if isinstance(layer.transform, RowTransform) for t in layer.transform.buffers()]
        ),
        tuple(index for index, layer in enumerate(cache.layers) if layer in layers and layer.exact),
    )


def _storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _token_bytes(buffer: Tensor) -> int:
    """Bytes of one token of one row in a buffer [B, H_kv, capacity, ...]."""
    return buffer.shape[1] * buffer.shape[3:].numel() * buffer.element_size()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value, its lists and its dicts."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
