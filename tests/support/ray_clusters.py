"""Ray in tests: one cluster a session, with a head without CPUs and two nodes, on this machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CPUS_OF_A_NODE = 3
ACTOR = {"num_cpus": 0.25}
"""Actors of tests: several loaders of one test fit in the cluster."""
_STORE_BYTES = 128 << 20


@dataclass(frozen=True)
class TestCluster:
    """A running cluster."""

    __test__ = False
    address: str  # for `ray.init`, or RAY_ADDRESS
    caches: tuple[Path, ...]  # the cache folder of each node
    cluster: Any


def begin_ray() -> None:
    """Set what Ray reads from the environment: no token in the user's home, no statistics, no niceness."""
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",  # at its 15 other tests would starve actors
    }


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster that this process is connected to; its nodes have cache folders of their own."""
    begin_ray()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.cluster_utils import Cluster

        caches = []
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": _STORE_BYTES, **_QUIET}
        )
        for number in range(2):
            caches.append(tmp_path_factory.mktemp(f"cache-of-node-{number}"))
            env = {"ORCHDATA_CACHE": str(caches[-1]), "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
            cluster.add_node(
                num_cpus=CPUS_OF_A_NODE,
                object_store_memory=_STORE_BYTES,
                resources={f"node{number}": 100},
                env_vars=env,
                **_QUIET,
            )
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield TestCluster(cluster.address, tuple(caches), cluster)
    ray.shutdown()
    cluster.shutdown()


_QUIET = {"include_dashboard": False}
