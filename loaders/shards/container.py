"""A container of the user's: which paths it reads, and how one is opened.

path --claims--> this container --open--> Shard --facts--> keys and fields of its samples --read--> some of these

The library does the rest: it reads a shard once, keeps what it learns, and calls `Shard.read` for the samples of a
step, in any process and any order. `docs/containers.md` has complete examples.
"""

from __future__ import annotations

import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Protocol

from orchdata.loaders.errors import ContainerError
from orchdata.loaders.modalities.modality import dataclass_values, qualified
from orchdata.loaders.storage.local import LocalFolder
from orchdata.loaders.storage.storage import Storage, StorageFile

if TYPE_CHECKING:
    import pyarrow as pa


class ShardSource:
    """The bytes of a shard. Safe from many threads.

    Attributes:
        url: path of the file or folder. Of a folder there is nothing else to read from.
        size: its bytes; for a folder, of all files below it.
    """

    def __init__(self, storage: Storage | LocalFolder) -> None:
        self.url, self.size = storage.url, storage.size
        self._storage = storage

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer only at the end of the file."""
        return self._storage.read(offset, size)

    def file(self) -> BinaryIO:
        """Return a new file object for reading, as `zipfile`, `numpy.load` and `h5py` take it.

        It has a position, so one file object is not for several threads at the same time.
        """
        return io.BufferedReader(StorageFile(self._storage), 1 << 16)


class Shard(Protocol):
    """An open shard of a container of yours. The library calls it from one thread at a time.

    If it has a method `close`, that is called at the end.
    """

    def facts(self) -> pa.Table:
        """Return a table with a row for each field of each sample. The rows of a sample follow one another.

        Its columns are `key`, of the sample, and `field`, the name of the field: what a tar would call key.field.
        """
        ...

    def read(self, rows: Sequence[int]) -> Sequence[bytes | str]:
        """Return the contents of some rows of a sample. They must be the same each time, in every process.

        The name of a field says what it is ("jpg", "flac", "txt", "json"), or else its first bytes. An exception fails
        the sample, not the shard.
        """
        ...


class Container(ABC):
    """A kind of shard. Subclass it as a frozen dataclass; its fields are its parameters.

    It must pickle (so define it in a module, not in a function). `describe` is part of the identity of a data set:
    another description is another data set, which is indexed again.

    Attributes:
        version: raise it when the same files give other samples.
    """

    version: ClassVar[int] = 1

    @abstractmethod
    def claims(self, path: str) -> bool:
        """Return whether this container reads a file or folder. Decide by the name alone.

        Args:
            path: absolute.
        """

    @abstractmethod
    def open(self, source: ShardSource) -> Shard:
        """Return an open shard. An exception fails the shard.

        Args:
            source: the bytes of the shard. It stays open as long as the shard.
        """

    def describe(self) -> dict[str, Any]:
        """Return everything that its samples depend on, JSON-safe. Default: its class, version and dataclass fields."""
        values = dataclass_values(self)
        return {"class": qualified(type(self)), "version": self.version, **values}


@dataclass(frozen=True)
class TextFiles(Container):
    """A container for text files that are one document each; without it, each line of a `.txt` file is a sample.

    Each file is a shard with one sample: text in UTF-8, whose key is the name of the file without its suffix. It is for
    thousands of long documents. Millions of short ones are read faster as lines of JSON: `{"text": ...}`.

    Args:
        suffixes: of the files; a suffix with `.gz` is decompressed.

    Raises:
        ValueError: no suffix, or one without its dot.
    """

    suffixes: tuple[str, ...] = (".txt", ".txt.gz")

    def __post_init__(self) -> None:
        if isinstance(self.suffixes, str) or not self.suffixes or not all(each[:1] == "." for each in self.suffixes):
            raise ValueError(f'suffixes is a tuple of suffixes with dots, as in (".txt", ".md"), got {self.suffixes!r}')

    def claims(self, path: str) -> bool:
        return path.lower().endswith(tuple(each.lower() for each in self.suffixes))

    def open(self, source: ShardSource) -> Shard:
        name = PurePath(source.url).name
        suffix = max((each for each in self.suffixes if name.lower().endswith(each.lower())), key=len)
        return _Document(source, name[: -len(suffix)] or name, "txt.gz" if suffix.lower().endswith(".gz") else "txt")


@dataclass(frozen=True)
class _Document:
    """A file as a shard with one sample."""

    source: ShardSource
    key: str
    field: str

    def facts(self) -> pa.Table:
        import pyarrow as pa

        return pa.table({"key": [self.key], "field": [self.field]})

    def read(self, rows: Sequence[int]) -> list[bytes]:
        return [self.source.read(0, self.source.size) for _ in rows]


def name_of(container: object) -> str:
    """Return the name of a container for messages."""
    return f"container {type(container).__qualname__}"


def identity_of(container: Container) -> str:
    """Return the digest of a container's description, 32 hex digits."""
    described = json.dumps(container.describe(), sort_keys=True, allow_nan=False)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def checked_containers(containers: Iterable[Container]) -> tuple[Container, ...]:
    """Return them as a tuple. Raises ContainerError for one that cannot be described, TypeError for no container."""
    checked = tuple(containers) if isinstance(containers, Iterable) else None
    if checked is None or not all(isinstance(each, Container) for each in checked):
        raise TypeError(f"containers is a list of values of subclasses of od.Container, got {containers!r:.200}")
    for each in checked:
        try:
            identity_of(each)
        except Exception as error:
            raise ContainerError(f"{name_of(each)}: describe() raised {type(error).__name__}: {error}") from error
    return checked


def container_of(containers: Sequence[Container], path: str) -> Container | None:
    """Return the container of the user's that claims a path; None if none does. Raises ContainerError if two do."""
    claiming = [each for each in containers if each.claims(path)]
    if len(claiming) > 1:
        names = " and ".join(map(name_of, claiming))
        raise ContainerError(f"{path}: {names} both claim it: let claims() of only one return True for this path")
    return claiming[0] if claiming else None
