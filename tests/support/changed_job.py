"""A rank of a job over shards in a folder of which one was rewritten: makes two loaders, and tells who looked."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

from rank_jobs import run_rank
from shard_factory import RECIPE

import orchdata as od
from orchdata.dataset import shard_dataset as found


def work(folder: str) -> dict[str, Any]:
    with (
        mock.patch.object(found, "find_changes", wraps=found.find_changes) as looks,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            dataset = od.ShardDataset(f"{folder}/*.tar", RECIPE)
            loader = od.DataLoader(dataset, global_batch_size=6, num_threads=0)
            keys = [key for batch in loader for _, key in batch.sample_ids]
    warned = any("measured again" in str(warning.message) for warning in caught)
    return {"looked": looks.call_count, "keys": keys, "warned": warned}


if __name__ == "__main__":
    run_rank(work)
