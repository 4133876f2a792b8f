"""Sources merged by virtual time, one sample after the other.

    standing (what each source has given) --walk--> samples, next standing

With one set of weights, sample i of a source has the virtual time (amount of the source up to and with it) x period +
delay. An amount is tokens or samples. A period is an integer inverse to the weight. Delays keep sources apart that have
samples of one size and would otherwise come at the same times (`stretch.py`). After a change of weights, times follow
from what each source is due and has given (`due.py`). The merge is by (virtual time, number of the source).

A position is found by walking to it from the nearest kept standing. In the first stage a standing is computed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from orchdata.native.merge import WIDE, merge
from orchdata.order.due import DueStretch, StretchStart
from orchdata.order.sources import By, Ints, MixedSource, Samples, SourceProgress, Stage, Stop, Supply
from orchdata.order.stretch import FirstStretch, advance

__all__ = ["By", "SourcePass", "MixedSource", "SourceProgress", "StretchStart", "Samples", "Stage", "Stop"]

_SPAN = 4096  # samples merged together
_SPANS_KEPT = 4
_EVERY = 1 << 16  # samples between kept standings; more in a long pass
_MOST_KEPT = 256
_AT_HAND, _MOST_AT_HAND = 1 << 17, 1 << 12  # samples that a walk loads at once: of all sources, of one
_FARTHEST = 1 << 60
"""Bound for virtual times, relative to the present; beyond it they are Python's integers."""
_NEVER, _NEVER_64 = 1 << 400, (1 << 63) - 1


class Standing(NamedTuple):
    """Where a walk stands: what is given, the stretch, and the number of its piece."""

    progress: SourceProgress
    stretch: FirstStretch | DueStretch
    piece: int


class Span(NamedTuple):
    """Merged samples of a stretch; `ends` has the tokens of the pass up to and with each."""

    stretch: FirstStretch | DueStretch
    begin: SourceProgress
    samples: Samples
    ends: Ints

    def contains(self, unit: By, wanted: int) -> bool:
        """Whether it has the sample at position `wanted`, or the first that ends after `wanted` tokens."""
        if unit == "samples":
            return 0 <= wanted - self.begin.position < len(self.ends)
        return len(self.ends) > 0 and self.begin.tokens <= wanted < int(self.ends[-1])


