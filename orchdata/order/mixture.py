"""The order of a mixture: sources merged at their shares, found at any position without a buffer.

    position --search (order.merge)--> how many samples each source has given --their own orders--> rows

A lap is what goes through each source once, an epoch of "first" and "all"; of "repeat" it is the whole run, in which a
source begins its next pass by itself. Inside a lap sources go on over stages with what they are due (`due.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.order.merge import By, Lap, MixedSource, Place, Reached, Samples, Stage, Stop

Ints = NDArray[np.int64]

_EPOCHS_KEPT = 4


class Resumed(NamedTuple):
    """Where a run goes on: what its stages alone do not tell, or would tell only after a search through all of them.

    Attributes:
        epoch: the one that it goes on in.
        begun: samples and tokens of the epochs before; of "repeat" none.
        start: of "repeat", where the epoch begins.
        reached: where its last stretch begins; None in the first one of an epoch, or of a run.
        is_changed: whether stages do not tell what came before: other weights, or another rule.
    """

    epoch: int
    begun: tuple[int, int]
    start: Place
    reached: Reached | None
    is_changed: bool = False


class MixtureOrder:
    """The sequence of samples of every epoch of a mixture, and the tokens along it: `SampleOrder` and `Sums` in one.

    Rows are those of all sources behind one another, `source` is the number of the source. It pickles.

    Args:
        sources: sorted by name; none is empty.
        stages: ascending from 0; each with a source that gives something.
        by: what shares and the bounds of stages are measured in.
        stop: where an epoch ends: with the last sample of the first source that has no more, of all of them, or
            ("repeat") where it has `epoch_size` tokens or samples.
        epoch_size: with "repeat" only. An epoch of tokens ends with the sample that fills it.
        resumed: where a run goes on that had other weights or another rule before, or that went through many stages.
    """

    def __init__(
        self,
        sources: Sequence[MixedSource],
        stages: Sequence[Stage],
        *,
        by: By = "tokens",
        stop: Stop = "first",
        epoch_size: tuple[By, int] | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.stages = self._staged(stages)
        self.by: By = by
        self.stop: Stop = stop
        self.epoch_size = epoch_size
        self.resumed = resumed
        self._run = self._lap(0, 0) if stop == "repeat" else None
        self._begun = {0: (0, 0)} | ({} if resumed is None else {resumed.epoch: resumed.begun})
        self._epochs: dict[int, _Epoch] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _mixture_order, (self.sources, self.stages, self.by, self.stop, self.epoch_size, self.resumed)

    def restaged(self, stages: Sequence[Stage], resumed: Resumed | None = None) -> MixtureOrder:
        """The same mixture with other stages, from a place on where one is given."""
        return _mixture_order(self.sources, tuple(stages), self.by, self.stop, self.epoch_size, resumed)

    @staticmethod
    def _staged(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Weights that are set again are the same stage."""
        return joined_stages(stages)

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
        if not position:
            return 0
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
        """The samples at positions [start, stop) of an epoch: (source, row), each (stop - start,), new.

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

    def place(self, epoch: int, position: int) -> Place:
        """How many samples each source has given before a position of an epoch, and their tokens; since the epoch's
        start, of "repeat" since the run's.
        """
        found = self._epoch(epoch)
        return found.lap.place(found.start.position + position)

    def resumed_at(self, epoch: int, place: Place) -> Resumed:
        """What a loader needs to go on in an epoch from a place of it."""
        found = self._epoch(epoch)
        begun = (0, 0) if self._run is not None else self._begins(epoch)
        resumed = self.resumed
        if resumed is None or not resumed.is_changed:
            return Resumed(epoch, begun, found.start, found.lap.last_change(place))
        # No later place: steps of the epoch are cut from its start, or from where the weights changed in it.
        reached = resumed.reached if epoch == resumed.epoch else found.lap.last_change(found.start)
        return Resumed(epoch, begun, found.start, reached, is_changed=True)

    def due(self, epoch: int, place: Place) -> tuple[int, ...]:
        """What each source is due at a place, in units of 2**-DUE_BITS."""
        return self._epoch(epoch).lap.due(place)

    def periods(self, epoch: int, place: Place) -> tuple[int, ...]:
        """Of the last sample before a place; at a lap's begin of the first."""
        return self._epoch(epoch).lap.periods(place)

    def told_stages(self) -> list[list[Any]]:
        """The stages, JSON-safe: of each its bound, and name -> period."""
        names = [source.name for source in self.sources]
        return [[stage.bound, dict(zip(names, stage.periods, strict=True))] for stage in self.stages]

    def told_weights(self) -> Any:
        """What tells the stages from others, JSON-safe: one stage itself, of several a digest."""
        return self.told_stages() if len(self.stages) == 1 else _digest(self.stages)

    def describe(self) -> dict[str, object]:
        """What the sequence depends on beside the stages, JSON-safe."""
        return {
            "by": self.by,
            "stop": self.stop,
            "epoch": None if self.epoch_size is None else dict([self.epoch_size]),
            "sources": {source.name: source.order.describe() for source in self.sources},
        }

    def _lap(self, number: int, begun: int) -> Lap:
        resumed, reached = self.resumed, None
        if resumed is not None and (self.stop == "repeat" or number == resumed.epoch):
            reached = resumed.reached
        changed = resumed is not None and resumed.is_changed
        arguments = {"number": number, "begun": begun, "reached": reached, "is_changed": changed}
        return Lap(self.sources, self.stages, self.by, self.stop, **arguments)  # type: ignore[arg-type]

    def _epoch(self, epoch: int) -> _Epoch:
        if self.resumed is not None and self.resumed.is_changed and epoch < self.resumed.epoch:
            raise IndexError(
                f"epoch {epoch} is before the place where the weights of the mixture changed: ask a loader with the "
                "weights of then, and a state from before"
            )
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
        stop = run.place(run.filled_by(unit, (epoch + 1) * size))
        if self.resumed is not None and epoch == self.resumed.epoch:
            return _Epoch(run, self.resumed.start, stop)
        return _Epoch(run, run.place(run.filled_by(unit, epoch * size)), stop)

    def _begins(self, epoch: int) -> tuple[int, int]:
        """Samples and tokens of the epochs before one, each of which is a lap."""
        begun = self._begun
        known = max((number for number in begun if number <= epoch), default=0)
        for number in range(known, epoch):
            samples, tokens = begun[number]
            end = self._lap(number, tokens if self.by == "tokens" else samples).end()
            begun = begun | {number + 1: (samples + end.position, tokens + end.tokens)}
        self._begun = begun
        return begun[epoch]


