"""The index of a data set on a store: found by one rank for all, fetched once a node, or built and published.

index_store=, patterns, recipe --one rank: a listing, a manifest--> all ranks --node's copy--> Index
                               --no manifest: ranks build parts--> one publishes --> the same
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from orchdata.dataset.indexed.found import Wanted, built
from orchdata.dataset.indexed.other_place import moved_index
from orchdata.loaders.errors import DamagedIndexError, MissingIndexError
from orchdata.loaders.index.index import Index, digest
from orchdata.loaders.index.locations import check_function_of
from orchdata.loaders.index.published.copies import fetched, opened_copy
from orchdata.loaders.index.published.folder import PublishedFolder, opened_folder
from orchdata.loaders.index.published.manifest import (
    IndexStore,
    Manifest,
    generations,
    name_of,
    read_manifest,
    shown_patterns,
)
from orchdata.loaders.index.published.parts import Parts, PublishedMeanwhile
from orchdata.loaders.index.published.publish import publish
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.reading import Reading
from orchdata.ranks.first_comer import done_by_first


class Generation(NamedTuple):
    """An open index, and its manifest."""

    opened: Index
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class StoredIndex:
    """Where the index of a data set is published.

    Attributes:
        patterns: the paths of the data set as given, without secrets.
        command: that publishes it.
    """

    store: IndexStore
    patterns: tuple[str, ...]
    recipe: Recipe
    reading: Reading
    command: str

    @cached_property
    def name(self) -> str:
        return name_of(self.patterns, self.recipe.count_fingerprint(), self.reading)

    @property
    def folder(self) -> PublishedFolder:
        return opened_folder(self.store.url, self.reading.files)

    def found(self) -> Manifest | None:
        """Return the newest generation, or the one that was asked for; one rank finds it for all.

        Raises:
            MissingIndexError: the one that was asked for is not there.
            DamagedIndexError: its manifest is not what was written.
            StorageError: the store cannot be read.
        """
        values = done_by_first(f"published/{self._key(self.store.generation)}", self._find)
        return None if values is None else Manifest.of_dict(values)

    def opened(self, manifest: Manifest, local: Index | None = None) -> Index:
        """Return the index of a manifest. Raises as `opened_copy`, and FunctionError as `open_index`.

        Args:
            local: an index of this node's, which may be the same.
        """
        again = f"`{self.command} --force` writes it again"
        index = opened_copy(self.folder, manifest, local=None if local is None else local.path, again=again)
        check_function_of(index, self.recipe)
        index.fetch = partial(fetched, self.store.url, self.reading.files, manifest, again=again)
        return index

    def published(self, index: Index, parts: Parts, *, force: bool = False) -> Manifest:
        """Publish an index that was built here, and remove the parts. Raises StorageError."""
        shown = shown_patterns(self.patterns)
        how: dict[str, Any] = {"patterns": shown, "shards": len(index.shards), "force": force}
        manifest = publish(self.folder, self.name, index.path, **how)
        parts.remove()
        return manifest

    def kept_up(
        self, urls: Sequence[str], reading: Reading, build: Callable[[Reading, Parts], Index], *, force: bool
    ) -> tuple[Generation, bool]:
        """Return the newest generation, and whether it was published now: if there is none, or other shards.

        Args:
            urls: the shards as they are named now.
            build: builds the index, or brings it up to date.
            force: build and publish the file again in any case.
        """
        reading = reading.looked_up(urls)
        known = generations(self.folder, self.name)
        newest = max(known, default=0)
        parts = self.parts(newest, gives=False)
        if newest and not force:
            try:
                manifest = read_manifest(self.folder, self.name, newest, known[newest])
                index = self.opened(manifest)
                if _is_current(index, urls, reading):
                    parts.remove()  # of a build that was killed
                    return Generation(index, manifest), False
            except DamagedIndexError:
                force = True  # its file is written again
        try:
            index = build(reading, parts)
        except PublishedMeanwhile:
            manifest = self._newest_manifest()
            return Generation(self.opened(manifest), manifest), False
        manifest = self.published(index, parts, force=force)
        return Generation(self.opened(manifest, index), manifest), manifest.generation > newest

    def _newest_manifest(self) -> Manifest:
        folder, known = self.folder, generations(self.folder, self.name)
        return read_manifest(folder, self.name, max(known), known[max(known)])

    def parts(self, newest: int, *, gives: bool) -> Parts:
        return Parts(self.folder, self.name, newest=newest, gives=gives)

    def _find(self) -> dict[str, Any] | None:
        folder, wanted = self.folder, self.store.generation
        known = generations(folder, self.name)
        if not known and wanted is None:
            return None
        if wanted is not None and wanted not in known:
            there = ", ".join(map(str, sorted(known)[-8:])) or "none"
            raise MissingIndexError(
                f"{self.store.url} has no generation {wanted} of the index of these shards under this recipe; "
                f"generations there: {there}"
            )
        number = max(known) if wanted is None else wanted
        try:
            return read_manifest(folder, self.name, number, known[number]).as_dict()
        except DamagedIndexError as error:
            how = f"`{self.command}` publishes the next generation"
            raise DamagedIndexError(error.path, f"{error.reason} ({how})") from None

    def _moved(self, wanted: Callable[[], Wanted]) -> Generation | None:
        """Publish an index of these shards in another place, for all ranks; None if the first of them has none."""
        found: list[Index] = []

        def publish_moved() -> dict[str, Any] | None:
            urls, recipe, reading = wanted()[:3]
            index, _ = moved_index(urls, recipe, reading)
            if index is None:
                return None
            found.append(index)
            return self.published(index, self.parts(0, gives=False)).as_dict()

        values = done_by_first(f"moved/{self._key()}", publish_moved)
        if values is None:
            return None
        manifest = Manifest.of_dict(values)
        return Generation(self.opened(manifest, found[0] if found else None), manifest)

    def _key(self, *more: Any) -> str:
        return digest([self.store.url, self.name, *more])

    def built(self, wanted: Callable[[], Wanted], num_ranks: int, rank: int | None, *, rebuild: bool) -> Generation:
        """Build the index, with other ranks, and publish it. Arguments are those of `ShardDataset.index`.

        Args:
            wanted: lists the shards.
        """
        if not rebuild and (moved := self._moved(wanted)) is not None:
            return moved
        if num_ranks > 1 and rank is None:
            raise MissingIndexError(
                f"no index of these shards under this recipe on {self.store.url}, and {num_ranks} ranks need one; "
                f"{wanted().how_to_index}"
            )
        newest = max(generations(self.folder, self.name), default=0) if rebuild else 0
        parts = self.parts(newest, gives=num_ranks > 1)
        try:
            index = built(wanted(), num_ranks, rank, parts=parts)
        except PublishedMeanwhile:
            manifest = self._newest_manifest()
            parts.remove(only_given=True)
            return Generation(self.opened(manifest), manifest)
        key = self._key(newest, index.build_id)
        values = done_by_first(f"publish/{key}", lambda: self.published(index, parts).as_dict())
        manifest = Manifest.of_dict(values)
        parts.remove(only_given=True)  # those that came after the others were removed
        return Generation(self.opened(manifest, index), manifest)


def _is_current(index: Index, urls: Sequence[str], reading: Reading) -> bool:
    """Return whether an index is of these shards as they are now, as far as their sizes and versions say."""
    if [shard.url for shard in index.shards] != list(urls):
        return False
    if any(shard.media_root or not shard.checksum for shard in index.shards):
        return False  # media may have changed, and a shard that could not be read may be there again
    if any(shard.unproven for shard in index.shards):
        return False  # once they are indexed here, nothing has to be compared
    return all(reading.files.version(shard.url) == (shard.size, shard.version) for shard in index.shards)
