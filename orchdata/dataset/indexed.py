"""The index of a data set: which rows it chooses from, what is open in a process, and an index that the user names.

    take(N), [:N] --> the first N good samples --> rows before the one after the N-th
    index_file=, paths, recipe --one rank: the head--> all ranks --node's copy--> Index, or an error: it is never built

What is said of first samples is the same for the full index and for one of these samples alone, so a state loads with
either. Ranks of several nodes without a common cache folder, each with a random name in a file of its own, do not build
together: each node would read all of the shards.
"""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.selection import Selection, Taken
from orchdata.loaders import versions
from orchdata.loaders.errors import DamagedIndexError, MissingIndexError
from orchdata.loaders.index.index import Index, Place, digest, shards_fingerprint
from orchdata.loaders.index.index_file import (
    IndexFile,
    check_function_of,
    fetched,
    look,
    opened_copy,
    root_of,
    write_index_file,
)
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.container import container_of, identity_of
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.shards.shard import Reading, ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import read_small, write_once
from orchdata.loaders.storage.paths import media_root_of, names_and_patterns
from orchdata.loaders.storage.remote.urls import has_magic, is_match
from orchdata.loaders.storage.storage import basename, tried
from orchdata.notices import warn_once
from orchdata.ranks.first_comer import done_by_first
from orchdata.ranks.parallel import ranks_per_node

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of an index of `num_rows`, ascending: all but those in `without`, ascending."""

    num_rows: int
    without: Ints

    def __len__(self) -> int:
        return self.num_rows - len(self.without)

    def __getitem__(self, number: int) -> int:
        """Return the row with this number; negative numbers count from the end. Raises IndexError."""
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        # As many are left out before it as have at most `number` rows before them: of rows 0 1 (2) 3, number 2 is 3.
        return number + bisect_right(range(len(self.without)), number, key=lambda at: int(self.without[at]) - at)

    def number_of(self, row: int) -> int | None:
        """Return the number of a row; None if the row is not among them."""
        at = int(np.searchsorted(self.without, row))
        return None if row in self.without[at : at + 1] else row - at

    def listed(self) -> Ints:
        """Return the rows."""
        return np.delete(np.arange(self.num_rows), self.without)


class Chosen(NamedTuple):
    """Rows of samples, and the first row of each sample."""

    rows: Rows
    first_rows: Rows


class Opened:
    """The open files of a data set in this process: the index, once it was requested, its samples' rows, and shards."""

    def __init__(self, index: Index | None = None) -> None:
        self.lock = threading.RLock()
        self.index = index
        self.chosen: Chosen | None = None
        self.shards: OpenShards | None = None

    def note(self, index: Index) -> None:
        """Use this index from now on."""
        with self.lock:
            if self.index is None or self.index.build_id != index.build_id:
                self.index, self.chosen, self.shards = index, None, None


def num_first_samples(selections: Sequence[Selection | Taken]) -> int | None:
    """Return the number of the first good samples that selections choose from; None: they may choose any."""
    first = selections[0] if selections else None
    if not isinstance(first, Taken) or not isinstance(first.numbers, range):
        return None
    return max(1, first.numbers[-1] + 1 if first.numbers else 1)


def first_rows(index: Index, without: Ints) -> Rows:
    """Return the first row of each sample of an index, without some rows."""
    return Rows(index.num_rows, np.union1d(without, np.flatnonzero(index.piece)) if index.is_split else without)


def num_first_rows(index: Index, selections: Sequence[Selection | Taken]) -> int:
    """Return the number of the first rows of an index that selections choose from."""
    count = num_first_samples(selections)
    if count is None:
        return index.num_rows
    good = first_rows(index, index.bad_rows())
    return index.rows_of_sample(good[count - 1]).stop if count <= len(good) else index.num_rows


def is_partial(index: Index, urls: Sequence[str]) -> bool:
    """Return whether an index has the first samples of shards alone."""
    return len(index.shards) < len(urls) or any(shard.reach for shard in index.shards[-1:])


def content_of(index: Index, selections: Sequence[Selection | Taken]) -> tuple[str, Sequence[ShardInfo]]:
    """Return the identity of the content that selections choose from, for states, and its shards: all shards, or the
    rows and the shards of the first samples.
    """
    if num_first_samples(selections) is None:
        return shards_fingerprint(index.shards), index.shards
    rows = num_first_rows(index, selections)
    shards = index.shards[: int(index.shard[rows - 1]) + 1] if rows else ()
    digest = hashlib.blake2b(repr([(basename(shard.url), shard.size) for shard in shards]).encode(), digest_size=16)
    offsets, keys = index.keys(0, rows)
    for column in (np.diff(offsets), keys):
        digest.update(np.ascontiguousarray(column).data)
    return f"first {rows} rows {digest.hexdigest()}", shards


