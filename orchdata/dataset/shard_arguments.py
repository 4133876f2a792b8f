"""Arguments of `ShardDataset`, checked, and the index that it names.

    index_file=, paths, recipe --one rank: the head--> all ranks --node's copy--> Index, or an error: it is never built

Ranks of several nodes without a common cache folder, each with a random name in a file of its own, do not build
together: each node would read all of the shards.
"""

from __future__ import annotations

import itertools
import keyword
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

from orchdata.dataset.selection import names_of_counts
from orchdata.loaders.errors import DamagedIndexError, MissingIndexError
from orchdata.loaders.index.index import Index, Place, check_function_of
from orchdata.loaders.index.index_file import IndexFile, fetched, look, opened_copy, root_of, write_index_file
from orchdata.loaders.recipe import Recipe, digest, versions
from orchdata.loaders.shards.container import Container, checked_containers, container_of, identity_of
from orchdata.loaders.shards.shard import Reading
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.local import is_folder, read_small, write_once
from orchdata.loaders.storage.paths import expand_paths, media_root_of, names_and_patterns
from orchdata.loaders.storage.remote.clients import is_filesystem
from orchdata.loaders.storage.remote.urls import HTTP, has_magic, identity, is_match, is_remote, parsed, scheme_of
from orchdata.loaders.storage.storage import tried
from orchdata.notices import warn_once
from orchdata.ranks.first_comer import done_by_first
from orchdata.ranks.parallel import ranks_per_node


def reading_of(
    media_root: str | PathLike[str] | None,
    columns: Mapping[str, str] | None,
    containers: Iterable[Container] = (),
    *,
    key: str = "",
    storage_options: Mapping[str, Any] | None = None,
    store: Any = None,
    paths: Sequence[str | PathLike[str]] = (),
) -> Reading:
    """Return how shards are read, from arguments of `ShardDataset`, of which `paths` may have secrets. Raises as it."""
    # URLs that have a query or a password, by what stands for them.
    secret = [
        url
        for url in paths
        if isinstance(url, str)
        and is_remote(url)
        and url[len(scheme_of(url)) :] != identity(url)[len(scheme_of(url)) :]
    ]
    given = {identity(url): url for url in expand_paths(secret)} if secret else {}
    files = Files(_checked_options(storage_options), store, given)
    root, pairs = _checked_media_root(media_root), _checked_columns(columns)
    checked = checked_containers(containers)
    if key not in ("", "last_dot"):
        raise ValueError(f"key is 'last_dot', or left out for keys that end at the first dot, got {key!r}")
    if checked:
        from orchdata.engines.engine import pickle_container  # with torch, which takes a second

        for each in checked:
            pickle_container(each)  # worker processes get one: find out now
    return Reading(media_root=root, columns=pairs, containers=checked, key=key, files=files)


def _checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return storage_options. Raises TypeError and ValueError, without their values, which may be secret."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError("storage_options is a dict of option -> value, such as {'region': 'eu-1'}")
    for name, value in options.items():
        if not isinstance(value, str | int | float):
            raise TypeError(f"storage_options {name!r} is a string, a number or a bool, got {type(value).__name__}")
    if not str(options.get("retry_seconds", 0)).replace(".", "", 1).isdecimal():
        raise ValueError(f"storage_options retry_seconds is a number of seconds, got {options['retry_seconds']!r}")
    return dict(options)


