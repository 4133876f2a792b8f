"""Paths given by users -> one path per shard: braces, globs, folders and lists are expanded and checked, in order.

Kinds of shards by the suffix of a name, their compression, the folder of the media that a file of records names.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import braceexpand

from orchdata.loaders.errors import OF_THE_FILE
from orchdata.loaders.storage.local import is_folder, is_there, read_small
from orchdata.loaders.storage.remote.urls import (
    HTTP,
    check_key,
    has_magic,
    identity,
    is_remote,
    parsed,
    same_name,
    scheme_of,
    without_secrets,
)
from orchdata.loaders.storage.storage import tried

_STATE_BYTES = 16 << 20
_MOST_PATHS = 1_000_000
_MOST_DIGITS = 60
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\n?\}")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


Matching = Callable[[str], Iterable[str]]
"""Returns the objects of storage that a pattern matches, sorted."""


def expand_paths(
    paths: Paths, *, own: Callable[[str], bool] | None = None, matching: Matching | None = None
) -> list[str]:
    """Expand `a::b` and braces (as webdataset does: `{000..127}`, `{a,b}`), then globs (sorted), of one path or a list.
    Paths may be `file:` URLs, and URLs of objects of storage, which are not looked at.

    Args:
        own: whether a container of the user's claims a path; these are asked first.
        matching: lists the objects of a pattern; without it, there may be no such patterns.

    Raises:
        FileNotFoundError: a path does not exist, or a pattern matches nothing; it is named.
        StorageError: a folder cannot be listed, so the matches of a pattern are unknown.
        ValueError: an unknown suffix, a folder without a list of shards, a command (`pipe:`), unbalanced braces, a
            shard given twice, or no path at all.
    """
    given: list[str | os.PathLike[str]] = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise ValueError("no shards: the list of paths is empty")
    shards: list[str] = []
    source: dict[str, str] = {}
    for entry in given:
        for pattern in _texts(entry):
            for path in _expand(pattern, literal=not isinstance(entry, str), own=own, matching=matching):
                name = same_name(path) if is_remote(path) else os.path.normpath(path)
                shown = without_secrets(pattern) if is_remote(path) else pattern
                if name in source:
                    raise ValueError(
                        f"shard {identity(path) if is_remote(path) else path} is given twice (by {source[name]!r} and "
                        f"{shown!r}): it would be read twice"
                    )
                source[name] = shown
                if own is None or not own(path):
                    suffix_of(identity(path) if is_remote(path) else path, own_too=own is not None)
                shards.append(path)
    return shards


def pieces_of(paths: Iterable[object]) -> list[str]:
    """Return each path and pattern of a list, `a::b` as two: absolute, and URLs without secrets. Raises as
    `expand_paths`.
    """
    return [identity(text) for each in paths for text in _texts(each)]


def names_and_patterns(pieces: Iterable[str]) -> list[str]:
    """Return the names that braces stand for, in order, and patterns as they are. No file is looked at."""
    return [name for piece in pieces for name in (_in_braces(piece) if "{" in piece else [piece])]


def _texts(entry: object) -> list[str]:
    """Split an entry into its patterns at `::`, as webdataset does."""
    if not isinstance(entry, str | os.PathLike):
        raise TypeError(f"a path must be a str or PathLike, got {type(entry).__name__}: {entry!r}")
    path = os.fspath(entry)
    if not isinstance(path, str):
        raise TypeError(f"a path must be text, got {path!r}")
    if (
        not isinstance(entry, str)
        or path.startswith("pipe:")
        or "::" not in path
        or (not is_remote(path) and is_there(path))
    ):
        return [_text(path)]
    return [_text(piece) for piece in path.split("::")]


def _text(path: str) -> str:
    if not path:
        raise ValueError("a path is empty")
    if path.startswith("pipe:"):
        raise ValueError(
            f"{path!r}: commands are never run; give the files, mount the storage that they are on, or download them "
            "first"
        )
    _, separator, rest = path.partition("://")
    if is_remote(path):
        parsed(path)
        return path
    if separator:
        return rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    return path.removeprefix("file:")


def _expand(
    pattern: str, *, literal: bool, own: Callable[[str], bool] | None, matching: Matching | None
) -> Iterator[str]:
    if is_remote(pattern):
        yield from _expand_remote(pattern, matching)
        return
    if literal or ("{" not in pattern and "\\" not in pattern) or is_there(pattern):
        expanded = [pattern]
    else:
        expanded = _in_braces(pattern)
    for path in expanded:
        named = path if path == pattern else f"{path} (from {pattern!r})"
        if glob.has_magic(path) and not literal and not is_there(path):
            matches = sorted(_matches(Path(path)))
            if not matches:
                raise FileNotFoundError(f"no file matches {named}")
            yield from matches
            continue
        if is_folder(path) and not (own is not None and own(path)):
            yield from _shards_of_folder(path, named)
            continue
        if not is_there(path):
            raise FileNotFoundError(f"no such shard: {named}")
        yield path


def _expand_remote(pattern: str, matching: Matching | None) -> Iterator[str]:
    """Yield the objects of a pattern. Braces of an HTTP URL's query are not expanded."""
    cut = pattern.find("?") if scheme_of(pattern) in HTTP else -1
    path, query = (pattern, "") if cut < 0 else (pattern[:cut], pattern[cut:])
    for url in _in_braces(path) if "{" in path else [path]:
        if not has_magic(url):
            check_key(url)
            yield url + query
            continue
        assert matching is not None
        found = list(matching(url))
        if not found:
            named = without_secrets(url if url == pattern else f"{url} (from {pattern!r})")
            raise FileNotFoundError(f"no object matches {named}")
        yield from found


