"""For tests of your own: whether a container, or an engine, keeps what the library relies on.

It needs no test framework: call `check_container` or `check_engine` in a test, or in a script.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import fields, is_dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from orchdata.dataloader import DataLoader
from orchdata.engines.engine import OpensEngine, pickle_container
from orchdata.loaders.errors import ContainerError, FieldError, ShardError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import KINDS, OTHER
from orchdata.loaders.shards.container import Container, checked_containers, name_of
from orchdata.loaders.shards.fields import FieldRules
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.shard import FactsTable, Shard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import is_folder
from orchdata.loaders.storage.remote.urls import identity

_EPOCHS: Final = 2


class CheckedEngine(NamedTuple):
    """What `check_engine` has compared.

    Attributes:
        batches: compared to the bit.
        states: states that were resumed.
        failures: samples that failed, alike in both.
    """

    batches: int
    states: int
    failures: int


def check_engine(
    engine: OpensEngine, dataset: Any, *, num_workers: int = 2, num_threads: int = 1, **options: Any
) -> CheckedEngine:
    """Check an engine with a data set, whose epochs it must build as this thread does.

    Batches must be equal to the bit and in order, in two epochs. They must be memory of the caller: what is written
    into one changes no other. A state must resume with the batches that follow it. An epoch that is left early, and one
    in which the caller is slow, must leave nothing to the next. The same samples must fail. The engine's value must
    pickle, and a loader that uses it must close, twice.

    Args:
        engine: as of `DataLoader(engine=)`.
        dataset: as of `DataLoader`, with at least 3 batches an epoch.
        num_workers, num_threads: as of `DataLoader`, for the engine.
        options: of both loaders, such as `batch_size=`, `seed=` and `on_error=`.

    Raises:
        AssertionError: says what differs.
        ValueError: the data set has fewer than 3 batches.
    """
    copy = pickle.loads(pickle.dumps(engine))  # noqa: S301 - made just now
    _expect(type(copy) is type(engine), "the engine does not pickle as a value of its own class")
    here = DataLoader(dataset, **options)
    expected = [[_copied(batch) for batch in here] for _ in range(_EPOCHS)]
    if len(expected[0]) < 3:
        raise ValueError(f"an epoch has {len(expected[0])} batches: check an engine with at least 3")
    there = {"num_workers": num_workers, "num_threads": num_threads, "engine": engine, **options}

    # Epochs, with batches that are overwritten as soon as they were compared.
    with closing(DataLoader(dataset, **there)) as loader:
        for epoch, batches in enumerate(expected):
            _compare(iter(loader), batches, f"epoch {epoch}")
        failed = [failure.key for failure in loader.gather_failures()]
        _expect(failed == [failure.key for failure in here.gather_failures()], f"other samples failed: {failed}")
        loader.close()

    # A state, from the middle of an epoch that is then left.
    with closing(DataLoader(dataset, **there)) as loader:
        iterator = iter(loader)
        _compare(islice(iterator, 2), expected[0][:2], "the beginning of an epoch")
        state = loader.state_dict()
        del iterator
    for where, how in (("the engine", there), ("this thread", options)):
        with closing(DataLoader(dataset, **how)) as loader:
            loader.load_state_dict(state)
            _compare(iter(loader), expected[0][2:], f"the rest of the epoch, resumed in {where}")
    return CheckedEngine(sum(map(len, expected)), 2, len(failed))


def _compare(batches: Iterator[Any], expected: list[Any], what: str) -> None:
    """Compare batches with copies of the expected ones, and overwrite each of them."""
    count = 0
    for number, batch in enumerate(batches):
        _expect(number < len(expected), f"{what} has more than {len(expected)} batches")
        wrong = _difference(_copied(batch), expected[number])
        _expect(wrong is None, f"{what}: batch {number} differs: {wrong}")
        for name, leaf in _leaves(batch):
            _overwrite(leaf, f"{what}: batch {number}: {name}")
        count += 1
    _expect(count == len(expected), f"{what} has {count} batches in place of {len(expected)}")


def _overwrite(leaf: Any, name: str) -> None:
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        _expect(leaf.flags.writeable, f"{name} is read-only: copy it into memory of the caller")
        leaf[...] = np.zeros((), leaf.dtype)
    elif isinstance(leaf, torch.Tensor):
        _expect(leaf.is_leaf or not leaf.requires_grad, f"{name} has a history")
        try:
            leaf.zero_()
        except RuntimeError as error:
            raise AssertionError(f"{name} cannot be written to: {error}") from error


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a batch, in order, with its name."""
    inner: list[tuple[Any, Any]] = []
    if is_dataclass(value) and not isinstance(value, type):
        inner = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    if not inner:
        yield name, value
    for key, each in inner:
        yield from _leaves(each, f"{name}.{key}" if name else str(key))


def _copied(batch: Any) -> list[tuple[str, Any]]:
    """Return copies of all leaves of a batch, in order."""

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return [(name, copy_of(leaf)) for name, leaf in _leaves(batch)]


