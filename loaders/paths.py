"""Paths as users give them -> one path per shard: braces, globs and lists expanded, checked, in order."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import braceexpand

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = TAR_SUFFIXES + PARQUET_SUFFIXES

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def expand_paths(paths: Paths, *, check: bool = True) -> list[str]:
    """Expand braces (as webdataset does: `{000..127}`, `{a,b}`), then globs (sorted), of one path or a list.

    Args:
        paths: what the user gave; a list keeps its order.
        check: look whether each shard exists. Without, only globs touch the file system.

    Raises:
        FileNotFoundError: a path does not exist, or a pattern matches nothing; it is named.
        ValueError: an unknown suffix, a folder, a command (`pipe:`), a remote URL, unbalanced braces, a shard given
            twice, or no path at all.
    """
    given: list[str | os.PathLike[str]] = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise ValueError("no shards: the list of paths is empty")
    found: list[str] = []
    source: dict[str, str] = {}
    for entry in given:
        pattern = _text(entry)
        for path in _expand(pattern, literal=not isinstance(entry, str), check=check):
            name = os.path.normpath(path)
            if name in source:
                raise ValueError(
                    f"shard {path} is given twice (by {source[name]!r} and {pattern!r}): it would be read twice"
                )
            source[name] = pattern
            suffix_of(path)
            found.append(path)
    return found


def suffix_of(path: str) -> str:
    """The known suffix of a shard's path, in lower case. ValueError for another."""
    name = path.lower()
    suffix = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)
    if suffix is None:
        raise ValueError(f"{path}: unknown kind of shard; the suffix must be one of {', '.join(SUFFIXES)}")
    return suffix


def _text(entry: object) -> str:
    if not isinstance(entry, str | os.PathLike):
        raise TypeError(f"a path must be a str or PathLike, got {type(entry).__name__}: {entry!r}")
    path = os.fspath(entry)
    if not isinstance(path, str):
        raise TypeError(f"a path must be text, got {path!r}")
    if not path:
        raise ValueError("a path is empty")
    if path.startswith("pipe:"):
        raise ValueError(f"{path!r}: commands are never run; give the files, or mount or download them first")
    scheme, separator, rest = path.partition("://")
    if separator:
        if scheme != "file":
            raise ValueError(f"{path!r}: remote storage ({scheme}://) is not supported yet; give local paths")
        path = rest
    return path


def _expand(pattern: str, *, literal: bool, check: bool) -> Iterator[str]:
    if literal or ("{" not in pattern and "\\" not in pattern) or Path(pattern).exists():
        expanded = [pattern]
    else:
        try:
            expanded = list(braceexpand.braceexpand(pattern))
        except ValueError as error:
            raise ValueError(f"{pattern!r}: unbalanced braces") from error
    for path in expanded:
        named = path if path == pattern else f"{path} (from {pattern!r})"
        if glob.has_magic(path) and not literal and not Path(path).exists():
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                raise FileNotFoundError(f"no file matches {named}")
            yield from matches
            continue
        if check:
            if Path(path).is_dir():
                raise ValueError(f"{named} is a folder; give its shards, for example '{path.rstrip('/')}/*.tar'")
            if not Path(path).exists():
                raise FileNotFoundError(f"no such shard: {named}")
        yield path
