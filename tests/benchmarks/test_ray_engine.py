"""The benchmark of Ray measures all of its lanes."""

from __future__ import annotations

import pytest
from ray_clusters import TestCluster

from benchmarks.ray_engine import RayBench, run


@pytest.mark.slow
def test_all_lanes_are_measured(ray_cluster: TestCluster) -> None:
    results = run(RayBench(batches=4, mebibytes=1, samples=24, repeats=1))
    assert len(results) == 5 and all(min(each.values) > 0 for each in results)
    assert [each.demand for each in results if each.demand] == [300, 4, 0.75]
