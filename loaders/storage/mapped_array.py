"""An array that is pickled as the path of a file in the cache folder, which every process maps.

    array --pickled--> file named by its digest --unpickled--> the same bytes, checked and mapped read-only

The file is written when the array is first pickled, so that arrays which stay in their process leave no files. This
process has it open as long as it has the array: another worker may map it later, also when a prune has removed it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.opening import Lent, lend, opened_lent
from orchdata.loaders.storage.retries import tried

KIND = "arrays"
_held: dict[int, int] = {}
"""Descriptors of held files, by the id of the array that they are of."""
_lock = threading.Lock()


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
        if not _is_held(path, digest, self.array):
            write_whole(path, data)
            if not _is_held(path, digest, self.array):
                raise StorageError(str(path), "is not what was just written to it, or was removed: try again")
        return _mapped, (str(path), digest, lend(_held[id(self.array)]))


def _mapped(path: str, digest: str, lent: Lent | None = None) -> MappedArray:
    array = tried(path, "cannot be read", lambda: _map_verified(Path(path), digest, lent=lent))
    if array is None:
        raise StorageError(path, "is gone, or its content has changed: create the loader again")
    return MappedArray(array)


def _map_verified(
    path: Path, digest: str, array: NDArray[np.int64] | None = None, lent: Lent | None = None
) -> NDArray[np.int64] | None:
    """Map the file; None if it does not exist with the content of this digest. It is held for `array`, default: for
    what is returned.
    """
    try:
        with opened_lent(path, lent) as fd:
            with open(fd, "rb", closefd=False) as file:
                actual = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            if actual != digest:
                return None
            mapped = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ), np.int64)
            _keep_open(fd, mapped if array is None else array)
            return mapped
    except FileNotFoundError:
        return None


def _is_held(path: Path, digest: str, array: NDArray[np.int64]) -> bool:
    """Return whether there is a file with this content, which is held for the array from now on."""
    return tried(str(path), "cannot be read", lambda: _map_verified(path, digest, array)) is not None


def _keep_open(fd: int, array: NDArray[np.int64]) -> None:
    with _lock:
        if id(array) in _held:
            os.dup2(fd, _held[id(array)], inheritable=False)  # the earlier file may be gone
        else:
            _held[id(array)] = os.dup(fd)
            weakref.finalize(array, _close, id(array))


def _close(array_id: int) -> None:
    os.close(_held.pop(array_id))
