"""Sources merged by virtual time: the progress of each source at any position of a pass.

With one set of weights, sample i of a source has the virtual time (amount of the source up to and with it) x period +
delay. An amount is tokens or samples. A period is an integer inverse to the weight. Delays keep sources apart that have
samples of one size and would otherwise come at the same times (`stretch.py`). After a change of weights, times follow
from what each source is due and has given (`due.py`). The merge is by (virtual time, number of the source).

`TokenSums` say what a source has given at a virtual time, so a position is found by searching for its virtual time.
Samples are computed a span at a time. The last spans are kept, because the next step begins there.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from orchdata.order.due import DueStretch
from orchdata.order.sources import By, MixedSource, Samples, SourceProgress, Stage, Stop, Supply
from orchdata.order.stretch import Span, Stretch, advance

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
