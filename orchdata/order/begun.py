"""An epoch that goes on after the usable samples of its data set have changed.

    position --skip what is left out--> position in the order that the epoch began with --row of then--> row of now

What was delivered stays delivered, samples that became unusable are left out of the rest, and samples that became
usable come from the next epoch on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.storage.mapped_array import MappedArray

Ints = NDArray[np.int64]

_CHUNK = 4096


class FormerOrder(Protocol):
    """The order of then: see `Order`."""

    num_samples: int

    @property
    def streams(self) -> int: ...

    def describe(self) -> dict[str, object]: ...

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], Ints]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class BegunEpoch:
    """The rest of an epoch in the order that it began with. It pickles.

    Attributes:
        number: of the epoch; of a source in a mixture the number of its pass.
        order: that it began with, over the rows of then.
        num_rows: number of the rows of then.
        excluded: rows of then that were left out, ascending.
        removed: positions there that are left out, ascending.
        rows: row of now of each row of then, -1 if there is none; empty if rows have kept their numbers.
        position: samples that had been delivered when the samples changed; those before it are not known any more.
        tokens: that were delivered until then.
    """

    number: int
    order: FormerOrder
    num_rows: int
    excluded: MappedArray
    removed: MappedArray
    rows: MappedArray
    position: int
    tokens: int = 0

    @property
    def length(self) -> int:
        """Samples of the epoch, those before `position` among them."""
        return self.order.num_samples - int(self.removed.array.size)

    def rows_at(self, start: int, stop: int) -> Ints:
        """Return the rows at positions [start, stop). Raises IndexError before `position`."""
        self._check(start)
        if start == stop:
            return np.zeros(0, np.int64)
        at = self.former_positions(start, stop)
        first, last = int(at[0]), int(at[-1])
        row = self.order.rows(self.number, first, last + 1)[1][at - first]
        return self.rows.array[row] if self.rows.array.size else row

    def drawn_from(self, start: int, stop: int) -> Ints:
        """Return the stream that each sample at positions [start, stop) is drawn from."""
        return self.former_positions(start, stop) % self.order.streams

    def former_positions(self, start: int, stop: int) -> Ints:
        """Return positions [start, stop) in the order that the epoch began with."""
        removed = self.removed.array
        at = np.arange(start, stop)
        return at + np.searchsorted(removed - np.arange(removed.size), at, side="right")

    def _check(self, position: int) -> None:
        if position < self.position:
            raise IndexError(
                f"position {position} of epoch {self.number} is before {self.position}, where the usable samples have "
                "changed: use a loader with the index of then, and a state from before the change"
            )


class BegunSums:
    """Tokens along the rest of a begun epoch. What was delivered counts as it did, the rest as it does now."""

    def __init__(self, begun: BegunEpoch, counts: Any) -> None:
        self._begun = begun
        self._counts = counts
        self._kept: tuple[int, Ints] | None = None

    @cached_property
    def _ends(self) -> Ints:
        """Tokens before each chunk of positions, and of all."""
        begun = self._begun
        sums = [begun.tokens]
        for start in range(begun.position, begun.length, _CHUNK):
            stop = min(start + _CHUNK, begun.length)
            sums.append(sums[-1] + int(self._counts(begun.rows_at(start, stop)).sum()))
        return np.array(sums, np.int64)

    @property
    def total(self) -> int:
        return int(self._ends[-1])

    def before(self, position: int) -> int:
        """Return the tokens of the samples before a position. Raises IndexError as `BegunEpoch.rows_at`."""
        self._begun._check(position)
        number, rest = divmod(position - self._begun.position, _CHUNK)
        return int(self._ends[number]) + (int(self._chunk(number)[rest - 1]) if rest else 0)

    def position(self, tokens: int) -> int:
        """Return how many samples end within the first `tokens` tokens of the epoch."""
        if tokens >= self.total:
            return self._begun.length
        number = max(0, int(np.searchsorted(self._ends, tokens, side="right")) - 1)
        rest = np.searchsorted(self._chunk(number), tokens - int(self._ends[number]), side="right")
        return self._begun.position + number * _CHUNK + int(rest)

    def _chunk(self, number: int) -> Ints:
        """Return the tokens of a chunk up to and with each of its samples."""
        kept = self._kept
        if kept is None or kept[0] != number:
            start = self._begun.position + number * _CHUNK
            stop = min(start + _CHUNK, self._begun.length)
            kept = number, np.cumsum(self._counts(self._begun.rows_at(start, stop)))
            self._kept = kept
        return kept[1]
