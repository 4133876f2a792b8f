"""What an actor gets of the trainer: the spec in a parcel, and the files that it refers to by path.

    file of the trainer --digest--> the same on a node: by its path, in its cache folder, or fetched once a node

The spec is pickled with what the main program defines, by value. An index comes from its `index_file`, if it has one
that the node can read. Other files come in pieces through Ray, which reads them on the trainer's node.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from orchdata.engines.engine import explain_pickling
from orchdata.engines.on_ray.compare import Expected
from orchdata.engines.work import WorkerSpec
from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import OrchdataError, StorageError, one_line
from orchdata.loaders.index.index import KIND, Index, Place
from orchdata.loaders.storage import cache as mapped_array
from orchdata.loaders.storage.atomic import lend, opened, opened_lent, replaced, write_at
from orchdata.loaders.storage.cache import CacheFolder, MappedArray
from orchdata.loaders.storage.sealed import Damaged, head_of
from orchdata.loaders.versions import TABLE_FORMAT

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
            cause = getattr(error, "cause", None) or error
            raise StorageError(
                file.path,
                f"cannot be read on the trainer's node, and this node has no copy: {one_line(cause)}",
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
