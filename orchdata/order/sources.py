"""The sources of a mixture: the samples in an amount of tokens of each, and the tokens of an amount of samples.

MixedSource, number of its pass --TokenSums--> samples within n tokens, tokens of n samples
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.order.order import By, Ints, MixedSource

Stop = Literal["first", "all", "repeat"]


class Stage(NamedTuple):
    """The period of each source from `bound` tokens or samples of the run on; 0 for a source that gives nothing."""

    bound: int
    periods: tuple[int, ...]


class SourceProgress(NamedTuple):
    """The number of samples that each source has given in a pass, and their tokens."""

    counts: tuple[int, ...]
    given: tuple[int, ...]

    @property
    def position(self) -> int:
        return sum(self.counts)

    @property
    def tokens(self) -> int:
        return sum(self.given)

    def amounts(self, by: By) -> tuple[int, ...]:
        return self.given if by == "tokens" else self.counts

    def amount(self, by: By) -> int:
        return self.tokens if by == "tokens" else self.position


class Samples(NamedTuple):
    """Samples in sequence: source and pass, int32; row, tokens and stream of the source, int64; each (n,)."""

    source: NDArray[np.int32]
    passes: NDArray[np.int32]
    row: Ints
    tokens: Ints
    stream: Ints

    def cut(self, start: int, stop: int) -> Samples:
        return self.take(slice(start, stop))

    def take(self, indices: slice | Ints) -> Samples:
        source, passes, row, tokens, stream = self
        return Samples(source[indices], passes[indices], row[indices], tokens[indices], stream[indices])

    @staticmethod
    def concatenate(parts: Sequence[Samples]) -> Samples:
        if not parts:
            empty = np.zeros(0, np.int64)
            return Samples(empty.astype(np.int32), empty.astype(np.int32), empty, empty, empty)
        return Samples(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Supply:
    """The samples and tokens of each source in a pass.

    Args:
        number: number of the pass of each source; for "repeat" of its first.
    """

    def __init__(self, sources: Sequence[MixedSource], by: By, stop: Stop, number: int) -> None:
        self.by: By = by
        self.stop: Stop = stop
        self.endless = stop == "repeat"
        self.num_sources = len(sources)
        self._sources = sources
        self._number = number

    def limit(self, source: int) -> int:
        """Return the samples of each pass of a source."""
        return self._sources[source].order.num_samples

    def total(self, source: int) -> int:
        """Return the tokens of each pass of a source."""
        return self._sources[source].sums.total

    def tokens_of(self, source: int, count: int) -> int:
        """Return the tokens of the first `count` samples of a source."""
        sums = self._sources[source].sums
        if not self.endless:
            return self.total(source) if count == self.limit(source) else sums.before(self._number, count)
        number, rest = divmod(count, self.limit(source))
        return number * sums.total + sums.before(number, rest)

    def count_of(self, source: int, tokens: int) -> int:
        """Return how many samples of a source end within its first `tokens` tokens."""
        sums = self._sources[source].sums
        if not self.endless:
            return self.limit(source) if tokens >= self.total(source) else sums.position(self._number, tokens)
        number, rest = divmod(tokens, sums.total)
        return number * self.limit(source) + sums.position(number, rest)

    def given(self, source: int, start: int, stop: int) -> Samples:
        """Return samples [start, stop) of a source."""
        mine, parts = self._sources[source], []
        while start < stop:
            number, at = divmod(start, self.limit(source)) if self.endless else (self._number, start)
            end = min(at + stop - start, self.limit(source))
            numbers, row = mine.order.rows(number, at, end)
            passes = np.full(len(row), number, np.int32)
            tokens, stream = mine.counts(row), mine.order.drawn_from(number, at, end)
            parts.append(Samples(numbers, passes, row + mine.first_row, tokens, stream))
            start += end - at
        return Samples.concatenate(parts)

    def whole(self, source: int) -> int:
        """Return the tokens, or samples, of a source's pass."""
        return self.total(source) if self.by == "tokens" else self.limit(source)

    def mean(self, source: int) -> int:
        """Return the tokens of a mean sample; 1 if shares are in samples."""
        return max(1, self.total(source) // self.limit(source)) if self.by == "tokens" else 1