def needs_listing(paths: Paths) -> bool:
    """Return whether objects must be listed to expand these paths. Raises ValueError as `expand_paths`."""
    given: list[str | os.PathLike[str]] = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return any(is_remote(path) and has_magic(path) for each in given for path in _texts(each))


def _in_braces(pattern: str) -> list[str]:
    """Return the paths that braces stand for."""
    too_many = any(_is_long(*found) for found in _RANGE.findall(pattern))
    expanded: list[str] | None = None
    with contextlib.suppress(ValueError, RecursionError):  # which shows the pattern, and that may have a password
        if not too_many:  # counted before the names are put together, which takes longer
            parts = braceexpand.parse_pattern(pattern, True)  # type: ignore[attr-defined]
            too_many = any(True for _ in islice(parts, _MOST_PATHS, None))
        expanded = [] if too_many else list(braceexpand.braceexpand(pattern))
    if expanded is None:
        raise ValueError(f"{without_secrets(pattern)!r}: unbalanced braces")
    if too_many:
        raise ValueError(
            f"{without_secrets(pattern)[:80]!r}: its braces stand for more than {_MOST_PATHS:,} paths: give a glob, as "
            "in 'train-*.tar', or a list of patterns"
        )
    return expanded


def _is_long(first: str, last: str, step: str) -> bool:
    """Return whether a range has too many numbers: `braceexpand` makes all of them before it gives the first path."""
    if max(len(first), len(last)) > _MOST_DIGITS:
        return True
    return abs(int(last) - int(first)) // (abs(int(step or 1)) or 1) >= _MOST_PATHS


def _shards_of_folder(path: str, named: str) -> list[str]:
    """Return the shards of a folder that lists them."""
    folder = path.rstrip("/")
    tables = [f"{folder}/{name}" for name in MEDIA_TABLES if is_there(f"{folder}/{name}")]
    if len(tables) > 1:
        raise ValueError(f"{named} has {' and '.join(MEDIA_TABLES)}: give one of the two")
    if tables:
        return tables
    if is_there(f"{folder}/dataset_dict.json"):
        splits = _read_json(f"{folder}/dataset_dict.json").get("splits")
        shown = ", ".join(f"{folder}/{split}" for split in splits) if isinstance(splits, list) else "a folder in it"
        raise ValueError(f"{named} has several splits; give one of them: {shown}")
    if is_there(f"{folder}/state.json"):
        return [f"{folder}/{name}" for name in _arrow_files(f"{folder}/state.json")]
    raise ValueError(
        f"{named} is a folder without {' or '.join(MEDIA_TABLES)}; give its shards, for example '{folder}/*.tar'. "
        f"Media with a text of the same name next to each become a shard by `tar --sort=name -cf {folder}.tar {folder}`"
    )


