"""Statistics of post_balance: what it has moved, and the gain."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from orchdata.post_balancing.plan import PostPlan
from orchdata.post_balancing.step import ReadyStep

_STAGES = ("waiting", "fetching", "planning", "moving")


class PostStats:
    """Sums over delivered steps. Ratios are ratios of sums, as in `orchdata.delivery.stats`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._seconds = dict.fromkeys(_STAGES, 0.0)

    def timed(self, steps: Iterator[ReadyStep]) -> Iterator[ReadyStep]:
        """Yield the same steps, and count them and the time waited for them."""
        while True:
            started = time.perf_counter()
            made = next(steps, None)
            if made is None:
                return
            self._seconds["waiting"] += time.perf_counter() - started
            for stage, seconds in made.seconds.items():
                self._seconds[stage] += seconds
            self._counts["received"] += len(made.batch.samples)
            self._add(made.batch.plan)
            yield made
            del made

    def _add(self, plan: PostPlan) -> None:
        self._counts.update(
            steps=1,
            samples=len(plan.costs),
            below_gain=plan.below_gain,
            moved_samples=len(plan.moved),
            moved_bytes=int(plan.sizes[plan.moved].sum()),
        )
        self._loads["before"] += int(plan.loads_before.max())
        self._loads["after"] += int(plan.loads.max())
        self._loads["total"] += int(plan.loads.sum())
        self._counts["ranks"] = plan.num_ranks

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, over all ranks unless noted.

        `received`: samples that this rank got. `below_gain`: steps in which moving would have gained too little.
        `moved_samples`, `moved_bytes`: what changed its rank. `imbalance_before`, `imbalance`: the sum over
        steps of the largest load over that of the mean load, as drawn and as delivered. `milliseconds`, per step on
        this rank: `waiting` is the time that the training loop waited. The others are times of the thread: `fetching`
        in the loader, `planning` and `moving` with the other ranks, including the wait for them.
        """
        mean = self._loads["total"] / max(1, self._counts["ranks"]) or 1.0
        steps = max(1, self._counts["steps"])
        counted = ("steps", "samples", "received", "below_gain", "moved_samples", "moved_bytes")
        return {
            **{name: self._counts[name] for name in counted},
            "imbalance_before": self._loads["before"] / mean or 1.0,
            "imbalance": self._loads["after"] / mean or 1.0,
            "milliseconds": {stage: 1000 * self._seconds[stage] / steps for stage in _STAGES},
        }