class SourcePass:
    """One pass through all sources: an epoch of "first" and "all"; for "repeat" the whole run.

    Args:
        stages: with bounds in tokens or samples of the pass.
        starts: where it continues, ascending; by default at its start.
        knows_start: whether what came before the first of `starts` follows from the stages.
    """

    def __init__(
        self, supply: Supply, stages: Sequence[Stage], starts: Sequence[StretchStart] = (), *, knows_start: bool = True
    ) -> None:
        self.by: By = supply.by
        self.supply = supply
        self._stages = stages
        self._bounds = [stage.bound for stage in stages]
        none = (0,) * supply.num_sources
        self.start = SourceProgress(none, none)
        self._starts = {start.progress.position: start for start in starts}
        # Where to walk from: the start, if it is known, where the run continues, and what walks pass by.
        # What walks change is replaced whole, because several threads plan steps.
        self._kept = tuple(Standing(start.progress, self._stretch_from(start), 0) for start in starts)
        if knows_start:
            bound = min((bound for bound in self._bounds if bound > 0), default=None)
            first = FirstStretch(self.supply, self.start, self._stage_at(0).periods, bound)
            self._kept = Standing(self.start, first, 0), *self._kept
        self._num_starts = len(self._kept)
        self._spans: tuple[Span, ...] = ()
        self._every = _EVERY
        mean = sum(map(supply.total, range(len(none)))) // sum(map(supply.limit, range(len(none))))
        self._far = {"samples": _EVERY, "tokens": _EVERY * mean}
        self._idle: dict[str, _Walk] = {}  # a thread takes the walk out of it

    # Positions and samples

    def end(self) -> SourceProgress:
        """Return the progress at the end of the pass; not for "repeat"."""
        first = self._kept[0].stretch
        if isinstance(first, FirstStretch):
            end = first.end()
            if first.bound is None or first.bound >= end.amount(self.by):
                return end
        walk = _Walk(self, self._kept[-1])
        while self._ahead(walk) is not None:
            pass
        return walk.standing.progress

    def progress_at(self, position: int) -> SourceProgress:
        """Return the progress of each source at a position."""
        if position == self._kept[0].progress.position:
            return self._kept[0].progress
        span = self._span("samples", position - 1)
        samples = span.samples.cut(0, position - span.begin.position)
        return _after(span.begin, samples)

    def ending_within(self, tokens: int) -> int:
        """Return how many samples end within `tokens` tokens, which must be fewer than the pass has."""
        span = self._span("tokens", tokens)
        return span.begin.position + int(np.searchsorted(span.ends, tokens, side="right"))

    def filled_by(self, unit: By, amount: int) -> int:
        """Return the first position that has at least `amount` samples or tokens before it."""
        if unit == "samples" or not amount:
            return amount
        if amount <= self._kept[0].progress.tokens:  # the last sample of an epoch reached beyond its size, as the first
            return self._kept[0].progress.position  # with other weights is known
        return self.ending_within(amount - 1) + 1

    def samples(self, start: int, stop: int) -> Samples:
        parts = []
        while start < stop:
            span = self._span("samples", start)
            first = span.begin.position
            end = min(stop, first + len(span.ends))
            parts.append(span.samples.cut(start - first, end - first))
            start = end
        return Samples.concatenate(parts)

    def due(self, progress: SourceProgress) -> tuple[int, ...]:
        """Return what each source is due at this progress, in units of 2**-DUE_BITS."""
        if progress.position in self._starts:
            return self._starts[progress.position].due
        at_start = progress.position == self._kept[0].progress.position
        stretch = (self._kept[0] if at_start else self._span("samples", progress.position - 1)).stretch
        return stretch.due(progress.amount(self.by))

    def periods(self, progress: SourceProgress) -> tuple[int, ...]:
        """Return the periods of the last sample before; at the start of the pass, of its first sample."""
        return self._stage_at(max(0, progress.amount(self.by) - 1)).periods

    def start_at(self, progress: SourceProgress) -> StretchStart | None:
        """Return where a pass could continue from this progress; None in the first stage, which is computed."""
        if progress.position in self._starts:
            return self._starts[progress.position]
        standing = self._nearest("samples", progress.position)
        bound = standing.stretch.bound
        if isinstance(standing.stretch, FirstStretch) and (bound is None or progress.amount(self.by) < bound):
            return None
        walk = _Walk(self, standing)
        while missing := progress.position - walk.standing.progress.position:
            walk.take(min(missing, _SPAN))
        _, stretch, piece = walk.standing
        if isinstance(stretch, FirstStretch):
            return None
        return StretchStart(progress, self.due(progress), stretch.piece(piece))

    # Walking

    def _span(self, unit: By, wanted: int) -> Span:
        """Return a span with the sample at position `wanted`, or the first that ends after `wanted` tokens."""
        for span in self._spans:
            if span.contains(unit, wanted):
                return span
        walk = self._idle.pop("walk", None)
        missing = -1 if walk is None else wanted - walk.standing.progress.amount(unit)
        if walk is None or not 0 <= missing <= self._far[unit]:
            nearest = self._nearest(unit, wanted)
            if walk is None or missing < 0 or nearest.progress.position > walk.standing.progress.position:
                walk = _Walk(self, nearest)
        while (ahead := self._ahead(walk)) is not None:
            if ahead.contains(unit, wanted):
                self._idle["walk"] = walk
                return ahead
        raise IndexError(f"{unit} {wanted} is outside the pass")

    def _nearest(self, unit: By, wanted: int) -> Standing:
        """Return where to walk from."""
        kept = next((each for each in reversed(self._kept) if each.progress.amount(unit) <= wanted), None)
        if kept is None:
            raise IndexError(
                "this position is before the one where the weights of the mixture changed: use a loader with the "
                "former weights, and a state from before the change"
            )
        first = kept.stretch
        if not isinstance(first, FirstStretch) or wanted - kept.progress.amount(unit) <= self._far[unit]:
            return kept
        # The first stage ends with the first sample that fills it.
        if first.bound is not None and (self.supply.endless or first.bound < first.end().amount(self.by)):
            last = first.shortly_before(self.by, max(0, first.bound - 1), _SPAN)
            if last.amount(unit) <= wanted:
                return Standing(last, first, 0)
        return Standing(first.shortly_before(unit, wanted, _SPAN), first, 0)

    def _ahead(self, walk: _Walk) -> Span | None:
        """Return the next span of a walk; None at the end."""
        begin = walk.standing
        samples = walk.take(_SPAN)
        if not len(samples.row):
            return None
        span = Span(begin.stretch, begin.progress, samples, begin.progress.tokens + np.cumsum(samples.tokens))
        self._spans = (span, *self._spans)[:_SPANS_KEPT]
        if begin.progress.position >= self._kept[-1].progress.position + self._every:
            self._kept = *self._kept, walk.standing
            if len(self._kept) > _MOST_KEPT:
                self._kept = self._kept[: self._num_starts] + self._kept[self._num_starts + 1 :: 2]
                self._every *= 2
        return span

    # Stages and stretches

    def stretch_after(self, last: FirstStretch | DueStretch, begin: SourceProgress) -> DueStretch:
        """Return the stretch that begins here, after another one, with other weights."""
        if last.following is None:
            last.following = self._stretch_from(StretchStart(begin, self._due_after(last, begin)))
        return last.following

    def _due_after(self, last: FirstStretch | DueStretch, begin: SourceProgress) -> tuple[int, ...]:
        amount, bound = begin.amount(self.by), last.bound
        assert bound is not None
        before = _present(self._stages[self._stage_number(bound) - 1])
        if not before & _present(self._stage_at(amount)):
            # No source of the stage before remains, so its last sample had to reach beyond its end.
            return last.due(amount)
        # A sample that reaches beyond the end of its stage counts for both stages, by its amount in each.
        due = list(last.due(bound))
        bounds = [bound, *(each for each in self._bounds if bound < each < amount), amount]
        for start, stop in itertools.pairwise(bounds):
            stage, limit = self._stage_at(start), self.supply.limit
            live = [each for each in _present(stage) if self.supply.endless or begin.counts[each] < limit(each)]
            advance(due, stage.periods, live, stop - start)
        return tuple(due)

    def _stretch_from(self, start: StretchStart) -> DueStretch:
        at = start.progress.amount(self.by) if start.piece is None else start.piece.at
        number = self._stage_number(at)
        # The stages from this one on that have the same sources.
        stop = number + 1
        while stop < len(self._stages) and _present(self._stages[stop]) == _present(self._stages[number]):
            stop += 1
        bound = self._bounds[stop] if stop < len(self._stages) else None
        return DueStretch(self.supply, start, self._stages[number:stop], bound)

    def _stage_number(self, amount: int) -> int:
        return max(0, bisect_right(self._bounds, amount) - 1)

    def _stage_at(self, amount: int) -> Stage:
        return self._stages[self._stage_number(amount)]


