"""Replication: the peers of a data-parallel rank get the steps that one of them, the reader, builds.

    reader:   build -> deliver -> one message (see wire) -> broadcast
    receiver: plan -> receive -> views of the message -> the same batches

Plans are not sent: a receiver makes its own, and compares its hash with the reader's. A step is sent when it is
delivered, from the thread that iterates, so that nothing is under way between two steps: peers that stop at the same
step do not wait for each other.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from orchdata.building.figures import step_figures
from orchdata.building.memory import BufferPool
from orchdata.building.spec import BuildSpec
from orchdata.building.step import BuiltStep
from orchdata.engines.engine import PlainEngine
from orchdata.engines.processes.message import plain, revive
from orchdata.loaders.errors import DataError
from orchdata.order.steps import StepTask
from orchdata.planning.make_plan import make_plan
from orchdata.planning.plan import Plan
from orchdata.ranks.parallel import Rank, group_timeout
from orchdata.ranks.wire import Message, WireError, describe, read

_BUILT, _FAILED = 0, 1
_CONTENT = {"epoch", "step", "plan", "failures", "batches"}
# Of each job (a process may join several, one after another): groups by their ranks and timeout in seconds.
_made: WeakKeyDictionary[Any, dict[tuple[tuple[tuple[int, ...], ...], float], list[Any]]] = WeakKeyDictionary()


class Replication:
    """The channel between a reader and its peers: a separate gloo group, independent of the trainer's backend.

    All ranks of the job create theirs together; every peer then sends or receives the same steps in the same order.

    Args:
        timeout: seconds that peers wait for each other in a step; 0 for the timeout of the job's process group.

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
        self._pool = BufferPool()

    @property
    def is_reader(self) -> bool:
        return dist.get_rank() == self._reader

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
        status, content = self._receive(f"got no step {plan.step} of epoch {plan.epoch}")
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
        buffer = self._pool.empty((message.num_bytes,), np.uint8)
        message.write_to(buffer)
        consequence = f"could not send to ranks {self._peers[1:]}"
        self._broadcast(torch.tensor([status, message.num_bytes]), consequence)
        self._broadcast(torch.from_numpy(buffer), consequence)

    def _receive(self, consequence: str) -> tuple[int, Any]:
        header = torch.zeros(2, dtype=torch.int64)
        self._broadcast(header, consequence)
        status, num_bytes = header.tolist()
        buffer = self._pool.empty((num_bytes,), np.uint8)
        self._broadcast(torch.from_numpy(buffer), consequence)
        return status, read(buffer)

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


class ReceivingEngine(PlainEngine):
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