def _arrow_files(path: str) -> list[str]:
    """Return the files of a data set on disk, as listed by `datasets`."""
    state = _read_json(path)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(f"{path}: rows were selected without writing them (an old format): save the data set again")
    files = state.get("_data_files")
    listed = files if isinstance(files, list) else []
    names = [file.get("filename") if isinstance(file, dict) else None for file in listed]
    if not names or not all(isinstance(name, str) and _is_base(name) for name in names):
        raise ValueError(f"{path}: it does not list the files of the data set (_data_files)")
    return [str(name) for name in names]


def _is_base(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON allows
        return False
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _read_json(path: str) -> dict[str, object]:
    content = tried(path, "cannot be read", lambda: read_small(path, _STATE_BYTES))
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _matches(pattern: Path) -> set[str]:
    """Return the paths that match a glob, `**` included. Unlike `glob.glob` it raises if a folder cannot be listed."""
    paths = {Path(pattern.anchor)}
    parts = pattern.parts[bool(pattern.anchor) :]
    for number, part in enumerate(parts, 1):
        if part == "**":
            paths = {path for folder in paths for path in _below(folder, ())}
            if number == len(parts):
                paths |= {folder / name for folder in paths for name in _names(folder) if not name.startswith(".")}
        elif glob.has_magic(part):
            paths = {folder / name for folder in paths for name in fnmatch.filter(_names(folder), part)}
            if not part.startswith("."):
                paths = {path for path in paths if not path.name.startswith(".")}
        else:
            paths = {folder / part for folder in paths}
    return {str(path) for path in paths if is_there(str(path))}


def _below(folder: Path, above: tuple[str, ...]) -> Iterator[Path]:
    """Yield a folder and all folders below it, except hidden ones; links to a folder above are not followed."""

    def real_path() -> str | None:
        try:
            return os.path.realpath(folder, strict=True)
        except OSError as error:
            if error.errno in OF_THE_FILE:
                return None
            raise

    real = tried(str(folder), "cannot be looked at", real_path)
    if real is None or real in above:
        return
    yield folder
    for name in _names(folder):
        if not name.startswith(".") and is_folder(str(folder / name)):
            yield from _below(folder / name, (*above, real))


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; none if it is not a folder."""

    def names() -> list[str]:
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    return tried(str(folder), "cannot be listed", names)


TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst")
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow",)
_RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
RECORD_SUFFIXES = tuple(suffix + packed for packed in ("", ".gz", ".zst") for suffix in _RECORDS)
SUFFIXES = TAR_SUFFIXES + PARQUET_SUFFIXES + ARROW_SUFFIXES + RECORD_SUFFIXES

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

MEDIA_TABLES = ("metadata.jsonl", "metadata.csv")
"""Tables that name the media files in their own folder."""


def suffix_of(path: str, *, own_too: bool = False) -> str:
    """Return the suffix of a shard's path, in lower case. Raises ValueError for an unknown suffix (`own_too`:
    containers of the user's were asked too).
    """
    name = path.lower()
    suffix = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)
    if suffix is None:
        others = ", and no container of containers= claims it" if own_too else "; a container of yours may read others"
        raise ValueError(f"{path}: unknown kind of shard; the suffix must be one of {', '.join(SUFFIXES)}{others}")
    return suffix


def is_compressed(path: str) -> bool:
    """Return whether a path ends in the suffix of a compression."""
    return path.lower().endswith((".gz", ".tgz", ".zst", ".tzst"))


def compression(head: bytes) -> str | None:
    """Return "gzip", "zstd" or None by the first four bytes. File names are often wrong about it."""
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    skippable = len(head) >= 4 and head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50
    return "zstd" if head.startswith(_ZSTD_MAGIC) or skippable else None


def is_media_table(path: str) -> bool:
    """Return whether a file is the table of the media in its folder."""
    return os.path.basename(path) in MEDIA_TABLES


def media_root_of(path: str, media_root: str | None) -> str | None:
    """Return the folder for names in a file of records: `media_root`, or by default a media table's own folder."""
    if media_root is None and is_media_table(path):
        return os.path.dirname(identity(path))
    return media_root if path.lower().endswith(RECORD_SUFFIXES) else None
