"""What a process measures for a build, one task at a time: a shard, or a chunk of one.

The process may be a child of the build, or run on another machine. There it may not see the cache folder of the build:
then it measures in a folder of its own, and its result has the files that the build needs.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from orchdata.loaders.claims import Claims
from orchdata.loaders.collector import leave_out_what_is_loaded
from orchdata.loaders.errors import OrchdataError, ProcessError, StorageError
from orchdata.loaders.index.measuring.chunk import Progress, measure_chunk
from orchdata.loaders.index.measuring.kept_sizes import FOLDER as SIZES
from orchdata.loaders.index.measuring.kept_texts import FOLDER as TEXTS
from orchdata.loaders.index.measuring.reading import Chunk
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.jsonl.media_files import Found, MissingMedia
from orchdata.loaders.slow import ThreadProgress, here
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.opening import status_of
from orchdata.loaders.tokenizer_threads import share_cores

_OWN_PREFIX: Final = "orchdata-measures-"
_ALIVE: Final = "alive"
"""The lock of such a folder that its process holds."""
_YOUNG_SECONDS: Final = 60.0
_SENT: Final = ("costs", "facts", TEXTS, SIZES)
"""Kinds of files in the cache folder that a build keeps of each shard."""


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
        seen: a file in that folder, which shows a process whether it sees it; "": it does.
    """

    open_builder: Callable[[CacheFolder], Builds]
    cache: CacheFolder
    recipe: Recipe
    count: int
    seen: str = ""


class Measured(NamedTuple):
    """What came of a shard.

    Attributes:
        found: which files that records name are missing.
        files: content of files by their names in the cache folder, for a build that does not have them yet.
    """

    found: Found
    files: Mapping[str, bytes]


class Measurer:
    """Measures in this process; used by one thread.

    Args:
        given: a pickled `Given`.
    """

    def __init__(self, given: bytes) -> None:
        self._pickled = given
        self._given: Given | None = None
        self._builder: Builds | None = None
        self._own: Path | None = None
        self._held = ExitStack()

    def run(self, kind: str, url: str, *chunk: Chunk) -> Any:
        """Return the result of a task: a `Measured`, or the results of a chunk. An error is returned, not raised."""
        try:
            given, builder = self._opened()
            if kind == "shard":
                builder.costs(url, lambda: True)
                return Measured(builder.missing_media.take(), self._take_files())
            with here().at(url):
                return measure_chunk(chunk[0], given.recipe, url, Progress(ThreadProgress(), len(chunk[0])))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the build raises it
            return error.with_traceback(None)

    def close(self) -> None:
        """Remove the folder of its own."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
        self._held.close()

    def _opened(self) -> tuple[Given, Builds]:
        if self._given is not None and self._builder is not None:
            return self._given, self._builder
        try:
            given: Given = pickle.loads(self._pickled)  # noqa: S301 - of the build
            share_cores(given.count)
            load_for_scanning(given.recipe)
            self._builder = given.open_builder(self._folder(given))
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

    def _folder(self, given: Given) -> CacheFolder:
        if not given.seen or os.path.exists(given.seen):
            return given.cache
        _remove_abandoned(Path(tempfile.gettempdir()))
        self._own = Path(tempfile.mkdtemp(prefix=_OWN_PREFIX))
        folder = CacheFolder(self._own)
        with suppress(OSError):  # without locks it is not removed by others
            self._held.enter_context(folder.lock(_ALIVE))
        return folder

    def _take_files(self) -> dict[str, bytes]:
        """Return the files that were made in a folder of its own, and remove them there."""
        own, files = self._own, dict[str, bytes]()
        if own is None:
            return files
        for kind in _SENT:
            for path in sorted((own / kind).rglob("*")):
                if path.is_file():
                    files[str(path.relative_to(own))] = path.read_bytes()
                    path.unlink()
        return files


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed: these do not hold their lock."""
    for lock in parent.glob(f"{_OWN_PREFIX}*/locks/{_ALIVE}"):
        with suppress(OSError, StorageError):
            status, folder = status_of(lock), lock.parent.parent
            is_young = status is None or time.time() - status.st_mtime < _YOUNG_SECONDS  # it may not be locked yet
            if not is_young:
                with CacheFolder(folder).lock(_ALIVE, waits=False) as is_abandoned:
                    if is_abandoned:
                        shutil.rmtree(folder, ignore_errors=True)


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


def new_mark(cache: CacheFolder) -> str:
    """Create a file by which another process knows that it sees this folder. Raises StorageError."""
    path = cache.make("locks") / f"seen-{uuid.uuid4().hex}"
    path.touch()
    return str(path)


def remove_mark(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
