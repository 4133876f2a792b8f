"""An array that is pickled as the path of a file in the cache folder, which every process maps.

    array --pickled--> file named by its digest --unpickled--> the same bytes, checked and mapped read-only

The file is written when the array is first pickled, so that arrays which stay in their process leave no files.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.shared.files import opened

KIND = "arrays"


class MappedArray:
    """A one-dimensional int64 array, not to be written to; pickles as the path of a file with its content.

    Pickling raises StorageError if the cache folder cannot be written, unpickling if the file is gone or changed.
    """

    def __init__(self, array: NDArray[np.int64]) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.array.size:
            return MappedArray, (np.zeros(0, np.int64),)
        data = np.ascontiguousarray(self.array).data.cast("B")
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        path = CacheFolder().file(KIND, f"{digest}.int64")
        if tried(str(path), "cannot be read", lambda: _map_verified(path, digest)) is None:
            write_whole(path, data)
        return _mapped, (str(path), digest)


def _mapped(path: str, digest: str) -> MappedArray:
    mapped = tried(path, "cannot be read", lambda: _map_verified(Path(path), digest))
    if mapped is None:
        raise StorageError(path, "is gone, or its content has changed: create the loader again")
    return MappedArray(np.frombuffer(mapped, np.int64))


def _map_verified(path: Path, digest: str) -> mmap.mmap | None:
    """Map the file; None if it does not exist with the content of this digest."""
    try:
        with opened(path) as fd:
            with open(fd, "rb", closefd=False) as file:
                actual = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            return mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ) if actual == digest else None
    except FileNotFoundError:
        return None
