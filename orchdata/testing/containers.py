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
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from orchdata.engines.pickling import pickle_container
from orchdata.loaders.errors import ContainerError, FieldError, ShardError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import KINDS, OTHER
from orchdata.loaders.shards.container import Container, checked_containers, name_of
from orchdata.loaders.shards.facts_table import FactsTable
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LOCAL

__all__ = ["check_container"]

_CHILD: Final = """
import pickle, sys
path, given, url, samples = pickle.loads(sys.stdin.buffer.read())
sys.path[:] = path
from orchdata.testing.containers import _read
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
    url = LOCAL.identity(os.fspath(path))
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
    if not LOCAL.is_folder(url) and os.path.getsize(url) <= 64 << 20:
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
