"""Set-up of a process that reads data which may crash it: it dies with its parent, and lowers its own limits."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import sys


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
