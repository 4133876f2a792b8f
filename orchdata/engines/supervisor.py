"""Engines with workers, processes and Ray actors alike: one thread gives them steps, and replaces those that are lost.

    job --> a worker --> built, or an error ------------------------------------------> the step's future
              |--> ended -----------------> its jobs again, in the worker that replaces it
              '--> awaited for too long --> ended by us, the same
                     samples that were loading: loaded alone (`Trial`) if they hung, or at two losses

The thread never blocks on a worker: the transport waits for the messages of all of them. Its messages are dicts:

    ready, survived              of a worker that has opened the data set, or has loaded a sample alone
    built: job, unit, reads, requests, finished         failed: job, error, reads, requests
    not started: error           another worker would not start either
    ended: how, loss, final      `loss`: "killed" (from outside), "ended", "hung"; `final`: why others would end, too
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, Protocol

from orchdata.building.step import BuiltStep
from orchdata.engines.engine import Workers
from orchdata.engines.processes.message import read_value
from orchdata.engines.processes.worker import add_reads
from orchdata.finalizers import Ending
from orchdata.order.steps import StepTask

_MAX_LOSSES = {"hung": 3, "killed": 40, "ended": 6}
_MAX_FAILED_STARTS = {"hung": 8, "killed": 1000, "ended": 3}
_RUNS, _KILLED_RUNS = 2, 4
_MAX_STARTS = 8
_NAMED = 8  # samples of a worker that hangs
_FRESH_SECONDS = 10.0
"""What a process that is not forked has at least for its first sample, which may import much."""
_STOPPED = "the loader's workers were stopped"


class Worker(Protocol):
    """A worker, as its supervisor sees it. What it has to say comes from its transport."""

    number: int
    jobs: dict[int, StepTask]  # by number, oldest first
    is_ready: bool  # has opened the data set
    started: float
    start_seconds: float  # that it may take to do so while it is waited for; infinite for no limit
    name: str  # for messages, as "worker process 0"
    label: str  # as torch says it: "DataLoader worker (pid(s) 7)"

    @property
    def rows(self) -> Sequence[int]:
        """Of the samples that it is loading, as far as it is known."""

    def waits(self) -> bool | None:
        """Return whether all its threads wait for storage; None if it was asked, and may still answer."""

    def build(self, job: int, task: StepTask, known_bad_rows: Mapping[int, str]) -> None: ...

    def load_alone(self, row: int) -> None: ...


class Transport(Protocol):
    """Starts workers, and hears from them; used by one thread, but for `wake`."""

    num_spare: int  # workers that it can start in addition; 0 if one that loads alone takes the place of a lost one
    forked: str  # what to say of workers that copy locks of this process; "" if they do not
    not_started: str  # what to say of workers that end as they start

    def start(self, number: int, *, alone: bool = False, fresh: bool = False) -> Any:
        """Start a worker that builds, or loads samples alone; `fresh`: not forked. Raises EOFError or ConnectionError
        if the next try may succeed.
        """

    def wait(self, seconds: float | None) -> Iterable[tuple[Any, dict[str, Any]]]:
        """Yield workers and their messages, once there are some, or after so many seconds, or after `wake`."""

    def wake(self) -> None: ...

    def end(self, worker: Any) -> None:
        """End a worker now, unless it has ended."""

    def close(self) -> None:
        """End all workers."""


class Job(Future[BuiltStep]):
    """A step to build: the future that the caller has."""

    def __init__(self, number: int, task: StepTask, worker: int | None) -> None:
        super().__init__()
        self.number = number
        self.task = task
        self.worker = worker  # that must build it; None for any
        self.losses: Counter[str] = Counter()  # how often a worker was lost with it, by kind
        self.awaited: float | None = None  # since when the caller waits for it

    @property
    def name(self) -> str:
        return f"step {self.task.step} of epoch {self.task.epoch}"


class WorkerEngine:
    """Builds steps in workers, each of which builds a whole step. See `Engine`.

    The thread refers to its transport, not to the engine, so that an engine that nothing refers to ends its workers.
    """

    keeps_time = True

    def __init__(self, transport: Transport, workers: Workers) -> None:
        self.depth = workers.num_workers * workers.prefetch_factor
        self._supervisor = Supervisor(transport, workers)
        self._workers = workers
        self._numbers = count()
        self._ending = Ending(self, self._supervisor.stop)
        self._supervisor.start()

    def submit(self, task: StepTask, worker: int | None = None) -> Future[BuiltStep]:
        """Have a step built, by this worker if one is given."""
        if worker is None and self._workers.in_turn:
            worker = task.step % self._workers.num_workers
        job = Job(next(self._numbers), task, worker)
        self._supervisor.submit(job)
        return job

    def expect(self, future: Future[BuiltStep]) -> None:
        if isinstance(future, Job) and not future.done():
            future.awaited = time.monotonic()
            self._supervisor.wake()

    def take_notes(self) -> list[str]:
        notes = self._supervisor.notes
        return [notes.popleft() for _ in range(len(notes))]

    def close(self) -> None:
        self._supervisor.stop()
        self._ending.cancel()


class Supervisor(threading.Thread):
    """Runs jobs in workers until it is stopped."""

    def __init__(self, transport: Transport, workers: Workers) -> None:
        super().__init__(name="orchdata supervisor", daemon=True)
        self.notes: deque[str] = deque()  # warnings for the user
        self.transport = transport
        self._given = workers
        self._timeout = workers.timeout
        self._known_bad_rows = workers.known_bad_rows
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._waiting_for_trial: list[Job] = []
        self._arrived: deque[Job] = deque()
        # Samples that were loading when a worker was lost; each gets a trial, one after another.
        self._suspects: deque[int] = deque()
        self._seen: Counter[int] = Counter()  # how often
        self._good: set[int] = set()  # loaded by processes that are not forked
        self._trial: Trial | None = None  # that is running
        self._failed_starts: Counter[str] = Counter()
        # Each job gets a new error: one that was raised keeps its frames alive, and through them this supervisor.
        self._broken: Callable[[], Exception] | None = None
        self._has_ended = False
        self._is_stopping = False
        self._process = os.getpid()
        self._workers: list[Worker | None] = [None] * workers.num_workers
        try:
            for number in range(workers.num_workers):
                with contextlib.suppress(EOFError, ConnectionError):  # the next try may succeed
                    self._workers[number] = transport.start(number)
        except BaseException:
            transport.close()
            raise

    # --- called by other threads

    def submit(self, job: Job) -> None:
        self._arrived.append(job)
        self.wake()
        if self._has_ended:
            self._take_arrived()

    def wake(self) -> None:
        """Have the thread look at what has changed."""
        self.transport.wake()

    def stop(self) -> None:
        """End all workers; steps under way are dropped."""
        if self._is_stopping and not self.is_alive():
            return  # stopped already; or the interpreter ends, and its modules are empty by now
        if os.getpid() != self._process:
            return  # a forked child's copy: these are not its workers
        self._is_stopping = True
        self.wake()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    # --- the thread

    def run(self) -> None:
        try:
            while not self._is_stopping and self._broken is None:
                self._hear()
                self._take_arrived()
                self._end_overdue()
                self._assign()
        except Exception as error:  # noqa: BLE001 - no caller may wait for ever
            failed, self._broken = error, lambda: failed
            self._fail_all()
            self._broken = partial(RuntimeError, f"{_STOPPED}: {error!r}")
        finally:
            self.transport.close()
            self._break(partial(RuntimeError, _STOPPED))
            self._has_ended = True
            self._take_arrived()  # later callers do this in `submit`

    def _hear(self) -> None:
        """Wait for messages. A function of its own: a variable of the thread would keep the last step's memory."""
        for worker, message in self.transport.wait(self._seconds_to_wait()):
            self._on_message(worker, message)

    def _seconds_to_wait(self) -> float | None:
        """Return the seconds until something may be overdue; None for no limit."""
        if self._not_running():
            return 0.05
        awaited = [job.awaited for job in self._jobs.values() if job.awaited is not None and self._timeout]
        deadlines = [since + self._timeout for since in awaited]
        if not deadlines and self._trial is None:
            return None
        left = min([*deadlines, time.monotonic() + 1.0]) - time.monotonic()
        return left + 0.001 if left > 0 else 0.05

    def _on_message(self, worker: Worker, message: dict[str, Any]) -> None:
        trial = self._trial
        if trial is not None and worker not in trial.workers:
            trial = None
        if trial is None and self._workers[worker.number] is not worker:
            return  # it was ended meanwhile
        kind = message["kind"]
        if kind == "not started":
            if trial is not None and trial.confirms:
                trial.untried = repr(message["error"]())
            else:
                self._break(message["error"])
        elif kind in ("built", "failed"):
            self._resolve(worker, message)
        elif kind == "ended":
            how, loss = message["how"], message["loss"]
            if trial is None:
                self._on_loss(worker, how, loss, message["final"])
                return
            trial.ended(worker, how, is_killed=loss == "killed")
            self._run_trials()
        elif trial is not None and kind == "ready":
            trial.ready(worker)
        elif trial is not None and kind == "survived":
            trial.survived(worker)
            self._run_trials()

    def _resolve(self, worker: Worker, message: dict[str, Any]) -> None:
        """Set the future of a job that was built, or failed."""
        self._failed_starts.clear()
        worker.jobs.pop(message["job"], None)
        job = self._jobs.pop(message["job"], None)
        if job is None:
            return
        add_reads(self._given.reads, message["reads"], message["requests"])
        if message["kind"] == "failed":
            job.set_exception(message["error"]())
            return
        try:
            built = read_value(message["unit"])
        except Exception as error:  # noqa: BLE001 - unpickling a user's object may raise anything
            job.set_exception(error)
            return
        built.seconds["handing_over"] = time.monotonic() - message["finished"]
        job.set_result(built)

    def _take_arrived(self) -> None:
        while True:
            try:
                job = self._arrived.popleft()
            except IndexError:
                return
            if self._broken is not None:
                job.set_exception(self._broken())
            else:
                self._jobs[job.number] = job
                self._waiting.append(job)

    def _assign(self) -> None:
        """Replace workers that are lost, and send waiting jobs to free workers, in order."""
        for number in self._not_running():
            try:
                self._workers[number] = self.transport.start(number)
            except Exception as error:  # of the system, or of pickling a user's object
                # A lost fork server says nothing about the worker: the next try starts another server.
                kind = "killed" if isinstance(error, (EOFError, ConnectionError)) else "ended"
                self._failed_starts[kind] += 1
                if self._failed_starts[kind] >= _MAX_FAILED_STARTS[kind]:
                    raise
        # Until all are ready, each gets one: the first would take the first steps of an epoch, and the others wait.
        later: list[Job] = []
        all_ready = all(each is not None and each.is_ready for each in self._workers)
        while self._waiting:
            job = self._waiting.popleft()
            workers = self._workers if job.worker is None else [self._workers[job.worker]]
            most = self._given.prefetch_factor if all_ready or job.worker is not None else 1
            free = [each for each in workers if each is not None and each.is_ready and len(each.jobs) < most]
            if free:
                if job.awaited is not None:
                    job.awaited = time.monotonic()
                min(free, key=lambda each: len(each.jobs)).build(job.number, job.task, self._known_bad_rows)
            else:
                later.append(job)
                if job.worker is None:
                    break
        self._waiting.extendleft(reversed(later))

    def _not_running(self) -> list[int]:
        """Return the numbers of workers to start: none while a trial takes the place of one."""
        may_start = self._broken is None and (self.transport.num_spare or self._trial is None)
        return [number for number, each in enumerate(self._workers) if each is None and may_start]

    # --- trouble

    def _end_overdue(self) -> None:
        now = time.monotonic()
        # One that loads a sample alone counts as hung.
        if (trial := self._trial) is not None:
            for late in trial.overdue():
                self.transport.end(late)
                trial.ended(late, f"timed out after {self._timeout:g} seconds")
            self._run_trials()
        if not self._timeout:
            return
        is_any_awaited = any(job.awaited is not None for job in self._jobs.values())
        for worker in list(self._workers):
            if worker is None or not is_any_awaited:
                continue
            if not worker.is_ready:
                if now - worker.started >= worker.start_seconds:
                    what = "did not start (worker_init_fn, or unpickling its data set) within"
                    self._end_hung(worker, f"{what} {worker.start_seconds:g} seconds")
                continue
            awaited = [job for job in map(self._jobs.get, worker.jobs) if job is not None and job.awaited is not None]
            waits = worker.waits() if awaited else None
            for job in awaited:
                if waits:
                    job.awaited = now
                elif waits is False and job.awaited is not None and now - job.awaited >= self._timeout:
                    had = ", ".join(self._given.name_of(row) for row in worker.rows[:_NAMED]) or "no sample"
                    how = f"did not return within {self._timeout:g} seconds, and was replaced (it had {had})"
                    self._end_hung(worker, how)
                    break

    def _end_hung(self, worker: Worker, how: str) -> None:
        self.transport.end(worker)
        self._on_loss(worker, how, "hung")

    def _on_loss(self, worker: Worker, how: str, loss: str, final: str = "") -> None:
        """A worker has ended, or was ended because it hung: build its steps again."""
        self._workers[worker.number] = None
        if not worker.is_ready:
            self._failed_starts[loss] += 1
            if self._failed_starts[loss] >= _MAX_FAILED_STARTS[loss]:
                hint = self.transport.forked or (self.transport.not_started if loss == "ended" else "")
                final = final or f"worker processes do not start: {worker.label} {how}{hint}"
        if final:
            self._break(partial(RuntimeError, final))
            return
        # Samples that were loading when it hung, or at two losses, are loaded alone; its jobs wait for that.
        rows = list(worker.rows)
        self._seen.update(rows)
        tried = [row for row in rows if (loss == "hung" or self._seen[row] > 1) and row not in self._good]
        self._suspects.extend(row for row in tried if row not in self._known_bad_rows and row not in self._suspects)
        lost = [self._jobs[number] for number in worker.jobs if number in self._jobs]
        exited = f"{worker.label} exited unexpectedly"
        if lost:
            names = ", ".join(job.name for job in lost)
            self.notes.append(f"{exited}: {worker.name} {how}; built again: {names}")
            lost[0].losses[loss] += worker.is_ready  # the others were queued after it
        for job in lost:
            losses = job.losses[loss]
            if losses < _MAX_LOSSES[loss]:
                self._waiting_for_trial.append(job) if tried else self._wait_again([job])
                continue
            del self._jobs[job.number]
            text = (
                f"DataLoader timed out after {self._timeout:g} seconds, waiting for {job.name}, {losses} times, but "
                f"none of its samples hangs alone: {worker.name} {how}"
                if loss == "hung"
                else f"{exited}: {job.name} was lost with its process {losses} times, but none of its samples ends a "
                f"process alone; the last {how}"
            )
            job.set_exception(RuntimeError(text + self.transport.forked))
        self._run_trials()

    def _wait_again(self, jobs: list[Job]) -> None:
        """Let jobs wait again, in their original order."""
        self._waiting = deque(sorted([*self._waiting, *jobs], key=lambda each: each.number))

    def _run_trials(self) -> None:
        """Continue the trials of suspects; once none is left, the jobs that wait for them may run."""
        if self._broken is not None:
            return
        forked = self.transport.forked
        while self._suspects:
            row = self._suspects[0]
            trial = self._trial = self._trial or Trial(row, self.transport, self._timeout)
            if trial.verdict is None:
                return
            if trial.verdict and forked and not trial.confirms:
                seconds = max(self._timeout, _FRESH_SECONDS) if self._timeout else 0.0
                self._trial = Trial(row, self.transport, seconds, trial.verdict)
                continue
            verdict = trial.confirms or trial.verdict if trial.verdict else ""
            verdict += ", whenever this sample was loaded alone" if verdict else ""
            if trial.confirms and trial.untried:
                verdict = (
                    f"{trial.confirms}, whenever this sample was loaded alone by a forked worker; whether one that is "
                    f"not forked can load it was not tried ({trial.untried}){forked}"
                )
            elif trial.confirms and not verdict:
                self._good.add(row)
            self._trial = None
            self._suspects.popleft()
            self._seen.pop(row, None)
            if not trial.begun and not trial.confirms:
                self._suspects.clear()  # no worker starts now: the others are tried when they are lost again
            if verdict:
                self._known_bad_rows[row] = verdict
                self.notes.append(f"{self._given.name_of(row)} cannot be loaded: its worker {verdict}")
        if self._waiting_for_trial:
            self._wait_again(self._waiting_for_trial)
            self._waiting_for_trial.clear()

    def _break(self, why: Callable[[], Exception]) -> None:
        """Fail all jobs, now and from now on."""
        self._broken = self._broken or why
        self._fail_all()

    def _fail_all(self) -> None:
        assert self._broken is not None
        while self._arrived:
            job = self._arrived.popleft()
            self._jobs[job.number] = job
        jobs, self._jobs = self._jobs, {}
        self._waiting.clear()
        self._waiting_for_trial.clear()
        for job in jobs.values():
            job.set_exception(self._broken())