@dataclass(frozen=True, kw_only=True)
class NamedFile:
    """The file with the index of a data set."""

    url: str
    paths: tuple[str, ...]  # of the data set as given, without secrets
    recipe: Recipe
    reading: Reading
    command: str  # that writes it

    def look(self) -> IndexFile:
        """Return what the file is: one rank looks for all. Raises as `index_file.look`."""
        try:
            return IndexFile(
                *done_by_first(f"index file/{digest(self.url)}", lambda: look(self.url, self.reading.files))
            )
        except DamagedIndexError:
            raise
        except MissingIndexError as error:
            raise MissingIndexError(f"{error}: {self.command}") from None

    def opened(self, file: IndexFile) -> Index:
        """Return the index, of this node's copy. Raises MissingIndexError if it is of another recipe, of other shards,
        or of shards that were read otherwise; as `opened_copy`; FunctionError as `open_index`.
        """
        if file.share:
            raise MissingIndexError(
                f"{self.url} is part {file.share} of an index: join all with `orchdata index --merge`"
            )
        verdicts, counts = versions.rules()
        if file.counts != counts:
            raise self._unfit("was made by a release that counts samples otherwise")
        if file.recipe != self.recipe.count_fingerprint():
            raise self._unfit("was made under another recipe")
        if file.verdicts != verdicts:
            again = self.command.replace("orchdata index", "orchdata index --again", 1)
            warn_once(
                f"verdicts of {file.digest}",
                f"the index {self.url} was made by a release that judges samples otherwise, and is used as it is. To "
                f"judge them again: {again}",
            )
        place = Place(root_of(self.paths), self.reading.media_root)
        index = opened_copy(file, self.reading.files, place)
        check_function_of(index.recipe, self.recipe)
        reading = self.reading
        for shard in index.shards:
            container = container_of(reading.containers, shard.url) if reading.containers else None
            root = media_root_of(shard.url, reading.media_root) if container is None else None
            identity = "" if container is None else identity_of(container)
            known = shard.columns, shard.container, shard.key, bool(shard.media_root)
            if known != (reading.columns, identity, reading.key, bool(root)):
                raise self._unfit(
                    f"has {shard.url} with another media_root, or other columns, key or containers than are given"
                )
        self._check_paths([shard.url for shard in index.shards])
        index.fetch = partial(fetched, file, self.reading.files, place)
        return index

    def write(self, index: Index, share: str = "") -> None:
        """Write an index of the data set, or of a part of it, to the file. Raises ValueError, StorageError."""
        root, recipe, files = root_of(self.paths), self.recipe.count_fingerprint(), self.reading.files
        write_index_file([index], self.url, files, root=root, recipe=recipe, rules=versions.rules(), share=share)

    def _check_paths(self, urls: Sequence[str]) -> None:
        """Raise MissingIndexError if the shards are not those of the paths, in their order, as far as that is known
        without a listing.
        """
        given = names_and_patterns(self.paths)
        numbers = {name: number for number, name in reversed([*enumerate(given)])}
        patterns = [(number, each) for number, each in enumerate(given) if has_magic(each)]
        used, last = set(), 0
        for url in urls:
            number = numbers.get(url, numbers.get(url.rpartition("/")[0]))
            if number is None:
                number = next((at for at, pattern in patterns if is_match(pattern, url)), None)
            if number is None:
                raise self._unfit(f"has {url}, which the paths do not name")
            if number < last:
                raise self._unfit(f"has {url} after shards that come later in the paths")
            used.add(number)
            last = number
        if lacking := next((each for number, each in enumerate(given) if number not in used), None):
            raise self._unfit(f"has no shard of {lacking}")

    def _unfit(self, what: str) -> MissingIndexError:
        return MissingIndexError(f"the index {self.url} {what}: {self.command}")


def merged(urls: Sequence[str], out: str, reading: Reading) -> int:
    """Write one index of the shards of several index files, in the order of their parts, or else as given. Return how
    many shards it has.

    Raises ValueError if they are not of one recipe, lack a part, or have a shard twice; as `look` and `opened_copy`.
    """
    found = [look(url, reading.files) for url in urls]
    recipe, rules = found[0].recipe, (found[0].verdicts, found[0].counts)
    for file in found:
        if (file.recipe, file.verdicts, file.counts) != (recipe, *rules):
            raise ValueError(f"{file.url} is of another recipe, or of another release, than {found[0].url}")
    shares = {file.share for file in found} - {""}
    if len({file.share.partition("/")[2] for file in found}) == 1:
        found.sort(key=lambda file: int(file.share.partition("/")[0] or 0))
    for parts in {share.partition("/")[2] for share in shares}:
        if missing := [share for n in range(int(parts)) if (share := f"{n + 1}/{parts}") not in shares]:
            raise ValueError(f"parts {', '.join(missing[:9])} of the index are not among the files")
    indexes = [opened_copy(file, reading.files, Place(file.root, file.root)) for file in found]
    root = root_of([file.root + "x" for file in found])
    write_index_file(indexes, out, reading.files, root=root, recipe=recipe, rules=rules)
    return sum(len(index.shards) for index in indexes)


def check_one_folder(arguments: str) -> None:
    """Raise MissingIndexError if ranks on several nodes build an index together, and this one has another cache folder
    than the first rank: each node would read all shards. `arguments` are those of `orchdata index`, for the error.
    """
    import torch.distributed as dist

    local = ranks_per_node()
    there = dist.is_available() and dist.is_initialized()
    if not there or (local is not None and dist.get_world_size() <= local):
        return
    path = CacheFolder().file("locks", "folder")

    def name() -> str:
        try:
            return read_small(path, _MOST_BYTES).decode()
        except FileNotFoundError:
            _give_name(path)
            return read_small(path, _MOST_BYTES).decode()

    mine = tried(str(path), "cannot be read", name)
    if done_by_first("cache folder", lambda: mine) != mine:
        raise MissingIndexError(
            "no index of these shards, and the ranks run on several nodes without a common cache folder: each node "
            f"would read all shards. Build it once, `orchdata index {arguments} --out URL`, and pass "
            "index_file=URL; or set ORCHDATA_CACHE to a folder that all nodes share"
        )


_MOST_BYTES: Final = 64


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