def _difference(batch: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> str | None:
    """Return how two batches differ; None if they are equal to the bit."""
    names, wanted = [name for name, _ in batch], [name for name, _ in expected]
    if names != wanted:
        return f"it has {sorted(set(names) ^ set(wanted))!r:.200} more or less"
    for (name, one), (_, other) in zip(batch, expected, strict=True):
        if type(one) is not type(other) or not _is_equal(one, other):
            return f"{name} is {one!r:.200} in place of {other!r:.200}"
    return None


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two leaves are equal, arrays and tensors to the bit."""
    if isinstance(one, torch.Tensor) and one.layout == torch.strided and not one.is_quantized:
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and pickle.dumps(one) == pickle.dumps(other)
    return bool(one == other) or repr(one) == repr(other)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


__all__ = ["check_container"]

_CHILD: Final = """
import pickle, sys
path, given, url, samples = pickle.loads(sys.stdin.buffer.read())
sys.path[:] = path
from orchdata.testing import _read
sys.stdout.buffer.write(_read(pickle.loads(given), url, samples))
"""


def check_container(
    container: Container, path: str | os.PathLike[str], *, most_samples: int = 200, other_process: bool = True
) -> dict[str, str]:
    """Check a container with a shard of good data. Return name of a field -> "text", a modality, or "other".

    It must pickle, claim the path, and give the same samples each time: when the shard is opened again, in any order,
    from several threads, and in another process. Cut and empty files must become errors of the data.

    Args:
        container: a value.
        path: a file or folder that it claims.
        most_samples: most samples that are read again; all are read once.
        other_process: also read the samples in a new Python process, which finds sets and hashes in another order; left
            out if the class is defined in the program itself (`__main__`).

    Raises:
        ContainerError: names the container, the shard, what is wrong, and what to do.
        StorageError: a file cannot be read now.
    """
    url = identity(os.fspath(path))
    where = f"{url}: {name_of(container)}"
    checked_containers([container])
    given = pickle_container(container)
    copy: Container = pickle.loads(given)  # noqa: S301 - made just now
    if not container.claims(url):
        raise ContainerError(f"{where}: claims() does not claim it: let it return True for this path")
    try:
        table = _facts(container, url)
        for row, reason in table.errors.items():
            raise ContainerError(f"{where}: sample {table.key[row]!r}, field {table.field[row]!r}: {reason}")
        if table != _facts(copy, url):
            raise ContainerError(f"{where}: facts() and read() must give the same each time")
        members = list(zip(table.offset, table.size, table.encoding, table.field, strict=True))
        samples = [[members[row] for row in rows] for _, rows in groupby(range(len(table)), table.sample.__getitem__)]
        digest = _read(container, url, samples[:most_samples])
        if digest != _read(copy, url, samples[:most_samples], threads=8):
            raise ContainerError(f"{where}: read() returns other bytes in another order, or from several threads")
        # A new process has another __main__.
        if other_process and type(container).__module__ != "__main__":
            asked = pickle.dumps((sys.path, given, url, samples[:most_samples]))
            command = [sys.executable, "-c", _CHILD]
            child = subprocess.run(command, input=asked, capture_output=True, timeout=120, check=False)
            if child.stdout != digest:
                last = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                raise ContainerError(
                    f"{where}: another process cannot read it, or reads other bytes: read() must not depend on the "
                    f"order of a set, on hash(), on time, or on what the process did before. {last}"
                )
    except FieldError as error:
        raise ContainerError(f"{where}: field {error.field!r}: {error.reason}") from error
    except ShardError as error:
        raise ContainerError(str(error)) from error
    if not is_folder(url) and os.path.getsize(url) <= 64 << 20:
        _check_damaged(container, Path(url), where)
    named = zip(table.field, table.kind, strict=True)
    return {field: "other" if kind == OTHER else KINDS[kind] for field, kind in sorted(named)}


def _check_damaged(container: Container, path: Path, where: str) -> None:
    """Read cut and empty copies of a file: errors of the data, and nothing else."""
    content = path.read_bytes()
    with tempfile.TemporaryDirectory(prefix="orchdata-check-") as folder:
        copy = Path(folder) / path.name
        for kept in (0, 1, len(content) // 2, len(content) - 1) if container.claims(str(copy)) else ():
            copy.write_bytes(content[:kept])
            try:
                with suppress(ShardError):
                    _facts(container, str(copy))
            except Exception as error:
                raise ContainerError(
                    f"{where}: a copy that is cut after {kept} bytes raises {type(error).__name__}: {error}. Raise any "
                    "other exception from open(), facts() or read() for damaged data"
                ) from error


def _opened(container: Container, url: str) -> closing[Shard]:
    return closing(open_shard(url, limits=Limits(), cache=CacheFolder(), rules=FieldRules(container=container)))


def _facts(container: Container, url: str) -> FactsTable:
    with _opened(container, url) as shard:
        return shard.facts().table


def _read(container: Container, url: str, samples: list[Any], threads: int = 1) -> bytes:
    """Read samples, and return a digest of their bytes; with several threads in a mixed order."""
    order = range(len(samples)) if threads == 1 else random.Random(0).sample(range(len(samples)), len(samples))
    with _opened(container, url) as shard, ThreadPoolExecutor(threads) as pool:
        found = dict(zip(order, pool.map(lambda number: shard.read_many(samples[number]), order), strict=True))
    return hashlib.sha256(repr([list(map(bytes, found[number])) for number in sorted(found)]).encode()).digest()
