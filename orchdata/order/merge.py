"""Sources merged by virtual time: where a lap through them stands, at any place of it.

Sample i of a source has the virtual time (amount of the source up to and with it) x period + delay: an amount is
tokens or samples, a period an integer inverse to the weight, and delays keep sources apart whose samples are of one
size, which would come at the same times. The merge is by (virtual time, number of the source). What a source has given
at a virtual time, its `TokenSums` tell, so a place is found by searching for its virtual time, and samples are looked
at a span at a time. What was looked at last is kept, since the next step begins there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.order.order import Order
from orchdata.order.token_sums import TokenCounts, TokenSums

Ints = NDArray[np.int64]
By = Literal["tokens", "samples"]
Stop = Literal["first", "all", "repeat"]

_SPAN = 4096  # samples looked at together
_SPANS_KEPT = 4


class MixedSource(NamedTuple):
    """One source of a mixture.

    Attributes:
        order: of its own rows; a pass is one of its epochs.
        counts: tokens of its own rows.
        sums: of `counts` along `order`.
        first_row: where its rows begin among those of all sources.
        loss_weight: what a loss token of it counts.
    """

    name: str
    order: Order
    counts: TokenCounts
    sums: TokenSums
    first_row: int
    loss_weight: float = 1.0


class Stage(NamedTuple):
    """From so many tokens or samples of the run on, each source's period; 0 for one that gives nothing."""

    bound: int
    periods: tuple[int, ...]


class Place(NamedTuple):
    """A place of a lap: how many samples each source has given, and their tokens."""

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
        return self.tokens if by == "tokens" else self.position


