"""The order of a mixture: sources merged at their shares, one sample after the other.

    position --nearest known progress, walk (order.merge)--> samples of each source --their own orders--> rows

For "first" and "all", an epoch is one pass through each source. For "repeat", the whole run is one `SourcePass`, in
which each source begins its next pass alone. Inside it, amounts due are carried over from stage to stage (`due.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.order.merge import By, MixedSource, Samples, SourcePass, SourceProgress, Stage, Stop, StretchStart
from orchdata.order.sources import Supply

Ints = NDArray[np.int64]

_EPOCHS_KEPT = 4


class ResumePoint(NamedTuple):
    """Where a run continues: what does not follow from its stages, or only after a search through all of them.

    Attributes:
        epoch: the epoch in which it continues.
        given_before: samples and tokens of the epochs before; (0, 0) for "repeat".
        start: for "repeat", the start of the epoch.
        changed: the last change of weights in the epoch that does not follow from the stages.
        now: where it continues; None in the first stage of an epoch, or of a run.
        is_changed: whether weights have changed, in this epoch or before.
    """

    epoch: int
    given_before: tuple[int, int]
    start: SourceProgress
    changed: StretchStart | None
    now: StretchStart | None
    is_changed: bool = False


class MixtureOrder:
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
        self.stages = joined_stages(stages)
        self.by: By = by
        self.stop: Stop = stop
        self.epoch_size = epoch_size
        self.resumed = resumed
        self._run = self._source_pass(0, 0) if stop == "repeat" else None
        self._given_before = {0: (0, 0)} | ({} if resumed is None else {resumed.epoch: resumed.given_before})
        self._epochs: dict[int, _Epoch] = {}
        self._sizes: dict[int, tuple[int, int]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        given: Any = {"by": self.by, "stop": self.stop, "epoch_size": self.epoch_size, "resumed": self.resumed}
        return partial(MixtureOrder, self.sources, self.stages, **given), ()

    def restaged(self, stages: Sequence[Stage], resumed: ResumePoint | None = None) -> MixtureOrder:
        """Return the same mixture with other stages, from `resumed` on if it is given."""
        given: Any = {"by": self.by, "stop": self.stop, "epoch_size": self.epoch_size}
        return MixtureOrder(self.sources, stages, resumed=resumed, **given)

    @property
    def streams(self) -> int:
        """Streams of each source."""
        return self.sources[0].order.streams

    @property
    def num_samples(self) -> int:
        """Samples of all sources, each counted once."""
        return sum(source.order.num_samples for source in self.sources)

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

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], Ints]:
        """Return the samples at positions [start, stop) of an epoch: (source, row), each (stop - start,), new.

        Raises:
            ValueError: positions outside the epoch, or a negative epoch.
        """
        samples = self._samples(epoch, start, stop)
        return samples.source, samples.row

    def passes(self, epoch: int, start: int, stop: int) -> NDArray[np.int32]:
        """Return for each of these samples the number of the pass of its source, from 0: int32 (stop - start,)."""
        return self._samples(epoch, start, stop).passes

    def drawn_from(self, epoch: int, start: int, stop: int) -> Ints:
        """Return for each of these samples the stream of its source: int64 (stop - start,)."""
        return self._samples(epoch, start, stop).stream

    def _samples(self, epoch: int, start: int, stop: int) -> Samples:
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not 0 <= start <= stop <= self.length(epoch):
            raise ValueError(
                f"positions [{start}, {stop}) are not within epoch {epoch}, of {self.length(epoch)} samples"
            )
        source_pass, first, _ = self._epoch(epoch)
        return source_pass.samples(first.position + start, first.position + stop)

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
        resumed, changed, is_changed = self.resumed, None, False
        if resumed is not None:
            # Steps of the epoch are cut from its start, or from where the weights changed in it.
            changed = resumed.changed if self._run is not None or epoch == resumed.epoch else None
            is_changed = resumed.is_changed
        now = bounds.source_pass.start_at(progress)
        return ResumePoint(epoch, given_before, bounds.start, changed, now, is_changed)

    def due(self, epoch: int, progress: SourceProgress) -> tuple[int, ...]:
        """Return what each source is due at this progress, in units of 2**-DUE_BITS."""
        return self._epoch(epoch).source_pass.due(progress)

    def periods(self, epoch: int, progress: SourceProgress) -> tuple[int, ...]:
        """Return the periods of the last sample before; at the start of a pass, of its first sample."""
        return self._epoch(epoch).source_pass.periods(progress)

    def describe_stages(self) -> list[list[Any]]:
        """Return the stages, JSON-safe: for each its bound, and name -> period."""
        names = [source.name for source in self.sources]
        return [[stage.bound, dict(zip(names, stage.periods, strict=True))] for stage in self.stages]

    def describe_weights(self) -> Any:
        """Return what identifies the stages, JSON-safe: one stage itself, or a digest of several."""
        return self.describe_stages() if len(self.stages) == 1 else _digest(self.stages)

    def describe(self) -> dict[str, object]:
        """Return what the sequence depends on besides the stages, JSON-safe."""
        return {
            "by": self.by,
            "stop": self.stop,
            "epoch": None if self.epoch_size is None else dict([self.epoch_size]),
            "sources": {source.name: source.order.describe() for source in self.sources},
        }

    def _source_pass(self, number: int, given_before: int) -> SourcePass:
        resumed, starts = self.resumed, list[StretchStart]()
        if resumed is not None and (self.stop == "repeat" or number == resumed.epoch):
            starts = [start for start in (resumed.changed, resumed.now) if start is not None]
        stages = [Stage(stage.bound - given_before, stage.periods) for stage in self.stages]
        knows_start = not (starts and resumed is not None and resumed.changed is not None)
        return SourcePass(Supply(self.sources, self.by, self.stop, number), stages, starts, knows_start=knows_start)

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


def _digest(stages: Sequence[Stage]) -> dict[str, object]:
    """Return the number and a digest of several stages, which may be thousands."""
    digest = hashlib.blake2b(digest_size=16)
    for bound, periods in stages:
        digest.update(np.array([bound, *periods], "<i8").tobytes())
    return {"stages": len(stages), "digest": digest.hexdigest()}


def joined_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages without those that set the current weights again."""
    return tuple(stage for n, stage in enumerate(stages) if not n or stage.periods != stages[n - 1].periods)


class _Epoch(NamedTuple):
    """An epoch: its pass, and its start and end there."""

    source_pass: SourcePass
    start: SourceProgress
    stop: SourceProgress
