"""Writes sources of small tars, and reads 1, 16, 256 and 1,000 of them by each loader, in a fresh process each time."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.loading.processes import LaneError, run_in_child
from benchmarks.memory import energon, hugging_face, ours
from benchmarks.memory.job import MemoryJob, Used, measure
from benchmarks.peers import Peer, chosen, settings_table
from orchdata.bench import WideTable, work_folder
from orchdata.synth import make_sentences

_SHARDS: Final = 2  # of a source: `interleave_datasets` gives work to as many workers as the smallest source has shards
_LIMIT_SECONDS: Final = 900
_MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBench:
    """What to measure.

    Attributes:
        sources: numbers of sources, with commas between them.
        peers: "all", "none", or "datasets" and "energon" with a comma between them.
        batch_size: samples of a batch.
        batches: that are read before memory is measured.
        workers: threads, or worker processes.
        seed: of data and order.
        folder: where to write data; by default a temporary folder.
    """

    sources: str = "1,16,256,1000"
    peers: str = "all"
    batch_size: int = 32
    batches: int = 125
    workers: int = 2
    seed: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        for name in ("batch_size", "batches", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not all(part.strip().isdecimal() and int(part) for part in self.sources.split(",")):
            raise ValueError(f"sources must be numbers from 1 with commas between them, got {self.sources!r}")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of sources."""
        return tuple(map(int, self.sources.split(",")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane(Peer):
    """One loader.

    Attributes:
        load: reads batches.
        prepare: writes what it reads besides the tars into a folder.
    """

    load: Callable[[MemoryJob], Generator[int]]
    prepare: Callable[[MemoryJob, Path], None] | None = None


LANES: Final[dict[str, Lane]] = {
    "orchdata, threads": Lane(
        peer="ours",
        package="orchdata",
        module="orchdata",
        load=ours.threads,
        settings="Mixture, shuffled, num_threads=2: no other process",
        prepare=ours.prepare,
    ),
    "orchdata, processes": Lane(
        peer="ours",
        package="orchdata",
        module="orchdata",
        load=ours.processes,
        settings="Mixture, shuffled, num_workers=2, and the server that they are forked off",
        prepare=ours.prepare,
    ),
    "orchdata, forked": Lane(
        peer="ours",
        package="orchdata",
        module="orchdata",
        load=ours.forked,
        settings="Mixture, shuffled, num_workers=2, multiprocessing_context='fork'",
        prepare=ours.prepare,
    ),
    "HF datasets": Lane(
        peer="datasets",
        package="datasets",
        module="datasets",
        load=hugging_face.interleaved,
        settings="interleave_datasets(stopping_strategy='all_exhausted') of streamed tars, not shuffled, "
        "DataLoader(num_workers=2), forked",
    ),
    "Energon": Lane(
        peer="energon",
        package="megatron-energon",
        module="megatron.energon",
        load=energon.blended,
        settings="MetadatasetV2 with blend, not shuffled, num_workers=2, forked",
        prepare=energon.prepare,
    ),
}


def run(config: MemoryBench) -> list[WideTable]:
    """Measure. A loader that is not installed, or fails, is a row that says why."""
    lanes = chosen(LANES, config.peers)
    rows: list[tuple[str | float | None, ...]] = []
    with work_folder(config.folder or None) as folder:
        for number in config.numbers:
            job = _make_job(config, number, folder / f"{number}")
            for name, lane in lanes.items():
                try:
                    used = _measure(lane, job)
                except LaneError as error:
                    rows.append((name, f"{number:,}", f"not run: {error}", None, None, None, None))
                    continue
                rows.append((name, f"{number:,}", *_cells(used)))
    note = "PSS, and of that what is not a mapped file. A worker: the larger one of two."
    columns = ("loader", "sources", "trainer", "anonymous", "a worker", "its anonymous", "all processes")
    return [
        WideTable(title="memory in MiB", columns=columns, rows=tuple(rows), note=note),
        settings_table(lanes),
    ]


def _make_job(config: MemoryBench, number: int, folder: Path) -> MemoryJob:
    """Write the tars. All sources together have four times the samples that are read, and each at least 16."""
    folder.mkdir()
    samples = max(16, 4 * config.batches * config.batch_size // number)
    rng = np.random.default_rng(config.seed)
    texts = [make_sentences(rng, int(words)).encode() for words in rng.integers(10, 200, 256)]
    sources = []
    for source in range(number):
        urls = tuple(str(folder / f"source-{source:04d}-{shard}.tar") for shard in range(_SHARDS))
        for shard, url in enumerate(urls):
            with tarfile.open(url, "w") as archive:
                for sample in range(shard, samples, _SHARDS):
                    text = texts[int(rng.integers(len(texts)))]
                    member = tarfile.TarInfo(f"{source:04d}-{sample:06d}.txt")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text))
        sources.append(urls)
    return MemoryJob(
        sources=tuple(sources),
        folder=folder,
        batch_size=config.batch_size,
        batches=config.batches,
        workers=config.workers,
        seed=config.seed,
    )


def _measure(lane: Lane, job: MemoryJob) -> Used:
    python = lane.python
    if lane.prepare:
        (job.folder / lane.peer).mkdir(exist_ok=True)
        run_in_child(lane.prepare, (job, job.folder / lane.peer), job.folder, _LIMIT_SECONDS, python=python)
    used: Used = run_in_child(measure, (lane.load, job), job.folder, _LIMIT_SECONDS, python=python)[0]
    return used


def _cells(used: Used) -> Iterator[float | None]:
    """PSS and anonymous memory of the trainer and of the largest worker; PSS of all."""
    yield from (used.trainer.pss / _MIB, used.trainer.own / _MIB)
    largest = max(used.workers, default=None)
    yield from (None, None) if largest is None else (largest.pss / _MIB, largest.own / _MIB)
    yield used.together.pss / _MIB
