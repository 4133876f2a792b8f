"""The first stage of a pass, in closed form: what each source has given at any virtual time, position, or token.

Sample i of a source has the virtual time (amount of the source up to and with it) x period + delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from orchdata.order.sources import By, SourceProgress, Supply

DUE_BITS = 32  # amounts due are in units of 2**-32 tokens or samples


class Line(NamedTuple):
    """Virtual times in a part of a pass in which each source has one period: amount x period + offset.

    Attributes:
        offsets: of each source; of no use where it has no period.
        floor: the earliest time of a sample; None for no limit.
        until: the time up to which samples come; None for no limit.
    """

    periods: tuple[int, ...]
    offsets: Sequence[int]
    floor: int | None
    until: int | None


class FirstStretch:
    """The first stage of a pass: each source has one period, and sources begin apart from each other.

    Attributes:
        bound: tokens, or samples, of the pass at which the next stretch begins; None for the last one.
        following: the next stretch, once it is known.
    """

    def __init__(self, supply: Supply, begin: SourceProgress, periods: tuple[int, ...], bound: int | None) -> None:
        self._supply = supply
        self.bound = bound
        self.following: Any = None
        self.begin = begin
        self.begin_due = begin.counts
        self._periods = periods
        self.present = [source for source, period in enumerate(periods) if period]
        self._delays = self._staggered()

    def line(self, number: int) -> Line:
        """Return how times follow from amounts."""
        return Line(self._periods, self._delays, None, None)

    def extend(self, number: int, given: int) -> None:
        """Not called: times follow in one way."""

    def due(self, amount: int) -> tuple[int, ...]:
        """Return what each source is due after `amount` tokens or samples of the pass, in units of 2**-DUE_BITS.

        It is the integral of the weights, normalized over the sources that are not exhausted.
        """
        supply, live, due, done = self._supply, list(self.present), list(self.begin_due), 0
        ends = [] if supply.endless else sorted((self._time_of_last(source), source) for source in live)
        for time, source in ends:
            after = self.at(time).amount(supply.by)
            if after >= amount:
                break
            if after > done:
                advance(due, self._periods, live, after - done)
                done = after
            live.remove(source)
        advance(due, self._periods, live, amount - done)
        return tuple(due)

    def end(self) -> SourceProgress:
        """Return where the pass ends if no other stage begins before; not for "repeat"."""
        supply = self._supply
        if supply.stop == "all":
            whole = (supply.limit(source) if period else 0 for source, period in enumerate(self._periods))
            return supply.progress(tuple(whole))
        time, source = min((self._time_of_last(source), source) for source in self.present)
        at, before = self.at(time).counts, self.at(time - 1).counts
        return supply.progress((*at[: source + 1], *before[source + 1 :]))

    def at(self, time: int) -> SourceProgress:
        """Return what each source has given at a virtual time."""
        supply, counts = self._supply, [0] * self._supply.num_sources
        for source in self.present:
            amount = max(0, time - self._delays[source]) // self._periods[source]
            if supply.by == "tokens":
                counts[source] = supply.count_of(source, amount)
            else:
                counts[source] = amount if supply.endless else min(amount, supply.limit(source))
        return supply.progress(tuple(counts))

    def shortly_before(self, unit: By, wanted: int, most: int) -> SourceProgress:
        """Return what sources have given at a virtual time at which they have given at most `wanted` samples or tokens,
        and fewer than `most` samples are missing. There must be more than `wanted`.

        The first guess follows from the mean pace. Each miss doubles its width; bisection then narrows it.
        """
        time, progress, width = 0, self.begin, max(1, int(most / 2 / self._pace("samples", self.begin)))
        while True:
            middle = max(0, time + int((wanted - progress.amount(unit)) / self._pace(unit, progress)))
            low, high = max(0, middle - width // 2), middle + width // 2 + 1
            below, above = self.at(low), self.at(high)
            if below.amount(unit) <= wanted < above.amount(unit):
                break
            time, progress = (low, below) if below.amount(unit) > wanted else (high, above)
            width *= 2
        while above.position - below.position > most:
            middle = (low + high) // 2
            between = self.at(middle)
            if between.amount(unit) <= wanted:
                low, below = middle, between
            else:
                high, above = middle, between
        return below

    def _pace(self, unit: By, progress: SourceProgress) -> float:
        """Estimate the samples or tokens per unit of virtual time from here on; never 0."""
        supply, pace = self._supply, 0.0
        for source in self.present:
            if supply.endless or progress.counts[source] < supply.limit(source):
                amounts = {"samples": supply.limit(source), "tokens": supply.total(source)}
                pace += amounts[unit] / amounts[supply.by] / self._periods[source]
        return pace or 2.0**-60

    def _time_of_last(self, source: int) -> int:
        """Return the virtual time of the last sample of a source's pass."""
        return self._supply.whole(source) * self._periods[source] + self._delays[source]

    def _staggered(self) -> list[int]:
        """Return the delay of each source: the k-th of n present ones is k/n of its mean sample ahead of the first."""
        ahead = [0] * len(self._periods)
        for number, source in enumerate(self.present):
            ahead[source] = self._periods[source] * self._supply.mean(source) * number // len(self.present)
        return [max(ahead) - each for each in ahead]


def rate_of(period: int) -> int:
    """Return the weight of a period, as a large integer."""
    return (1 << 112) // period


def advance(due: list[int], periods: Sequence[int], live: Sequence[int], amount: int) -> None:
    """Add an amount to what sources are due, shared by their weights."""
    rates = {source: rate_of(periods[source]) for source in live}
    total_rate = sum(rates.values())
    for source, rate in rates.items():
        due[source] += (amount * rate << DUE_BITS) // total_rate
