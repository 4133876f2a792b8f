"""Ends a process together with another, however that one ends, and even if this one is stuck.

The life of a process is a pipe; only that process has its writing end. When the process ends, the kernel closes that
end, and sends SIGKILL to those that registered for it at the reading end: that needs no Python to run.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref

from orchdata.loaders.limited_process import die_with_parent

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
