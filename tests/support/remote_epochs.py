"""Epochs over shards in object storage, held against those over the same shards on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from digests import digest
from servers.http_server import HttpServer
from servers.s3_server import S3Server
from shard_factory import RECIPE, omni_shards

import orchdata as od

LOADER: dict[str, Any] = {"batch_size": 4, "seed": 3, "shuffle": True}


class Epochs:
    """Some shards on this machine, and what an epoch over them gives."""

    def __init__(self, folder: Path, *, shards: int = 3, samples: int = 20) -> None:
        self.paths = omni_shards(folder, shards=shards, samples=samples)
        self.local = epoch(od.ShardDataset(self.paths, recipe=RECIPE))

    def to_s3(self, server: S3Server, bucket: str, folder: str = "train") -> str:
        """Store the shards in a bucket. Return the pattern of their URLs."""
        for path in self.paths:
            server.put(bucket, f"{folder}/{Path(path).name}", Path(path).read_bytes())
        return f"s3://{bucket}/{folder}/*.tar"

    def to_http(self, server: HttpServer, folder: str) -> list[str]:
        """Put the shards on a server of HTTP. Return their URLs."""
        return [server.put(f"{folder}/{Path(path).name}", Path(path).read_bytes()) for path in self.paths]


def remote(urls: str | Sequence[str], options: Mapping[str, Any] | None = None, **more: Any) -> od.ShardDataset:
    """The data set of some URLs."""
    return od.ShardDataset(urls, recipe=more.pop("recipe", RECIPE), storage_options=options, **more)


def epoch(dataset: Any, **options: Any) -> list[str]:
    """A digest of each batch of an epoch; equal ones are equal to the bit."""
    return digests(od.DataLoader(dataset, **(LOADER | options)))


def digests(batches: Iterable[Any]) -> list[str]:
    """Of all in each batch but the places of its shards."""
    return [
        digest([[(base_name(url), key) for url, key in batch.sample_ids], batch], without=("plan", "sample_ids"))
        for batch in batches
    ]


def base_name(url: str) -> str:
    """The last component of a path or URL, decoded."""
    return unquote(Path(urlsplit(url).path or url).name)
