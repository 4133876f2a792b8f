"""The first samples of a shard, known without a walk through the rest of it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields, replace
from typing import NamedTuple

from orchdata.loaders.compact import Names
from orchdata.loaders.shards.facts_table import Facts, FactsTable


class Beginning(NamedTuple):
    """The first samples of a shard.

    Attributes:
        facts: of these samples; the checksum is of their rows, and not of the shard.
        is_whole: whether the shard has no others.
        share: of its samples that these are, above 0, at most 1; an estimate where a container does not count them.
        reach: how far the shard was read, above 0, as `ShardInfo.reach`.
        is_short: whether there are fewer samples than were wanted, because they are too large for memory.
    """

    facts: Facts
    is_whole: bool
    share: float
    reach: int
    is_short: bool = False


def first_samples(table: FactsTable, most: int) -> FactsTable:
    """Return the rows of the samples with numbers below `most`."""
    stop = bisect_left(table.sample, most)
    if stop == len(table):
        return table
    columns = {each.name: getattr(table, each.name)[:stop] for each in fields(table) if each.name != "errors"}
    columns["field"] = Names(columns["field"])
    return replace(table, **columns, errors={row: reason for row, reason in table.errors.items() if row < stop})
