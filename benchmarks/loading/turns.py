"""Lanes take turns: what each needs is written first, its memory watched once, then its epochs count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.loading.job import Job
from benchmarks.loading.lanes import Lane
from benchmarks.loading.measure import Figures, measure
from benchmarks.loading.processes import LaneError, Memory, run_in_child

_LIMIT_SECONDS: Final = 600


class Turns:
    """Measures lanes in turns, and keeps the results.

    Attributes:
        figures: lane -> figures of each epoch that counts.
        peaks: lane -> peak of its memory.
        reasons: lane -> why it has no figures.
    """

    def __init__(self, job: Job, lanes: Mapping[str, Lane], consumer: str, rounds: int, lead: int) -> None:
        self.figures: dict[str, list[Figures]] = {}
        self.peaks: dict[str, Memory] = {}
        self.reasons: dict[str, str] = {}
        self._job = job
        self._lanes = lanes
        self._measured = consumer, rounds, lead

    def take(self, name: str) -> None:
        """Run one epoch of a lane; the first measures its memory only, since watching it takes time.

        A lane that fails is left out from then on.
        """
        if name in self.reasons:
            return
        lane, first = self._lanes[name], name not in self.peaks
        try:
            if first:
                self._prepare(lane)
            measured, peak = self._in_child(lane, measure, lane, self._job, *self._measured, watch=first)
        except LaneError as error:
            self.reasons[name] = str(error)
            self.figures.pop(name, None)
            return
        if first:
            self.peaks[name] = peak
        else:
            self.figures.setdefault(name, []).append(measured)

    def _prepare(self, lane: Lane) -> None:
        if lane.absent:
            raise LaneError(lane.absent)
        folder = self._job.folder / lane.folder
        if lane.prepare and not folder.exists():
            folder.mkdir()
            self._in_child(lane, lane.prepare, self._job, folder)

    def _in_child(
        self, lane: Lane, function: Callable[..., Any], *arguments: Any, watch: bool = False
    ) -> tuple[Any, Memory]:
        return run_in_child(function, arguments, self._job.folder, _LIMIT_SECONDS, watch=watch, python=lane.python)
