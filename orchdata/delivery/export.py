"""The plans of a loader as a table: step, rank and microbatch of each sample, and the ranks that encode its parts.

BuildSpec, steps --make_plan, a step at a time--> record batches --> Arrow IPC file
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.balancers.assignment import checked_epoch
from orchdata.building.step import BuildSpec
from orchdata.order.steps import Steps
from orchdata.planning.plan import Plan, make_plan
from orchdata.planning.windows import WindowBatches

_PART = {
    "modality": pa.string(),
    "part": pa.int32(),
    "positions": pa.int64(),
    "tokens": pa.int64(),
    "rank": pa.int32(),
    "peer": pa.int32(),
}
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
        "team_size": pa.int32(),
        "microbatch": pa.int32(),
        "llm_tokens": pa.int64(),
        "loss_tokens": pa.int64(),
        "parts": pa.list_(pa.struct(_PART)),
    }
)


def export_plan(
    path: str | PathLike[str],
    spec: BuildSpec,
    steps_of: Steps,
    fingerprint: Mapping[str, Any],
    *,
    of_epochs: Iterable[int],
    steps: range | None,
) -> int:
    """Write the plans of these epochs, and return the number of rows; arguments as of `DataLoader.export_plan`."""
    if spec.shards is None:
        raise ValueError("export_plan writes the shards and keys of an index: it needs an od.ShardDataset")
    if not isinstance(of_epochs, Iterable) or isinstance(of_epochs, str):
        raise ValueError(f"epochs must be numbers of epochs, as [0] or range(3), got {of_epochs!r}")
    numbers = [checked_epoch(epoch) for epoch in of_epochs]
    if steps is not None and not (isinstance(steps, range) and steps.start >= 0 and steps.step > 0):
        raise ValueError(f"steps must be a range of steps of an epoch, as range(0, 100), got {steps!r}")
    schema = _SCHEMA
    if isinstance(spec.plan.batches, WindowBatches):
        schema = schema.append(pa.field("first_token", pa.int64()))
    about = {"orchdata": json.dumps({"num_ranks": spec.plan.num_ranks, "fingerprint": dict(fingerprint)})}
    written = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema.with_metadata(about)) as writer:
        for epoch in numbers:
            wanted = steps if steps is not None else range(steps_of.count(epoch))
            for task in steps_of.tasks(epoch, wanted.start, None, again=False):
                if task.step >= wanted.stop:
                    break
                if task.step in wanted:
                    batch = _of_step(make_plan(spec.plan, task), spec, schema)
                    writer.write_batch(batch)
                    written += batch.num_rows
    return written


def _of_step(plan: Plan, spec: BuildSpec, schema: pa.Schema) -> pa.RecordBatch:
    assert spec.shards is not None
    index, count = spec.shards.index, len(plan.row)
    rows = plan.row.tolist()
    names = pa.array(plan.sources or [""], pa.string())
    columns = [
        np.full(count, plan.epoch),
        np.full(count, plan.step),
        pa.DictionaryArray.from_arrays(pa.array(plan.source), names),
        np.full(count, plan.epoch, np.int32) if plan.passes is None else plan.passes,
        plan.row - index.first_rows[plan.source],
        pa.array([index.shard_of(row).url for row in rows], pa.string()),
        pa.array([index.key(row) for row in rows], pa.string()),
        index.piece[plan.row],
        plan.rank,
        plan.team_size,
        plan.microbatch,
        plan.llm_positions,
        spec.plan.costs.loss_tokens(plan.row) if plan.ranges is None else plan.ranges.loss_tokens,
        _parts_of(plan, spec, index),
        *([] if plan.ranges is None else [plan.ranges.first]),
    ]
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=schema)


def _parts_of(plan: Plan, spec: BuildSpec, index: Any) -> pa.ListArray:
    """Return the parts of each sample, by their position in it, with the ranks and peers that encode them; peer 0 where
    there is one, or each encodes all.
    """
    encoders = list(plan.phases[:-1])
    by_phase = [plan.parts.get(phase) or spec.plan.costs.parts(phase, plan.row) for phase in encoders]
    sample = np.concatenate([np.zeros(0, np.int64), *(parts.sample for parts in by_phase)])
    part = np.concatenate([np.zeros(0, np.int64), *(parts.part for parts in by_phase)])
    order = np.lexsort((part, sample))

    def column(name: str) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(getattr(parts, name) for parts in by_phase)])[order]

    phase = np.repeat(np.arange(len(by_phase)), [len(parts) for parts in by_phase])[order]
    ranks = [
        parts.rank if name in plan.parts else plan.rank[parts.sample]
        for name, parts in zip(encoders, by_phase, strict=True)
    ]
    rank = np.concatenate([np.zeros(0, np.int32), *ranks])[order]
    peers = [np.zeros(len(parts), np.int32) if parts.peer is None else parts.peer for parts in by_phase]
    peer = np.concatenate([np.zeros(0, np.int32), *peers])[order]
    starts = np.array([index.part_range(row).start for row in plan.row.tolist()], np.int64)
    position = (part - starts[sample])[order] if len(part) else part
    columns = [
        pa.array(encoders, pa.string()).take(pa.array(phase)),
        position,
        column("positions"),
        column("tokens"),
        rank,
        peer,
    ]
    arrays = [pa.array(each, kind) for each, kind in zip(columns, _PART.values(), strict=True)]
    ends = np.cumsum(np.bincount(sample, minlength=len(plan.row)))
    offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
    fields = [pa.field(name, kind) for name, kind in _PART.items()]
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(arrays, fields=fields))
