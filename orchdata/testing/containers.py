"""For tests of your own: whether a container keeps what the library relies on.

    container, path --check_container--> its shards and samples are counted, or a ContainerError says what is wrong

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, TypeVar

from orchdata.engines.pickling import pickle_container
from orchdata.loaders.errors import ContainerError, DataError, FieldError, OrchdataError, ShardError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import OTHER
from orchdata.loaders.shards.builtin import Builtin
from orchdata.loaders.shards.facts_table import Facts
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.own.checks import check_description, shards_of
from orchdata.loaders.shards.own.shard import Container, OpenContext, name_of
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LOCAL

__all__ = ["CheckedContainer", "check_container"]

T = TypeVar("T")
AnyContainer = Container | Builtin
Members = list[tuple[int, int, int, str]]
Contents = list[list[bytes]]

_THREADS: Final = 8
_PROCESS_SECONDS: Final = 120
_MOST_DAMAGED_BYTES: Final = 64 << 20
"""Size up to which a file is copied, to cut it."""
_CHILD: Final = """
import pickle, sys
given = sys.stdin.buffer.read()
sys.path[:] = pickle.loads(given)["path"]
from orchdata.testing.containers import _contents_in_child
sys.stdout.buffer.write(_contents_in_child(given))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedContainer:
    """What `check_container` has read.

    Attributes:
        shards, samples, fields: how many there are.
        kinds: name of a field -> "text", a modality, or "other" if no built-in modality reads it.
    """

    shards: int
    samples: int
    fields: int
    kinds: dict[str, str]


def check_container(
    container: Container,
    path: str | os.PathLike[str],
    *,
    most_samples: int = 200,
    other_process: bool = True,
) -> CheckedContainer:
    """Check a container with a path that it reads, which must be good data.

    It must describe itself and pickle, claim the path and the shards that it lists, and give the same samples each
    time: when a shard is opened again, in any order, from several threads, and in another process. A closed shard
    leaves no file open. Cut and empty files must become errors of the data.

    Args:
        container: a value.
        path: a file or folder that it claims.
        most_samples: most samples of a shard that are read again; all are read once.
        other_process: also read the samples in a new Python process, which finds sets and hashes in another order; left
            out if the class is defined in the program itself (`__main__`).

    Raises:
        ContainerError: names the container, the shard, what is wrong, and what to do.
        StorageError: a file cannot be read now.
    """
    return check_any(container, os.fspath(path), most_samples=most_samples, other_process=other_process)


def check_any(
    container: AnyContainer,
    path: str,
    *,
    most_samples: int = 200,
    other_process: bool = True,
    damages: bool = True,
) -> CheckedContainer:
    """Check a container, as `check_container`; also one of the library's.

    Args:
        damages: whether to read cut files too.
    """
    check_description(container)
    _copy_of(container)
    shards = _listed(container, path)
    samples = fields = 0
    kinds: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="orchdata-check-") as folder:
        for shard in shards:
            check = _Check(container, shard, CacheFolder(Path(folder) / "cache"), most_samples)
            facts = check.facts()
            check.reading(facts, other_process=other_process)
            size = facts.meta.size
            if damages and size <= _MOST_DAMAGED_BYTES and not LOCAL.is_folder(shard):
                check.damage(Path(folder))
            samples += len(set(facts.table.sample))
            fields += len(facts.table)
            kinds |= _kinds_of(facts)
    return CheckedContainer(shards=len(shards), samples=samples, fields=fields, kinds=dict(sorted(kinds.items())))


def _copy_of(container: AnyContainer) -> AnyContainer:
    """Return a container as a worker process gets it. Raises ContainerError if it is not equal."""
    copy: AnyContainer = pickle.loads(pickle_container(container))  # noqa: S301 - made just now
    if copy.describe() != container.describe():
        raise ContainerError(
            f"{name_of(container)}: a pickled copy describes itself as something else: make it a frozen dataclass"
        )
    return copy


