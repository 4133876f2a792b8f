"""Engine: runs the tasks of steps. All engines build the same batches.

Engines of this process run tasks themselves. Engines with workers hand jobs to a thread, which gives them to workers
(`supervisor.WorkerEngine`).

Names the members of a BuildSpec, or of a batch, that do not pickle and so cannot be sent to another process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.context import BaseContext
from types import FunctionType, MethodType
from typing import Any, Final, Protocol

from orchdata.building.step import BuildSpec, BuiltStep
from orchdata.loaders.errors import ContainerError, OrchdataError
from orchdata.loaders.storage.storage import ReadBytes
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
