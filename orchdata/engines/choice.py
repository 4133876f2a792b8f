"""What builds a loader's steps: worker processes, threads of this process, or the thread that iterates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchdata.building.spec import BuildSpec
from orchdata.building.step import Builder
from orchdata.engines.engine import Engine, EngineRun, InlineEngine, OpensEngine
from orchdata.engines.processes.engine import ProcessEngine, Workers
from orchdata.engines.threads import ThreadEngine

DEFAULT_THREADS = 4
DEFAULT_PREFETCH = 2
FAR_PREFETCH = 4
"""With threads that read object storage: two steps wait for answers while two are built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """What builds steps, and how many it builds ahead.

    Attributes:
        num_threads: threads of this process; 0 for none.
        depth: steps under way in these threads; None for the default.
        workers: worker processes; None for none.
        given: the user's `engine=`, and what it is opened with; None for none.
    """

    num_threads: int
    depth: int | None
    workers: Workers | None = None
    given: tuple[OpensEngine, EngineRun] | None = None

    @property
    def forks(self) -> bool:
        """Whether worker processes are forked from this one."""
        return self.workers is not None and self.workers.context.get_start_method() == "fork"

    @property
    def wants_kernels(self) -> bool:
        """Whether kernels are loaded before the first step: threads call them while `timeout` runs, and processes that
        are forked would each load them.
        """
        if self.workers is None:
            return self.given is None and self.num_threads > 0
        return self.forks

    def make(
        self,
        spec: BuildSpec,
        builder: Builder,
        *,
        base_seed: int,
        known_bad_rows: dict[int, str],
    ) -> Engine:
        """Return the engine that builds the steps of `spec`.

        Args:
            builder: of the spec, in this process.
            base_seed: of the random states of worker processes.
            known_bad_rows: row -> why it must not be loaded; worker processes add to it.
        """
        if self.given is not None:
            engine, run = self.given
            filled = replace(
                run,
                base_seed=base_seed,
                reads=builder.reads,
                name_of=spec.content.name_of,
                known_bad_rows=known_bad_rows,
            )
            return engine.open(spec, filled)
        if self.workers is not None:
            return ProcessEngine(
                spec,
                self.workers,
                base_seed=base_seed,
                reads=builder.reads,
                name_of=spec.content.name_of,
                known_bad_rows=known_bad_rows,
            )
        if not self.num_threads:
            return InlineEngine(builder)
        depth = self.depth or (FAR_PREFETCH if spec.reads_far else DEFAULT_PREFETCH)
        return ThreadEngine(builder, num_threads=self.num_threads, depth=depth)
