"""Places: names and sizes of shards -> an index of the same shards in another place.

An index that is merged, or fetched, is noted in the cache folder under the names and sizes of its shards, without their
folders. An index of shards in a new place is looked for by them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from orchdata.loaders.errors import DamagedIndexError
from orchdata.loaders.index.index import Index, basename, digest
from orchdata.loaders.shards.reading import Reading
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.loaders.storage.shared.access import access_of
from orchdata.loaders.storage.shared.files import names_in
from orchdata.loaders.storage.shared.values import check_shape
from orchdata.loaders.versions import PLACE_FORMAT, TABLE_FORMAT, rules_digest

KIND: Final = b"plac"
SUFFIX: Final = ".place"


def place_name(shards: Iterable[tuple[str, int]], recipe: str, reading: Reading) -> str:
    """Return the name of shards wherever they are, under a recipe fingerprint.

    Args:
        shards: path and size of each, in order.
    """
    contents = [[basename(url), size] for url, size in shards]
    return digest([TABLE_FORMAT, rules_digest(), recipe, contents, *reading.identity()])


def note_place(index: Index, recipe: str, reading: Reading, cache: CacheFolder) -> None:
    """Note an index in the cache folder for `noted`. Raises StorageError."""
    name = place_name([(shard.url, shard.size) for shard in index.shards], recipe, reading)
    path = cache.root / "index" / f"{name}{SUFFIX}"
    if _named(path) != index.path.name:
        write_whole(path, seal(KIND, PLACE_FORMAT, {"index": index.path.name}, [])[0], access_of(str(index.path)))


def has_notes(cache: CacheFolder) -> bool:
    """Return whether any index is noted: else nothing has to be looked up."""
    try:
        return any(name.endswith(SUFFIX) for name in names_in(cache.root / "index"))
    except OSError:
        return False


def noted(name: str, cache: CacheFolder) -> Index | None:
    """Return the index that is noted under a name of `place_name`; None if there is none, or it is damaged."""
    folder = cache.root / "index"
    file = _named(folder / f"{name}{SUFFIX}")
    try:
        return None if file is None else Index(folder / file)
    except (FileNotFoundError, DamagedIndexError):
        return None


def _named(path: Path) -> str | None:
    """Return the name of the index that a note has; None if there is no sound note."""
    try:
        head, _ = read_sealed(path, KIND, PLACE_FORMAT)
        check_shape(head.values, {"index": str}, "the head")
    except (OSError, ValueError):
        return None
    file = str(head.values["index"])
    return file if file == Path(file).name and file.endswith(".index") else None
