"""What a run is asked for and what it gives; what a loader is given on one of its ranks, and what it must do there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.throughput.records import Fields, PeersJob, split
from orchdata.loaders.samples.sample import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """What one rank loads.

    Attributes:
        data: the samples, the size of the global batch, and the number of worker processes of a rank.
        rank, num_ranks: of this process.
        done: steps that were trained before the save which this run continues; 0 if it starts.
        states: what the loader of each rank gave for that save, by rank; none if it starts.
    """

    data: PeersJob
    rank: int
    num_ranks: int
    done: int
    states: Sequence[Any]

    @property
    def batch_size(self) -> int:
        """Samples of a step on this rank: the global batch stays the same on any number of ranks."""
        return self.data.batch_size // self.num_ranks

    @property
    def own_state(self) -> Any:
        """The state that the rank of this number saved; None, to start from the beginning, if none had it."""
        return self.states[self.rank] if self.rank < len(self.states) else None

    def decode_records(self, rows: Sequence[dict[str, bytes]]) -> list[Sample]:
        """A `collate_fn` for formats that have a sample as one record."""
        return self.decode_fields([split(row["record"]) for row in rows])

    def decode_fields(self, rows: Sequence[Fields]) -> list[Sample]:
        """Samples of fields, decoded."""
        return [self.data.decoder(fields) for fields in rows]


class RankLoader(Protocol):
    """A loader of one rank, at the start of its epoch or where its state was taken."""

    def steps(self) -> Iterator[Sequence[Sample]]:
        """This rank's samples of each step."""

    def state(self) -> Any:
        """What to save, after a step that was trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A run: which steps, from which save, to which one.

    Attributes:
        data: kind -> its samples.
        open: makes the loader of a rank.
        first, last: steps are numbered from 0; `last` is not trained.
        saved: the folder of the save to continue; None to start.
        save: the folder to save into after the last step; None for none.
        out: where the outcome of each kind is written.
    """

    data: Mapping[str, PeersJob]
    open: Callable[[RankJob], RankLoader]
    first: int
    last: int
    saved: Path | None
    save: Path | None
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run gave for one kind of data.

    Attributes:
        losses: of each step, over all ranks.
        keys: of the samples of each step, over all ranks, sorted.
        error: type and message of the first error; "" if there was none.
        ended: whether its processes ended or hung, in place of an error of the loader.
    """

    losses: tuple[float, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    error: str = ""
    ended: bool = False
