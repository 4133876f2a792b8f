"""`python scripts/measure_together.py --tower image=MODULE:NAME --tower ... --out table.json`: towers on one device.

    each tower alone, with each share --seconds of a step--> TogetherTable.seconds
    each two towers side by side, half the device each --over alone--> TogetherTable.slowdown

NAME is a function without arguments that makes a tower and returns a function that runs one step of it, to its end. A
tower runs in a process of its own. On CUDA a share is a tenth of the multiprocessors, by that process's
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: start `nvidia-cuda-mps-control -d` before (no GPU has tried this). On the CPU it is
threads: a tenth of the cores for each, rounded.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from orchdata.planners.waves import TogetherTable

HALF = 5


class Tower:
    """A process that runs steps of a tower with a share of the device."""

    def __init__(self, source: str, tenths: int, device: str) -> None:
        threads = str(max(1, round(len(os.sched_getaffinity(0)) * tenths / 10)))
        share = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if device == "cuda":
            share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(10 * tenths)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--run", source],
            env={**os.environ, **share, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()

    def ask(self, steps: int, seconds: float) -> None:
        """Start: so many steps, or as many as end in some seconds."""
        assert self.process.stdin is not None
        print(steps, seconds, file=self.process.stdin, flush=True)

    def answer(self) -> list[float]:
        """Return the seconds of each step."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"a tower has ended with {self.process.wait()}: {' '.join(map(str, self.process.args[2:]))}"
            )
        found: list[float] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.__exit__(None, None, None)  # Closes its pipes, at which it ends, and waits.


def run_tower(source: str) -> None:
    """Serve a Tower: steps that standard input asks for, their seconds to standard output."""
    module, _, name = source.partition(":")
    step = getattr(importlib.import_module(module), name)()
    for _ in range(3):
        step()
    print("[]", flush=True)
    for line in sys.stdin:
        steps, seconds = (float(word) for word in line.split())
        times = [time.perf_counter()]
        while len(times) <= steps or times[-1] - times[0] < seconds:
            step()
            times.append(time.perf_counter())
        print(json.dumps([after - before for before, after in itertools.pairwise(times)]), flush=True)


class Towers:
    """Processes of towers by name and tenths, each started once."""

    def __init__(self, sources: Mapping[str, str], device: str) -> None:
        self.sources, self.device = sources, device
        self.made: dict[tuple[str, int], Tower] = {}

    def side_by_side(
        self, shares: Mapping[str, int], steps: Mapping[str, int] | None = None, seconds: float = 0.0
    ) -> dict[str, list[float]]:
        """Run some towers at once, so many steps of each and so long; return the seconds of the steps of each."""
        for key in shares.items():
            if key not in self.made:
                self.made[key] = Tower(self.sources[key[0]], key[1], self.device)
        for key in shares.items():
            self.made[key].ask(steps[key[0]] if steps else 1, seconds)
        return {name: self.made[name, tenths].answer() for name, tenths in shares.items()}

    def close(self) -> None:
        for tower in self.made.values():
            tower.close()


def measure(towers: Towers, tenths: Sequence[int], seconds: float, repeats: int) -> TogetherTable:
    """Measure the table: medians over repeats, of which each runs everything once."""
    alone: dict[tuple[str, int], list[float]] = {}
    paired: dict[tuple[str, str], list[float]] = {}
    shares = sorted({*tenths, HALF, 10})
    for _ in range(repeats):
        for name, share in itertools.product(towers.sources, shares):
            alone.setdefault((name, share), []).append(
                statistics.mean(towers.side_by_side({name: share}, seconds=seconds)[name])
            )
        for pair in itertools.combinations(towers.sources, 2):
            for name, times in towers.side_by_side(dict.fromkeys(pair, HALF), seconds=seconds).items():
                paired.setdefault((name, next(other for other in pair if other != name)), []).append(
                    statistics.mean(times)
                )
    of = {key: statistics.median(found) for key, found in alone.items()}
    return TogetherTable(
        device=f"{towers.device}, {len(os.sched_getaffinity(0))} cores",
        seconds={name: {share: of[name, share] for share in shares} for name in towers.sources},
        slowdown={
            name: {
                other: statistics.median(found) / of[name, HALF]
                for (mine, other), found in paired.items()
                if mine == name
            }
            for name in towers.sources
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", action="append", default=[], metavar="NAME=MODULE:NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tenths", type=int, nargs="+", default=[5, 10], help="shares, each of a tower alone")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("together.json"))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run_tower(options.run)
        return
    if not options.tower:
        parser.error("--tower is missing")
    sys.path.insert(0, os.getcwd())
    towers = Towers(dict(each.split("=", 1) for each in options.tower), options.device)
    try:
        table = measure(towers, options.tenths, options.seconds, options.repeats)
    finally:
        towers.close()
    options.out.write_text(json.dumps(table.to_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