class _Check:
    """The checks of one shard."""

    def __init__(self, container: AnyContainer, url: str, cache: CacheFolder, most_samples: int) -> None:
        self._container = container
        self._url = LOCAL.identity(url)
        self._cache = cache
        self._most_samples = most_samples

    def facts(self) -> Facts:
        """Scan the shard twice, the second time by a pickled copy of the container, and compare."""
        first = self._scanned(self._container)
        if first.table.errors:
            row, reason = next(iter(first.table.errors.items()))
            raise self._wrong(f"sample {first.table.key[row]!r}, field {first.table.field[row]!r}: {reason}")
        again = self._scanned(_copy_of(self._container))
        for name in ("key", "sample", "field", "kind", "offset", "size", "encoding", "header0", "header1"):
            one, other = getattr(first.table, name), getattr(again.table, name)
            if one != other:
                row = next(
                    (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one)
                )
                at = (
                    f"row {row} of its fields has another {name}"
                    if row < len(one)
                    else "it has other samples or fields"
                )
                raise self._wrong(f"when it is opened again, {at}: keys() and sample() must give the same each time")
        return first

    def reading(self, facts: Facts, *, other_process: bool) -> None:
        """Read the samples in several ways, and compare."""
        samples = _members_of(facts)[: self._most_samples]
        with _no_open_files(self._wrong), closing(self._open(self._container)) as shard:
            in_order = self._read(shard, samples)
            for members, contents in zip(samples, in_order, strict=True):
                for member, data in zip(members, contents, strict=True):
                    self._equal("alone", [bytes(shard.read(*member))], [data], member)

            # In another order, from several threads, after it was opened again, and in another process.
            mixed = list(range(len(samples)))
            random.Random(0).shuffle(mixed)
            got = self._read(shard, [samples[at] for at in mixed])
            self._same("in another order", [got[mixed.index(at)] for at in range(len(samples))], in_order, samples)
            with ThreadPoolExecutor(_THREADS) as pool:
                for each in [pool.submit(self._read, shard, samples) for _ in range(_THREADS)]:
                    self._same("from several threads", each.result(), in_order, samples)
        with closing(self._open(self._container)) as shard:
            backwards = self._read(shard, samples[::-1])
            self._same("after it was opened again", backwards[::-1], in_order, samples)
        sends = other_process and type(self._container).__module__ != "__main__"  # a new process has another __main__
        if sends and digest_of(in_order) != self._in_other_process(samples):
            raise self._wrong(
                "another process reads other bytes: sample() must not depend on the order of a set, on hash(), on "
                "time, or on what the process did before"
            )

    def damage(self, folder: Path) -> None:
        """Read cut and empty copies of the file: errors of the data, and nothing else."""
        content = Path(self._url).read_bytes()
        for number, kept in enumerate((0, 1, len(content) // 2, len(content) - 1)):
            copy = folder / f"damaged-{number}" / Path(self._url).name
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(content[: max(0, kept)])
            if isinstance(self._container, Container) and not self._container.claims(str(copy)):
                return  # it claims by folder
            try:
                with closing(_opened(self._container, str(copy), self._cache)) as shard:
                    facts = shard.facts()
                    for members in _members_of(facts)[: self._most_samples]:
                        self._read_damaged(shard, members)
            except (ShardError, DataError):
                pass  # as it should be
            except Exception as error:
                raise self._wrong(
                    f"a copy that is cut after {kept} bytes raises {type(error).__name__}: {error}. Raise any other "
                    "exception from open(), keys() or sample() for damaged data"
                ) from error
            copy.unlink()

    def _read_damaged(self, shard: Shard, members: Members) -> None:
        with suppress(FieldError, ShardError):
            shard.read_many(members)

    def _scanned(self, container: AnyContainer) -> Facts:
        with _no_open_files(self._wrong), closing(self._open(container)) as shard:
            return self._called(shard.facts)

    def _open(self, container: AnyContainer) -> Shard:
        return self._called(lambda: _opened(container, self._url, self._cache))

    def _called(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except ShardError as error:
            raise ContainerError(str(error)) from error

    def _read(self, shard: Shard, samples: list[Members]) -> Contents:
        contents = []
        for members in samples:
            try:
                contents.append([bytes(data) for data in shard.read_many(members)])
            except FieldError as error:
                raise self._wrong(f"field {error.field!r}: {error.reason}") from error
        return contents

    def _same(self, how: str, got: Contents, wanted: Contents, samples: list[Members]) -> None:
        for one, other, members in zip(got, wanted, samples, strict=True):
            for data, expected, member in zip(one, other, members, strict=True):
                self._equal(how, [data], [expected], member)

    def _equal(self, how: str, got: list[bytes], wanted: list[bytes], member: tuple[int, int, int, str]) -> None:
        if got != wanted:
            raise self._wrong(
                f"field {member[3]!r} has other bytes when it is read {how}: sample() must give the same each time, "
                "no matter what was read before"
            )

    def _in_other_process(self, samples: list[Members]) -> bytes:
        given = {
            "path": sys.path,
            "container": pickle_container(self._container),
            "url": self._url,
            "cache": str(self._cache.root),
            "samples": samples,
        }
        child = subprocess.run(
            [sys.executable, "-c", _CHILD], input=pickle.dumps(given), capture_output=True, timeout=_PROCESS_SECONDS
        )
        if child.returncode:
            last = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise self._wrong(f"another process cannot read it: {last}")
        return child.stdout

    def _wrong(self, reason: str) -> ContainerError:
        return ContainerError(f"{self._url}: {name_of(self._container)}: {reason}")


def _listed(container: AnyContainer, path: str) -> list[str]:
    absolute = LOCAL.identity(path)
    if not isinstance(container, Container):
        if not container.claims(absolute) and not LOCAL.is_folder(absolute):
            raise ContainerError(f"{path}: {name_of(container)} does not claim it")
        return container.shards(LOCAL, absolute)
    shards, again = (shards_of([container], LOCAL, absolute) for _ in range(2))
    if shards is None:
        raise ContainerError(
            f"{path}: {name_of(container)}: claims() does not claim it: let it return True for this path"
        )
    if shards != again:
        raise ContainerError(f"{path}: {name_of(container)}: shards() returns other paths each time: sort them")
    if len(set(shards)) < len(shards):
        raise ContainerError(f"{path}: {name_of(container)}: shards() returns a path twice")
    return shards


def _opened(container: AnyContainer, url: str, cache: CacheFolder) -> Shard:
    if isinstance(container, Container):
        return open_shard(url, limits=Limits(), cache=cache, rules=FieldRules(container=container))
    return container.open(LOCAL.open(url), OpenContext(limits=Limits(), cache=cache), FieldRules())


def _members_of(facts: Facts) -> list[Members]:
    """Return the members of each sample that can be read."""
    table = facts.table
    rows = [row for row in range(len(table)) if row not in table.errors and table.field[row]]
    return [
        [(table.offset[row], table.size[row], table.encoding[row], table.field[row]) for row in group]
        for _, group in groupby(rows, key=lambda row: table.sample[row])
    ]


def _kinds_of(facts: Facts) -> dict[str, str]:
    from orchdata.loaders.modalities.builtin import KINDS

    named = zip(facts.table.field, facts.table.kind, strict=True)
    return {field: "other" if kind == OTHER else KINDS[kind] for field, kind in named if field}


def digest_of(contents: Contents) -> bytes:
    """Return a digest of the bytes of samples."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in contents:
        for data in sample:
            digest.update(f"{len(data)} ".encode() + data)
    return digest.digest()


def _contents_in_child(given: bytes) -> bytes:
    """Read samples in a new process, and return their digest."""
    values = pickle.loads(given)  # noqa: S301 - from the process that started this one
    container = pickle.loads(values["container"])  # noqa: S301 - the same
    with closing(_opened(container, values["url"], CacheFolder(values["cache"]))) as shard:
        try:
            return digest_of([[bytes(data) for data in shard.read_many(members)] for members in values["samples"]])
        except FieldError as error:
            raise OrchdataError(f"field {error.field!r}: {error.reason}") from error


@contextmanager
def _no_open_files(wrong: Callable[[str], ContainerError]) -> Iterator[None]:
    """Raise if files that the block opens stay open. It is only known on Linux."""
    before = _open_files()
    yield
    left = sorted(set(_open_files()) - set(before))
    if left:
        raise wrong(f"{left[0]} stays open after the shard was closed: close it in Shard.close()")


def _open_files() -> list[str]:
    """Return the regular files that this process has open."""
    folder = Path("/proc/self/fd")
    paths = []
    for link in folder.iterdir() if folder.is_dir() else ():
        try:
            path = os.readlink(link)
        except OSError:  # that of the listing itself
            continue
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
            paths.append(path)
    return paths
