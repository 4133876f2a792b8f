"""A channel for small values and file descriptors between two processes: whole messages, in the pickle-free form of
`ranks.wire`.

Ends a process together with another, however that one ends, and even if this one is stuck.

The life of a process is a pipe; only that process has its writing end. When the process ends, the kernel closes that
end, and sends SIGKILL to those that registered for it at the reading end: that needs no Python to run.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchdata.loaders.limited_process import die_with_parent
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


_lock = threading.Lock()
_ends: tuple[int, int] | None = None  # of this process's life: reading, writing
_own: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def reading_end() -> int:
    """Return a file descriptor of this process's life, to send to processes that must end with it."""
    global _ends
    with _lock:
        if _ends is None:
            _ends = os.pipe()
        return _ends[0]


def end_with(life: int) -> None:
    """End this process with the one that has this life; immediately if that has ended already."""
    # Open it again: the process to signal is a property of the open file, which all receivers of a descriptor share.
    die_with_parent(os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def keep_from_children(end: socket.socket) -> None:
    """Close this end of a connection in forked children: an open copy would hide the end of this process."""
    _own.add(end)


def _let_go() -> None:
    """In a forked child: close the life of its parent, and the parent's connections."""
    global _ends, _lock
    _lock = threading.Lock()
    if _ends is not None:
        for end in _ends:
            os.close(end)
        _ends = None
    for connection in list(_own):
        connection.close()
    _own.clear()


os.register_at_fork(after_in_child=_let_go)
