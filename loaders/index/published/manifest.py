"""Manifests: which index file each generation of a data set has, in the order of their numbers.

    patterns, recipe, reading, rules --digest--> name
    <name>/00000001.json, <name>/00000002.json, ...   a manifest each, written once
    files/<digest>.index                              the file that a manifest names

A manifest has the same bytes whoever writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from orchdata.loaders.errors import DamagedIndexError
from orchdata.loaders.index.index import digest
from orchdata.loaders.index.published.folder import PublishedFolder
from orchdata.loaders.shards.reading import Reading
from orchdata.loaders.storage.remote.urls import HTTP, identity, is_remote, parsed, scheme_of
from orchdata.loaders.storage.storage import FileVersion
from orchdata.loaders.versions import TABLE_FORMAT, rules_digest

FORMAT: Final = 1
_MOST_BYTES: Final = 16 << 20
_MOST_PATTERNS: Final = 16
_NAME: Final = re.compile(r"(\d{8})\.json")
_GENERATION: Final = re.compile(r"(.*)/@(\d{1,8})/?")
_DIGEST: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class IndexStore:
    """Where indexes are published.

    Attributes:
        url: URL or absolute path of the folder, without a final "/".
        generation: the one that was asked for; None: the newest.
    """

    url: str
    generation: int | None = None

    @classmethod
    def of(cls, given: str) -> IndexStore:
        """Return the value of `index_store=`. Raises ValueError, without secrets of a URL."""
        found = _GENERATION.fullmatch(given)
        url, generation = (found[1], int(found[2])) if found else (given, None)
        if scheme_of(url) in HTTP and (parsed(url).query or parsed(url).user):
            raise ValueError(
                f"index_store {identity(url)!r} has a query or a password: give what authorizes in storage_options"
            )
        if not url.strip("/"):
            raise ValueError(f"index_store is a URL or a folder, got {given!r}")
        if generation == 0:
            raise ValueError(f"index_store {given!r}: generations begin with 1")
        if is_remote(url):
            parsed(url)
        elif scheme_of(url):
            url = url.partition("://")[2]
        return cls(identity(url).rstrip("/"), generation)

    def at(self, generation: int) -> str:
        """Return how a generation is asked for."""
        return f"{self.url}/@{generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A generation of an index.

    Attributes:
        generation: its number, from 1.
        patterns: the paths of the data set as given, without secrets; the first of many.
        shards: number of shards.
        size, digest: of the index file: bytes, and blake2b with 32 bytes, hex.
    """

    generation: int
    patterns: tuple[str, ...]
    shards: int
    size: int
    digest: str

    @property
    def file(self) -> str:
        """The name of the index file."""
        return f"files/{self.digest}.index"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-safe values for `of_dict`."""
        return {"format": FORMAT, **asdict(self), "patterns": list(self.patterns)}

    def encoded(self) -> bytes:
        return json.dumps(self.as_dict(), sort_keys=True, indent=1).encode() + b"\n"

    @classmethod
    def of_dict(cls, values: Any) -> Manifest:
        """Return what `as_dict` described. Raises ValueError for anything else."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"it is no manifest of format {FORMAT}")
        fields = {name: value for name, value in values.items() if name != "format"}
        numbers = [fields.get(name) for name in ("generation", "shards", "size")]
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError("its numbers are not positive")
        if not _DIGEST.fullmatch(str(fields.get("digest"))):
            raise ValueError("it names no index file")
        patterns = fields.get("patterns")
        if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
            raise ValueError("its patterns are no list of texts")
        try:
            return cls(**fields | {"patterns": tuple(patterns)})
        except TypeError:
            raise ValueError("it has other fields than a manifest") from None


def shown_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns that a manifest shows: a list of very many would fill it."""
    return tuple(patterns[:_MOST_PATTERNS])


def name_of(patterns: Sequence[str], recipe: str, reading: Reading) -> str:
    """Return the name of a data set under a recipe fingerprint, in this release's format and rules.

    Args:
        patterns: the paths of the data set as given, without secrets.
    """
    return digest([TABLE_FORMAT, rules_digest(), recipe, list(patterns), *reading.identity()])


def generations(folder: PublishedFolder, name: str) -> dict[int, FileVersion]:
    """Return the generations that are published, by their numbers. Raises StorageError."""
    if not folder.can_list:
        return _looked_for(folder, name)
    found = {_NAME.fullmatch(each): file for each, file in folder.names(name).items()}
    return {int(match[1]): file for match, file in found.items() if match is not None}


def read_manifest(folder: PublishedFolder, name: str, generation: int, file: FileVersion) -> Manifest:
    """Return a manifest. Raises StorageError, and DamagedIndexError for one that is not what was written."""
    where = f"{folder.url}/{path_of(name, generation)}"
    if file.size > _MOST_BYTES:
        raise DamagedIndexError(where, f"a manifest of {file.size} bytes is too large")
    data = folder.read(path_of(name, generation), file)
    if data is None:
        raise DamagedIndexError(where, "the manifest was removed or replaced just now")
    try:
        manifest = Manifest.of_dict(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise DamagedIndexError(where, f"the manifest is not what was written: {error}") from None
    if manifest.generation != generation:
        raise DamagedIndexError(where, f"the manifest is of generation {manifest.generation}")
    return manifest


def path_of(name: str, generation: int) -> str:
    """Return the name of a manifest's file."""
    return f"{name}/{generation:08d}.json"


def _looked_for(folder: PublishedFolder, name: str) -> dict[int, FileVersion]:
    """Return the last generation of a folder that cannot be listed: numbers follow each other."""

    def look(number: int) -> FileVersion | None:
        return folder.version(path_of(name, number))

    known: dict[int, FileVersion] = {}
    above = 1
    while (file := look(above)) is not None:
        known[above] = file
        above *= 2
    while above - (last := max(known, default=above - 1)) > 1:
        middle = (last + above) // 2
        if (file := look(middle)) is not None:
            known[middle] = file
        else:
            above = middle
    return known
