"""An index that the user names: found by one rank for all, fetched once a node, and compared with the data set.

index_file=, paths, recipe --one rank: the head--> all ranks --node's copy--> Index, or an error: it is never built
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from orchdata.loaders import versions
from orchdata.loaders.errors import DamagedIndexError, MissingIndexError
from orchdata.loaders.index.index import Index, Place, digest
from orchdata.loaders.index.index_file import IndexFile, fetched, look, opened_copy, root_of, write_index_file
from orchdata.loaders.index.locations import check_function_of
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.container import container_of, identity_of
from orchdata.loaders.shards.reading import Reading
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.paths import names_and_patterns
from orchdata.loaders.storage.remote.urls import has_magic, is_match
from orchdata.loaders.storage.suffixes import media_root_of
from orchdata.notices import warn_once
from orchdata.ranks.first_comer import done_by_first


@dataclass(frozen=True, kw_only=True)
class NamedFile:
    """The file with the index of a data set.

    Attributes:
        paths: of the data set as given, without secrets.
        command: that writes it.
    """

    url: str
    paths: tuple[str, ...]
    recipe: Recipe
    reading: Reading
    command: str

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
        check_function_of(index, self.recipe)
        for shard in index.shards:
            if not _is_read_so(shard, self.reading):
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


def _is_read_so(shard: ShardInfo, reading: Reading) -> bool:
    """Return whether a shard was indexed as it would be read now."""
    container = container_of(reading.containers, shard.url) if reading.containers else None
    root = media_root_of(shard.url, reading.media_root) if container is None else None
    known = shard.columns, shard.container, shard.key, bool(shard.media_root)
    return known == (reading.columns, "" if container is None else identity_of(container), reading.key, bool(root))
