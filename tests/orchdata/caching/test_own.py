"""Which streams, and so which shards, a node alone reads; and the argument of a loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shard_factory import omni_shards

import orchdata as od
from orchdata.caching import own_streams
from orchdata.loaders.storage.node import cache_of_environment
from orchdata.ranks.parallel import Rank


def grouped(group_size: int) -> od.Balance:
    return od.Balance(scope="grouped", group_size=group_size)


@pytest.mark.parametrize(
    ("rank", "balance", "streams", "own"),
    [
        (Rank(0, 1), od.Balance(), 1, range(1)),
        (Rank(3, 8, ranks_per_node=8), od.Balance(), 3, range(3)),  # the only node
        (Rank(3, 8, ranks_per_node=2), od.Balance(), 4, None),
        (Rank(3, 8, ranks_per_node=2), od.Balance(scope="grid", group_size=2), 4, None),
        (Rank(3, 8, ranks_per_node=2), od.Balance(scope="none"), 4, None),
        (Rank(3, 8, ranks_per_node=2), grouped(2), 1, None),
        (Rank(3, 8, ranks_per_node=2), grouped(2), 4, range(1, 2)),
        (Rank(3, 8, ranks_per_node=2), grouped(2), 8, range(2, 4)),
        (Rank(3, 8, ranks_per_node=2), grouped(2), 6, None),  # streams 1 and 4 are of two nodes
        (Rank(6, 8, ranks_per_node=4), grouped(2), 4, range(2, 4)),  # two groups on a node
        (Rank(6, 8, ranks_per_node=2), grouped(4), 4, None),  # a group on two nodes
        (Rank(6, 8), grouped(2), 4, range(3, 4)),  # a group is a node where nothing else is known
        (Rank(6, 8), od.Balance(), 4, None),
        (Rank(4, 5, ranks_per_node=2), grouped(2), 5, range(4, 5)),  # the last node is smaller
        (Rank(4, 5, ranks_per_node=2), grouped(2), 3, None),
    ],
)
def test_streams_of_a_node(rank: Rank, balance: od.Balance, streams: int, own: range | None) -> None:
    assert own_streams(rank, balance, streams) == own


@pytest.mark.parametrize(
    ("path", "max_bytes"), [("", 1), (3, 1), ("s3://bucket/x", 1), ("/x", 0), ("/x", "2TiB"), ("/x", True)]
)
def test_a_bad_cache_is_refused(path: Any, max_bytes: Any) -> None:
    with pytest.raises(
        ValueError, match="Cache.path must be" if max_bytes == 1 and max_bytes is not True else "Cache.max_bytes"
    ):
        od.Cache(path, max_bytes=max_bytes)


def test_the_environment_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_of_environment() is None
    monkeypatch.setenv("ORCHDATA_SHARD_CACHE", "/nvme")
    with pytest.raises(ValueError, match="ORCHDATA_SHARD_CACHE is given without ORCHDATA_SHARD_CACHE_BYTES"):
        cache_of_environment()
    monkeypatch.setenv("ORCHDATA_SHARD_CACHE_BYTES", "2TiB")
    assert cache_of_environment() == od.Cache("/nvme", max_bytes=2 << 40)
    monkeypatch.setenv("ORCHDATA_SHARD_CACHE_BYTES", "much")
    with pytest.raises(ValueError, match="ORCHDATA_SHARD_CACHE_BYTES is 'much'"):
        cache_of_environment()
    monkeypatch.delenv("ORCHDATA_SHARD_CACHE")
    with pytest.raises(ValueError, match="without ORCHDATA_SHARD_CACHE,"):
        cache_of_environment()


def test_a_loader_refuses_what_is_no_cache_and_data_without_shards(tmp_path: Path) -> None:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=5))
    with pytest.raises(ValueError, match=r"cache must be an od.Cache\("):
        od.DataLoader(dataset, cache="/nvme")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cache= is for an od.ShardDataset"):
        od.DataLoader([1, 2, 3], cache=od.Cache("/nvme", max_bytes=1))


def test_local_shards_are_not_copied(tmp_path: Path) -> None:
    shards = omni_shards(tmp_path, shards=2, samples=5)
    cache = od.Cache(tmp_path / "nvme", max_bytes=1 << 30)
    loader = od.DataLoader(od.ShardDataset(shards), batch_size=2, num_threads=0, cache=cache, dp=(0, 1))
    assert sum(len(batch.sample_ids) for batch in loader) == 10
    assert not (tmp_path / "nvme").exists()
