"""Building in worker processes.

The supervisor of worker processes: one thread that assigns jobs to workers, and replaces workers that are lost.

    job --> a worker --> built, or an error ------------------------------------------> the step's future
              |--> ended -----------------> its jobs again, in the process that replaces it
              '--> awaited for too long --> ended by us, the same
                     samples that were loading: loaded alone (`isolate.py`) if they hung, or at two crashes

The thread never blocks on a worker: it reads messages when they arrive.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import process as mp_process
from multiprocessing.context import BaseContext
from typing import Any

from orchdata.engines.engine import Workers, explain_pickling
from orchdata.engines.processes.isolate import FORK_SECONDS, FORKED, START_SECONDS, CrashSuspects, Trial
from orchdata.engines.processes.message import read_step
from orchdata.engines.processes.process import Process
from orchdata.engines.processes.worker import UNGUARDED
from orchdata.engines.threads import Job, JobEngine
from orchdata.engines.work import WorkerSpec, add_reads, alone, error_of
from orchdata.finalizers import Ending
from orchdata.loaders.errors import StorageError

_DROP_SECONDS = 0.005  # in which a loop that has requested a step drops the one before
_LAST_SECONDS = 10.0  # that a process may take to end, once it has closed its channel
_MAX_LOSSES = {"hung": 3, "killed": 40, "ended": 6}
_MAX_FAILED_STARTS = {"hung": 8, "killed": 1000, "ended": 3}
_UNGUARDED = (
    "a worker process runs the script that starts it, and would start workers of its own: put the script's code "
    "under\n\n    if __name__ == '__main__':\n\nor pass multiprocessing_context='fork'"
)
_UNREADABLE = (
    "a worker process cannot unpickle its data set, or another argument ({}): define it in a module, where another "
    "process can import it, or pass multiprocessing_context='fork'"
)
_STOPPED = "the loader's worker processes were stopped"
_NOT_STARTED = (
    "; it has written the reason to stderr. It runs the script that starts it again, so the script must be a file: if "
    "it is not, as in a notebook, pass multiprocessing_context='fork'"
)


class Supervisor(threading.Thread):
    """Runs jobs in worker processes until it is stopped.

    Args:
        specs: of the workers, one each.
        workers: how they run.
    """

    def __init__(self, specs: list[WorkerSpec], workers: Workers) -> None:
        super().__init__(name="orchdata supervisor", daemon=True)
        self.notes: deque[str] = deque()
        assert workers.multiprocessing_context is not None
        context = self._context = workers.multiprocessing_context
        self._specs = specs
        self._given = workers
        self._timeout = workers.timeout
        self._known_bad_rows = workers.known_bad_rows
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._check_memory_at: float | None = None  # when the caller may have dropped a step
        self._arrived: deque[Job] = deque()
        self._forked = FORKED if workers.forks else ""
        fresh = partial(Process, multiprocessing.get_context("spawn"), alone(specs[0])) if self._forked else None
        self._suspects = CrashSuspects(partial(Process, context, alone(specs[0])), workers.timeout, fresh)
        self._waiting_for_trial: list[Job] = []
        self._failed_starts: Counter[str] = Counter()
        # Each job gets a new error: one that was raised keeps its frames alive, and through them this supervisor.
        self._broken: Callable[[], Exception] | None = None
        self._has_ended = False
        self._is_stopping = False
        self._process = os.getpid()
        self._wake, woken = os.pipe()
        self._woken: int | None = woken
        self._waking = threading.RLock()  # a finalizer may call `wake` during `wake`
        os.set_blocking(self._wake, False)
        os.set_blocking(woken, False)
        self._workers: list[Process | None] = [None] * len(specs)
        try:
            for number in range(len(specs)):
                with contextlib.suppress(
                    EOFError, ConnectionError
                ):  # the fork server was lost: the next try starts one
                    self._workers[number] = Process(context, specs[number])
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
        """Have the thread look at what has changed."""
        with self._waking, contextlib.suppress(BlockingIOError):  # it is awake already
            if self._woken is not None:
                os.write(self._woken, b"!")

    def stop(self) -> None:
        """End all processes; steps under way are dropped."""
        if self._is_stopping and not self.is_alive():
            return  # stopped already; or the interpreter ends, and its modules are empty by now
        if os.getpid() != self._process:
            return  # a forked child's copy: these are not its processes
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
                self._wait_for_events()
                self._take_arrived()
                self._end_overdue()
                self._assign()
                self._return_memory()
        except Exception as error:  # noqa: BLE001 - no caller may wait for ever
            failed, self._broken = error, lambda: failed
            self._fail_all()
            self._broken = partial(RuntimeError, f"{_STOPPED}: {error!r}")
        finally:
            self._end_all()
            self._break(partial(RuntimeError, _STOPPED))
            self._close_pipe()
            self._has_ended = True
            self._take_arrived()  # later callers do this in `submit`

    def _close_pipe(self) -> None:
        with self._waking:
            woken, self._woken = self._woken, None
            if woken is not None:
                os.close(self._wake)
                os.close(woken)

    def _wait_for_events(self) -> None:
        """Wait for messages and ends of processes, and handle them."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        owners: dict[int, Process] = {}
        for process in self._processes():
            for file in process.files:
                owners[file] = process
                poll.register(file, select.POLLIN)
        events = poll.poll(self._poll_milliseconds())
        handled: set[Process] = set()
        for file, _ in events:
            if file == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 1 << 16)
            elif owners[file] not in handled and owners[file] in self._processes():  # else it was ended meanwhile
                handled.add(owners[file])
                self._on_message(owners[file])

    def _poll_milliseconds(self) -> float | None:
        """Return the milliseconds until something may be overdue, or memory free; None for no limit."""
        if self._check_memory_at is not None:
            return max(0.0, self._check_memory_at - time.monotonic()) * 1000 + 1
        if any(process.has_unsent for process in self._processes()) or list(self._not_running()):
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

    def _on_message(self, process: Process) -> None:
        """Handle all messages of a process, and its end."""
        trial = self._suspects.trial
        if trial is not None and process not in trial.processes:
            trial = None
        while True:
            try:
                message = process.receive()
            except BlockingIOError:
                if process.exit_status is None:
                    return
                message = None  # it has ended, and all its messages were read
            if message is None:
                if process.exit_status is None and process.is_ending(_LAST_SECONDS):
                    return  # its exit status is not known yet
                if trial is not None:
                    how = process.end()
                    trial.ended(process, how, is_killed=process.exit_status == -signal.SIGKILL)
                    self._run_trials()
                else:
                    self._on_exit(process, "ended")
                return
            kind = message["kind"]
            if kind in ("unreadable", "not started"):
                self._on_start_failure(process, message, trial)
            elif trial is not None:
                if kind == "ready":
                    trial.ready(process)
                elif kind == "survived":
                    trial.survived(process)
                    self._run_trials()
                    return
            elif kind == "ready":
                self._on_ready(process)
            elif kind not in ("begun", "out of memory"):
                self._resolve(process, message)

    def _on_start_failure(self, process: Process, message: dict[str, Any], trial: Trial | None) -> None:
        """A worker cannot start, and the others would not either."""
        if trial is not None and trial.confirms:
            trial.untried = message.get("why") or repr(error_of(message["units"][0]))
            return
        if message["kind"] == "unreadable":
            why = _UNREADABLE.format(message["why"])
            self._break(
                partial(StorageError, *trouble) if (trouble := message["trouble"]) else partial(RuntimeError, why)
            )
            return
        self._break(partial(error_of, message["units"][0]))

    def _on_ready(self, process: Process) -> None:
        """A worker has started, or waits for storage: the timeout of its steps begins now."""
        for job in map(self._jobs.get, process.jobs):
            if job is not None and job.awaited is not None:
                job.awaited = time.monotonic()

    def _resolve(self, process: Process, message: dict[str, Any]) -> None:
        """Set the future of a job that was built, or failed."""
        self._failed_starts.clear()
        number = int(str(message["job"]))
        process.jobs.pop(number, None)
        job = self._jobs.pop(number, None)
        if job is None:
            return
        add_reads(self._given.reads, message["reads"], message["requests"])
        if message["kind"] == "failed":
            job.future.set_exception(error_of(message["units"][0]))
            return
        try:
            built = read_step(message["units"])
        except Exception as error:  # noqa: BLE001 - unpickling a user's object may raise anything
            job.future.set_exception(error)
            return
        built.seconds["handing_over"] = time.monotonic() - message["finished"]
        job.future.set_result(built)

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
                self._check_memory_at = time.monotonic() + _DROP_SECONDS

    def _assign(self) -> None:
        """Restart workers that are not running, and send waiting jobs to free workers, in order."""
        for number in list(self._not_running()):
            self._restart(number)
        for worker in self._workers:
            if worker is not None and worker.has_unsent:
                self._send(worker, worker.flush)
        later: list[Job] = []
        while self._waiting:
            job = self._waiting.popleft()
            worker = self._worker_for(job)
            if worker is None:
                later.append(job)
                if job.worker is None:
                    break
            else:
                self._send_job(worker, job)
        self._waiting.extendleft(reversed(later))

    def _return_memory(self) -> None:
        """Return memory that the caller has dropped before the next job, or its worker would allocate more."""
        if self._check_memory_at is None or time.monotonic() < self._check_memory_at:
            return
        self._check_memory_at = None
        for worker in self._workers:
            if worker is not None and worker.silent is None:
                self._send(worker, worker.return_memory)

    def _send_job(self, worker: Process, job: Job) -> None:
        if job.awaited is not None:
            job.awaited = time.monotonic()
        self._send(worker, lambda: worker.build(job.number, job.task, self._known_bad_rows))

    def _send(self, worker: Process, send: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):  # it has ended: `_on_exit` handles its jobs
            send()

    def _worker_for(self, job: Job) -> Process | None:
        candidates = self._workers if job.worker is None else [self._workers[job.worker]]
        free = [each for each in candidates if each is not None and len(each.jobs) < self._given.prefetch_factor]
        return min(free, key=lambda each: len(each.jobs), default=None)

    def _not_running(self) -> Iterator[int]:
        """Yield the numbers of workers to start."""
        if self._broken is None:
            yield from (number for number, each in enumerate(self._workers) if each is None)

    def _restart(self, number: int) -> None:
        lost = self._specs[number]  # the one that replaces it draws other random numbers
        self._specs[number] = replace(lost, base_seed=lost.base_seed + len(self._specs))
        try:
            self._workers[number] = Process(self._context, self._specs[number])
        except Exception as error:  # of the system, or of pickling a user's object
            # A lost fork server says nothing about the worker: the next try starts another server.
            kind = "killed" if isinstance(error, (EOFError, ConnectionError)) else "ended"
            self._failed_starts[kind] += 1
            if self._failed_starts[kind] >= _MAX_FAILED_STARTS[kind]:
                raise

    # --- trouble

    def _end_overdue(self) -> None:
        # A process of the trial that is overdue counts as hung.
        if (trial := self._suspects.trial) is not None:
            for process in trial.overdue():
                process.kill()
                trial.ended(process, f"timed out after {self._timeout:g} seconds")
                process.end()
            self._run_trials()
        # A process that has closed its channel must end soon; a forked one must begin soon.
        for process in list(self._processes()):
            if process.silent is not None and not process.is_ending(_LAST_SECONDS):
                self._on_message(process)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker is not None and not worker.has_begun and now - worker.started >= FORK_SECONDS:
                self._on_exit(worker, "hung")
        # A worker is replaced if the caller has waited for one of its steps for too long.
        if not self._timeout:
            return
        for worker in list(self._workers):
            if worker is None:
                continue
            patience = self._timeout if worker.is_ready else max(self._timeout, START_SECONDS)
            if worker.waits_for_storage:
                self._on_ready(worker)
                continue
            awaited = (job.awaited for job in map(self._jobs.get, worker.jobs) if job is not None)
            if any(since is not None and now - since >= patience for since in awaited):
                self._on_exit(worker, "hung")

    def _on_exit(self, process: Process, kind: str) -> None:
        """A worker has ended, or hangs and is ended here: build its steps again."""
        rows = process.rows
        how = self._kill_overdue(process) if kind == "hung" else process.end()
        if process.exit_status == -signal.SIGKILL and kind == "ended":
            kind = "killed"
        self._workers[process.number] = None
        if hopeless := self._why_hopeless(process, kind, how):
            self._break(partial(RuntimeError, hopeless))
            return
        # Its jobs wait while samples of them are loaded alone.
        is_any_tried = self._suspects.add(rows, immediately=kind == "hung", known_bad=self._known_bad_rows)
        lost = [self._jobs[number] for number in process.jobs if number in self._jobs]
        if lost:
            names = ", ".join(job.name for job in lost)
            self.notes.append(f"{_exited(process)}: worker process {process.number} {how}; built again: {names}")
            lost[0].losses[kind] += process.is_ready  # the others were queued after it
        for job in lost:
            if job.losses[kind] >= _MAX_LOSSES[kind]:
                self._fail_job(job, process, kind, how)
            elif is_any_tried:
                self._waiting_for_trial.append(job)
            else:
                self._requeue(job)
        self._run_trials()

    def _why_hopeless(self, process: Process, kind: str, how: str) -> str:
        """Return why it is useless to start another process; "" if it is not."""
        if process.exit_status == UNGUARDED:
            return _UNGUARDED
        if not process.is_ready:
            self._failed_starts[kind] += 1
            if self._failed_starts[kind] >= _MAX_FAILED_STARTS[kind]:
                hint = self._forked or (_NOT_STARTED if kind == "ended" else "")
                return f"worker processes do not start: DataLoader worker (pid(s) {process.pid}) {how}{hint}"
        return ""

    def _kill_overdue(self, process: Process) -> str:
        """End an overdue process, and return what to report about it."""
        doing = self._describe_work()
        process.kill()
        process.end()
        if not process.has_begun:
            return f"did not run within {FORK_SECONDS:g} seconds of its fork"
        if not process.is_ready:
            return f"did not start (worker_init_fn, or unpickling its data set) within {START_SECONDS:g} seconds"
        return f"did not return within {self._timeout:g} seconds, and was replaced ({doing})"

    def _fail_job(self, job: Job, process: Process, kind: str, how: str) -> None:
        del self._jobs[job.number]
        if kind == "hung":
            error = RuntimeError(
                f"DataLoader timed out after {self._timeout:g} seconds, waiting for {job.name}, {job.losses[kind]} "
                f"times, but none of its samples hangs alone: worker process {process.number} {how}{self._forked}"
            )
        else:
            error = RuntimeError(
                f"{_exited(process)}: {job.name} was lost with its process "
                f"{job.losses[kind]} times, but none of its samples ends a process alone; the last {how}{self._forked}"
            )
        job.future.set_exception(error)

    def _requeue(self, job: Job) -> None:
        """Let a job wait again, in its original order."""
        self._waiting.append(job)
        self._waiting = deque(sorted(self._waiting, key=lambda each: each.number))

    def _run_trials(self) -> None:
        """Continue the trials of suspects; once none is left, the jobs that wait for them may run."""
        if self._broken is not None:
            return
        for row, verdict in self._suspects.run_trials():
            if verdict:
                self._known_bad_rows[row] = verdict
                self.notes.append(
                    f"{self._given.name_of(row)} cannot be loaded: its worker {self._known_bad_rows[row]}"
                )
        if self._suspects.trial is None:
            for job in self._waiting_for_trial:
                self._requeue(job)
            self._waiting_for_trial.clear()

    def _describe_work(self) -> str:
        """Return what each worker is doing, as text."""
        lines = []
        for worker in self._workers:
            if worker is None:
                continue
            jobs = [self._jobs[number].name for number in worker.jobs if number in self._jobs]
            rows = [self._given.name_of(row) for row in worker.rows]
            at = f"loads {', '.join(rows)}" if rows else "loads no sample"
            lines.append(f"worker {worker.number}, pid {worker.pid}: {', '.join(jobs) or 'no step'}; {at}")
        return "; ".join(lines)

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
            job.future.set_exception(self._broken())

    def _end_all(self) -> None:
        processes = list(self._processes())
        for process in processes:
            process.kill()
        for process in processes:
            process.end()
        self._workers = [None] * len(self._specs)
        self._suspects.trial = None


