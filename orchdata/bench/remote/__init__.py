"""`orchdata bench throughput --remote`: an epoch from far storage, next to one from files of this machine.

    shards --served with a delay--> URLs --index, loader--> how long a training loop waits, and for its first batch

The consumer takes twice as long for a batch as loading it from files takes: it is what a GPU would be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from orchdata.bench.harness import Result, WideTable, work_folder
from orchdata.bench.remote.server import served
from orchdata.bench.throughput import ThroughputBench, made_up_shards

if TYPE_CHECKING:
    from orchdata.dataset.shard_dataset import ShardDataset

MOST_WAITING = 0.01
MOST_LATER_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteBench:
    """What to measure.

    Attributes:
        samples: of the made-up data set.
        batch_size: samples of a batch.
        workers: threads of each loader.
        latency_ms: delay before each answer of the server.
        repeats: epochs from each place.
        seed: of data set and order.
        folder: where to write data; a temporary folder there by default.
    """

    samples: int = 800
    batch_size: int = 16
    workers: int = 2
    latency_ms: float = 20.0
    repeats: int = 3
    seed: int = 0
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "workers", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.latency_ms < 0:
            raise ValueError(f"latency_ms must be at least 0, got {self.latency_ms}")


class _Epoch(NamedTuple):
    """An epoch: the seconds it took, those the loop waited for all but the first batch, and for the first, CPU seconds
    of this process, and the requests that were made.
    """

    seconds: float
    waiting: float
    first: float
    cpu: float
    requests: int


def run(config: RemoteBench) -> list[Result | WideTable]:
    """Measure: epochs from files and from the server take turns."""
    from orchdata.dataset.shard_dataset import ShardDataset

    with work_folder(config.folder) as folder:
        sizes = ThroughputBench(samples=config.samples, batch_size=config.batch_size, seed=config.seed)
        paths = made_up_shards(sizes, folder)
        with served(folder / "shards", config.latency_ms / 1e3) as url:
            began = time.perf_counter()
            near = ShardDataset(paths)
            near.index()
            near_seconds = time.perf_counter() - began
            began = time.perf_counter()
            far = ShardDataset([f"{url}/{Path(path).name}" for path in paths])
            far.index()
            far_seconds = time.perf_counter() - began
            _epoch(near, config, 0.0)  # loads kernels
            pause = 2 * statistics.median(_epoch(near, config, 0.0).seconds for _ in range(config.repeats))
            pause /= -(-config.samples // config.batch_size)
            turns = [(_epoch(near, config, pause), _epoch(far, config, pause)) for _ in range(config.repeats)]
            free = [(_epoch(near, config, 0.0), _epoch(far, config, 0.0)) for _ in range(config.repeats)]
    return _results(config, turns, free, (near_seconds, far_seconds))


def _epoch(dataset: ShardDataset, config: RemoteBench, pause: float) -> _Epoch:
    from orchdata.dataloader import DataLoader

    loader = DataLoader(
        dataset, batch_size=config.batch_size, seed=config.seed, num_threads=config.workers, shuffle=True
    )
    cpu, began = time.process_time(), time.perf_counter()
    waits, at = [], began
    for _ in loader:
        waits.append(time.perf_counter() - at)
        time.sleep(pause)
        at = time.perf_counter()
    requests = loader.stats()["reads"].get("requests", {})
    return _Epoch(at - began, sum(waits[1:]), waits[0], time.process_time() - cpu, requests.get("get", 0))


def _results(
    config: RemoteBench,
    turns: Sequence[tuple[_Epoch, _Epoch]],
    free: Sequence[tuple[_Epoch, _Epoch]],
    index_seconds: tuple[float, float],
) -> list[Result | WideTable]:
    far = f"from a server that is {config.latency_ms:g} ms away"
    return [
        Result(
            name=f"waiting {far}, of the epoch",
            unit="%",
            values=tuple(100 * each.waiting / each.seconds for _, each in turns),
            demand=100 * MOST_WAITING,
            note="a consumer at half of the speed of loading files",
        ),
        Result(
            name="waiting, from files of this machine",
            unit="%",
            values=tuple(100 * each.waiting / each.seconds for each, _ in turns),
        ),
        Result(
            name=f"first batch {far}, later than from files",
            unit="s",
            values=tuple(remote.first - local.first for local, remote in turns),
            demand=MOST_LATER_SECONDS,
        ),
        Result(
            name=f"CPU of a sample {far}, more than from files",
            unit="ms",
            values=tuple(1e3 * (remote.cpu - local.cpu) / config.samples for local, remote in free),
            demand=0.5,
            note="of the loader's process; nothing is done with the batches",
        ),
        Result(
            name="speed without a consumer, of that from files",
            unit="x",
            values=tuple(local.seconds / remote.seconds for local, remote in free),
            better="high",
        ),
        Result(
            name="requests of a sample",
            unit="",
            values=tuple(each.requests / config.samples for _, each in turns),
            demand=1.2,
        ),
        Result(
            name="indexing, of the speed from files",
            unit="x",
            values=(index_seconds[0] / index_seconds[1],),
            better="high",
            note="in turn, once: the first loads what indexing needs",
        ),
    ]
