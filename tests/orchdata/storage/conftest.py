"""Data that move between places, and what is measured of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from other_places import Place
from servers.fixtures import Proxied
from servers.s3_server import S3Server

from orchdata.loaders.index.building import builder


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that are measured: a build measures each of them once, and nothing else does."""
    real, shards = builder.cost_shard, []

    def noted(facts: Any, *rest: Any, **more: Any) -> Any:
        shards.append(facts.meta.url)
        return real(facts, *rest, **more)

    monkeypatch.setattr(builder, "cost_shard", noted)
    return shards


@pytest.fixture
def place(s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied) -> Place:
    return Place(s3_server, new_bucket(), proxied(s3_server))
