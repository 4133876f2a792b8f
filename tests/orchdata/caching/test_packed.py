"""Compressed tars of a store that the cache folder cannot hold decompressed: said before they are fetched again."""

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
from orchdata.caching import decompressed
from orchdata.loaders.shards.shard import ShardInfo

SHARD = ShardInfo("s3://bucket/a.tar.gz", 1_000, "sum", '"etag"', packed=True)


def index(*, payload: int, shard: ShardInfo = SHARD) -> Any:
    """As much of an index as is looked at: `payload` bytes of members in all."""
    return SimpleNamespace(shards=[shard] * 9, totals={"bytes": payload})


def test_only_compressed_tars_of_a_store_are_fetched_whole() -> None:
    assert decompressed(index(payload=200_000)) == 200_000
    assert decompressed(index(payload=10)) == 9 * SHARD.size, "no less than is stored"
    for shard in (replace(SHARD, packed=False), replace(SHARD, url="/data/a.tar.gz")):
        assert decompressed(index(payload=200_000, shard=shard)) == 0


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
        monkeypatch.setattr("orchdata.caching.CacheFolder", lambda: SimpleNamespace(max_bytes=cap))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                od.DataLoader(dataset, batch_size=2, shuffle=True, num_threads=0)
        return [str(each.message) for each in said if "several times in an epoch" in str(each.message)]

    assert warned(1 << 40) == []
    assert len(warned(10_000)) == 1
