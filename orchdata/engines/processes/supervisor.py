"""The supervisor of worker processes: one thread that alone knows who has which job, and what became of it.

    job --> a worker --> built, or an error ------------------------------------------> the step's future
              |--> ended -----------------> its jobs again, in the process that replaces it
              '--> awaited for too long --> ended by us, the same
                     samples it was loading: tried alone (`trial.py`) when they hung, or were there twice

Nobody waits for a worker: everything it says is read when it is there, and it is replaced whatever it does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

from orchdata.building.step import BuiltStep
from orchdata.engines.processes.behind import unpacked
from orchdata.engines.processes.message import read_step
from orchdata.engines.processes.process import Process, error_of
from orchdata.engines.processes.trial import FORK_SECONDS, START_SECONDS, Suspects
from orchdata.engines.processes.worker import UNGUARDED, WorkerSpec, alone
from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.order.steps import StepTask

_GRACE_SECONDS = 2.0
_DROP_SECONDS = 0.005  # in which a loop, that has asked for a step, drops the one it had
_LAST_SECONDS = 10.0  # that a process may take to end, once it has closed what it speaks by
_MAX_LOSSES = {"hung": 3, "killed": 40, "ended": 6}
_MAX_FAILED_STARTS = {"hung": 8, "killed": 1000, "ended": 3}
_UNGUARDED = (
    "a worker process runs the script that starts it, and would start workers of its own: put what the script does "
    "under\n\n    if __name__ == '__main__':\n\nor pass multiprocessing_context='fork'"
)
_UNREADABLE = (
    "a worker process cannot make its data set, or what else it is given, again ({}): it has to be found by another "
    "process, so define it in a module, or pass multiprocessing_context='fork'"
)
_STOPPED = "the loader's worker processes were stopped"
_NOT_STARTED = (
    "; why, it has written to stderr. It runs the script that starts it anew, so that this has to be a file: if it is "
    "not, as in a notebook, pass multiprocessing_context='fork'"
)


@dataclass(eq=False)
class Job:
    """A step to build, from when it is asked for until its future is set.

    Attributes:
        worker: whose it is; None where anybody may build it.
        losses: how often a process was lost with it, by kind.
        awaited: since when the caller waits for it; None while he does not.
    """

    number: int
    task: StepTask
    future: Future[BuiltStep]
    worker: int | None = None
    losses: Counter[str] = field(default_factory=Counter)
    awaited: float | None = None

    @property
    def name(self) -> str:
        return f"step {self.task.step} of epoch {self.task.epoch}"


class Supervisor(threading.Thread):
    """Runs jobs in worker processes until it is stopped.

    Args:
        context: starts processes.
        workers: what each of them is.
        timeout: seconds that the caller waits for a step before the process that has it is replaced; 0 without limit.
        reads: what workers read of shards is added to it.
        name_of: row -> how a sample is named.
        blamed: row -> why it is not to be loaded: those that are known, and those that are found.
    """

    def __init__(
        self,
        context: BaseContext,
        workers: list[WorkerSpec],
        *,
        timeout: float,
        reads: ReadBytes | None,
        name_of: Callable[[int], str],
        blamed: dict[int, str],
    ) -> None:
        super().__init__(name="orchdata supervisor", daemon=True)
        self.notes: deque[str] = deque()
        self._context = context
        self._specs = workers
        self._timeout = timeout
        self._reads = reads
        self._name_of = name_of
        self._blamed = blamed
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._look_again: float | None = None  # when what the caller holds may have become less
        self._arrived: deque[Job] = deque()
        self._suspects = Suspects(partial(Process, context, alone(workers[0])), timeout)
        self._held: list[Job] = []
        self._behind: dict[int, dict[str, Any]] = {number: {} for number in range(len(workers))}
        self._failed_starts: Counter[str] = Counter()
        # Errors are made for each job: one that was raised holds the frames that it went through, and they us.
        self._refused: dict[int, Callable[[], Exception]] = {}  # number of a worker -> why it does not start
        self._broken: Callable[[], Exception] | None = None
        self._has_ended = False
        self._is_stopping = False
        self._is_polite = True
        self._process = os.getpid()
        self._wake, woken = os.pipe()
        self._woken: int | None = woken
        self._waking = threading.RLock()  # a finalizer may wake it in the midst of waking
        os.set_blocking(self._wake, False)
        os.set_blocking(woken, False)
        self._workers: list[Process | None] = [None] * len(workers)
        try:
            for number in range(len(workers)):
                with contextlib.suppress(EOFError, ConnectionError):  # the fork server was lost: another try makes one
                    self._workers[number] = Process(context, workers[number])
        except BaseException:
            self._end_all()
            self._close_pipe()
            raise

    # --- called by other threads

    def submit(self, job: Job) -> None:
        self._arrived.append(job)
        self.wake()
        if self._has_ended:
            self._take_arrived()

    def expect(self, job: Job) -> None:
        """The caller waits for a job from now on."""
        job.awaited = time.monotonic()
        self.wake()

    def wake(self) -> None:
        """Something has changed."""
        with self._waking, contextlib.suppress(BlockingIOError):  # it is awake
            if self._woken is not None:
                os.write(self._woken, b"!")

    def stop(self, *, polite: bool) -> None:
        """End all processes; what is under way is dropped. Politely they may end what they are at, for a moment."""
        if self._is_stopping and not self.is_alive():
            return  # done; or a generator ends with the interpreter, whose modules are empty by then
        if os.getpid() != self._process:
            return  # a forked child's copy: these are not its processes
        self._is_polite = polite
        self._is_stopping = True
        self.wake()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def children(self) -> list[object]:
        """The processes, as `multiprocessing` has them."""
        return [process.handle for process in self._processes()]

    # --- the thread

    def run(self) -> None:
        try:
            while not self._is_stopping and self._broken is None:
                self._listen()
                self._take_arrived()
                self._end_overdue()
                self._assign()
                self._give_back()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody is to wait for ever
            failed, self._broken = error, lambda: failed
            self._fail_all()
            self._broken = partial(RuntimeError, f"{_STOPPED}: {error!r}")
        finally:
            self._end_all()
            self._break(partial(RuntimeError, _STOPPED))
            self._close_pipe()
            self._has_ended = True
            self._take_arrived()  # whoever comes later does so himself

    def _close_pipe(self) -> None:
        with self._waking:
            woken, self._woken = self._woken, None
            if woken is not None:
                os.close(self._wake)
                os.close(woken)

    def _listen(self) -> None:
        """Wait until somebody says something, and hear him out."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        owners: dict[int, Process] = {}
        for process in self._processes():
            for file in process.files:
                owners[file] = process
                poll.register(file, select.POLLIN)
        events = poll.poll(self._patience())
        heard: set[Process] = set()
        for file, _ in events:
            if file == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 1 << 16)
            elif owners[file] not in heard and owners[file] in self._processes():  # or it was ended meanwhile
                heard.add(owners[file])
                self._hear(owners[file])

    def _patience(self) -> float | None:
        """Milliseconds until something may be overdue, or memory free."""
        if self._look_again is not None:
            return max(0.0, self._look_again - time.monotonic()) * 1000 + 1
        if any(process.is_behind for process in self._processes()) or list(self._missing()):
            return 50.0
        if not all(process.has_begun and process.silent is None for process in self._processes()):
            return 500.0
        deadlines = [job.awaited + self._timeout for job in self._jobs.values() if job.awaited is not None]
        if not self._timeout or not (deadlines or self._suspects.trial):
            return None
        return max(0.0, min([*deadlines, time.monotonic() + 1.0]) - time.monotonic()) * 1000 + 1

    def _processes(self) -> Iterator[Process]:
        yield from (process for process in self._workers if process is not None)
        if self._suspects.trial is not None:
            yield from self._suspects.trial.processes

    def _hear(self, process: Process) -> None:
        trial = self._suspects.trial
        if trial is not None and process not in trial.processes:
            trial = None
        while True:
            try:
                message = process.receive()
            except BlockingIOError:
                if process.exit_status is None:
                    return
                message = None  # what it left has been read
            if message is None:
                if process.exit_status is None and process.is_ending(_LAST_SECONDS):
                    return  # it may be telling why, and how it ends is not known yet
                if trial is not None:
                    how = process.end()
                    trial.ended(process, how, is_killed=process.exit_status == -signal.SIGKILL)
                    self._try_suspects()
                else:
                    self._lose(process, "ended")
                return
            kind = message["kind"]
            if kind in ("unreadable", "not started"):
                self._refuse(process, message)
            elif trial is not None:
                if kind == "ready":
                    trial.ready(process)
                elif kind == "survived":
                    trial.survived(process)
                    self._try_suspects()
                    return
            elif kind == "ready":
                self._forgive(process)
            elif kind not in ("begun", "out of memory"):
                self._resolve(process, message)

    def _refuse(self, process: Process, message: dict[str, Any]) -> None:
        """It cannot start. With torch's loader the batches of the others still come."""
        if message["kind"] == "unreadable":
            why = _UNREADABLE.format(message["why"])
            self._break(
                partial(StorageError, *trouble) if (trouble := message["trouble"]) else partial(RuntimeError, why)
            )
            return
        if not self._specs[0].options.as_torch or len(self._specs) == 1:
            self._break(partial(error_of, message))
            return
        self._refused[process.number] = partial(error_of, message)
        for job in [self._jobs.pop(number) for number in process.jobs if number in self._jobs]:
            job.future.set_exception(error_of(message))

    def _forgive(self, process: Process) -> None:
        """It has started: until now nobody waited for a step."""
        for job in map(self._jobs.get, process.jobs):
            if job is not None and job.awaited is not None:
                job.awaited = time.monotonic()

    def _resolve(self, process: Process, message: dict[str, Any]) -> None:
        self._failed_starts.clear()
        number = int(str(message["job"]))
        process.jobs.pop(number, None)
        self._note(process.number, message)
        job = self._jobs.pop(number, None)
        if job is None:
            return
        if self._reads is not None and message["reads"]:
            counts = (self._reads.storage, self._reads.cache, self._reads.used)
            for count, new in zip(counts, message["reads"], strict=True):
                count.add(int(new))
        if message["kind"] == "failed":
            job.future.set_exception(error_of(message))
            return
        try:
            built = read_step(message["units"])
        except Exception as error:  # noqa: BLE001 - whatever a user's object raises when it is made again
            job.future.set_exception(error)
            return
        built.worker = process.number
        if "state" in message:
            built.dataset_state = partial(unpacked, message["state"])
        built.seconds["handing_over"] = time.monotonic() - message["finished"]
        job.future.set_result(built)

    def _note(self, number: int, message: dict[str, Any]) -> None:
        """What a process that replaces this one begins with."""
        behind = self._behind[number]
        behind["drawn"] = behind.get("drawn", {}) | message.get("drawn", {})
        if "state" in message:
            behind["state"] = message["state"]

    def _take_arrived(self) -> None:
        while True:
            try:
                job = self._arrived.popleft()
            except IndexError:
                return
            if self._broken is not None:
                job.future.set_exception(self._broken())
            else:
                self._jobs[job.number] = job
                self._waiting.append(job)
                self._look_again = time.monotonic() + _DROP_SECONDS

    def _assign(self) -> None:
        for number in list(self._missing()):
            self._restart(number)
        for worker in self._workers:
            if worker is not None and worker.is_behind:
                self._say(worker, worker.flush)
        later: list[Job] = []
        while self._waiting:
            job = self._waiting.popleft()
            if job.worker in self._refused:
                del self._jobs[job.number]
                job.future.set_exception(self._refused[job.worker]())
                continue
            worker = self._worker_for(job)
            if worker is None:
                later.append(job)
                if job.worker is None:
                    break
            else:
                self._give(worker, job)
        self._waiting.extendleft(reversed(later))

    def _give_back(self) -> None:
        """Memory that the caller has dropped goes back ahead of the next job, or its worker makes more meanwhile."""
        if self._look_again is None or time.monotonic() < self._look_again:
            return
        self._look_again = None
        for worker in self._workers:
            if worker is not None and worker.silent is None:
                self._say(worker, worker.give_back)

    def _give(self, worker: Process, job: Job) -> None:
        if job.awaited is not None:
            job.awaited = time.monotonic()
        self._say(worker, lambda: worker.build(job.number, job.task, self._blamed))

    def _say(self, worker: Process, say: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which is heard of next: its jobs are known
            say()

    def _worker_for(self, job: Job) -> Process | None:
        candidates = self._workers if job.worker is None else [self._workers[job.worker]]
        free = [each for each in candidates if each is not None and len(each.jobs) < self._specs[0].options.max_jobs]
        return min(free, key=lambda each: len(each.jobs), default=None)

    def _missing(self) -> Iterator[int]:
        """Workers that are to be started."""
        if self._broken is None:
            yield from (
                number for number, each in enumerate(self._workers) if each is None and number not in self._refused
            )

    def _restart(self, number: int) -> None:
        try:
            behind = self._behind[number]
            self._workers[number] = Process(self._context, replace(self._specs[number], **behind))
        except Exception as error:  # of the system, or a user's object that is sent again
            # A fork server that was lost says nothing of the worker: another try makes another one.
            kind = "killed" if isinstance(error, (EOFError, ConnectionError)) else "ended"
            self._failed_starts[kind] += 1
            if self._failed_starts[kind] >= _MAX_FAILED_STARTS[kind]:
                raise

    # --- trouble

    def _end_overdue(self) -> None:
        if (trial := self._suspects.trial) is not None:
            for process in trial.overdue():
                process.kill()
                trial.ended(process, f"timed out after {self._timeout:g} seconds")
                process.end()
            self._try_suspects()
        for process in list(self._processes()):
            if process.silent is not None and not process.is_ending(_LAST_SECONDS):
                self._hear(process)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker is not None and not worker.has_begun and now - worker.started >= FORK_SECONDS:
                self._lose(worker, "hung")
        if not self._timeout:
            return
        for worker in list(self._workers):
            if worker is None:
                continue
            patience = self._timeout if worker.is_ready else max(self._timeout, START_SECONDS)
            awaited = (job.awaited for job in map(self._jobs.get, worker.jobs) if job is not None)
            if any(since is not None and now - since >= patience for since in awaited):
                self._lose(worker, "hung")

    def _lose(self, process: Process, kind: str) -> None:
        """A worker has ended, or is ended now; what it had is built again."""
        rows = process.rows
        how = self._ending(process) if kind == "hung" else process.end()
        if process.exit_status == -signal.SIGKILL and kind == "ended":
            kind = "killed"
        self._workers[process.number] = None
        if hopeless := self._hopeless(process, kind, how):
            self._break(partial(RuntimeError, hopeless))
            return
        is_any_tried = self._suspects.add(rows, at_once=kind == "hung", but=self._blamed)
        lost = [self._jobs[number] for number in process.jobs if number in self._jobs]
        if lost:
            names = ", ".join(job.name for job in lost)
            self.notes.append(f"{_exited(process)}: worker process {process.number} {how}; built again: {names}")
            lost[0].losses[kind] += process.is_ready  # the others were behind it
        for job in lost:
            if job.losses[kind] >= _MAX_LOSSES[kind]:
                self._give_up(job, process, kind, how)
            elif is_any_tried:
                self._held.append(job)
            else:
                self._put_back(job)
        self._try_suspects()

    def _hopeless(self, process: Process, kind: str, how: str) -> str:
        """Why another process in its place would be of no use; "" where it is."""
        if process.exit_status == UNGUARDED:
            return _UNGUARDED
        if process.number in self._refused:
            return ""
        if not process.is_ready:
            self._failed_starts[kind] += 1
            if self._failed_starts[kind] >= _MAX_FAILED_STARTS[kind]:
                told = _NOT_STARTED if kind == "ended" and self._context.get_start_method() != "fork" else ""
                return f"worker processes do not start: DataLoader worker (pid(s) {process.pid}) {how}{told}"
        return ""

    def _ending(self, process: Process) -> str:
        """End one that is overdue; what to say of it."""
        doing = self._doings()
        process.kill()
        process.end()
        if not process.has_begun:
            return f"did not run within {FORK_SECONDS:g} seconds of its fork"
        if not process.is_ready:
            return f"did not start (worker_init_fn, or making its data set) within {START_SECONDS:g} seconds"
        return f"did not return within {self._timeout:g} seconds, and was replaced ({doing})"

    def _give_up(self, job: Job, process: Process, kind: str, how: str) -> None:
        del self._jobs[job.number]
        if kind == "hung":
            error = RuntimeError(
                f"DataLoader timed out after {self._timeout:g} seconds, waiting for {job.name}, {job.losses[kind]} "
                f"times, and no sample of it does so alone: worker process {process.number} {how}"
            )
        else:
            error = RuntimeError(
                f"{_exited(process)}: {job.name} was lost with its process "
                f"{job.losses[kind]} times, and no sample of it ends one alone; the last {how}"
            )
        job.future.set_exception(error)

    def _put_back(self, job: Job) -> None:
        """Its turn is what it was."""
        self._waiting.append(job)
        self._waiting = deque(sorted(self._waiting, key=lambda each: each.number))

    def _try_suspects(self) -> None:
        """Go on with them; with none left, what was held for them goes on."""
        if self._broken is not None:
            return
        for row, verdict in self._suspects.go_on():
            if verdict:
                # Libraries that get no memory may abort.
                limited = " under worker_memory" if self._specs[0].options.memory is not None else ""
                self._blamed[row] = f"{verdict}, whenever this sample was loaded alone{limited}"
                self.notes.append(f"{self._name_of(row)} cannot be loaded: its worker {self._blamed[row]}")
        if self._suspects.trial is None:
            for job in self._held:
                self._put_back(job)
            self._held.clear()

    def _doings(self) -> str:
        """What each worker is at, in words."""
        said = []
        for worker in self._workers:
            if worker is None:
                continue
            jobs = [self._jobs[number].name for number in worker.jobs if number in self._jobs]
            rows = [self._name_of(row) for row in worker.rows]
            at = f"loads {', '.join(rows)}" if rows else "loads no sample"
            said.append(f"worker {worker.number}, pid {worker.pid}: {', '.join(jobs) or 'no step'}; {at}")
        return "; ".join(said)

    def _break(self, why: Callable[[], Exception]) -> None:
        """Nothing can be built any more."""
        self._broken = self._broken or why
        self._fail_all()

    def _fail_all(self) -> None:
        assert self._broken is not None
        while self._arrived:
            job = self._arrived.popleft()
            self._jobs[job.number] = job
        jobs, self._jobs = self._jobs, {}
        self._waiting.clear()
        self._held.clear()
        for job in jobs.values():
            job.future.set_exception(self._broken())

    def _end_all(self) -> None:
        processes = list(self._processes())
        grace = time.monotonic() + (_GRACE_SECONDS if self._is_polite and self._broken is None else 0.0)
        for process in processes:
            if self._is_polite:
                process.stop()
            else:
                process.kill()
        for process in processes:
            process.end(max(0.0, grace - time.monotonic()))
        self._workers = [None] * len(self._specs)
        self._suspects.trial = None


def _exited(process: Process) -> str:
    return f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"
