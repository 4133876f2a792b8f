"""The actors of one rank: started with the user's options, and started again elsewhere to load samples alone.

What an actor sends: a message and the buffers of its units, which Ray keeps in shared memory.

    units --pack--> [message, *buffers] --Ray--> read-only buffers --unpack--> units in writable memory of this process

Ray's arrays are read-only, and one reader's are another's. So the trainer copies them, once, into memory that is used
again when the batches over it are gone.

Files of the trainer's cache folder that a spec refers to by path: the index, and large arrays.

file of the trainer --name and digest--> the same on a node: by its path, in its cache folder, or fetched once a node

An index comes from its `index_file`, if it has one that the node can read. Other files come in pieces through Ray,
which reads them on the trainer's node: the training process serves nothing.

A worker's spec on its way to other nodes: pickled with what the main program defines, by value.

Modules of the user's are imported on the node. One that is not there is an error that names it and the way out.

An actor: a worker in a process of Ray's, on any node. It opens the spec that it is sent, and builds steps.

Ray starts it again in another process if its own ends, and calls again what was under way: so it opens the spec when it
is first called, and each call can be the first. What goes wrong is returned as a message, and never raised: what Ray
raises is about processes.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from orchdata.building.step import BuiltStep
from orchdata.engines.engine import Engine, explain_pickling
from orchdata.engines.on_ray.cluster import outside_of_groups
from orchdata.engines.on_ray.compare import Expected, check_same, expected_by
from orchdata.engines.on_ray.deaths import cause_of
from orchdata.engines.processes.message import Unit, describe_step, describe_value
from orchdata.engines.threads import Job, passed_on
from orchdata.engines.work import Work, WorkerSpec, alone, sendable
from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import OrchdataError, StorageError, one_line
from orchdata.loaders.index.index import KIND, Index, Place
from orchdata.loaders.storage import cache as mapped_array
from orchdata.loaders.storage.atomic import lend, opened, opened_lent, replaced, write_at
from orchdata.loaders.storage.cache import CacheFolder, MappedArray
from orchdata.loaders.storage.sealed import Damaged, head_of
from orchdata.loaders.versions import TABLE_FORMAT
from orchdata.loaders.watch import IDLE, Watch, all_wait
from orchdata.order.steps import StepTask
from orchdata.ranks.wire import flat_bytes

_TASK_RETRIES: Final = 2
"""How often Ray calls an actor again that was lost, before we look for the reason."""

_SMALL_BYTES: Final = 64 << 10
ASK_SECONDS: Final = 1.0
"""How often an actor is asked whether it waits."""
ANSWER_SECONDS: Final = 10.0
"""An actor that does not answer for so long hangs."""
_ASKED: Final = "asked"
"""Group of calls that an actor answers while it builds."""


@dataclass(eq=False)
class Member:
    """One worker: an actor, and what it does.

    Attributes:
        actor: None while there is none.
        is_ready: whether it has opened the spec.
        jobs: under way, by number.
        asked: since when it has not answered whether it waits; None if it is not asked now.
        heard: when it answered last.
        address: of the node where it was ready.
    """

    number: int
    actor: Any = None
    is_ready: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)
    asked: float | None = None
    heard: float = 0.0
    address: str = ""


class Fleet:
    """Starts actors.

    Args:
        first: the spec of worker 0.
        options: of an actor, with Ray's names.

    Raises:
        TypeError: the spec does not pickle.
        ValueError: Ray does not know an option.
    """

    def __init__(self, first: WorkerSpec, options: dict[str, Any]) -> None:
        self.options = {"num_cpus": first.num_loading_threads, "scheduling_strategy": outside_of_groups()} | options
        self.members = [Member(number) for number in range(first.workers.num_workers)]
        self._first = first
        self._chooses_node = "scheduling_strategy" not in options
        self._concurrency = first.workers.prefetch_factor if first.workers.num_threads else 1
        self._expected = expected_by(first.spec)
        self._parcels = [self._put(replace(first, number=member.number)) for member in self.members]
        self._alone: Any = None

    def start(self, member: Member) -> None:
        """Give a worker an actor, which Ray starts again as often as needed."""
        member.is_ready, member.asked = False, None
        member.actor = self._actor(
            self.options
            | {
                "max_restarts": -1,
                "max_task_retries": _TASK_RETRIES,
                "max_concurrency": self._concurrency,
                # Else an actor that was lost waits for the calls that were given up meanwhile, and makes no other.
                "allow_out_of_order_execution": True,
            },
            member.number,
            self._parcels[member.number],
        )

    def start_alone(self, avoid: str | None) -> Any:
        """Return an actor that loads samples alone, and that Ray does not restart: not on this node, if another has
        room.
        """
        if self._alone is None:
            self._alone = self._put(alone(self._first))
        options = self.options | {"max_restarts": 0, "max_task_retries": 0}
        if avoid is not None and self._chooses_node and (other := _other_node(avoid)) is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                other, soft=True, _spill_on_unavailable=True
            )
        return self._actor(options, 0, self._alone)

    def end(self, member: Member) -> None:
        """End the actor of a worker, if it has one."""
        import ray

        if member.actor is not None:
            ray.kill(member.actor, no_restart=True)
        member.actor, member.is_ready = None, False

    def _put(self, worker: WorkerSpec) -> Any:
        """Return a worker's parcel as an argument of actors: large ones are sent once to a node."""
        import ray

        parcel = make_parcel(worker, self._expected)
        return parcel if len(parcel) <= _SMALL_BYTES else ray.put(parcel)

    def _actor(self, options: dict[str, Any], number: int, parcel: Any) -> Any:
        import ray

        # With a group of its own for questions, an actor does not run the others in its main thread.
        remote: Any = ray.remote  # its types do not know all options
        try:
            return remote(concurrency_groups={_ASKED: 1})(StepActor).options(**options).remote(number, parcel)
        except (ValueError, TypeError) as error:
            raise ValueError(f"RayEngine({', '.join(self.options)}): {one_line(error)}") from error


