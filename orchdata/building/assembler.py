"""The seam between a plan and what makes batches of it: a rank's share of a micro-step -> a microbatch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.building.memory import Memory
from orchdata.loaders.errors import DataError
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.planning.plan import Plan

Task = Callable[[], None]
_TOLD_FRAMES: Final = 8


class StatefulSource(Protocol):
    """An assembler whose data set has a state of its own, by torchdata's convention."""

    def state(self) -> dict[str, Any]:
        """The data set's state after the last step that was built."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, before the first step."""


def kept(failure: DataError) -> DataError:
    """A failure that is listed, as it was raised, but without the frames of itself and of what caused it.

    Frames hold the bytes of the sample, and those that hold the failure too: all of it would stay in memory until
    garbage is collected, and for as long as the failure is listed. A note tells where a cause was raised.
    """
    error: BaseException | None = failure
    while error is not None:
        if error is not failure and error.__traceback__ is not None and not hasattr(error, "__notes__"):
            error.add_note("raised at\n" + "".join(traceback.format_tb(error.__traceback__, -_TOLD_FRAMES)))
        error.__traceback__ = error.__context__ = None
        error = error.__cause__
    return failure


@dataclass
class Assembled:
    """A microbatch, and what happened on the way.

    Attributes:
        batch: the Batch, or what the user's collate_fn made.
        failures: samples that could not be decoded, in planned order.
        seconds: busy time by stage ("reading", "decoding", "packing"), summed over threads.
    """

    batch: Any
    failures: list[DataError] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank has of a step in one microbatch.

    Attributes:
        microbatch: its number in the plan.
        place: its number among those that the rank is handed, which a pipeline's order makes another.
    """

    plan: Plan
    rank: int
    microbatch: int
    place: int

    @property
    def rows(self) -> NDArray[np.int64]:
        """Its samples, rows of the data set, (num_samples,): int64, or what a sampler of other indices gave."""
        return self.plan.row[self.plan.places(self.rank, self.microbatch)]


class Assembly(Protocol):
    """One microbatch under construction."""

    @property
    def num_bytes(self) -> int:
        """Memory that `fill` takes, known from the index: nothing is read or allocated yet."""

    def fill(self, memory: Memory) -> Sequence[Task]:
        """What fills it: to be run in any order, on any threads. Called once. Raises MemoryError."""

    def finish(self) -> Assembled:
        """The microbatch; called once, after all tasks have run."""


class Assembler(Protocol):
    """Makes microbatches of some data set. Safe to use from several threads."""

    @property
    def reads(self) -> ReadBytes | None:
        """What it has read of shards so far; None where samples are not in shards."""

    def begin(self, share: Share) -> Assembly: ...

    def load_alone(self, row: int) -> None:
        """Load one sample, and drop it. Raises what loading it raises."""

    @property
    def stateful(self) -> StatefulSource | None:
        """Itself, if its data set has a state; else None."""
