"""The order of a mixture: sources merged at their shares, computed at any position without a buffer.

    position --search (order.merge)--> number of samples that each source has given --their own orders--> rows

For "first" and "all", an epoch is one pass through each source. For "repeat", the whole run is one `SourcePass`, in
which each source begins its next pass alone. Inside it, amounts due are carried over from stage to stage.

`TokenSums` say what a source has given at a virtual time, so a position is found by searching for its virtual time.
Samples are computed a span at a time. The last spans are kept, because the next step begins there.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from orchdata.order.merge import LONGEST_SPAN, SPAN, SourceProgress, Span, Stage, Stop, Stretch, Supply, advance
from orchdata.order.order import By, MixedSource, Order, SampleOrder, Samples, TokenCounts

_EPOCHS_KEPT = 4
_SPANS_KEPT = 4


class StretchStart(NamedTuple):
    """What each source has given and is due at the start of a stretch.

    Attributes:
        due: see `Stretch`.
        last: the sample before it, if windows had only some of its tokens: source, row, stream, pass, tokens.
    """

    progress: SourceProgress
    due: tuple[int, ...]
    last: tuple[int, int, int, int, int] | None = None


class _LastSample:
    """All that is known of a pass before weights changed in it: one sample."""

    def __init__(self, end: SourceProgress, last: tuple[int, int, int, int, int]) -> None:
        source, row, stream, number, tokens = last
        of_source, of_pass = np.array([source], np.int32), np.array([number], np.int32)
        self._sample = Samples(of_source, np.array([row]), np.array([stream]), of_pass)
        self.start = SourceProgress(_less(end.counts, source, 1), _less(end.given, source, tokens))

    def progress_at(self, position: int) -> SourceProgress:
        return self.start

    def ending_within(self, tokens: int) -> int:
        return self.start.position

    def samples(self, start: int, stop: int) -> Samples:
        return self._sample


def _less(amounts: tuple[int, ...], source: int, amount: int) -> tuple[int, ...]:
    return (*amounts[:source], amounts[source] - amount, *amounts[source + 1 :])


class SourcePass:
    """One pass through all sources: an epoch of "first" and "all"; for "repeat" the whole run.

    Args:
        stages: with bounds in tokens or samples of the pass.
        stretch_start: the start of a stretch inside; by default the start of the pass.
        earlier: has what came before `stretch_start`; None where that does not follow from the stages: at most its last
            sample is known.
    """

    def __init__(
        self,
        supply: Supply,
        stages: Sequence[Stage],
        stretch_start: StretchStart | None = None,
        earlier: SourcePass | None = None,
    ) -> None:
        self.by: By = supply.by
        self._supply = supply
        self._stages = stages
        self._bounds = [stage.bound for stage in stages]
        self._stretch_start = stretch_start
        self._earlier: SourcePass | _LastSample | None = earlier
        none = (0,) * supply.num_sources
        self.start = SourceProgress(none, none)
        if stretch_start is None:
            first = Stretch(supply, self.start, [self._stage_at(0)])
        else:
            first = self._due_from(stretch_start.progress, stretch_start.due)
            if earlier is None and stretch_start.last is not None:
                self._earlier = _LastSample(stretch_start.progress, stretch_start.last)
        # The known stretches, from the first on, and whether these are all. It is replaced whole, and so are spans,
        # because several threads plan steps.
        self._known: tuple[tuple[Stretch, ...], bool] = (first,), False
        self._spans: tuple[Span, ...] = ()

    # Positions and samples

    def end(self) -> SourceProgress:
        """Return the progress at the end of the pass; not for "repeat"."""
        return self._stretch(lambda _: False).end()

    def progress_at(self, position: int) -> SourceProgress:
        """Return the progress of each source at a position."""
        if position < self._first.position:
            return self._before("samples", position).progress_at(position)
        return self._progress_in(self._stretch(lambda stretch: position <= stretch.begin.position), position)

    def ending_within(self, tokens: int) -> int:
        """Return how many samples end within `tokens` tokens, which must be fewer than the pass has."""
        if tokens < self._first.tokens:
            return self._before("tokens", tokens).ending_within(tokens)
        return self._ending_within(self._stretch(lambda stretch: tokens < stretch.begin.tokens), tokens)

    def filled_by(self, unit: By, amount: int) -> int:
        """Return the first position that has at least `amount` samples or tokens before it."""
        if unit == "tokens" and not isinstance(self._earlier, SourcePass) and 0 < amount <= self._first.tokens:
            return self._first.position  # the last sample of an epoch reached beyond its size; then weights changed
        return amount if unit == "samples" or not amount else self.ending_within(amount - 1) + 1

    def samples(self, start: int, stop: int) -> Samples:
        parts = []
        if start < self._first.position:
            parts.append(self._before("samples", start).samples(start, min(stop, self._first.position)))
            start = min(stop, self._first.position)
        while start < stop:
            stretch = self._stretch(lambda stretch, at=start: at < stretch.begin.position)  # type: ignore[misc]
            span = self._span(stretch, "samples", start)
            end = min(stop, span.first + len(span.ends), stop if stretch.stop is None else stretch.stop)
            parts.append(span.samples.take(slice(start - span.first, end - span.first)))
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
        if stretch is self._known[0][0]:
            return self._stretch_start
        return StretchStart(stretch.begin, stretch.begin_due)

    @property
    def _first(self) -> SourceProgress:
        return self._known[0][0].begin

    def _before(self, unit: By, wanted: int) -> SourcePass | _LastSample:
        """Return what has this position or token, before the first stretch."""
        if self._earlier is None or wanted < self._earlier.start.amount(unit):
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
        counts, given = (np.array(each) for each in span.low)
        source, tokens = (each[: position - span.first] for each in (span.samples.source, span.tokens))
        counts += np.bincount(source, minlength=len(counts))
        given += np.bincount(source, tokens, len(given)).astype(np.int64)
        return SourceProgress(tuple(counts.tolist()), tuple(given.tolist()))

    def _ending_within(self, stretch: Stretch, tokens: int) -> int:
        span = self._span(stretch, "tokens", tokens)
        return span.first + int(np.searchsorted(span.ends, tokens, side="right"))

    def _span(self, stretch: Stretch, unit: By, wanted: int) -> Span:
        """Return the span around the sample at position `wanted`, or the first that ends after `wanted` tokens."""
        spans = [span for span in self._spans if span.stretch is stretch]
        for span in spans:
            if span.contains(unit, wanted):
                return span
        # Continue from the last known span before the wanted sample. Spans in turn are longer and longer, because each
        # looks at all sources.
        near = ((each.time, each.high, 2 * len(each.ends)) for each in spans if each.high.amount(unit) <= wanted)
        time, progress, size = max(near, key=lambda known: known[0], default=(0, stretch.begin, 0))
        size = min(max(size, SPAN), LONGEST_SPAN)
        span = stretch.next_span(unit, wanted, time, progress, size) or stretch.search(unit, wanted, time, progress)
        self._spans = (span, *self._spans)[:_SPANS_KEPT]
        return span

    # Stages and stretches

    def _stage_number(self, amount: int) -> int:
        return max(0, bisect_right(self._bounds, amount) - 1)

    def _stage_at(self, amount: int) -> Stage:
        return self._stages[self._stage_number(amount)]

    def _stretch(self, is_after: Callable[[Stretch], bool]) -> Stretch:
        """Return the last stretch for which `is_after` is false, computing stretches as far as necessary."""
        stretches, is_complete = self._known
        while not is_complete and (len(stretches) == 1 or not is_after(stretches[-1])):
            following = self._after(stretches[-1])
            stretches, is_complete = (*stretches, *filter(None, [following])), following is None
            self._known = stretches, is_complete
        return stretches[bisect_left(stretches, True, lo=1, key=is_after) - 1]

    def _after(self, last: Stretch) -> Stretch | None:
        """Return the stretch after another one; None at the end of the pass."""
        # It begins where the first stage begins that the other does not cover, unless the pass ends before, or there.
        number = self._stage_number(last.begin.amount(self.by)) + last.num_stages
        if number == len(self._stages):
            return None
        bound, endless = self._bounds[number], self._supply.endless
        if not endless and bound >= last.end().amount(self.by):
            return None
        begin = self._progress_in(last, bound if self.by == "samples" else self._ending_within(last, bound - 1) + 1)
        if not endless and begin.position >= last.end().position:
            return None
        amount = begin.amount(self.by)
        if set(self._stages[number - 1].present).isdisjoint(self._stage_at(amount).present):
            # No source of the stage before remains, so its last sample had to reach beyond its end.
            due = last.due(amount)
        else:
            # A sample that reaches beyond the end of its stage counts for both stages, by its amount in each.
            dues, limit = list(last.due(bound)), self._supply.limit
            bounds = [bound, *(each for each in self._bounds if bound < each < amount), amount]
            for start, stop in pairwise(bounds):
                stage = self._stage_at(start)
                live = [each for each in stage.present if endless or begin.counts[each] < limit(each)]
                advance(dues, stage.periods, live, stop - start)
            due = tuple(dues)
        following = self._due_from(begin, due)
        last.stop = begin.position
        return following

    def _due_from(self, begin: SourceProgress, due: tuple[int, ...]) -> Stretch:
        """Return the stretch over the stages from here on that have the same sources."""
        number = stop = self._stage_number(begin.amount(self.by))
        present = self._stages[number].present
        while stop < len(self._stages) and self._stages[stop].present == present:
            stop += 1
        return Stretch(self._supply, begin, self._stages[number:stop], due)


class ResumePoint(NamedTuple):
    """Where a run continues: what does not follow from its stages, or only after a search through all of them.

    Attributes:
        epoch: the epoch in which it continues.
        given_before: samples and tokens of the epochs before; (0, 0) for "repeat".
        start: for "repeat", the start of the epoch.
        stretch_start: the start of the current stretch; None in the first stretch of an epoch, or of a run.
        is_changed: whether what came before does not follow from the stages: other weights.
    """

    epoch: int
    given_before: tuple[int, int]
    start: SourceProgress
    stretch_start: StretchStart | None
    is_changed: bool = False


class MixtureOrder(SampleOrder):
    """The sequence of samples of every epoch of a mixture, and the tokens along it: `SampleOrder` and `Sums` in one.

    Rows of all sources are numbered one source after the other; `source` is the number of the source. It pickles.

    Args:
        sources: sorted by name; none is empty.
        stages: ascending from 0; each has a source that gives something.
        by: unit of the shares and of the bounds of stages.
        stop: where an epoch ends: "first": when the first source is exhausted; "all": when all are; "repeat": after
            `epoch_size` tokens or samples.
        epoch_size: with "repeat" only. An epoch of tokens ends with the sample that fills it.
        resumed: where a run continues that had other weights before, or that has many stages.
    """

    travels = True

    def __init__(
        self,
        sources: Sequence[MixedSource],
        stages: Sequence[Stage],
        *,
        by: By = "tokens",
        stop: Stop = "first",
        epoch_size: tuple[By, int] | None = None,
        resumed: ResumePoint | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.names = tuple(source.name for source in sources)
        # Losses of tokens are multiplied by float32 weights: sums and denominators agree.
        self.loss_weights = tuple(float(np.float32(source.loss_weight)) for source in sources)
        self.streams = self.sources[0].order.streams  # of each source
        self.num_samples = sum(source.order.num_samples for source in self.sources)
        # Without those that set the current weights again.
        self.stages = tuple(stage for n, stage in enumerate(stages) if not n or stage.periods != stages[n - 1].periods)
        self.by: By = by
        self.stop: Stop = stop
        self.epoch_size = epoch_size
        self._options: Any = {"by": by, "stop": stop, "epoch_size": epoch_size}
        self.resumed = resumed
        self._run = self._source_pass(0, 0) if stop == "repeat" else None
        self._given_before = {0: (0, 0)} | ({} if resumed is None else {resumed.epoch: resumed.given_before})
        self._epochs: dict[int, _Epoch] = {}
        self._sizes: dict[int, tuple[int, int]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(MixtureOrder, self.sources, self.stages, resumed=self.resumed, **self._options), ()

    def restaged(self, stages: Sequence[Stage], resumed: ResumePoint | None = None) -> MixtureOrder:
        """Return the same mixture with other stages, from `resumed` on if it is given."""
        return MixtureOrder(self.sources, stages, resumed=resumed, **self._options)

    @property
    def orders(self) -> tuple[Order, ...]:
        """The order of each source."""
        return tuple(source.order for source in self.sources)

    def sums(self, counts: TokenCounts) -> MixtureOrder:
        """Return the sums of tokens along the order: it knows them."""
        return self

    def length(self, epoch: int) -> int:
        """Return the samples of an epoch."""
        return self._size_of(epoch)[0]

    def of_epoch(self, epoch: int) -> int:
        """Return the tokens of an epoch."""
        return self._size_of(epoch)[1]

    def _size_of(self, epoch: int) -> tuple[int, int]:
        """Return the samples and tokens of an epoch. All are kept: to find one, each source is looked at."""
        size = self._sizes.get(epoch)
        if size is None:
            _, start, stop = self._epoch(epoch)
            size = self._sizes[epoch] = stop.position - start.position, stop.tokens - start.tokens
        return size

    def of_epochs_before(self, epoch: int) -> int:
        """Return the tokens of all epochs before this one."""
        return self._epoch(epoch).start.tokens if self._run is not None else self._begins(epoch)[1]

    def before(self, epoch: int, position: int) -> int:
        """Return the tokens of the samples before a position of the epoch. Raises ValueError outside the epoch."""
        if not position:
            return 0
        bounds = self._epoch(epoch)
        if not 0 <= position <= self.length(epoch):
            raise ValueError(f"position {position} is not within epoch {epoch}, of {self.length(epoch)} samples")
        return self.progress_at(epoch, position).tokens - bounds.start.tokens

    def position(self, epoch: int, tokens: int) -> int:
        """Return how many samples end within the first `tokens` tokens of the epoch."""
        bounds = self._epoch(epoch)
        wanted = bounds.start.tokens + tokens
        if wanted >= bounds.stop.tokens:
            return self.length(epoch)
        return bounds.source_pass.ending_within(wanted) - bounds.start.position

    def samples(self, epoch: int, start: int, stop: int) -> Samples:
        """Return the samples at positions [start, stop) of an epoch, as new arrays.

        Raises:
            ValueError: positions outside the epoch, or a negative epoch.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not 0 <= start <= stop <= self.length(epoch):
            raise ValueError(
                f"positions [{start}, {stop}) are not within epoch {epoch}, of {self.length(epoch)} samples"
            )
        source_pass, begin, _ = self._epoch(epoch)
        return source_pass.samples(begin.position + start, begin.position + stop)

    def given(self, epoch: int) -> list[tuple[int, int]]:
        """Return the samples and tokens that each source gives in an epoch."""
        _, start, stop = self._epoch(epoch)
        ends = zip(start.counts, stop.counts, start.given, stop.given, strict=True)
        return [(last - first, until - since) for first, last, since, until in ends]

    def progress_at(self, epoch: int, position: int) -> SourceProgress:
        """Return how many samples each source has given before a position of an epoch, and their tokens, since the
        start of the epoch; for "repeat" since the start of the run.
        """
        bounds = self._epoch(epoch)
        return bounds.source_pass.progress_at(bounds.start.position + position)

    def resumed_at(self, epoch: int, progress: SourceProgress) -> ResumePoint:
        """Return what a loader needs to continue from this progress in an epoch."""
        bounds = self._epoch(epoch)
        given_before = (0, 0) if self._run is not None else self._begins(epoch)
        resumed = self.resumed
        if resumed is None or not resumed.is_changed:
            return ResumePoint(epoch, given_before, bounds.start, bounds.source_pass.last_change(progress))
        # No later start: steps of the epoch are cut from its start, or from where the weights changed in it.
        is_resumed = epoch == resumed.epoch
        stretch_start = resumed.stretch_start if is_resumed else bounds.source_pass.last_change(bounds.start)
        return ResumePoint(epoch, given_before, bounds.start, stretch_start, is_changed=True)

    def due(self, epoch: int, progress: SourceProgress) -> tuple[int, ...]:
        """Return what each source is due at this progress, in units of 2**-DUE_BITS."""
        return self._epoch(epoch).source_pass.due(progress)

    def periods(self, epoch: int, progress: SourceProgress) -> tuple[int, ...]:
        """Return the periods of the last sample before; at the start of a pass, of its first sample."""
        return self._epoch(epoch).source_pass.periods(progress)

    def describe_weights(self) -> Any:
        """Return what identifies the stages, JSON-safe: of one stage its bound, and name -> period; of several, which
        may be thousands, their number and a digest.
        """
        if len(self.stages) == 1:
            return [[stage.bound, dict(zip(self.names, stage.periods, strict=True))] for stage in self.stages]
        digest = hashlib.blake2b(digest_size=16)
        for bound, periods in self.stages:
            digest.update(np.array([bound, *periods], "<i8").tobytes())
        return {"stages": len(self.stages), "digest": digest.hexdigest()}

    def describe(self) -> dict[str, object]:
        """Return what the sequence depends on besides the stages, JSON-safe."""
        return {
            "by": self.by,
            "stop": self.stop,
            "epoch": None if self.epoch_size is None else dict([self.epoch_size]),
            "sources": {source.name: source.order.describe() for source in self.sources},
        }

    def _source_pass(self, number: int, given_before: int) -> SourcePass:
        """Return a pass; bounds of stages count from `given_before` tokens or samples of the run on."""
        resumed, supply = self.resumed, Supply(self.sources, self.by, self.stop, number)
        stages = [Stage(stage.bound - given_before, stage.periods) for stage in self.stages]
        whole = SourcePass(supply, stages)
        if resumed is None or resumed.stretch_start is None or (self.stop != "repeat" and number != resumed.epoch):
            return whole
        return SourcePass(supply, stages, resumed.stretch_start, None if resumed.is_changed else whole)

    def _epoch(self, epoch: int) -> _Epoch:
        if self.resumed is not None and self.resumed.is_changed and epoch < self.resumed.epoch:
            raise IndexError(
                f"epoch {epoch} is before the position where the weights of the mixture changed: use a loader with the "
                "former weights, and a state from before the change"
            )
        kept = self._epochs.get(epoch)
        if kept is None:
            kept = self._one_pass(epoch) if self._run is None else self._part_of_run(self._run, epoch)
            self._epochs = dict([*self._epochs.items(), (epoch, kept)][-_EPOCHS_KEPT:])
        return kept

    def _one_pass(self, epoch: int) -> _Epoch:
        # Only stages depend on what came before.
        given_before = self._begins(epoch)[self.by == "tokens"] if len(self.stages) > 1 else 0
        source_pass = self._source_pass(epoch, given_before)
        return _Epoch(source_pass, source_pass.start, source_pass.end())

    def _part_of_run(self, run: SourcePass, epoch: int) -> _Epoch:
        assert self.epoch_size is not None
        unit, size = self.epoch_size
        stop = run.progress_at(run.filled_by(unit, (epoch + 1) * size))
        if self.resumed is not None and epoch == self.resumed.epoch:
            return _Epoch(run, self.resumed.start, stop)
        return _Epoch(run, run.progress_at(run.filled_by(unit, epoch * size)), stop)

    def _begins(self, epoch: int) -> tuple[int, int]:
        """Return the samples and tokens of the epochs before this one, each of which is one pass."""
        known = self._given_before
        for number in range(max((number for number in known if number <= epoch), default=0), epoch):
            samples, tokens = known[number]
            end = self._source_pass(number, tokens if self.by == "tokens" else samples).end()
            known = known | {number + 1: (samples + end.position, tokens + end.tokens)}
        self._given_before = known
        return known[epoch]


AnyOrder = Order | MixtureOrder
"""The order of samples in shards."""


class _Epoch(NamedTuple):
    """An epoch: its pass, and its start and end there."""

    source_pass: SourcePass
    start: SourceProgress
    stop: SourceProgress
