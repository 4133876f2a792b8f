"""Ray in tests: one cluster a session, with a head without CPUs and two nodes, on this machine.

A test that needs Ray fails if it cannot start; none is skipped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers.processes import free_ports

CPUS_OF_A_NODE = 3
ACTOR = {"num_cpus": 0.25}
"""Actors of tests: several loaders of one test fit in the cluster."""
_STORE_BYTES = 128 << 20


@dataclass(frozen=True)
class TestCluster:
    """A running cluster.

    Attributes:
        address: for `ray.init`, or RAY_ADDRESS.
        caches: the cache folder of each node.
    """

    __test__ = False
    address: str
    caches: tuple[Path, ...]
    cluster: Any


def begin_ray() -> None:
    """Set what Ray reads from the environment: no token in the user's home, no statistics, no dashboard."""
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
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


@dataclass(frozen=True)
class RefusingCluster:
    """A running cluster.

    Attributes:
        folder: RAY_TMPDIR of the machine that it is the cluster of.
    """

    address: str
    folder: str


@pytest.fixture
def refusing_cluster() -> Iterator[RefusingCluster]:
    """What `ray start --head` starts; it asks for a token which no other process has."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 40, "RAY_USAGE_STATS_ENABLED": "0"}
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short: sockets
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
        # Ray's own range for its workers has ports of `free_ports`: then it refuses to start.
        options = ["--num-cpus=1", "--include-dashboard=false", "--min-worker-port=0", "--max-worker-port=0"]
        log = Path(folder, "start.log")
        with log.open("w") as out:
            head = subprocess.Popen(
                command + options,
                env=os.environ | token | {"RAY_TMPDIR": folder},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            while "Ray runtime started" not in log.read_text():
                assert head.poll() is None, log.read_text()
                time.sleep(0.1)
            yield RefusingCluster(f"127.0.0.1:{port}", folder)
        finally:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()


_QUIET = {"include_dashboard": False}
