"""The index on a store: what a job asks the server for, next generations, builders at the same time, damage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published_job import __file__ as JOB
from rank_jobs import run_ranks
from servers.fixtures import Proxied
from servers.proxy import Proxy, Request
from servers.s3_server import S3Server
from shard_factory import RECIPE, omni_shards

import orchdata as od

SHARDS = 6
SAMPLES = 4


class Bucket:
    """A bucket with shards, and a proxy that counts what is asked of it."""

    def __init__(self, server: S3Server, name: str, proxy: Proxy, folder: Path) -> None:
        self.server, self.name, self.proxy = server, name, proxy
        self.options = server.options_of("all", proxy.endpoint)
        self.pattern = f"s3://{name}/data/*.tar"
        self.store = f"s3://{name}/index"
        self.paths = omni_shards(folder, shards=SHARDS, samples=SAMPLES)
        for path in self.paths:
            self.put(path)

    def put(self, path: str) -> None:
        self.server.put(self.name, f"data/{Path(path).name}", Path(path).read_bytes())

    def dataset(self, **more: Any) -> od.ShardDataset:
        given = {"storage_options": self.options, "index_store": self.store} | more
        return od.ShardDataset(self.pattern, RECIPE, **given)

    def keys(self, folder: str) -> list[str]:
        return [key for key in self.server.list(self.name) if key.startswith(folder)]

    def asked(self) -> Counter[str]:
        """How often each kind of request was made of each kind of file, since the last time; then it is forgotten."""
        seen = Counter(_called(each) for each in self.proxy.requests())
        self.proxy.clear()
        return seen


def _called(request: Request) -> str:
    if request.kind == "LIST":
        listed = next(part for part in request.query.split("&") if part.startswith("prefix="))
        what = listed.removeprefix("prefix=").replace("%2F", "/")
        return f"LIST {what.split('/')[0]}"
    folder, _, rest = request.path.partition("/")[2].partition("/")[2].partition("/")
    of_index = "files" if rest.startswith("files/") else "parts" if rest.startswith("parts/") else "manifest"
    return f"{request.method} {of_index if folder == 'index' else folder}"


@pytest.fixture
def bucket(s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, tmp_path: Path) -> Bucket:
    folder = tmp_path / "shards"
    folder.mkdir()
    return Bucket(s3_server, new_bucket(), proxied(s3_server), folder)


def new_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> Path:
    """Be another node."""
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / name))
    return tmp_path / name


def test_one_process_builds_and_publishes_and_another_node_asks_for_no_shard(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bucket.dataset()
    assert (len(first), first.generation) == (SHARDS * SAMPLES, 1)
    assert [key for key in bucket.keys("index/") if "parts" in key] == []
    bucket.asked()

    new_cache(monkeypatch, tmp_path, "another")
    second = bucket.dataset()
    assert second.urls == first.urls
    assert len(second) == len(first)
    assert bucket.asked() == {"LIST index": 1, "GET manifest": 1, "GET files": 1}
    third = bucket.dataset()
    assert len(third) == len(first)
    assert bucket.asked() == {"LIST index": 1, "GET manifest": 1}, "the node's copy"
    assert second.index().path.read_bytes() == first.index().path.read_bytes()


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (4, 2)])
def test_a_job_asks_once_for_the_manifest_and_once_a_node_for_the_index(
    bucket: Bucket, tmp_path: Path, nodes: int, per_node: int
) -> None:
    bucket.dataset().index()
    bucket.asked()
    ranks = run_ranks(
        JOB, _arguments(bucket, tmp_path, per_node, steps=False), num_ranks=nodes * per_node, folder=tmp_path
    )
    assert bucket.asked() == {"LIST index": 1, "GET manifest": 1, "GET files": nodes}
    assert [rank["measured"] for rank in ranks] == [[]] * len(ranks)
    assert {rank["generation"] for rank in ranks} == {1}


def _arguments(bucket: Bucket, folder: Path, per_node: int, **more: Any) -> str:
    given = {"paths": bucket.pattern, "options": bucket.options, "index_store": bucket.store, "folder": str(folder)}
    return json.dumps(given | {"ranks_per_node": per_node} | more)
