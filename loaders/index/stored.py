"""A sample where it is stored: one row of the index, with its bytes in reach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import text_members
from orchdata.loaders.samples.decode import decode_sample
from orchdata.loaders.samples.members import uses_of
from orchdata.loaders.samples.sample import Part, Sample, TextPart
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER


class StoredSample:
    """One row of the index, with its bytes in reach."""

    def __init__(self, index: Index, shards: OpenShards, row: int) -> None:
        self.row = row
        self._info = index.shard_of(row)
        self.shard = self._info.url
        self.members = index.members(row)
        self.parts = index.part_range(row)
        self._index = index
        self._shards = shards

    @cached_property
    def key(self) -> str:
        return self._index.key(self.row)

    def member_of(self, part: int) -> int:
        """Which of the sample's members a part is."""
        return self._index.member_of(part, len(self.members))

    def read(
        self, recipe: Recipe, *, text: bool = True, parts: Iterable[int] | None = None, kept: bool = False
    ) -> dict[int, bytes | memoryview]:
        """Payloads by member, of the members the recipe uses. Raises DataError.

        Args:
            text: whether those of its text are wanted.
            parts: which of its parts are wanted; default: all.
            kept: whether the fields that the recipe keeps are wanted.
        """
        wanted = {self.member_of(part) for part in (self.parts if parts is None else parts)}
        if kept:
            wanted.update(uses_of(self.members, recipe).kept)
        needed = sorted(wanted.union(text_members(self.members, recipe) if text else ()))
        locations = self._index.read_spec(self.row)
        self._index.check_unchanged()
        try:
            payloads = self._shards.get(self.shard, self._info).read_many([locations[member] for member in needed])
        except FieldError as error:
            raise error.at(self.shard, self.key) from error.__cause__
        self._shards.reads.used.add(sum(locations[member][1] for member in needed))
        return dict(zip(needed, payloads, strict=True))

    def decode(self, recipe: Recipe) -> Sample:
        """The sample with all its parts. Raises DataError, or FieldError."""
        payloads = self.read(recipe, kept=True)
        parts = decode_sample(self.members, payloads, self._index.sizes(self.parts, recipe), recipe)
        self._check_counts(parts, recipe)
        kept = uses_of(self.members, recipe).kept
        return Sample(self.shard, self.key, parts, {self.members[at].field: bytes(payloads[at]) for at in kept})

    def _check_counts(self, parts: Sequence[Part], recipe: Recipe) -> None:
        """Raise FieldError where the text yields other counts than the index has, by which steps are planned."""
        texts = [part for part in parts if isinstance(part, TextPart)]
        media_tokens = int(self._index.part_tokens[self.parts.start : self.parts.stop].sum())
        found = {
            "tokens": sum(len(part.token_ids) for part in texts) + media_tokens,
            "loss tokens": sum(int(part.loss.sum()) for part in texts),
        }
        expected = int(self._index.llm_tokens[self.row]), int(self._index.loss_tokens[self.row])
        for (name, counted), indexed in zip(found.items(), expected, strict=True):
            if counted != indexed:
                where = text_members(self.members, recipe)
                field = self.members[where[0]].field if where else "*"
                reason = f"the index says {indexed} {name}, the text yields {counted}: {WHY_COUNTS_DIFFER}"
                raise FieldError(field, reason)
