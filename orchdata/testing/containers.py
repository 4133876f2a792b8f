"""For tests of your own: whether a container keeps what the library relies on.

It needs no test framework: call it in a test, or in a script.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import Final

from orchdata.engines.pickling import pickle_container
from orchdata.loaders.errors import ContainerError, FieldError, ShardError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import KINDS, OTHER
from orchdata.loaders.shards.facts_table import FactsTable
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.own.shard import Container, checked_containers, name_of
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LOCAL

__all__ = ["check_container"]

Members = list[tuple[int, int, int, str]]

_THREADS: Final = 8
_PROCESS_SECONDS: Final = 120
_MOST_DAMAGED_BYTES: Final = 64 << 20
"""Size up to which a file is copied, to cut it."""
_CHILD: Final = """
import pickle, sys
path, given, url, samples = pickle.loads(sys.stdin.buffer.read())
sys.path[:] = path
from orchdata.testing.containers import _digest, _opened
sys.stdout.buffer.write(_digest(_opened(pickle.loads(given), url), samples))
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
    url = LOCAL.identity(os.fspath(path))
    where = f"{url}: {name_of(container)}"
    checked_containers([container])
    given = pickle_container(container)
    copy: Container = pickle.loads(given)  # noqa: S301 - made just now
    if copy.describe() != container.describe():
        raise ContainerError(f"{where}: a pickled copy describes itself as something else: make it a frozen dataclass")
    if not container.claims(url):
        raise ContainerError(f"{where}: claims() does not claim it: let it return True for this path")
    try:
        table, again = (_facts(_opened(each, url)) for each in (container, copy))
        if table.errors:
            row, reason = next(iter(table.errors.items()))
            raise ContainerError(f"{where}: sample {table.key[row]!r}, field {table.field[row]!r}: {reason}")
        if table != again:
            raise ContainerError(f"{where}: facts() and read() must give the same each time")
        samples = _members_of(table)[:most_samples]
        digest = _digest(_opened(container, url), samples)
        mixed = random.Random(0).sample(samples, len(samples))
        with closing(_opened(copy, url)) as shard, ThreadPoolExecutor(_THREADS) as pool:
            found = dict(zip(map(repr, mixed), pool.map(shard.read_many, mixed), strict=True))
        if digest != _digest_of([found[repr(each)] for each in samples]):
            raise ContainerError(f"{where}: read() returns other bytes in another order, or from several threads")
        # A new process has another __main__.
        if other_process and type(container).__module__ != "__main__":
            asked = pickle.dumps((sys.path, given, url, samples))
            command = [sys.executable, "-c", _CHILD]
            child = subprocess.run(command, input=asked, capture_output=True, timeout=_PROCESS_SECONDS, check=False)
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
    if not LOCAL.is_folder(url) and os.path.getsize(url) <= _MOST_DAMAGED_BYTES:
        _check_damaged(container, Path(url), where)
    named = zip(table.field, table.kind, strict=True)
    return {field: "other" if kind == OTHER else KINDS[kind] for field, kind in sorted(named) if field}


def _check_damaged(container: Container, path: Path, where: str) -> None:
    """Read cut and empty copies of a file: errors of the data, and nothing else."""
    content = path.read_bytes()
    with tempfile.TemporaryDirectory(prefix="orchdata-check-") as folder:
        copy = Path(folder) / path.name
        for kept in (0, 1, len(content) // 2, len(content) - 1) if container.claims(str(copy)) else ():
            copy.write_bytes(content[:kept])
            try:
                with suppress(ShardError):
                    _facts(_opened(container, str(copy)))
            except Exception as error:
                raise ContainerError(
                    f"{where}: a copy that is cut after {kept} bytes raises {type(error).__name__}: {error}. Raise any "
                    "other exception from open(), facts() or read() for damaged data"
                ) from error


def _opened(container: Container, url: str) -> Shard:
    return open_shard(url, limits=Limits(), cache=CacheFolder(), rules=FieldRules(container=container))


def _facts(shard: Shard) -> FactsTable:
    with closing(shard):
        return shard.facts().table


def _members_of(table: FactsTable) -> list[Members]:
    """Return the members of each sample."""
    rows = [row for row in range(len(table)) if table.field[row]]
    return [
        [(table.offset[row], table.size[row], table.encoding[row], table.field[row]) for row in group]
        for _, group in groupby(rows, key=lambda row: table.sample[row])
    ]


def _digest(shard: Shard, samples: Sequence[Members]) -> bytes:
    """Read samples, and return a digest of their bytes."""
    with closing(shard):
        return _digest_of([shard.read_many(members) for members in samples])


def _digest_of(contents: Sequence[Sequence[bytes | memoryview]]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for data in (data for sample in contents for data in sample):
        digest.update(f"{len(data)} ".encode() + bytes(data))
    return digest.digest()
