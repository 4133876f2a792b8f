"""Delivery: a step under way -> microbatches for the caller.

    wait --> count failures --> mask what failed on other ranks (per phase, shared) --> send to peers (broadcast)

    every step:            the number of failed parts, and whether a rank gave up --all_reduce--> usually none
    if a part failed:      flags of all parts --gather--> those that arrive here --> labels masked
    if a sample failed:    a flag of each shared sample --all_reduce--> blank on every member --> counted once
    if anything failed:    where peers share parts, flags and failures of all peers --gather--> masked, counted

Of a broadcast the reader sends a step when it is delivered, from the thread that iterates, so that peers that stop at
the same step do not wait for each other. Plans are not sent: a receiver makes its own, and compares its hash.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from orchdata.batch.batch import Batch, ModelInputs
from orchdata.batch.tensors import IGNORE, TeamUse, counted_labels
from orchdata.building.step import BufferPool, BuildSpec, BuiltStep, step_figures
from orchdata.delivery.policy import FailureBudget
from orchdata.engines.engine import Engine
from orchdata.engines.processes.message import plain, revive
from orchdata.loaders.errors import BLANK, DataError, TooManyFailures
from orchdata.notices import warn_once, warn_user
from orchdata.order.steps import StepTask
from orchdata.planning.balance import Padded
from orchdata.planning.plan import Plan, make_plan
from orchdata.ranks.agreement import gather, small_device
from orchdata.ranks.parallel import Rank, group_timeout
from orchdata.ranks.wire import Message, WireError, describe, read

_MANY = 10
"""An epoch with this many failures that delivered nothing ends with an error."""
_MUCH_PADDING = 0.3
_LOOKS_EVERY = 50
"""Steps after which waste is looked for."""


class Delivery:
    """Delivers each step of a rank when it is requested, in the thread that iterates, and adds it to the statistics.

    Raises ValueError if peers would receive the batches of a collate_fn, and for ranks that share samples, skip those
    that fail, and cannot tell each other.
    """

    def __init__(
        self,
        spec: BuildSpec,
        rank: Rank,
        budget: FailureBudget,
        timeout: float,
        inputs: ModelInputs | None,
        unnamed: tuple[str, ...],
    ) -> None:
        self.spec = spec
        self._budget, self._stats = budget, budget.stats
        self._timeout = timeout
        self._inputs = inputs
        self._unnamed = unnamed
        self._replication = Replication(rank, spec, timeout) if rank.shared else None
        self._delivered = 0
        self._failed: list[DataError] = []
        self._failed_parts: FailedParts | None = None
        self.team_use = TeamUse()  # of the slices that it delivers
        # What fails on one rank may be in samples of others, by its parts or by teams; receivers of a broadcast get
        # masked batches.
        balance, is_known = spec.plan.balance, rank.size == 1 or bool(rank.dp_groups)
        skips = budget.policy.action == "skip"
        if balance.teams is not None and skips and not is_known:
            raise ValueError(
                "Balance(teams=...) with on_error='skip' lets the ranks of a team tell each other what failed, and "
                f"dp=({rank.rank}, {rank.size}) has no process group: pass the group or a mesh as dp, or use "
                "on_error='raise'"
            )
        together = balance.assignment == "per_phase" or balance.teams is not None
        if together and skips and not self.receives and is_known:
            groups = (*(rank.dp_groups if rank.size > 1 else ()), *rank.peer_groups)
            self._failed_parts = FailedParts(groups, rank.rank, rank.peer)
        # Whether ranks take part in the delivery of each other's steps.
        self.is_collective = self._replication is not None or self._failed_parts is not None

    @property
    def receives(self) -> bool:
        """Whether a peer reads for this rank."""
        return self._replication is not None and not self._replication.is_reader

    def receiving_engine(self) -> Engine | None:
        """Return the engine that receives this rank's steps, if a peer reads for it; else None."""
        return ReceivingEngine(self.spec, self._replication) if self._replication and self.receives else None

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
        batches, teams = self.named(built.batches), self.spec.plan.balance.teams
        if teams is None or teams.cut == "trainer":
            return batches
        # Teams of slices know whether their attention was used.
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
            if self._failed_parts is not None and make_plan(self.spec.plan, task).keeps_shapes:
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
            return future.result(), time.perf_counter() - started
        finally:
            del future  # as in `deliver`

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
        if not self.spec.rank and not self._stats.num_steps % _LOOKS_EVERY:
            self._warn_of_waste()

    def _warn_of_waste(self) -> None:
        """Warn once, by what was measured, of much padding, and of shards that are read over and over."""
        stats, shards = self._stats.as_dict(), self.spec.shards
        is_padded, reads = isinstance(self.spec.layout, Padded), stats["reads"]
        padding = stats["padding_if_padded"] if is_padded else 1 - (stats["fill"] or 1.0)
        if padding > _MUCH_PADDING:
            less = "od.Packed() has none. `orchdata profile` compares layouts"
            warn_once("padding", f"{padding:.0%} of the LLM positions so far are padding: {less}")
        if shards is not None and reads and reads["storage_bytes"] > 2 * reads["used_bytes"]:
            read, whole = reads["storage_bytes"], sum(shard.size for shard in shards.index.shards)
            less = 'small row groups, or balance="grouped" with shuffle=od.Shuffle(streams=<groups>), take less'
            if read > whole:
                warn_once("reads", f"this rank has read {read:,} bytes of shards that have {whole:,} in all: {less}")


