"""Epochs over servers that fail now and then, or for a while: the batches are those of local shards, or one error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from remote_epochs import LOADER, Epochs, digests, epoch, remote
from servers.fixtures import Proxied
from servers.proxy import Fault, Proxy
from servers.s3_server import S3Server

import orchdata as od

IN_TURN = (
    Fault("cut"),
    Fault("cut_body"),
    Fault("short"),
    Fault("fewer"),
    Fault("long"),
    Fault("status", status=500),
    Fault("status", status=503),
    Fault("status", status=429, retry_after=1),
    Fault("stall", seconds=2),
)
"""Each acts on one of twenty requests."""
ENGINES: dict[str, dict[str, Any]] = {
    "this process": {"num_threads": 0},
    "threads": {"num_threads": 4, "prefetch_factor": 2},
    "worker processes": {"num_workers": 2, "num_threads": 2, "prefetch_factor": 1},
}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Epochs:
    return Epochs(tmp_path_factory.mktemp("shards"))


Remote = Callable[..., od.ShardDataset]


@pytest.fixture
def through(s3_server: S3Server, bucket: str, same_cache: None) -> Remote:
    """Makes the data set as read through a proxy."""

    def make(proxy: Proxy, **options: Any) -> od.ShardDataset:
        given = s3_server.options_of("all", proxy.endpoint) | options
        return remote(f"s3://{bucket}/train/omni-{{000000..000002}}.tar", given)

    return make


def numbered(every: int) -> list[Fault]:
    """The faults in turn, on each n-th read."""
    period = every * len(IN_TURN)
    return [
        replace(fault, kinds=("RANGE",), ordinals=tuple(range(every * (number + 1), 2000, period)))
        for number, fault in enumerate(IN_TURN)
    ]


@pytest.mark.slow_cases("process")
@pytest.mark.parametrize("engine", ENGINES)
def test_faults_change_no_batch_and_skip_no_sample(
    s3_server: S3Server, local: Epochs, through: Remote, proxied: Proxied, engine: str
) -> None:
    proxy = proxied(s3_server)
    dataset = through(proxy, read_timeout="1s")
    dataset.index()
    loader = od.DataLoader(dataset, on_error="skip", **ENGINES[engine], **LOADER)  # looks at the first texts
    proxy.faults = numbered(4)
    proxy.clear()
    assert digests(loader) == local.local
    acted = {(each.fault, each.status * (each.fault == "status")) for each in proxy.requests()} - {("", 0)}
    assert acted == {(each.action, each.status if each.action == "status" else 0) for each in IN_TURN}
    requests = loader.stats()["reads"]["requests"]
    assert loader.stats()["failures"]["count"] == 0
    assert requests["get"] == proxy.counts()["RANGE"]
    assert requests["again"] >= len(IN_TURN)


def test_an_index_is_equal_when_its_requests_fail(
    s3_server: S3Server, local: Epochs, bucket: str, proxied: Proxied
) -> None:
    proxy = proxied(s3_server, *(replace(each, ordinals=(1 + number,)) for number, each in enumerate(IN_TURN[:8])))
    dataset = remote(f"s3://{bucket}/train/*.tar", s3_server.options_of("all", proxy.endpoint))
    assert dataset.index().bad_rows().size == 0
    assert [each.fault for each in proxy.requests()[:8]] == [each.action for each in IN_TURN[:8]]
    assert epoch(dataset) == local.local


class Outage:
    """Takes a server away, and gives it back when it has refused some requests."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    def begin(self) -> None:
        self.proxy.faults = (Fault("cut"),)
        self.proxy.drop_connections()

    def end_after(self, refusals: int) -> None:
        """Wait for so many refused requests, then answer again."""
        self.proxy.clear()
        while len(self.proxy.requests()) < refusals:
            threading.Event().wait(0.02)
        self.proxy.faults = ()


@pytest.mark.slow_cases("process")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_epoch_goes_on_after_an_outage(
    s3_server: S3Server, local: Epochs, through: Remote, proxied: Proxied, engine: str
) -> None:
    proxy = proxied(s3_server)
    outage, found = Outage(proxy), []
    ends = threading.Thread(target=outage.end_after, args=(12,))
    loader = od.DataLoader(through(proxy), on_error="skip", **ENGINES[engine], **LOADER)
    for number, batch in enumerate(loader):
        found += digests([batch])
        if number == 2:
            outage.begin()
            ends.start()
    ends.join()
    assert found == local.local
    assert loader.stats()["failures"]["count"] == 0


@pytest.mark.slow_cases("process")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_outage_that_lasts_is_one_error_on_one_line(
    s3_server: S3Server, bucket: str, through: Remote, proxied: Proxied, engine: str
) -> None:
    proxy = proxied(s3_server)
    loader = od.DataLoader(through(proxy, retry_seconds=0.5), on_error="skip", **ENGINES[engine], **LOADER)
    batches = iter(loader)
    next(batches)
    Outage(proxy).begin()
    with pytest.raises(od.StorageError) as caught:
        list(batches)
    said = str(caught.value)
    assert said.startswith(f"s3://{bucket}/train/omni-00000")
    assert "the connection was lost" in said
    assert "attempts)" in said
    assert "\n" not in said
    assert loader.stats()["failures"]["count"] == 0
    # The state is that of before: with the server back, the epoch goes on with the step that failed.
    proxy.faults = ()
    assert len(list(loader)) > 0


@pytest.mark.slow
def test_a_worker_that_waits_for_storage_is_not_suspected(
    s3_server: S3Server, local: Epochs, through: Remote, proxied: Proxied
) -> None:
    """The timeout of a step passes several times while the server is away."""
    proxy = proxied(s3_server)
    dataset = through(proxy)
    dataset.index()
    loader = od.DataLoader(dataset, on_error="skip", num_workers=1, num_threads=2, timeout=6, **LOADER)
    batches = iter(loader)
    found = digests([next(batches)])
    proxy.faults = (Fault("stall", kinds=("RANGE",), after=10, seconds=15, times=2),)
    found += digests(batches)
    assert found == local.local
    assert loader.stats()["failures"]["count"] == 0


def test_the_timeout_of_a_loader_limits_an_outage(s3_server: S3Server, through: Remote, proxied: Proxied) -> None:
    proxy = proxied(s3_server)
    dataset = through(proxy)  # for 5 minutes, if the loader said nothing
    dataset.index()
    loader = od.DataLoader(dataset, on_error="skip", num_workers=1, num_threads=2, timeout=8, **LOADER)
    batches = iter(loader)
    next(batches)
    Outage(proxy).begin()
    with pytest.raises(od.StorageError, match="connection was lost"):
        list(batches)
    assert loader.stats()["failures"]["count"] == 0
    assert json.dumps(loader.state_dict())
