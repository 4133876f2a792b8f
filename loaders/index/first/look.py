"""A first look at shards: some samples of some shards, measured now, say about what a full index would say.

    shards --some, spread over all--> first samples of each --measured--> counts --by their share--> counts of all

Nothing is kept: what is known of a part is never taken for what is known of all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DataError, ShardError, StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.index.index import absolute
from orchdata.loaders.index.probed import Probes
from orchdata.loaders.index.shard_costs import ShardCosts, cost_shard
from orchdata.loaders.index.totals import Totals, sum_totals
from orchdata.loaders.pace import threads_or_default
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.first.begun import begun
from orchdata.loaders.shards.jsonl.media_files import MissingMedia
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.shards.reading import PLAIN, Reading
from orchdata.loaders.slow import here, watching
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.retries import BUILD_SECONDS, Patience

MOST_SHARDS: Final = 32
_STAT_THREADS: Final = 16
_LEAST_PART: Final = 0.25
"""Of the time for the first samples, the part that is counted as that of the samples at least: times are noisy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """About what a full index of shards would say.

    Attributes:
        num_shards: number of all shards.
        num_bytes: their bytes as stored.
        looked_at: number of shards that were looked at.
        measured: number of samples that were measured, bad ones included.
        totals: of all shards, as `totals.summarize` counts them: estimated, except those called `max_...`, which are of
            the measured samples.
        failures: of measured samples.
        failed_shards: those of the shards that were looked at that cannot be read.
        index_seconds: time that the full index takes, with as many threads as `build_index` takes by default.
    """

    num_shards: int
    num_bytes: int
    looked_at: int
    measured: int
    totals: Totals
    failures: Sequence[DataError]
    failed_shards: Sequence[DataError]
    index_seconds: float


