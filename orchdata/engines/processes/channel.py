"""A channel for small values and file descriptors between two processes: whole messages, in the pickle-free form of
`ranks.wire`.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchdata.ranks.wire import describe, read

_MAX_DATAGRAM = 1 << 16
_MAX_FDS = 64
_IN_A_FILE = b"in a file"


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Return both ends. Each message arrives whole or not at all; closing one end is an end of file at the other."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end of a channel.

    A message that does not fit now, because the peer does not read, is queued here: `send` does not block.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._waiting: deque[tuple[bytes, list[int]]] = deque()

    def send(self, value: Any, fds: Sequence[int] = ()) -> None:
        """Send a value that `wire` can describe, with file descriptors, which the caller still has to close.

        Raises OSError if the other end is closed.
        """
        message = describe(value)
        data = np.empty(message.num_bytes, np.uint8)
        message.write_to(data)
        own_fds = [os.dup(fd) for fd in fds]
        if len(data) > _MAX_DATAGRAM:
            own_fds.append(_file_of(data))
            self._waiting.append((_IN_A_FILE, own_fds))
        else:
            self._waiting.append((data.tobytes(), own_fds))
        self.flush()

    @property
    def is_waiting(self) -> bool:
        """Whether messages are queued."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Send queued messages: all of them if the socket blocks, else as many as fit."""
        while self._waiting:
            data, fds = self._waiting[0]
            try:
                socket.send_fds(self.socket, [data], fds)
            except BlockingIOError:
                return
            self._waiting.popleft()
            for fd in fds:
                os.close(fd)

    def receive(self) -> tuple[Any, list[int]] | None:
        """Return the next message and its file descriptors, which the caller has to close; None at the end.

        Raises BlockingIOError if there is none and the socket does not block, and ConnectionError.
        """
        data, fds, _, _ = socket.recv_fds(self.socket, _MAX_DATAGRAM + 1, _MAX_FDS)
        if not data:
            return None
        if data == _IN_A_FILE:
            file = fds.pop()
            data = _content_of(file)
        return read(np.frombuffer(data, np.uint8)), list(fds)

    def close(self) -> None:
        for _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()
        self.socket.close()


def _file_of(data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    file = os.memfd_create("orchdata-message", os.MFD_CLOEXEC)
    rest = memoryview(data.data)
    while rest:
        rest = rest[os.write(file, rest) :]
    return file


def _content_of(file: int) -> bytes:
    try:
        size = os.fstat(file).st_size
        pieces, at = [], 0
        while at < size:
            pieces.append(os.pread(file, size - at, at))
            at += len(pieces[-1])
        return b"".join(pieces)
    finally:
        os.close(file)
