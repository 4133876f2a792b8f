"""Lanes take turns over one job: each turn is two epochs in a process of its own. The proxy says what each has read."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from benchmarks.loading.lanes import Lane
from benchmarks.loading.processes import LaneError, run_in_child
from benchmarks.remote.job import Epoch, RemoteJob, measure, prepare
from benchmarks.remote.store import FarStore, Seen, Servers

_LIMIT_SECONDS: Final = 180


@dataclass(frozen=True, slots=True)
class Turn:
    """Figures of one turn.

    Attributes:
        epochs: in order.
        seen: what the server was asked for in each of them.
        servers: CPU seconds of proxy and server in all epochs together.
    """

    epochs: tuple[Epoch, ...]
    seen: tuple[Seen, ...]
    servers: Servers

    @property
    def proxy_share(self) -> float:
        """Of one core, that the proxy took."""
        return self.servers.proxy / sum(epoch.seconds for epoch in self.epochs)


@dataclass(slots=True)
class Turns:
    """Measures lanes in turns, and keeps the results.

    Attributes:
        figures: lane -> its turns.
        reasons: lane -> why it has no figures.
        prepared: lane -> seconds that writing and storing what it needs took.
    """

    job: RemoteJob
    store: FarStore
    lanes: Mapping[str, Lane]
    lead: int
    figures: dict[str, list[Turn]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    prepared: dict[str, float] = field(default_factory=dict)

    def prepare(self, name: str) -> None:
        """Write what a lane needs. One that fails is left out from then on."""
        lane = self.lanes[name]
        try:
            if lane.absent:
                raise LaneError(lane.absent)
            if lane.prepare:
                folder = self.job.folder / lane.folder
                folder.mkdir()
                seconds, _ = run_in_child(
                    prepare, (lane, self.job, folder), self.job.folder, _LIMIT_SECONDS, python=lane.python
                )
                began = time.perf_counter()
                self.store.upload(folder, lane.folder)
                self.prepared[name] = seconds + time.perf_counter() - began
                shutil.rmtree(folder)
        except LaneError as error:
            self.reasons[name] = str(error)

    def take(self, name: str) -> None:
        """Run the epochs of a lane. One that fails is left out from then on."""
        if name in self.reasons:
            return
        lane, job = self.lanes[name], self.job
        job.scratch.mkdir()
        self.store.clear()
        began, spent = time.monotonic(), self.store.spent()
        try:
            epochs, _ = run_in_child(measure, (lane, job, self.lead), job.folder, _LIMIT_SECONDS, python=lane.python)
        except LaneError as error:
            self.reasons[name] = str(error)
            self.figures.pop(name, None)
            return
        finally:
            shutil.rmtree(job.scratch)
        servers = self.store.spent().since(spent)
        starts = [began, *(epoch.began for epoch in epochs[1:]), time.monotonic()]
        seen = tuple(self.store.seen(*between) for between in pairwise(starts))
        self.figures.setdefault(name, []).append(Turn(epochs, seen, servers))
