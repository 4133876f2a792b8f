"""A function in a child process of its own: its result, or in one line why there is none, and the peak of its memory.

The child leads a session, so that whatever a loader leaves behind ends with it; what it prints goes to a log.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

_POLL_SECONDS: Final = 0.02
_GRACE_SECONDS: Final = 10  # for a loader to end what it started
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class LaneError(RuntimeError):
    """A lane has no figures; says why in one line."""


class Memory(NamedTuple):
    """Of a process tree, in bytes; pages that are shared with others count in proportion (PSS).

    Attributes:
        pss: all of it. Libraries that other programs have mapped too count less.
        own: without mapped files: what was allocated, shared memory included.
    """

    pss: int = 0
    own: int = 0


def run_in_child(
    function: Callable[..., Any], arguments: tuple[Any, ...], log: Path, limit_seconds: float, *, watch: bool = False
) -> tuple[Any, Memory]:
    """What `function(*arguments)` returns in a fresh process, and with `watch` the peaks of its process tree's memory.

    Raises:
        LaneError: it raised, died, or took longer than the limit.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(function, arguments, log, sender))
    child.start()
    sender.close()
    peak, deadline = Memory(), time.monotonic() + limit_seconds
    try:
        while not receiver.poll(_POLL_SECONDS if watch else limit_seconds):
            if time.monotonic() >= deadline:
                _end(child.pid or 0)
                raise LaneError(f"not done after {limit_seconds:.0f} s")
            peak = Memory(*map(max, peak, memory_of(child.pid or 0)))
        result, reason = receiver.recv()
    except EOFError:
        child.join()
        raise LaneError(f"its process ended with exit code {child.exitcode}") from None
    finally:
        receiver.close()
        child.join(_GRACE_SECONDS)
        _end(child.pid or 0)
        child.join()
    if reason:
        raise LaneError(reason)
    return result, peak


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], log: Path, sender: Connection) -> None:
    os.setsid()
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        answer = function(*arguments), ""
    except Exception as error:  # noqa: BLE001 - a loader that fails is a row of the table, whatever it raised
        text = " ".join(str(error).split())
        answer = None, f"{type(error).__name__}: {text}"[:300]
    sender.send(answer)


def _end(leader: int) -> None:
    """Kill what is left of a session, and of all below its leader."""
    for process in process_tree(leader):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def process_tree(root: int) -> list[int]:
    """`root`, its descendants, and the other processes of the session it leads."""
    parents: dict[int, int] = {}
    found = {root}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
            if int(fields[3]) == root:
                found.add(int(entry.name))
    grown = True
    while grown:
        more = {process for process, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found & parents.keys())


def memory_of(root: int) -> Memory:
    """What a process tree holds now."""
    total: Counter[str] = Counter()
    for process in process_tree(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total.update({line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss")})
    return Memory(total["Pss:"], total["Pss_Anon:"] + total["Pss_Shmem:"])


def cpu_seconds(root: int) -> float:
    """CPU time of a process tree so far, children that ended included."""
    times = (_stat(process) for process in process_tree(root))
    return sum(sum(map(int, fields[11:15])) for fields in times if fields) / _TICKS


def _stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, the state first; none where it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