class Samples(NamedTuple):
    """Samples in turn: source and pass, int32, row, tokens and stream of the source, int64, each (n,)."""

    source: NDArray[np.int32]
    passes: NDArray[np.int32]
    row: Ints
    tokens: Ints
    stream: Ints

    def cut(self, start: int, stop: int) -> Samples:
        return self.taken(slice(start, stop))

    def taken(self, places: slice | Ints) -> Samples:
        source, passes, row, tokens, stream = self
        return Samples(source[places], passes[places], row[places], tokens[places], stream[places])

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        if not parts:
            empty = np.zeros(0, np.int64)
            return Samples(empty.astype(np.int32), empty.astype(np.int32), empty, empty, empty)
        return Samples(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Span(NamedTuple):
    """Samples looked at: those between two places of a stretch, up to virtual time `time`.

    Attributes:
        ends: tokens of the lap up to and with each.
    """

    stretch: Stretch
    low: Place
    high: Place
    time: int
    samples: Samples
    ends: Ints

    @property
    def first(self) -> int:
        return self.low.position

    @property
    def stop(self) -> int:
        return self.first + len(self.ends)


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
    """

    def __init__(
        self, sources: Sequence[MixedSource], stages: Sequence[Stage], by: By, stop: Stop, *, number: int, begun: int
    ) -> None:
        self.by: By = by
        self.stop: Stop = stop
        self.endless = stop == "repeat"
        self._number = number
        self._sources = sources
        self._begun = begun
        self._stages = stages
        none = (0,) * len(sources)
        self.start = Place(none, none)
        # Replaced whole: several threads plan steps.
        self._found = Found((Stretch(self, self.start, self._stage_at(begun).periods),), False)
        self._spans: tuple[Span, ...] = ()

    # What one source has

    def limit(self, source: int) -> int:
        """Samples of a pass."""
        return self._sources[source].order.num_samples

    def total(self, source: int) -> int:
        """Tokens of a pass."""
        return self._sources[source].sums.total

    def tokens_of(self, source: int, count: int) -> int:
        """Tokens of the first samples of a source."""
        sums = self._sources[source].sums
        if not self.endless:
            return sums.total if count == self.limit(source) else sums.before(self._number, count)
        number, rest = divmod(count, self.limit(source))
        return number * sums.total + sums.before(number, rest)

    def count_of(self, source: int, tokens: int) -> int:
        """Samples of a source that end within so many of its tokens."""
        sums = self._sources[source].sums
        if not self.endless:
            return self.limit(source) if tokens >= sums.total else sums.position(self._number, tokens)
        number, rest = divmod(tokens, sums.total)
        return number * self.limit(source) + sums.position(number, rest)

    def given(self, source: int, start: int, stop: int) -> Samples:
        """Samples [start, stop) of a source."""
        mine, size, found = self._sources[source], self.limit(source), []
        while start < stop:
            number, at = divmod(start, size) if self.endless else (self._number, start)
            end = min(at + stop - start, size)
            dataset_id, row = mine.order.rows(number, at, end)
            passes = np.full(len(row), number, np.int32)
            tokens, stream = mine.counts(dataset_id, row), mine.order.drawn_from(number, at, end)
            found.append(Samples(dataset_id, passes, row + mine.first_row, tokens, stream))
            start += end - at
        return Samples.joined(found)

    # Where things are

    def end(self) -> Place:
        """Where the lap ends; not of "repeat"."""
        return self._stretch(lambda _: False).end()

    def place(self, position: int) -> Place:
        """How far each source is at a position."""
        return self._place(self._stretch(lambda stretch: position <= stretch.begin.position), position)

    def ending_within(self, tokens: int) -> int:
        """How many samples end within so many tokens, fewer than the lap has."""
        return self._ending_within(self._stretch(lambda stretch: tokens < stretch.begin.tokens), tokens)

    def filled_by(self, unit: By, amount: int) -> int:
        """The first position before which there are at least so many samples or tokens."""
        return amount if unit == "samples" or not amount else self.ending_within(amount - 1) + 1

    def samples(self, start: int, stop: int) -> Samples:
        found = []
        while start < stop:
            stretch = self._stretch(lambda stretch, at=start: at < stretch.begin.position)  # type: ignore[misc]
            span = self._span(stretch, "samples", start)
            end = min(stop, span.stop, stop if stretch.stop is None else stretch.stop)
            found.append(span.samples.cut(start - span.first, end - span.first))
            start = end
        return Samples.joined(found)

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

    def _stage_at(self, amount: int) -> Stage:
        return next(stage for stage in reversed(self._stages) if stage.bound <= amount)

    def _stretch(self, is_behind: Callable[[Stretch], bool]) -> Stretch:
        """The last stretch that is not behind something; those are found as far as that."""
        found = self._found
        for number in itertools.count(1):
            if number == len(found.stretches) and not found.is_all:
                self._found = found = self._extended(found)
            if number == len(found.stretches):
                return found.stretches[-1]
            if is_behind(found.stretches[number]):
                return found.stretches[number - 1]
        raise AssertionError

    def _extended(self, found: Found) -> Found:
        """With the stretch behind the last, if there is one."""
        last = found.stretches[-1]
        done = self._begun + last.begin.amount(self.by)
        later = [stage for stage in self._stages if stage.bound > done]
        begin = self._reached(last, later[0].bound - self._begun) if later else None
        if begin is None:
            return Found(found.stretches, True)
        stage = self._stage_at(self._begun + begin.amount(self.by))
        last.stop = begin.position
        return Found((*found.stretches, Stretch(self, begin, stage.periods)), False)

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
            if span.stretch is stretch and _holds(span, unit, wanted):
                return span
        # On from what was looked at last, where that comes before.
        near = [
            (each.time, each.high)
            for each in self._spans
            if each.stretch is stretch and each.high.amount(unit) <= wanted
        ]
        time, place = max(near, key=lambda known: known[0], default=(0, stretch.begin))
        looked: Span | None = None
        if stretch.ahead(unit, wanted, place) <= stretch.width(place):
            later = time + stretch.width(place)
            found = stretch.span(time, place, later, stretch.at(later))
            looked = found if _holds(found, unit, wanted) else None
        looked = looked or stretch.search(unit, wanted, time, place)
        self._spans = (looked, *self._spans)[:_SPANS_KEPT]
        return looked


def _holds(span: Span, unit: By, wanted: int) -> bool:
    if not len(span.ends):
        return False
    return span.first <= wanted < span.stop if unit == "samples" else span.low.tokens <= wanted < int(span.ends[-1])


class Stretch:
    """A lap from where a stage begins.

    Attributes:
        stop: the position where another stage begins, once that is known.
    """

    def __init__(self, lap: Lap, begin: Place, periods: tuple[int, ...]) -> None:
        self._lap = lap
        self.begin = begin
        self._periods = periods
        self._amounts = begin.amounts(lap.by)
        self._delays = self._staggered()
        self.stop: int | None = None
        self._end: Place | None = None

    def width(self, place: Place) -> int:
        """Virtual time in which a span of samples comes from a place on, about."""
        return max(1, int(_SPAN / self._pace("samples", place)))

    def at(self, time: int) -> Place:
        """What each source has given at a virtual time."""
        lap, counts = self._lap, list(self.begin.counts)
        for source, period in enumerate(self._periods):
            if not period or time <= 0:
                continue
            amount = self._amounts[source] + max(0, time - self._delays[source]) // period
            if lap.by == "tokens":
                counts[source] = lap.count_of(source, amount)
            else:
                counts[source] = amount if lap.endless else min(amount, lap.limit(source))
        return self._place(counts)

    def end(self) -> Place:
        """Where the lap ends if no other stage begins before; not of "repeat"."""
        if self._end is None:
            self._end = self._first_end() if self._lap.stop == "first" else self._last_end()
        return self._end

    def _last_end(self) -> Place:
        limits = [self._lap.limit(source) for source in range(len(self._periods))]
        return self._place(
            [
                limit if period else count
                for limit, period, count in zip(limits, self._periods, self.begin.counts, strict=True)
            ]
        )

    def _first_end(self) -> Place:
        if any(self._is_over(source) for source in self._present()):
            return self.begin
        time, source = min((self._time_of_last(source), source) for source in self._present())
        at, before = self.at(time).counts, self.at(time - 1).counts
        return self._place([*at[: source + 1], *before[source + 1 :]])

    def _present(self) -> list[int]:
        return [source for source, period in enumerate(self._periods) if period]

    def _staggered(self) -> list[int]:
        """The delay of each source: of n present ones, the k-th begins k/n of its mean sample ahead of the first."""
        lap, present, ahead = self._lap, self._present(), [0] * len(self._periods)
        for place, source in enumerate(present):
            mean = max(1, lap.total(source) // lap.limit(source)) if lap.by == "tokens" else 1
            ahead[source] = self._periods[source] * mean * place // len(present)
        return [max(ahead) - each for each in ahead]

    def _is_over(self, source: int) -> bool:
        return self.begin.counts[source] == self._lap.limit(source)

    def _time_of_last(self, source: int) -> int:
        """The virtual time of the last sample of a source's pass."""
        lap = self._lap
        whole = lap.total(source) if lap.by == "tokens" else lap.limit(source)
        return (whole - self._amounts[source]) * self._periods[source] + self._delays[source]

    def _place(self, counts: Sequence[int]) -> Place:
        lap, begin = self._lap, self.begin
        given = (
            begin.given[source] if count == begin.counts[source] else lap.tokens_of(source, count)
            for source, count in enumerate(counts)
        )
        return Place(tuple(counts), tuple(given))

    def _pace(self, unit: By, place: Place) -> float:
        """Samples or tokens that come in a unit of virtual time from a place on, about; never 0."""
        lap, found = self._lap, 0.0
        for source in self._present():
            if lap.endless or place.counts[source] < lap.limit(source):
                amounts = {"samples": lap.limit(source), "tokens": lap.total(source)}
                found += amounts[unit] / amounts[lap.by] / self._periods[source]
        return found or 2.0**-60

    def ahead(self, unit: By, wanted: int, place: Place) -> int:
        """Virtual time from a place to where so many samples or tokens are given, about."""
        return int((wanted - place.amount(unit)) / self._pace(unit, place))

    def search(self, unit: By, wanted: int, time: int, place: Place) -> Span:
        """The span around the sample at a position, or around the first that ends behind so many tokens.

        A guess by the mean pace from a known place on, twice as wide with each miss; then halved to a span.
        """
        width = self.width(place)
        while True:
            middle = max(0, time + self.ahead(unit, wanted, place))
            low, high = max(0, middle - width // 2), middle + width // 2 + 1
            below, above = self.at(low), self.at(high)
            if below.amount(unit) <= wanted < above.amount(unit):
                break
            time, place = (low, below) if below.amount(unit) > wanted else (high, above)
            width *= 2
        while above.position - below.position > 4 * _SPAN:
            middle = (low + high) // 2
            found = self.at(middle)
            if found.amount(unit) <= wanted:
                low, below = middle, found
            else:
                high, above = middle, found
        return self.span(low, below, high, above)

    def span(self, low: int, below: Place, high: int, above: Place) -> Span:
        """The samples behind virtual time `low`, up to `high`, and what each source has given then."""
        lap = self._lap
        parts, times = [], []
        for source in self._present():
            start, stop, period = below.counts[source], above.counts[source], self._periods[source]
            if start == stop:
                continue
            mine = lap.given(source, start, stop)
            amounts = np.cumsum(mine.tokens) if lap.by == "tokens" else np.arange(1, stop - start + 1)
            # From `low` on, so that a run may be as long as it likes.
            given = below.amounts(lap.by)[source] - self._amounts[source]
            before = given * period + self._delays[source] - low
            if int(amounts[-1]) * period + abs(before) >= 1 << 62:  # of a source that comes once in a long while
                amounts = amounts.astype(object)
            times.append(amounts * period + before)
            parts.append(mine)
        samples = Samples.joined(parts)
        if parts:
            # Stable: of equal times the source with the lower number is first.
            in_turn = np.argsort(np.concatenate(times), kind="stable")
            samples = samples.taken(in_turn)
        return Span(self, below, above, high, samples, below.tokens + np.cumsum(samples.tokens))
