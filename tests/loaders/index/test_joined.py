"""Several indexes as one: each row and part has the values of its own index, and damage is detected."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from shard_factory import RECIPE, omni_samples, omni_shards, write_shard

from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex


@pytest.fixture
def indexes(tmp_path: Path) -> list[Index]:
    broken = [{"__key__": "bad", "jpg": b"no image"}, *omni_samples(6, prefix="b", seed=9)]
    one = build_index(omni_shards(tmp_path, shards=2, samples=7), RECIPE)
    two = build_index([write_shard(tmp_path / "broken.tar", broken)], RECIPE)
    return [one, two, one]


def test_rows_and_parts_are_those_of_their_index(indexes: list[Index]) -> None:
    joined = JoinedIndex(indexes)
    assert len(joined) == 14 + 7 + 14
    rows = np.random.default_rng(0).permutation(len(joined))
    owner = np.searchsorted(joined.first_rows, rows, side="right") - 1
    for row, number in zip(rows.tolist(), owner.tolist(), strict=True):
        index, own = indexes[number], row - int(joined.first_rows[number])
        assert joined.source_of(row) == number
        assert (joined.key(row), joined.shard_of(row)) == (index.key(own), index.shard_of(own))
        assert joined.members(row) == index.members(own)
        assert joined.read_spec(row) == index.read_spec(own)
        assert joined.shards[joined.shard[row]] == index.shard_of(own)
        parts, theirs = joined.part_range(row), index.part_range(own)
        assert joined.sizes(parts, RECIPE) == index.sizes(theirs, RECIPE)
        assert joined.part_tokens[parts.start : parts.stop].tolist() == index.part_tokens[list(theirs)].tolist()
        assert [joined.modality_of(part) for part in parts] == [index.modality_of(part) for part in theirs]
        count = len(index.members(own))
        assert [joined.member_of(part, count) for part in parts] == [index.member_of(part, count) for part in theirs]
    assert joined.llm_tokens[rows].tolist() == [
        int(indexes[number].llm_tokens[row - joined.first_rows[number]])
        for row, number in zip(rows, owner, strict=True)
    ]


def test_parts_come_in_the_order_of_their_rows(indexes: list[Index]) -> None:
    joined = JoinedIndex(indexes)
    rows = np.random.default_rng(1).permutation(len(joined))[:20]
    parts, places = joined.parts_of(rows, "image")
    expected = [
        (part, position)
        for position, row in enumerate(rows.tolist())
        for part in joined.part_range(row)
        if joined.modality_of(part) == "image"
    ]
    assert list(zip(parts.tolist(), places.tolist(), strict=True)) == expected


def test_failures_names_and_totals_are_those_of_all(indexes: list[Index]) -> None:
    joined = pickle.loads(pickle.dumps(JoinedIndex(indexes)))
    assert [joined.failure(row).key for row in joined.bad_rows().tolist()] == ["bad"]
    assert joined.find_all("broken.tar", "b0003") == [14 + 4]
    key = indexes[0].key(3)
    assert joined.find_all("omni-000000.tar", key) == [3, 14 + 7 + 3], "in both sources that have it"
    assert joined.totals["samples"] == len(joined)
    assert joined.totals["llm_tokens"] == int(joined.llm_tokens[np.arange(len(joined))].sum())
    assert joined.lost_samples().tolist() == [0] * 5
    assert joined.sample_rows().tolist() == list(range(len(joined)))
    assert joined.build_id != JoinedIndex(indexes[:2]).build_id
    with pytest.raises(ValueError, match="row 35 of an index of 35"):
        joined.key(35)
    joined.check_unchanged()
