"""Counts of unread names: bounded in number, exact for frequent ones."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

from orchdata.loaders.recipe import Recipe
from orchdata.loaders.text.messages import HARMLESS
from orchdata.loaders.unread_names import SHARD_NAMES, UnreadNames, above, names_of_record

RULES = Recipe().rules
LAYOUTS = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_the_docs_list_the_names_of_which_the_warning_is_silent() -> None:
    listed = LAYOUTS.read_text().partition("compared whole:")[2].partition("###")[0]
    assert {*re.findall("`(.+?)`", listed)} == HARMLESS


def test_frequent_names_are_counted_exactly_in_memory_that_does_not_grow_with_names() -> None:
    def peak(records: int) -> int:
        tracemalloc.start()
        unread = UnreadNames()
        for at in range(records):
            unread.add(
                names_of_record({f"own {at} {key}": 1 for key in range(100)} | {"w": 0}, None, RULES, "", (), ())
            )
        totals = unread.totals()
        assert len(totals["names"]) == SHARD_NAMES and totals["names"]["w"] == records
        assert totals["others"] + sum(totals["names"].values()) == 101 * records
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(900) < 1.1 * peak(300)  # each record has 100 names that come once


def test_hostile_names_are_short_and_printable() -> None:
    deep: object = 1
    for _ in range(5000):
        deep = {"a": [[deep]]}
    names = names_of_record({"\ud800\x1b[2J": {"\udcff" * 200: 1}, "k" * 9999: 1, "d": deep}, None, RULES, "", (), ())
    assert all(len(name) <= 80 and name.isprintable() for name in names) and json.dumps(names)
    assert sum(name.startswith("d") for name in names) == 3
    assert above("a[].b.c") == ["a", "a[]", "a[].b", "a[].b.c"]