def _digest(stages: Sequence[Stage]) -> dict[str, object]:
    """Of several stages, which may be thousands."""
    found = hashlib.blake2b(digest_size=16)
    for bound, periods in stages:
        found.update(np.array([bound, *periods], "<i8").tobytes())
    return {"stages": len(stages), "digest": found.hexdigest()}


def weights_of(told: Any) -> Any:
    """What `MixtureOrder.told_weights` says of stages that `told_stages` says, as states of before hold them."""
    try:
        names = sorted(told[0][1])
        stages = joined_stages([Stage(bound, tuple(periods[name] for name in names)) for bound, periods in told])
        if len(stages) > 1:
            return _digest(stages)
        return [[stages[0].bound, dict(zip(names, stages[0].periods, strict=True))]]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return told


def joined_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages without those that set the weights again that hold already."""
    found: list[Stage] = []
    for stage in stages:
        if not found or stage.periods != found[-1].periods:
            found.append(stage)
    return tuple(found)


def _mixture_order(
    sources: Any, stages: Any, by: By, stop: Stop, epoch_size: tuple[By, int] | None, resumed: Resumed | None
) -> MixtureOrder:
    return MixtureOrder(sources, stages, by=by, stop=stop, epoch_size=epoch_size, resumed=resumed)


class _Epoch(NamedTuple):
    """An epoch: its lap, and from where to where of it."""

    lap: Lap
    start: Place
    stop: Place