class _Walk:
    """A merge from a standing on.

    Attributes:
        has_ended: whether the pass has ended where it stands.
    """

    def __init__(self, source_pass: SourcePass, standing: Standing) -> None:
        self._pass, self._supply = source_pass, source_pass.supply
        progress, self._stretch, self._piece = standing
        self._counts, self._tokens = (np.array(each, np.int64) for each in progress)
        # Each source has a slot for some of its next samples.
        num_sources = len(self._counts)
        self._room = min(_MOST_AT_HAND, max(64, _AT_HAND // num_sources))
        self._heads = np.arange(num_sources) * self._room
        self._tails = self._heads.copy()
        size = num_sources * self._room
        ints: list[Any] = [np.zeros(size, kind) for kind in (np.int32, np.int32, np.int64, np.int64, np.int64)]
        self._at_hand = Samples(*ints)
        self._sizes = self._at_hand.tokens if self._supply.by == "tokens" else np.ones(size, np.int64)
        self._begin_stretch()
        self._settle()

    @property
    def standing(self) -> Standing:
        return Standing(SourceProgress(*map(_ints, (self._counts, self._tokens))), self._stretch, self._piece)

    def take(self, count: int) -> Samples:
        """Return the next samples, fewer at the end of the stretch; none at the end of the pass."""
        parts: list[Samples] = []
        stretch = self._stretch
        while count and not self.has_ended and self._stretch is stretch:
            samples, stopped_by = self._merged(count)
            count -= len(samples.row)
            parts.append(samples)
            if stopped_by >= 0:
                self._load(stopped_by)
                self._time_next(stopped_by)
            elif stopped_by == WIDE:
                self._align()
            if not self.has_ended:
                self._settle()
        return Samples.concatenate(parts)

    def _merged(self, count: int) -> tuple[Samples, int]:
        """Return the next samples while nothing but the progress of sources changes, and what stopped them."""
        source, index = np.empty(count, np.int32), np.empty(count, np.int64)
        run, sizes = merge, self._sizes
        if self._times.dtype == object:
            run, sizes = merge.py_func, sizes.astype(object)  # type: ignore[attr-defined]
        lines = self._times, self._reached, self._periods, self._widest
        limits = self._until, self._left, self._floor
        count, stopped_by = run(*lines, sizes, self._heads, self._tails, *limits, source, index)
        samples = self._at_hand.take(index[:count])
        self._counts += np.bincount(samples.source, minlength=len(self._counts))
        self._tokens += np.bincount(samples.source, samples.tokens, len(self._tokens)).astype(np.int64)
        self._left -= int(self._sizes[index[:count]].sum())
        return samples, stopped_by

    def _load(self, source: int) -> None:
        """Fill the slot of a source."""
        start, slot = int(self._counts[source]), source * self._room
        stop = start + self._room
        if not self._supply.endless:
            stop = min(stop, self._supply.limit(source))
        columns: list[Any] = list(self._at_hand)
        for column, loaded in zip(columns, self._supply.given(source, start, stop), strict=True):
            column[slot : slot + stop - start] = loaded
        self._heads[source], self._tails[source] = slot, slot + stop - start

    def _time_next(self, source: int) -> None:
        """Compute when the next sample of a source comes, after those that were at hand."""
        if self._heads[source] == self._tails[source]:
            self._times[source] = self._never
            self.has_ended = self._is_over()
        elif (size := self._sizes[self._heads[source]]) > self._widest[source]:
            self._align()
        else:
            time = self._reached[source] + int(size) * self._periods[source]
            self._times[source] = max(time, self._floor)

    def _is_over(self) -> bool:
        """Whether the pass ends: a source of the stage is exhausted, or all are."""
        if self._supply.endless:
            return False
        out = [self._counts[source] == self._supply.limit(source) for source in self._stretch.present]
        return all(out) or (self._supply.stop == "first" and any(out))

    def _begin_stretch(self) -> None:
        bound = self._stretch.bound
        self._left = _FARTHEST if bound is None else bound - self._amount
        self.has_ended = self._is_over()
        if not self.has_ended:
            for source in self._stretch.present:
                if self._heads[source] == self._tails[source]:
                    self._load(source)
            self._align()

    def _settle(self) -> None:
        """Go on to where the next sample comes: to the next piece or stretch."""
        while not self.has_ended:
            if (earliest := self._times.min()) > self._until:
                if self._ends is not None and self._origin + int(earliest) > self._ends:
                    self._stretch.extend(self._piece, self._amount)
                    self._piece += 1
                self._align()
            elif self._left <= 0:
                self._stretch = self._pass.stretch_after(self._stretch, self.standing.progress)
                self._piece = 0
                self._begin_stretch()
            else:
                return

    def _align(self) -> None:
        """Compute virtual times by the current piece, relative to the next sample's."""
        line = self._stretch.line(self._piece)
        periods = np.array(line.periods, object)
        waits = (periods > 0) & (self._heads < self._tails)
        sizes = self._sizes[np.minimum(self._heads, len(self._sizes) - 1)]
        reached = np.array(line.offsets, object) + self._amounts * periods
        times = reached + sizes * periods
        if line.floor is not None:
            times = np.maximum(times, line.floor)
        self._origin = origin = int(times[waits].min())
        is_wide = max(times[waits].max() - origin, origin - reached[waits].min()) >= _FARTHEST
        kind, self._never, far = (object, _NEVER, _NEVER - 1) if is_wide else (np.int64, _NEVER_64, _FARTHEST)
        self._times = np.where(waits, times - origin, self._never).astype(kind)
        self._reached = np.where(waits, reached - origin, 0).astype(kind)
        self._periods = periods.astype(kind)
        self._widest = (far // np.maximum(periods, 1)).astype(kind)
        self._ends = line.until
        self._until = far if line.until is None else min(line.until - origin, far)
        self._floor = -far if line.floor is None else max(line.floor - origin, -far)

    @property
    def _amounts(self) -> Ints:
        return self._tokens if self._supply.by == "tokens" else self._counts

    @property
    def _amount(self) -> int:
        return int(self._amounts.sum())


def _ints(values: Ints) -> tuple[int, ...]:
    return tuple(values.tolist())


def _after(progress: SourceProgress, samples: Samples) -> SourceProgress:
    """Return the progress after more samples."""
    counts, given = np.array(progress.counts), np.array(progress.given)
    counts += np.bincount(samples.source, minlength=len(counts))
    given += np.bincount(samples.source, samples.tokens, len(given)).astype(np.int64)
    return SourceProgress(tuple(counts.tolist()), tuple(given.tolist()))


def _present(stage: Stage) -> frozenset[int]:
    return frozenset(source for source, period in enumerate(stage.periods) if period)
