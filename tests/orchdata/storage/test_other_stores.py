"""Google, Azure, the hub, other filesystems, and stores of the user's: equal to local shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from remote_epochs import Epochs, epoch, remote
from servers.azure_server import AzureServer
from servers.fixtures import Proxied
from servers.gcs_server import GcsServer
from servers.hub_server import HubServer
from servers.proxy import Fault
from servers.s3_server import S3Server
from shard_factory import RECIPE

import orchdata as od


def contents(local: Epochs) -> dict[str, bytes]:
    return {Path(path).name: Path(path).read_bytes() for path in local.paths}


def check(dataset: od.ShardDataset, local: Epochs) -> None:
    assert epoch(dataset) == local.local
    assert epoch(dataset, num_threads=0) == local.local
    assert epoch(dataset, num_workers=1) == local.local


def test_google(gcs_server: GcsServer, local: Epochs) -> None:
    bucket = gcs_server.make_bucket("shards")
    for name, content in contents(local).items():
        gcs_server.put(bucket, f"d/{name}", content)
    check(remote(f"gs://{bucket}/d/*.tar", gcs_server.options), local)


@pytest.mark.slow
def test_azure(azure_server: AzureServer, local: Epochs) -> None:
    container = azure_server.make_container("shards")
    for name, content in contents(local).items():
        azure_server.put(container, f"d/{name}", content)
    check(remote(f"az://{container}/d/*.tar", azure_server.options), local)


def test_a_given_store_of_obstore(s3_server: S3Server, new_bucket: Callable[[], str], local: Epochs) -> None:
    bucket = new_bucket()
    pattern = local.to_s3(s3_server, bucket)
    dataset = od.ShardDataset(pattern, recipe=RECIPE, store=s3_server.store(bucket))
    check(dataset, local)
    assert "secret" not in repr(dataset.files).lower()


def test_a_given_store_with_a_prefix(s3_server: S3Server, new_bucket: Callable[[], str], local: Epochs) -> None:
    """The keys of URLs are those of the store."""
    from servers.s3_server import store_at

    bucket = new_bucket()
    local.to_s3(s3_server, bucket, "deep/train")
    store = store_at(f"s3://{bucket}/deep", s3_server.options)
    check(od.ShardDataset(f"s3://{bucket}/train/*.tar", recipe=RECIPE, store=store), local)


def test_a_filesystem_in_memory(local: Epochs) -> None:
    files = fsspec.filesystem("memory")
    for name, content in contents(local).items():
        files.pipe_file(f"/shards/d/{name}", content)
    try:
        dataset = remote("memory://shards/d/*.tar")
        assert epoch(dataset) == local.local
        assert epoch(dataset, num_threads=0) == local.local
        files.pipe_file("/shards/d/omni-000001.tar", contents(local)["omni-000000.tar"])
        with pytest.raises(od.StaleIndexError, match="omni-000001.tar"):
            epoch(remote("memory://shards/d/omni-{000000..000001}.tar"))
    finally:
        files.rm("/shards", recursive=True)


def test_a_given_filesystem(tmp_path: Path, local: Epochs) -> None:
    files = fsspec.filesystem("dir", path=str(tmp_path), target_protocol="file")
    (tmp_path / "shards").mkdir()
    for name, content in contents(local).items():
        (tmp_path / "shards" / name).write_bytes(content)
    check(od.ShardDataset("any://shards/*.tar", recipe=RECIPE, store=files), local)


class TestTheHub:
    NAME = "user/name"

    def dataset(self, server: HubServer, revision: str = "") -> od.ShardDataset:
        options = {"endpoint": server.endpoint, "token": False}
        return remote(f"hf://datasets/{self.NAME}{revision}/d/*.tar", options)

    def commit(self, server: HubServer, local: Epochs) -> str:
        return server.commit(self.NAME, {f"d/{name}": content for name, content in contents(local).items()})

    def test_an_epoch(self, hub_server: HubServer, local: Epochs) -> None:
        self.commit(hub_server, local)
        check(self.dataset(hub_server), local)

    def test_a_revision(self, hub_server: HubServer, local: Epochs) -> None:
        commit = self.commit(hub_server, local)
        hub_server.commit(self.NAME, {"d/omni-000001.tar": b"other"})
        assert epoch(self.dataset(hub_server, f"@{commit}")) == local.local

    def test_the_commit_of_the_index_is_read(self, hub_server: HubServer, local: Epochs) -> None:
        commit = self.commit(hub_server, local)
        dataset = self.dataset(hub_server)
        dataset.index()
        hub_server.commit(self.NAME, {"d/omni-000001.tar": contents(local)["omni-000000.tar"], "README.md": b"new"})
        hub_server.clear()
        assert epoch(dataset, num_workers=1) == local.local
        asked = [each for each in hub_server.requests("GET") if "/resolve/" in each.path]
        assert asked
        assert all(f"/resolve/{commit}/" in each.path for each in asked)

    def test_a_dropped_connection_is_made_again(self, hub_server: HubServer, local: Epochs, proxied: Proxied) -> None:
        self.commit(hub_server, local)
        proxy = proxied(hub_server, Fault("cut", ordinals=(1, 6)))
        options = {"endpoint": proxy.endpoint, "token": False, "skip_instance_cache": True}
        assert epoch(remote(f"hf://datasets/{self.NAME}/d/*.tar", options)) == local.local
        assert proxy.requests()[0].fault

    def test_a_wrong_token(self, local: Epochs) -> None:
        with HubServer(token="right-secret") as server:
            self.commit(server, local)
            options = {"endpoint": server.endpoint, "token": "wrong-secret", "retry_seconds": 0}
            with pytest.raises(od.StorageError, match="none that this token may read") as caught:
                remote(f"hf://datasets/{self.NAME}/d/*.tar", options).index()
            assert "secret" not in str(caught.value)
            assert "\n" not in str(caught.value)
