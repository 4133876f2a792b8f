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
import threading
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
_NEVER = 1 << 400


class Standing(NamedTuple):
    """Where a walk stands: what is given, the number of the stretch, and of its piece."""

    progress: SourceProgress
    stretch: int
    piece: int


class Span(NamedTuple):
    """Merged samples after a standing; `ends` has the tokens of the pass up to and with each."""

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
        stages: see `MixtureOrder`.
        number: number of the pass of each source; for "repeat" of its first.
        given_before: tokens or samples, as in the bounds of stages, that the run has given before.
        starts: where it continues, ascending; by default at its start.
        is_changed: whether what came before the first of `starts` does not follow from the stages.
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
        starts: Sequence[StretchStart] = (),
        is_changed: bool = False,
    ) -> None:
        self.by: By = by
        self.supply = Supply(sources, by, stop, number)
        self._stages = tuple(Stage(stage.bound - given_before, stage.periods) for stage in stages)
        self._bounds = [stage.bound for stage in self._stages]
        none = (0,) * len(sources)
        self.start = SourceProgress(none, none)
        self._earlier: SourcePass | None = None
        self._continues_at = starts[-1] if starts else None
        self.stretches: list[FirstStretch | DueStretch] = []
        if self._continues_at is None:
            self.stretches.append(FirstStretch(self.supply, self.start, self._stage_at(0).periods))
        else:
            self.stretches.append(self._stretch_from(self._continues_at))
            if starts[:-1] or not is_changed:
                self._earlier = SourcePass(
                    sources,
                    stages,
                    by,
                    stop,
                    number=number,
                    given_before=given_before,
                    starts=starts[:-1],
                    is_changed=is_changed,
                )
        self._kept = [Standing(self._first, 0, 0)]
        self._spans: tuple[Span, ...] = ()
        self._every = _EVERY
        mean = sum(map(self.supply.total, range(len(sources)))) // sum(map(self.supply.limit, range(len(sources))))
        self._far = {"samples": _EVERY, "tokens": _EVERY * mean}
        self._walk = _Walk(self, self._kept[0])
        self._walking = threading.RLock()  # several threads plan steps

    # Positions and samples

    def end(self) -> SourceProgress:
        """Return the progress at the end of the pass; not for "repeat"."""
        first, bound = self.stretches[0], self.next_bound(0)
        if isinstance(first, FirstStretch):
            end = first.end()
            if bound is None or bound >= end.amount(self.by):
                return end
        with self._walking:
            while self._ahead() is not None:
                pass
            return self._walk.standing.progress

    def progress_at(self, position: int) -> SourceProgress:
        """Return the progress of each source at a position."""
        if position < self._first.position:
            return self._before().progress_at(position)
        if position == self._first.position:
            return self._first
        span = self._span("samples", position - 1)
        samples = span.samples.cut(0, position - span.begin.position)
        return _after(span.begin, samples)

    def ending_within(self, tokens: int) -> int:
        """Return how many samples end within `tokens` tokens, which must be fewer than the pass has."""
        if tokens < self._first.tokens:
            return self._before().ending_within(tokens)
        span = self._span("tokens", tokens)
        return span.begin.position + int(np.searchsorted(span.ends, tokens, side="right"))

    def filled_by(self, unit: By, amount: int) -> int:
        """Return the first position that has at least `amount` samples or tokens before it."""
        if unit == "samples" or not amount:
            return amount
        if amount > self._first.tokens:
            return self.ending_within(amount - 1) + 1
        if self._earlier is not None:
            return self._earlier.filled_by(unit, amount)
        return self._first.position  # the last sample of an epoch reached beyond its size; then weights changed

    def samples(self, start: int, stop: int) -> Samples:
        parts = []
        if start < self._first.position:
            parts.append(self._before().samples(start, min(stop, self._first.position)))
            start = min(stop, self._first.position)
        while start < stop:
            span = self._span("samples", start)
            first = span.begin.position
            end = min(stop, first + len(span.ends))
            parts.append(span.samples.cut(start - first, end - first))
            start = end
        return Samples.concatenate(parts)

    def due(self, progress: SourceProgress) -> tuple[int, ...]:
        """Return what each source is due at this progress, in units of 2**-DUE_BITS."""
        if progress.position < self._first.position:
            return self._before().due(progress)
        if self._continues_at is not None and progress == self._continues_at.progress:
            return self._continues_at.due
        if progress.position > self._first.position:
            self._span("samples", progress.position - 1)
        begun = [stretch for stretch in self.stretches if stretch.begin.position < progress.position]
        return (begun or self.stretches)[-1].due(progress.amount(self.by))

    def periods(self, progress: SourceProgress) -> tuple[int, ...]:
        """Return the periods of the last sample before; at the start of the pass, of its first sample."""
        return self._stage_at(max(0, progress.amount(self.by) - 1)).periods

    def start_at(self, progress: SourceProgress) -> StretchStart | None:
        """Return where a pass could continue from this progress; None in the first stage, which is computed."""
        if progress.position < self._first.position:
            return self._before().start_at(progress)
        if self._continues_at is not None and progress == self._continues_at.progress:
            return self._continues_at
        bound = self.next_bound(0)
        if isinstance(self.stretches[0], FirstStretch) and (bound is None or progress.amount(self.by) < bound):
            return None
        with self._walking:
            walk = _Walk(self, self._nearest("samples", progress.position))
            while missing := progress.position - walk.standing.progress.position:
                walk.take(min(missing, _SPAN))
            stretch = self.stretches[walk.standing.stretch]
            if isinstance(stretch, FirstStretch):
                return None
            return StretchStart(progress, self.due(progress), stretch.piece(walk.standing.piece))

    @property
    def _first(self) -> SourceProgress:
        return self.stretches[0].begin

    def _before(self) -> SourcePass:
        if self._earlier is None:
            raise IndexError(
                "this position is before the one where the weights of the mixture changed: use a loader with the "
                "former weights, and a state from before the change"
            )
        return self._earlier

    # Walking

    def _span(self, unit: By, wanted: int) -> Span:
        """Return a span with the sample at position `wanted`, or the first that ends after `wanted` tokens."""
        for span in self._spans:
            if span.contains(unit, wanted):
                return span
        with self._walking:
            missing = wanted - self._walk.standing.progress.amount(unit)
            if not 0 <= missing <= self._far[unit]:
                standing = self._nearest(unit, wanted)
                if missing < 0 or standing.progress.position > self._walk.standing.progress.position:
                    self._walk = _Walk(self, standing)
            while (ahead := self._ahead()) is not None:
                if ahead.contains(unit, wanted):
                    return ahead
        raise IndexError(f"{unit} {wanted} is outside the pass")

    def _nearest(self, unit: By, wanted: int) -> Standing:
        """Return where to walk from."""
        kept = next(each for each in reversed(self._kept) if each.progress.amount(unit) <= wanted)
        first = self.stretches[0]
        if (
            kept.stretch
            or not isinstance(first, FirstStretch)
            or wanted - kept.progress.amount(unit) <= self._far[unit]
        ):
            return kept
        # The first stage ends with the first sample that fills it.
        bound = self.next_bound(0)
        if bound is not None and (self.supply.endless or bound < first.end().amount(self.by)):
            last = first.shortly_before(self.by, max(0, bound - 1), _SPAN)
            if last.amount(unit) <= wanted:
                return Standing(last, 0, 0)
        return Standing(first.shortly_before(unit, wanted, _SPAN), 0, 0)

    def _ahead(self) -> Span | None:
        """Return the span after the last one of the walk; None at the end."""
        begin = self._walk.standing.progress
        samples = self._walk.take(_SPAN)
        if not len(samples.row):
            return None
        span = Span(begin, samples, begin.tokens + np.cumsum(samples.tokens))
        self._spans = (span, *self._spans)[:_SPANS_KEPT]
        if begin.position >= self._kept[-1].progress.position + self._every:
            self._kept.append(self._walk.standing)
            if len(self._kept) > _MOST_KEPT:
                del self._kept[1::2]
                self._every *= 2
        return span

    # Stages and stretches

    def next_bound(self, number: int) -> int | None:
        """Return where the first stage begins that a stretch does not cover."""
        stretch = self.stretches[number]
        stage = self._stage_number(stretch.begin.amount(self.by))
        after = stage + (len(self._along(stage)) if isinstance(stretch, DueStretch) else 1)
        return self._bounds[after] if after < len(self._bounds) else None

    def stretch_after(self, number: int, begin: SourceProgress) -> None:
        """Compute the stretch that begins here, after another one, with other weights."""
        if number + 1 == len(self.stretches):
            self.stretches.append(self._following(number, begin))

    def _following(self, number: int, begin: SourceProgress) -> DueStretch:
        last, amount, bound = self.stretches[number], begin.amount(self.by), self.next_bound(number)
        assert bound is not None
        before = _present(self._stages[self._stage_number(bound) - 1])
        if not before & _present(self._stage_at(amount)):
            # No source of the stage before remains, so its last sample had to reach beyond its end.
            return self._stretch_from(StretchStart(begin, last.due(amount)))
        # A sample that reaches beyond the end of its stage counts for both stages, by its amount in each.
        due = list(last.due(bound))
        bounds = [bound, *(each for each in self._bounds if bound < each < amount), amount]
        for start, stop in itertools.pairwise(bounds):
            stage, limit = self._stage_at(start), self.supply.limit
            live = [each for each in _present(stage) if self.supply.endless or begin.counts[each] < limit(each)]
            advance(due, stage.periods, live, stop - start)
        return self._stretch_from(StretchStart(begin, tuple(due)))

    def _stretch_from(self, start: StretchStart) -> DueStretch:
        at = start.progress.amount(self.by) if start.piece is None else start.piece.at
        return DueStretch(self.supply, start, self._along(self._stage_number(at)))

    def _stage_number(self, amount: int) -> int:
        return max(0, bisect_right(self._bounds, amount) - 1)

    def _stage_at(self, amount: int) -> Stage:
        return self._stages[self._stage_number(amount)]

    def _along(self, number: int) -> Sequence[Stage]:
        """Return the stages from this number on that have the same sources."""
        present = _present(self._stages[number])
        stop = number + 1
        while stop < len(self._stages) and _present(self._stages[stop]) == present:
            stop += 1
        return self._stages[number:stop]


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
        """Return the next samples, fewer at the end of the pass."""
        parts: list[Samples] = []
        while count and not self.has_ended:
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
        present = self._pass.stretches[self._stretch].present
        out = [self._counts[source] == self._supply.limit(source) for source in present]
        return all(out) or (self._supply.stop == "first" and any(out))

    def _begin_stretch(self) -> None:
        bound = self._pass.next_bound(self._stretch)
        self._left = _FARTHEST if bound is None else bound - self._amount
        self.has_ended = self._is_over()
        if not self.has_ended:
            for source in self._pass.stretches[self._stretch].present:
                if self._heads[source] == self._tails[source]:
                    self._load(source)
            self._align()

    def _settle(self) -> None:
        """Go on to where the next sample comes: to the next piece or stretch."""
        while not self.has_ended:
            if (earliest := self._times.min()) > self._until:
                stretch = self._pass.stretches[self._stretch]
                if self._ends is not None and self._origin + int(earliest) > self._ends:
                    stretch.extend(self._piece, self._amount)
                    self._piece += 1
                self._align()
            elif self._left <= 0:
                self._pass.stretch_after(self._stretch, self.standing.progress)
                self._stretch, self._piece = self._stretch + 1, 0
                self._begin_stretch()
            else:
                return

    def _align(self) -> None:
        """Compute virtual times by the current piece, relative to the next sample's."""
        line, amounts = self._pass.stretches[self._stretch].line(self._piece), self._amounts.tolist()
        floor = -_NEVER if line.floor is None else line.floor
        reached = [line.offsets.get(k, 0) + amount * line.periods[k] for k, amount in enumerate(amounts)]
        nexts = {
            k: reached[k] + int(self._sizes[self._heads[k]]) * line.periods[k]
            for k in line.offsets
            if self._heads[k] < self._tails[k]
        }
        times = {k: max(time, floor) for k, time in nexts.items()}
        self._origin = min(times.values())
        near = [*times.values(), *(reached[k] for k in times)]
        is_wide = max(near) - min(near) >= _FARTHEST
        kind: Any = object if is_wide else np.int64
        never = _NEVER if is_wide else np.iinfo(np.int64).max
        self._never = never
        self._times = np.array([times[k] - self._origin if k in times else never for k in range(len(reached))], kind)
        self._reached = np.array([reached[k] - self._origin if k in times else 0 for k in range(len(reached))], kind)
        self._periods = np.array(line.periods, kind)
        self._widest = np.array([(never if is_wide else _FARTHEST) // max(1, period) for period in line.periods], kind)
        self._ends = line.until
        until = _NEVER - 1 if line.until is None else line.until - self._origin
        self._until = until if is_wide else min(until, _FARTHEST)
        self._floor = floor - self._origin if is_wide else max(floor - self._origin, -_FARTHEST)

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
