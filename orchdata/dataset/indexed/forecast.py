"""How long an index takes: said once, about two seconds after the first shard is begun, if that is long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from orchdata.loaders.amounts import counted
from orchdata.loaders.errors import StorageError
from orchdata.loaders.index.building.crew import BuildProgress
from orchdata.loaders.slow import under_way_by_shard
from orchdata.loaders.storage.remote.files import PLAIN_FILES, Files
from orchdata.progress import in_words

SHORT_SECONDS: Final = 10.0
"""Of less time nothing is said."""
_AFTER_SECONDS: Final = 2.0
_STALLED_SECONDS: Final = 1.0
_MOST_SIZES: Final = 1000


class Forecast:
    """Foretells the end of a build from the bytes that are measured.

    Args:
        urls: absolute paths of the shards.
        advice: what the line says besides the time.
        processes: number of processes that build it together.
        files: where the shards are.
        clock: returns seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        advice: str,
        *,
        processes: int = 1,
        files: Files = PLAIN_FILES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._urls = urls
        self._advice = advice
        self._processes = processes
        self._files = files
        self._clock = clock
        self._began: float | None = None
        self._measured = 0  # bytes of shards that were measured now
        self._known = 0  # bytes of shards whose costs were kept
        self._all: float | None = None
        self._is_said = False
        self._furthest = (0.0, 0.0)  # most bytes so far, and when they were seen first

    def shard_done(self, shard: BuildProgress) -> None:
        """Note a shard; for `progress` of `build_index`."""
        if self._is_said:
            return
        if shard.measured:
            self._measured += self._size(shard.url)
            self._begin()
        else:
            self._known += self._size(shard.url)

    def look(self) -> None:
        """Say how long it takes as soon as that is known; call it about twice a second."""
        seconds = None if self._is_said else self.seconds_left()
        if seconds is not None and seconds > SHORT_SECONDS:
            self._is_said = True
            sys.stderr.write(
                f"indexing {counted(len(self._urls), 'shard')} takes about {in_words(seconds)} more: {self._advice}\n"
            )
            sys.stderr.flush()

    def seconds_left(self) -> float | None:
        """Return the seconds that the build takes from now; None if that cannot be said yet."""
        begun = sum(fraction * self._size(url) for url, fraction in under_way_by_shard())
        if begun:
            self._begin()
        if self._measured + begun > self._furthest[0]:
            self._furthest = self._measured + begun, self._clock()
        if begun and self._clock() - self._furthest[1] > _STALLED_SECONDS:
            return None  # it waits for storage, for an unknown time
        if self._began is None or self._clock() - self._began < _AFTER_SECONDS or not self._measured + begun:
            return None
        if self._all is None:
            chosen = self._urls[:: -(-len(self._urls) // _MOST_SIZES)]
            self._all = sum(map(self._size, chosen)) * len(self._urls) / len(chosen)
        left = max(0.0, self._all - self._measured - self._known - begun) / self._processes
        return left * (self._clock() - self._began) / (self._measured + begun)

    def _begin(self) -> None:
        self._began = self._clock() if self._began is None else self._began

    def _size(self, url: str) -> int:
        try:
            return self._files.size_of(url, retries=False)
        except StorageError:
            return 0
