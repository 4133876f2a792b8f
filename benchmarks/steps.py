"""`python -m benchmarks.steps`: does a loader slow down the thread that trains?

The same step (a small transformer, forward and backward, and the Python around it) on the batches of

    cached       a list of batches, made before: what a step takes by itself
    threads      a loader in threads of this process
    processes    a loader in worker processes

in turn, a stretch of each at a time, after one that does not count. `over cached` is the median step of a lane over
that of the cached lane in the same round; `waiting` the share of a lane's time in which it waited for the next batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import orchdata as od
from orchdata.bench.corpus import Corpus


class Step:
    """A training step on the text of a batch, and a look at all its media."""

    def __init__(self, device: str, layers: int) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
        self._model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
        self._device = device

    def __call__(self, batch: Any) -> None:
        batch = batch.to(self._device, non_blocking=True)
        total = sum(held.arrays[name].float().mean() for held in batch.media.values() for name in list(held.arrays)[:1])
        out = self._model(torch.ones(8, 256, 512, device=self._device) * total)
        out.mean().backward()
        if self._device != "cpu":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=1_000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30, help="of a stretch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shards = Corpus(samples=args.samples, seed=0).write(Path(folder))
        found = measure(od.ShardDataset(shards), args)
    report = {
        "machine": machine(args.device),
        "command": shlex.join(["python", "-m", "benchmarks.steps", *sys.argv[1:]]),
    }
    text = json.dumps(report | {"lanes": found}, indent=2)
    sys.stdout.write(text + "\n")
    if args.out is not None:
        args.out.write_text(text + "\n")


def measure(dataset: od.ShardDataset, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    common: dict[str, Any] = {"batch_size": args.batch_size, "shuffle": True, "pin_memory": args.device != "cpu"}
    threads = od.DataLoader(dataset, num_threads=args.threads, **common)
    processes = od.DataLoader(dataset, num_workers=args.workers, num_threads=args.threads, prefetch_factor=4, **common)
    cached = list(itertools.islice(threads, args.steps))
    step = Step(args.device, args.layers)
    lanes: dict[str, Callable[[], Iterator[Any]]] = {
        "cached": lambda: itertools.cycle(cached),
        "threads": lambda: endless(threads),
        "processes": lambda: endless(processes),
    }
    times: dict[str, list[float]] = {name: [] for name in lanes}
    waits: dict[str, list[float]] = {name: [] for name in lanes}
    for number in range(args.rounds + 1):
        for name, start in lanes.items():
            batches = start()
            step(next(batches))  # workers start, and are not what is asked for
            spent, waited = stretch(batches, step, args.steps)
            if number:
                times[name].append(spent)
                waits[name].append(waited)
            del batches
    return {
        name: {
            "step ms": round(1000 * statistics.median(times[name]), 2),
            "over cached": round(statistics.median(map(ratio, times[name], times["cached"])), 4),
            "waiting": round(statistics.median(waits[name]), 4),
        }
        for name in lanes
    }


def stretch(batches: Iterator[Any], step: Step, steps: int) -> tuple[float, float]:
    """Median seconds of a step without the wait for its batch, and the share of all time in which it waited."""
    spent, waited = [], 0.0
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        got = time.perf_counter()
        step(batch)
        spent.append(time.perf_counter() - got)
        waited += got - asked
    return statistics.median(spent), waited / (waited + sum(spent))


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def ratio(one: float, two: float) -> float:
    return one / two


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device != "cpu" else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads of torch, torch {torch.__version__}"


if __name__ == "__main__":
    main()
