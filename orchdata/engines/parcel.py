"""What an actor gets of the trainer: the spec in a parcel, the files that it refers to by path, and what to compare.

    file of the trainer --digest--> the same on a node: by its path, in its cache folder, or fetched once a node
    versions, fingerprints, decoded samples --Expected--> each actor, as it starts: differences, in words

The spec is pickled with what the main program defines, by value. An index comes from its `index_file`, if it has one
that the node can read. Other files come in pieces through Ray, which reads them on the trainer's node. Another version,
or other code of the user's under the same id, would give other batches, and nothing else would say it.
"""

from __future__ import annotations

import io
import os
import platform
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.building.pages import IndexedShards, shard_loader
from orchdata.engines.engine import explain_pickling, pickles
from orchdata.engines.processes.worker import WorkerSpec
from orchdata.loaders.environment import OWN, distribution_of
from orchdata.loaders.errors import DataError, OrchdataError, ShardError, StaleIndexError, StorageError, one_line
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import KIND, Index, Place
from orchdata.loaders.index.table import TABLE_FORMAT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.sample import MediaPart, Sample
from orchdata.loaders.storage import cache as mapped_array
from orchdata.loaders.storage.cache import CacheFolder, MappedArray
from orchdata.loaders.storage.local import lend, opened, opened_lent, replaced, write_at
from orchdata.loaders.storage.sealed import Damaged, head_of

_PIECE_BYTES: Final = 16 << 20
_AHEAD: Final = 3
"""Pieces that are read while another is written."""
_INDEX: Final = "index"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFile:
    """A file on the trainer's node."""

    path: str
    kind: str  # folder of the cache folder
    size: int
    digest: str  # of an index that of its head, which has the checksums of its body; of an array that of its bytes
    node: str  # Ray's id of the trainer's node


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
    """Return the index on this node: `fetch` makes a copy from the file that the user named; the trainer's node is
    asked if there is none, or if it fails. Raises what opening it raises, and StorageError if it cannot be fetched.
    """
    cache = CacheFolder()
    # The first actor of a node fetches a file, and verifies a large one; the others find it, and the note about it.
    with cache.lock("from-trainer", f"{file.digest}.opened"):
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
    return mapped_array._mapped(str(_there(file) or copied(file, CacheFolder())), file.digest)


def _there(file: NodeFile) -> Path | None:
    """Return the path of a file that this node has; None if no file here has its name and digest."""
    given, folder = Path(file.path), CacheFolder().root / file.kind
    paths = (given, folder / given.name, folder / f"{file.digest}{given.suffix}")
    return next((path for path in paths if _is_same(file, path)), None)


def copied(file: NodeFile, cache: CacheFolder) -> Path:
    """Return the path of the copy in a cache folder, which is fetched by the first process that asks."""
    path = cache.file(file.kind, f"{file.digest}{Path(file.path).suffix}")
    with cache.lock("from-trainer", str(path)):
        if not _is_same(file, path):
            with replaced(path) as fd:
                _fetch(file, lambda data, start: write_at(fd, data.data, start))
            if not _is_same(file, path):
                raise StorageError(file.path, "has changed on the trainer's node while it was copied: try again")
    return path


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
        dump = partial(pickles, dump=lambda value: _pickler(io.BytesIO()).dump(value))
        explain_pickling(worker, error, pickles=dump, way_out=_WAY_OUT)
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


