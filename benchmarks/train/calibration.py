"""What the model's phases really cost here: times of other training steps -> a fitted cost model, in seconds.

Unbalanced steps of the same data set in another order: their ranks and steps differ much in content. A rank's
CPU time from the barrier until its last gradient is ready is a measurement: nothing is waited for in it, and other work
on the machine lengthens it least. All phases are fitted at once. Steps as they are in training, because caches, memory
and threads make them cost more than phases timed by themselves. Nothing of the training that is to be predicted is
looked at.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

import orchdata as od
from benchmarks.train.lanes import Lane, Task, make_lane
from orchdata.balancers import FittedCosts, fit_phase_costs

Lengths = dict[str, list[int]]  # phase -> positions of each sequence

_WARMUP_STEPS = 2
_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was fitted.

    Attributes:
        fit: seconds of each phase's sequences, and the constant seconds of a rank's step.
        end_seconds: from the slowest rank's last gradient to the end of the step: the last reduction, the optimizer.
    """

    fit: FittedCosts
    end_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step that are not its phases'."""
        return self.fit.seconds + self.end_seconds


def calibrate(task: Task, *, conv_stride: int, steps: int, repeats: int) -> Calibration:
    """Measure and fit; every rank of torch.distributed takes part and gets the same result.

    Args:
        task: what will be trained on, here in another order.
        conv_stride: mel frames for each position of the audio encoder.
        steps: to measure, on every rank; more of them where they do not tell the phases apart.
        repeats: trainings on each step's batch; the fastest counts.
    """
    lane = make_lane(replace(task, seed=task.seed + 1), od.Balance(scope="none"))
    ranks: list[list[tuple[Lengths, float, float]]] = [[] for _ in range(dist.get_world_size())]
    for step in range(_WARMUP_STEPS):
        _measure(lane, step, repeats, conv_stride)
    for attempt in range(_ATTEMPTS):
        begin = _WARMUP_STEPS + attempt * steps
        mine = [_measure(lane, step, repeats, conv_stride) for step in range(begin, begin + steps)]
        gathered: list[list[tuple[Lengths, float, float]]] = [[] for _ in ranks]
        dist.all_gather_object(gathered, mine)
        ranks = [before + now for before, now in zip(ranks, gathered, strict=True)]
        try:
            fit = _fit([measured for rank in ranks for measured in rank])
            break
        except ValueError:  # on every rank alike; on a busy machine few steps may not tell the phases apart
            if attempt == _ATTEMPTS - 1:
                raise
    # The rank that waits for no other finishes first.
    ends = [min(after for _, _, after in step) for step in zip(*ranks, strict=True)]
    return Calibration(fit=fit, end_seconds=statistics.median(ends))


def _fit(measured: Sequence[tuple[Lengths, float, float]]) -> FittedCosts:
    """Raises ValueError where a phase costs nothing by these measurements."""
    phases = {phase: [lengths[phase] for lengths, _, _ in measured] for phase in ("image", "audio", "llm")}
    return fit_phase_costs(phases, [cpu for _, cpu, _ in measured])


def _measure(lane: Lane, step: int, repeats: int, conv_stride: int) -> tuple[Lengths, float, float]:
    """What this rank's batch holds, its CPU seconds, and what follows the last gradient; the least of all repeats."""
    batch, seconds = lane.load()
    for _ in range(repeats):
        lane.train(step, batch, seconds)
    records = lane.records[step]
    cpu = min(one.cpu_seconds for one in records)
    after = min(one.step_seconds - one.compute_seconds for one in records)
    return lengths_of(batch, conv_stride), cpu, after


def lengths_of(batch: od.Batch, conv_stride: int) -> Lengths:
    """Positions of each sequence that a batch gives a phase, dummies included."""
    assert batch.image is not None and batch.audio is not None
    return {
        "image": batch.image.cu_seqlens.diff().tolist(),
        "audio": (batch.audio.cu_seqlens.diff() // conv_stride).tolist(),
        "llm": batch.llm.cu_seqlens.diff().tolist(),
    }
