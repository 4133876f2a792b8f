"""A container of the user's: how its shards are found and opened, and what their samples are.

    path --claims--> this container --shards--> paths of shards --open--> Shard --keys, sample--> fields of each sample

The library does the rest: it scans a shard once, keeps what it learns, and calls `Shard.sample` for the samples of a
step, in any process and any order. `docs/containers.md` has complete examples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import dataclass_values, qualified
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.storage.remote.files import PLAIN_FILES, Files

if TYPE_CHECKING:
    from orchdata.loaders.shards.own.source import ShardSource
    from orchdata.loaders.storage.storage import FileSystem


class ByteRange(NamedTuple):
    """A field that is stored as it is: `size` bytes from `offset` of the shard's own file. The library reads it."""

    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenContext:
    """What a shard may need besides its file.

    Attributes:
        limits: of the recipe. The library applies them to every field; a container may stop earlier.
        cache: folder for files that can be made again.
        media_root: folder of files that shards name; None for none.
        moved_media: whether these files were in another folder when the shard was indexed.
        reads: counts bytes; what is read from the shard's source is counted already. None: nothing is counted.
        files: opens other files, and objects of storage.
    """

    limits: Limits
    cache: CacheFolder
    media_root: str | None = None
    moved_media: bool = False
    reads: ReadBytes | None = None
    files: Files = PLAIN_FILES


class Shard:
    """An open shard of a container of yours. Subclass it; `Container.open` returns it.

    Attributes:
        parallel: whether several threads may call `sample` at the same time. If not, the library calls it from one
            thread at a time, though not always from the same one.
    """

    parallel: ClassVar[bool] = False

    def keys(self) -> Iterable[str]:
        """Return the key of each sample, in order. Keys are unique in a shard. Called when the shard is indexed."""
        raise NotImplementedError(f"{type(self).__qualname__} must define keys()")

    def sample(self, number: int) -> Mapping[str, Any]:
        """Return the fields of a sample by name. It must return the same each time, in every process.

        A value is one of these:

        - bytes: a file, such as a JPEG. The name says what it is ("jpg", "flac", "image"), or else its first bytes.
        - str: text.
        - ByteRange: bytes of the shard's own file, which the library reads.
        - a list of bytes or of ByteRanges: fields "name.0", "name.1", ...
        - a number, or a list or dict of JSON's types: a chat, or a value for `Recipe.record` and `Recipe.keep`.
        - None: no such field.

        An exception fails the sample, not the shard.

        Args:
            number: of the sample, from 0, in the order of `keys`.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define sample()")

    def close(self) -> None:
        """Close what the shard opened itself. The library closes its source. Nothing is called afterwards."""


class Container:
    """A kind of shard. Subclass it as a frozen dataclass; its fields are its parameters.

    It must pickle (so define it in a module, not in a function). `describe` is part of the identity of a data set:
    another description is another data set, which is indexed again.

    Attributes:
        version: raise it when the same files give other samples.
    """

    version: ClassVar[int] = 1

    def claims(self, path: str) -> bool:
        """Return whether this container reads a path: one that the user gives, or a shard. Decide by the name alone.

        Args:
            path: absolute.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define claims()")

    def shards(self, storage: FileSystem, path: str) -> list[str]:
        """Return the shards of a path that the user gives, in order; `claims` is true for each. Default: the path.

        Args:
            storage: lists folders: `storage.is_folder(path)`, `storage.names(path)`.
        """
        return [path]

    def open(self, source: ShardSource, context: OpenContext) -> Shard:
        """Return an open shard. An exception fails the shard.

        Args:
            source: the bytes of the shard. It stays open as long as the shard.
            context: limits, cache folder, and more.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define open()")

    def describe(self) -> dict[str, Any]:
        """Return everything that its samples depend on, JSON-safe. Default: its class, version and dataclass fields."""
        values = dataclass_values(self, "the identity of the data set", "describe()")
        return {"class": qualified(type(self)), "version": self.version, **values}


def name_of(container: object) -> str:
    """Return the name of a container for messages."""
    return f"container {type(container).__qualname__}"


def identity_of(container: Container) -> str:
    """Return the digest of a container's description, 32 hex digits."""
    described = json.dumps(container.describe(), sort_keys=True, allow_nan=False)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()