def _exited(process: Process) -> str:
    return f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"


_PRELOADED = "orchdata.engines.processes.preload"

_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


class ProcessEngine(JobEngine[Supervisor]):
    """Builds steps in worker processes; one process builds a whole step.

    Raises:
        TypeError: the spec must be pickled, and cannot be.
    """

    def __init__(self, spec: Any, workers: Workers) -> None:
        assert workers.multiprocessing_context is not None
        start_server(workers.multiprocessing_context)
        first = WorkerSpec(
            spec=spec, number=0, workers=workers.sent, base_seed=workers.base_seed, environ=dict(os.environ)
        )
        try:
            specs = [replace(first, number=number) for number in range(workers.num_workers)]
            supervisor = Supervisor(specs, workers)
        except Exception as error:
            explain_pickling(first, error)
            raise
        super().__init__(supervisor, workers)
        _supervisors.add(supervisor)
        self._ending = Ending(self, supervisor.stop)
        supervisor.start()

    def close(self) -> None:
        self._dispatcher.stop()
        self._ending.cancel()


def start_server(context: BaseContext, preloads: Sequence[str] = ()) -> None:
    """Start the fork server, if the context has one, and its imports: `preloads` are those of the data set.

    A worker that is still importing its parent's script ends here, with a status that its parent knows.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # every worker would print an exception, and the server keeps its own status
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "this process is daemonic, and multiprocessing does not let it have children: pass num_workers=0 to load "
            "in this process, or start it with daemon=False"
        )
    if context.get_start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    context.set_forkserver_preload([_PRELOADED, *preloads])
    forkserver.ensure_running()


def _let_go() -> None:
    """In a forked child: forget its parent's workers, or multiprocessing would end them when the child exits."""
    for supervisor in list(_supervisors):
        for child in supervisor.children():
            mp_process._children.discard(child)  # type: ignore[attr-defined]
    _supervisors.clear()


os.register_at_fork(after_in_child=_let_go)
