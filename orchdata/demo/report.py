"""The results of the demo, as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orchdata.reference.records import LaneResult

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchdata.profiling.profile import Profile
    from orchdata.synth import SynthReport

_BUSY_BELOW = 0.9


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
