"""The sources of a mixture, and what one of them has given after so many samples or tokens.

MixedSource, the pass it is in --TokenSums--> samples in so many tokens, tokens of so many samples
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.order.order import Order
from orchdata.order.token_sums import TokenCounts, TokenSums

Ints = NDArray[np.int64]
By = Literal["tokens", "samples"]
Stop = Literal["first", "all", "repeat"]


class MixedSource(NamedTuple):
    """One source of a mixture.

    Attributes:
        order: of its own rows; a pass is one of its epochs.
        counts: tokens of its own rows.
        sums: of `counts` along `order`.
        first_row: where its rows begin among those of all sources.
        loss_weight: what a loss token of it counts.
    """

    name: str
    order: Order
    counts: TokenCounts
    sums: TokenSums
    first_row: int
    loss_weight: float = 1.0


class Stage(NamedTuple):
    """From so many tokens or samples of the run on, each source's period; 0 for one that gives nothing."""

    bound: int
    periods: tuple[int, ...]


class Place(NamedTuple):
    """A place of a lap: how many samples each source has given, and their tokens."""

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
    """Samples in turn: source and pass, int32, row, tokens and stream of the source, int64, each (n,)."""

    source: NDArray[np.int32]
    passes: NDArray[np.int32]
    row: Ints
    tokens: Ints
    stream: Ints

    def cut(self, start: int, stop: int) -> Samples:
        return self.taken(slice(start, stop))

    def taken(self, places: slice | Ints) -> Samples:
        source, passes, row, tokens, stream = self
        return Samples(source[places], passes[places], row[places], tokens[places], stream[places])

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        if not parts:
            empty = np.zeros(0, np.int64)
            return Samples(empty.astype(np.int32), empty.astype(np.int32), empty, empty, empty)
        return Samples(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Supply:
    """What each source of a lap has.

    Args:
        number: the pass that each source is in; of "repeat" its first.
    """

    def __init__(self, sources: Sequence[MixedSource], by: By, stop: Stop, number: int) -> None:
        self.by: By = by
        self.stop: Stop = stop
        self.endless = stop == "repeat"
        self.num_sources = len(sources)
        self._sources = sources
        self._number = number

    def limit(self, source: int) -> int:
        """Samples of a pass."""
        return self._sources[source].order.num_samples

    def total(self, source: int) -> int:
        """Tokens of a pass."""
        return self._sources[source].sums.total

    def tokens_of(self, source: int, count: int) -> int:
        """Tokens of the first samples of a source."""
        sums = self._sources[source].sums
        if not self.endless:
            return sums.total if count == self.limit(source) else sums.before(self._number, count)
        number, rest = divmod(count, self.limit(source))
        return number * sums.total + sums.before(number, rest)

    def count_of(self, source: int, tokens: int) -> int:
        """Samples of a source that end within so many of its tokens."""
        sums = self._sources[source].sums
        if not self.endless:
            return self.limit(source) if tokens >= sums.total else sums.position(self._number, tokens)
        number, rest = divmod(tokens, sums.total)
        return number * self.limit(source) + sums.position(number, rest)

    def given(self, source: int, start: int, stop: int) -> Samples:
        """Samples [start, stop) of a source."""
        mine, size, found = self._sources[source], self.limit(source), []
        while start < stop:
            number, at = divmod(start, size) if self.endless else (self._number, start)
            end = min(at + stop - start, size)
            numbers, row = mine.order.rows(number, at, end)
            passes = np.full(len(row), number, np.int32)
            tokens, stream = mine.counts(row), mine.order.drawn_from(number, at, end)
            found.append(Samples(numbers, passes, row + mine.first_row, tokens, stream))
            start += end - at
        return Samples.joined(found)

    def whole(self, source: int) -> int:
        """Tokens, or samples, of a pass."""
        return self.total(source) if self.by == "tokens" else self.limit(source)

    def mean(self, source: int) -> int:
        """Tokens of a mean sample; by samples 1."""
        return max(1, self.total(source) // self.limit(source)) if self.by == "tokens" else 1
