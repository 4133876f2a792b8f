"""The plans of a loader as a table: which sample is in which step, on which rank, in which microbatch.

BuildSpec, epochs --make_plan, a step at a time--> record batches --> Arrow IPC file
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa

from orchdata.building.spec import BuildSpec, SampleContent, ShardContent
from orchdata.order.steps import Epochs
from orchdata.planning.make_plan import make_plan
from orchdata.planning.plan import Plan

_SCHEMA = pa.schema(
    {
        "epoch": pa.int64(),
        "step": pa.int64(),
        "source": pa.dictionary(pa.int32(), pa.string()),
        "pass": pa.int32(),
        "row": pa.int64(),
        "shard": pa.string(),
        "key": pa.string(),
        "piece": pa.int32(),
        "rank": pa.int32(),
        "microbatch": pa.int32(),
        "llm_tokens": pa.int64(),
        "loss_tokens": pa.int64(),
    }
)


def export_plan(
    path: str | PathLike[str],
    spec: BuildSpec,
    epochs: Epochs,
    fingerprint: Mapping[str, Any],
    *,
    of_epochs: Iterable[int],
    steps: range | None,
) -> int:
    """Write the plans of these epochs, and say how many rows they have; arguments as of `DataLoader.export_plan`."""
    if not isinstance(spec.content, ShardContent | SampleContent):
        raise ValueError("export_plan writes the shards and keys of an index, which an od.ShardDataset has")
    about = {"orchdata": json.dumps({"num_ranks": spec.plan.num_ranks, "fingerprint": dict(fingerprint)})}
    written = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA.with_metadata(about)) as writer:
        for epoch in of_epochs:
            wanted = steps if steps is not None else range(epochs.count(epoch))
            for task in epochs.tasks(epoch, wanted.start, None, again=False):
                if task.step >= wanted.stop:
                    break
                if task.step in wanted:
                    batch = _of_step(make_plan(spec.plan, task), spec)
                    writer.write_batch(batch)
                    written += batch.num_rows
    return written


def _of_step(plan: Plan, spec: BuildSpec) -> pa.RecordBatch:
    assert isinstance(spec.content, ShardContent | SampleContent)
    index, count = spec.content.shards.index, len(plan.row)
    rows = plan.row.tolist()
    names = pa.array(plan.sources or [""], pa.string())
    columns = [
        np.full(count, plan.epoch),
        np.full(count, plan.step),
        pa.DictionaryArray.from_arrays(pa.array(plan.dataset_id), names),
        np.full(count, plan.epoch, np.int32) if plan.passes is None else plan.passes,
        plan.row,
        pa.array([index.shard_of(row).url for row in rows], pa.string()),
        pa.array([index.key(row) for row in rows], pa.string()),
        index.piece[plan.row],
        plan.rank,
        plan.microbatch,
        plan.llm_positions,
        spec.plan.costs.loss_tokens(plan.dataset_id, plan.row),
    ]
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=_SCHEMA)
