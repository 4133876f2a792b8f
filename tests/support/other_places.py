"""The same data in two places: in a folder, and in a bucket before which a proxy counts requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from global_digest import content
from servers.proxy import Proxy
from servers.s3_server import S3Server
from shard_factory import RECIPE

import orchdata as od


class Place:
    """A bucket before which a proxy counts."""

    def __init__(self, server: S3Server, bucket: str, proxy: Proxy) -> None:
        self.server, self.bucket, self.proxy = server, bucket, proxy
        self.options = server.options_of("all", proxy.endpoint)
        self.pattern = f"s3://{bucket}/data/*"

    def put(self, paths: list[str]) -> None:
        for path in paths:
            self.server.put(self.bucket, f"data/{Path(path).name}", Path(path).read_bytes())

    def dataset(self, recipe: od.Recipe = RECIPE, **more: Any) -> od.ShardDataset:
        return od.ShardDataset(self.pattern, recipe, storage_options=self.options, **more)


def loader_of(dataset: od.ShardDataset, **more: Any) -> od.DataLoader:
    return od.DataLoader(dataset, batch_size=3, shuffle=True, seed=5, **more)


def contents(batch: od.Batch) -> Any:
    """What a batch has, with names of shards in place of their URLs."""
    sequences, media = content([batch])
    return [(os.path.basename(shard), key, digest) for shard, key, digest in sequences], media


def epoch(loader: od.DataLoader) -> list[Any]:
    return [contents(batch) for batch in loader]
