"""What a child of a build measures, one task at a time: a shard, or a chunk of one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from orchdata.loaders.claims import Claims
from orchdata.loaders.collector import leave_out_what_is_loaded
from orchdata.loaders.errors import OrchdataError, ProcessError
from orchdata.loaders.index.measuring.chunk import Progress, measure_chunk
from orchdata.loaders.index.measuring.reading import Chunk
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.jsonl.media_files import MissingMedia
from orchdata.loaders.slow import ThreadProgress, here
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.tokenizer_threads import share_cores


class Builds(Protocol):
    """The part of a builder that is used here."""

    claims: Claims
    missing_media: MissingMedia

    def costs(self, url: str, go_on: Callable[[], bool]) -> object: ...


@dataclass(frozen=True)
class Given:
    """What a process gets once.

    Attributes:
        open_builder: makes its builder, which keeps what it measures in a cache folder; it must pickle.
        cache: the cache folder of the build.
        count: number of processes.
    """

    open_builder: Callable[[CacheFolder], Builds]
    cache: CacheFolder
    recipe: Recipe
    count: int


class Measurer:
    """Measures in this process; used by one thread.

    Args:
        given: a pickled `Given`.
    """

    def __init__(self, given: bytes) -> None:
        self._pickled = given
        self._given: Given | None = None
        self._builder: Builds | None = None

    def run(self, kind: str, url: str, *chunk: Chunk) -> Any:
        """Return the result of a task: which files that records name are missing, or the results of a chunk. An error
        is returned, not raised.
        """
        try:
            given, builder = self._opened()
            if kind == "shard":
                builder.costs(url, lambda: True)
                return builder.missing_media.take()
            with here().at(url):
                return measure_chunk(chunk[0], given.recipe, url, Progress(ThreadProgress(), len(chunk[0])))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the build raises it
            return error.with_traceback(None)

    def _opened(self) -> tuple[Given, Builds]:
        if self._given is not None and self._builder is not None:
            return self._given, self._builder
        try:
            given: Given = pickle.loads(self._pickled)  # noqa: S301 - of the build
            share_cores(given.count)
            load_for_scanning(given.recipe)
            self._builder = given.open_builder(given.cache)
        except (OrchdataError, MemoryError):
            raise
        except Exception as error:
            raise ProcessError(
                f"a process that measures shards cannot use the recipe ({type(error).__name__}: {error}): index with "
                "--jobs 1 (jobs=1), which uses threads"
            ) from error
        self._builder.claims.close()  # the build has claimed the shard
        leave_out_what_is_loaded()  # it stays: the collector need not walk it while samples are measured
        self._given = given
        return given, self._builder


def packed(message: Any) -> bytes:
    """Return a pickled message, or an error, or a tuple that ends in one. What does not unpickle is a ProcessError."""
    try:
        data = bytes(ForkingPickler.dumps(message))
        pickle.loads(data)  # noqa: S301 - an exception of the user's may need other arguments than it names
        return data
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        error = message[-1] if isinstance(message, tuple) else message
        replaced = ProcessError(f"{type(error).__name__}: {error}")
        return bytes(ForkingPickler.dumps((message[0], replaced) if isinstance(message, tuple) else replaced))
