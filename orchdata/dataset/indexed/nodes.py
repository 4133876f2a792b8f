"""Ranks of several nodes without a common cache folder: each node would read all of the shards to index them.

Each cache folder has a random name in a file of its own. The ranks of a job compare these names.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from orchdata.loaders.errors import MissingIndexError
from orchdata.loaders.storage.atomic import write_once
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.opening import read_small
from orchdata.loaders.storage.retries import tried
from orchdata.ranks.first_comer import done_by_first, is_said, say
from orchdata.ranks.parallel import ranks_per_node

_KEY: Final = "cache folders differ"
_LOOK_SECONDS: Final = 2.0
_MOST_BYTES: Final = 64


class Apart:
    """Finds out whether ranks that build an index together have one cache folder.

    Args:
        arguments: of the command that builds the index, for the error.
    """

    def __init__(self, arguments: str) -> None:
        self._arguments = arguments
        self._is_one_node = _is_one_node()
        self._look_at = 0.0

    def check(self) -> None:
        """Raise MissingIndexError if this rank has another cache folder than the first rank that builds."""
        if self._is_one_node:
            return
        mine = _name_of(CacheFolder())
        if done_by_first("cache folder", lambda: mine) != mine:
            say(_KEY)
            raise self._error()

    def check_others(self) -> None:
        """Raise MissingIndexError if another rank has found so; it is often called."""
        if not self._is_one_node and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            if is_said(_KEY):
                raise self._error()

    def _error(self) -> MissingIndexError:
        return MissingIndexError(
            "no index of these shards, and the ranks run on several nodes without a common cache folder: each node "
            f"would read all shards. Build it once, `orchdata index {self._arguments} --out URL`, and pass "
            "index_file=URL; or set ORCHDATA_CACHE to a folder that all nodes share"
        )


def _is_one_node() -> bool:
    import torch.distributed as dist

    local = ranks_per_node()
    there = dist.is_available() and dist.is_initialized()
    return not there or (local is not None and dist.get_world_size() <= local)


def _name_of(cache: CacheFolder) -> str:
    """Return the random name of a cache folder. Raises StorageError."""
    path = cache.file("locks", "folder")

    def name() -> str:
        try:
            return read_small(path, _MOST_BYTES).decode()
        except FileNotFoundError:
            _give_name(path)
            return read_small(path, _MOST_BYTES).decode()

    return tried(str(path), "cannot be read", name)


def _give_name(path: Path) -> None:
    """Write a random name, unless another process does so: of two names one stays. Raises OSError."""
    own = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    write_once(own, os.urandom(16).hex().encode())
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.rename(own, path)
    finally:
        own.unlink(missing_ok=True)
