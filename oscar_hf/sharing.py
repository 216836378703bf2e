"""History that rows and caches share: what a fork does not copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prefix:
    """A piece of history that nobody writes to any more, so that any row of any cache may read it.

    Args:
        keys: the parts of a stored format, [S, H_kv, tokens, ...]; views of a `History`'s buffers.
        values: the same.
        sources: which of the S each row reads.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    sources: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """How long it is."""
        return self.keys[0].shape[2]

    def buffers(self) -> list[Tensor]:
        """Every tensor that is held."""
        return [*self.keys, *self.values]

    def part(self, start: int, stop: int) -> Prefix:
        """Tokens `start` to `stop`, a view."""
        keys, values = (tuple(b[:, :, start:stop] for b in held) for held in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def select(self, rows: list[int] | slice) -> Prefix:
        """For these rows of the batch, in this order."""
        chosen = self.sources[rows] if isinstance(rows, slice) else tuple(self.sources[row] for row in rows)
        return replace(self, sources=chosen)

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """Each source that is read, and the rows that read it."""
        for source in sorted(set(self.sources)):
            yield source, [row for row, read in enumerate(self.sources) if read == source]

    def states(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parts of keys and values row by row, [B, H_kv, tokens, ...]; [1, ...] where all rows read one source."""
        sources = list(self.sources[:1] if len(set(self.sources)) == 1 else self.sources)
        rows = slice(sources[0], sources[0] + 1) if len(sources) == 1 else sources
        return [buffer[rows] for buffer in self.keys], [buffer[rows] for buffer in self.values]

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefix:
        """Itself: it never changes."""
        return self
