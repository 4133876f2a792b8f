"""A rank of a job that builds its index, or has an `index_file`, with a cache folder for its "node": what it saw."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from rank_jobs import run_rank
from shard_factory import RECIPE

import orchdata as od
from orchdata.loaders.index import build as builder


def work(text: str) -> dict[str, Any]:
    given = json.loads(text)
    node = 0 if given.get("common") else dist.get_rank() // given["ranks_per_node"]
    os.environ["LOCAL_WORLD_SIZE"] = str(given["ranks_per_node"])
    os.environ["ORCHDATA_CACHE"] = str(Path(given["folder"]) / f"node-{node}")
    measured: list[str] = []
    real = builder.cost_shard

    def noted(facts: Any, *arguments: Any) -> Any:
        measured.append(facts.meta.url.rpartition("/")[2])
        return real(facts, *arguments)

    options, file = given.get("options"), given.get("index_file")
    with mock.patch.object(builder, "cost_shard", noted):
        dataset = od.ShardDataset(given["paths"], RECIPE, storage_options=options, index_file=file)
        try:
            loader = od.DataLoader(dataset, batch_size=1, num_threads=0)
        except od.MissingIndexError as error:
            dist.barrier()
            return {"error": str(error)}
    dist.barrier()
    keys: list[str] = []
    if given.get("steps", True):
        keys = [key for batch in loader for _, key in batch.sample_ids]
    state = loader.state_dict()
    return {"measured": measured, "keys": keys, "state": state}


if __name__ == "__main__":
    run_rank(work)
