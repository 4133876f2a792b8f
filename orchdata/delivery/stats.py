"""Statistics of a loader: balance achieved, time by stage, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch.distributed as dist

from orchdata.building.figures import STAGES, START, added, plain_figures, shown
from orchdata.building.step import BuiltStep
from orchdata.loaders.errors import DataError
from orchdata.loaders.failures import reason_kind
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.ranks.gathering import gather_json

_LISTED_FAILURES = 1000


@dataclass
class TorchCounts:
    """Counts of steps from torch's loader, which have no plan."""

    steps: int = 0
    samples: int = 0
    waiting_seconds: float = 0.0


class Stats:
    """Sums over delivered steps. Ratios are ratios of sums: the sum of largest loads over the sum of mean loads shows
    the time that the whole epoch loses to waiting; a mean of per-step ratios does not.

    `reads` counts the bytes read from shards; None if samples are not in shards.
    """

    def __init__(self, reads: ReadBytes | None = None) -> None:
        self._reads = reads
        self.torch = TorchCounts()
        self._begin()
        self.failures: list[DataError] = []
        self.reasons: Counter[str] = Counter()
        self._failed: set[tuple[str, str]] = set()
        self._lost = 0
        self.num_failures = 0
        self.num_blank = 0

    def _begin(self) -> None:
        """Begin an interval."""
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self.num_steps = 0
        self._waiting_seconds = 0.0
        self._seconds: Counter[str] = Counter()
        self._totals = START
        self._read_before = None if self._reads is None else self._reads.as_dict()
        self.torch.steps = self.torch.samples = 0  # Streams of torch's loader keep this object.
        self.torch.waiting_seconds = 0.0

    def add_step(self, built: BuiltStep, waiting_seconds: float) -> None:
        self.num_steps += 1
        self._waiting_seconds += waiting_seconds
        self._seconds.update(built.seconds)
        self._totals = added(self._totals, built.figures)

    def add_failures(self, failures: Sequence[DataError], *, lost: int = 0) -> None:
        """Count failures, and `lost` samples, which cannot be listed because damage hides them."""
        self._lost += lost
        self.num_failures += len(failures)
        self.reasons.update(reason_kind(failure.reason) for failure in failures)
        self._failed.update((failure.shard, failure.key) for failure in failures)
        self.failures.extend(failures[: _LISTED_FAILURES - len(self.failures)])

    @property
    def num_samples(self) -> int:
        """Number of samples that were delivered, or failed."""
        return int(self._totals["samples"])

    @property
    def num_failed_samples(self) -> int:
        """Number of distinct failed samples, with lost ones: a sample that fails in every epoch counts once."""
        return len(self._failed) + self._lost

    def gather_failures(self, group: Any = None) -> list[DataError]:
        """Return the listed failures of all ranks: see `DataLoader.gather_failures`."""
        by_rank = [[list(failure.args) for failure in self.failures]]
        if dist.is_available() and dist.is_initialized():
            by_rank = gather_json(by_rank[0], dist.group.WORLD if group is None else group)
        return sorted({DataError(*args) for each in by_rank for args in each}, key=lambda failure: failure.args)

    def as_dict(self, *, reset: bool = False) -> dict[str, Any]:
        """Return plain values, of which docs/stats.md describes every key. `reset` begins to count again, once they are
        read; failures are counted since the loader was made. Reads include those of prefetched steps.
        """
        torch, num_steps = self.torch, self.num_steps + self.torch.steps
        steps, totals = max(1, num_steps), self._totals
        if torch.steps:
            totals = added(totals, plain_figures(torch.steps, torch.samples))
        reads = self._reads_since()
        found = {
            "since": self._since,
            "steps": num_steps,
            **shown(totals, steps),
            "read_amplification": reads["storage_bytes"] / reads["used_bytes"]
            if reads and reads["used_bytes"]
            else None,
            "reads": reads,
            "milliseconds": {
                "waiting": 1000 * (self._waiting_seconds + torch.waiting_seconds) / steps,
                **{stage: 1000 * self._seconds[stage] / steps for stage in STAGES},
            },
            "failures": {
                "count": self.num_failures + self._lost,
                "lost": self._lost,
                "blank": self.num_blank,
                "by_reason": dict(self.reasons.most_common()),
                "samples": [
                    {"shard": f.shard, "key": f.key, "field": f.field, "reason": f.reason} for f in self.failures
                ],
            },
        }
        if reset:
            self._begin()
        return found

    def _reads_since(self) -> dict[str, Any] | None:
        """Return the bytes read in this interval; None if samples are not in shards."""
        if self._reads is None or self._read_before is None:
            return None
        now, before = self._reads.as_dict(), self._read_before
        requests, requests_before = now.pop("requests", {}), before.get("requests", {})
        found = {name: value - before[name] for name, value in now.items()}
        if requests:  # there is object storage
            found["requests"] = {kind: count - requests_before.get(kind, 0) for kind, count in requests.items()}
        return found


def flattened(stats: Mapping[str, Any], above: str = "") -> dict[str, int | float]:
    """Return the numbers of `Stats.as_dict` with nested keys joined by "/", without those of single reasons."""
    found: dict[str, int | float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping) and name != "by_reason":
            found |= flattened(value, f"{above}{name}/")
        elif isinstance(value, int | float):
            found[f"{above}{name}"] = value
    return found
