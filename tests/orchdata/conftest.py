"""Data that tests of many modules share."""

from __future__ import annotations

from pathlib import Path

import pytest
from shard_factory import RECIPE, omni_shards

import orchdata as od


@pytest.fixture(scope="module")
def dataset(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, module_cache: Path
) -> od.ShardDataset:
    """Indexed shards for all tests of a module, as many as its OMNI says."""
    dataset = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), **request.module.OMNI), RECIPE)
    dataset.index()
    return dataset
