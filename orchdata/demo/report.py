"""What the demo found: every rank's step records -> numbers -> tables.

All step times are of the slowest rank: the step ends when it ends. A rank *waits* from the moment its own gradients
are ready until the last rank's are; the share lost is the mean over ranks of that time, over the sum of step times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchdata.profile import Profile
    from orchdata.synth import SynthReport

_BUSY_BELOW = 0.9
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """The demo's result; `to_dict` is what `--json` prints.

    Attributes:
        speedup: unbalanced step time over balanced, summed over the same global batches.
        speedup_of_median_step: median over steps of the same ratio, step by step.
        loss_difference: largest relative difference of the two loss curves; same samples, other order of summation.
    """

    ranks: int
    cores: int
    parameters: int
    steps: int
    warmup_steps: int
    global_batch_size: int
    lanes: dict[str, LaneResult]
    speedup: float
    speedup_of_median_step: float
    loss_difference: float
    dataset: SynthReport
    profile: Profile
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values, with a plain statement of what was measured."""
        own = {name: getattr(self, name) for name in self.__slots__}
        lanes = {name: asdict(lane) for name, lane in self.lanes.items()}
        nested = {"lanes": lanes, "dataset": self.dataset.to_dict(), "profile": self.profile.to_dict()}
        return {"measured": what_was_measured(self)} | own | nested


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


def what_was_measured(report: DemoReport) -> str:
    """A plain statement, with its limits."""
    return (
        f"{report.ranks} ranks of one CPU thread each on this machine ({report.cores} cores), gloo, DDP; a model of "
        f"{report.parameters / 1e6:.1f} M parameters in float32; a synthetic dataset; {report.steps} steps "
        f"of {report.global_batch_size} samples each way after {report.warmup_steps} of warm-up, in blocks by turns, "
        "on the same global batches. Batches are loaded before each step and not part of its time. It shows what "
        "imbalance costs here and that balancing removes it; it is not a prediction for your GPUs: for your data and "
        "number of ranks, see `orchdata profile`"
    )


def render(report: DemoReport) -> RenderableType:
    """The report as a table for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    before, after = report.lanes["unbalanced"], report.lanes["balanced"]
    table = Table(title="Training, unbalanced and balanced", title_justify="left")
    table.add_column("")
    table.add_column("unbalanced", justify="right")
    table.add_column("balanced", justify="right")

    def add(label: str, form: str, name: str) -> None:
        table.add_row(label, form.format(getattr(before, name)), form.format(getattr(after, name)))

    add("step time, median (ms)", "{:.0f}", "step_ms")
    add("step time, 90th percentile (ms)", "{:.0f}", "step_ms_p90")
    add("time a rank waits for the slowest (ms)", "{:.0f}", "waiting_ms")
    add("  share of the step lost to waiting", "{:.1%}", "waiting_share")
    add("compute imbalance, measured (max/mean)", "{:.3f}", "compute_imbalance")
    add("  in CPU time", "{:.3f}", "cpu_imbalance")
    for phase, value in before.planned_imbalance.items():
        label = "all phases" if phase == "step" else f"{phase} phase"
        table.add_row(f"  {label}, by cost model", f"{value:.3f}", f"{after.planned_imbalance[phase]:.3f}")
    add("LLM tokens per second", "{:,.0f}", "tokens_per_second")
    add("loading a batch, outside the step (ms)", "{:.0f}", "load_ms")
    add("loss, first step", "{:.4f}", "loss_first")
    add("loss, last step", "{:.4f}", "loss_last")
    verdict = (
        f"Balanced training is {report.speedup:.2f} times as fast over the same samples "
        f"(median step: {report.speedup_of_median_step:.2f} times). "
        f"The loss curves differ by at most {report.loss_difference:.1e}, relative: float32 sums in another order."
    )
    lines = [Text(verdict, style="bold"), Text(f"Measured: {what_was_measured(report)}.", style="dim")]
    share = min(lane.cpu_share for lane in report.lanes.values())
    if share < _BUSY_BELOW:
        warning = (
            f"The machine was busy: the ranks had their cores {share:.0%} of the time, so step times and waiting are "
            "mostly of other work. Trust the imbalance in CPU time, or run it again on a quiet machine."
        )
        lines.insert(1, Text(warning, style="yellow"))
    return Group(table, *lines)