class FailedParts:
    """Masks labels for failed parts, and of shared samples, among the data-parallel ranks and their peers, which the
    process groups reach together. All of them mask the same steps in the same sequence, from the thread that iterates.
    """

    def __init__(self, groups: Sequence[Any], rank: int = 0, peer: int = 0) -> None:
        self._groups, self._rank, self._peer = groups, rank, peer

    def mask_labels(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """Return a step's microbatches, without loss for samples that have failed parts.

        Raises RuntimeError if a rank gave up, with its error, or is lost.
        """
        if not self._report(step, _num_failed(batches)):
            return list(batches)
        return _masked(batches, list(gather([_flags(batch) for batch in batches], self._groups).values()))

    def count_once(self, built: BuiltStep, count: Callable[[BuiltStep], None]) -> BuiltStep:
        """Return a step that shares samples, or parts among peers, with what failed elsewhere masked, and with the
        failures that `count` counts here: each on one member, or those of a rank on each of its peers.

        Raises as `mask_labels`, and as `count`.
        """
        step = built.plan.step
        if not self._report(step, len(built.failures) + _num_failed(built.batches)):
            count(built)
            return built
        built = self._of_members(built) if built.plan.teams is not None else self._of_peers(built)
        try:
            count(built)
        except Exception as error:
            self.give_up(step, error)
            raise
        self._report(step, 0)
        return built

    def _of_peers(self, built: BuiltStep) -> BuiltStep:
        """Return a step with the failures of all peers of the rank, and the labels of failed parts masked."""
        own = [self._peer, self._rank, [_flags(batch) for batch in built.batches], [f.args for f in built.failures]]
        everywhere = sorted(gather(own, self._groups).values(), key=lambda each: (each[0], each[1]))
        # A text is read by all peers of its rank, and fails on all of them.
        failures = {failure.args: failure for failure in built.failures}
        for _, rank, _, of_peer in everywhere:
            for args in of_peer if rank == self._rank else ():
                failures.setdefault(tuple(args), DataError(*args))
        batches = _masked(built.batches, [flags for _, _, flags, _ in everywhere])
        return replace(built, batches=batches, failures=list(failures.values()))

    def _of_members(self, built: BuiltStep) -> BuiltStep:
        """Return a step with shared samples blank that failed on any member, and without the failures that a lower
        member counts.
        """
        plan, step, rank = built.plan, built.plan.step, self._rank

        # The lowest member on which each shared sample failed.
        places = [torch.from_numpy(plan.places(rank, batch.microbatch)) for batch in built.batches]
        failed_here = [
            (batch.sample_ids[number], int(at[number]))
            for batch, at in zip(built.batches, places, strict=True)
            for team in batch.teams
            for number in (team.samples.start + (~team.valid).nonzero()[:, 0]).tolist()
        ]
        lowest = torch.full((len(plan.row),), plan.num_ranks)
        lowest[[at for _, at in failed_here]] = rank
        shared = torch.from_numpy(plan.team_size > 1)
        lowest[shared] = self._reduce(step, lowest[shared], dist.ReduceOp.MIN)

        # All members have it blank, and that one counts it. Pieces of one sample have one name.
        elsewhere, failures = Counter(name for name, at in failed_here if lowest[at] < rank), []
        for failure in built.failures:
            elsewhere[name := (failure.shard, failure.key)] -= 1
            if elsewhere[name] < 0:
                failures.append(failure)
        numbers = [(lowest[at] < plan.num_ranks).nonzero()[:, 0].tolist() for at in places]
        batches = list(map(_blanked, built.batches, numbers))
        if plan.parts:
            batches = _masked(batches, list(gather([_flags(batch) for batch in batches], self._groups).values()))
        return replace(built, batches=batches, failures=failures)

    def give_up(self, step: int, error: Exception) -> None:
        """Let the other ranks raise too, so that they do not wait for this one."""
        with contextlib.suppress(RuntimeError):  # of lost ranks: this rank raises `error`
            self._reduce(step, torch.tensor([0, 1]))
            gather(f"{type(error).__name__}: {error}", self._groups)

    def _report(self, step: int, failed: int) -> int:
        """Return how much failed on all ranks. Raises RuntimeError, with its error, if a rank gave up."""
        failed, given_up = self._reduce(step, torch.tensor([failed, 0])).tolist()
        if given_up:
            errors = "; ".join(f"rank {rank}: {text}" for rank, text in gather("", self._groups).items() if text)
            raise RuntimeError(f"other ranks gave up at step {step}: {errors}")
        return failed

    def _reduce(self, step: int, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        try:
            for group in self._groups:
                values = values.to(small_device(group))
                dist.all_reduce(values, op, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} lost others at step {step}, when ranks report what failed: {error}"
            ) from error
        return values.cpu()


def _blanked(batch: Batch, failed: Collection[int]) -> Batch:
    """Return a microbatch with these shared samples blank, as those are that failed here."""
    llm, text, valid = batch.llm, batch.text, torch.ones(len(batch.sample_ids), dtype=torch.bool)
    labels, media = llm.any_labels, torch.zeros_like(llm.input_ids, dtype=torch.bool)
    for positions in llm.media_positions.values():
        media[positions] = True  # Their features arrive, and models look for as many tokens.
    for number in failed:
        rows = slice(*llm.cu_seqlens[number : number + 2].tolist())
        llm.input_ids[rows] *= media[rows]
        labels[rows], valid[number] = IGNORE, False
        text.input_ids[slice(*text.cu_seqlens[number : number + 2].tolist())] = 0
    fields = {
        name: [None if number in failed else value for number, value in enumerate(values)]
        for name, values in batch.fields.items()
    }
    teams = tuple(replace(team, valid=valid[team.samples]) for team in batch.teams)
    return replace(batch, fields=fields, teams=teams, loss_tokens=counted_labels(llm, teams))


Flags = dict[str, list[list[Any]]]


def _flags(batch: Batch) -> Flags:
    """Return modality -> which parts are valid, grouped by the rank that needs them, and how many go to each."""
    flags = {}
    for name, route in batch.routes.items():
        valid, order = _valid(batch, name), route.parts.send_order
        flags[name] = [(valid if order is None else valid[order]).tolist(), route.parts.send_rows.tolist()]
    return flags


def _num_failed(batches: Sequence[Batch]) -> int:
    return sum(int((~_valid(batch, name)).sum()) for batch in batches for name in batch.routes)


def _masked(batches: Sequence[Batch], by_rank: Sequence[Sequence[Flags]]) -> list[Batch]:
    """Return microbatches with the labels of failed parts masked; flags as `_arriving` takes them."""
    return [
        batch.masked({name: _arriving(name, number, route.rank, by_rank) for name, route in batch.routes.items()})
        for number, batch in enumerate(batches)
    ]


def _arriving(name: str, number: int, rank: int, by_rank: Sequence[Sequence[Flags]]) -> torch.Tensor:
    """Return which parts of `rank`'s samples in a microbatch are valid, in the order in which they arrive: bool
    (num_parts,). Where peers share parts, those of peer 0 of all ranks come first, then those of the next peer.
    """
    flags: list[bool] = []
    for sent in by_rank:
        valid, counts = sent[number][name]
        start = sum(counts[:rank])
        flags += valid[start : start + counts[rank]]
    return torch.tensor(flags, dtype=torch.bool)


def _valid(batch: Batch, name: str) -> torch.Tensor:
    valid = batch.media[name].valid
    assert valid is not None  # a batch with routes has flags
    return valid


_BUILT, _FAILED = 0, 1
_CONTENT = {"epoch", "step", "plan", "failures", "batches"}
# Of each job (a process may join several, one after another): groups by their ranks and timeout in seconds.
_made: WeakKeyDictionary[Any, dict[tuple[tuple[tuple[int, ...], ...], float], list[Any]]] = WeakKeyDictionary()


class Replication:
    """The channel between a reader and its peers: a gloo group of its own, independent of the trainer's backend. All
    ranks of the job create theirs together; every peer then sends or receives the same steps in the same order.

    Raises RuntimeError, with the rank, if another peer fails or is lost, and ValueError for steps of a user's
    collate_fn, which may contain any objects.
    """

    def __init__(self, rank: Rank, spec: BuildSpec, timeout: float) -> None:
        if spec.layout is None:
            raise ValueError(
                "replicate='broadcast' sends an od.Batch, but a map-style data set or a collate_fn may return other "
                "objects: have every peer read, od.DataParallel(mesh, replicate='read')"
            )
        self._group = _groups(rank.shared, timeout)[rank.rank]
        self._peers = rank.shared[rank.rank]
        self._reader = self._peers[0]
        self.is_reader = dist.get_rank() == self._reader
        self._pool = BufferPool()

    def send(self, built: BuiltStep) -> None:
        """Send a delivered step. Raises TypeError if a value in a batch cannot be described."""
        content = {
            "epoch": built.plan.epoch,
            "step": built.plan.step,
            "plan": built.plan.hash,
            "failures": [list(failure.args) for failure in built.failures],
            "batches": plain(built.batches, built.plan),
        }
        try:
            message = describe(content)
        except TypeError as error:
            self.send_error(error)
            raise TypeError(f"{error}: use od.DataParallel(mesh, replicate='read')") from error
        self._send(_BUILT, message)

    def send_error(self, error: Exception) -> None:
        """Let peers raise too, so that they do not wait for a step."""
        with contextlib.suppress(RuntimeError):  # of lost peers: this rank raises `error`
            self._send(_FAILED, describe(f"{type(error).__name__}: {error}"))

    def receive(self, plan: Plan) -> tuple[list[Any], list[DataError]]:
        """Return the reader's batches and failures of the step of `plan`. Raises RuntimeError with the reader's error,
        or if the reader is at another step or has another plan.
        """
        header, consequence = torch.zeros(2, dtype=torch.int64), f"got no step {plan.step} of epoch {plan.epoch}"
        self._broadcast(header, consequence)
        status, num_bytes = header.tolist()
        buffer = self._pool.take(num_bytes)
        self._broadcast(torch.from_numpy(buffer), consequence)
        content: Any = read(buffer)
        if status == _FAILED:
            raise RuntimeError(f"rank {self._reader} reads for this rank, {dist.get_rank()}, and failed: {content}")
        if not isinstance(content, dict) or content.keys() != _CONTENT:
            raise WireError(
                f"rank {self._reader} reads for this rank, {dist.get_rank()}, but sent no step: {content!r:.80}"
            )
        for name, own in (("epoch", plan.epoch), ("step", plan.step), ("plan", plan.hash)):
            if content[name] != own:
                raise RuntimeError(
                    f"{name} is {content[name]!r} on rank {self._reader}, which reads for rank {dist.get_rank()}, and "
                    f"{own!r} there: peers must iterate in step over equal loaders"
                )
        return revive(content["batches"], plan), [DataError(*args) for args in content["failures"]]

    def _send(self, status: int, message: Message) -> None:
        buffer = self._pool.take(message.num_bytes)
        message.write_to(buffer)
        consequence = f"could not send to ranks {self._peers[1:]}"
        self._broadcast(torch.tensor([status, message.num_bytes]), consequence)
        self._broadcast(torch.from_numpy(buffer), consequence)

    def _broadcast(self, tensor: Tensor, consequence: str) -> None:
        try:
            dist.broadcast(tensor, src=self._reader, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} {consequence} (rank {self._reader} reads for ranks {self._peers[1:]}): {error}"
            ) from error


