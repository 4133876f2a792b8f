"""Engine: runs the tasks of steps. All engines build the same batches.

Engines of this process, here, run tasks themselves. Engines with workers hand jobs to a thread, which gives them to
workers (`supervisor.WorkerEngine`).

Names the members of a BuildSpec, or of a batch, that do not pickle and so cannot be sent to another process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.context import BaseContext
from types import FunctionType, MethodType
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory

from orchdata.building.step import Builder, BuildSpec, BuiltStep, StartedStep, Task
from orchdata.loaders.errors import ContainerError, OrchdataError
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.notices import warn_user
from orchdata.order.steps import StepTask

DEFAULT_PREFETCH: Final = 2


class Engine(Protocol):
    """Builds steps, several at a time. By default in this process, without supervision."""

    depth: int  # steps to keep under way while the caller works on another; 0 if nothing runs in parallel
    keeps_time: bool = False  # whether the engine itself handles steps that take longer than the loader's timeout

    def submit(self, task: StepTask) -> Future[BuiltStep]: ...

    def expect(self, future: Future[BuiltStep]) -> None:
        """The caller waits for this step from now on."""
        return  # not abstract

    def take_notes(self) -> list[str]:
        """Return warnings for the user about steps that were built with trouble, once."""
        return []

    def close(self) -> None:
        """Stop: wait a moment for tasks that run, and abandon those that hang. A second call does nothing."""
        return


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who builds the steps of a loader, under the names of its arguments; an iteration adds the last four."""

    num_workers: int = 0  # of this rank alone; 0: this process builds
    num_threads: int = 0  # of a worker, or of this process, that read and decode; 0 for its main thread alone
    prefetch_factor: int = DEFAULT_PREFETCH  # the most steps that a worker has, or all threads of this process
    worker_init_fn: Callable[[int], None] | None = None  # called with the worker's number before it builds anything
    worker_memory: int | None = None  # bytes that a worker may allocate in addition to those it starts with
    timeout: float = 0  # seconds that the caller waits for a step before its worker is replaced; 0 for no limit
    persistent_workers: bool = False  # kept from one iteration to the next
    multiprocessing_context: BaseContext | None = None  # starts worker processes; None for an engine of the user's
    engine: OpensEngine | None = None  # the user's; None for threads or processes
    dataset: Any = None  # as in `torch.utils.data.get_worker_info()`
    in_turn: bool = False  # whether worker `step % num_workers` builds a step; else the one with the fewest jobs does
    num_ranks: int = 1
    base_seed: int = 0  # torch's seed of the iteration; the seed of worker k is `base_seed + k`
    reads: ReadBytes | None = None  # counts bytes that workers read from shards; None if samples are not in shards
    name_of: Callable[[int], str] = str  # row -> the sample's name in messages
    # Row -> why its sample must not be loaded; rows that prove bad are added.
    known_bad_rows: dict[int, str] = field(default_factory=dict)

    @property
    def forks(self) -> bool:
        """Whether worker processes are forked from this one."""
        context = self.multiprocessing_context
        return context is not None and context.get_start_method() == "fork"

    @property
    def sent(self) -> Workers:
        """What a worker gets of it."""
        return replace(self, multiprocessing_context=None, engine=None, reads=None, name_of=str, known_bad_rows={})


class OpensEngine(Protocol):
    """What `DataLoader(engine=...)` takes: a value that pickles."""

    def open(self, spec: BuildSpec, workers: Workers) -> Engine:
        """Return the engine that builds the steps of a spec, for one iteration or, with persistent workers, for more.

        What it raises ends the iteration.
        """


_MAX_DEPTH = 16
_WAY_OUT = (
    "Define it at the top level of a module, with functools.partial for its arguments, or pass multiprocessing_context="
    "'fork'; or build in this process, inline or with threads, where nothing is pickled"
)


def pickles(value: Any, dump: Callable[[Any], Any] = pickle.dumps) -> bool:
    try:
        dump(value)
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        return False
    return True


def explain_pickling(
    value: Any, error: Exception, *, pickles: Callable[[Any], bool] = pickles, way_out: str = _WAY_OUT
) -> None:
    """Raise TypeError if a member that does not pickle caused `error`: with its name and the way out.

    Args:
        pickles: whether a value can be pickled, by the pickler that raised.
    """
    if isinstance(error, OrchdataError) or pickles(value):
        return
    name, member = what_does_not_pickle(value, pickles)
    for ours in (".workers", ".spec", ".content", ".shards"):
        name = name.removeprefix(ours)
    raise TypeError(
        f"{name.removeprefix('.')} is {described(member)}, which cannot be sent to another process ({error}). {way_out}"
    ) from error


