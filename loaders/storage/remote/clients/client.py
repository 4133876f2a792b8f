"""Clients: one attempt of each request to a bucket, container or host. Errors are `Trouble`, without secrets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from orchdata.loaders.storage.storage import FileVersion

Buffer = bytes | memoryview


class Answer(NamedTuple):
    """Bytes of an object, where they begin in it, and what it was when they were read."""

    data: Buffer
    start: int
    file: FileVersion


class Listed(NamedTuple):
    """An object of a listing."""

    key: str
    file: FileVersion


class Client(Protocol):
    """Requests to one bucket, container or host. Safe from many threads; each call is one attempt."""

    def get(self, key: str, start: int, stop: int, version: str) -> Answer:
        """Read bytes of an object, which must have this version if the server can be asked for it; "" is any. The
        version in the answer is compared by the caller.
        """
        ...

    def head(self, key: str) -> FileVersion:
        """Return size and version of an object."""
        ...

    def pages(self, folder: str, after: str, *, deep: bool = True) -> Iterator[list[Listed]]:
        """Yield the objects whose keys begin with `folder`, by key, about 1,000 at a time.

        Args:
            folder: ends in "/", or is empty for all.
            after: begin after this key; "" for the first.
            deep: with those in folders below it; otherwise the server passes over them, and may make one page of all.
        """
        ...

    def put(self, key: str, data: Buffer) -> None:
        """Write an object."""
        ...

    def refresh(self) -> bool:
        """Read credentials again; return False if that cannot help."""
        ...
