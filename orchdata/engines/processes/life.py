"""A process that dies with another, however that one ends, and whatever it does itself at the time.

The life of a process is a pipe whose writing end it alone holds. When it ends the kernel closes that end, and sends
those who armed the reading end the signal they asked for: SIGKILL, which takes no Python to be heard.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref

from orchdata.loaders.limited_process import die_with_parent

_lock = threading.Lock()
_ends: tuple[int, int] | None = None  # of this process's life: reading, writing
_own: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def reading_end() -> int:
    """A file descriptor of this process's life, to be sent to those who are to end with it."""
    global _ends
    with _lock:
        if _ends is None:
            _ends = os.pipe()
        return _ends[0]


def end_with(life: int) -> None:
    """End this process with the one whose life that is; at once where that has ended already."""
    # Opened anew: who is to be told is a property of what was opened, which all that were sent it share.
    die_with_parent(os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def end_server_with_trainer() -> None:
    """In a fork server: end it with the process that has started it, by the pipe that multiprocessing gives it for that
    and that it reads once it has imported what it is to preload.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "multiprocessing.forkserver":
        frame = frame.f_back  # type: ignore[assignment]
    life = None if frame is None else frame.f_locals.get("alive_r")
    if life is not None:
        end_with(life)


def keep_from_children(end: socket.socket) -> None:
    """Close this end of a connection in forked children: while one held it, its peer would not see that we are gone."""
    _own.add(end)


def _let_go() -> None:
    """In a forked child: the life of its parent is not its own."""
    global _ends, _lock
    _lock = threading.Lock()
    if _ends is not None:
        for end in _ends:
            os.close(end)
        _ends = None
    for held in list(_own):
        held.close()
    _own.clear()


os.register_at_fork(after_in_child=_let_go)
