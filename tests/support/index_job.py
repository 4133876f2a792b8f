"""A rank of a job without an index, over shards in `sys.argv`'s folder: makes a loader, and tells what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from rank_jobs import run_rank
from shard_factory import RECIPE

import orchdata as od
from orchdata.loaders.index import build as builder


def work(folder: str) -> dict[str, Any]:
    measured: list[str] = []
    real = builder.cost_shard

    def noted(facts: Any, *arguments: Any) -> Any:
        measured.append(Path(facts.meta.url).name)
        return real(facts, *arguments)

    with mock.patch.object(builder, "cost_shard", noted):
        loader = od.DataLoader(od.ShardDataset(f"{folder}/*.tar", RECIPE), batch_size=4, num_threads=0)
        keys = [key for batch in loader for _, key in batch.sample_ids]
    return {"measured": measured, "rank": dist.get_rank(), "keys": keys}


if __name__ == "__main__":
    run_rank(work)
