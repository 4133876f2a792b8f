"""What a loader asks of an engine: how many workers build its steps, and with which options. All of it are values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchdata.building.spec import BuildSpec
from orchdata.engines.engine import Engine
from orchdata.loaders.storage.counted import ReadBytes


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options that all workers of a loader share.

    Attributes:
        num_threads: threads of a worker that read and decode; 0 for its main thread alone.
        max_jobs: the most jobs that a worker has at a time.
        worker_init_fn: called with the worker's number before it builds anything.
        dataset: as in `torch.utils.data.get_worker_info()`.
        as_torch: whether random states and errors are those of torch's workers, and a worker that cannot start fails
            only its own steps.
        memory: bytes that a worker may allocate in addition to those it starts with; None for no limit.
    """

    num_workers: int
    num_threads: int
    max_jobs: int
    worker_init_fn: Callable[[int], None] | None
    dataset: Any
    as_torch: bool
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """One opening of an engine: what it needs in addition to the spec of the steps.

    Attributes:
        options: of the workers, of this rank alone.
        num_ranks: ranks of the loader.
        timeout: seconds that the caller waits for a step before its worker is replaced; 0 for no limit.
        in_turn: whether worker `step % num_workers` builds a step; else any worker does.
        base_seed: torch's seed of the iteration; the seed of worker k is `base_seed + k`.
        reads: counts the bytes that workers read from shards; None if samples are not in shards.
        name_of: row -> the sample's name in messages.
        known_bad_rows: row -> why its sample must not be loaded; rows that prove bad are added.
        states: for each worker, the state that its data set starts with; None for its own.
    """

    options: WorkerOptions
    num_ranks: int = 1
    timeout: float = 0
    in_turn: bool = False
    base_seed: int = 0
    reads: ReadBytes | None = None
    name_of: Callable[[int], str] = str
    known_bad_rows: dict[int, str] = field(default_factory=dict)
    states: Sequence[dict[str, Any] | None] = ()


class OpensEngine(Protocol):
    """What `DataLoader(engine=...)` takes: a value that pickles."""

    def open(self, spec: BuildSpec, run: EngineRun) -> Engine:
        """Return the engine that builds the steps of a spec, for one iteration or, with persistent workers, for more.

        What it raises ends the iteration.
        """
