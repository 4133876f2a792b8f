"""`python -m benchmarks.start`: starting a loader over a large index, and resuming late in an epoch.

synthetic index of 10 M rows --a fresh process: DataLoader(...)--> seconds, anonymous memory
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import run_command
from orchdata.bench.harness import Result, work_folder
from orchdata.synth.made_up_index import synthetic_index


@dataclass(frozen=True, kw_only=True, slots=True)
class StartBench:
    """What to measure.

    Attributes:
        ranks: simulated DP ranks.
        samples_per_rank: of a step.
        samples: rows of the index.
        repeats: starts, each in a fresh process.
        seed: of the index.
        folder: where to write the index (about 170 bytes a row); by default a temporary folder.
    """

    ranks: int = 2_560
    samples_per_rank: int = 16
    samples: int = 10_000_000
    repeats: int = 3
    seed: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if (size := self.ranks * self.samples_per_rank) > self.samples:
            raise ValueError(f"{self.ranks} ranks x {self.samples_per_rank} need {size} samples, got {self.samples}")


def run(config: StartBench) -> list[Result]:
    """Measure."""
    with work_folder(config.folder or None) as folder:
        path = folder / "index.index"
        synthetic_index(path, config.samples, config.seed)
        return _starting(path, config)


def _starting(path: Path, config: StartBench) -> list[Result]:
    """Starts over the index at `path`, and one over an index of the hundredth part (of one global batch at least)."""
    starts = [_start(path, config) for _ in range(config.repeats)]
    few = max(config.ranks * config.samples_per_rank, config.samples // 100)
    synthetic_index(path.with_stem("few"), few, config.seed)
    small = _start(path.with_stem("few"), config)["anonymous_bytes"]
    seconds = tuple(start["seconds"] for start in starts)
    cpu = [start["cpu_seconds"] for start in starts]
    memory = tuple(start["anonymous_bytes"] / 2**20 for start in starts)
    added = [(start["anonymous_bytes"] - start["before_bytes"]) / 2**20 for start in starts]
    return [
        Result(
            name=f"start a DataLoader over {config.samples:,} samples and plan its first step",
            unit="s",
            values=seconds,
            demand=2.0,
            note=f"fresh process, after imports; page cache warm; CPU time {statistics.median(cpu):.2g} s",
        ),
        Result(
            name="anonymous memory of that process",
            unit="MiB",
            values=memory,
            demand=1024.0,
            note=f"{max(added):.0f} MiB more than after imports",
        ),
        Result(
            name=f"  more than over {few:,} samples",
            unit="MiB",
            values=tuple((start["anonymous_bytes"] - small) / 2**20 for start in starts),
            demand=200.0,
        ),
        Result(
            name="resume after nine tenths of an epoch / at its start",
            unit="x",
            values=tuple(start["late_seconds"] / start["first_seconds"] for start in starts),
            note="CPU time of loading a state and planning its step",
        ),
    ]


def _start(path: Path, config: StartBench) -> dict[str, float]:
    """Start a loader in a fresh process and hear what it took."""
    command = [sys.executable, "-m", "benchmarks.start_one", str(path), str(config.ranks), str(config.samples_per_rank)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, float] = json.loads(done.stdout)
    return report


if __name__ == "__main__":
    run_command("benchmarks.start", StartBench, run)
