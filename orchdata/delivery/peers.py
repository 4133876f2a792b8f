"""What ranks and peers tell each other of the steps that they deliver.

    every step:            the number of failed parts, and whether a rank gave up --all_reduce--> usually none
    if a part failed:      flags of all parts --gather--> those that arrive here --> labels masked
    if a sample failed:    a flag of each shared sample --all_reduce--> blank on every member --> counted once
    if anything failed:    where peers share parts, flags and failures of all peers --gather--> masked, counted

Of a broadcast the reader sends a step when it is delivered, from the thread that iterates, so that peers that stop at
the same step do not wait for each other. Plans are not sent: a receiver makes its own, and compares its hash.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE, counted_labels
from orchdata.building.step import BufferPool, BuildSpec, BuiltStep, step_figures
from orchdata.engines.engine import Engine
from orchdata.engines.processes.message import plain, revive
from orchdata.loaders.errors import DataError
from orchdata.order.steps import StepTask
from orchdata.planning.plan import Plan, make_plan
from orchdata.ranks.agreement import gather, small_device
from orchdata.ranks.parallel import Rank, group_timeout
from orchdata.ranks.wire import Message, WireError, describe, read


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
