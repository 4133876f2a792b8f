"""Shards that tests of object storage share: on this machine, and in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from remote_epochs import Epochs
from servers.s3_server import S3Server


@pytest.fixture(autouse=True)
def _ends(no_hang: None) -> None:
    """No test waits for ever."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Epochs:
    return Epochs(tmp_path_factory.mktemp("shards"), shards=2, samples=10)


@pytest.fixture(scope="module")
def bucket(request: pytest.FixtureRequest, s3_server: S3Server, local: Epochs) -> str:
    name = s3_server.make_bucket(request.module.__name__.rpartition(".")[2].replace("_", "-"))
    local.to_s3(s3_server, name)
    return name
