"""Parquet in object storage: bytes read for each byte used are predicted before the first step."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers.s3_server import S3Server
from shard_factory import jpeg

import orchdata as od
from orchdata.loaders.shards.parquet import shard as parquet_shard
from orchdata.profiling.profile import profile

ROWS = 96


def parquet(seed: int, group: int) -> bytes:
    rng = np.random.default_rng(seed)
    images = [jpeg(28, 28, seed=number) + rng.bytes(3000) for number in range(ROWS)]
    table = pa.table({"image": pa.array(images, pa.binary()), "text": [f"words {number}" for number in range(ROWS)]})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=group, compression="none", use_dictionary=False, write_statistics=False)
    return sink.getvalue()


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little memory for column chunks that one of a large row group fills it."""
    monkeypatch.setattr(parquet_shard.COLUMNS, "max_bytes", 100_000)


def dataset(s3_server: S3Server, bucket: str, group: int) -> od.ShardDataset:
    for number in range(3):
        s3_server.put(bucket, f"group-{group}/{number}.parquet", parquet(number, group))
    return od.ShardDataset(f"s3://{bucket}/group-{group}/*.parquet", storage_options=s3_server.options)


@pytest.mark.slow
@pytest.mark.usefixtures("small_memory")
def test_large_row_groups_are_warned_of_and_small_ones_are_not(s3_server: S3Server, new_bucket: Any) -> None:
    bucket = new_bucket()
    with pytest.warns(UserWarning, match=r"bytes are read for each byte.*row_group_size.*grouped.*od\.Cache"):
        large = od.DataLoader(dataset(s3_server, bucket, 48), batch_size=4, seed=0, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small = od.DataLoader(dataset(s3_server, bucket, 1), batch_size=4, seed=0, shuffle=True)

    # The prediction is right about what is then read.
    read = {}
    for name, loader in (("large", large), ("small", small)):
        assert sum(len(batch.sample_ids) for batch in loader) == 3 * ROWS
        read[name] = loader.stats()["read_amplification"]
    assert read["large"] > 10 and read["small"] < 2


@pytest.mark.usefixtures("small_memory")
def test_an_order_that_stays_in_a_row_group_is_fine(s3_server: S3Server, new_bucket: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = od.DataLoader(dataset(s3_server, new_bucket(), 8), batch_size=8, shuffle=False, num_threads=1)
    for _ in loader:
        pass
    assert loader.stats()["read_amplification"] < 2


def test_local_files_are_not_warned_of_and_profile_shows_the_figure(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(0, 48))
    local = od.ShardDataset(tmp_path / "a.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        od.DataLoader(local, batch_size=4, seed=0, shuffle=True)
    reads = profile(local.index(), dataset=local, ranks=(1,), batch_size=4).read_amplification
    assert reads.by_chunk is not None and 40 < reads.by_chunk < 60
