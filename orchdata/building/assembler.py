"""The interface between plans and assemblers, which make batches: a rank's share of a micro-step -> a microbatch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.building.memory import Memory
from orchdata.loaders.errors import DataError
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.planning.plan import Plan

Task = Callable[[], None]
_SHOWN_FRAMES: Final = 8


def kept(failure: DataError) -> DataError:
    """Return a failure, to be listed, without its stack frames and those of its causes: they refer to the bytes of the
    sample, which would stay in memory as long as it is listed. A note says where a cause was raised.
    """
    error: BaseException | None = failure
    while error is not None:
        if error is not failure and error.__traceback__ is not None and not hasattr(error, "__notes__"):
            error.add_note("raised at\n" + "".join(traceback.format_tb(error.__traceback__, -_SHOWN_FRAMES)))
        error.__traceback__ = error.__context__ = None
        error = error.__cause__
    return failure


@dataclass
class Assembled:
    """A microbatch (a Batch, or the result of the user's collate_fn), its failures in planned order, and busy seconds
    by stage ("reading", "decoding", "packing"), summed over threads.
    """

    batch: Any
    failures: list[DataError] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The samples of one rank in one microbatch of a step; `index` is its place among those that the rank delivers,
    which a pipeline's order changes. `peer` is that of the rank whose parts are encoded.
    """

    plan: Plan
    rank: int
    microbatch: int
    index: int
    peer: int = 0

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of its samples in the data set, (num_samples,): int64, or a sampler's own indices (object)."""
        return self.plan.row[self.plan.places(self.rank, self.microbatch)]


class Assembly(Protocol):
    """One microbatch under construction."""

    @property
    def num_bytes(self) -> int:
        """Memory that `fill` takes, computed from the index: nothing is read or allocated yet."""

    def wanted(self) -> Iterable[Any]:
        """Return what its tasks will read of shards, as `read_ahead` of its assembler takes it."""

    def fill(self, memory: Memory) -> Sequence[Task]:
        """Return the tasks that fill it, for any order and any threads. Called once. Raises MemoryError."""

    def finish(self) -> Assembled:
        """Return the microbatch; called once, after all tasks have run."""


class Assembler(Protocol):
    """Makes microbatches of some data set. Safe to use from several threads."""

    @property
    def reads(self) -> ReadBytes | None:
        """Bytes that it has read from shards so far; None if samples are not in shards."""

    def begin(self, share: Share) -> Assembly: ...

    def read_ahead(self, wanted: Iterable[Any]) -> object:
        """Begin to read from object storage what is wanted. Keep the result until it was read. Raises MemoryError."""

    def load_alone(self, row: int) -> None:
        """Load one sample, and drop it. Raises what loading raises."""
