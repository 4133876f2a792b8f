"""`python -m benchmarks.steps`: does a loader slow down the thread that trains?

The same step (a small transformer, forward and backward, and the Python around it) on the batches of

    cached       a list of batches, made before: what a step takes by itself
    threads      a loader in threads of this process
    processes    a loader in worker processes

in turn, a stretch of each at a time, after one that does not count.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import orchdata as od
from benchmarks.command import run_command
from benchmarks.loading.corpus import Corpus
from orchdata.bench import WideTable


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsBench:
    """What is measured.

    Attributes:
        device: "cpu" or "cuda".
        layers: of the transformer.
        samples: of the data set.
        batch_size: samples of a step.
        workers: processes of the lane of processes.
        threads: of the lane of threads, and of each process.
        steps: of a stretch.
        rounds: stretches of each lane that count.
    """

    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    layers: int = 12
    samples: int = 1_000
    batch_size: int = 8
    workers: int = 2
    threads: int = 4
    steps: int = 30
    rounds: int = 5

    def __post_init__(self) -> None:
        for name in ("layers", "samples", "batch_size", "workers", "threads", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


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


def run(config: StepsBench) -> list[WideTable]:
    """Train on the batches of each lane in turn."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = od.ShardDataset(Corpus(samples=config.samples, seed=0).write(Path(folder)))
        found = _measure(dataset, config)
    where = config.device if config.device == "cpu" else torch.cuda.get_device_name()
    return [
        WideTable(
            title="a training step together with a loader",
            columns=("batches from", "step ms", "over cached", "waits %"),
            rows=tuple((lane, *figures) for lane, figures in found.items()),
            note=f"medians; the model is on {where}. Waits: the share of the time in which the step waits for a batch",
        )
    ]


def _measure(dataset: od.ShardDataset, config: StepsBench) -> dict[str, tuple[float, float, float]]:
    """Milliseconds of a step, these over the cached lane's of the same round, and the share of waiting in per cent."""
    common: dict[str, Any] = {
        "batch_size": config.batch_size,
        "shuffle": True,
        "pin_memory": config.device != "cpu",
        "num_threads": config.threads,
    }
    threads = od.DataLoader(dataset, **common)
    processes = od.DataLoader(dataset, num_workers=config.workers, prefetch_factor=4, **common)
    cached = list(itertools.islice(threads, config.steps))
    step = Step(config.device, config.layers)
    lanes: dict[str, Callable[[], Iterator[Any]]] = {
        "cached": lambda: itertools.cycle(cached),
        "threads": lambda: endless(threads),
        "processes": lambda: endless(processes),
    }
    times: dict[str, list[float]] = {name: [] for name in lanes}
    waits: dict[str, list[float]] = {name: [] for name in lanes}
    for number in range(config.rounds + 1):
        for name, start in lanes.items():
            batches = start()
            step(next(batches))  # workers start, and are not what is asked for
            spent, waited = stretch(batches, step, config.steps)
            if number:
                times[name].append(spent)
                waits[name].append(waited)
            del batches
    return {
        name: (
            1000 * statistics.median(times[name]),
            statistics.median(own / alone for own, alone in zip(times[name], times["cached"], strict=True)),
            100 * statistics.median(waits[name]),
        )
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


if __name__ == "__main__":
    run_command("benchmarks.steps", StepsBench, run)