def _checked_columns(columns: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return (old name, new name) of each renamed field, by old name. Raises TypeError, and ValueError for two fields
    with one new name.
    """
    if columns is None:
        return ()
    if not isinstance(columns, Mapping) or not all(isinstance(each, str) for pair in columns.items() for each in pair):
        raise TypeError(f"columns is a dict of old name -> new name, got {columns!r}")
    pairs = tuple(sorted((old, new) for old, new in columns.items() if old != new))
    for (old, new), (other, its_new) in itertools.pairwise(sorted(pairs, key=lambda pair: pair[1])):
        if new == its_new:
            raise ValueError(f"columns gives {old!r} and {other!r} the same new name {new!r}")
    return pairs


def _checked_media_root(media_root: str | PathLike[str] | None) -> str | None:
    """Return it as an absolute path. Raises ValueError if it is not a folder, StorageError if it cannot be read now."""
    if media_root is None:
        return None
    root = identity(fspath(media_root))
    if is_remote(root):
        if root != fspath(media_root):
            raise ValueError(f"media_root {root!r} was given with a query or a password: use storage_options")
        return root.rstrip("/")
    if not is_folder(root):
        raise ValueError(f"media_root {root!r} is not a folder")
    return root


def checked_fields(names: Sequence[str], recipe: Recipe) -> tuple[str, ...]:
    """Return names of `index_fields`, in order. Raises TypeError and ValueError for names that no filter could have."""
    names = checked_names(names, "index_fields is a tuple of names, such as ('score',)")
    counts = names_of_counts(recipe.modalities)
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name in counts:
            own, none = f"every index has a column {name!r} of its own", f"{name!r} is no name that a filter can have"
            raise ValueError(
                f"index_fields: {own if name in counts else none}: give the field another name with "
                f"columns={{{name!r}: 'my_name'}}"
            )
    return tuple(sorted(set(names)))


def checked_names(names: Sequence[str], what: str) -> tuple[str, ...]:
    """Return a list of names as a tuple. Raises TypeError for what is none, with `what` is expected."""
    listed = tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{what}, got {names!r}")
    return listed


def checked_target(given: str) -> str:
    """Return where an index can be written, as an absolute path or a URL. Raises ValueError."""
    url = checked_file(given, (), None)
    assert url is not None
    if scheme_of(url) in HTTP:
        raise ValueError(f"{url}: an HTTP server takes no files")
    if not is_remote(url) and not is_folder(os.path.dirname(url)):
        raise ValueError(f"{url}: there is no folder {os.path.dirname(url)}")
    return url


def checked_file(given: str | PathLike[str] | None, paths: Sequence[str | PathLike[str]], store: Any) -> str | None:
    """Return `index_file=`, as an absolute path or a URL. Raises TypeError and ValueError for what is none, without
    secrets; `paths` and `store` are as given to `ShardDataset`.
    """
    if given is None:
        return None
    if not isinstance(given, str | PathLike) or not isinstance(fspath(given), str):
        raise TypeError(f"index_file is a path or a URL, got {type(given).__name__}")
    url = fspath(given)
    if not url.strip("/") or url.endswith("/"):
        raise ValueError(f"index_file is a file, or the URL of one, got {identity(url) if is_remote(url) else url!r}")
    if not is_remote(url):
        return identity(url.partition("://")[2] if scheme_of(url) else url)
    place = parsed(url)
    if place.query or place.user:
        raise ValueError(
            f"index_file {identity(url)!r} has a query or a password: give what authorizes in storage_options"
        )
    if store is not None and not is_filesystem(store):
        others = {parsed(identity(path)).root for path in map(str, paths) if is_remote(path)} - {place.root}
        if others:
            raise ValueError(
                f"store is of one bucket, and the shards are in {min(others)}, the index in {place.root}: give "
                "storage_options in place of store, or an index_file in the same bucket"
            )
    return identity(url)


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
        verdicts, counts = versions()
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
            claimed = "" if container is None else identity_of(container)
            known = shard.columns, shard.container, shard.key, bool(shard.media_root)
            if known != (reading.columns, claimed, reading.key, bool(root)):
                raise self._unfit(
                    f"has {shard.url} with another media_root, or other columns, key or containers than are given"
                )
        self._check_paths([shard.url for shard in index.shards])
        index.fetch = partial(fetched, file, self.reading.files, place)
        return index

    def write(self, index: Index, share: str = "") -> None:
        """Write an index of the data set, or of a part of it, to the file. Raises ValueError, StorageError."""
        root, recipe, files = root_of(self.paths), self.recipe.count_fingerprint(), self.reading.files
        write_index_file([index], self.url, files, root=root, recipe=recipe, rules=versions(), share=share)

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
