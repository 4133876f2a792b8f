"""Reading neighbouring members of a file with one call: reading over a small gap costs less than another call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Bytes = bytes | memoryview
Extent = tuple[int, int]
"""Offset and size."""


class Run(NamedTuple):
    """Neighbouring members: their indices in order of offset, and the range of the file that they span."""

    members: list[int]
    start: int
    stop: int


def runs_of(extents: Sequence[Extent], *, gap_bytes: int, run_bytes: int | None = None) -> list[Run]:
    """Group members into runs in order of offset.

    Args:
        extents: of the members; those that overlap are in different runs.
        gap_bytes: largest gap between neighbours.
        run_bytes: largest size of a run of several members.
    """
    runs: list[Run] = []
    for index in sorted(range(len(extents)), key=extents.__getitem__):
        offset, size = extents[index]
        if runs:
            members, start, stop = runs[-1]
            if 0 <= offset - stop <= gap_bytes and (run_bytes is None or offset + size - start <= run_bytes):
                members.append(index)
                runs[-1] = Run(members, start, offset + size)
                continue
        runs.append(Run([index], offset, offset + size))
    return runs


def read_run(read: Callable[[int, int], Bytes], run: Run, extents: Sequence[Extent]) -> list[Bytes]:
    """Read a run with one `read(offset, size)`. Return a view of each member, shorter at the end of the file."""
    view = memoryview(read(run.start, run.stop - run.start))
    starts = [extents[index][0] - run.start for index in run.members]
    return [view[start : start + extents[index][1]] for start, index in zip(starts, run.members, strict=True)]