class Trial:
    """Does this sample crash or hang its worker? It is loaded alone, in one worker or two at a time: it is bad after
    two crashes or hangs, or after four SIGKILLs (the OOM killer sends those too).

    `confirms` is the verdict of forked processes that others are to confirm, since a fork copies locks that other
    threads hold, and whoever takes one of them hangs.
    """

    def __init__(self, row: int, transport: Transport, timeout: float, confirms: str = "") -> None:
        self.row = row
        self.confirms = confirms
        self.untried = ""  # why no worker could load the sample
        self.workers: list[Worker] = []
        self.verdict: str | None = None  # once it has ended, why the sample is bad; "" if it is not
        self._transport = transport
        self._timeout = timeout
        self.begun: dict[Worker, float] = {}  # since when workers load the sample, those that have ended included
        self._endings: list[str] = []
        self._is_by_itself = False
        self._starts = 0
        while self.verdict is None and len(self.workers) < max(1, transport.num_spare):
            self._start_one()

    def ready(self, worker: Worker) -> None:
        """The worker has started: have it load the sample."""
        self.begun[worker] = time.monotonic()
        worker.load_alone(self.row)

    def survived(self, worker: Worker) -> None:
        """The worker has loaded the sample, or raised an exception."""
        self._decide("")

    def ended(self, worker: Worker, how: str, *, is_killed: bool = False) -> None:
        """The worker has ended; `is_killed`: by a SIGKILL of unknown origin, or with its node."""
        if worker not in self.workers:
            return  # the verdict has ended it
        loading = self.row in worker.rows
        self.workers.remove(worker)
        if self.confirms and not worker.is_ready:
            self.untried = self.untried or how
            self._decide("")
        if loading:
            self._endings.append(how)
            self._is_by_itself |= not is_killed
            if len(self._endings) >= (_RUNS if self._is_by_itself else _KILLED_RUNS):
                self._decide(" and ".join(dict.fromkeys(self._endings)))
        # Another one replaces one that ended before it loaded the sample, or confirms the crashes of all so far.
        if self.verdict is None and (not loading or not self.workers):
            self._start_one()

    def overdue(self) -> list[Worker]:
        """Return workers that have been loading the sample for longer than the timeout, or do not start."""
        now, late = time.monotonic(), []
        for worker in self.workers:
            if worker not in self.begun:
                if now - worker.started >= worker.start_seconds:
                    late.append(worker)
                    self._starts += _MAX_STARTS // 2  # two that do not start are enough
            elif not self._timeout:
                continue
            elif waits := worker.waits():
                self.begun[worker] = now
            elif waits is False and now - self.begun[worker] >= self._timeout:
                late.append(worker)
        return late

    def _start_one(self) -> None:
        while self._starts < _MAX_STARTS:
            self._starts += 1
            try:
                self.workers.append(self._transport.start(0, alone=True, fresh=bool(self.confirms)))
                return
            except (EOFError, ConnectionError) as error:  # the fork server was lost: the next try starts one
                self.untried = repr(error)
            except Exception as error:
                if not self.confirms:
                    raise
                self.untried = f"the data set does not pickle: {type(error).__name__}: {error}"
                break
        self._decide("")

    def _decide(self, verdict: str) -> None:
        if self.verdict is None:
            self.verdict = verdict
            while self.workers:
                self._transport.end(self.workers.pop())
