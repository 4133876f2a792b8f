"""Cache: where a node keeps whole copies of shards of object storage, and how many bytes of them."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import Final

from orchdata.loaders.amounts import bytes_of
from orchdata.loaders.storage.remote.urls import is_remote

FOLDER_VARIABLE: Final = "ORCHDATA_SHARD_CACHE"
BYTES_VARIABLE: Final = "ORCHDATA_SHARD_CACHE_BYTES"


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder for whole copies of shards of object storage, as `DataLoader(cache=)` takes it: one on each node, shared
    by its ranks and workers.

    Copies are fetched in the background where a node has shards of its own: on a single node, and with
    `balance="grouped"` and `shuffle=od.Shuffle(streams=<groups>)`. Compressed tars have decompressed copies in
    ORCHDATA_CACHE instead.

    Attributes:
        path: the folder, on a disk of the node. It is created when the first copy is made.
        max_bytes: cap on all files of copies in it. A run removes copies of other data only.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    max_bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise ValueError(f"Cache.path must be a folder, got {self.path!r}")
        path = os.fsdecode(self.path)
        if is_remote(path):
            raise ValueError("Cache.path must be a folder on a disk of the node, got a URL")
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int) or self.max_bytes < 1:
            raise ValueError(f"Cache.max_bytes must be a number of bytes, at least 1, got {self.max_bytes!r}")
        object.__setattr__(self, "path", os.path.abspath(os.path.expanduser(path)))


def cache_of_environment() -> Cache | None:
    """Return the cache that the environment names; None if it names none.

    Raises ValueError for one variable without the other, and for one that is no number of bytes.
    """
    folder, most = os.environ.get(FOLDER_VARIABLE), os.environ.get(BYTES_VARIABLE)
    if not folder and not most:
        return None
    if not folder:
        raise ValueError(f"{BYTES_VARIABLE} is given without {FOLDER_VARIABLE}, the folder of the copies of shards")
    if not most:
        raise ValueError(f"{FOLDER_VARIABLE} is given without {BYTES_VARIABLE}, the most bytes in it, such as 2TiB")
    return Cache(folder, max_bytes=bytes_of(most, BYTES_VARIABLE))