_ALWAYS: Final = ("orchdata", "ray", "torch", "numpy", "numba", "pyarrow")
_PIXELS: Final = ("image", "video")
_MOST_FOLDERS: Final = 8
_NEAR: Final = 1e-2
"""Relative difference of the mean size of floats that other CPUs may give; the values themselves are nearer."""

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the trainer has."""

    versions: Mapping[str, str]  # of packages and "Python", without the local part
    recipes: tuple[str, ...]  # fingerprints
    samples: Mapping[int, Facts]  # row -> what its parts decode to, see `_decoded`


_known: dict[tuple[str, tuple[str, ...]], Mapping[int, Facts]] = {}
"""Samples that this process has decoded, of the last index and recipes: each epoch may start actors."""


def expected_by(spec: Any) -> Expected:
    """Return what actors must have to build the steps of a spec as this process would. Raises as reading shards."""
    shards: IndexedShards | None = getattr(spec, "shards", None)
    recipes = () if shards is None else shards.recipes
    fingerprints = tuple(recipe.fingerprint() for recipe in recipes)
    samples: Mapping[int, Facts] = {}
    if shards is not None:
        key = shards.build_id, fingerprints
        if key not in _known:
            decoded = _samples(shards, _rows(shards.index, shards))
            _known.clear()
            _known[key] = decoded
        samples = _known[key]
    return Expected(versions=_versions(recipes), recipes=fingerprints, samples=samples)


def check_same(spec: Any, expected: Expected, address: str) -> None:
    """Raise RuntimeError if this process cannot read the data, or would build other steps than the trainer."""
    shards: IndexedShards | None = getattr(spec, "shards", None)
    recipes = () if shards is None else shards.recipes
    found = _versions(recipes)
    wrong = [
        f"{name} is {found.get(name, 'missing')} here and {there} in the training process"
        for name, there in expected.versions.items()
        if found.get(name) != there
    ]
    if tuple(recipe.fingerprint() for recipe in recipes) != expected.recipes:
        wrong.append("the recipe has another fingerprint here: a module that it uses differs")
    if not wrong and shards is not None:
        try:
            here = _samples(shards, list(expected.samples))
        except (ShardError, StorageError, StaleIndexError) as error:
            raise RuntimeError(
                f"node {address} cannot read the data as the training process does: {error}. All nodes need the shards "
                "under the same paths or URLs, and the credentials for them"
            ) from error
        wrong += [
            f"{shards.name_of(row)}: {name} are others"
            for row, there in expected.samples.items()
            for name in sorted(here[row].keys() | there.keys())
            if not _is_same_value(here[row].get(name), there.get(name))
        ]
    if wrong:
        raise RuntimeError(
            f"node {address} would build other batches than the training process: {'; '.join(wrong)}. Install the same "
            "packages and code on all nodes, or send code with od.RayEngine(runtime_env={'working_dir': '.'})"
        )


def _versions(recipes: Sequence[Recipe]) -> dict[str, str]:
    users: list[Any] = [user for recipe in recipes for user in (recipe.text, *recipe.modalities.values())]
    modules = {module.partition(".")[0] for user in users for module in user.required_modules()}
    names = {*_ALWAYS, *filter(None, map(distribution_of, sorted(modules - {OWN})))}
    versions = {"Python": platform.python_version()}
    for name in sorted(names):
        try:
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return versions


def _rows(index: Index, shards: IndexedShards) -> list[int]:
    """Return rows with one part of each modality, and the first of a shard in each folder or bucket."""
    first = getattr(index, "indexes", (index,))[0]  # of a mixture the first source
    bad = set(first.bad_rows()[: 1 << 16].tolist())
    rows: set[int] = set()
    for name in shards.recipe.modalities:
        rows.update(_first_with(first, name, bad))
    folders: dict[str, int] = {}
    for number, shard in enumerate(first.shards):
        start, stop = first.shard_rows[number : number + 2].tolist()
        folder = shard.url.rpartition("/")[0]
        usable = next((row for row in range(start, min(stop, start + 64)) if row not in bad), None)
        if folder not in folders and usable is not None:
            folders[folder] = usable
        if len(folders) == _MOST_FOLDERS:
            break
    return sorted(rows | set(folders.values()))


def _first_with(index: Index, modality: str, bad: set[int]) -> Iterator[int]:
    if modality not in index.modalities:
        return
    code = index.modalities.index(modality)
    for start in range(0, index.part_modality.size, 1 << 16):
        for part in np.flatnonzero(index.part_modality[start : start + (1 << 16)] == code)[:64].tolist():
            row = int(np.searchsorted(index.part_offsets, start + part, side="right")) - 1
            if row not in bad:
                yield row
                return


def _samples(shards: IndexedShards, rows: Sequence[int]) -> dict[int, Facts]:
    """Decode samples with a fixed generator. Raises what reading their shards raises.

    The global random generators are left as they were.
    """
    opened, python, numpy = shards.open(), random.getstate(), np.random.get_state()  # noqa: NPY002
    load = shard_loader(shards.index, opened, shards.recipe_of)
    try:
        with torch.random.fork_rng(devices=[]):
            return {row: _loaded(load, row) for row in rows}
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        opened.close()


def _loaded(load: Any, row: int) -> Facts:
    try:
        return _decoded(load(row, Pass()))
    except DataError as error:  # it is one of the loader's failures, there and here
        return {"failure": f"{error.field}: {error.reason}"}


def _decoded(sample: Sample) -> Facts:
    """Return what must be equal on all nodes: digests of what integers decide, and sizes of floats."""
    facts: Facts = {}
    for number, part in enumerate(sample.parts):
        if not isinstance(part, MediaPart):
            facts[f"text {number}"] = _digest(part.token_ids, part.loss)
            continue
        for name, values in part.arrays.items():
            about = f"{part.modality} {number}, {name}"
            exact = values.dtype.kind in "iub" or (part.modality in _PIXELS and _has_avx2())
            facts[f"{about}: shape"] = [*values.shape, str(values.dtype)]
            size = float(np.abs(values.astype(np.float64)).mean()) if values.size else 0.0
            facts[f"{about}: values"] = _digest(values) if exact else size
    return facts


def _digest(*arrays: np.ndarray[Any, Any]) -> str:
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _is_same_value(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return not abs(one - other) > _NEAR * max(abs(one), abs(other))  # NaN is NaN
    return bool(one == other)


@cache
def _has_avx2() -> bool:
    """Whether torch resizes floats as most processors do."""
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
