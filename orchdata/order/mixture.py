"""The order of a mixture: sources merged at their shares, found at any position without a buffer.

    position --search (order.merge)--> how many samples each source has given --their own orders--> rows

A lap is what goes through each source once, an epoch of "first" and "all"; of "repeat" it is the whole run, in which a
source begins its next pass by itself. Stages cut a lap into stretches: in each virtual times begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.order.merge import By, Lap, MixedSource, Place, Samples, Stage, Stop

Ints = NDArray[np.int64]

_EPOCHS_KEPT = 4


class MixtureOrder:
    """The sequence of samples of every epoch of a mixture, and the tokens along it: `SampleOrder` and `Sums` in one.

    Rows are those of all sources behind one another, `dataset_id` is the number of the source. It pickles.

    Args:
        sources: sorted by name; none is empty.
        stages: ascending from 0; each with a source that gives something.
        by: what shares and the bounds of stages are measured in.
        stop: where an epoch ends: with the last sample of the first source that has no more, of all of them, or
            ("repeat") where it has `epoch_size` tokens or samples.
        epoch_size: with "repeat" only. An epoch of tokens ends with the sample that fills it.
    """

    def __init__(
        self,
        sources: Sequence[MixedSource],
        stages: Sequence[Stage],
        *,
        by: By = "tokens",
        stop: Stop = "first",
        epoch_size: tuple[By, int] | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.stages = tuple(stages)
        self.by: By = by
        self.stop: Stop = stop
        self.epoch_size = epoch_size
        self._run = self._lap(0, 0) if stop == "repeat" else None
        self._begun = [(0, 0)]
        self._epochs: dict[int, _Epoch] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _mixture_order, (self.sources, self.stages, self.by, self.stop, self.epoch_size)

    def restaged(self, stages: Sequence[Stage]) -> MixtureOrder:
        """The same mixture with other stages."""
        return _mixture_order(self.sources, tuple(stages), self.by, self.stop, self.epoch_size)

    @property
    def streams(self) -> int:
        """Of each source."""
        return self.sources[0].order.streams

    @property
    def num_samples(self) -> int:
        """Of all sources, each counted once."""
        return sum(source.order.num_samples for source in self.sources)

    def length(self, epoch: int) -> int:
        """Samples of an epoch."""
        found = self._epoch(epoch)
        return found.stop.position - found.start.position

    def of_epoch(self, epoch: int) -> int:
        """Tokens of an epoch."""
        found = self._epoch(epoch)
        return found.stop.tokens - found.start.tokens

    def of_epochs_before(self, epoch: int) -> int:
        """Tokens of all epochs before one."""
        return self._epoch(epoch).start.tokens if self._run is not None else self._begins(epoch)[1]

    def amount(self, epoch: int, position: int) -> int:
        """What the run has given before a position of an epoch, in what stages are bounded by."""
        tokens = self.by == "tokens"
        if self._run is not None:
            start = self._epoch(epoch).start
            return start.tokens + self.before(epoch, position) if tokens else start.position + position
        samples, given = self._begins(epoch)
        return given + self.before(epoch, position) if tokens else samples + position

    def before(self, epoch: int, position: int) -> int:
        """Tokens of the samples before a position, from 0 to the epoch's length. Raises ValueError elsewhere."""
        found = self._epoch(epoch)
        if not 0 <= position <= self.length(epoch):
            raise ValueError(f"position {position} is not within epoch {epoch}, of {self.length(epoch)} samples")
        return found.lap.place(found.start.position + position).tokens - found.start.tokens

    def position(self, epoch: int, tokens: int) -> int:
        """How many samples end within so many tokens from the epoch's start."""
        found = self._epoch(epoch)
        wanted = found.start.tokens + tokens
        if wanted >= found.stop.tokens:
            return self.length(epoch)
        return found.lap.ending_within(wanted) - found.start.position

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], Ints]:
        """The samples at positions [start, stop) of an epoch: (dataset_id, row), each (stop - start,), new.

        Raises:
            ValueError: positions outside the epoch, or a negative epoch.
        """
        found = self._samples(epoch, start, stop)
        return found.source, found.row

    def passes(self, epoch: int, start: int, stop: int) -> NDArray[np.int32]:
        """Which pass through its source each of these samples is of, from 0: int32 (stop - start,)."""
        return self._samples(epoch, start, stop).passes

    def drawn_from(self, epoch: int, start: int, stop: int) -> Ints:
        """The stream of its source that each of these samples is drawn from: int64 (stop - start,)."""
        return self._samples(epoch, start, stop).stream

    def _samples(self, epoch: int, start: int, stop: int) -> Samples:
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not 0 <= start <= stop <= self.length(epoch):
            raise ValueError(
                f"positions [{start}, {stop}) are not within epoch {epoch}, of {self.length(epoch)} samples"
            )
        found = self._epoch(epoch)
        return found.lap.samples(found.start.position + start, found.start.position + stop)

    def given(self, epoch: int) -> list[tuple[int, int]]:
        """Samples and tokens that each source gives in an epoch."""
        _, start, stop = self._epoch(epoch)
        ends = zip(start.counts, stop.counts, start.given, stop.given, strict=True)
        return [(last - first, until - since) for first, last, since, until in ends]

    def told_stages(self) -> list[list[Any]]:
        """The stages, JSON-safe: of each its bound, and name -> period."""
        names = [source.name for source in self.sources]
        return [[stage.bound, dict(zip(names, stage.periods, strict=True))] for stage in self.stages]

    def describe(self) -> dict[str, object]:
        """What the sequence depends on beside the stages, JSON-safe."""
        return {
            "by": self.by,
            "stop": self.stop,
            "epoch": None if self.epoch_size is None else dict([self.epoch_size]),
            "sources": {source.name: source.order.describe() for source in self.sources},
        }

    def _lap(self, number: int, begun: int) -> Lap:
        return Lap(self.sources, self.stages, self.by, self.stop, number=number, begun=begun)

    def _epoch(self, epoch: int) -> _Epoch:
        kept = self._epochs.get(epoch)
        if kept is None:
            kept = self._whole_lap(epoch) if self._run is None else self._stretch_of_run(self._run, epoch)
            self._epochs = dict([*self._epochs.items(), (epoch, kept)][-_EPOCHS_KEPT:])
        return kept

    def _whole_lap(self, epoch: int) -> _Epoch:
        # What came before matters to stages only.
        begun = self._begins(epoch)[self.by == "tokens"] if len(self.stages) > 1 else 0
        lap = self._lap(epoch, begun)
        return _Epoch(lap, lap.start, lap.end())

    def _stretch_of_run(self, run: Lap, epoch: int) -> _Epoch:
        assert self.epoch_size is not None
        unit, size = self.epoch_size
        start, stop = (run.place(run.filled_by(unit, number * size)) for number in (epoch, epoch + 1))
        return _Epoch(run, start, stop)

    def _begins(self, epoch: int) -> tuple[int, int]:
        """Samples and tokens of the epochs before one, each of which is a lap."""
        begun = list(self._begun)
        while len(begun) <= epoch:
            samples, tokens = begun[-1]
            end = self._lap(len(begun) - 1, tokens if self.by == "tokens" else samples).end()
            begun.append((samples + end.position, tokens + end.tokens))
        self._begun = begun
        return begun[epoch]


def _mixture_order(sources: Any, stages: Any, by: By, stop: Stop, epoch_size: tuple[By, int] | None) -> MixtureOrder:
    return MixtureOrder(sources, stages, by=by, stop=stop, epoch_size=epoch_size)


class _Epoch(NamedTuple):
    """An epoch: its lap, and from where to where of it."""

    lap: Lap
    start: Place
    stop: Place
