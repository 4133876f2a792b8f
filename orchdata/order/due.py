"""A stretch in which sources continue from what they are due: debts are carried over from one stage to the next.

weights of the stages --integrated over tokens or samples of the run--> what each source is due --inverted--> times

Due is what a source should have given: the integral of its weight. In each stage it grows in proportion to virtual
time, by one token or sample per period. Stages with the same sources follow each other without a break. A sample comes
when its source is due up to the sample's end, plus a fixed fraction of a sample, so that sources stay apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from orchdata.order.sources import SourceProgress, Stage, Supply
from orchdata.order.stretch import DUE_BITS, Line, rate_of

FINE_BITS = 64  # fractional bits inside a stretch, where rounding adds up over stages
_TIME_BITS = 32


class Piece(NamedTuple):
    """A part of a stretch in which each source has one period.

    Attributes:
        clock: virtual time at which it begins, in units of 2**-32.
        floor: virtual time before which no sample of it comes; None for the first piece, which has overdue samples.
        at: tokens, or samples, of the pass that are due when it begins.
        due: what each source is due then, minus its lateness, in units of 2**-64.
        late: how much later than due each source comes, in tokens or samples.
        live: the sources that are not exhausted.
    """

    clock: int
    floor: int | None
    at: int
    due: tuple[int, ...]
    late: tuple[int, ...]
    live: tuple[int, ...]

    @property
    def time(self) -> int:
        return self.clock >> _TIME_BITS


class StretchStart(NamedTuple):
    """Where a stretch begins.

    Attributes:
        progress: what each source has given.
        due: what each source is due, the integral of its weights, in units of 2**-DUE_BITS.
        piece: to continue in a piece; None for new delays between the sources.
    """

    progress: SourceProgress
    due: tuple[int, ...]
    piece: Piece | None = None


class DueStretch:
    """A stretch over stages with the same sources.

    Args:
        stages: from the current one on, with bounds in tokens or samples of the pass.

    Attributes:
        bound, following: see `FirstStretch`.
    """

    def __init__(self, supply: Supply, start: StretchStart, stages: Sequence[Stage], bound: int | None) -> None:
        self._supply = supply
        self.bound = bound
        self.following: DueStretch | None = None
        self._stages = stages
        self._bounds = [stage.bound for stage in stages]
        self.begin = start.progress
        self.present = [source for source, period in enumerate(stages[0].periods) if period]
        self._pieces = {0: start.piece or self._first_piece(start.due)}  # by number; several threads find the same

    def piece(self, number: int) -> Piece:
        """Return a piece, with times from its begin on."""
        piece = self._pieces[number]
        floor = None if piece.floor is None else piece.floor - piece.time
        return piece._replace(clock=piece.clock & ((1 << _TIME_BITS) - 1), floor=floor)

    def line(self, number: int) -> Line:
        """Return how times follow from amounts in a piece."""
        piece = self._pieces[number]
        following, periods = self._pieces.get(number + 1) or self._following(piece, 0), self._periods(piece)
        offsets = [_offset(piece, source, period) for source, period in enumerate(periods)]
        return Line(periods, offsets, piece.floor, None if following is None else following.time)

    def extend(self, number: int, given: int) -> None:
        """Compute the piece after one of which all samples are given: these tokens, or samples, of the pass."""
        if number + 1 not in self._pieces:
            following = self._following(self._pieces[number], given)
            assert following is not None
            self._pieces[number + 1] = following

    def due(self, amount: int) -> tuple[int, ...]:
        """Return what each source is due after `amount` tokens or samples of the pass, in units of 2**-DUE_BITS."""
        pieces = list(self._pieces.values())
        piece = next((piece for piece in reversed(pieces) if piece.at <= amount), pieces[0])
        if piece is pieces[-1]:
            # Due may be ahead of time. Where a source is exhausted later, more than `amount` is given by then.
            while (following := self._following(piece, amount + 1)) is not None and following.at <= amount:
                piece = following
        periods = self._periods(piece)
        rates = {source: rate_of(periods[source]) for source in piece.live}
        total_rate, due = sum(rates.values()), list(piece.due)
        for source, rate in rates.items():
            due[source] += ((amount - piece.at) * rate << FINE_BITS) // total_rate
        return tuple(
            each + (late << FINE_BITS) >> (FINE_BITS - DUE_BITS) for each, late in zip(due, piece.late, strict=True)
        )

    def _first_piece(self, due: Sequence[int]) -> Piece:
        """Return the piece at the start: the k-th of n present sources is (n - k)/n of its mean sample late.

        A source that lags more stays as late as it is, up to a mean sample: sources with small samples must not pay for
        one that leads.
        """
        supply, late, count = self._supply, [0] * len(due), len(self.present)
        for number, source in enumerate(self.present):
            mean = supply.mean(source)
            lag = (due[source] >> DUE_BITS) - self.begin.amounts(supply.by)[source]
            late[source] = min(mean, max(mean * ((count - number) % count) // count, lag))
        fine = ((each << (FINE_BITS - DUE_BITS)) - (by << FINE_BITS) for each, by in zip(due, late, strict=True))
        live = (each for each in self.present if supply.endless or self.begin.counts[each] < supply.limit(each))
        return Piece(0, None, self.begin.amount(supply.by), tuple(fine), tuple(late), tuple(live))

    def _following(self, piece: Piece, given: int) -> Piece | None:
        """Return the piece after one: of the next stage, or without the first source that is exhausted before.

        Args:
            given: tokens, or samples, of the pass that are given when that source is exhausted.
        """
        supply, periods = self._supply, self._periods(piece)
        if not piece.live:
            return None
        total_rate, following = sum(rate_of(periods[source]) for source in piece.live), None
        stage = bisect_right(self._bounds, piece.at, lo=1)
        if stage < len(self._stages):
            bound = self._bounds[stage]
            following = self._piece_at(
                piece, piece.clock + (bound - piece.at << (112 + _TIME_BITS)) // total_rate, bound
            )
        if supply.endless:
            return following
        last, source = min(
            (_offset(piece, each, periods[each]) + supply.whole(each) * periods[each], each) for each in piece.live
        )
        if following is not None and following.time <= last:
            return following
        # A source is exhausted before that, and the other sources share the rest.
        last = max(last, piece.time)
        grown = ((last - piece.time) * total_rate) >> 112
        rest = tuple(each for each in piece.live if each != source)
        rest_rate = sum(rate_of(periods[each]) for each in rest)
        after = min(max(given, piece.at), piece.at + grown)
        # What was due when the source gave its last sample is due to the others from here on.
        at = after + (piece.at + grown - after) * rest_rate // total_rate
        return self._piece_at(piece, last << _TIME_BITS, at)._replace(live=rest)

    def _piece_at(self, piece: Piece, clock: int, at: int) -> Piece:
        """Return a piece that begins at a later time of another one."""
        due, passed, periods = list(piece.due), (clock >> _TIME_BITS) - piece.time, self._periods(piece)
        for source in piece.live:
            due[source] -= (-passed << FINE_BITS) // periods[source]
        return piece._replace(clock=clock, floor=(clock >> _TIME_BITS) + 1, at=at, due=tuple(due))

    def _periods(self, piece: Piece) -> tuple[int, ...]:
        return self._stages[bisect_right(self._bounds, piece.at, lo=1) - 1].periods


def _offset(piece: Piece, source: int, period: int) -> int:
    """Return the virtual time at which a source has given nothing, if it had this period from the start on."""
    whole, rest = divmod(piece.due[source], 1 << FINE_BITS)
    return piece.time - whole * period - (rest * period >> FINE_BITS)
