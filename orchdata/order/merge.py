"""Sources merged by virtual time: where a lap through them stands, at any place of it.

With one set of weights sample i of a source has the virtual time (amount of the source up to and with it) x period +
delay: an amount is tokens or samples, a period an integer inverse to the weight, and delays keep sources apart whose
samples are of one size, which would come at the same times (`stretch.py`). Where weights change, times follow from what
each source is due and has given (`due.py`). The merge is by (virtual time, number of the source). What a source has
given at a virtual time, its `TokenSums` tell, so a place is found by searching for its virtual time, and samples are
looked at a span at a time. What was looked at last is kept, since the next step begins there.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from orchdata.order.due import DueStretch
from orchdata.order.sources import By, MixedSource, Place, Samples, Stage, Stop, Supply
from orchdata.order.stretch import DUE_BITS, Span, Stretch, rate_of

__all__ = ["By", "Lap", "MixedSource", "Place", "Reached", "Samples", "Stage", "Stop", "Stretch"]

_SPANS_KEPT = 4


class Reached(NamedTuple):
    """What each source had given and was due where a stretch begins.

    Attributes:
        due: see `Stretch`.
    """

    place: Place
    due: tuple[int, ...]


class Found(NamedTuple):
    """The stretches of a lap that are known, from its begin on, and whether it has no other."""

    stretches: tuple[Stretch, ...]
    is_all: bool


class Lap:
    """One way through the sources.

    Args:
        stages: as of `MixtureOrder`.
        number: the pass that each source is in; of "repeat" its first.
        begun: what the run has given before, in what stages are bounded by.
        reached: a place inside, where a stretch begins; by default the lap's begin.
        is_changed: whether stages do not tell what came before that.
    """

    def __init__(
        self,
        sources: Sequence[MixedSource],
        stages: Sequence[Stage],
        by: By,
        stop: Stop,
        *,
        number: int,
        begun: int,
        reached: Reached | None = None,
        is_changed: bool = False,
    ) -> None:
        self.by: By = by
        self.endless = stop == "repeat"
        self._sources = sources
        self._supply = Supply(sources, by, stop, number)
        self._stages = tuple(Stage(stage.bound - begun, stage.periods) for stage in stages)
        self._bounds = [stage.bound for stage in self._stages]
        none = (0,) * len(sources)
        self.start = Place(none, none)
        first = Stretch(self._supply, self.start, self._stage_at(0).periods)
        self._earlier: Lap | None = None
        self._reached_at = reached
        if reached is not None:
            first = self._due_from(reached.place, reached.due)
            if not is_changed:
                self._earlier = Lap(sources, stages, by, stop, number=number, begun=begun)
        # Replaced whole: several threads plan steps.
        self._found = Found((first,), False)
        self._spans: tuple[Span, ...] = ()

    # Where things are

    def end(self) -> Place:
        """Where the lap ends; not of "repeat"."""
        return self._stretch(lambda _: False).end()

    def place(self, position: int) -> Place:
        """How far each source is at a position."""
        if position < self._first.position:
            return self._before().place(position)
        return self._place(self._stretch(lambda stretch: position <= stretch.begin.position), position)

    def ending_within(self, tokens: int) -> int:
        """How many samples end within so many tokens, fewer than the lap has."""
        if tokens < self._first.tokens:
            return self._before().ending_within(tokens)
        return self._ending_within(self._stretch(lambda stretch: tokens < stretch.begin.tokens), tokens)

    def filled_by(self, unit: By, amount: int) -> int:
        """The first position before which there are at least so many samples or tokens."""
        if unit == "tokens" and self._earlier is None and 0 < amount <= self._first.tokens:
            return self._first.position  # an epoch's last sample may reach beyond its size; weights changed right after
        return amount if unit == "samples" or not amount else self.ending_within(amount - 1) + 1

    def samples(self, start: int, stop: int) -> Samples:
        found = []
        if start < self._first.position:
            found.append(self._before().samples(start, min(stop, self._first.position)))
            start = min(stop, self._first.position)
        while start < stop:
            stretch = self._stretch(lambda stretch, at=start: at < stretch.begin.position)  # type: ignore[misc]
            span = self._span(stretch, "samples", start)
            end = min(stop, span.stop, stop if stretch.stop is None else stretch.stop)
            found.append(span.samples.cut(start - span.first, end - span.first))
            start = end
        return Samples.joined(found)

    def due(self, place: Place) -> tuple[int, ...]:
        """What each source is due at a place, in units of 2**-DUE_BITS."""
        return self._stretch_of(place).due(place.amount(self.by))

    def periods(self, place: Place) -> tuple[int, ...]:
        """Of the last sample before a place; at the lap's begin of the first."""
        return self._stage_at(max(0, place.amount(self.by) - 1)).periods

    def last_change(self, place: Place) -> Reached | None:
        """Where the stretch of a place begins; None in the first of the lap."""
        stretch = self._stretch_of(place)
        if stretch is self._found.stretches[0]:
            return self._reached_at
        return Reached(stretch.begin, stretch.begin_due)

    @property
    def _first(self) -> Place:
        return self._found.stretches[0].begin

    def _before(self) -> Lap:
        if self._earlier is None:
            raise IndexError(
                "this place is before the one where the weights of the mixture changed: ask a loader with the weights "
                "of then, and a state from before"
            )
        return self._earlier

    def _stretch_of(self, place: Place) -> Stretch:
        return self._stretch(lambda stretch: place.position <= stretch.begin.position)

    def _place(self, stretch: Stretch, position: int) -> Place:
        if position == stretch.begin.position:
            return stretch.begin
        span = self._span(stretch, "samples", position - 1)
        mine = span.samples.cut(0, position - span.first)
        num_sources = len(self._sources)
        counts = np.bincount(mine.source, minlength=num_sources).tolist()
        tokens = np.bincount(mine.source, mine.tokens, num_sources).astype(np.int64).tolist()
        return Place(
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

    def _stretch(self, is_behind: Callable[[Stretch], bool]) -> Stretch:
        """The last stretch that is not behind something; those are found as far as that."""
        found = self._found
        while not found.is_all and (len(found.stretches) == 1 or not is_behind(found.stretches[-1])):
            self._found = found = self._extended(found)
            if is_behind(found.stretches[-1]):
                break
        number = bisect_left(found.stretches, True, lo=1, key=is_behind)
        return found.stretches[number - 1]

    def _extended(self, found: Found) -> Found:
        """With the stretch behind the last, if there is one."""
        last = found.stretches[-1]
        bound = self._next_bound(last)
        begin = None if bound is None else self._reached(last, bound)
        if begin is None:
            return Found(found.stretches, True)
        following = self._following(last, begin)
        last.stop = begin.position
        return Found((*found.stretches, following), False)

    def _next_bound(self, stretch: Stretch) -> int | None:
        """Where the first stage begins that a stretch does not go over."""
        number = self._stage_number(stretch.begin.amount(self.by))
        after = number + 1 + (len(self._along(number)) - 1 if isinstance(stretch, DueStretch) else 0)
        return self._bounds[after] if after < len(self._bounds) else None

    def _along(self, number: int) -> Sequence[Stage]:
        """The stages from one on as far as they have the same sources."""
        present = _present(self._stages[number])
        stop = number + 1
        while stop < len(self._stages) and _present(self._stages[stop]) == present:
            stop += 1
        return self._stages[number:stop]

    def _following(self, last: Stretch, begin: Place) -> Stretch:
        """The stretch that begins at a place where another set of weights holds."""
        amount, bound = begin.amount(self.by), self._next_bound(last)
        assert bound is not None
        before = _present(self._stages[self._stage_number(bound) - 1])
        if not before & _present(self._stage_at(amount)):
            # No source of the stage before stays, so that its last sample could not but reach beyond its end.
            return self._due_from(begin, last.due(amount))
        # A sample that reaches beyond the end of its stage counts for both by what lies in each.
        due = list(last.due(bound))
        bounds = [bound, *(each for each in self._bounds if bound < each < amount), amount]
        for start, stop in itertools.pairwise(bounds):
            self._share(due, begin, self._stage_at(start).periods, stop - start)
        return self._due_from(begin, tuple(due))

    def _share(self, due: list[int], begin: Place, periods: Sequence[int], amount: int) -> None:
        rates = {
            source: rate_of(period)
            for source, period in enumerate(periods)
            if period and (self.endless or begin.counts[source] < self._supply.limit(source))
        }
        for source, rate in rates.items():
            due[source] += (amount * rate << DUE_BITS) // sum(rates.values())

    def _due_from(self, begin: Place, due: tuple[int, ...]) -> DueStretch:
        amount = begin.amount(self.by)
        return DueStretch(self._supply, begin, self._along(self._stage_number(amount)), amount, due)

    def _reached(self, stretch: Stretch, amount: int) -> Place | None:
        """Where a stretch has given an amount; None where the lap ends before, or there."""
        if not self.endless and amount >= stretch.end().amount(self.by):
            return None
        at = amount if self.by == "samples" else self._ending_within(stretch, amount - 1) + 1
        place = self._place(stretch, at)
        return None if not self.endless and place.position >= stretch.end().position else place

    def _span(self, stretch: Stretch, unit: By, wanted: int) -> Span:
        """Samples around the one at a position, or around the first that ends behind so many tokens."""
        for span in self._spans:
            if span.stretch is stretch and span.holds(unit, wanted):
                return span
        # On from what was looked at last, where that comes before.
        near = [
            (each.time, each.high)
            for each in self._spans
            if each.stretch is stretch and each.high.amount(unit) <= wanted
        ]
        time, place = max(near, key=lambda known: known[0], default=(0, stretch.begin))
        looked = stretch.next_span(unit, wanted, time, place) or stretch.search(unit, wanted, time, place)
        self._spans = (looked, *self._spans)[:_SPANS_KEPT]
        return looked


def _present(stage: Stage) -> frozenset[int]:
    return frozenset(source for source, period in enumerate(stage.periods) if period)
