"""A sample where it is stored: one row of the index, with its bytes in reach."""

from __future__ import annotations

from collections.abc import Iterable

from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.sample import text_members
from orchdata.loaders.shards.open import OpenShards


class StoredSample:
    """One row of the index, with its bytes in reach."""

    def __init__(self, index: Index, shards: OpenShards, row: int) -> None:
        self.row = row
        self._info = index.shard_of(row)
        self.shard = self._info.url
        self.key = index.key(row)
        self.members = index.members(row)
        self.parts = index.part_range(row)
        self._index = index
        self._shards = shards

    def member_of(self, part: int) -> int:
        """Which of the sample's members a part is."""
        return self._index.member_of(part, len(self.members))

    def read(
        self, recipe: Recipe, *, text: bool = True, parts: Iterable[int] | None = None
    ) -> dict[int, bytes | memoryview]:
        """Payloads by member, of the members the recipe uses. Raises DataError.

        Args:
            text: whether those of its text are wanted.
            parts: which of its parts are wanted; default: all.
        """
        wanted = {self.member_of(part) for part in (self.parts if parts is None else parts)}
        needed = sorted(wanted.union(text_members(self.members, recipe) if text else ()))
        locations = self._index.read_spec(self.row)
        self._index.check_unchanged()
        try:
            payloads = self._shards.get(self.shard, self._info).read_many([locations[member] for member in needed])
        except FieldError as error:
            raise error.at(self.shard, self.key) from error.__cause__
        self._shards.reads.used.add(sum(locations[member][1] for member in needed))
        return dict(zip(needed, payloads, strict=True))
