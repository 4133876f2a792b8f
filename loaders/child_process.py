"""Child processes that end with this one, however it ends, and channels to them: whole messages, and file descriptors.

The life of a process is a pipe; only that process has its writing end. When the process ends, the kernel closes that
end, and sends SIGKILL to those that registered for it at the reading end: that needs no Python to run.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from typing import Any

_MAX_DATAGRAM = 1 << 16
_MAX_FDS = 64
_END_SECONDS = 5.0
_IN_A_FILE = b"in a file"
_BEGIN = b"begin"


class Channel:
    """One end of a channel. A message arrives whole or not at all; closing one end is an end of file at the other. A
    message that does not fit now, because the peer does not read, is queued here if the socket does not block.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._waiting: deque[tuple[bytes | memoryview, list[int]]] = deque()

    def send(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> None:
        """Send bytes, at least one, with file descriptors, which the caller still has to close.

        Raises OSError if the other end is closed.
        """
        own_fds = [os.dup(fd) for fd in fds]
        if len(data) > _MAX_DATAGRAM:
            own_fds.append(os.memfd_create("orchdata-message", os.MFD_CLOEXEC))
            with open(own_fds[-1], "wb", closefd=False) as writer:
                writer.write(data)
            data = _IN_A_FILE
        self._waiting.append((data, own_fds))
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

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Return the next message and its file descriptors, which the caller has to close; None at the end.

        Raises BlockingIOError if there is none and the socket does not block, and ConnectionError.
        """
        data, fds, _, _ = socket.recv_fds(self.socket, _MAX_DATAGRAM + 1, _MAX_FDS)
        if not data:
            return None
        if data == _IN_A_FILE:
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                data = file.read()
        return data, list(fds)

    def close(self) -> None:
        for _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()
        self.socket.close()


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Return both ends, this process's first."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _own.add(ours)
    return ours, theirs


def begun(ours: socket.socket, fds: Sequence[int]) -> Channel:
    """Return the channel to a process that calls `begin`, which gets these descriptors."""
    channel = Channel(ours)
    channel.send(_BEGIN, [_reading_end(), *fds])
    return channel


class Child:
    """A process that ends with this one, and the channel to it; used by one thread at a time.

    Args:
        run: called in the process with its end of the channel, its file descriptors, and `args`.
        fds: descriptors that it gets; the caller still has to close them.
    """

    def __init__(
        self, context: BaseContext, run: Callable[..., None], args: tuple[Any, ...], name: str, fds: Sequence[int] = ()
    ) -> None:
        ours, theirs = open_channel()
        # Ctrl-C is for this process alone, also while the child starts: it inherits the signals that are blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = context.Process(  # type: ignore[attr-defined]
                target=begin, args=(theirs, run, args), daemon=True, name=name
            )
            with interrupts_deferred():  # Python loses them in what it calls around a fork
                self.process.start()
            self.channel = begun(ours, fds)
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def end(self) -> int | None:
        """End it now. Returns its exit status; None if it does not end."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(_END_SECONDS)
        self.channel.close()
        status: int | None = self.process.exitcode
        return status


def begin(end: socket.socket, run: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
    """Run in the child, until `run` returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    channel = Channel(end)
    if (first := channel.receive()) is not None:
        life, *fds = first[1]
        # Open it again: the process to signal is a property of the open file, which all receivers of it share.
        die_with_parent(os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        run(channel, fds, *args)


_lock = threading.Lock()
_ends: tuple[int, int] | None = None  # of this process's life: reading, writing
_own: weakref.WeakSet[socket.socket] = (
    weakref.WeakSet()
)  # an open copy in a forked child would hide the end of this one


def _reading_end() -> int:
    """Return a file descriptor of this process's life."""
    global _ends
    with _lock:
        if _ends is None:
            _ends = os.pipe()
        return _ends[0]


def _let_go() -> None:
    """In a forked child: close the life of its parent, and the parent's channels."""
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


def die_with_parent(life: int) -> None:
    """Let the kernel send SIGKILL as soon as the parent is gone.

    Args:
        life: reading end of a pipe; only the parent has the other end.
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    gone = select.poll()
    gone.register(life, select.POLLIN)
    if gone.poll(0):  # the parent ended before this was set up
        sys.exit(0)


def lower_limit(which: int, soft: int) -> None:
    """Set the soft limit of a `resource.RLIMIT_...`, at most to the hard limit."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def taken_bytes() -> int:
    """Return the private memory of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Deliver a Ctrl-C of the block after it: for short code that must not be interrupted. Does nothing where no Python
    handler would run: in another thread, where SIGINT is ignored or left to the system, and in a subinterpreter.
    """
    came: list[tuple[Any, ...]] = []
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    try:
        signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if came:
            previous(*came[0])


def leave_out_what_is_loaded() -> None:
    """Let collections pass over all objects that exist now, until the interpreter ends. At its end they are freed as
    usual: otherwise libraries with nanobind, such as triton, print that objects leak.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
