"""A stretch in which sources continue from what they are due: debts are carried over from one stage to the next.

weights of the stages --integrated over tokens or samples of the run--> what each source is due --inverted--> times

Due is what a source should have given: the integral of its weight. In each stage it grows in proportion to virtual
time, by one token or sample per period. Stages with the same sources follow each other without a break. A sample comes
when its source is due up to the sample's end, plus a fixed fraction of a sample, so that sources stay apart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orchdata.order.sources import By, Ints, SourceProgress, Stage, Supply
from orchdata.order.stretch import DUE_BITS, Stretch, rate_of, scaled

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
