"""Actors of Ray on this machine against worker processes: what they hand over and train in a second.

    batches of 6 MiB that one actor has ready --> MiB/s, and the CPU of this process for each, with the copy
    images --two actors, two worker processes, in turn--> samples/s

The starts of Ray, of actors and of processes do not count.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import orchdata as od
from benchmarks.command import run_command
from orchdata.bench import Result
from orchdata.synth import synthesize

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RayBench:
    """What to measure.

    Attributes:
        batches: that are handed over.
        mebibytes: of a batch.
        samples: images, audio and texts to train on.
        repeats: of each.
    """

    batches: int = 200
    mebibytes: int = 6
    samples: int = 800
    repeats: int = 5


class Ready(torch.utils.data.Dataset[torch.Tensor]):
    """One batch again and again, which is made once in each process."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self._count, self._num_bytes = count, num_bytes
        self._batch: torch.Tensor | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> torch.Tensor:
        if self._batch is None:
            self._batch = torch.zeros(self._num_bytes, dtype=torch.uint8)
        return self._batch


def run(config: RayBench) -> list[Result]:
    """Measure a configuration. A Ray is started, and ended, unless this process has one."""
    with _a_ray(), tempfile.TemporaryDirectory() as folder:
        return [*_hand_over(config), *_work(config, Path(folder))]


@contextmanager
def _a_ray() -> Any:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ours = not ray.is_initialized()
    if ours:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    if ours:
        ray.shutdown()


def _hand_over(config: RayBench) -> list[Result]:
    data = Ready(config.batches, config.mebibytes * _MIB)
    engine = od.RayEngine(num_cpus=1)
    loader = od.DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True, engine=engine)
    rates, costs = [], []
    for repeat in range(config.repeats + 1):
        started, cpu = time.perf_counter(), time.process_time()
        for _ in loader:
            pass
        seconds, spent = time.perf_counter() - started, time.process_time() - cpu
        if repeat:  # the first epoch starts the actor
            rates.append(config.batches * config.mebibytes / seconds)
            costs.append(1000 * spent / config.batches)
    loader.close()
    name = f"a batch of {config.mebibytes} MiB from an actor"
    return [
        Result(name=f"{name}: throughput", unit="MiB/s", values=tuple(rates), demand=300, better="high"),
        Result(name=f"{name}: CPU of the trainer's process", unit="ms", values=tuple(costs), demand=4),
    ]


def _work(config: RayBench, folder: Path) -> list[Result]:
    synthesize("omni", folder / "omni", samples=config.samples)
    return _train(config, sorted(map(str, (folder / "omni").glob("*.tar"))))


def _train(config: RayBench, shards: list[str]) -> list[Result]:
    dataset = od.ShardDataset(shards)
    dataset.index()
    common: dict[str, Any] = {"batch_size": 8, "num_workers": 2, "num_threads": 1, "persistent_workers": True}
    loaders = {
        "two actors": od.DataLoader(dataset, **common, engine=od.RayEngine(num_cpus=1)),
        "two worker processes": od.DataLoader(dataset, **common),
    }
    rates = _in_turn({name: partial(_samples_per_second, loader) for name, loader in loaders.items()}, config.repeats)
    for loader in loaders.values():
        loader.close()
    return _compared("training", "samples/s", rates, 0.75)


def _samples_per_second(loader: od.DataLoader) -> float:
    started = time.perf_counter()
    count = sum(len(batch.sample_ids) for batch in loader)
    return count / (time.perf_counter() - started)


def _in_turn(lanes: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call all lanes in turn, once without a result and then `repeats` times."""
    found: dict[str, list[float]] = {name: [] for name in lanes}
    for repeat in range(repeats + 1):
        for name, call in lanes.items():
            value = call()
            if repeat:
                found[name].append(value)
    return found


def _compared(what: str, unit: str, rates: dict[str, list[float]], demand: float) -> list[Result]:
    ray, ours = rates.values()
    ratios = tuple(one / other for one, other in zip(ray, ours, strict=True))
    lines = [
        Result(name=f"{what}, {name}", unit=unit, values=tuple(values), better="high") for name, values in rates.items()
    ]
    return [*lines, Result(name=f"{what}, the ratio", unit="x", values=ratios, demand=demand, better="high")]


if __name__ == "__main__":
    run_command("benchmarks.ray_engine", RayBench, run)
