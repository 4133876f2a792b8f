"""A stretch whose sources go on from what they are due: debts are carried over from one stage to the next.

weights of the stages --integrated over tokens or samples of the run--> what each source is due --inverted--> times

Due is what a source should have given: the integral of its weight. In each stage it grows in proportion to virtual
time, at one token or sample per period; stages with the same sources follow each other without a seam. A sample comes
when its source is due up to its end, and some fixed part of a sample later, so that sources keep apart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orchdata.order.sources import By, Ints, Place, Stage, Supply
from orchdata.order.stretch import DUE_BITS, Stretch, rate_of, scaled

_FINE = 64  # inside of a stretch, where it adds up over stages
_TIME_BITS = 32


class Piece(NamedTuple):
    """From a virtual time on each source has one period.

    Attributes:
        time: where it begins.
        at: tokens, or samples, of the lap that are due then.
        due: of each source, less what it comes later, in units of 2**-64.
        live: the sources that are not exhausted.
    """

    time: int
    at: int
    periods: tuple[int, ...]
    due: tuple[int, ...]
    live: tuple[int, ...]


class DueStretch(Stretch):
    """From a place on, over stages with the same sources.

    Args:
        stages: from the one that holds at `at` on, bounded in tokens or samples of the lap.
        at, due: see `Stretch`.
    """

    def __init__(self, supply: Supply, begin: Place, stages: Sequence[Stage], at: int, due: tuple[int, ...]) -> None:
        super().__init__(supply, begin, stages[0].periods, at, due)
        self._later = self._lateness()
        self._pieces = self._cut(stages)
        self._times_of = [piece.time for piece in self._pieces]
        self._begins = [piece.at for piece in self._pieces]
        self._arrays: tuple[tuple[int, int], tuple[Ints, Ints, Ints]] | None = None

    def at(self, time: int) -> Place:
        return self.begin if time <= 0 else self._given_at(self._amounts_at(time))

    def due(self, amount: int) -> tuple[int, ...]:
        number = max(0, bisect_right(self._begins, amount) - 1)
        piece = self._pieces[number]
        rates = {source: rate_of(piece.periods[source]) for source in piece.live}
        whole, found = sum(rates.values()), list(self.begin_due)
        for source in self._present:
            grown = ((amount - piece.at) * rates[source] << _FINE) // whole if source in rates else 0
            found[source] = (piece.due[source] + (self._later[source] << _FINE) + grown) >> (_FINE - DUE_BITS)
        return tuple(found)

    def _lateness(self) -> list[int]:
        """How much later than due each source comes: of n present ones the k-th n - k parts of n of its mean sample.

        A source that lags more comes as late as it does, up to a mean sample: one that leads is not to be paid for by
        others with small samples.
        """
        found, count, amounts = [0] * len(self._periods), len(self._present), self._amounts
        for number, source in enumerate(self._present):
            mean = self._supply.mean(source)
            behind = (self.begin_due[source] >> DUE_BITS) - amounts[source]
            found[source] = min(mean, max(mean * ((count - number) % count) // count, behind))
        return found

    def _cut(self, stages: Sequence[Stage]) -> list[Piece]:
        """Pieces of one set of weights each: a stage, or the part of one before or after a source has no more."""
        supply, live, time = self._supply, tuple(self._present), 0
        due = [
            (each << (_FINE - DUE_BITS)) - (later << _FINE)
            for each, later in zip(self.begin_due, self._later, strict=True)
        ]
        # Times of samples to come are above 0, those of samples that are overdue too.
        for source in self._present:
            overdue = (due[source] >> _FINE) - self._amounts[source] + 1
            time = max(time, overdue * self._periods[source] + 1)
        if not supply.endless:
            live = tuple(source for source in live if self.begin.counts[source] < supply.limit(source))
        found, at, exact = [Piece(time, self.begin_at, stages[0].periods, tuple(due), live)], self.begin_at, 0
        start = time
        most = None if supply.endless else sum(supply.whole(source) for source in range(supply.num_sources))
        for stage, following in zip(stages, [*stages[1:], None], strict=True):
            periods = stage.periods
            if most is not None and at > most:
                break
            while True:
                # Where the next source has no more before the stage is over, the others share the rest.
                piece = found[-1]
                whole = sum(rate_of(periods[source]) for source in piece.live)
                stop = None
                if following is not None and piece.live:
                    exact_stop = exact + (max(0, following.bound - at) << (112 + _TIME_BITS)) // whole
                    stop = start + (exact_stop >> _TIME_BITS)
                over = None if supply.endless or not piece.live else self._next_over(piece)
                if over is not None and (stop is None or over[0] < stop):
                    last, source = over
                    last = max(last, piece.time)
                    grown = ((last - piece.time) * whole) >> 112
                    there = self._amount_by(found, last)
                    rest = tuple(each for each in piece.live if each != source)
                    less = sum(rate_of(periods[each]) for each in rest)
                    after = min(max(there, piece.at), at + grown)
                    # What was due until the source had given its last is due to the others among each other.
                    at = after + (at + grown - after) * less // whole
                    due = self._due_at(piece, last)
                    found.append(Piece(last, at, periods, tuple(due), rest))
                    exact = (last - start) << _TIME_BITS
                    continue
                if following is None or stop is None:
                    break
                due = self._due_at(piece, stop)
                at, exact = max(at, following.bound), exact_stop
                found.append(Piece(stop, at, following.periods, tuple(due), piece.live))
                break
        return found

    def _due_at(self, piece: Piece, time: int) -> list[int]:
        due, passed = list(piece.due), time - piece.time
        for source in piece.live:
            due[source] -= (-passed << _FINE) // piece.periods[source]
        return due

    def _next_over(self, piece: Piece) -> tuple[int, int]:
        """When the first source has given its last sample, and which."""
        return min((self._time_in(piece, source, self._supply.whole(source)), source) for source in piece.live)

    def _time_in(self, piece: Piece, source: int, amount: int) -> int:
        period = piece.periods[source]
        base, offset = _parts(piece.due[source], period)
        return piece.time + (amount - base) * period - offset

    def _amount_by(self, pieces: Sequence[Piece], time: int) -> int:
        """What all sources have given at the end of the last piece."""
        piece, found = pieces[-1], {}
        for source in self._present:
            if source in piece.live:
                base, offset = _parts(piece.due[source], piece.periods[source])
                found[source] = base + (time - piece.time + offset) // piece.periods[source]
            else:
                found[source] = self._supply.whole(source)
        return self._given_at(found).amount(self._supply.by)

    def _amounts_at(self, time: int) -> dict[int, int]:
        piece, found = self._piece_at(time), {}
        passed = time - piece.time
        for source in self._present:
            period, due = piece.periods[source], piece.due[source]
            if source in piece.live:
                found[source] = (due >> _FINE) + (passed + ((due & _MASK) * period >> _FINE)) // period
            else:
                found[source] = self._supply.whole(source)
        return found

    def _piece_at(self, time: int) -> Piece:
        """The piece that a virtual time is of; the first begins before all times."""
        return self._pieces[max(0, bisect_left(self._times_of, time) - 1)]

    def _times(self, source: int, amounts: Ints, low: int, high: int) -> Ints:
        first = max(0, bisect_left(self._times_of, low + 1) - 1)
        last = max(0, bisect_left(self._times_of, high) - 1)
        if first == last:
            piece = self._pieces[first]
            base, offset = _parts(piece.due[source], piece.periods[source])
            found = scaled(amounts, piece.periods[source], piece.time - low - offset - base * piece.periods[source])
            return np.maximum(found, piece.time + 1 - low) if first else found
        return self._times_over(source, amounts, low, first, last)

    def _times_over(self, source: int, amounts: Ints, low: int, first: int, last: int) -> Ints:
        """Virtual times in several pieces: each sample is of the first in which its source is due up to its end."""
        bases, offsets, periods = (each[:, source] for each in self._as_arrays(first, last))
        begins = np.array([time - low for time in self._times_of[first : last + 1]])
        ends = bases[:-1] + (np.diff(begins) + offsets[:-1]) // periods[:-1]
        number = np.searchsorted(ends, amounts, side="left")
        beyond = amounts - bases[number]
        if max(int(np.abs(beyond).max()) * int(periods.max()), int(np.abs(begins).max())) >= 1 << 61:
            beyond = beyond.astype(object)
        found = begins[number] + beyond * periods[number] - offsets[number]
        times: Ints = np.where(number + first > 0, np.maximum(found, begins[number] + 1), found)
        return times

    def _as_arrays(self, first: int, last: int) -> tuple[Ints, Ints, Ints]:
        """Of some pieces and each source: whole tokens or samples due where one begins, the rest in virtual time, and
        the period; int64 (num_pieces, num_sources) each.
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
        return 0  # it had no more where the stretch begins

    def _periods_after(self, place: Place) -> tuple[int, ...]:
        at = place.amount(self._supply.by)
        return self._pieces[max(0, bisect_right(self._begins, at) - 1)].periods

    def _time_from(self, unit: By, wanted: int, time: int, place: Place) -> int:
        if unit != self._supply.by:
            return super()._time_from(unit, wanted, time, place)
        return self._time_due(wanted) - self._time_due(place.amount(unit)) + time

    def _time_due(self, amount: int) -> int:
        """The virtual time at which so much is due."""
        piece = self._pieces[max(0, bisect_right(self._begins, amount) - 1)]
        whole = sum(rate_of(piece.periods[source]) for source in piece.live)
        return piece.time + ((amount - piece.at) << 112) // max(1, whole)


_MASK = (1 << _FINE) - 1


def _parts(due: int, period: int) -> tuple[int, int]:
    """What is due in whole tokens or samples, and the rest as virtual time since."""
    return due >> _FINE, (due & _MASK) * period >> _FINE
