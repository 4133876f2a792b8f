"""An array that does not travel in a pickle: it is a file of the cache folder, which every process maps.

    array --pickled--> file named by its digest --unpickled--> the same bytes, checked and mapped read-only

Written when it is first pickled, so that nothing is kept of what never leaves its process.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.retries import tried

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
        if not tried(str(path), "cannot be read", lambda: _holds(path, digest)):
            write_whole(path, data)
        return _mapped, (str(path), digest)


def _mapped(path: str, digest: str) -> MappedArray:
    if not tried(path, "cannot be read", lambda: _holds(Path(path), digest)):
        raise StorageError(path, "is gone, or not what was written: make the loader again")
    mapped = tried(path, "cannot be mapped", lambda: np.memmap(path, np.int64, mode="r"))
    return MappedArray(mapped.view(np.ndarray))


def _holds(path: Path, digest: str) -> bool:
    """Whether the file is there, with the content that its name says."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest() == digest
    except FileNotFoundError:
        return False
