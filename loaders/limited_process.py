"""What a process does that reads data which may end it: dies with its parent, and lowers its own limits."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import sys


def die_with_parent(life: int) -> None:
    """SIGKILL from the kernel when the parent is gone, whatever this process is doing then.

    Args:
        life: reading end of a pipe whose other end the parent holds, and nobody else.
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    gone = select.poll()
    gone.register(life, select.POLLIN)
    if gone.poll(0):  # before it was armed
        sys.exit(0)


def lower_limit(which: int, soft: int) -> None:
    """Set the soft limit of a `resource.RLIMIT_...`, as far as the hard one allows."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def taken_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
