"""Loading from an S3 server that is far away, compared to other loaders, with the same decoding.

    tars --stored in a bucket--> server, proxy with a delay --a child process a lane and turn: two epochs--> report
        '--prepare, timed apart--> formats that peers want, stored too

All lanes take the same samples, decode them with the same functions under the same recipe, and pack a batch into one
tensor for each modality. Server and proxy run on the same cores as the loaders, and cost every loader CPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.loading.corpus import Corpus
from benchmarks.loading.job import Shards
from benchmarks.remote.indexing import compare_indexing
from benchmarks.remote.job import FarShards, RemoteJob
from benchmarks.remote.lanes import chosen_lanes
from benchmarks.remote.report import make_results
from benchmarks.remote.store import FarStore, far_store
from benchmarks.remote.turns import Turns
from benchmarks.throughput.decoding import Decoder
from benchmarks.throughput.records import Records, RecordSamples
from orchdata.bench import Result, WideTable, work_folder
from orchdata.loaders.index.build import build_index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.storage.cache import CacheFolder

_SHARDS: Final = 8
_FOLDER: Final = "shards"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemotePeersBench:
    """What to measure.

    Attributes:
        samples: of the made-up data set: JPEGs of about 110 KB, with captions, in 8 plain tars.
        peers: "all", "none", or names with commas between them.
        latency_ms: delay before each answer of the server.
        batch_size: samples of a batch.
        workers: threads, or worker processes, of each loader.
        repeats: turns of each.
        index_shards: tars of 42 MB to index; 0 leaves that out.
        seed: of data set and order.
        folder: where to write data; by default a temporary folder.
    """

    samples: int = 800
    peers: str = "all"
    latency_ms: float = 20.0
    batch_size: int = 16
    workers: int = 2
    repeats: int = 3
    index_shards: int = 4
    seed: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "workers", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("latency_ms", "index_shards"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.samples < 4 * self.lead:
            raise ValueError(
                f"{self.workers} workers and batches of {self.batch_size} need {4 * self.lead} samples, "
                f"got {self.samples}"
            )

    @property
    def lead(self) -> int:
        """Samples at either end of an epoch that are not in its steady part."""
        return max(2 * self.workers * self.batch_size, self.samples // 10)


def run(config: RemotePeersBench) -> list[Result | WideTable]:
    """Measure. A loader that is not installed, or fails, is a row that says why.

    Raises ValueError for unknown peers.
    """
    lanes = chosen_lanes(config.peers)
    with work_folder(config.folder or None) as folder, far_store(config.latency_ms / 1e3) as store:
        job, index_seconds = _job(config, folder, store)
        turns = Turns(job, store, lanes, config.lead)
        for name in lanes:
            turns.prepare(name)
        for turn in range(config.repeats):
            for name in list(lanes)[:: 1 if turn % 2 else -1]:
                turns.take(name)
        turns.figures = {name: turns.figures[name] for name in lanes if name in turns.figures}
        results = make_results(turns, index_seconds)
        return results + list(compare_indexing(store, folder, config.index_shards, config.repeats))


def _job(config: RemotePeersBench, folder: Path, store: FarStore) -> tuple[RemoteJob, float]:
    """The data, stored and indexed in both places, and the seconds that the index from the bucket took."""
    tars = folder / _FOLDER
    tars.mkdir()
    corpus = Corpus(
        samples=config.samples,
        shards=_SHARDS,
        width=600,
        height=480,
        audio_share=0.0,
        words=15,
        seed=config.seed,
    )
    paths = corpus.write(tars)
    store.upload(tars, _FOLDER)
    keys = [f"{_FOLDER}/{Path(path).name}" for path in paths]
    recipe, cache = Recipe(), CacheFolder(folder / "cache")
    records = Records.of(build_index(paths, recipe, cache=cache))
    urls = [store.url(key) for key in keys]
    far = FarShards(tuple(urls), recipe)
    began = time.perf_counter()
    build_index(urls, recipe, cache=cache, reading=far.open().reading)
    index_seconds = time.perf_counter() - began
    decoder = Decoder(recipe)
    job = RemoteJob(
        shards=far,
        near=Shards(tuple(paths), recipe),
        samples=RecordSamples(records, decoder),
        urls=tuple(urls),
        signed=tuple(store.signed(key) for key in keys),
        bucket=store.bucket,
        records=records,
        decoder=decoder,
        shard_bytes=sum(Path(path).stat().st_size for path in paths) // len(paths),
        batch_size=config.batch_size,
        workers=config.workers,
        seed=config.seed,
        cache=folder / "cache",
        folder=folder,
        scratch=folder / "scratch",
    )
    return job, index_seconds
