"""Building in actors of Ray: one thread of this process that sends jobs to actors, and copies what they have built.

    job --> an actor with room --> built, or an error --------------------------> the step's future
              |--> lost: Ray starts the actor again, and calls it again -------------^
              '--> lost more often: its samples are loaded alone (`isolate.py`), then it is built again

Ray supervises the processes. The thread never waits for an actor: Ray calls back when a result is here.

Is there room in the cluster for the actors of a loader? What is missing is said at once, and again each minute.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from orchdata.building.memory import BufferPool
from orchdata.building.spec import BuildSpec
from orchdata.engines.engine import Workers
from orchdata.engines.on_ray.deaths import cause_of, described, is_dead, is_loss
from orchdata.engines.on_ray.fleet import (
    ANSWER_SECONDS,
    ASK_SECONDS,
    Fleet,
    Member,
    actor_state,
    ask_whether_it_waits,
    num_restarts,
    unpack,
    waits_for_room,
)
from orchdata.engines.on_ray.isolate import Isolation, Stopped
from orchdata.engines.processes.message import read_step
from orchdata.engines.threads import Job, JobEngine
from orchdata.engines.work import WorkerSpec, add_reads, error_of
from orchdata.finalizers import Ending
from orchdata.notices import warn_user
from orchdata.order.steps import StepTask
from orchdata.planning.make_plan import make_plan

PATIENCE_SECONDS: Final = 600.0
"""How long a step may be lost again and again, where no timeout says it."""
_MOST_HANGS: Final = 3
_RESTART_SECONDS: Final = 60.0
"""What Ray has at least to start an actor again, however short the timeout is: it imports torch."""
_STOPPED: Final = "the loader's Ray actors were stopped"


class ActorEngine(JobEngine["ActorDispatcher"]):
    """Builds steps in actors; one actor builds a whole step.

    Args:
        options: of each actor, with Ray's names.
        start_timeout: seconds that actors may wait for room in the cluster.

    Raises:
        TypeError: the spec must be pickled, and cannot be.
        ValueError: Ray does not know an option.
    """

    def __init__(self, spec: BuildSpec, workers: Workers, *, options: dict[str, Any], start_timeout: float) -> None:
        dispatcher = ActorDispatcher(spec, workers, options=options, start_timeout=start_timeout)
        super().__init__(dispatcher, workers)
        self._ending = Ending(self, dispatcher.stop)
        dispatcher.start()

    def close(self) -> None:
        self._dispatcher.stop()
        self._ending.cancel()


class ActorDispatcher(threading.Thread):
    """Runs jobs in actors until it is stopped. Arguments as of `ActorEngine`."""

    def __init__(self, spec: BuildSpec, workers: Workers, *, options: dict[str, Any], start_timeout: float) -> None:
        super().__init__(name="orchdata Ray dispatcher", daemon=True)
        self.notes: deque[str] = deque()
        self._spec = spec
        self._workers = workers
        self._timeout = workers.timeout
        self._patience = workers.timeout or PATIENCE_SECONDS
        self._start_timeout = start_timeout
        first = WorkerSpec(spec=spec, number=0, workers=workers.sent, base_seed=workers.base_seed, environ={})
        self._fleet = Fleet(first, options)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._suspects: deque[tuple[int, Job]] = deque()  # number of the actor, and job; the first is on trial
        self._held: list[Job] = []
        self._first_lost: dict[int, float] = {}
        self._last_loss = ""  # why an actor was lost that loaded samples alone, or started: Ray says it only of these
        self._room: Waiting | None = None
        self._memory = BufferPool()
        self._broken: Callable[[], Exception] | None = None
        self._is_stopping = self._has_ended = False
        self._trial: threading.Thread | None = None

    # --- called by other threads

    def submit(self, job: Job) -> None:
        self.call(partial(self._take, job))

    def expect(self, job: Job) -> None:
        self.call(partial(_expect, job))

    def call(self, function: Callable[[], None]) -> None:
        """Have the thread call a function."""
        self._calls.put(function)
        if self._has_ended:
            self._drain()

    def stop(self) -> None:
        """End the actors; steps under way are dropped."""
        self._is_stopping = True
        self._calls.put(lambda: None)
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    # --- the thread

    def run(self) -> None:
        try:
            self._start_members()
            while not self._is_stopping and self._broken is None:
                self._call_next()
                self._look_at_room()
                self._look_at_times()
                self._assign()
        except Exception as error:  # noqa: BLE001 - no caller may wait for ever
            failed = error
            self._break(lambda: failed)
        finally:
            self._end_all()
            self._break(partial(RuntimeError, _STOPPED))
            self._has_ended = True
            self._drain()  # later callers do this in `call`

    def _call_next(self) -> None:
        """Wait for a call, until something may be overdue, and make it."""
        try:
            self._calls.get(timeout=self._seconds_to_wait())()
        except queue.Empty:
            return

    def _drain(self) -> None:
        while True:
            try:
                self._calls.get_nowait()()
            except queue.Empty:
                return

    def _seconds_to_wait(self) -> float | None:
        times = [] if self._room is None else [self._room.seconds]
        awaited = [job.awaited for job in self._jobs.values() if job.awaited is not None]
        if awaited:
            times.append(max(0.0, min(awaited) + self._patience - time.monotonic()) + 0.05)
            if self._timeout:
                times.append(ASK_SECONDS)
        return min(times, default=None)

    # --- actors

    def _start_members(self) -> None:
        for member in self._fleet.members:
            self._start(member)

    def _start(self, member: Member) -> None:
        self._fleet.start(member)
        if self._room is None:
            self._room = Waiting(
                self._fleet.options,
                count=self._workers.num_workers,
                num_ranks=self._workers.num_ranks,
                num_threads=max(1, self._workers.num_threads),
                start_timeout=self._start_timeout,
            )
        self._when_done(member.actor.start.remote(), partial(self._on_start, member, member.actor))

    def _when_done(self, call: Any, then: Callable[[Future[Any]], None]) -> None:
        call.future().add_done_callback(lambda done: self._calls.put(partial(then, done)))

    def _on_start(self, member: Member, actor: Any, done: Future[Any]) -> None:
        if member.actor is not actor:
            return
        error = done.exception()
        if error is not None:
            if not is_loss(error):
                raise RuntimeError(f"Ray actors of this loader do not start: {cause_of(error)}") from error
            self._last_loss = described(error)
            self.notes.append(f"Ray actor {member.number} was lost while it started: {self._last_loss}")
            self._fleet.end(member)
            self._start(member)
            return
        message, units = unpack(done.result(), self._memory.take)
        if message["kind"] != "ready":
            self._break(partial(error_of, units[0]))
            return
        member.is_ready, member.address = True, message["address"]
        if all(each.is_ready for each in self._fleet.members):
            self._room = None
            for job in self._jobs.values():
                if job.awaited is not None:
                    job.awaited = time.monotonic()

    def _look_at_room(self) -> None:
        if self._room is None or self._room.seconds:
            return
        missing = [each for each in self._fleet.members if not each.is_ready]
        lost = sorted({each.address for each in missing if each.address})
        seen = f" again after their loss on {', '.join(lost)}" if lost else ""
        seen += f" (the last that was lost: {self._last_loss})" if self._last_loss else ""
        if restarts := sum(num_restarts(each.actor) for each in missing):
            seen += (
                f", and Ray has started them again {restarts} times: are their nodes short of memory (Ray's memory "
                "monitor ends actors then), or does a package end the process? `ray logs` shows it"
            )
        warning = self._room.check(len(missing), lambda: sum(waits_for_room(each.actor) for each in missing), seen)
        if warning is not None:
            warn_user(warning)

    # --- jobs

    def _take(self, job: Job) -> None:
        if self._broken is not None:
            job.future.set_exception(self._broken())
            return
        self._jobs[job.number] = job
        self._waiting.append(job)

    def _assign(self) -> None:
        """Send waiting jobs to actors with room, in order, once all actors have started."""
        if self._room is not None or self._broken is not None or (self._workers.in_turn and self._suspects):
            return
        later: list[Job] = []
        while self._waiting:
            job = self._waiting.popleft()
            members = self._fleet.members if job.worker is None else [self._fleet.members[job.worker]]
            free = [each for each in members if each.is_ready and len(each.jobs) < self._workers.prefetch_factor]
            member = min(free, key=lambda each: len(each.jobs), default=None)
            if member is not None:
                self._send(member, job)
            else:
                later.append(job)
                if job.worker is None:
                    break
        self._waiting.extendleft(reversed(later))

    def _send(self, member: Member, job: Job) -> None:
        if job.awaited is not None:
            job.awaited = time.monotonic()
        member.jobs[job.number] = job
        call = member.actor.build.remote(job.task, self._workers.known_bad_rows)
        self._when_done(call, partial(self._on_result, member, member.actor, job))

    def _on_result(self, member: Member, actor: Any, job: Job, done: Future[Any]) -> None:
        if member.actor is not actor or self._jobs.get(job.number) is not job or job.number not in member.jobs:
            return  # it was given to another actor meanwhile
        del member.jobs[job.number]
        error = done.exception()
        if error is not None:
            if is_loss(error):
                self._on_loss(member, job, error)
            else:
                del self._jobs[job.number]
                job.future.set_exception(_not_returned(member, job, error))
            return
        self._resolve(member, job, done.result())

    def _resolve(self, member: Member, job: Job, reply: list[Any]) -> None:
        """Set the future of a job that was built, or failed."""
        message, units = unpack(reply, self._memory.take)
        if message["kind"] == "not started":
            self._break(partial(error_of, units[0]))
            return
        del self._jobs[job.number]
        self._first_lost.pop(job.number, None)
        add_reads(self._workers.reads, message["reads"], message["requests"])
        if message["kind"] == "failed":
            job.future.set_exception(error_of(units[0]))
            return
        try:
            built = read_step(units)
        except Exception as error:  # noqa: BLE001 - unpickling a user's object may raise anything
            job.future.set_exception(error)
            return
        built.seconds["handing_over"] = max(0.0, time.time() - message["finished"])  # clocks of nodes may differ
        job.future.set_result(built)

    # --- trouble

    def _on_loss(self, member: Member, job: Job, error: BaseException) -> None:
        """Ray has given up a call: try the samples of its step alone, and build it again."""
        now = time.monotonic()
        since = self._first_lost.setdefault(job.number, now)
        if now - since >= self._patience:
            why = self._last_loss or f"on node {member.address}: {described(error)}"
            self._fail(job, f"was lost again and again for {now - since:.0f} seconds, the last time {why}")
            return
        self.notes.append(f"Ray actor {member.number} was lost ({described(error)}); built again: {job.name}")
        if is_dead(error):  # by `ray.kill`
            self._replace(member)
        self._suspect(member, job)

    def _suspect(self, member: Member, job: Job) -> None:
        """Have the samples of a step tried; steps that were lost with it at the same actor wait for that."""
        if any(number == member.number for number, _ in self._suspects):
            self._held.append(job)
        else:
            self._suspects.append((member.number, job))
            self._try_next()

    def _look_at_times(self) -> None:
        """Replace actors that the caller has waited for too long."""
        now = time.monotonic()
        for member in self._fleet.members:
            if self._timeout and any(job.awaited is not None for job in member.jobs.values()):
                self._ask(member, now)
            for job in list(member.jobs.values()):
                if job.awaited is None or now - job.awaited < self._patience or job.number not in member.jobs:
                    continue
                state = actor_state(member.actor)
                if state != "ALIVE":
                    if now - job.awaited >= (seconds := max(self._patience, _RESTART_SECONDS)):
                        self._fail(
                            job,
                            f"waits for Ray actor {member.number}, which was on node {member.address} and is {state} "
                            f"for up to {seconds:g} seconds: is the node gone, and has the cluster room on another?",
                        )
                elif self._timeout:
                    if member.asked is None or now - member.asked >= ANSWER_SECONDS:
                        self._on_hang(member, job)
                else:
                    job.awaited = now  # it computes: there is no limit

    def _ask(self, member: Member, now: float) -> None:
        """Ask an actor that is awaited, once a second, whether it waits for storage."""
        if member.asked is None and now - member.heard >= ASK_SECONDS:
            member.asked = now
            self._when_done(ask_whether_it_waits(member.actor), partial(self._on_answer, member, member.actor))

    def _on_answer(self, member: Member, actor: Any, done: Future[Any]) -> None:
        if member.actor is not actor:
            return
        member.asked, member.heard = None, time.monotonic()
        # An actor that is lost answers nothing, and its jobs come back with the error.
        if done.exception() is not None or done.result():
            for job in member.jobs.values():
                if job.awaited is not None:
                    job.awaited = member.heard

    def _on_hang(self, member: Member, job: Job) -> None:
        how = f"did not return within {self._timeout:g} seconds, and was replaced"
        job.losses["hung"] += 1
        if job.losses["hung"] >= _MOST_HANGS:
            del self._jobs[job.number]
            text = (
                f"DataLoader timed out after {self._timeout:g} seconds, waiting for {job.name}, {job.losses['hung']} "
                f"times, but none of its samples hangs alone: Ray actor {member.number} on {member.address} {how}"
            )
            job.future.set_exception(RuntimeError(text))
            self._replace(member, but=job)
            return
        self.notes.append(f"Ray actor {member.number} on {member.address} {how}; built again: {job.name}")
        self._replace(member, but=job)
        self._suspect(member, job)

    def _replace(self, member: Member, but: Job | None = None) -> None:
        """End the actor of a worker, start another, and let its jobs wait again, except for one."""
        lost = [job for job in member.jobs.values() if job is not but]
        member.jobs.clear()
        self._fleet.end(member)
        self._start(member)
        self._requeue(lost)

    def _requeue(self, jobs: list[Job]) -> None:
        """Let jobs wait again, in their original order."""
        self._waiting.extend(job for job in jobs if job.number in self._jobs)
        self._waiting = deque(sorted(self._waiting, key=lambda each: each.number))

    def _try_next(self) -> None:
        """Load the samples of the first suspect alone, in a thread of its own, if none is on trial."""
        if self._trial is not None or not self._suspects or self._is_stopping:
            return
        _, job = self._suspects[0]
        isolation = Isolation(
            self._fleet.start_alone,
            timeout=self._timeout,
            start_timeout=self._start_timeout,
            is_stopping=lambda: self._is_stopping,
        )
        self._trial = threading.Thread(target=self._run_trial, args=(isolation, job), daemon=True)
        self._trial.start()

    def _run_trial(self, isolation: Isolation, job: Job) -> None:
        try:
            for row, why in isolation.bad_rows(_rows_of(self._spec, job.task)):
                self._calls.put(partial(self._on_bad, row, why))
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 - the step is built again all the same
            self.notes.append(f"the samples of {job.name} could not be loaded alone: {error}")
        self._last_loss = isolation.last_loss or self._last_loss
        self._calls.put(partial(self._on_tried, job))

    def _on_bad(self, row: int, why: str) -> None:
        self._workers.known_bad_rows[row] = f"{why}, whenever this sample was loaded alone"
        self.notes.append(
            f"{self._workers.name_of(row)} cannot be loaded: its worker {self._workers.known_bad_rows[row]}"
        )

    def _on_tried(self, job: Job) -> None:
        self._trial = None
        self._suspects.popleft()
        held, self._held = self._held, []
        self._requeue([job, *held])
        self._try_next()

    def _fail(self, job: Job, why: str) -> None:
        self._jobs.pop(job.number, None)
        for member in self._fleet.members:
            member.jobs.pop(job.number, None)
        job.future.set_exception(RuntimeError(f"{job.name} {why}"))

    def _break(self, why: Callable[[], Exception]) -> None:
        """Fail all jobs, now and from now on."""
        self._broken = self._broken or why
        jobs, self._jobs = self._jobs, {}
        self._waiting.clear()
        for job in jobs.values():
            job.future.set_exception(self._broken())

    def _end_all(self) -> None:
        import ray

        self._is_stopping = True
        if self._trial is not None:
            self._trial.join()
        if ray.is_initialized():
            for member in self._fleet.members:
                self._fleet.end(member)


def _not_returned(member: Member, job: Job, error: BaseException) -> Exception:
    """Return the error of a step that Ray could not send back, or of our own code."""
    from ray import exceptions

    cause = cause_of(error)
    if not isinstance(cause, exceptions.RayError):
        return cause
    way_out = "`ray logs` on that node may say more"
    if isinstance(cause, exceptions.OutOfDiskError | exceptions.ObjectStoreFullError):
        way_out = "free its disk, or give it a larger store (`ray start --object-store-memory`)"
    return RuntimeError(
        f"{job.name} did not come back from Ray actor {member.number} on node {member.address}: {described(cause)}. "
        f"{way_out}"
    )


def _rows_of(spec: BuildSpec, task: StepTask) -> list[int]:
    """Return the rows that a rank loads for a step: of its samples, and of parts that it encodes for others."""
    plan, rank = make_plan(spec.plan, task), spec.rank
    rows = set(plan.row[plan.places(rank)].tolist())
    for phase, parts in plan.parts.items():
        for microbatch in range(plan.num_microbatches):
            rows.update(plan.row[parts.sample[plan.encoded(phase, rank, microbatch, spec.peer)]].tolist())
    return sorted(rows)


def _expect(job: Job) -> None:
    job.awaited = time.monotonic()


_WARN_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 10.0
"""In which a node takes an actor that it has room for, and those of an engine that has just closed give theirs back."""


class Waiting:
    """Actors that have not started yet.

    Args:
        options: of each actor, as Ray gets them.
        count: actors of this rank.
        num_ranks: of the loader, each with as many.
        num_threads: of an actor.
        start_timeout: seconds that they may wait.
        of, ways: whose they are, and the ways out, for messages.
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        count: int,
        num_ranks: int,
        num_threads: int,
        start_timeout: float,
        of: str = "this loader",
        ways: str = "add nodes, or lower num_workers=, num_threads= or RayEngine(num_cpus=)",
    ) -> None:
        self._of = of
        self._ways = ways
        self._needs = {"CPU": options.get("num_cpus") or 0, "GPU": options.get("num_gpus") or 0}
        self._needs |= options.get("resources") or {}
        self._needs = {name: amount for name, amount in self._needs.items() if amount}
        self._count = count
        self._num_ranks = num_ranks
        self._num_threads = num_threads
        self._start_timeout = start_timeout
        self._begun = time.monotonic()
        self._warn_at = self._begun + (_SETTLE_SECONDS if self._fits() else 0.0)

    @property
    def seconds(self) -> float:
        """Seconds until `check` must be called again."""
        return max(0.0, min(self._warn_at, self._begun + self._start_timeout) - time.monotonic())

    def check(self, num_waiting: int, num_without_room: Callable[[], int], seen: str = "") -> str | None:
        """Return a warning that is due, else None. Raises RuntimeError after `start_timeout`.

        Args:
            num_waiting: actors that have not started.
            num_without_room: returns how many of them no node has taken.
            seen: what else is known, as of a node that was lost.
        """
        now = time.monotonic()
        waited = now - self._begun
        if now < self._warn_at and waited < self._start_timeout:
            return None
        self._warn_at = now + _WARN_SECONDS
        without_room = num_without_room()
        text = f"{without_room or num_waiting} of {self._count} Ray actors of {self._of} have not started{seen}"
        text += f": {self._missing()}" if without_room else ", and have a place on a node: is it slow to import?"
        if waited >= self._start_timeout:
            raise RuntimeError(f"{text}. Nothing changed for {self._start_timeout:g} seconds (start_timeout=)")
        if not without_room and waited < _WARN_SECONDS:
            return None
        return f"{text}. It waits for up to {self._start_timeout - waited:.0f} seconds more (start_timeout=)"

    def _fits(self) -> bool:
        import ray

        total = ray.cluster_resources()
        return all(amount * self._count <= total.get(name, 0) for name, amount in self._needs.items())

    def _missing(self) -> str:
        """Return the sum of what the actors need, and what the cluster has, as text."""
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        parts = []
        for name, amount in self._needs.items():
            ranks = f"{self._num_ranks} ranks x " if self._num_ranks > 1 else ""
            each = f"{amount:g} {name}"
            if name == "CPU" and amount == self._num_threads:
                each = f"{amount:g} threads"
            needed = amount * self._count * self._num_ranks
            names = "CPUs" if name == "CPU" else name
            parts.append(
                f"{ranks}{self._count} actors x {each} = {needed:g} {names}, the cluster has {total.get(name, 0):g}, "
                f"{free.get(name, 0):g} of them free"
            )
        return f"{'; '.join(parts) or 'no node can start them'}. {self._ways[0].upper()}{self._ways[1:]}"
