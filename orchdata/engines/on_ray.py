"""RayEngine: builds steps in actors of a Ray cluster, the one that this process is in already, one at an address, or a
local one. Ray is imported when an engine is opened, and not before.

    trainer: Actors --parcel, then a call a step--> StepActor, in a process of Ray's: opens the spec, builds steps
    unit --> [message, header, *buffers] --Ray--> read-only buffers --unpack--> unit in writable memory of the trainer

Ray calls back when an answer is here. What goes wrong in an actor is returned as a message, and never raised: what Ray
raises is about processes and nodes.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.building.step import BufferPool, BuildSpec, BuiltStep
from orchdata.engines.engine import Engine, Workers, passed_on
from orchdata.engines.parcel import check_same, expected_by, make_parcel, open_parcel
from orchdata.engines.processes.message import Bytes, Unit, describe_step, describe_value
from orchdata.engines.processes.worker import Work, WorkerSpec, alone_of, error_of, sendable
from orchdata.engines.supervisor import WorkerEngine
from orchdata.loaders.errors import PackageError, one_line
from orchdata.loaders.watch import IDLE, Watch, all_wait
from orchdata.notices import warn_once, warn_user
from orchdata.order.steps import StepTask
from orchdata.planning.plan import make_plan

OPENING_SECONDS: Final = 600.0
_ASK_SECONDS: Final = 1.0
"""How often an actor is asked whether it waits."""
_ANSWER_SECONDS: Final = 10.0
"""An actor that does not answer for so long hangs."""
_ASKED: Final = "asked"
"""Group of calls that an actor answers while it builds."""
_SMALL_BYTES: Final = 64 << 10
_ALIGNMENT: Final = 64
_WARN_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 10.0
"""In which a node takes an actor that it has room for, and those of an engine that has just closed give theirs back."""

_ADDRESS: Final = "RAY_ADDRESS"
_CLIENT: Final = "ray://"
_JOIN: Final = "`ray start --address=HOST:PORT --num-cpus=0`"
_START: Final = "`ray start --head`"
_NO_CLUSTER: Final = "Could not find any running Ray instance"
_CONNECT_SECONDS: Final = 10.0
_CODE: Final = ("working_dir", "py_modules")
START_SECONDS: Final = 600
# Options of actors that the engine sets itself: it restarts them, and num_threads= says how much they do at a time.
_OURS: Final = (
    *("max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups"),
    *("lifetime", "name", "get_if_exists", "num_returns"),
)


@dataclass(frozen=True, init=False)
class RayEngine:
    """Builds steps in actors of a Ray cluster: `DataLoader(..., num_workers=8, engine=od.RayEngine())`.

    Each rank that reads has `num_workers` actors, each with `num_threads` threads. Batches are those of the other
    engines, to the bit. An actor that is lost is replaced, and its steps are built again. Machines that train must be
    part of the cluster: docs/workers.md.

    Args:
        address: of the cluster, as for `ray.init`. Default: the Ray that this process uses already, else RAY_ADDRESS,
            else the cluster of this machine. A loader with one rank starts a local Ray if there is none.
        start_timeout: seconds that actors may wait for free CPUs. A warning says at once what is missing.
        ray_options: options of each actor, with their names of `ray.remote`: `num_cpus` (default: `num_threads`),
            `resources`, `memory`, `runtime_env`, `scheduling_strategy` and others.

    Raises:
        ValueError: the address is that of a Ray Client (ray://), an option is one that the engine sets, or
            start_timeout is not above 0.
    """

    address: str | None
    start_timeout: float
    ray_options: Mapping[str, Any] = field(hash=False)

    def __init__(self, address: str | None = None, *, start_timeout: float = START_SECONDS, **ray_options: Any) -> None:
        check_address(address)
        if isinstance(start_timeout, bool) or not start_timeout > 0:
            raise ValueError(f"start_timeout is a number of seconds above 0, got {start_timeout!r}")
        for name in ray_options:
            if name in _OURS:
                raise ValueError(f"RayEngine sets {name} itself: leave it out")
        for name, value in (("address", address), ("start_timeout", start_timeout), ("ray_options", ray_options)):
            object.__setattr__(self, name, value)

    def open(self, spec: BuildSpec, workers: Workers) -> WorkerEngine:
        """Connect to the cluster, and start the actors of a rank.

        Raises PackageError; TypeError for a spec that cannot be pickled; ValueError for an option that Ray does not
        know, or `worker_memory`; RuntimeError if there is no cluster, or it has another version of Ray or Python.
        """
        import_ray()
        if workers.worker_memory is not None:
            raise ValueError(
                "worker_memory limits processes of this machine: leave it out. RayEngine(memory=...) reserves memory "
                "of a node, and Ray's memory monitor ends what takes too much"
            )
        options, code = split_code(self.ray_options)
        connect(self.address, num_ranks=workers.num_ranks, code=code)
        first = WorkerSpec(spec=spec, workers=workers.sent)
        return WorkerEngine(Actors(first, options, float(self.start_timeout), workers), workers)


def import_ray() -> Any:
    """Import Ray. Raises PackageError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise PackageError("ray", one_line(error), "pip install 'orchdata[ray]'", "od.RayEngine") from error
    return ray


def check_address(address: str | None, named: str = "address") -> None:
    """Raise ValueError for the address of a Ray Client, and TypeError for what is no address."""
    if address is None:
        return
    if not isinstance(address, str):
        raise TypeError(f"{named} is a string, such as '10.0.0.1:6379', or None, got {address!r}")
    if address.startswith(_CLIENT):
        raise ValueError(_no_client(f"{named}={address!r}"))


def _no_client(what: str) -> str:
    return (
        f"{what} is that of a Ray Client, through which every batch would travel twice: let this machine join the "
        f"cluster with {_JOIN}, and leave the address out"
    )


def connect(address: str | None, *, num_ranks: int, code: Mapping[str, Any] | None = None) -> None:
    """Have this process use a cluster; a Ray that is initialized is used as it is.

    `address`: None for RAY_ADDRESS, else the cluster of this machine, else a local Ray that is started (not for several
    ranks: each would start one). `code`: folders that the nodes get, as a `runtime_env` has them. Raises ValueError for
    an address or folders that do not fit; RuntimeError if there is no cluster, or it refuses this process.
    """
    ray = import_ray()
    if ray.is_initialized():
        from ray.util.client import ray as client

        if client.is_connected():
            raise ValueError(_no_client("the address of the Ray that this process uses"))
        # The address is that of this Ray, and it has the folders.
        running = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local", running):
            host, _, port = address.rpartition(":")
            with contextlib.suppress(OSError):  # of an address that is no name of a host
                host = socket.gethostbyname(host)
            host = ray.util.get_node_ip_address() if host.startswith("127.") else host
            if f"{host}:{port}" != running:
                raise ValueError(
                    f"address={address!r}: this process uses the Ray at {running} already. Leave the address out, or "
                    "call ray.shutdown() first"
                )
        sent = ray.get_runtime_context().runtime_env
        if missing := [name for name in code or {} if not sent.get(name)]:
            raise ValueError(
                f"Ray is initialized already, without runtime_env={{{missing[0]!r}: ...}}, and sends folders only "
                "then: give it to ray.init(), or leave ray.init() to RayEngine"
            )
        return
    if address is None:
        address = os.environ.get(_ADDRESS) or None
        check_address(address, _ADDRESS)
    host, _, port = (address or "").rpartition(":")
    try:
        if host and port.isdigit():  # for an address at which nothing listens, Ray would wait for minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address or "auto", runtime_env=dict(code or {}))
    except Exception as error:
        if address is None and _NO_CLUSTER in str(error):
            if num_ranks > 1:
                raise RuntimeError(
                    f"there is no Ray cluster on this machine, and each of the {num_ranks} ranks would start one of "
                    f"its own: run {_START} on one machine and {_JOIN} on the others, or set {_ADDRESS}"
                ) from error
            warn_once(
                "a local Ray",
                "there is no Ray cluster on this machine: this process starts a Ray of its own, which has the CPUs of "
                f"this machine and ends with it. Run {_START} to keep one",
            )
            ray.init(address="local", include_dashboard=False, runtime_env=dict(code or {}))
            return
        raise RuntimeError(
            f"Ray cannot connect to {address or 'the cluster of this machine'}: {one_line(error)}. Start a cluster "
            f"with {_START}, let this machine join it with {_JOIN}, and use one version of Ray and Python on all "
            "machines. If it asks for a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN must be those of `ray start`"
        ) from error


def num_cpus() -> int:
    """Return the number of CPUs of the cluster that this process uses, at least 1."""
    return max(1, int(import_ray().cluster_resources().get("CPU", 1)))


def split_code(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of actors without local folders of code, and these folders: Ray uploads them for a whole job,
    when a process connects, and not for an actor.
    """
    env = options.get("runtime_env")
    if not isinstance(env, Mapping):
        return dict(options), {}

    def is_uploaded(folders: Any) -> bool:
        return all("://" in str(each) for each in (folders if isinstance(folders, list | tuple) else [folders]))

    code = {name: env[name] for name in _CODE if name in env and not is_uploaded(env[name])}
    rest = {name: value for name, value in env.items() if name not in code}
    return dict(options) | {"runtime_env": rest}, code


Reply = list[Any]


class Actors:
    """Actors of one rank, as the supervisor's `Transport`, with options of Ray's names; they may wait for room in the
    cluster for `start_timeout` seconds.
    """

    num_spare = 0
    forked = not_started = ""

    def __init__(self, first: WorkerSpec, options: dict[str, Any], start_timeout: float, workers: Workers) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # A placement group that captures children, as that of a Ray Tune trial, has no room for them.
        outside: Any = PlacementGroupSchedulingStrategy(placement_group=None)  # type: ignore[arg-type]
        self.options = {"num_cpus": first.num_loading_threads, "scheduling_strategy": outside} | options
        self.spec: Any = first.spec
        self.actors: list[Actor] = []
        self.start_timeout = start_timeout
        self._chooses_node = "scheduling_strategy" not in options
        self._workers = workers
        self._calls: queue.SimpleQueue[tuple[Actor, Any, Future[Any]] | None] = queue.SimpleQueue()
        self._memory = BufferPool()
        parcel = make_parcel(first, expected_by(first.spec))
        self._parcel = parcel if len(parcel) <= _SMALL_BYTES else ray.put(parcel)  # large ones are sent once to a node
        self._avoid = ""  # the node where an actor was lost that loaded a sample alone
        self._last_loss = ""
        self._begun: float | None = None  # since when actors are missing
        self._look_at = 0.0  # when it is looked at again
        self._were_ready = False

    def start(self, number: int, *, alone: bool = False, fresh: bool = False) -> Actor:
        import ray

        options = self.options | {"max_restarts": 0, "max_task_retries": 0}
        if alone and self._avoid and self._chooses_node:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            nodes = (each["NodeID"] for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU"))
            if (other := next((str(node) for node in nodes if node != self._avoid), None)) is not None:
                there = NodeAffinitySchedulingStrategy(other, soft=True, _spill_on_unavailable=True)
                options["scheduling_strategy"] = there
        if not alone:
            options["max_concurrency"] = self._workers.prefetch_factor if self._workers.num_threads else 1
            if self._begun is None:
                self._begun = time.monotonic()
                total, count = ray.cluster_resources(), self._workers.num_workers
                fits = all(amount * count <= total.get(name, 0) for name, amount in self._needs().items())
                self._look_at = self._begun + (min(_SETTLE_SECONDS, self.start_timeout) if fits else 0.0)

        # With a group of its own for questions, an actor does not run the others in its main thread.
        remote: Any = ray.remote  # its types do not know all options
        try:
            made = remote(concurrency_groups={_ASKED: 1})(StepActor).options(**options)
            handle = made.remote(number, self._parcel, alone=alone)
        except (ValueError, TypeError) as error:
            raise ValueError(f"RayEngine({', '.join(self.options)}): {one_line(error)}") from error
        self.actors.append(actor := Actor(self, number, handle, is_alone=alone))
        self.call(actor, "start", handle.start.remote())
        return actor

    def call(self, actor: Actor, what: Any, reference: Any) -> None:
        """Have `wait` read the answer to a call."""
        reference.future().add_done_callback(lambda done: self._calls.put((actor, what, done)))

    def wait(self, seconds: float | None) -> Iterator[tuple[Actor, dict[str, Any]]]:
        limits = [] if seconds is None else [seconds]
        if self._begun is not None:
            limits.append(max(0.0, self._look_at - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            answer = self._calls.get(timeout=min(limits, default=None))
            while True:
                if answer is not None and (message := self._read(*answer)) is not None:
                    yield answer[0], message
                answer = self._calls.get_nowait()
        self._look_at_room()

    def _read(self, actor: Actor, what: Any, done: Future[Any]) -> dict[str, Any] | None:
        """Return the answer to a call as a message to the supervisor, if it is one."""
        if actor not in self.actors:
            return None  # it was ended meanwhile
        error = done.exception()
        if what == "waits":  # an actor that is lost answers nothing, and its calls say so
            actor.hear(error is not None or bool(done.result()))
            return None
        if error is None:
            return self._message(actor, what, done.result())
        if is_loss(error) or actor.is_alone:
            loss = "ended" if actor.is_ready and is_own_end(error) else "killed"
            self._last_loss = how = f"was lost ({described(error)})"
            self.end(actor)
            return {"kind": "ended", "how": how, "loss": loss, "final": ""}
        if what == "start":
            raise RuntimeError(f"Ray actors of this loader do not start: {cause_of(error)}") from error
        failed = partial(_not_returned, actor, error)
        return {"kind": "failed", "job": what, "error": failed, "reads": [], "requests": {}}

    def _message(self, actor: Actor, what: Any, reply: Reply) -> dict[str, Any]:
        message, unit = unpack(reply, self._memory.take)
        message |= {"job": what, "unit": unit}
        match message["kind"]:
            case "ready":
                actor.is_ready, actor.node, actor.address = True, message["node"], message["address"]
                if all(each.is_ready for each in self.actors):
                    self._begun, self._were_ready = None, True
            case "survived":
                actor.row, self._avoid = None, ""
            case "built":  # clocks of nodes may differ
                message["finished"] = time.monotonic() - max(0.0, time.time() - message["finished"])
            case _:
                message["error"] = partial(error_of, unit)
        return dict(message)

    def wake(self) -> None:
        self._calls.put(None)

    def end(self, worker: Actor) -> None:
        if worker in self.actors:
            self.actors.remove(worker)
            self._avoid = self._avoid if worker.row is None else worker.node
            self._kill(worker)

    def close(self) -> None:
        while self.actors:
            self._kill(self.actors.pop())

    def _kill(self, actor: Actor) -> None:
        import ray

        if ray.is_initialized():
            ray.kill(actor.handle, no_restart=True)

    # --- room in the cluster

    def _look_at_room(self) -> None:
        """Warn of actors that have not started, at once and each minute. Raises RuntimeError after `start_timeout`."""
        now = time.monotonic()
        if self._begun is None or now < self._look_at:
            return
        last = self._begun + self.start_timeout
        self._look_at = last if now < last < now + _WARN_SECONDS else now + _WARN_SECONDS
        missing = [each for each in self.actors if not each.is_ready and not each.is_alone]
        if not missing:
            return  # a trial takes the place of the one that was lost
        without_room = sum(_waits_for_room(each.handle) for each in missing)
        text = (
            f"{without_room or len(missing)} of {self._workers.num_workers} Ray actors of this loader have not started"
        )
        text += f" (the last that was lost {self._last_loss})" if self._last_loss else ""
        text += f": {self._missing()}" if without_room else ", and have a place on a node: is it slow to import?"
        goes_on = self._were_ready and len(missing) < len(self.actors) and not self._workers.in_turn
        if now >= last and not goes_on:
            raise RuntimeError(f"{text}. Nothing changed for {self.start_timeout:g} seconds (start_timeout=)")
        if without_room or now - self._begun >= _WARN_SECONDS:
            left = f"It waits for up to {last - now:.0f} seconds more (start_timeout=)"
            warn_user(f"{text}. {'The others go on' if goes_on else left}")

    def _needs(self) -> dict[str, float]:
        needs = {"CPU": self.options.get("num_cpus") or 0, "GPU": self.options.get("num_gpus") or 0}
        return {name: each for name, each in (needs | (self.options.get("resources") or {})).items() if each}

    def _missing(self) -> str:
        """Return the sum of what the actors need, and what the cluster has, as text."""
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        num_ranks, count = self._workers.num_ranks, self._workers.num_workers
        parts = []
        for name, amount in self._needs().items():
            what = "threads" if name == "CPU" and amount == max(1, self._workers.num_threads) else name
            parts.append(
                f"{f'{num_ranks} ranks x ' if num_ranks > 1 else ''}{count} actors x {amount:g} {what} = "
                f"{amount * count * num_ranks:g} {'CPUs' if name == 'CPU' else name}, the cluster has "
                f"{total.get(name, 0):g}, {free.get(name, 0):g} of them free"
            )
        ways = "Add nodes, or lower num_workers=, num_threads= or RayEngine(num_cpus=)"
        return f"{'; '.join(parts) or 'no node can start them'}. {ways}"


class Actor:
    """An actor, as the supervisor's `Worker`."""

    def __init__(self, transport: Actors, number: int, handle: Any, *, is_alone: bool) -> None:
        self.number = number
        self.handle = handle
        self.is_alone = is_alone
        self.jobs: dict[int, StepTask] = {}
        self.is_ready = False
        self.started = time.monotonic()
        self.start_seconds = transport.start_timeout if is_alone else math.inf  # the others wait for room
        self.row: int | None = None  # that it loads alone
        self.node = ""  # where it was ready
        self.address = "a node that is not known"
        self.label = f"DataLoader worker {number}"
        self._transport = transport
        self._asked: float | None = None
        self._heard = 0.0
        self._waits = True

    @property
    def name(self) -> str:
        return f"Ray actor {self.number} on {self.address}"

    @property
    def rows(self) -> list[int]:
        """The row that it loads alone, or those of its steps: an actor that is lost does not say which of them."""
        if self.is_alone:
            return [] if self.row is None else [self.row]
        rows: set[int] = set()
        with contextlib.suppress(Exception):  # a step that cannot be planned has none
            rows.update(*(_rows_of(self._transport.spec, task) for task in self.jobs.values()))
        return sorted(rows)

    def waits(self) -> bool | None:
        """Ask once a second."""
        now = time.monotonic()
        if self._asked is None and now - self._heard >= _ASK_SECONDS:
            self._asked = now
            self._transport.call(self, "waits", self.handle.waits.options(concurrency_group=_ASKED).remote())
        if self._asked is not None:
            return None if now - self._asked < _ANSWER_SECONDS else False
        return self._waits

    def hear(self, waits: bool) -> None:
        """Note an answer."""
        self._asked, self._heard, self._waits = None, time.monotonic(), waits

    def build(self, job: int, task: StepTask, known_bad_rows: Mapping[int, str]) -> None:
        self.jobs[job] = task
        self._transport.call(self, job, self.handle.build.remote(task, dict(known_bad_rows)))

    def load_alone(self, row: int) -> None:
        self.row = row
        self._transport.call(self, "alone", self.handle.load_alone.remote(row))


def _rows_of(spec: BuildSpec, task: StepTask) -> set[int]:
    """Return the rows that a rank loads for a step: of its samples, and of parts that it encodes for others."""
    plan, rank = make_plan(spec.plan, task), spec.rank
    rows = set(plan.row[plan.places(rank)].tolist())
    for phase, parts in plan.parts.items():
        for microbatch in range(plan.num_microbatches):
            rows.update(plan.row[parts.sample[plan.encoded(phase, rank, microbatch, spec.peer)]].tolist())
    return rows


def _waits_for_room(handle: Any) -> bool:
    """Return whether no node has taken an actor yet."""
    from ray._private.state import actors

    known = actors(handle._actor_id.hex())
    return known.get("State") != "ALIVE" and not known.get("Address", {}).get("IPAddress")


def unpack(reply: Reply, take: Callable[[int], Bytes]) -> tuple[dict[str, Any], Any]:
    """Return the message and the unit of a reply: [message, header and buffers of the unit, if it has one].

    Ray's arrays are read-only, and one reader's are another's: buffers are copied, once, into memory from `take`
    (number of bytes -> writable uint8), which is used again when the batches over it are gone.
    """
    message, *unit = reply
    if not unit:
        return message, None
    header, *buffers = unit
    starts = np.cumsum([0, *(-(-len(buffer) // _ALIGNMENT) * _ALIGNMENT for buffer in buffers)]).tolist()
    memory = take(starts[-1])
    copies = [memory[start : start + len(buffer)] for start, buffer in zip(starts, buffers, strict=False)]
    for copy, buffer in zip(copies, buffers, strict=True):
        copy[:] = buffer
    return message, Unit(header, copies)


_OWN_END: Final = "its worker process has died"
_DETAIL: Final = re.compile(r"Worker exit detail: (.*?)(?:\n|$)")
_NODE_ADDRESS: Final = re.compile(r"\bip: (\S+)")
_MOST_CHARACTERS: Final = 300


def is_loss(error: BaseException) -> bool:
    """Return whether a call did not return because its process, its node or its result was lost."""
    from ray import exceptions

    return isinstance(
        error,
        exceptions.RayActorError
        | exceptions.OutOfMemoryError
        | exceptions.NodeDiedError
        | exceptions.WorkerCrashedError
        | exceptions.ObjectLostError
        | exceptions.LocalRayletDiedError,
    ) and not getattr(error, "actor_init_failed", False)


def is_own_end(error: BaseException) -> bool:
    """Return whether the process of an actor ended by what it was doing.

    False for an end by Ray's memory monitor, with its node, by preemption and by `ray.kill`.
    """
    from ray import exceptions

    return isinstance(error, exceptions.ActorDiedError) and not error.preempted and _OWN_END in str(error)


def described(error: BaseException) -> str:
    """Return why a call did not return, on one line."""
    text = str(error)
    detail = _DETAIL.search(text)
    said = (detail.group(1) if detail else " ".join(text.split())).partition(" Some common causes")[0]
    address = _NODE_ADDRESS.search(text)
    where = f" on node {address.group(1)}" if address and address.group(1) not in said else ""
    return f"{said[:_MOST_CHARACTERS].rstrip('. ')}{where}"


def cause_of(error: Any) -> Exception:
    """Return the error of our own code that Ray wrapped, or Ray's."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def _not_returned(actor: Actor, error: BaseException) -> Exception:
    """Return the error of a step that Ray could not send back, or of our own code."""
    from ray.exceptions import RayError

    cause = cause_of(error)
    if not isinstance(cause, RayError):
        return cause
    return RuntimeError(f"a step did not come back from {actor.name}: {described(cause)}. Look at `ray logs` there")


class StepActor:
    """Builds whole steps, as many at a time as Ray calls it, of the spec in a parcel; or loads samples `alone`."""

    def __init__(self, number: int, parcel: bytes, *, alone: bool) -> None:
        self._number = number
        self._parcel = parcel
        self._alone = alone
        self._opens_since: float | None = None
        self._watch = Watch()
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._work: Work | None = None
        self._engine: Engine | None = None

    def start(self) -> Reply:
        """Open the spec. Returns "ready" with the id and address of the node, or "not started" with the error."""
        self._opens_since = time.monotonic()
        try:
            worker, expected = open_parcel(self._parcel)
            check_same(worker.spec, expected, _here()["address"])
            worker = replace(alone_of(worker) if self._alone else worker, number=self._number)
            threads = worker.num_loading_threads
            self._rows = np.full(threads, IDLE, np.int64)
            self._watch = Watch(self._rows)
            self._work = Work(worker, max(1, len(os.sched_getaffinity(0)) // threads))
            self._engine = self._work.open(self._watch)
        except BaseException as error:  # noqa: BLE001 - it is passed on
            return [{"kind": "not started"}, *self._described(error)]
        finally:
            self._opens_since = None
        return [{"kind": "ready"} | _here()]

    def build(self, task: StepTask, known_bad_rows: dict[int, str]) -> Reply:
        """Build a step. Returns "built" with the step, or "failed" with the error."""
        assert self._engine is not None and self._work is not None
        self._watch.known_bad_rows.update(known_bad_rows)
        kind = "built"
        try:
            future: Future[BuiltStep] = self._engine.submit(task)
            header, buffers = describe_step(future.result())
        except BaseException as error:  # noqa: BLE001 - it is passed on
            kind, (header, *buffers) = "failed", self._described(error)
        reads, requests = self._work.take_reads()
        return [{"kind": kind, "reads": reads, "requests": requests, "finished": time.time()}, header, *buffers]

    def load_alone(self, row: int) -> Reply:
        """Load one sample, and drop it: only whether this process survives it counts."""
        assert self._work is not None and self._work.builder is not None
        with contextlib.suppress(BaseException):
            self._work.builder.load_alone(row)
        return [{"kind": "survived"}]

    def waits(self) -> bool:
        """Return whether all threads wait for storage, or the spec is being opened, for 10 minutes at most. It can be
        called while steps are built.
        """
        since = self._opens_since
        if since is not None:
            return time.monotonic() - since < OPENING_SECONDS
        return all_wait(self._rows.tolist())

    def _described(self, error: BaseException) -> Reply:
        where = f"in DataLoader worker process {self._number} on {_here()['address']}"
        header, buffers = describe_value(sendable(passed_on(error), where))
        return [header, *buffers]


def _here() -> dict[str, str]:
    import ray

    return {"node": ray.get_runtime_context().get_node_id(), "address": ray.util.get_node_ip_address()}