def first_look(
    urls: Sequence[str],
    recipe: Recipe,
    limit: int,
    *,
    reading: Reading = PLAIN,
    seed: int = 0,
    num_threads: int | None = None,
    progress: Callable[[float, int], None] | None = None,
    retry_seconds: float = BUILD_SECONDS,
) -> Estimate:
    """Measure about `limit` samples of up to 32 shards spread over all, each from its beginning. Nothing is kept.

    Args:
        urls: paths of the shards, expanded, in order; at least one.
        recipe: defines the costs.
        limit: number of samples, at least 1.
        reading: how the shards are read.
        seed: chooses the shards.
        num_threads, retry_seconds: as of `build_index`.
        progress: called after each shard with the number that is done, and the number to look at.

    Raises:
        ValueError: no shards, an unknown suffix, or a limit below 1.
        StorageError, StaleIndexError, MemoryError, PackageError, FunctionError: as `build_index`.
    """
    if limit < 1:
        raise ValueError(f"the limit is a number of samples, at least 1, got {limit}")
    if not urls:
        raise ValueError("no shards to index")
    load_for_scanning(recipe)
    paths = [absolute(url) for url in urls]
    reading = reading.looked_up(paths)
    chosen = _chosen(paths, min(MOST_SHARDS, limit), seed)
    workers = threads_or_default(num_threads)
    missing = MissingMedia()
    patience = Patience(retry_seconds, lambda error: None)
    looker = _Looker(recipe, reading, -(-limit // len(chosen)), missing)

    def look(url: str) -> _Look:
        return patience.keep_trying(lambda: looker.look(url), StorageError, StaleIndexError)

    looks: list[_Look] = []
    pool = ThreadPoolExecutor(workers, thread_name_prefix="orchdata-look")
    try:
        with measuring(), watching():
            for each in pool.map(look, chosen):
                looks.append(each)
                if progress is not None:
                    progress(len(looks), len(chosen))
    finally:
        patience.end()
        pool.shutdown(cancel_futures=True)
    missing.check()
    return _estimate(paths, looks, workers, reading.files)


def _chosen(paths: Sequence[str], most: int, seed: int) -> list[str]:
    """Return shards spread over all: one at random of each stretch."""
    count = min(most, len(paths))
    draw = random.Random(seed).random
    bounds = [number * len(paths) // count for number in range(count + 1)]
    return [paths[bounds[at] + int(draw() * (bounds[at + 1] - bounds[at]))] for at in range(count)]


class _Look(NamedTuple):
    """What the first samples of a shard say.

    Attributes:
        size: bytes of the shard as stored.
        totals: of these samples.
        share: of the samples of the shard that these are.
        failures: of these samples.
        failed: why the shard cannot be read, if so.
        seconds: time for the whole shard: that of opening it, and that of its samples.
    """

    size: int
    totals: Totals
    share: float
    failures: list[DataError]
    failed: DataError | None
    seconds: float


class _Looker:
    """Measures the first samples of shards. Safe from several threads."""

    def __init__(self, recipe: Recipe, reading: Reading, most: int, missing: MissingMedia) -> None:
        self._recipe = recipe
        self._reading = reading
        self._most = most
        self._missing = missing
        self._probes = Probes(recipe, None)
        self._cache = CacheFolder()

    def look(self, url: str) -> _Look:
        """Look at a shard: at one sample, to know the time that opening it takes, then at all that are wanted."""
        size = self._reading.files.size_of(url)
        with here().at(url):
            first, _, opening = self._timed(url, 1)
            costs, share, seconds = self._timed(url, self._most) if self._most > 1 else (first, _, opening)
        if isinstance(costs, ShardError):
            return _failed(DataError(url, "", "", costs.reason), size, seconds)
        failures = list(_failures(url, costs))
        if failures and not failures[0].key and costs.totals["samples"] == 1:
            return _failed(failures[0], size, seconds)
        of_samples = max(seconds - opening, _LEAST_PART * seconds)
        return _Look(size, costs.totals, share, failures, None, seconds - of_samples + of_samples / share)

    def _timed(self, url: str, most: int) -> tuple[ShardCosts | ShardError, float, float]:
        began = time.perf_counter()
        try:
            costs, share = self._costs(url, most)
        except Exception as error:  # noqa: BLE001 - an exception while reading a shard fails that shard
            pass_trouble(error)
            if not isinstance(error, ShardError):
                error = ShardError(url, f"cannot be scanned: {type(error).__name__}: {error}")
            return error, 1.0, time.perf_counter() - began
        return costs, share, time.perf_counter() - began

    def _costs(self, url: str, most: int) -> tuple[ShardCosts, float]:
        recipe = self._recipe
        rules = self._reading.rules(url, recipe)
        how: dict[str, Any] = {"media_root": self._reading.root_of(url, rules), "rules": rules}
        how["files"] = self._reading.files
        with begun(url, most, limits=recipe.limits, cache=self._cache, **how) as (shard, beginning):
            costs = cost_shard(beginning.facts, lambda: shard, recipe, self._probes)
            if isinstance(shard, JsonLinesShard) and shard.folder is not None:
                self._missing.add(shard.folder)
            return costs, beginning.share


def _failed(failure: DataError, size: int, seconds: float) -> _Look:
    return _Look(size, {}, 1.0, [], failure, seconds)


def _failures(url: str, costs: ShardCosts) -> list[DataError]:
    """Return the errors of the bad samples."""
    columns = costs.columns

    def text(name: str, at: int) -> str:
        start, stop = getattr(columns, f"{name}_offsets")[at : at + 2].tolist()
        return bytes(getattr(columns, f"{name}_bytes")[start:stop]).decode("utf-8", "replace")

    rows = columns.bad_row.tolist()
    return [
        DataError(url, text("key", row), text("error_field", at), text("error_reason", at))
        for at, row in enumerate(rows)
    ]


def _estimate(paths: Sequence[str], looks: Sequence[_Look], workers: int, files: Files) -> Estimate:
    sizes = _sizes(paths, files)
    num_bytes = sum(sizes)
    is_all = len(looks) == len(paths)
    scale = 1.0 if is_all else num_bytes / max(1, sum(look.size for look in looks))
    read = [look for look in looks if look.failed is None]
    totals = _scaled(sum_totals([_scaled(look.totals, 1 / look.share) for look in read]), scale, round)
    return Estimate(
        num_shards=len(paths),
        num_bytes=num_bytes,
        looked_at=len(looks),
        measured=sum(look.totals["samples"] for look in read),
        totals=totals,
        failures=[failure for look in looks for failure in look.failures],
        failed_shards=[look.failed for look in looks if look.failed is not None],
        index_seconds=scale * sum(look.seconds for look in looks) / min(workers, len(paths)),
    )


def _scaled(totals: Totals, factor: float, as_number: Callable[[float], float] = float) -> Totals:
    def scaled(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {each: scaled(each, one) for each, one in value.items()}
        return value if name.startswith("max_") else as_number(factor * value)

    return {name: scaled(name, value) for name, value in totals.items()}


def _sizes(paths: Sequence[str], files: Files) -> list[int]:
    """Return the size of each shard; 0 for one that does not exist now."""
    with ThreadPoolExecutor(_STAT_THREADS, thread_name_prefix="orchdata-sizes") as pool:
        return list(pool.map(files.size_of, paths, chunksize=100))
