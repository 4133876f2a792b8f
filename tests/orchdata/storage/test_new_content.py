"""Objects that were replaced before a loader is made: those of a pattern are listed, and measured again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from servers.s3_server import S3Server
from shard_factory import omni_shards

import orchdata as od
from orchdata.loaders.errors import StaleIndexError


@pytest.fixture
def replaced(tmp_path: Path, s3_server: S3Server, new_bucket: Any) -> str:
    """A bucket with two shards that were indexed by a pattern and by braces; then one was replaced."""
    bucket = new_bucket()
    first, second = omni_shards(tmp_path, shards=2, samples=6)
    s3_server.put(bucket, "0.tar", Path(first).read_bytes())
    s3_server.put(bucket, "1.tar", Path(second).read_bytes())
    for pattern in ("*.tar", "{0..1}.tar"):
        od.ShardDataset(f"s3://{bucket}/{pattern}", storage_options=s3_server.options).index()
    (tmp_path / "other").mkdir()
    s3_server.put(bucket, "1.tar", Path(omni_shards(tmp_path / "other", shards=1, samples=9)[0]).read_bytes())
    return bucket


def test_a_pattern_is_listed_and_changed_objects_are_measured_again(replaced: str, s3_server: S3Server) -> None:
    dataset = od.ShardDataset(f"s3://{replaced}/*.tar", storage_options=s3_server.options)
    with pytest.warns(UserWarning, match=re.escape(f"s3://{replaced}/1.tar changed since the index was built")):
        loader = od.DataLoader(dataset, batch_size=3)
    assert sum(len(batch.sample_ids) for batch in loader) == 15


def test_objects_that_are_not_listed_are_refused_when_they_are_read(replaced: str, s3_server: S3Server) -> None:
    loader = od.DataLoader(
        od.ShardDataset(f"s3://{replaced}/{{0..1}}.tar", storage_options=s3_server.options), batch_size=3
    )
    with pytest.raises(StaleIndexError, match=r"1\.tar.*orchdata index"):
        for _ in loader:
            pass


def test_a_rebuild_lists_again(replaced: str, s3_server: S3Server, tmp_path: Path) -> None:
    dataset = od.ShardDataset(f"s3://{replaced}/*.tar", storage_options=s3_server.options)
    with pytest.warns(UserWarning, match="measured again"):
        assert len(dataset) == 15
    (tmp_path / "third").mkdir()
    s3_server.put(replaced, "2.tar", Path(omni_shards(tmp_path / "third", shards=1, samples=4)[0]).read_bytes())
    assert len(dataset) == 15
    assert dataset.index(rebuild=True).num_samples == 19
    assert len(dataset) == 19
