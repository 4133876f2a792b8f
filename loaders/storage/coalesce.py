"""Members that lie near each other in a file, read with one call: reading over a small gap costs less than another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Bytes = bytes | memoryview
Place = tuple[int, int]
"""Offset and size."""


class Run(NamedTuple):
    """Neighbours: the indices of their places in order of offset, and what of the file they span."""

    members: list[int]
    start: int
    stop: int


def runs_of(places: Sequence[Place], *, gap_bytes: int, run_bytes: int | None = None) -> list[Run]:
    """All places, as runs in order of offset.

    Args:
        places: of members; those that overlap are in different runs.
        gap_bytes: between neighbours, at most.
        run_bytes: of a run of several, at most.
    """
    runs: list[Run] = []
    for index in sorted(range(len(places)), key=places.__getitem__):
        offset, size = places[index]
        if runs:
            members, start, stop = runs[-1]
            if 0 <= offset - stop <= gap_bytes and (run_bytes is None or offset + size - start <= run_bytes):
                members.append(index)
                runs[-1] = Run(members, start, offset + size)
                continue
        runs.append(Run([index], offset, offset + size))
    return runs


def read_run(read: Callable[[int, int], Bytes], run: Run, places: Sequence[Place]) -> list[Bytes]:
    """The content of each member of a run, as views of what one call of `read(offset, size)` gives; shorter than its
    size where the file ends.
    """
    view = memoryview(read(run.start, run.stop - run.start))
    starts = [places[index][0] - run.start for index in run.members]
    return [view[start : start + places[index][1]] for start, index in zip(starts, run.members, strict=True)]
