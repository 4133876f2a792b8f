"""Sources merged by virtual time: the progress of each source at any position of a pass.

With one set of weights, sample i of a source has the virtual time (amount of the source up to and with it) x period +
delay. An amount is tokens or samples. A period is an integer inverse to the weight. Delays keep sources apart that have
samples of one size and would otherwise come at the same times (`stretch.py`). After a change of weights, times follow
from what each source is due and has given (`due.py`). The merge is by (virtual time, number of the source).

`TokenSums` say what a source has given at a virtual time, so a position is found by searching for its virtual time.
Samples are computed a span at a time. The last spans are kept, because the next step begins there.

A stretch in which sources continue from what they are due: debts are carried over from one stage to the next.

weights of the stages --integrated over tokens or samples of the run--> what each source is due --inverted--> times

Due is what a source should have given: the integral of its weight. In each stage it grows in proportion to virtual
time, by one token or sample per period. Stages with the same sources follow each other without a break. A sample comes
when its source is due up to the sample's end, plus a fixed fraction of a sample, so that sources stay apart.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from orchdata.order.order import By, Ints, MixedSource
from orchdata.order.sources import Samples, SourceProgress, Stage, Stop, Supply
from orchdata.order.stretch import DUE_BITS, Span, Stretch, advance, rate_of, scaled

__all__ = ["By", "SourcePass", "MixedSource", "SourceProgress", "StretchStart", "Samples", "Stage", "Stop", "Stretch"]

_SPANS_KEPT = 4


class StretchStart(NamedTuple):
    """What each source has given and is due at the start of a stretch.

    Attributes:
        due: see `Stretch`.
    """

    progress: SourceProgress
    due: tuple[int, ...]


class KnownStretches(NamedTuple):
    """The stretches of a pass that are known, from its start on, and whether these are all of them."""

    stretches: tuple[Stretch, ...]
    is_complete: bool


class SourcePass:
    """One pass through all sources: an epoch of "first" and "all"; for "repeat" the whole run.

    Args:
        stages: see `MixtureOrder`.
        number: number of the pass of each source; for "repeat" of its first.
        given_before: tokens or samples, as in the bounds of stages, that the run has given before.
        stretch_start: the start of a stretch inside; by default the start of the pass.
        is_changed: whether what came before `stretch_start` does not follow from the stages.
    """

    def __init__(
        self,
        sources: Sequence[MixedSource],
        stages: Sequence[Stage],
        by: By,
        stop: Stop,
        *,
        number: int,
        given_before: int,
        stretch_start: StretchStart | None = None,
        is_changed: bool = False,
    ) -> None:
        self.by: By = by
        self.endless = stop == "repeat"
        self._sources = sources
        self._supply = Supply(sources, by, stop, number)
        self._stages = tuple(Stage(stage.bound - given_before, stage.periods) for stage in stages)
        self._bounds = [stage.bound for stage in self._stages]
        none = (0,) * len(sources)
        self.start = SourceProgress(none, none)
        first = Stretch(self._supply, self.start, self._stage_at(0).periods)
        self._earlier: SourcePass | None = None
        self._stretch_start = stretch_start
        if stretch_start is not None:
            first = self._due_from(*stretch_start)
            if not is_changed:
                self._earlier = SourcePass(sources, stages, by, stop, number=number, given_before=given_before)
        # Both are replaced whole, because several threads plan steps.
        self._known = KnownStretches((first,), False)
        self._spans: tuple[Span, ...] = ()

    # Positions and samples

    def end(self) -> SourceProgress:
        """Return the progress at the end of the pass; not for "repeat"."""
        return self._stretch(lambda _: False).end()

    def progress_at(self, position: int) -> SourceProgress:
        """Return the progress of each source at a position."""
        if position < self._first.position:
            return self._before().progress_at(position)
        return self._progress_in(self._stretch(lambda stretch: position <= stretch.begin.position), position)

    def ending_within(self, tokens: int) -> int:
        """Return how many samples end within `tokens` tokens, which must be fewer than the pass has."""
        if tokens < self._first.tokens:
            return self._before().ending_within(tokens)
        return self._ending_within(self._stretch(lambda stretch: tokens < stretch.begin.tokens), tokens)

    def filled_by(self, unit: By, amount: int) -> int:
        """Return the first position that has at least `amount` samples or tokens before it."""
        if unit == "tokens" and self._earlier is None and 0 < amount <= self._first.tokens:
            return self._first.position  # the last sample of an epoch reached beyond its size; then weights changed
        return amount if unit == "samples" or not amount else self.ending_within(amount - 1) + 1

    def samples(self, start: int, stop: int) -> Samples:
        parts = []
        if start < self._first.position:
            parts.append(self._before().samples(start, min(stop, self._first.position)))
            start = min(stop, self._first.position)
        while start < stop:
            stretch = self._stretch(lambda stretch, at=start: at < stretch.begin.position)  # type: ignore[misc]
            span = self._span(stretch, "samples", start)
            end = min(stop, span.stop, stop if stretch.stop is None else stretch.stop)
            parts.append(span.samples.cut(start - span.first, end - span.first))
            start = end
        return Samples.concatenate(parts)

    def due(self, progress: SourceProgress) -> tuple[int, ...]:
        """Return what each source is due at this progress, in units of 2**-DUE_BITS."""
        return self._stretch_of(progress).due(progress.amount(self.by))

    def periods(self, progress: SourceProgress) -> tuple[int, ...]:
        """Return the periods of the last sample before; at the start of the pass, of its first sample."""
        return self._stage_at(max(0, progress.amount(self.by) - 1)).periods

    def last_change(self, progress: SourceProgress) -> StretchStart | None:
        """Return the start of the current stretch; None in the first stretch of the pass."""
        stretch = self._stretch_of(progress)
        if stretch is self._known.stretches[0]:
            return self._stretch_start
        return StretchStart(stretch.begin, stretch.begin_due)

    @property
    def _first(self) -> SourceProgress:
        return self._known.stretches[0].begin

    def _before(self) -> SourcePass:
        if self._earlier is None:
            raise IndexError(
                "this position is before the one where the weights of the mixture changed: use a loader with the "
                "former weights, and a state from before the change"
            )
        return self._earlier

    def _stretch_of(self, progress: SourceProgress) -> Stretch:
        return self._stretch(lambda stretch: progress.position <= stretch.begin.position)

    def _progress_in(self, stretch: Stretch, position: int) -> SourceProgress:
        if position == stretch.begin.position:
            return stretch.begin
        span = self._span(stretch, "samples", position - 1)
        mine = span.samples.cut(0, position - span.first)
        num_sources = len(self._sources)
        counts = np.bincount(mine.source, minlength=num_sources).tolist()
        tokens = np.bincount(mine.source, mine.tokens, num_sources).astype(np.int64).tolist()
        return SourceProgress(
            tuple(before + new for before, new in zip(span.low.counts, counts, strict=True)),
            tuple(before + new for before, new in zip(span.low.given, tokens, strict=True)),
        )

    def _ending_within(self, stretch: Stretch, tokens: int) -> int:
        span = self._span(stretch, "tokens", tokens)
        return span.first + int(np.searchsorted(span.ends, tokens, side="right"))

    # Stages and stretches

    def _stage_number(self, amount: int) -> int:
        return max(0, bisect_right(self._bounds, amount) - 1)

    def _stage_at(self, amount: int) -> Stage:
        return self._stages[self._stage_number(amount)]

    def _stretch(self, is_after: Callable[[Stretch], bool]) -> Stretch:
        """Return the last stretch for which `is_after` is false, computing stretches as far as necessary."""
        known = self._known
        while not known.is_complete and (len(known.stretches) == 1 or not is_after(known.stretches[-1])):
            self._known = known = self._extended(known)
            if is_after(known.stretches[-1]):
                break
        number = bisect_left(known.stretches, True, lo=1, key=is_after)
        return known.stretches[number - 1]

    def _extended(self, known: KnownStretches) -> KnownStretches:
        """Return them with the next stretch, if there is one."""
        last = known.stretches[-1]
        bound = self._next_bound(last)
        begin = None if bound is None else self._progress_after(last, bound)
        if begin is None:
            return KnownStretches(known.stretches, True)
        following = self._following(last, begin)
        last.stop = begin.position
        return KnownStretches((*known.stretches, following), False)

    def _next_bound(self, stretch: Stretch) -> int | None:
        """Return where the first stage begins that the stretch does not cover."""
        number = self._stage_number(stretch.begin.amount(self.by))
        after = number + 1 + (len(self._along(number)) - 1 if isinstance(stretch, DueStretch) else 0)
        return self._bounds[after] if after < len(self._bounds) else None

    def _along(self, number: int) -> Sequence[Stage]:
        """Return the stages from this number on that have the same sources."""
        present = _present(self._stages[number])
        stop = number + 1
        while stop < len(self._stages) and _present(self._stages[stop]) == present:
            stop += 1
        return self._stages[number:stop]

    def _following(self, last: Stretch, begin: SourceProgress) -> Stretch:
        """Return the stretch that begins here, after `last`, with other weights."""
        amount, bound = begin.amount(self.by), self._next_bound(last)
        assert bound is not None
        before = _present(self._stages[self._stage_number(bound) - 1])
        if not before & _present(self._stage_at(amount)):
            # No source of the stage before remains, so its last sample had to reach beyond its end.
            return self._due_from(begin, last.due(amount))
        # A sample that reaches beyond the end of its stage counts for both stages, by its amount in each.
        due = list(last.due(bound))
        bounds = [bound, *(each for each in self._bounds if bound < each < amount), amount]
        for start, stop in itertools.pairwise(bounds):
            stage, limit = self._stage_at(start), self._supply.limit
            live = [each for each in _present(stage) if self.endless or begin.counts[each] < limit(each)]
            advance(due, stage.periods, live, stop - start)
        return self._due_from(begin, tuple(due))

    def _due_from(self, begin: SourceProgress, due: tuple[int, ...]) -> DueStretch:
        amount = begin.amount(self.by)
        return DueStretch(self._supply, begin, self._along(self._stage_number(amount)), amount, due)

    def _progress_after(self, stretch: Stretch, amount: int) -> SourceProgress | None:
        """Return the progress at which a stretch has given an amount; None if the pass ends before, or there."""
        if not self.endless and amount >= stretch.end().amount(self.by):
            return None
        at = amount if self.by == "samples" else self._ending_within(stretch, amount - 1) + 1
        progress = self._progress_in(stretch, at)
        return None if not self.endless and progress.position >= stretch.end().position else progress

    def _span(self, stretch: Stretch, unit: By, wanted: int) -> Span:
        """Return the span around the sample at position `wanted`, or the first that ends after `wanted` tokens."""
        for span in self._spans:
            if span.stretch is stretch and span.contains(unit, wanted):
                return span
        # Continue from the last known span before the wanted sample.
        near = [
            (each.time, each.high)
            for each in self._spans
            if each.stretch is stretch and each.high.amount(unit) <= wanted
        ]
        time, progress = max(near, key=lambda known: known[0], default=(0, stretch.begin))
        span = stretch.next_span(unit, wanted, time, progress) or stretch.search(unit, wanted, time, progress)
        self._spans = (span, *self._spans)[:_SPANS_KEPT]
        return span


def _present(stage: Stage) -> frozenset[int]:
    return frozenset(source for source, period in enumerate(stage.periods) if period)


_FINE = 64  # fractional bits inside a stretch, where rounding adds up over stages
_TIME_BITS = 32


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


class DueStretch(Stretch):
    """A stretch over stages with the same sources.

    Args:
        stages: from the stage at `at` on, with bounds in tokens or samples of the pass.
        at, due: see `Stretch`.
    """

    def __init__(
        self, supply: Supply, begin: SourceProgress, stages: Sequence[Stage], at: int, due: tuple[int, ...]
    ) -> None:
        super().__init__(supply, begin, stages[0].periods, at, due)
        self._late = self._lateness()
        self._pieces = self._cut(stages)
        self._times_of = [piece.time for piece in self._pieces]
        self._begins = [piece.at for piece in self._pieces]
        self._arrays: tuple[tuple[int, int], tuple[Ints, Ints, Ints]] | None = None

    def at(self, time: int) -> SourceProgress:
        return self.begin if time <= 0 else self._given_at(self._amounts_at(time))

    def due(self, amount: int) -> tuple[int, ...]:
        number = max(0, bisect_right(self._begins, amount) - 1)
        piece = self._pieces[number]
        rates = {source: rate_of(piece.periods[source]) for source in piece.live}
        total_rate, due = sum(rates.values()), list(self.begin_due)
        for source in self._present:
            grown = ((amount - piece.at) * rates[source] << _FINE) // total_rate if source in rates else 0
            due[source] = (piece.due[source] + (self._late[source] << _FINE) + grown) >> (_FINE - DUE_BITS)
        return tuple(due)

    def _lateness(self) -> list[int]:
        """Return how much later than due each source comes: the k-th of n present ones (n - k)/n of its mean sample.

        A source that lags more stays as late as it is, up to a mean sample: sources with small samples must not pay for
        one that leads.
        """
        late, count, amounts = [0] * len(self._periods), len(self._present), self._amounts
        for number, source in enumerate(self._present):
            mean = self._supply.mean(source)
            lag = (self.begin_due[source] >> DUE_BITS) - amounts[source]
            late[source] = min(mean, max(mean * ((count - number) % count) // count, lag))
        return late

    def _cut(self, stages: Sequence[Stage]) -> list[Piece]:
        """Return pieces with one set of weights each: a stage, or its part before or after a source is exhausted."""
        supply, live, time = self._supply, tuple(self._present), 0
        due = [
            (each << (_FINE - DUE_BITS)) - (late << _FINE)
            for each, late in zip(self.begin_due, self._late, strict=True)
        ]
        # The first piece begins so late that all samples to come, also overdue ones, have times above 0.
        for source in self._present:
            overdue = (due[source] >> _FINE) - self._amounts[source] + 1
            time = max(time, overdue * self._periods[source] + 1)
        if not supply.endless:
            live = tuple(source for source in live if self.begin.counts[source] < supply.limit(source))
        pieces, at, exact = [Piece(time, self.begin_at, stages[0].periods, tuple(due), live)], self.begin_at, 0
        start = time
        most = None if supply.endless else sum(supply.whole(source) for source in range(supply.num_sources))
        for stage, following in zip(stages, [*stages[1:], None], strict=True):
            periods = stage.periods
            if most is not None and at > most:
                break
            while True:
                # Find the virtual time at which this stage ends.
                piece = pieces[-1]
                total_rate = sum(rate_of(periods[source]) for source in piece.live)
                stop = None
                if following is not None and piece.live:
                    exact_stop = exact + (max(0, following.bound - at) << (112 + _TIME_BITS)) // total_rate
                    stop = start + (exact_stop >> _TIME_BITS)
                # If a source is exhausted before that, a piece begins there, and the other sources share the rest.
                over = None if supply.endless or not piece.live else self._next_over(piece)
                if over is not None and (stop is None or over[0] < stop):
                    last, source = over
                    last = max(last, piece.time)
                    grown = ((last - piece.time) * total_rate) >> 112
                    given = self._amount_by(pieces, last)
                    rest = tuple(each for each in piece.live if each != source)
                    rest_rate = sum(rate_of(periods[each]) for each in rest)
                    after = min(max(given, piece.at), at + grown)
                    # What was due when the source gave its last sample is due to the others from here on.
                    at = after + (at + grown - after) * rest_rate // total_rate
                    due = self._due_at(piece, last)
                    pieces.append(Piece(last, at, periods, tuple(due), rest))
                    exact = (last - start) << _TIME_BITS
                    continue
                # Else the next piece begins with the next stage.
                if following is None or stop is None:
                    break
                due = self._due_at(piece, stop)
                at, exact = max(at, following.bound), exact_stop
                pieces.append(Piece(stop, at, following.periods, tuple(due), piece.live))
                break
        return pieces

    def _due_at(self, piece: Piece, time: int) -> list[int]:
        due, passed = list(piece.due), time - piece.time
        for source in piece.live:
            due[source] -= (-passed << _FINE) // piece.periods[source]
        return due

    def _next_over(self, piece: Piece) -> tuple[int, int]:
        """Return the time at which the first source has given its last sample, and that source."""
        return min((self._time_in(piece, source, self._supply.whole(source)), source) for source in piece.live)

    def _time_in(self, piece: Piece, source: int, amount: int) -> int:
        period = piece.periods[source]
        base, offset = _parts(piece.due[source], period)
        return piece.time + (amount - base) * period - offset

    def _amount_by(self, pieces: Sequence[Piece], time: int) -> int:
        """Return what all sources have given at a virtual time of the last piece."""
        return self._given_at(self._amounts_in(pieces[-1], time)).amount(self._supply.by)

    def _amounts_at(self, time: int) -> dict[int, int]:
        # The first piece begins before all times.
        return self._amounts_in(self._pieces[max(0, bisect_left(self._times_of, time) - 1)], time)

    def _amounts_in(self, piece: Piece, time: int) -> dict[int, int]:
        amounts = {}
        for source in self._present:
            if source in piece.live:
                base, offset = _parts(piece.due[source], piece.periods[source])
                amounts[source] = base + (time - piece.time + offset) // piece.periods[source]
            else:
                amounts[source] = self._supply.whole(source)
        return amounts

    def _times(self, source: int, amounts: Ints, low: int, high: int) -> Ints:
        first = max(0, bisect_left(self._times_of, low + 1) - 1)
        last = max(0, bisect_left(self._times_of, high) - 1)
        if first == last:
            piece = self._pieces[first]
            base, offset = _parts(piece.due[source], piece.periods[source])
            times = scaled(amounts, piece.periods[source], piece.time - low - offset - base * piece.periods[source])
            return np.maximum(times, piece.time + 1 - low) if first else times
        return self._times_over(source, amounts, low, first, last)

    def _times_over(self, source: int, amounts: Ints, low: int, first: int, last: int) -> Ints:
        """Return virtual times over several pieces: a sample is in the first in which it is fully due."""
        bases, offsets, periods = (each[:, source] for each in self._as_arrays(first, last))
        begins = np.array([time - low for time in self._times_of[first : last + 1]])
        ends = bases[:-1] + (np.diff(begins) + offsets[:-1]) // periods[:-1]
        number = np.searchsorted(ends, amounts, side="left")
        beyond = amounts - bases[number]
        if max(int(np.abs(beyond).max()) * int(periods.max()), int(np.abs(begins).max())) >= 1 << 61:
            beyond = beyond.astype(object)
        exact = begins[number] + beyond * periods[number] - offsets[number]
        times: Ints = np.where(number + first > 0, np.maximum(exact, begins[number] + 1), exact)
        return times

    def _as_arrays(self, first: int, last: int) -> tuple[Ints, Ints, Ints]:
        """Return, for each of some pieces and each source, the whole tokens or samples due at its begin, the rest as
        virtual time, and the period; int64 (num_pieces, num_sources) each.
        """
        kept = self._arrays
        if kept is None or kept[0] != (first, last):
            shape = last + 1 - first, len(self._periods)
            bases, offsets, periods = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.ones(shape, np.int64)
            for number, piece in enumerate(self._pieces[first : last + 1]):
                for source in self._present:
                    periods[number, source] = piece.periods[source]
                    bases[number, source], offsets[number, source] = _parts(piece.due[source], piece.periods[source])
            self._arrays = kept = (first, last), (bases, offsets, periods)
        return kept[1]

    def _time_of_last(self, source: int) -> int:
        whole = self._supply.whole(source)
        for piece, following in zip(self._pieces, [*self._pieces[1:], None], strict=True):
            time = self._time_in(piece, source, whole)
            if source in piece.live and (following is None or time <= following.time):
                return max(time, piece.time + 1)
        return 0  # it is exhausted before the stretch begins

    def _periods_after(self, progress: SourceProgress) -> tuple[int, ...]:
        at = progress.amount(self._supply.by)
        return self._pieces[max(0, bisect_right(self._begins, at) - 1)].periods

    def _time_from(self, unit: By, wanted: int, time: int, progress: SourceProgress) -> int:
        if unit != self._supply.by:
            return super()._time_from(unit, wanted, time, progress)
        return self._time_due(wanted) - self._time_due(progress.amount(unit)) + time

    def _time_due(self, amount: int) -> int:
        """Return the virtual time at which this amount is due."""
        piece = self._pieces[max(0, bisect_right(self._begins, amount) - 1)]
        total_rate = sum(rate_of(piece.periods[source]) for source in piece.live)
        return piece.time + ((amount - piece.at) << 112) // max(1, total_rate)


_MASK = (1 << _FINE) - 1


def _parts(due: int, period: int) -> tuple[int, int]:
    """Return the whole tokens or samples that are due, and the rest as virtual time."""
    return due >> _FINE, (due & _MASK) * period >> _FINE
