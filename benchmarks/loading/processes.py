"""A function in a separate child process: its result, or in one line why there is none, and its peak memory.

The child leads a session, so that all processes that a loader leaves running end with it; its output goes to a log.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

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
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: Path,
    limit_seconds: float,
    *,
    watch: bool = False,
    python: str = sys.executable,
) -> tuple[Any, Memory]:
    """What `function(*arguments)` returns in a fresh process, and with `watch` the peaks of its process tree's memory.

    Args:
        folder: where its log is written.
        python: the interpreter, which may be of another virtual environment.

    Raises:
        LaneError: it raised, died, or took longer than the limit.
    """
    call = pickle.dumps((function, arguments))  # by a pipe: it may have credentials
    receiver, sender = os.pipe()
    command = [python, "-m", "benchmarks.loading.child", str(sender)]
    try:
        with (folder / "log").open("ab", buffering=0) as log:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[sender], start_new_session=True
            )
    except OSError as error:
        os.close(receiver)
        raise LaneError(f"{python} does not start: {error.strerror}") from None
    finally:
        os.close(sender)
    with os.fdopen(receiver, "rb") as answers:
        try:
            with contextlib.suppress(BrokenPipeError), child.stdin or contextlib.nullcontext() as to_child:
                if to_child is not None:
                    to_child.write(call)
            peak = _wait(child.pid, answers, limit_seconds, watch=watch)
            result, reason = pickle.load(answers)  # noqa: S301 - of this process's own child
        except EOFError:
            raise LaneError(f"its process ended with exit code {child.wait()}") from None
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_SECONDS)
            _end(child.pid)
            child.wait()
    if reason:
        raise LaneError(reason)
    return result, peak


def _wait(child: int, answers: BinaryIO, limit_seconds: float, *, watch: bool) -> Memory:
    """Wait for an answer, or the end of who would give it; the peak of its memory until then."""
    peak, deadline = Memory(), time.monotonic() + limit_seconds
    patience = _POLL_SECONDS if watch else limit_seconds
    while not select.select([answers], [], [], patience)[0]:
        if time.monotonic() >= deadline:
            _end(child)
            raise LaneError(f"not done after {limit_seconds:.0f} s")
        peak = Memory(*map(max, peak, memory_of(child)))
    return peak


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
    members = {root}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
            if int(fields[3]) == root:
                members.add(int(entry.name))
    grown = True
    while grown:
        more = {process for process, parent in parents.items() if parent in members} - members
        members |= more
        grown = bool(more)
    return sorted(members & parents.keys())


def memory_of(root: int) -> Memory:
    """Return the memory of a process tree now."""
    return total_memory(memory_of_each(root).values())


def total_memory(processes: Iterable[Memory]) -> Memory:
    """Return the sum of some processes."""
    return Memory(*map(sum, zip(Memory(), *processes, strict=True)))


def memory_of_each(root: int) -> dict[int, Memory]:
    """Return the memory of each process of a tree now, by its number; without those that have ended."""
    found = {}
    for process in process_tree(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        kib = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith("Pss")}
        if kib:  # the kernel keeps none of a process that is about to be waited for
            found[process] = Memory(kib["Pss:"] * 1024, (kib["Pss_Anon:"] + kib["Pss_Shmem:"]) * 1024)
    return found


class Spent(NamedTuple):
    """Of a process so far, its children that have ended included.

    Attributes:
        user, system: CPU seconds.
        faults: pages that it touched and that were not mapped: new ones, most of them.
    """

    user: float
    system: float
    faults: float


def spent_by(root: int) -> dict[int, Spent]:
    """Return what each process of a tree has spent, by its number; without those that have ended."""
    stats = {process: _stat(process) for process in process_tree(root)}
    return {
        process: Spent(
            (int(fields[11]) + int(fields[13])) / _TICKS,
            (int(fields[12]) + int(fields[14])) / _TICKS,
            int(fields[7]) + int(fields[8]),
        )
        for process, fields in stats.items()
        if fields
    }


def _stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name, the state first; none if the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
