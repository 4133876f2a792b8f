"""Which kept counts of texts a recipe can use, sample by sample."""

from __future__ import annotations

from dataclasses import replace

from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.measuring.kept_texts import Kept, KeptTexts
from orchdata.loaders.index.measuring.rows import ShardSample
from orchdata.loaders.limits import OF_MEDIA, scan_limits
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.measure import Outline, part_sizes, shape_of, writes_between
from orchdata.loaders.shards.facts_table import FactsTable
from orchdata.loaders.shards.fields import RAW


class UsableTexts:
    """The kept texts of a shard, for one recipe.

    Args:
        table: the facts of the shard.
    """

    def __init__(self, texts: KeptTexts, table: FactsTable, recipe: Recipe) -> None:
        self._texts = texts
        self._table = table
        self._recipe = recipe
        self._limit = recipe.limits.text_bytes
        now = scan_limits(recipe.limits)
        self._is_lower = any(now[name] < limit for name, limit in texts.limits.items() if name in now.keys() - OF_MEDIA)
        self._read = {code for code, name in enumerate(recipe.kinds) if code != TEXT and not self._has_header(name)}

    def _has_header(self, name: str) -> bool:
        return name not in self._recipe.counted_from_bytes

    def used(self, sample: ShardSample, number: int) -> ShardSample:
        """Return the `number`-th sample of the shard, with its kept text if the recipe can use that: then only media
        with a size that no header contains are read.
        """
        kept = self._texts.of(number, sample.layout)
        if kept is None or not self._is_within(sample) or not self._has_shape(sample, kept):
            return sample
        return replace(sample, wanted=[at for at in sample.wanted if sample.members[at].kind in self._read], kept=kept)

    def _is_within(self, sample: ShardSample) -> bool:
        """Whether the texts can be read under the recipe's limits: if one is lower than before, only sizes that facts
        contain are known to be below it.
        """
        num_bytes = 0
        for at in sample.wanted:
            member = sample.members[at]
            if member.kind in self._read:
                continue
            if member.error is not None:
                return False
            if self._is_lower:
                num_bytes += member.size
                if self._table.encoding[sample.start + at] != RAW:
                    return False
        return num_bytes <= self._limit

    def _has_shape(self, sample: ShardSample, kept: Kept) -> bool:
        """Whether the text was tokenized with what the recipe's modalities put into it, and has the recipe's pieces."""
        outline, recipe = kept.counted, self._recipe
        if not isinstance(outline, Outline):
            return True
        if not outline.is_of_pieces(recipe):
            return False
        names = {name for name, _ in outline.parts}
        if not any(writes_between(recipe.modalities[name]) for name in names):
            return kept.shape == 0
        if any(part not in sample.sizes and not self._has_header(part[0]) for part in outline.parts):
            return False
        try:
            sizes = part_sizes(outline.parts, sample.members, {}, recipe, sample.sizes)
            return shape_of(outline.parts, sizes, recipe) == kept.shape
        except FieldError:
            return True  # the same error is raised when it is counted
