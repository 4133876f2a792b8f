"""Delivery: a step under way -> microbatches for the caller.

wait --> count failures --> mask samples that failed on other ranks (per phase, shared) --> send to peers (broadcast)
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

from orchdata.batch.batch import ModelInputs
from orchdata.batch.tensors import TeamUse
from orchdata.building.spec import BuildSpec
from orchdata.building.step import BuiltStep
from orchdata.delivery.failed_parts import FailedParts
from orchdata.delivery.policy import ErrorPolicy, FailureBudget
from orchdata.delivery.replicate import ReceivingEngine, Replication
from orchdata.delivery.stats import Stats
from orchdata.engines.engine import Engine
from orchdata.loaders.errors import BLANK, DataError, TooManyFailures
from orchdata.notices import warn_once, warn_user
from orchdata.order.steps import StepTask
from orchdata.planning.layout import Padded
from orchdata.planning.make_plan import make_plan
from orchdata.ranks.parallel import Rank

_MANY = 10
"""An epoch with this many failures that delivered nothing ends with an error."""
_MUCH_PADDING = 0.3


class Delivery:
    """Delivers each step of a rank when it is requested, in the thread that iterates.

    Args:
        spec: of the loader's steps.
        rank: if peers share its batches, one of them reads and the others receive.
        policy, budget: whether failures are skipped, and how many.
        stats: delivered steps are added to them.
        timeout: seconds to wait for a step; 0 for no limit.
        inputs, unnamed: as `Batch` has them.

    Attributes:
        team_use: of the slices that it delivers.

    Raises ValueError if peers would receive the batches of a collate_fn, and for ranks that share samples, skip those
    that fail, and cannot tell each other.
    """

    def __init__(
        self,
        spec: BuildSpec,
        rank: Rank,
        *,
        policy: ErrorPolicy,
        budget: FailureBudget,
        stats: Stats,
        timeout: float,
        inputs: ModelInputs | None = None,
        unnamed: tuple[str, ...] = (),
    ) -> None:
        self._spec = spec
        self._budget = budget
        self._stats = stats
        self._timeout = timeout
        self._inputs = inputs
        self._unnamed = unnamed
        self._replication = Replication(rank, spec, timeout) if rank.shared else None
        self._pace = _Pace()
        self._rank = rank.rank
        self._delivered = 0
        self._failed: list[DataError] = []
        self._failed_parts: FailedParts | None = None
        self.team_use = TeamUse()
        # What fails on one rank may be in samples of others, by its parts or by teams; receivers of a broadcast get
        # masked batches.
        balance, is_known = spec.plan.balance, rank.size == 1 or bool(rank.dp_groups)
        if balance.teams is not None and policy.action == "skip" and not is_known:
            raise ValueError(
                "Balance(teams=...) with on_error='skip' lets the ranks of a team tell each other what failed, and "
                f"dp=({rank.rank}, {rank.size}) has no process group: pass the group or a mesh as dp, or use "
                "on_error='raise'"
            )
        together = balance.assignment == "per_phase" or balance.teams is not None
        if together and policy.action == "skip" and not self.receives and is_known:
            groups = (*(rank.dp_groups if rank.size > 1 else ()), *rank.peer_groups)
            self._failed_parts = FailedParts(groups, rank.rank, rank.peer)

    @property
    def is_collective(self) -> bool:
        """Whether ranks take part in the delivery of each other's steps."""
        return self._replication is not None or self._failed_parts is not None

    @property
    def receives(self) -> bool:
        """Whether a peer reads for this rank."""
        return self._replication is not None and not self._replication.is_reader

    def follow(self, spec: BuildSpec) -> None:
        """From now on, deliver steps of another plan of the same data set."""
        self._spec = spec

    def receiving_engine(self) -> Engine | None:
        """Return the engine that receives this rank's steps, if a peer reads for it; else None."""
        if self._replication is None or self._replication.is_reader:
            return None
        return ReceivingEngine(self._spec, self._replication)

    def deliver(self, engine: Engine, future: Future[BuiltStep], task: StepTask) -> list[Any]:
        """Return a step's microbatches; if this rank reads for peers, they get them too, or the error.

        Raises what building it raised, RuntimeError after the timeout (this closes the engine), and as `FailureBudget`.
        """
        try:
            built = self._masked(engine, future, task)
        except Exception as error:
            if self._replication is not None and not self.receives:
                self._replication.send_error(error)
            raise
        finally:
            del future  # it has the error, whose traceback has this frame: a cycle would keep the caller's iteration
        if self._replication is not None and not self.receives:
            self._replication.send(built)
        return self._watched(self.named(built.batches))

    def _watched(self, batches: list[Any]) -> list[Any]:
        """Return the batches, whose teams of slices know whether their attention was used."""
        teams = self._spec.plan.balance.teams
        if teams is None or teams.cut == "trainer":
            return batches
        return [
            replace(batch, teams=tuple(replace(team, use=self.team_use) for team in batch.teams)) for batch in batches
        ]

    def named(self, batches: list[Any]) -> list[Any]:
        """Return the batches, with the model's names for their tensors, or what has none."""
        if self._inputs is None and not self._unnamed:
            return batches
        return [replace(batch, inputs=self._inputs, unnamed=self._unnamed) for batch in batches]

    def end_epoch(self, epoch: int) -> None:
        """Raise TooManyFailures if all samples of this rank in the epoch failed, and they are many."""
        delivered, failed = self._delivered, self._failed
        self._delivered, self._failed = 0, []
        if not delivered and len(failed) >= _MANY:
            raise TooManyFailures(
                f"epoch {epoch} delivered nothing to this rank: all of its {len(failed)} samples or more failed, the "
                f"first one: {failed[0]}"
            ) from failed[0]

    def _masked(self, engine: Engine, future: Future[BuiltStep], task: StepTask) -> BuiltStep:
        """Wait for a step and count it. Return it with all samples masked that failed on other ranks."""
        try:
            built, waited = self._received(engine, future, task)
            reports = self._failed_parts if built.plan.keeps_shapes else None
            counts_later = built.plan.teams is not None or built.plan.num_peers > 1
            if reports is None or not counts_later:
                self._count(built, waited, task)
        except Exception as error:
            if self._failed_parts is not None and make_plan(self._spec.plan, task).keeps_shapes:
                self._failed_parts.give_up(task.step, error)
            raise
        finally:
            del future  # as in `deliver`
        if reports is None:
            return built
        if counts_later:
            return reports.count_once(built, lambda agreed: self._count(agreed, waited, task))
        return replace(built, batches=reports.mask_labels(task.step, built.batches))

    def _received(self, engine: Engine, future: Future[BuiltStep], task: StepTask) -> tuple[BuiltStep, float]:
        """Wait for a step of any engine. Return it, and the seconds."""
        started = time.perf_counter()
        engine.expect(future)
        with contextlib.suppress(FutureTimeout):
            future.exception(None if engine.keeps_time else min(self._timeout, threading.TIMEOUT_MAX) or None)
        for note in engine.take_notes():
            warn_user(note)
        if not future.done():
            engine.close()  # before other ranks get the error: so this process, which hangs, ends first
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout} seconds, waiting for step {task.step} of epoch "
                f"{task.epoch}"
            )
        try:
            built = future.result()
        finally:
            del future  # as in `deliver`

        waited = time.perf_counter() - started
        if not engine.keeps_time and engine.depth:
            self._pace.add(started, waited)
        return built, waited

    def _count(self, built: BuiltStep, waited: float, task: StepTask) -> None:
        """Count a step and its failures. Raises as `FailureBudget`."""
        if not self.receives:  # else the reader counts them
            failures = [failure for failure in built.failures if failure.reason != BLANK]
            blank = len(built.failures) - len(failures)
            if built.plan.teams is not None and self._failed_parts is None:  # under "raise" no others are left
                later = [team for batch in built.batches for team in batch.teams if team.place]
                blank -= sum(int((~team.valid).sum()) for team in later)
            self._stats.num_blank += blank
            if failures:
                self._budget.count(failures, task.epoch)
            lost = len(built.failures) if built.plan.keeps_shapes else 0
            self._delivered += max(0, built.figures["samples"] - lost)
            self._failed += failures if len(self._failed) < _MANY else ()
        self._stats.add_step(built, waited)
        if not self._rank and not self._stats.num_steps % _Pace.STEPS:
            self._warn_of_waste()

    def _warn_of_waste(self) -> None:
        """Warn once, by what was measured, of much padding, and of shards that are read over and over."""
        stats, shards = self._stats.as_dict(), self._spec.shards
        is_padded, reads = isinstance(self._spec.layout, Padded), stats["reads"]
        padding = stats["padding_if_padded"] if is_padded else 1 - (stats["fill"] or 1.0)
        if padding > _MUCH_PADDING:
            less = "od.Packed() has none. `orchdata profile` compares layouts"
            warn_once("padding", f"{padding:.0%} of the LLM positions so far are padding: {less}")
        if shards is not None and reads and reads["storage_bytes"] > 2 * reads["used_bytes"]:
            read, whole = reads["storage_bytes"], sum(shard.size for shard in shards.index.shards)
            less = 'small row groups, or balance="grouped" with shuffle=od.Shuffle(streams=<groups>), take less'
            if read > whole:
                warn_once("reads", f"this rank has read {read:,} bytes of shards that have {whole:,} in all: {less}")


class _Pace:
    """Warns once that worker processes may be faster, if a loop that computes often waits for threads."""

    STEPS = 50
    _SHARES = (0.2, 0.9)  # of a loop's time; a loop that waits all the time computes nothing

    def __init__(self) -> None:
        self._begun: float | None = None
        self._waited = 0.0
        self._steps = 0

    def add(self, asked: float, waited: float) -> None:
        """Add a step: the time of its request, and the seconds waited for it."""
        if self._begun is None:
            self._begun = asked + waited  # the first step cannot be built in parallel to another
            return
        self._steps += 1
        self._waited += waited
        share = self._waited / max(asked + waited - self._begun, 1e-9)
        if self._steps == self.STEPS and self._SHARES[0] < share < self._SHARES[1]:
            warn_once(
                "threads are waited for",
                f"this loop spent {share:.0%} of its time waiting for batches that threads of its process build: they "
                "share the interpreter with it. num_workers=1 builds them in a process, more threads help if cores are "
                "free",
            )
