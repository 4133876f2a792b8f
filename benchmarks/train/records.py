"""What training wrote down: every rank's step records -> one lane's numbers.

All step times are of the slowest rank: the step ends when it ends. A rank *waits* from the moment its own gradients
are ready until the last rank's are; the share lost is the mean over ranks of that time, over the sum of step times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Records = Sequence[Sequence[Mapping[str, Any]]]  # [rank][step]
RepeatedRecords = Sequence[Sequence[Sequence[Mapping[str, Any]]]]  # [rank][step][repeat]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneResult:
    """One lane over its measured steps.

    Attributes:
        step_ms, step_ms_p90: median and 90th percentile of the step's time, of the slowest rank.
        waiting_ms: mean over steps and ranks of the time a rank waited for the slowest.
        waiting_share: waiting over step time.
        compute_imbalance: sum over steps of the longest compute time over that of the mean.
        cpu_imbalance: the same in CPU time, which other work on the machine does not lengthen.
        cpu_share: CPU time over compute time; well below 1, other work took the ranks' cores.
        tokens_per_second: LLM tokens of all ranks over step time; loading is not in it.
        load_ms: median time the slowest rank took to read and decode its batch, outside the step.
        planned_imbalance: phase -> sum over steps of max over ranks / mean, as planned by the cost model; `step` is
            all phases together.
        loss_first, loss_last: global token mean of the first and last step.
    """

    step_ms: float
    step_ms_p90: float
    waiting_ms: float
    waiting_share: float
    compute_imbalance: float
    cpu_imbalance: float
    cpu_share: float
    tokens_per_second: float
    load_ms: float
    planned_imbalance: dict[str, float]
    loss_first: float
    loss_last: float


def summarise_lane(records: Records, warmup_steps: int) -> tuple[LaneResult, NDArray[np.float64], NDArray[np.float64]]:
    """One lane's records to its result, its step times (seconds) and its loss curve (warm-up included in the curve)."""
    loss_sums = column(records, "loss_sum").sum(axis=0)
    losses = loss_sums / np.maximum(1, column(records, "loss_tokens")[0])
    compute = column(records, "compute_seconds")[:, warmup_steps:]
    cpu = column(records, "cpu_seconds")[:, warmup_steps:]
    step = column(records, "step_seconds")[:, warmup_steps:].max(axis=0)
    waiting = compute.max(axis=0) - compute
    planned = [record["imbalance"] for record in records[0][warmup_steps:]]
    result = LaneResult(
        step_ms=1000 * float(np.median(step)),
        step_ms_p90=1000 * float(np.percentile(step, 90)),
        waiting_ms=1000 * float(waiting.mean()),
        waiting_share=float(waiting.mean(axis=0).sum() / step.sum()),
        compute_imbalance=_max_over_mean(compute),
        cpu_imbalance=_max_over_mean(cpu),
        cpu_share=float(cpu.sum() / compute.sum()),
        tokens_per_second=float(column(records, "llm_tokens")[:, warmup_steps:].sum() / step.sum()),
        load_ms=1000 * float(np.median(column(records, "load_seconds")[:, warmup_steps:].max(axis=0))),
        planned_imbalance={phase: float(np.mean([one[phase] for one in planned])) for phase in planned[0]},
        loss_first=float(losses[0]),
        loss_last=float(losses[-1]),
    )
    return result, step, losses


def fastest_repeats(records: RepeatedRecords) -> Records:
    """Of each step the repeat that took least, the same one on every rank: other work lengthened it least."""
    slowest = np.array([[[one["step_seconds"] for one in step] for step in rank] for rank in records]).max(axis=0)
    chosen = slowest.argmin(axis=1)
    return [[step[repeat] for step, repeat in zip(rank, chosen, strict=True)] for rank in records]


def compare_curves(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Largest relative difference of two loss curves."""
    return float(np.max(np.abs(first - second) / np.maximum(np.abs(first), 1e-12)))


def _max_over_mean(seconds: NDArray[np.float64]) -> float:
    """Of (num_ranks, num_steps): the sum over steps of the longest, over that of the mean."""
    return float(seconds.max(axis=0).sum() / seconds.mean(axis=0).sum())


def column(records: Records, name: str) -> NDArray[np.float64]:
    """One field of all records, float64 (num_ranks, num_steps)."""
    return np.array([[record[name] for record in rank] for rank in records], np.float64)