def ask_whether_it_waits(actor: Any) -> Any:
    """Ask an actor that builds a step: see `StepActor.waits`. Returns a reference to the answer."""
    return actor.waits.options(concurrency_group=_ASKED).remote()


def actor_state(actor: Any) -> str:
    """Return what Ray says of an actor: "ALIVE", "RESTARTING", "PENDING_CREATION" or "DEAD"."""
    from ray._private.state import actors

    return str(actors(actor._actor_id.hex()).get("State", ""))


def waits_for_room(actor: Any) -> bool:
    """Return whether no node has taken an actor yet."""
    from ray._private.state import actors

    known = actors(actor._actor_id.hex())
    return known.get("State") != "ALIVE" and not known.get("Address", {}).get("IPAddress")


def num_restarts(actor: Any) -> int:
    """Return how often Ray has started an actor again."""
    from ray._private.state import actors

    return int(actors(actor._actor_id.hex()).get("NumRestarts") or 0)


def _other_node(avoid: str) -> str | None:
    import ray

    nodes = (each["NodeID"] for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU"))
    return next((str(node) for node in nodes if node != avoid), None)


_ALIGNMENT: Final = 64

Bytes = NDArray[np.uint8]


def pack(message: dict[str, Any], units: Sequence[Unit]) -> list[Any]:
    """Return a message and its units as values that Ray sends without a copy of their buffers in the pickle."""
    heads = [(unit.kind, unit.header, len(unit.buffers)) for unit in units]
    return [message | {"units": heads}, *(flat_bytes(buffer) for unit in units for buffer in unit.buffers)]


def unpack(reply: list[Any], take: Callable[[int], Bytes]) -> tuple[dict[str, Any], list[Unit]]:
    """Return the message and the units that `pack` was given; their buffers are copies, in memory from `take`.

    Args:
        take: number of bytes -> writable memory, uint8.
    """
    message, *buffers = reply
    sizes = [-(-len(buffer) // _ALIGNMENT) * _ALIGNMENT for buffer in buffers]
    memory = take(sum(sizes))
    copies, start = [], 0
    for buffer, size in zip(buffers, sizes, strict=True):
        copy = memory[start : start + len(buffer)]
        copy[:] = buffer
        copies.append(copy)
        start += size
    left = iter(copies)
    return message, [
        Unit(kind, header, [next(left) for _ in range(number)]) for kind, header, number in message["units"]
    ]


_PIECE_BYTES: Final = 16 << 20
_AHEAD: Final = 3
"""Pieces that are read while another is written."""
_INDEX: Final = "index"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFile:
    """A file on the trainer's node.

    Attributes:
        kind: folder of the cache folder.
        digest: of an index that of its head, which has the checksums of its body; of an array that of its bytes.
        node: Ray's id of the trainer's node.
    """

    path: str
    kind: str
    size: int
    digest: str
    node: str


def file_of_index(index: Index, node: str) -> NodeFile:
    """Return what another node finds an index by."""
    with opened_lent(index.path, lend(index._fd)) as fd:
        head, size = head_of(fd, KIND, TABLE_FORMAT), os.fstat(fd).st_size
    return NodeFile(path=str(index.path), kind=_INDEX, size=size, digest=head.digest, node=node)


def file_of_array(array: MappedArray, node: str) -> NodeFile:
    """Return what another node finds an array by; its file is written. Raises StorageError."""
    path, digest, _ = array.__reduce__()[1]
    return NodeFile(path=path, kind=mapped_array.KIND, size=array.array.nbytes, digest=digest, node=node)


def open_index(file: NodeFile, fetch: Callable[[], Index] | None, place: Place | None) -> Index:
    """Return the index on this node. Raises what opening it raises, and StorageError if it cannot be fetched.

    Args:
        fetch, place: of the index: `fetch` makes a copy for this node from the file that the user named. The trainer's
            node is asked if there is none, or if it fails.
    """
    cache = CacheFolder()
    # The first actor of a node fetches a file, and verifies a large one; the others find it, and the note about it.
    with _claimed(cache, f"{file.digest}.opened"):
        path, failed = _there(file), None
        if path is None and fetch is not None:
            try:
                return fetch()
            except (OrchdataError, OSError, ValueError, ImportError) as error:
                failed = error
        try:
            return Index(path or copied(file, cache), place=place)
        except StorageError as error:
            raise error from failed


def open_array(file: NodeFile) -> MappedArray:
    """Return the array on this node. Raises as `open_index`."""
    return mapped_array._mapped(str(found(file)), file.digest)


def found(file: NodeFile) -> Path:
    """Return the path of a file on this node; it is fetched if no file here has its name and digest."""
    return _there(file) or copied(file, CacheFolder())


def _there(file: NodeFile) -> Path | None:
    """Return the path of a file that this node has; None if no file here has its name and digest."""
    given, folder = Path(file.path), CacheFolder().root / file.kind
    paths = (given, folder / given.name, folder / f"{file.digest}{given.suffix}")
    return next((path for path in paths if _is_same(file, path)), None)


def copied(file: NodeFile, cache: CacheFolder) -> Path:
    """Return the path of the copy in a cache folder, which is fetched by the first process that asks."""
    path = cache.file(file.kind, f"{file.digest}{Path(file.path).suffix}")
    with _claimed(cache, str(path)):
        if not _is_same(file, path):
            with replaced(path) as fd:
                _fetch(file, lambda data, start: write_at(fd, data.data, start))
            if not _is_same(file, path):
                raise StorageError(file.path, "has changed on the trainer's node while it was copied: try again")
    return path


@contextmanager
def _claimed(cache: CacheFolder, name: str) -> Iterator[None]:
    """Let one process of a node at a time work on what has this name."""
    with closing(Claims(cache.file("locks", "from-trainer"))) as claims, claims.claim(name, go_on=lambda: True):
        yield


def _is_same(file: NodeFile, path: Path) -> bool:
    try:
        with opened(path) as fd:
            if os.fstat(fd).st_size != file.size:
                return False
            return file.kind != _INDEX or head_of(fd, KIND, TABLE_FORMAT).digest == file.digest
    except (OSError, Damaged):
        return False


def _fetch(file: NodeFile, write: Callable[[NDArray[np.uint8], int], None]) -> None:
    """Have the trainer's node read a file, a few pieces at a time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(file.node, soft=False)
    read = ray.remote(_read_piece).options(num_cpus=0, scheduling_strategy=there)
    under_way: deque[tuple[int, Any]] = deque()
    starts = iter(range(0, file.size, _PIECE_BYTES))
    while True:
        for start in starts:
            under_way.append((start, read.remote(file.path, start, min(_PIECE_BYTES, file.size - start))))
            if len(under_way) > _AHEAD:
                break
        if not under_way:
            return
        start, piece = under_way.popleft()
        try:
            write(ray.get(piece), start)
        except ray.exceptions.RayError as error:
            raise StorageError(
                file.path,
                f"cannot be read on the trainer's node, and this node has no copy: {one_line(cause_of(error))}",
            ) from error


def _read_piece(path: str, start: int, size: int) -> NDArray[np.uint8]:
    with opened(Path(path)) as fd:
        data = os.pread(fd, size, start)
    if len(data) != size:
        raise OSError(f"{path} ends at byte {start + len(data)}")
    return np.frombuffer(data, np.uint8)


def make_parcel(worker: WorkerSpec, expected: Expected) -> bytes:
    """Return a worker's spec, and what the trainer expects of a node, as bytes.

    Raises TypeError that names the member that does not pickle.
    """
    out = io.BytesIO()
    try:
        _pickler(out).dump((worker, expected))
    except Exception as error:
        explain_pickling(worker, error, pickles=_pickles, way_out=_WAY_OUT)
        raise
    return out.getvalue()


def open_parcel(parcel: bytes) -> tuple[WorkerSpec, Expected]:
    """Return the spec that `make_parcel` was given, and what the trainer expects of this node.

    Raises:
        RuntimeError: something cannot be imported on this node.
        StorageError: the index cannot be fetched.
    """
    from ray import cloudpickle

    try:
        return cast("tuple[WorkerSpec, Expected]", cloudpickle.loads(parcel))
    except OrchdataError:
        raise
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"this node cannot import the module {error.name!r}, which the loader's arguments use: send the folder "
            "that has it with od.RayEngine(runtime_env={'working_dir': '.'}), or install it on every node"
        ) from error
    except Exception as error:
        raise RuntimeError(
            f"this node cannot unpickle the data set, or another argument of the loader ({type(error).__name__}: "
            f"{error}): all nodes need the same code. od.RayEngine(runtime_env={{'working_dir': '.'}}) sends a folder"
        ) from error


_WAY_OUT = (
    "Define it at the top level of a module, with functools.partial for its arguments; or build in this process, "
    "inline or with threads, where nothing is pickled"
)


def _pickler(out: io.BytesIO) -> Any:
    """Return a pickler that sends files of the cache folder by name and digest."""
    import ray
    from ray import cloudpickle as untyped

    cloudpickle: Any = untyped

    node = ray.get_runtime_context().get_node_id()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if type(value) is Index:
                return open_index, (file_of_index(value, node), value.fetch, value.place)
            if type(value) is MappedArray and value.array.size:
                return open_array, (file_of_array(value, node),)
            return super().reducer_override(value)

    return Pickler(out, protocol=5)


def _pickles(value: Any) -> bool:
    try:
        _pickler(io.BytesIO()).dump(value)
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        return False
    return True


OPENING_SECONDS: Final = 600.0
Reply = list[Any]


class StepActor:
    """Builds whole steps, as many at a time as Ray calls it.

    Args:
        number: of the worker.
        parcel: the worker's spec, from `parcel.make_parcel`.
    """

    def __init__(self, number: int, parcel: bytes) -> None:
        self._number = number
        self._parcel = parcel
        self._opening = threading.Lock()
        self._opens_since: float | None = None
        self._watch = Watch()
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._worker: WorkerSpec | None = None
        self._work: Work | None = None
        self._engine: Engine | None = None

    def start(self) -> Reply:
        """Open the spec. Returns "ready" with the id and address of the node, or "not started" with the error."""
        return self._failing("not started", self._open) or pack({"kind": "ready"} | _here(), [])

    def build(self, task: StepTask, known_bad_rows: dict[int, str]) -> Reply:
        """Build a step. Returns "built" with the units of `message.describe_step`, or "failed" with the error."""
        if failed := self._failing("not started", self._open):
            return failed
        assert self._engine is not None and self._work is not None
        self._watch.known_bad_rows.update(known_bad_rows)
        message: dict[str, Any] = {"kind": "built"}
        units: list[Unit] = []
        try:
            future: Future[BuiltStep] = self._engine.submit(task)
            units = describe_step(future.result())
        except BaseException as error:  # noqa: BLE001 - it is passed on
            message, units = {"kind": "failed"}, [self._described(passed_on(error))]
        message["reads"], message["requests"] = self._work.take_reads()
        return pack(message | {"finished": time.time()}, units)

    def load_alone(self, row: int) -> Reply:
        """Load one sample, and drop it: only whether this process survives it counts."""
        if failed := self._failing("not started", self._open):
            return failed
        assert self._work is not None and self._work.builder is not None
        with contextlib.suppress(BaseException):  # only an end of the process counts
            self._work.builder.load_alone(row)
        return pack({"kind": "survived"}, [])

    def waits(self) -> bool:
        """Return whether all threads wait for storage, or the spec is being opened, for 10 minutes at most. It can be
        called while steps are built.
        """
        since = self._opens_since
        if since is not None:
            return time.monotonic() - since < OPENING_SECONDS
        return all_wait(self._rows.tolist())

    def _open(self) -> None:
        with self._opening:
            if self._engine is not None:
                return
            self._opens_since = time.monotonic()
            try:
                self._open_spec()
            finally:
                self._opens_since = None

    def _open_spec(self) -> None:
        if self._worker is None:
            worker, expected = open_parcel(self._parcel)
            check_same(worker.spec, expected, _here()["address"])
            self._worker = worker
            self._rows = np.full(worker.num_loading_threads, IDLE, np.int64)
            self._watch = Watch(self._rows)
        if self._work is None:
            threads = self._worker.num_loading_threads
            self._work = Work(self._worker, max(1, len(os.sched_getaffinity(0)) // threads))
        self._engine = self._work.open(self._watch)

    def _failing(self, kind: str, call: Any) -> Reply | None:
        """Call it; return the error as a message if it raises, else None."""
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is passed on
            return pack({"kind": kind} | _here(), [self._described(passed_on(error))])
        return None

    def _described(self, error: Exception) -> Unit:
        where = f"in DataLoader worker process {self._number} on {_here()['address']}"
        return describe_value(sendable(error, where))


def _here() -> dict[str, str]:
    import ray

    return {"node": ray.get_runtime_context().get_node_id(), "address": ray.util.get_node_ip_address()}
