"""`python -m benchmarks.first_hour`: what a new user waits for, and what balancing does before a cost model is given.

one JSON Lines file --orchdata index in a process--> seconds to the first sign of progress, and from Ctrl-C to the end
samples of omni --plans with and without cost=--> largest over mean load of the ranks, in positions
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import orchdata as od
from benchmarks.command import run_command
from orchdata.bench import Result, work_folder
from orchdata.planning.plan import Plan
from orchdata.synth import synthesize

_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")
_SETTLED_SECONDS = 2.0
"""Of indexing before Ctrl-C."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstHourBench:
    """What to measure.

    Attributes:
        rows: of the JSON Lines file.
        words: of each row.
        repeats: processes that index it, each in a new cache.
        ranks, samples_per_rank: of the plans.
        samples: of omni.
        seed: of the texts and the order.
    """

    rows: int = 200_000
    words: int = 100
    repeats: int = 3
    ranks: int = 4
    samples_per_rank: int = 8
    samples: int = 512
    seed: int = 0


def run(config: FirstHourBench) -> list[Result]:
    """Measure."""
    with work_folder(None) as folder:
        return [*_waiting(folder, config), *_balanced(folder, config)]


def _waiting(folder: Path, config: FirstHourBench) -> list[Result]:
    path, generator = folder / "texts.jsonl", random.Random(config.seed)
    with path.open("w") as file:
        for _ in range(config.rows):
            file.write(json.dumps({"text": " ".join(generator.choices(_WORDS, k=config.words))}) + "\n")
    signs, ends = zip(*(_index(path, folder / f"cache{number}") for number in range(config.repeats)), strict=True)
    return [
        Result(name=f"first sign of progress, one file of {config.rows:,} rows", unit="s", values=signs, demand=2.0),
        Result(name="from Ctrl-C to the end of the process", unit="s", values=ends, demand=2.0),
    ]


def _index(path: Path, cache: Path) -> tuple[float, float]:
    """Index a file in a process with a terminal. Return the seconds to its first output, and from Ctrl-C to its end."""
    import pty

    parent, terminal = pty.openpty()
    command = [sys.executable, "-m", "orchdata.cli", "index", str(path)]
    start = time.monotonic()
    with subprocess.Popen(
        command, stdout=terminal, stderr=terminal, env={**os.environ, "ORCHDATA_CACHE": str(cache)}
    ) as process:
        os.close(terminal)
        os.read(parent, 1)
        first = time.monotonic() - start
        time.sleep(_SETTLED_SECONDS)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            while os.read(parent, 1 << 16):
                pass
        except OSError:  # the terminal is closed: the process has ended
            pass
        process.wait()
    os.close(parent)
    return first, time.monotonic() - sent


def _balanced(folder: Path, config: FirstHourBench) -> list[Result]:
    synthesize("omni", folder / "omni", samples=config.samples)
    dataset = od.ShardDataset(str(folder / "omni" / "*.tar"), recipe=od.Recipe())
    dataset.index()
    cost = od.CostModel(
        image=od.TransformerCost(hidden=1280, layers=32, ffn=5120),
        audio=od.TransformerCost(hidden=1280, layers=32, ffn=5120),
        llm=od.TransformerCost(hidden=4096, layers=32, ffn=11008),
    )
    results: list[Result] = []
    found = {name: _imbalances(dataset, each, config) for name, each in (("with", cost), ("without", None))}
    for phase in ("image", "audio", "llm"):
        figures = [statistics.median(found[name][phase]) for name in ("without", "with")]
        results.append(
            Result(
                name=f"largest over mean load of {phase}, without cost= over with it",
                unit="x",
                values=(figures[0] / figures[1],),
                demand=1.1,
                note=f"{figures[0]:.3f} and {figures[1]:.3f}, in positions",
            )
        )
    return results


def _imbalances(dataset: od.ShardDataset, cost: od.CostModel | None, config: FirstHourBench) -> dict[str, list[float]]:
    """Return the largest over the mean load of the ranks in positions, in each step, by phase."""
    found: dict[str, list[float]] = {}
    loader = od.DataLoader(
        dataset,
        batch_size=config.samples_per_rank,
        shuffle=True,
        seed=config.seed,
        drop_last=True,
        cost=cost,
        dp=(0, config.ranks),
    )
    for step in range(len(loader)):
        plan: Plan = loader.plan_at(0, step)
        for phase, loads in _positions(plan, dataset).items():
            if sum(loads):
                found.setdefault(phase, []).append(max(loads) * len(loads) / sum(loads))
    return found


def _positions(plan: Plan, dataset: od.ShardDataset) -> dict[str, list[int]]:
    """Return the positions of each rank in a step, by phase."""
    index = dataset.index()
    of_samples = {"llm": index.llm_tokens[plan.row].astype(np.int64)}
    for phase in plan.phases:
        if phase != "llm":
            parts, owners = index.parts_of(plan.row, phase)
            of_samples[phase] = np.bincount(owners, index.part_positions[parts], len(plan.row)).astype(np.int64)
    return {
        phase: np.bincount(plan.rank, positions, plan.num_ranks).astype(int).tolist()
        for phase, positions in of_samples.items()
    }


if __name__ == "__main__":
    run_command("benchmarks.first_hour", FirstHourBench, run)
