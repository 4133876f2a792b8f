"""Arguments of `ShardDataset`, checked."""

from __future__ import annotations

import itertools
import keyword
import os
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from orchdata.dataset.selection import names_of_counts
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.container import Container, checked_containers
from orchdata.loaders.shards.shard import Reading
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.local import is_folder
from orchdata.loaders.storage.paths import expand_paths
from orchdata.loaders.storage.remote.clients import is_filesystem
from orchdata.loaders.storage.remote.urls import HTTP, identity, is_remote, parsed, scheme_of


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
    if "retry_seconds" in options:
        try:
            seconds = float(options["retry_seconds"])
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
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
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(
                f"index_fields: {name!r} is no name that a filter can have: give the field another name with "
                f"columns={{{name!r}: 'my_name'}}"
            )
        if name in counts:
            raise ValueError(
                f"index_fields: every index has a column {name!r} of its own: give the field another name with "
                f"columns={{{name!r}: 'my_{name}'}}"
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
