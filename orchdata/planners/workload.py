"""Real global batches: samples of some steps, by the loader's own order, with what each part costs every phase.

data set, cost model, order --rows of steps, index columns--> Workload, which plans can be made of
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import checked_costs, checked_count
from orchdata.balancers.costs.model import CostModel
from orchdata.dataset.indexed import IndexTokens, above_budget, index_of, layout_costs, order_of
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import unchosen_rows
from orchdata.loaders.index.index import Index
from orchdata.order.order import Shuffle
from orchdata.planners.layout import LLM
from orchdata.planners.values import Value
from orchdata.planning.balance import Balance, Packed
from orchdata.planning.parts import Parts
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Padding
from orchdata.profiling.planned import SMALL_ERROR, StepSize, epoch_spec, spread_steps

Ints = NDArray[np.int64]

_MOST_STEPS = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Columns(Value):
    """The parts of one phase: those of sample s lie in [offsets[s], offsets[s + 1]).

    Attributes:
        offsets: int64 (num_samples + 1,).
        positions, tokens, costs: int64 (num_parts,), at least 1: positions in the phase, rows that it yields, and what
            the loader plans by, in the unit of its cost model.
    """

    offsets: Ints
    positions: Ints
    tokens: Ints
    costs: Ints

    def __post_init__(self) -> None:
        offsets = checked_costs(self.offsets, "Columns.offsets")
        if [*offsets[:1]] != [0] or (np.diff(offsets) < 0).any():
            raise ValueError(f"Columns.offsets must ascend from 0, got {offsets[:8]}")
        object.__setattr__(self, "offsets", offsets)
        for name in ("positions", "tokens", "costs"):
            values = checked_costs(getattr(self, name), f"Columns.{name}")
            if len(values) != offsets[-1]:
                raise ValueError(f"Columns.{name} must have {offsets[-1]} numbers, got {len(values)}")
            if not values.all():
                raise ValueError(f"Columns.{name}[{values.argmin()}] is 0; it must be at least 1")
            object.__setattr__(self, name, values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload(Value):
    """Samples of some steps, in the sequence of the order.

    Attributes:
        steps: int64 (num_steps + 1,): step s has the samples [steps[s], steps[s + 1]), at least one.
        phases: name -> columns, encoders first; `llm` last, with one part a sample.
        global_batch_tokens, global_batch_size: of the loader, for the printed call; or None.
    """

    steps: Ints
    phases: Mapping[str, Columns]
    global_batch_tokens: int | None = None
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        steps = checked_costs(self.steps, "Workload.steps")
        if len(steps) < 2 or steps[0] or (np.diff(steps) < 1).any():
            raise ValueError(f"Workload.steps must ascend from 0, a step with at least one sample, got {steps[:8]}")
        object.__setattr__(self, "steps", steps)
        if [*self.phases][-1:] != [LLM]:
            raise ValueError(f"Workload.phases must have {LLM!r} last, got {[*self.phases]}")
        for phase, columns in self.phases.items():
            parts = np.diff(columns.offsets)
            if len(parts) != self.num_samples or (phase == LLM and (parts != 1).any()):
                each = "one part" if phase == LLM else "its parts"
                raise ValueError(f"Workload.phases[{phase!r}] must give each of {self.num_samples} samples {each}")

    @property
    def num_samples(self) -> int:
        return int(self.steps[-1])

    @property
    def num_steps(self) -> int:
        return len(self.steps) - 1

    @classmethod
    def of(
        cls,
        data: ShardDataset | Mixture | Index,
        *,
        cost: CostModel | None = None,
        global_batch_tokens: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        steps: int = 8,
        dataset: ShardDataset | Mixture | None = None,
    ) -> Workload:
        """Return steps of the data's first epoch, as a loader with this seed draws them. No sample is decoded.

        Args:
            data: a data set, whose index is built where it is missing, or an index.
            cost: the loader's, by which plans are made; None plans by positions.
            global_batch_tokens, global_batch_size: size of a step; one of them.
            seed: of the order, with `shuffle=True`.
            steps: spread over the epoch; twice as many, up to 64, until the standard error of their mean cost is
                below 2 %.
            dataset: the data set of an index, if it chooses samples or is a mixture.

        Raises ValueError for no usable sample, both sizes or none, or a sample larger than a step.
        """
        if (global_batch_tokens is None) == (global_batch_size is None):
            raise ValueError(f"give one of {global_batch_tokens=} and {global_batch_size=}")
        amount = checked_count(global_batch_tokens or global_batch_size or 0, "the global batch")
        steps = checked_count(steps, "steps")
        dataset, index = (dataset, data) if isinstance(data, Index) else (data, index_of(data))
        # The usable samples, as the loader has them.
        unchosen = np.zeros(0, np.int64) if dataset is None else unchosen_rows(dataset, index)
        excluded = np.union1d(index.bad_rows(), unchosen)
        if len(excluded) == index.num_rows:
            raise ValueError(f"none of the {index.num_samples} samples is usable, so there is nothing to plan")
        source, counts = layout_costs(index, cost, Packed()), IndexTokens(index)
        if global_batch_tokens is not None:
            excluded = np.union1d(excluded, above_budget(counts, amount, Balance(), excluded))
        order = order_of(dataset, index, excluded, shuffle=Shuffle(), seed=seed)
        # Steps of one rank are steps of all.
        size = StepSize(amount, counts if global_batch_tokens is not None else None)
        spec, error = epoch_spec(source, order, Balance(), size, num_ranks=1), np.inf
        rows: list[Ints] = []
        while not rows or (error >= SMALL_ERROR and steps <= _MOST_STEPS):
            rows = [order.rows(task.epoch, *spec.steps.bounds(task))[1] for task in spread_steps(spec, steps)]
            if len(rows) < steps:
                break
            work = [sum(float(source.costs(phase, row).sum()) for phase in source.balanced) for row in rows]
            error = np.std(work, ddof=1) / np.mean(work) / len(work) ** 0.5 if len(work) > 1 else np.inf
            steps *= 2
        # Their columns.
        row, columns = np.concatenate(rows), {}
        for phase in source.phases:
            if phase == LLM:
                positions = tokens = source.positions(LLM, row)
                offsets, costs = np.arange(len(row) + 1), source.costs(LLM, row)
            else:
                parts = source.parts(phase, row)
                offsets = np.searchsorted(parts.sample, np.arange(len(row) + 1))
                positions, tokens, costs = parts.positions, parts.tokens, parts.costs
            positions, tokens, costs = (np.maximum(each, 1) for each in (positions, tokens, costs))
            columns[phase] = Columns(offsets=offsets, positions=positions, tokens=tokens, costs=costs)
        index.release()  # What was read of all rows, to make steps of them.
        return cls(
            steps=np.concatenate([[0], np.cumsum([len(each) for each in rows])]),
            phases=columns,
            global_batch_tokens=global_batch_tokens,
            global_batch_size=global_batch_size,
        )

    def take(self, steps: int) -> Workload:
        """Return the first steps alone."""
        samples = int(self.steps[steps])
        phases = {}
        for phase, of in self.phases.items():
            cut = {name: getattr(of, name)[: of.offsets[samples]] for name in ("positions", "tokens", "costs")}
            phases[phase] = Columns(offsets=of.offsets[: samples + 1], **cut)
        return replace(self, steps=self.steps[: steps + 1], phases=phases)


@dataclass
class WorkloadCosts:
    """A workload as `SampleCosts`: row r is its sample r. Plans balance the phases `balanced`."""

    workload: Workload
    balanced: tuple[str, ...]
    padded: Padding = NO_PADDING

    def __post_init__(self) -> None:
        self.phases, self.exponent = tuple(self.workload.phases), 0  # only teams read it

    def costs(self, phase: str, row: Ints) -> Ints:
        return self._sums(phase, "costs", row)

    def positions(self, phase: str, row: Ints) -> Ints:
        return self._sums(phase, "positions", row)

    def loss_tokens(self, row: Ints) -> Ints:
        return np.zeros(len(row), np.int64)

    def parts(self, phase: str, row: Ints) -> Parts:
        columns = self.workload.phases[phase]
        start, counts = columns.offsets[row], columns.offsets[row + 1] - columns.offsets[row]
        sample = np.repeat(np.arange(len(row)), counts)
        part = np.arange(len(sample)) + np.repeat(start - (np.cumsum(counts) - counts), counts)
        taken = {name: getattr(columns, name)[part] for name in ("positions", "tokens", "costs")}
        return Parts(sample=sample, part=part, rank=np.full(len(part), -1, np.int32), **taken)

    def _sums(self, phase: str, name: str, row: Ints) -> Ints:
        columns = self.workload.phases[phase]
        before = np.concatenate([[0], np.cumsum(getattr(columns, name))])
        sums: Ints = before[columns.offsets[row + 1]] - before[columns.offsets[row]]
        return sums
