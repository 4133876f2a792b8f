"""An object as a file that is read from the node's copy as soon as that is whole, and from the store without one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.coalesce import Extent
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.node.copies import Copies
from orchdata.loaders.storage.remote.file import RemoteFile
from orchdata.loaders.storage.remote.objects import Ahead, Objects
from orchdata.loaders.storage.storage import FileVersion


class CopiedFile(RemoteFile):
    """An object of storage that the node may have a copy of. A copy that is removed or changed is read no more.

    Args:
        copies: of the node.
    """

    def __init__(self, objects: Objects, url: str, file: FileVersion, reads: ReadBytes | None, copies: Copies) -> None:
        super().__init__(objects, url, file, reads)
        self._copies = copies
        self._copy: LocalFile | None = None
        self._lock = threading.Lock()

    def read(self, offset: int, size: int) -> bytes:
        copy = self._found()
        if copy is not None:
            data = self._read_copy(copy, offset, size)
            if data is not None:
                if self._reads is not None:
                    self._reads.cache.add(len(data))
                return data
        return super().read(offset, size)

    def expect(self, extents: Sequence[Extent]) -> Ahead:
        return super().expect(extents if self._found() is None else ())

    def close(self) -> None:
        with self._lock:
            copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def _found(self) -> LocalFile | None:
        """Return the copy; one that has just been made too."""
        copy = self._copy
        if copy is None and (copy := self._copies.find(self.url, self._file)) is not None:
            with self._lock:
                if self._copy is None:
                    self._copy = copy
                copy = self._copy
        return copy

    def _read_copy(self, copy: LocalFile, offset: int, size: int) -> bytes | None:
        """Return bytes of the copy; None if it is no longer what it was when it was opened, which ends its use."""
        try:
            data = copy.read(offset, size)
            if len(data) == max(0, min(offset + size, self.size) - offset) and copy.is_as_opened():
                return data
        except ValueError:  # another thread has just closed it
            pass
        except (OSError, StorageError):
            self._copies.refuse(self.url, self._file)
        with self._lock:
            if self._copy is copy:
                self._copy = None
        copy.close()
        return None
