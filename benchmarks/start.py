"""`python -m benchmarks.start`: starting a loader over large indexes, and resuming late in an epoch.

synthetic indexes of 100 k, 1 M and 10 M rows --a fresh process: DataLoader(...)--> seconds, anonymous memory, plans
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import run_command
from orchdata.bench import Result, synthetic_index, work_folder
from orchdata.loaders.storage.sealed import forget


@dataclass(frozen=True, kw_only=True, slots=True)
class StartBench:
    """What to measure.

    Attributes:
        ranks: simulated DP ranks.
        samples_per_rank: of a step.
        samples: rows of the largest index; the others have a tenth and a hundredth, and one global batch at least.
        repeats: starts, each in a fresh process.
        seed: of the index.
        folder: where to write the indexes (about 170 bytes a row); by default a temporary folder.
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
    fewest = config.ranks * config.samples_per_rank
    sizes = sorted({max(fewest, config.samples // part) for part in (100, 10, 1)})
    with work_folder(config.folder or None) as folder:
        paths = {size: folder / f"{size}.index" for size in sizes}
        for size, path in paths.items():
            synthetic_index(path, size, config.seed)
        first = {size: [_first_start(path, config) for _ in range(config.repeats)] for size, path in paths.items()}
        later = {size: [_start(path, config) for _ in range(config.repeats)] for size, path in paths.items()}
        read = {size: path.stat().st_size for size, path in paths.items()}
    results = []
    for size in sizes:
        results += [_of_first_starts(size, read[size], first[size]), *_of_later_starts(size, later[size])]
    return [*results, _of_size(later[sizes[0]], later[sizes[-1]], sizes[0], sizes[-1])]


def _of_first_starts(size: int, num_bytes: int, starts: list[dict[str, float]]) -> Result:
    return Result(
        name=f"{size:,} samples: checksums verified, on the first start of a machine",
        unit="GB/s",
        values=tuple(num_bytes / start["opened_seconds"] / 1e9 for start in starts),
        demand=1.0,
        better="high",
        note=f"{num_bytes / 1e9:.2f} GB in the page cache",
    )


def _of_later_starts(size: int, starts: list[dict[str, float]]) -> list[Result]:
    cpu = statistics.median(start["cpu_seconds"] for start in starts)
    added = [(start["anonymous_bytes"] - start["before_bytes"]) / 2**20 for start in starts]
    return [
        Result(
            name=f"{size:,} samples: a later start, with the plan of the first step",
            unit="s",
            values=tuple(start["seconds"] for start in starts),
            demand=2.0,
            note=f"fresh process, after imports; CPU time {cpu:.2g} s",
        ),
        Result(
            name=f"{size:,} samples: anonymous memory of that process",
            unit="MiB",
            values=tuple(start["anonymous_bytes"] / 2**20 for start in starts),
            demand=1024.0,
            note=f"{max(added):.0f} MiB more than before, with the index open",
        ),
        Result(
            name=f"{size:,} samples: a plan",
            unit="ms",
            values=tuple(1e3 * start["plan_seconds"] for start in starts),
        ),
        Result(
            name=f"{size:,} samples: resume after nine tenths of an epoch / at its start",
            unit="x",
            values=tuple(start["late_seconds"] / start["first_seconds"] for start in starts),
            note="CPU time of loading a state and planning its step",
        ),
    ]


def _of_size(few: list[dict[str, float]], many: list[dict[str, float]], least: int, most: int) -> Result:
    """What grows with the number of rows. Starts are compared in pairs."""
    between = zip(few, many, strict=True)
    return Result(
        name=f"anonymous memory, {most:,} samples - {least:,}",
        unit="MiB",
        values=tuple((large["anonymous_bytes"] - small["anonymous_bytes"]) / 2**20 for small, large in between),
        demand=200.0,
    )


def _first_start(path: Path, config: StartBench) -> dict[str, float]:
    forget(path)
    return _start(path, config)


def _start(path: Path, config: StartBench) -> dict[str, float]:
    """Start a loader in a fresh process and hear what it took."""
    command = [sys.executable, "-m", "benchmarks.start_one", str(path), str(config.ranks), str(config.samples_per_rank)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, float] = json.loads(done.stdout)
    return report


if __name__ == "__main__":
    run_command("benchmarks.start", StartBench, run)