def _groups(shared: tuple[tuple[int, ...], ...], timeout: float) -> list[Any]:
    """Return a gloo group for each of these, the same for all loaders of a job: a group has threads and connections."""
    world = dist.group.WORLD
    made = _made.setdefault(world, {})
    patience = timedelta(seconds=timeout) if timeout else group_timeout(world)
    key = shared, patience.total_seconds()
    if key not in made:
        # Creating a group is a collective of the job: every rank creates the groups of all, in the same order.
        made[key] = [dist.new_group(list(peers), backend="gloo", timeout=patience) for peers in shared]
    return made[key]


class ReceivingEngine(Engine):
    """Receives the steps that the reader delivers, in its order, in the calling thread."""

    def __init__(self, spec: BuildSpec, channel: Replication) -> None:
        self.depth = 0
        self._spec = spec
        self._channel = channel

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        try:
            started = time.perf_counter()
            plan = make_plan(self._spec.plan, task)
            seconds = {"planning": time.perf_counter() - started}
            batches, failures = self._channel.receive(plan)
            figures = step_figures(self._spec.plan, plan, self._spec.rank, len(failures))
            future.set_result(BuiltStep(plan, batches, failures, seconds, figures))
        except Exception as error:  # noqa: BLE001 - it is passed on
            future.set_exception(error)
        return future
