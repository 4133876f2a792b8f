"""`orchdata bench throughput`: loading speed on this machine, of a made-up data set or of the user's.

    shards --index--> rows --bare threads, each sample read, decoded and dropped--> samples/s
                           --DataLoader with threads, with worker processes-------> samples/s, waits for batches

They take turns, an epoch each, in this process; the first turn does not count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from orchdata.bench.harness import Result, ThroughputBench, WideTable, work_folder
from orchdata.dataloader import DataLoader
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.delivery.policy import ErrorPolicy
from orchdata.engines.threads import use_one_thread
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_required
from orchdata.loaders.samples.sample import decode_sample
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.synth import synthesize

BARE = "bare threads"


class Epoch(NamedTuple):
    """Figures of an epoch: samples a second after the first batch, and seconds: until the first batch, and of each
    other one that it was waited for, and that the consumer's work took.
    """

    rate: float
    first: float = 0.0
    waits: tuple[float, ...] = ()
    works: tuple[float, ...] = ()


def run(
    config: ThroughputBench, recipe: Recipe | None = None, storage_options: Mapping[str, str] | None = None
) -> list[Result | WideTable]:
    """Measure.

    Args:
        recipe: that `config.recipe` names.
        storage_options: of `config.paths`; no part of the configuration, which reports show.

    Raises ValueError for fewer than three batches.
    """
    with work_folder(config.folder) as folder:
        if config.paths:
            dataset = ShardDataset(
                list(config.paths), recipe, media_root=config.media_root, storage_options=storage_options
            )
            return _compared(config, dataset)
        paths = synthesize("omni", folder / "shards", samples=config.samples).paths
        before, os.environ["ORCHDATA_CACHE"] = os.environ.get("ORCHDATA_CACHE"), str(folder / "cache")
        try:
            return _compared(config, ShardDataset([str(path) for path in paths]))
        finally:
            del os.environ["ORCHDATA_CACHE"]
            if before is not None:
                os.environ["ORCHDATA_CACHE"] = before


def _compared(config: ThroughputBench, dataset: ShardDataset) -> list[Result | WideTable]:
    index = dataset.index()
    good = np.setdiff1d(np.arange(index.num_rows), index.bad_rows(), assume_unique=True)
    rows = np.random.default_rng(config.seed).permutation(good)[: config.samples].tolist()
    if len(rows) < 3 * config.batch_size:
        raise ValueError(f"batches of {config.batch_size} need {3 * config.batch_size} samples, got {len(rows)}")
    ways: dict[str, Callable[[], Epoch]] = {
        BARE: partial(_bare, config, dataset, rows),
        "threads": partial(_loaded, config, dataset, len(rows), num_threads=config.workers),
        "processes": partial(_loaded, config, dataset, len(rows), num_workers=config.workers),
    }
    epochs: dict[str, list[Epoch]] = {name: [] for name in ways}
    for turn in range(1 + config.repeats):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            epoch = ways[name]()
            if turn:
                epochs[name].append(epoch)
    return _results(epochs)


def _bare(config: ThroughputBench, dataset: ShardDataset, rows: Sequence[int]) -> Epoch:
    """No order, and no batches to pack: what reading and decoding allow."""
    index, recipe = dataset.index(), dataset.recipe
    load_required(recipe)
    shards = OpenShards(limits=recipe.limits, cache=CacheFolder(), files=dataset.files)

    def decode(row: int) -> None:
        sample = StoredSample(index, shards, row)
        payloads = sample.read(recipe)
        spans, generator_of = partial(sample.spans, recipe, payloads), partial(sample.generator, Pass())
        decode_sample(sample.members, payloads, index.sizes(sample.parts, recipe), recipe, spans, generator_of)

    with ThreadPoolExecutor(config.workers, initializer=use_one_thread) as pool:
        began = time.perf_counter()
        for _ in pool.map(decode, rows):
            pass
        return Epoch(len(rows) / (time.perf_counter() - began))


def _loaded(
    config: ThroughputBench, dataset: ShardDataset, samples: int, *, num_workers: int = 0, num_threads: int = 1
) -> Epoch:
    loader = DataLoader(
        dataset,
        batch_size=config.batch_size,
        shuffle=True,
        seed=config.seed,
        num_workers=num_workers,
        num_threads=num_threads,
        dp=(0, 1),
        on_error=ErrorPolicy("skip", max_failures=None),
    )
    waits, works, counts = [], [], []
    at = time.perf_counter()
    for batch in islice(loader, samples // config.batch_size):
        waits.append(time.perf_counter() - at)
        counts.append(len(batch.sample_ids))
        at, began = time.perf_counter(), time.thread_time()
        while time.thread_time() - began < config.consumer_ms / 1e3:
            pass
        works.append(time.perf_counter() - at)
        at = time.perf_counter()
    loader.close()
    return Epoch(sum(counts[1:]) / (sum(waits[1:]) + sum(works[1:])), waits[0], tuple(waits[1:]), tuple(works[1:]))


def _results(epochs: Mapping[str, Sequence[Epoch]]) -> list[Result | WideTable]:
    bare = [epoch.rate for epoch in epochs[BARE]]
    rows: list[tuple[str | float | None, ...]] = []
    for name, runs in epochs.items():
        rate = statistics.median(run.rate for run in runs)
        waits = 1e3 * np.concatenate([run.waits for run in runs])
        times: list[float | None] = [None] * 4
        if len(waits):
            works = 1e3 * np.concatenate([run.works for run in runs])
            first = statistics.median(run.first for run in runs)
            times = [first, float(np.median(waits)), float(np.quantile(waits, 0.99)), float(np.median(works))]
        rows.append((name, rate, rate / statistics.median(bare), *times))
    columns = ("", "samples/s", "of bare", "first batch s", "wait p50 ms", "wait p99 ms", "work ms")
    return [
        WideTable(title="one epoch", columns=columns, rows=tuple(rows)),
        *(
            Result(name=name, unit="samples/s", values=tuple(run.rate for run in runs), better="high")
            for name, runs in epochs.items()
        ),
    ]
