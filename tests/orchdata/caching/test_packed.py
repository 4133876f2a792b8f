"""Compressed tars of a store without room for all of them decompressed: how often each is fetched is said before."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers.s3_server import S3Server
from shard_factory import RECIPE, omni_samples, write_shard

import orchdata as od
from orchdata.caching.packed import fetches_of
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.order.order import Shuffle

SHARD = ShardInfo("s3://bucket/a.tar.gz", 1_000, "sum", '"etag"', packed=True)


def index(shards: int, samples: int, *, payload: int, shard: ShardInfo = SHARD) -> Any:
    """As much of an index as the estimate needs: `payload` bytes of members in all."""
    return SimpleNamespace(shards=[shard] * shards, num_rows=shards * samples, totals={"bytes": payload})


def test_a_folder_that_holds_all_is_no_trouble() -> None:
    assert fetches_of(index(100, 512, payload=200_000), Shuffle(), shards=1, samples=1, cap=200_000) is None
    # Eight nodes with shards of their own hold an eighth each.
    assert fetches_of(index(96, 512, payload=1_600_000), Shuffle(), shards=1 / 8, samples=1 / 8, cap=200_000) is None


def test_plain_and_local_shards_are_not_fetched_whole() -> None:
    for shard in (replace(SHARD, packed=False), replace(SHARD, url="/data/a.tar.gz")):
        assert fetches_of(index(9, 9, payload=200_000, shard=shard), Shuffle(), shards=1, samples=1, cap=10) is None


def test_a_shard_comes_back_with_each_window_that_has_samples_of_it() -> None:
    # 1,000 shards of 16 blocks, and 250 windows of 64 blocks: 15.5 windows have samples of a shard.
    found = fetches_of(index(1000, 4096, payload=4_000_000), Shuffle(), shards=1, samples=1, cap=3_000_000)
    assert found is not None
    assert found.decompressed == 4_000_000
    assert found.times == pytest.approx(15.5 / 4, abs=0.05)
    in_order = fetches_of(index(1000, 4096, payload=4_000_000), None, shards=1, samples=1, cap=3_000_000)
    assert in_order is not None
    assert in_order.times == 1.0


def test_a_window_above_the_cap_fetches_for_nearly_each_sample() -> None:
    # 64 blocks of 256 samples are all 1,000 shards of 16 samples.
    found = fetches_of(index(1000, 16, payload=4_000_000), Shuffle(), shards=1, samples=0.5, cap=400_000)
    assert found is not None
    assert found.times == pytest.approx(16 * 0.5 * 0.9)


def test_a_loader_warns_once_before_the_first_step(
    s3_server: S3Server, new_bucket: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket()
    for number in range(2):
        path = write_shard(tmp_path / f"{number}.tar", omni_samples(5, prefix=f"s{number}-", seed=number))
        s3_server.put(bucket, f"{number}.tar.gz", gzip.compress(Path(path).read_bytes()))
    dataset = od.ShardDataset(f"s3://{bucket}/*.tar.gz", RECIPE, storage_options=s3_server.options)
    dataset.index()

    def warned(cap: int) -> list[str]:
        monkeypatch.setattr("orchdata.notices._warned", set())
        monkeypatch.setattr("orchdata.caching.packed.CacheFolder", lambda: SimpleNamespace(max_bytes=cap))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                od.DataLoader(dataset, batch_size=2, shuffle=True, num_threads=0)
        return [str(each.message) for each in said if "times in an epoch" in str(each.message)]

    assert warned(1 << 40) == []
    (about_it,) = warned(10_000)
    assert "each is fetched about 1.0 times in an epoch" in about_it
