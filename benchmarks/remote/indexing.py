"""Indexing tars in far storage, next to fetching them whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks.loading.corpus import Corpus
from benchmarks.remote.job import FarShards
from benchmarks.remote.store import FarStore
from orchdata.bench import Result, interleave
from orchdata.loaders.index.build import build_index
from orchdata.loaders.pace import threads_or_default
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.storage.cache import CacheFolder

LEAST_OF_FETCHING: Final = 0.7
_SAMPLES: Final = 500
_AUDIO_SHARE: Final = 0.0
_FOLDER: Final = "to-index"


def compare_indexing(store: FarStore, folder: Path, shards: int, repeats: int) -> list[Result]:
    """Index tars of 500 samples and 42 MB without a cache, in turn with fetching them whole, as many at a time.

    Args:
        folder: for tars and indexes.
        shards: number of tars; 0 measures nothing.
    """
    if not shards:
        return []
    tars = folder / _FOLDER
    tars.mkdir()
    paths = Corpus(samples=_SAMPLES * shards, shards=shards, audio_share=_AUDIO_SHARE).write(tars)
    num_bytes = sum(Path(path).stat().st_size for path in paths)
    store.upload(tars, _FOLDER)
    shutil.rmtree(tars)
    keys = [f"{_FOLDER}/{Path(path).name}" for path in paths]
    functions = {"indexing": _indexing(store, keys, folder / "indexes"), "fetching": _fetching(store, keys)}
    seconds = interleave(functions, repeats=repeats)
    note = f"{shards} tars of {_SAMPLES} samples and {num_bytes / shards / 1e6:.0f} MB, {_at_once()} at a time"
    rates = {name: tuple(num_bytes / 1e6 / each for each in taken) for name, taken in seconds.items()}
    ratios = tuple(mine / whole for mine, whole in zip(rates["indexing"], rates["fetching"], strict=True))
    return [
        Result(
            name="indexing / fetching the tars whole",
            unit="x",
            values=ratios,
            demand=LEAST_OF_FETCHING,
            better="high",
            note=note,
        ),
        Result(name="indexing", unit="MB/s", values=rates["indexing"], better="high"),
        Result(name="fetching the tars whole", unit="MB/s", values=rates["fetching"], better="high"),
    ]


def _at_once() -> int:
    """Shards that a build reads at the same time."""
    return threads_or_default(None, far=True)


def _indexing(store: FarStore, keys: list[str], folder: Path) -> Callable[[], None]:
    shards = FarShards(tuple(store.url(key) for key in keys), Recipe())

    def index() -> None:
        build_index(shards.urls, shards.recipe, cache=CacheFolder(folder), reading=shards.open().reading)
        shutil.rmtree(folder)

    return index


def _fetching(store: FarStore, keys: list[str]) -> Callable[[], None]:
    import obstore
    from obstore.store import S3Store

    client = S3Store(store.bucket, client_options={"allow_http": True})

    def fetch() -> None:
        with ThreadPoolExecutor(_at_once()) as pool:
            list(pool.map(lambda key: len(obstore.get(client, key).bytes()), keys))

    return fetch