def pickle_container(container: object) -> bytes:
    """Return a container of the user's as bytes. Raises ContainerError that names the member that does not pickle."""
    try:
        return pickle.dumps(container, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        path, member = what_does_not_pickle(container, pickles)
        name = f"container {type(container).__qualname__}"
        what = f"{name}{path} is {described(member)}" if path else name
        raise ContainerError(
            f"{what}, which does not pickle, and worker processes get a copy ({error}). Define the class at the top "
            "level of a module, keep only plain values in it, and open files in open()"
        ) from error


def what_does_not_pickle(value: Any, pickles: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the innermost member that does not pickle, after the path to it, as in `.a[0]`."""
    path, member = "", value
    for _ in range(_MAX_DEPTH):
        inner = next(((part, each) for part, each in _members(member) if not pickles(each)), None)
        if inner is None:
            break
        path, member = path + inner[0], inner[1]
    return path, member


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a value, each with the path to it."""
    if isinstance(value, FunctionType | type):
        return
    if isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, partial):
        yield ".func", value.func
        yield from ((f".args[{number}]", member) for number, member in enumerate(value.args))
        yield from ((f".keywords[{name!r}]", member) for name, member in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", member) for number, member in enumerate(value))
    for name in (*_slots(value), *getattr(value, "__dict__", ())):
        if hasattr(value, name):
            yield f".{name}", getattr(value, name)


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def described(value: Any) -> str:
    """Return what a value is, as text."""
    if not isinstance(value, FunctionType):
        return f"an object of type {type(value).__name__}"
    code = value.__code__
    kind = "a lambda" if value.__name__ == "<lambda>" else f"the function {value.__qualname__}"
    return f"{kind} in line {code.co_firstlineno} of {code.co_filename}"


# Building in this process: in the thread that asks, or in others, several steps at a time; and pinning, in a thread.
#
# A pool of threads never keeps its process from ending. When the interpreter ends, it joins threads of
# `concurrent.futures` for ever, so that one that hangs (a lock never released, a dead mount) makes a failed job look as
# if it were running. These are daemon threads, and are joined with a time limit:
#
#     close:  nothing more is queued, and running tasks may end: CLOSE_SECONDS
#     exit:   the same for pools still open; then SystemExit is raised in threads that run Python: END_SECONDS together
#
# A thread that then remains is stuck outside Python, in a call that does not return.

CLOSE_SECONDS = 2.0
END_SECONDS = 2.0

_one_thread = threading.Lock()
_Queue = queue.SimpleQueue[Callable[[], None] | None]

_threads: weakref.WeakSet[PoolThread] = weakref.WeakSet()
_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


class PoolThread(threading.Thread):
    """Runs tasks from the queue `tasks` until it gets None."""

    def __init__(self, tasks: _Queue, prepare: Callable[[], None], number: int) -> None:
        super().__init__(name=f"orchdata_{number}", daemon=True)
        self.given_up = False  # whether `close` waited for its end in vain
        self.tasks = tasks
        self._prepare = prepare

    def run(self) -> None:
        self._prepare()
        while (task := self.tasks.get()) is not None:
            task()
            del task  # or its step would live until the next task


class ThreadPool:
    """Runs tasks on up to `num_threads` threads, each started when there is work for it; `prepare` is called first in
    each. Neither it nor a task may raise.
    """

    def __init__(self, num_threads: int, prepare: Callable[[], None]) -> None:
        self._num_threads = num_threads
        self._prepare = prepare
        self._tasks: _Queue = queue.SimpleQueue()
        self._started: list[PoolThread] = []
        self._closed = False
        self._lock = threading.Lock()
        # Threads refer to the queue, not to the pool, so that an unreferenced pool ends them.
        weakref.finalize(self, _stop, self._started).atexit = False
        _pools.add(self)

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task; a closed pool drops it."""
        with self._lock:
            if self._closed:
                return
            self._tasks.put(task)
            if len(self._started) == self._num_threads:
                return
            thread = PoolThread(self._tasks, self._prepare, len(self._started))
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads: those that exist do the work
                if not self._started:
                    raise
            else:
                self._started.append(thread)
                _threads.add(thread)

    def close(self) -> None:
        """Let threads end after the queued tasks, and wait for them CLOSE_SECONDS at most. A second call does nothing,
        nor does one while the interpreter ends.
        """
        if self._closed:
            return
        self.stop()
        _join(self._started, CLOSE_SECONDS)
        for thread in self._started:
            thread.given_up = thread.is_alive()

    def stop(self) -> None:
        """`close`, without waiting."""
        with self._lock:
            self._closed = True
        _stop(self._started)


def _stop(threads: Iterable[PoolThread]) -> None:
    """Let threads end after their tasks; their pool queues nothing more."""
    for thread in threads:
        thread.tasks.put(None)


def _join(threads: Iterable[PoolThread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():  # a pool thread may collect garbage
            thread.join(max(0.0, deadline - time.monotonic()))


def _forget_threads() -> None:
    """In a forked child: forget the threads, which do not exist there and would never release a lock."""
    for pool in list(_pools):
        pool._closed = True
    _pools.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_threads)


@atexit.register
def _end_threads() -> None:
    """Before the interpreter ends: a thread that returned to it later would abort the process."""
    for pool in list(_pools):
        pool.stop()
    running = [thread for thread in _threads if thread.is_alive()]
    try:
        _join([thread for thread in running if not thread.given_up], END_SECONDS / 2)
        running = [thread for thread in running if thread.is_alive()]
        for thread in running:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        _join(running, END_SECONDS / 2)
    finally:  # Ctrl-C included
        if any(thread.is_alive() for thread in running):
            _end_without_destructors()


def _end_without_destructors() -> None:
    """Let the process end right after Python, with Python's status: a thread may use what C libraries destroy then."""
    with contextlib.suppress(AttributeError, OSError):  # no such C library: it ends the usual way
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)  # registered last, so called first: flushes what C wrote


class InlineEngine(Engine):
    """Builds a step in the calling thread, when it is requested."""

    def __init__(self, builder: Builder) -> None:
        self.depth, self._builder = 0, builder

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        try:
            future.set_result(self._builder.build(task))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is passed on
            future.set_exception(error)
        try:
            return future
        finally:
            del future  # or this frame, which the error's traceback has, would refer to the error: a cycle


class ThreadEngine(Engine):
    """Runs the tasks of several steps, `depth` at the same time, on one pool of threads that read and decode.

    The thread that ends a step's last task finishes the step. Tasks wait for each other only for objects that one
    thread may use at a time (a tokenizer, a collate_fn).
    """

    def __init__(self, builder: Builder, *, num_threads: int, depth: int) -> None:
        self.depth = depth
        self._builder = builder
        self._closed = False
        self._planned: deque[tuple[Future[BuiltStep], StartedStep]] = deque()
        self._is_filling = False  # whether `_fill` is queued or runs
        self._lock = threading.Lock()
        self._pool = ThreadPool(num_threads, prepare=prepare_thread)

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        self._pool.submit(partial(self._start, future, task))
        return future

    def close(self) -> None:
        if not self._closed:
            self._closed = True  # queued tasks do nothing
            self._pool.close()

    def _start(self, future: Future[BuiltStep], task: StepTask) -> None:
        """Plan a step. It is filled after all queued tasks of the steps before it."""
        if self._closed:
            return
        try:
            started = self._builder.start(task)
        except BaseException as error:  # noqa: BLE001 - it is passed on
            future.set_exception(passed_on(error))
            return
        with self._lock:
            self._planned.append((future, started))
            is_next = not self._is_filling
            self._is_filling = True
        if is_next:
            self._pool.submit(self._fill)

    def _fill(self) -> None:
        """Queue the tasks of a planned step, and allocate memory, after the last task of the step before began."""
        if self._closed:
            return
        with self._lock:
            future, started = self._planned.popleft()
        try:
            run = _StepRun(started, future)
        except BaseException as error:  # noqa: BLE001 - it is passed on
            future.set_exception(passed_on(error))
        else:
            for fill in run.tasks:
                self._pool.submit(partial(self._run, run, fill))
            run.end_task()  # an extra task, so that the step cannot finish before all its tasks are queued
        with self._lock:
            self._is_filling = is_more = bool(self._planned)
        if is_more:
            self._pool.submit(self._fill)

    def _run(self, run: _StepRun, fill: Task) -> None:
        error: BaseException | None = None
        try:
            if not self._closed and not run.has_failed:
                fill()
        except BaseException as raised:  # noqa: BLE001 - it is passed on
            error = raised
        try:
            run.end_task(error)
        finally:
            del run, error  # or this frame, which the error's traceback has, would refer to the error: a cycle


class _StepRun:
    """Counts a step's open tasks: the last one finishes the step, the first exception fails it."""

    def __init__(self, started: StartedStep, future: Future[BuiltStep]) -> None:
        self.tasks = started.tasks
        self.has_failed = False
        self._future = future
        self._started = started
        self._open_tasks = len(started.tasks) + 1
        self._lock = threading.Lock()

    def end_task(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._open_tasks -= 1
            if self.has_failed:
                return
            self.has_failed = error is not None
            if error is None and self._open_tasks:
                return
        if error is None:
            try:
                self._future.set_result(self._started.finish())
            except BaseException as raised:  # noqa: BLE001 - it is passed on
                error = raised
        if error is not None:
            self._future.set_exception(passed_on(error))
            del self, error  # as in `ThreadEngine._run`


def prepare_thread() -> None:
    """Prepare a thread that builds or pins."""
    with contextlib.suppress(RuntimeError):  # if the system has no thread left, this one may be slower
        use_one_thread()


def use_one_thread() -> None:
    """Let torch's operations in this thread use this thread alone. Other threads, and later ones, keep their setting.

    A decoding thread calls it first, or torch's thread pools compete for the cores: with torch's default of one pool
    thread per core, operations of 1 ms were measured to take 40 ms on busy cores. A training thread must not.
    """
    with _one_thread:
        others = torch.get_num_threads()
        torch.set_num_threads(1)
        if others > 1:
            # The call sets this thread, and the default of later threads: another thread restores the default.
            restore = threading.Thread(target=torch.set_num_threads, args=(others,))
            restore.start()
            restore.join()


def passed_on(error: BaseException) -> Exception:
    """Return the error for the caller to raise: SystemExit or KeyboardInterrupt in a thread must not end the caller."""
    if isinstance(error, Exception):
        return error
    passed_on = RuntimeError(f"building a batch met {error!r}")
    passed_on.__cause__ = error
    return passed_on


class PinningEngine:
    """An engine that copies its steps to page-locked memory, in a separate thread ahead of delivery, as torch's loader
    does: tensors, containers of them, and objects with a method `pin_memory`.

    Create it in the training thread: the copies are for the current device of that thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.depth = engine.depth
        self.keeps_time = engine.keeps_time
        self._engine = engine
        self._built: dict[Future[BuiltStep], Future[BuiltStep]] = {}  # until they are done
        self._device = torch.accelerator.current_device_index()
        self._pool = ThreadPool(1, prepare=prepare_thread)

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        pinned: Future[BuiltStep] = Future()
        built = self._built[pinned] = self._engine.submit(task)
        pinned.add_done_callback(self._built.pop)
        built.add_done_callback(lambda done: self._pool.submit(partial(_pin, self._device, done, pinned)))
        return pinned

    def expect(self, future: Future[BuiltStep]) -> None:
        built = self._built.get(future)
        if built is not None:
            self._engine.expect(built)

    def take_notes(self) -> list[str]:
        return self._engine.take_notes()

    def close(self) -> None:
        self._engine.close()
        self._pool.close()


def can_pin() -> bool:
    """Return whether there is an accelerator to pin for; warn if there is none."""
    if torch.accelerator.is_available():
        return True
    warn_user("pin_memory has no effect: torch finds no accelerator")
    return False


def _pin(device: int, built: Future[BuiltStep], pinned: Future[BuiltStep]) -> None:
    try:
        step = built.result()
        torch.accelerator.set_device_index(device)
        pinned.set_result(replace(step, batches=[pin_memory(batch) for batch in step.batches]))
    except BaseException as error:  # noqa: BLE001 - it is passed on
        pinned.set_exception(passed_on(error))


class WorkerSeeds:
    """The base seeds of a loader's iterations, drawn from a generator; None for torch's default one.

    torch's loader draws one at each `iter()`, but for persistent workers only at the first: workers that are started
    `later`, after an error or for a state, have seeds derived from it.
    """

    def __init__(self, generator: torch.Generator | None, *, persistent: bool) -> None:
        self._generator = generator
        self._persistent = persistent
        self.later: torch.Generator | None = None

    def draw(self) -> int:
        """Draw the base seed of one more iteration, as torch's loader does at each `iter()`."""
        generator = self._generator if self.later is None else self.later
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        return self.follow(seed)

    def follow(self, base_seed: int) -> int:
        """Use this base seed for the next iteration: it is new, or a state has stored it."""
        if self.later is None and self._persistent:
            self.later = torch.Generator().manual_seed(base_seed)
        return base_seed


def seed_process(base_seed: int, number: int) -> int:
    """Set the random states of this process, worker `number`, as torch's workers have them. Returns its seed."""
    seed = base_seed + number
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(base_seed, number))  # noqa: NPY002
    return seed
