"""A stretch: a part of a pass in which virtual times are computed in one way. This one is the first of a pass.

virtual time --what each source is due--> progress of sources; position or tokens --search for its virtual time--> span
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orchdata.order.order import By, Ints
from orchdata.order.sources import Samples, SourceProgress, Supply

DUE_BITS = 32  # amounts due are in units of 2**-32 tokens or samples

_SPAN = 4096  # samples computed together


class Span(NamedTuple):
    """Computed samples: those from `low` to `high` of a stretch, up to virtual time `time`.

    Attributes:
        ends: tokens of the pass up to and with each sample.
    """

    stretch: Stretch
    low: SourceProgress
    high: SourceProgress
    time: int
    samples: Samples
    ends: Ints

    @property
    def first(self) -> int:
        return self.low.position

    @property
    def stop(self) -> int:
        return self.first + len(self.ends)

    def contains(self, unit: By, wanted: int) -> bool:
        """Whether it has the sample at position `wanted`, or the first that ends after `wanted` tokens."""
        if not len(self.ends):
            return False
        if unit == "samples":
            return self.first <= wanted < self.stop
        return self.low.tokens <= wanted < int(self.ends[-1])


class Stretch:
    """The first stage of a pass: each source has one period, and sources begin apart from each other.

    Args:
        begin: what each source has given before.
        at: tokens, or samples, of the pass before `begin`.
        due: what each source is due at `begin`, the integral of its weights, in units of 2**-DUE_BITS.

    Attributes:
        stop: the position at which the next stretch begins, once it is known.
    """

    def __init__(
        self,
        supply: Supply,
        begin: SourceProgress,
        periods: tuple[int, ...],
        at: int = 0,
        due: tuple[int, ...] | None = None,
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
        self._end: SourceProgress | None = None

    # Overridden by DueStretch

    def at(self, time: int) -> SourceProgress:
        """Return what each source has given at a virtual time."""
        if time <= 0:
            return self.begin
        amounts = {
            source: self._amounts[source] + max(0, time - self._delays[source]) // self._periods[source]
            for source in self._present
        }
        return self._given_at(amounts)

    def _times(self, source: int, amounts: Ints, low: int, high: int) -> Ints:
        """Return the virtual times, minus `low`, at which a source has given these tokens or samples of the pass:
        int64 (n,).
        """
        period = self._periods[source]
        return scaled(amounts, period, self._delays[source] - self._amounts[source] * period - low)

    def _time_of_last(self, source: int) -> int:
        """Return the virtual time of the last sample of a source's pass."""
        left = self._supply.whole(source) - self._amounts[source]
        return left * self._periods[source] + self._delays[source]

    def _periods_after(self, progress: SourceProgress) -> tuple[int, ...]:
        return self._periods

    def _time_from(self, unit: By, wanted: int, time: int, progress: SourceProgress) -> int:
        """Estimate the virtual time at which `wanted` samples or tokens are given, from the progress at `time`."""
        return time + int((wanted - progress.amount(unit)) / self._pace(unit, progress))

    def due(self, amount: int) -> tuple[int, ...]:
        """Return what each source is due after `amount` tokens or samples of the pass, in units of 2**-DUE_BITS.

        It is the integral of the weights, normalized over the sources that are not exhausted.
        """
        supply, live, due, done = self._supply, list(self._present), list(self.begin_due), self.begin_at
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

    # Search

    def width(self, progress: SourceProgress) -> int:
        """Estimate the virtual time of a span of samples that begins here."""
        return max(1, int(_SPAN / self._pace("samples", progress)))

    def next_span(self, unit: By, wanted: int, time: int, progress: SourceProgress) -> Span | None:
        """Return the span that begins here if it contains the wanted sample, else None."""
        width = self.width(progress)
        if self._time_from(unit, wanted, time, progress) - time > width:
            return None
        span = self._span(time, progress, time + width, self.at(time + width))
        return span if span.contains(unit, wanted) else None

    def end(self) -> SourceProgress:
        """Return where the pass ends if no other stage begins before; not for "repeat"."""
        if self._end is None:
            self._end = self._first_end() if self._supply.stop == "first" else self._last_end()
        return self._end

    def _last_end(self) -> SourceProgress:
        counts = list(self.begin.counts)
        for source in self._present:
            counts[source] = self._supply.limit(source)
        return self._progress(counts)

    def _first_end(self) -> SourceProgress:
        if any(self.begin.counts[source] == self._supply.limit(source) for source in self._present):
            return self.begin
        time, source = min((self._time_of_last(source), source) for source in self._present)
        at, before = self.at(time).counts, self.at(time - 1).counts
        return self._progress([*at[: source + 1], *before[source + 1 :]])

    def _staggered(self) -> list[int]:
        """Return the delay of each source: the k-th of n present ones is k/n of its mean sample ahead of the first."""
        ahead = [0] * len(self._periods)
        for number, source in enumerate(self._present):
            ahead[source] = self._periods[source] * self._supply.mean(source) * number // len(self._present)
        return [max(ahead) - each for each in ahead]

    def _given_at(self, amounts: Mapping[int, int]) -> SourceProgress:
        """Return the progress at which each source has given the samples that end within this amount of it."""
        supply, counts = self._supply, list(self.begin.counts)
        for source, amount in amounts.items():
            if supply.by == "tokens":
                count = supply.count_of(source, max(0, amount))
            else:
                count = amount if supply.endless else min(amount, supply.limit(source))
            counts[source] = max(counts[source], count)
        return self._progress(counts)

    def _progress(self, counts: Sequence[int]) -> SourceProgress:
        supply, begin = self._supply, self.begin
        given = (
            begin.given[source] if count == begin.counts[source] else supply.tokens_of(source, count)
            for source, count in enumerate(counts)
        )
        return SourceProgress(tuple(counts), tuple(given))

    def _pace(self, unit: By, progress: SourceProgress) -> float:
        """Estimate the samples or tokens per unit of virtual time from here on; never 0."""
        supply, pace, periods = self._supply, 0.0, self._periods_after(progress)
        for source in self._present:
            if supply.endless or progress.counts[source] < supply.limit(source):
                amounts = {"samples": supply.limit(source), "tokens": supply.total(source)}
                pace += amounts[unit] / amounts[supply.by] / periods[source]
        return pace or 2.0**-60

    def search(self, unit: By, wanted: int, time: int, progress: SourceProgress) -> Span:
        """Return the span around the sample at position `wanted`, or around the first that ends after `wanted` tokens.

        The first guess follows from the mean pace. Each miss doubles its width; bisection then narrows it to a span.
        """
        width = self.width(progress)
        while True:
            middle = max(0, self._time_from(unit, wanted, time, progress))
            low, high = max(0, middle - width // 2), middle + width // 2 + 1
            below, above = self.at(low), self.at(high)
            if below.amount(unit) <= wanted < above.amount(unit):
                break
            time, progress = (low, below) if below.amount(unit) > wanted else (high, above)
            width *= 2
        while above.position - below.position > 4 * _SPAN:
            middle = (low + high) // 2
            between = self.at(middle)
            if between.amount(unit) <= wanted:
                low, below = middle, between
            else:
                high, above = middle, between
        return self._span(low, below, high, above)

    def _span(self, low: int, below: SourceProgress, high: int, above: SourceProgress) -> Span:
        """Return the samples after virtual time `low`, up to `high`."""
        supply = self._supply
        parts, times = [], []
        for source in self._present:
            start, stop = below.counts[source], above.counts[source]
            if start == stop:
                continue
            mine = supply.given(source, start, stop)
            sizes = np.cumsum(mine.tokens) if supply.by == "tokens" else np.arange(1, stop - start + 1)
            # Relative to `low`, so that a run may have any length.
            times.append(self._times(source, sizes + below.amounts(supply.by)[source], low, high))
            parts.append(mine)
        samples = Samples.concatenate(parts)
        if parts:
            # Stable: at equal times the source with the lower number is first.
            samples = samples.take(np.argsort(np.concatenate(times), kind="stable"))
        return Span(self, below, above, high, samples, below.tokens + np.cumsum(samples.tokens))


def scaled(amounts: Ints, period: int, offset: int) -> Ints:
    """Return amounts * period + offset, with Python integers if 64 bits do not suffice."""
    low, high = int(amounts[0]), int(amounts[-1])
    # A rare source has a long period.
    if max(abs(low * period + offset), abs(high * period + offset)) >= 1 << 62:
        return amounts.astype(object) * period + offset
    # Relative to the first: `low * period` alone may not fit 64 bits.
    return (amounts - low) * period + (low * period + offset)


def rate_of(period: int) -> int:
    """Return the weight of a period, as a large integer."""
    return (1 << 112) // period


def advance(due: list[int], periods: Sequence[int], live: Sequence[int], amount: int) -> None:
    """Add an amount to what sources are due, shared by their weights."""
    rates = {source: rate_of(periods[source]) for source in live}
    total_rate = sum(rates.values())
    for source, rate in rates.items():
        due[source] += (amount * rate << DUE_BITS) // total_rate
