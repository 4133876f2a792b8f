"""An array that does not travel in a pickle: it is a file of the cache folder, which every process maps.

    array --pickled--> file named by its digest --unpickled--> the same bytes, checked and mapped read-only

Written when it is first pickled, so that nothing is kept of what never leaves its process.
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

    Pickling raises StorageError where the cache folder cannot be written, unpickling where the file is gone or is not
    what was written.
    """

    def __init__(self, array: NDArray[np.int64]) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.array.size:
            return MappedArray, (np.zeros(0, np.int64),)
        data = np.ascontiguousarray(self.array).data.cast("B")
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        path = CacheFolder().file(KIND, f"{digest}.int64")
        if tried(str(path), "cannot be read", lambda: _found(path, digest)) is None:
            write_whole(path, data)
        return _mapped, (str(path), digest)


def _mapped(path: str, digest: str) -> MappedArray:
    found = tried(path, "cannot be read", lambda: _found(Path(path), digest))
    if found is None:
        raise StorageError(path, "is gone, or not what was written: make the loader again")
    return MappedArray(np.frombuffer(found, np.int64))


def _found(path: Path, digest: str) -> mmap.mmap | None:
    """The file, mapped; None where it is not there with the content that its name says."""
    try:
        with opened(path) as fd:
            with open(fd, "rb", closefd=False) as file:
                held = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            return mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ) if held == digest else None
    except FileNotFoundError:
        return None
