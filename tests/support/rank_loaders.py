"""Loaders of all ranks of a job in one process, with token steps, and what they deliver together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from delivered_once import row_of

import orchdata as od

BUDGET = 500
Steps = list[tuple[list[od.Batch], ...]]


def loaders(dataset: Any, ranks: int, state: Any = None, allow: Sequence[str] = (), **options: Any) -> list[Any]:
    """One for each rank; from a state, as it comes back from a file."""
    common = {"global_batch_tokens": BUDGET, "shuffle": True, "seed": 7, "num_threads": 0} | options
    made: list[Any] = [od.DataLoader(dataset, dp=(rank, ranks), **common) for rank in range(ranks)]
    for loader in made if state is not None else ():
        loader.load_state_dict(json.loads(json.dumps(state)), allow=allow)
    return made


def steps_of(ours: Sequence[Any], most: int | None = None) -> Steps:
    """The shares of all ranks, step by step."""
    streams = [iter(loader.steps()) for loader in ours]
    found = list(itertools.islice(zip(*streams, strict=True), most))
    for stream in streams:
        stream.close()
    return found


def rows_of(steps: Steps) -> list[dict[str, Any]]:
    """What ranks would write of steps that they were given, for `delivered_once`."""
    return [row_of(rank, share) for shares in steps for rank, share in enumerate(shares)]
