"""Report of `python -m benchmarks.train`: records, calibration and exchange seconds -> tables and demands.

The *gain* of a lane is the share of the unbalanced time that it saves, 1 - lane / unbalanced, over all measured steps:
by the clock, and by the plans and the fitted costs. Step times are of the slowest rank. A rank waits while it does not
compute until the last rank's gradients are ready: the part of that time that is not its own CPU time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.train.job import LANES, predicted_seconds
from benchmarks.train.records import (
    LaneResult,
    RepeatedRecords,
    column,
    compare_curves,
    fastest_repeats,
    summarise_lane,
)
from orchdata.bench import Result, WideTable

_BASE = "unbalanced"
_GAIN_DEMAND = 0.9
_EXCHANGE_DEMAND = 0.05

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LaneTimes:
    """One lane over its measured steps.

    Attributes:
        result: as `records` has it.
        steps: seconds of each step, its fastest repeat.
        repeats: seconds of all repeats, (num_steps, num_repeats).
        predicted: seconds of each step.
        exchange: seconds that its exchanges take alone; zeros where it has none.
        waiting: seconds of each step, mean over ranks.
        cpu: CPU seconds of the rank that takes most in each step, until its gradients are ready.
        losses: global token mean of each step's first repeat, warm-up included.
    """

    result: LaneResult
    steps: Floats
    repeats: Floats
    predicted: Floats
    exchange: Floats
    waiting: Floats
    cpu: Floats
    losses: Floats


def make_results(content: Mapping[str, Any], warmup_steps: int, *, demands: bool) -> list[Result | WideTable]:
    """The report of what `job.work` returned."""
    calibration = content["calibration"]
    lanes = {
        name: _times(records, content["exchange_seconds"][name], LANES[name].waits, calibration, warmup_steps)
        for name, records in content["lanes"].items()
    }
    base = lanes[_BASE]
    difference = max(compare_curves(base.losses, lane.losses) for lane in lanes.values())
    results = [_gain_result(name, base, lane, demands) for name, lane in lanes.items() if _gains(base, lane)[1] > 0]
    results += [
        Result(
            name=f"{name}: exchange / step time",
            unit="",
            values=(float(lane.exchange.sum() / lane.steps.sum()),),
            demand=_EXCHANGE_DEMAND if demands else None,
            note=f"{1000 * float(np.median(lane.exchange)):.2f} ms, replayed alone, forward and backward",
        )
        for name, lane in lanes.items()
        if lane.exchange.any()
    ]
    results += [
        Result(
            name="CPU time / time, unbalanced lane computing",
            unit="",
            values=(base.result.cpu_share,),
            better="high",
            note="well below 1, other work took the ranks' cores; near 1 it may still have taken their caches",
        ),
        Result(name="largest difference of loss curves", unit="", values=(difference,), note="relative, float32 sums"),
    ]
    return [_calibration_table(calibration), _lane_table(lanes), _imbalance_table(lanes), *results]


def _times(
    records: RepeatedRecords, exchange: Sequence[float], waits: str, calibration: Mapping[str, Any], warmup_steps: int
) -> LaneTimes:
    chosen = fastest_repeats(records)
    result, steps, _ = summarise_lane(chosen, warmup_steps)
    _, _, losses = summarise_lane([[repeats[0] for repeats in rank] for rank in records], warmup_steps)
    compute, cpu = (column(chosen, name)[:, warmup_steps:] for name in ("compute_seconds", "cpu_seconds"))
    repeats = np.array([[[one["step_seconds"] for one in step] for step in rank] for rank in records])
    planned = [
        predicted_seconds(record["loads"], waits, calibration["exponent"]) for record in chosen[0][warmup_steps:]
    ]
    return LaneTimes(
        result=result,
        steps=steps,
        repeats=repeats.max(axis=0)[warmup_steps:],
        predicted=np.array(planned) + calibration["step_seconds"],
        exchange=np.array(exchange[warmup_steps:]),
        cpu=cpu.max(axis=0),
        waiting=np.maximum(0.0, compute.max(axis=0) - cpu).mean(axis=0),
        losses=losses,
    )


def _gains(base: LaneTimes, lane: LaneTimes) -> tuple[float, float]:
    """Measured and predicted gain; both are 0 for the base itself."""
    return (
        float(1 - lane.steps.sum() / base.steps.sum()),
        float(1 - lane.predicted.sum() / base.predicted.sum()),
    )


def _gain_result(name: str, base: LaneTimes, lane: LaneTimes, demands: bool) -> Result:
    """Measured gain as a share of the predicted one, which is above 0."""
    measured, predicted = _gains(base, lane)
    by_repeat = (1 - lane.repeats.sum(axis=0) / base.repeats.sum(axis=0)) / predicted
    return Result(
        name=f"{name}: measured / predicted gain",
        unit="",
        values=(measured / predicted,),
        demand=_GAIN_DEMAND if demands else None,
        better="high",
        note=f"{1 / (1 - measured):.3f} times as fast as unbalanced, predicted {1 / (1 - predicted):.3f}; "
        f"single repeats: {by_repeat.min():.2f} - {by_repeat.max():.2f}",
    )


def _calibration_table(calibration: Mapping[str, Any]) -> WideTable:
    fit = calibration["fit"]
    rows = tuple(
        (phase, 1e6 * cost["linear"], 1e9 * cost["quadratic"], 1e6 * cost["constant"])
        for phase, cost in fit["costs"].items()
    )
    return WideTable(
        title="Fitted costs, forward and backward",
        columns=("phase", "us a position", "ns a pair", "us a sequence"),
        rows=rows,
        note=(
            f"and {1000 * calibration['step_seconds']:.1f} ms a step, with any contents; "
            f"fitted to {fit['num_samples']} other steps: residual {100 * fit['residual']:.1f} %, "
            f"worst {100 * fit['worst_residual']:.1f} %"
        ),
    )


def _lane_table(lanes: Mapping[str, LaneTimes]) -> WideTable:
    base = lanes[_BASE]

    def row(name: str, lane: LaneTimes) -> tuple[str | float | None, ...]:
        measured, predicted = _gains(base, lane)
        gains: list[float | None] = [None, None, None, None]
        if lane is not base:
            share = 100 * measured / predicted if predicted > 0 else None
            in_cpu = 100 * float(1 - lane.cpu.sum() / base.cpu.sum())
            gains = [100 * measured, 100 * predicted, share, in_cpu]
        return (
            name,
            lane.result.step_ms,
            1000 * float(np.median(lane.predicted)),
            1000 * float(np.median(lane.waiting)),
            100 * float(lane.waiting.sum() / lane.steps.sum()),
            lane.result.tokens_per_second,
            *gains,
        )

    return WideTable(
        title="Training",
        columns=(
            *("lane", "step ms", "predicted", "waiting ms", "waiting %"),
            *("LLM tokens/s", "gain %", "predicted", "share %", "in CPU %"),
        ),
        rows=tuple(row(name, lane) for name, lane in lanes.items()),
        note=(
            "step, its prediction, waiting: medians over steps; waiting: mean over ranks, its % of all steps' time. "
            "gain: of all steps' time, 1 - lane / unbalanced; share: of the predicted gain that was measured; "
            "in CPU: the gain in CPU time of the rank that takes most, which other work on the machine lengthens least"
        ),
    )


def _imbalance_table(lanes: Mapping[str, LaneTimes]) -> WideTable:
    phases = tuple(lanes[_BASE].result.planned_imbalance)
    rows = tuple(
        (name, *(f"{lane.result.planned_imbalance[phase]:.3f}" for phase in phases)) for name, lane in lanes.items()
    )
    return WideTable(
        title="Imbalance of each phase, max/mean over ranks",
        columns=("lane", *("all phases" if phase == "step" else phase for phase in phases)),
        rows=rows,
        note="of planned costs, mean over steps",
    )
