"""A stretch of a lap in which virtual times are of one kind: from where its first stage begins.

virtual time --what each source is due--> place; position or tokens --search for its virtual time--> span of samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orchdata.order.sources import By, Ints, Place, Samples, Supply

DUE_BITS = 32  # what sources are due is counted in units of 2**-32 tokens or samples

_SPAN = 4096  # samples looked at together


class Span(NamedTuple):
    """Samples looked at: those between two places of a stretch, up to virtual time `time`.

    Attributes:
        ends: tokens of the lap up to and with each.
    """

    stretch: Stretch
    low: Place
    high: Place
    time: int
    samples: Samples
    ends: Ints

    @property
    def first(self) -> int:
        return self.low.position

    @property
    def stop(self) -> int:
        return self.first + len(self.ends)

    def holds(self, unit: By, wanted: int) -> bool:
        """Whether the sample at a position, or the first that ends behind so many tokens, is among them."""
        if not len(self.ends):
            return False
        if unit == "samples":
            return self.first <= wanted < self.stop
        return self.low.tokens <= wanted < int(self.ends[-1])


class Stretch:
    """A lap from where its first stage begins: each source has one period, and sources begin apart from each other.

    Args:
        begin: what each source has given before.
        at: tokens, or samples, of the lap before `begin`.
        due: what each source was due there, the integral of its weights, in units of 2**-DUE_BITS.

    Attributes:
        stop: the position where another stretch begins, once that is known.
    """

    def __init__(
        self, supply: Supply, begin: Place, periods: tuple[int, ...], at: int = 0, due: tuple[int, ...] | None = None
    ) -> None:
        self._supply = supply
        self.begin = begin
        self.begin_at = at
        self.begin_due = (0,) * supply.num_sources if due is None else due
        self._periods = periods
        self._amounts = begin.amounts(supply.by)
        self._present = [source for source, period in enumerate(periods) if period]
        self._delays = self._staggered()
        self.stop: int | None = None
        self._end: Place | None = None

    # What differs between kinds of stretches

    def at(self, time: int) -> Place:
        """What each source has given at a virtual time."""
        if time <= 0:
            return self.begin
        amounts = {
            source: self._amounts[source] + max(0, time - self._delays[source]) // self._periods[source]
            for source in self._present
        }
        return self._given_at(amounts)

    def _times(self, source: int, amounts: Ints, low: int, high: int) -> Ints:
        """Virtual times from `low` on at which a source has given so many tokens or samples of the lap, int64 (n,)."""
        period = self._periods[source]
        before = self._delays[source] - self._amounts[source] * period - low
        return scaled(amounts, period, before)

    def _time_of_last(self, source: int) -> int:
        """The virtual time of the last sample of a source's pass."""
        left = self._supply.whole(source) - self._amounts[source]
        return left * self._periods[source] + self._delays[source]

    def _periods_after(self, place: Place) -> tuple[int, ...]:
        return self._periods

    def _time_from(self, unit: By, wanted: int, time: int, place: Place) -> int:
        """Virtual time at which so many samples or tokens are given, about, as far as a place at a time says."""
        return time + int((wanted - place.amount(unit)) / self._pace(unit, place))

    def due(self, amount: int) -> tuple[int, ...]:
        """What each source is due after so many tokens or samples of the lap, in units of 2**-DUE_BITS.

        It is the integral of the weights: of those that are present, among each other, until a source has no more.
        """
        supply, live, found, done = self._supply, list(self._present), list(self.begin_due), self.begin_at
        ends = [] if supply.endless else sorted((self._time_of_last(source), source) for source in live)
        for time, source in ends:
            after = self.at(time).amount(supply.by)
            if after >= amount:
                break
            if after > done:
                _advance(found, self._periods, live, after - done)
                done = after
            live.remove(source)
        _advance(found, self._periods, live, amount - done)
        return tuple(found)

    # Where things are

    def width(self, place: Place) -> int:
        """Virtual time in which a span of samples comes from a place on, about."""
        return max(1, int(_SPAN / self._pace("samples", place)))

    def next_span(self, unit: By, wanted: int, time: int, place: Place) -> Span | None:
        """The span that follows a place, where it holds what is wanted."""
        width = self.width(place)
        if self._time_from(unit, wanted, time, place) - time > width:
            return None
        found = self._span(time, place, time + width, self.at(time + width))
        return found if found.holds(unit, wanted) else None

    def end(self) -> Place:
        """Where the lap ends if no other stage begins before; not of "repeat"."""
        if self._end is None:
            self._end = self._first_end() if self._supply.stop == "first" else self._last_end()
        return self._end

    def _last_end(self) -> Place:
        counts = list(self.begin.counts)
        for source in self._present:
            counts[source] = self._supply.limit(source)
        return self._place(counts)

    def _first_end(self) -> Place:
        if any(self.begin.counts[source] == self._supply.limit(source) for source in self._present):
            return self.begin
        time, source = min((self._time_of_last(source), source) for source in self._present)
        at, before = self.at(time).counts, self.at(time - 1).counts
        return self._place([*at[: source + 1], *before[source + 1 :]])

    def _staggered(self) -> list[int]:
        """The delay of each source: of n present ones, the k-th begins k/n of its mean sample ahead of the first."""
        ahead = [0] * len(self._periods)
        for number, source in enumerate(self._present):
            ahead[source] = self._periods[source] * self._supply.mean(source) * number // len(self._present)
        return [max(ahead) - each for each in ahead]

    def _given_at(self, amounts: Mapping[int, int]) -> Place:
        """The place where sources have given what ends within so many of their tokens, or so many samples."""
        supply, counts = self._supply, list(self.begin.counts)
        for source, amount in amounts.items():
            if supply.by == "tokens":
                count = supply.count_of(source, max(0, amount))
            else:
                count = amount if supply.endless else min(amount, supply.limit(source))
            counts[source] = max(counts[source], count)
        return self._place(counts)

    def _place(self, counts: Sequence[int]) -> Place:
        supply, begin = self._supply, self.begin
        given = (
            begin.given[source] if count == begin.counts[source] else supply.tokens_of(source, count)
            for source, count in enumerate(counts)
        )
        return Place(tuple(counts), tuple(given))

    def _pace(self, unit: By, place: Place) -> float:
        """Samples or tokens that come in a unit of virtual time from a place on, about; never 0."""
        supply, found, periods = self._supply, 0.0, self._periods_after(place)
        for source in self._present:
            if supply.endless or place.counts[source] < supply.limit(source):
                amounts = {"samples": supply.limit(source), "tokens": supply.total(source)}
                found += amounts[unit] / amounts[supply.by] / periods[source]
        return found or 2.0**-60

    def search(self, unit: By, wanted: int, time: int, place: Place) -> Span:
        """The span around the sample at a position, or around the first that ends behind so many tokens.

        A guess by the mean pace from a known place on, twice as wide with each miss; then halved to a span.
        """
        width = self.width(place)
        while True:
            middle = max(0, self._time_from(unit, wanted, time, place))
            low, high = max(0, middle - width // 2), middle + width // 2 + 1
            below, above = self.at(low), self.at(high)
            if below.amount(unit) <= wanted < above.amount(unit):
                break
            time, place = (low, below) if below.amount(unit) > wanted else (high, above)
            width *= 2
        while above.position - below.position > 4 * _SPAN:
            middle = (low + high) // 2
            found = self.at(middle)
            if found.amount(unit) <= wanted:
                low, below = middle, found
            else:
                high, above = middle, found
        return self._span(low, below, high, above)

    def _span(self, low: int, below: Place, high: int, above: Place) -> Span:
        """The samples behind virtual time `low`, up to `high`, and what each source has given then."""
        supply = self._supply
        parts, times = [], []
        for source in self._present:
            start, stop = below.counts[source], above.counts[source]
            if start == stop:
                continue
            mine = supply.given(source, start, stop)
            sizes = np.cumsum(mine.tokens) if supply.by == "tokens" else np.arange(1, stop - start + 1)
            # Times from `low` on, so that a run may be as long as it likes.
            times.append(self._times(source, sizes + below.amounts(supply.by)[source], low, high))
            parts.append(mine)
        samples = Samples.joined(parts)
        if parts:
            # Stable: of equal times the source with the lower number is first.
            samples = samples.taken(np.argsort(np.concatenate(times), kind="stable"))
        return Span(self, below, above, high, samples, below.tokens + np.cumsum(samples.tokens))


def scaled(amounts: Ints, period: int, offset: int) -> Ints:
    """amounts * period + offset, of Python's integers where 64 bits do not do."""
    low, high = int(amounts[0]), int(amounts[-1])
    if (
        max(abs(low * period + offset), abs(high * period + offset)) >= 1 << 62
    ):  # of a source that comes once in a while
        return amounts.astype(object) * period + offset
    # From the first on: what all have in common may be beyond 64 bits.
    return (amounts - low) * period + (low * period + offset)


def rate_of(period: int) -> int:
    """The weight of a period, as a large integer."""
    return (1 << 112) // period


def _advance(due: list[int], periods: Sequence[int], live: Sequence[int], amount: int) -> None:
    """Share out an amount among sources by their weights."""
    rates = {source: rate_of(periods[source]) for source in live}
    whole = sum(rates.values())
    for source, rate in rates.items():
        due[source] += (amount * rate << DUE_BITS) // whole
