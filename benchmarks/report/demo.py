"""What `orchdata demo` measures, as a report to store.

python -m benchmarks.report.demo --json > benchmarks/results/demo.json
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.command import run_command
from orchdata.bench import Result
from orchdata.demo import DemoConfig, DemoReport, run_demo


def run(config: DemoConfig) -> list[Result]:
    """Run the demo once."""
    return list(results(run_demo(config)))


def results(report: DemoReport) -> Iterator[Result]:
    """The demo's figures, with those of each lane."""
    yield Result(name="speedup", unit="x", values=(report.speedup,), better="high", note="over the same samples")
    yield Result(name="largest relative difference of the loss curves", unit="", values=(report.loss_difference,))
    for way, lane in report.lanes.items():
        for name in ("step_ms", "waiting_share", "compute_imbalance", "cpu_imbalance"):
            yield Result(name=f"{name}, {way}", unit="", values=(lane[name],))
        for phase, imbalance in lane["planned_imbalance"].items():
            yield Result(name=f"planned imbalance, {phase}, {way}", unit="x", values=(imbalance,))


if __name__ == "__main__":
    run_command("benchmarks.report.demo", DemoConfig, run)
