"""Sources merged by virtual time: what each has given at any place of a pass.

With one set of weights, sample i of a source has the virtual time (amount of the source up to and with it) x period +
delay. An amount is tokens or samples. A period is an integer inverse to the weight. The merge is by (virtual time,
number of the source). Sources may have samples of one size: delays keep them from coming at the same times.

    weights of the stages --integrated over tokens or samples of the run--> what each source is due --inverted--> times

After a change of weights, times follow from what each source is due: the integral of its weight. In each stage it
grows in proportion to virtual time, by one token or sample per period. So debts are carried over from stage to stage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from orchdata.order.order import By, Ints, MixedSource, Samples

Stop = Literal["first", "all", "repeat"]

DUE_BITS = 32  # amounts due are in units of 2**-32 tokens or samples
_FINE = 64  # fractional bits inside a stretch, where rounding adds up over stages
_TIME_BITS = 32
SPAN = 4096  # samples computed together at first
LONGEST_SPAN = 1 << 16  # and in turn


class Stage(NamedTuple):
    """The period of each source from `bound` tokens or samples of the run on; 0 for a source that gives nothing."""

    bound: int
    periods: tuple[int, ...]

    @property
    def present(self) -> tuple[int, ...]:
        """The sources that give something."""
        return tuple(source for source, period in enumerate(self.periods) if period)


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
        return sum(self.amounts(by))


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

    def given(self, source: int, start: int, stop: int) -> tuple[Samples, Ints]:
        """Return samples [start, stop) of a source, at least one, and their tokens."""
        mine, parts, tokens = self._sources[source], [], []
        while start < stop:
            number, at = divmod(start, self.limit(source)) if self.endless else (self._number, start)
            end = min(at + stop - start, self.limit(source))
            own = mine.order.samples(number, at, end)
            tokens.append(mine.counts(own.row))
            passes = np.full(len(own.row), number, np.int32)
            parts.append(own._replace(row=own.row + mine.first_row, passes=passes))
            start += end - at
        return Samples.concatenate(parts), np.concatenate(tokens)

    def whole(self, source: int) -> int:
        """Return the tokens, or samples, of a source's pass."""
        return self.total(source) if self.by == "tokens" else self.limit(source)

    def mean(self, source: int) -> int:
        """Return the tokens of a mean sample; 1 if shares are in samples."""
        return max(1, self.total(source) // self.limit(source)) if self.by == "tokens" else 1


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
    tokens: Ints
    ends: Ints

    @property
    def first(self) -> int:
        return self.low.position

    def contains(self, unit: By, wanted: int) -> bool:
        """Whether it has the sample at position `wanted`, or the first that ends after `wanted` tokens."""
        if not len(self.ends):
            return False
        if unit == "samples":
            return 0 <= wanted - self.first < len(self.ends)
        return self.low.tokens <= wanted < int(self.ends[-1])


class Piece(NamedTuple):
    """A part of a stretch in which each source has one period.

    Attributes:
        time: virtual time at which it begins.
        at: tokens, or samples, of the pass that are due then.
        due: what each source is due, minus its lateness, in units of 2**-64.
        live: the sources that are not exhausted.
    """

    time: int
    at: int
    periods: tuple[int, ...]
    due: tuple[int, ...]
    live: tuple[int, ...]

    def zero(self, source: int) -> int:
        """Return the virtual time at which a source has given nothing, if it had this period from the start on."""
        return self.time - (self.due[source] * self.periods[source] >> _FINE)

    @property
    def total_rate(self) -> int:
        return sum(_rate_of(self.periods[source]) for source in self.live)

    def due_at(self, time: int) -> tuple[int, ...]:
        due, passed = list(self.due), time - self.time
        for source in self.live:
            due[source] -= (-passed << _FINE) // self.periods[source]
        return tuple(due)


class Stretch:
    """A part of a pass in which virtual time goes on: stages with the same sources, cut into pieces.

    The first stretch of a pass is its first stage alone, in one piece: sources begin apart from each other.

    Args:
        begin: what each source has given before.
        stages: from the one at `begin` on, with bounds in tokens or samples of the pass.
        due: what each source is due at `begin`, the integral of its weights, in units of 2**-DUE_BITS. None for the
            first stretch of a pass.

    Attributes:
        stop: the position at which the next stretch begins, once it is known.
    """

    def __init__(
        self, supply: Supply, begin: SourceProgress, stages: Sequence[Stage], due: tuple[int, ...] | None = None
    ) -> None:
        self._supply = supply
        self.begin = begin
        self.num_stages = len(stages)
        self.is_first = due is None
        self.begin_due = due or (0,) * supply.num_sources
        self._amounts = begin.amounts(supply.by)
        self._present = stages[0].present
        self._late = self._lateness(stages[0].periods)
        self._pieces = self._cut(stages)
        self._times = [piece.time for piece in self._pieces]
        self._begins = [piece.at for piece in self._pieces]
        self.stop: int | None = None
        self._end: SourceProgress | None = None

    # How late sources come, and pieces

    def _lateness(self, periods: Sequence[int]) -> list[int]:
        """Return how much later than due each source comes, in units of 2**-64."""
        late, count = [0] * len(periods), len(self._present)
        means = {source: self._supply.mean(source) for source in self._present}
        if self.is_first:
            # The k-th of n present ones is k/n of its mean sample ahead of the first.
            ahead = {source: periods[source] * means[source] * k // count for k, source in enumerate(self._present)}
            most = max(ahead.values())
            for source in self._present:
                late[source] = (most - ahead[source] << _FINE) // periods[source]
            return late
        # The k-th of n is (n - k)/n of its mean sample late. A source that lags more stays as late as it is, up to a
        # mean sample: sources with small samples must not pay for one that leads.
        for k, (source, mean) in enumerate(means.items()):
            lag = (self.begin_due[source] >> DUE_BITS) - self._amounts[source]
            late[source] = min(mean, max(mean * ((count - k) % count) // count, lag)) << _FINE
        return late

    def _cut(self, stages: Sequence[Stage]) -> list[Piece]:
        """Return pieces with one set of weights each: a stage, or its part before or after a source is exhausted."""
        supply, time, periods = self._supply, 0, stages[0].periods
        whole = [supply.whole(source) for source in range(supply.num_sources)]
        due = tuple((each << (_FINE - DUE_BITS)) - late for each, late in zip(self.begin_due, self._late, strict=True))
        if self.is_first:
            return [Piece(0, 0, periods, due, self._present)]
        # The first piece begins so late that all samples to come, also overdue ones, have times above 0.
        for source in self._present:
            overdue = (due[source] >> _FINE) - self._amounts[source] + 1
            time = max(time, overdue * periods[source] + 1)
        live = tuple(each for each in self._present if supply.endless or self._amounts[each] < whole[each])
        at, exact, start = sum(self._amounts), 0, time
        pieces = [piece := Piece(time, at, periods, due, live)]
        for following in [*stages[1:], None]:
            if not supply.endless and at > sum(whole):
                break
            while piece.live:
                # Find the virtual time at which this stage ends.
                total_rate, stop = piece.total_rate, None
                if following is not None:
                    exact_stop = exact + (max(0, following.bound - at) << (112 + _TIME_BITS)) // total_rate
                    stop = start + (exact_stop >> _TIME_BITS)
                # If a source is exhausted before that, a piece begins there, and the other sources share the rest.
                if not supply.endless:
                    last, source = min((piece.zero(each) + whole[each] * piece.periods[each], each) for each in live)
                    if stop is None or last < stop:
                        last = max(last, piece.time)
                        grown = ((last - piece.time) * total_rate) >> 112
                        given = self._given_at(self._amounts_in(piece, last)).amount(supply.by)
                        live = tuple(each for each in piece.live if each != source)
                        after = min(max(given, piece.at), at + grown)
                        # What was due when the source gave its last sample is due to the others from here on.
                        piece = Piece(last, at, piece.periods, piece.due_at(last), live)
                        at = after + (at + grown - after) * piece.total_rate // total_rate
                        pieces.append(piece := piece._replace(at=at))
                        exact = (last - start) << _TIME_BITS
                        continue
                # Else the next piece begins with the next stage.
                if following is not None and stop is not None:
                    at, exact = max(at, following.bound), exact_stop
                    pieces.append(piece := Piece(stop, at, following.periods, piece.due_at(stop), live))
                break
        return pieces

    def _piece_due(self, amount: int) -> Piece:
        """Return the piece in which `amount` tokens or samples of the pass are due."""
        return self._pieces[max(0, bisect_right(self._begins, amount) - 1)]

    def due(self, amount: int) -> tuple[int, ...]:
        """Return what each source is due after `amount` tokens or samples of the pass, in units of 2**-DUE_BITS.

        It is the integral of the weights, normalized over the sources that are not exhausted.
        """
        supply, piece = self._supply, self._piece_due(amount)
        if not self.is_first:
            fine, total_rate = [each + late for each, late in zip(piece.due, self._late, strict=True)], piece.total_rate
            for source in piece.live:
                fine[source] += ((amount - piece.at) * _rate_of(piece.periods[source]) << _FINE) // total_rate
            return tuple(each >> (_FINE - DUE_BITS) for each in fine)
        live, due, done = list(piece.live), list(self.begin_due), 0
        for time, source in [] if supply.endless else sorted((self._time_of_last(each), each) for each in live):
            after = self.at(time).amount(supply.by)
            if after >= amount:
                break
            if after > done:
                advance(due, piece.periods, live, after - done)
                done = after
            live.remove(source)
        advance(due, piece.periods, live, amount - done)
        return tuple(due)

    # What is given at a virtual time

    def at(self, time: int) -> SourceProgress:
        """Return what each source has given at a virtual time."""
        if time <= 0:
            return self.begin
        # The first piece begins before all times.
        return self._given_at(self._amounts_in(self._pieces[max(0, bisect_left(self._times, time) - 1)], time))

    def _amounts_in(self, piece: Piece, time: int) -> dict[int, int]:
        amounts = {source: (time - piece.zero(source)) // piece.periods[source] for source in piece.live}
        return amounts | {source: self._supply.whole(source) for source in set(self._present) - amounts.keys()}

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

    def end(self) -> SourceProgress:
        """Return where the pass ends if no other stage begins before; not for "repeat"."""
        if self._end is None:
            supply, counts = self._supply, list(self.begin.counts)
            if supply.stop == "all":
                for source in self._present:
                    counts[source] = supply.limit(source)
            elif all(counts[source] < supply.limit(source) for source in self._present):
                time, source = min((self._time_of_last(source), source) for source in self._present)
                counts = [*self.at(time).counts[: source + 1], *self.at(time - 1).counts[source + 1 :]]
            self._end = self._progress(counts)
        return self._end

    def _time_of_last(self, source: int) -> int:
        """Return the virtual time of the last sample of a source's pass; 0 if it is exhausted before."""
        whole = self._supply.whole(source)
        for piece, following in zip(self._pieces, [*self._pieces[1:], None], strict=True):
            time = piece.zero(source) + whole * piece.periods[source]
            if source in piece.live and (following is None or time <= following.time):
                return max(time, piece.time + 1)
        return 0

    # Search

    def next_span(self, unit: By, wanted: int, time: int, progress: SourceProgress, size: int) -> Span | None:
        """Return the span of about `size` samples that begins here if it contains the wanted sample, else None."""
        width = self._width(progress, size)
        if self._time_from(unit, wanted, time, progress) - time > width:
            return None
        span = self._span(time, progress, time + width, self.at(time + width))
        return span if span.contains(unit, wanted) else None

    def search(self, unit: By, wanted: int, time: int, progress: SourceProgress) -> Span:
        """Return the span around the sample at position `wanted`, or around the first that ends after `wanted` tokens.

        The first guess follows from the mean pace. Each miss doubles its width; bisection then narrows it to a span.
        """
        width = self._width(progress, SPAN)
        while True:
            middle = max(0, self._time_from(unit, wanted, time, progress))
            low, high = max(0, middle - width // 2), middle + width // 2 + 1
            below, above = self.at(low), self.at(high)
            if below.amount(unit) <= wanted < above.amount(unit):
                break
            time, progress = (low, below) if below.amount(unit) > wanted else (high, above)
            width *= 2
        while above.position - below.position > 4 * SPAN:
            middle = (low + high) // 2
            between = self.at(middle)
            if between.amount(unit) <= wanted:
                low, below = middle, between
            else:
                high, above = middle, between
        return self._span(low, below, high, above)

    def _width(self, progress: SourceProgress, size: int) -> int:
        """Estimate the virtual time of `size` samples from here on."""
        return max(1, int(size / self._pace("samples", progress)))

    def _time_from(self, unit: By, wanted: int, time: int, progress: SourceProgress) -> int:
        """Estimate the virtual time at which `wanted` samples or tokens are given, from the progress at `time`."""
        return time + int((wanted - progress.amount(unit)) / self._pace(unit, progress))

    def _pace(self, unit: By, progress: SourceProgress) -> float:
        """Estimate the samples or tokens per unit of virtual time from here on; never 0."""
        supply, pace, piece = self._supply, 0.0, self._piece_due(progress.amount(self._supply.by))
        for source in self._present:
            if supply.endless or progress.counts[source] < supply.limit(source):
                amounts = {"samples": supply.limit(source), "tokens": supply.total(source)}
                pace += amounts[unit] / amounts[supply.by] / piece.periods[source]
        return pace or 2.0**-60

    def _span(self, low: int, below: SourceProgress, high: int, above: SourceProgress) -> Span:
        """Return the samples after virtual time `low`, up to `high`."""
        supply, parts, tokens, times = self._supply, [], [], []
        for source in self._present:
            start, stop = below.counts[source], above.counts[source]
            if start == stop:
                continue
            mine, counts = supply.given(source, start, stop)
            sizes = np.cumsum(counts) if supply.by == "tokens" else np.arange(1, stop - start + 1)
            times += self._times_of(source, sizes + below.amounts(supply.by)[source], low, high)
            parts.append(mine)
            tokens.append(counts)
        samples, of_each = Samples.concatenate(parts), np.concatenate([np.zeros(0, np.int64), *tokens])
        if parts:
            # Stable: at equal times the source with the lower number is first.
            in_turn = np.argsort(np.concatenate(times), kind="stable")
            samples, of_each = samples.take(in_turn), of_each[in_turn]
        return Span(self, below, above, high, samples, of_each, below.tokens + np.cumsum(of_each))

    def _times_of(self, source: int, amounts: Ints, low: int, high: int) -> list[Ints]:
        """Return the virtual times at which a source has given these tokens or samples of the pass, by piece. They are
        relative to `low`, so that a run may have any length.
        """
        first, last = (max(0, bisect_left(self._times, time) - 1) for time in (low + 1, high))
        pieces = [(piece, piece.periods[source], piece.zero(source)) for piece in self._pieces[first : last + 1]]
        # A sample is in the first piece in which it is fully due.
        ends = [(later.time - zero) // period for (_, period, zero), (later, *_) in pairwise(pieces)]
        stops = np.searchsorted(amounts, ends, side="right").tolist() if ends else []
        times, start = [], 0
        for number, ((piece, period, zero), stop) in enumerate(zip(pieces, [*stops, len(amounts)], strict=True), first):
            if start < stop:
                scaled = _scaled(amounts[start:stop], period, zero - low)
                times.append(np.maximum(scaled, piece.time + 1 - low) if number else scaled)
                start = stop
        return times


def _scaled(amounts: Ints, period: int, offset: int) -> Ints:
    """Return amounts * period + offset, with Python integers if 64 bits do not suffice."""
    low, high = int(amounts[0]), int(amounts[-1])
    # A rare source has a long period.
    if max(abs(low * period + offset), abs(high * period + offset)) >= 1 << 62:
        return amounts.astype(object) * period + offset
    # Relative to the first: `low * period` alone may not fit 64 bits.
    return (amounts - low) * period + (low * period + offset)


def _rate_of(period: int) -> int:
    """Return the weight of a period, as a large integer."""
    return (1 << 112) // period


def advance(due: list[int], periods: Sequence[int], live: Sequence[int], amount: int) -> None:
    """Add an amount to what sources are due, shared by their weights."""
    rates = {source: _rate_of(periods[source]) for source in live}
    total_rate = sum(rates.values())
    for source, rate in rates.items():
        due[source] += (amount * rate << DUE_BITS) // total_rate
