"""A rank that runs the call which a plan prints, and takes one step of its loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rank_jobs import run_rank, run_ranks
from shard_factory import RECIPE

import orchdata as od
from orchdata.balancers import CostModel


def run(shard: str, call: Path, folder: Path) -> list[Any]:
    """The samples of every rank in the first step, and its LLM tokens in each microbatch."""
    return run_ranks(__file__, shard, call, num_ranks=2, folder=folder)


def work(shard: str, call: str) -> dict[str, Any]:
    names: dict[str, Any] = {"dataset": od.ShardDataset(shard, recipe=RECIPE), "cost": CostModel(llm=od.PhaseCost(1.0))}
    exec(Path(call).read_text(), names)
    items = next(iter(names["loader"].steps()))
    return {"dp": items[0].dp_size, "tokens": [int(item.llm.cu_seqlens[-1]) for item in items]}


if __name__ == "__main__":
    run_rank(work)
