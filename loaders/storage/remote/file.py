"""An object as a file: positional reads of what was indexed, without a request to open it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from orchdata.loaders.storage.coalesce import Extent
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.storage.remote.clients.client import Buffer
from orchdata.loaders.storage.remote.objects import Ahead, ObjectRange, Objects
from orchdata.loaders.storage.storage import FileVersion, Storage

BLOCK_BYTES: Final = 4 << 20
_MOST_BLOCKS: Final = 12
_BLOCKS_AHEAD: Final = 2


class RemoteFile:
    """An object of storage. Each read says which version it must have, and gets bytes of no other.

    Args:
        file: size and version; of the index, so that no request is made to open it.
        reads: counts bytes and requests.
    """

    changed_ns: Final = 0

    def __init__(self, objects: Objects, url: str, file: FileVersion, reads: ReadBytes | None = None) -> None:
        self.url = url
        self.size, self.version = file
        self._objects = objects
        self._file = file
        self._reads = reads

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.view(offset, size))

    def view(self, offset: int, size: int) -> Buffer:
        """Read as `read`, without a copy of what was read ahead."""
        stop = min(offset + size, self.size)
        if stop <= offset:
            return b""
        return self._objects.read(ObjectRange(self.url, self._file, offset, stop), self._reads)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def expect(self, extents: Sequence[Extent]) -> Ahead:
        ranges = [
            ObjectRange(self.url, self._file, offset, stop)
            for offset, size in extents
            if (stop := min(offset + size, self.size)) > offset
        ]
        return self._objects.expect(ranges, self._reads)

    def check_unchanged(self) -> None:
        """Each answer was checked."""

    def close(self) -> None:
        """Nothing is open."""


class Blocks:
    """A file that is read from its start to its end, in parts: it reads large blocks, and the next ones ahead.

    A block is kept for a while: an index reads headers first, and texts between them after that. Blocks inside of a
    large member are left out.
    """

    def __init__(self, file: RemoteFile) -> None:
        self.url, self.size, self.version, self.changed_ns = file.url, file.size, file.version, file.changed_ns
        self._file = file
        self._blocks: OrderedDict[int, Ahead] = OrderedDict()
        self._last = -1
        self._current: tuple[int, Buffer] = (-1, b"")  # a block's number and content: most reads are of the last one
        self._lock = threading.Lock()

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._view(offset, size))

    def read_into(self, offset: int, buffer: memoryview) -> int:
        data = self._view(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _view(self, offset: int, size: int) -> Buffer:
        stop = min(offset + size, self.size)
        if stop <= offset:
            return b""
        if size > BLOCK_BYTES:
            return self._file.view(offset, size)
        first, last = offset // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if first == last:
            return memoryview(self._block(first))[offset % BLOCK_BYTES :][: stop - offset]
        self._begin(first, last)
        halves = [self._block(first)[offset % BLOCK_BYTES :], self._block(last)[: (stop - 1) % BLOCK_BYTES + 1]]
        return b"".join(halves)

    def _block(self, number: int) -> Buffer:
        current, content = self._current
        if current != number:
            self._begin(number, number)
            content = self._file.view(number * BLOCK_BYTES, BLOCK_BYTES)
            self._current = number, content
        return content

    def expect(self, extents: Sequence[Extent]) -> Ahead:
        return self._file.expect(extents)

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def close(self) -> None:
        with self._lock:
            blocks, self._blocks = list(self._blocks.values()), OrderedDict()
            self._current = -1, b""
        for block in blocks:
            block.close()
        self._file.close()

    def _begin(self, first: int, last: int) -> None:
        """Begin to read blocks, and those after them if the file is read in order."""
        with self._lock:
            in_order = first in (self._last, self._last + 1)
            self._last = max(self._last, last)
            wanted = range(first, last + 1 + (_BLOCKS_AHEAD if in_order else 0))
            for number in wanted:
                start = number * BLOCK_BYTES
                if number in self._blocks:
                    self._blocks.move_to_end(number)
                elif start < self.size:
                    self._blocks[number] = self._file.expect([(start, BLOCK_BYTES)])
            dropped = [self._blocks.popitem(last=False)[1] for _ in range(max(0, len(self._blocks) - _MOST_BLOCKS))]
        for block in dropped:
            block.close()


def in_order(file: Storage) -> Storage:
    """Return a file for reading from start to end: of object storage in blocks, ahead."""
    return Blocks(file) if isinstance(file, RemoteFile) else file
