"""Building together without a common cache folder: what one builder has measured, the others take from the store.

    measured shard --uploaded--> parts/<name>/<digest>.costs --taken by another--> its cache folder

The parts are listed now and then; what is in no listing costs no request. They stay until the index is published, so
that a build which follows a killed one goes on from them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from orchdata.loaders.errors import StorageError
from orchdata.loaders.index.published.folder import PublishedFolder
from orchdata.loaders.index.published.manifest import generations
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.opening import opened
from orchdata.loaders.storage.storage import FileVersion

_LEAST_SECONDS: Final = 1.0
_TIMES: Final = 20.0
"""How long a listing of parts is used, at least, and in times of what it took."""


class PublishedMeanwhile(Exception):
    """Another builder has published the index. Internal: ends a build."""


class Parts:
    """The parts of one data set, from many threads.

    Args:
        name: of the data set, see `manifest.name_of`.
        newest: the newest generation when the build began; it ends if there is a newer one.
        gives: whether others build it too: what is measured here is uploaded, and what they have is looked for again.
        clock: returns seconds.
    """

    def __init__(
        self,
        folder: PublishedFolder,
        name: str,
        *,
        newest: int,
        gives: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._name = name
        self._newest = newest
        self._gives = gives
        self._clock = clock
        self._lock = threading.Lock()
        self._listed: dict[str, FileVersion] = {}
        self._list_at: float | None = None
        self._given: list[str] = []

    def take(self, path: str) -> bool:
        """Write the part of a shard to the path of its costs. Return False if there is none.

        Raises StorageError, and PublishedMeanwhile.
        """
        self._look()
        name = Path(path).name
        file = self._listed.get(name)
        if file is None:
            return False
        data = self._folder.read(self._path(name), file)
        if data is None:  # removed: probably the index is published
            self._list_at = 0.0
            self._look()
            return False
        write_whole(path, data)
        return True

    def give(self, path: str) -> None:
        """Upload the costs of a shard that were measured here. Raises StorageError."""
        if not self._gives:
            return
        with opened(path) as fd, open(fd, "rb", closefd=False) as file:
            data = file.read()
        name = Path(path).name
        self._folder.write(self._path(name), data)
        with self._lock:
            self._given.append(name)

    def remove(self, *, only_given: bool = False) -> None:
        """Remove the parts, once the index is published; best effort.

        Args:
            only_given: only those that this builder has uploaded: another one removes the rest.
        """
        if only_given and not self._given:
            return
        try:
            names = self._folder.names(f"parts/{self._name}")
            chosen = names.keys() & set(self._given) if only_given else names.keys()
            self._folder.remove([self._path(each) for each in sorted(chosen)])
        except StorageError:
            return  # what is left does no harm, and the next build removes it

    def _path(self, name: str) -> str:
        return f"parts/{self._name}/{name}"

    def _look(self) -> None:
        """List the parts, unless that was done just now. One thread lists again, the others use the last listing."""
        with self._lock:
            if self._list_at is None:
                self._list()
                return
            if self._clock() < self._list_at:
                return
            self._list_at = float("inf")
        try:
            self._list()
        except BaseException:
            self._list_at = 0.0  # another thread tries it
            raise

    def _list(self) -> None:
        began = self._clock()
        if self._folder.can_list and max(generations(self._folder, self._name), default=0) > self._newest:
            raise PublishedMeanwhile
        self._listed = self._folder.names(f"parts/{self._name}") if self._folder.can_list else {}
        now = self._clock()
        self._list_at = now + max(_LEAST_SECONDS, _TIMES * (now - began)) if self._gives else float("inf")
