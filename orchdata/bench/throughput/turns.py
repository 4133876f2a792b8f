"""Lanes take turns: what each needs is written first, its memory watched once, then its epochs count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from orchdata.bench.throughput.job import Job
from orchdata.bench.throughput.lanes import LANES
from orchdata.bench.throughput.measure import Figures, measure
from orchdata.bench.throughput.processes import LaneError, Memory, run_in_child

_LIMIT_SECONDS: Final = 600


class Turns:
    """What was found so far.

    Attributes:
        figures: lane -> of each epoch that counts.
        peaks: lane -> of its memory.
        reasons: lane -> why it has no figures.
    """

    def __init__(self, job: Job, consumer: str, rounds: int, lead: int) -> None:
        self.figures: dict[str, list[Figures]] = {}
        self.peaks: dict[str, Memory] = {}
        self.reasons: dict[str, str] = {}
        self._job = job
        self._measured = consumer, rounds, lead

    def take(self, lane: str) -> None:
        """One epoch of a lane; the first is for its memory alone, since watching it takes time.

        A lane that fails is left out from then on.
        """
        if lane in self.reasons:
            return
        first = lane not in self.peaks
        try:
            if first:
                self._prepare(lane)
            found, peak = self._in_child(measure, lane, self._job, *self._measured, watch=first)
        except LaneError as error:
            self.reasons[lane] = str(error)
            self.figures.pop(lane, None)
            return
        if first:
            self.peaks[lane] = peak
        else:
            self.figures.setdefault(lane, []).append(found)

    def _prepare(self, lane: str) -> None:
        described = LANES[lane]
        if not described.installed:
            raise LaneError(f"not installed: pip install '{described.package}'")
        if described.prepare:
            folder = self._job.folder / described.peer
            folder.mkdir()
            self._in_child(described.prepare, self._job, folder)

    def _in_child(self, function: Callable[..., Any], *arguments: Any, watch: bool = False) -> tuple[Any, Memory]:
        return run_in_child(function, arguments, self._job.folder / "log", _LIMIT_SECONDS, watch=watch)
