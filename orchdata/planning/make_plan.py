"""Making a plan: (what is known of the samples, order, epoch, step) -> who gets which sample.

    order --positions--> rows --costs--> balance --rank--> split --microbatch--> Plan
                                                             +--parts--> balance --encoder rank--+   (per_phase)

`make_plan` is pure and asks nobody: every rank computes the same plan alone, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import split_microbatches
from orchdata.balancers.checks import MAX_TOTAL
from orchdata.order.order import SampleOrder
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.assign import assign, stream_ranks
from orchdata.planning.balance import Balance
from orchdata.planning.padded import PaddedCost, share_out_padded
from orchdata.planning.parts import Parts, fit_parts, share_out_parts
from orchdata.planning.plan import Plan

Ints = NDArray[np.int64]

_TRIES = 8  # Numbers of micro-steps tried before parts stay with their samples.


class SampleCosts(Protocol):
    """What a plan needs to know of samples, without decoding any.

    All methods take `dataset_id` int32 (n,) and `row` int64 (n,) and return int64 (n,).
    """

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases whose loads are reported."""

    @property
    def balanced(self) -> tuple[str, ...]:
        """Those of them that are balanced, a subset."""

    @property
    def padded(self) -> PaddedCost | None:
        """What a row costs where `llm` batches are padded to their longest sample; None where they are packed."""

    def costs(self, phase: str, dataset_id: NDArray[np.int32], row: Ints) -> Ints: ...

    def positions(self, phase: str, dataset_id: NDArray[np.int32], row: Ints) -> Ints: ...

    def loss_tokens(self, dataset_id: NDArray[np.int32], row: Ints) -> Ints: ...

    def parts(self, phase: str, dataset_id: NDArray[np.int32], row: Ints) -> Parts:
        """The parts of an encoder phase, each with the place of its sample in `row`; nobody encodes them yet."""


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Everything a plan depends on, apart from its `StepTask`: a value that pickles.

    Attributes:
        ranks_per_node: where parts are assigned apart, consecutive ranks among which features rather travel; None where
            that is not known. Which samples a step has does not depend on it.
    """

    costs: SampleCosts
    order: SampleOrder
    batches: GlobalBatches
    balance: Balance
    num_ranks: int
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.balance.scope in ("grouped", "grid") and self.balance.group_size is None:
            raise ValueError(f"Balance.scope={self.balance.scope!r} needs group_size, the ranks of a group")
        cap, most = self.balance.max_samples, min(self.batches.size, self.order.num_samples)
        if cap is not None and cap * self.num_ranks < most:
            raise ValueError(
                f"Balance.max_samples={cap} on {self.num_ranks} ranks holds {cap * self.num_ranks} samples, but a "
                f"global batch has {most}: raise it to at least {-(-most // self.num_ranks)}"
            )

    @property
    def shared_phases(self) -> tuple[str, ...]:
        """Balanced phases in which whole samples are assigned: without encoders, where parts are assigned."""
        return ("llm",) if self.balance.assignment == "per_phase" else self.costs.balanced

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch."""
        return self.batches.count(self.order.num_samples)


def make_plan(spec: PlanSpec, task: StepTask) -> Plan:
    """The plan of one step. Raises IndexError for a step outside the epoch."""
    start, stop = spec.batches.bounds(task.step, spec.order.num_samples)
    if task.rows is None:
        dataset_id, row = spec.order.rows(task.epoch, start, stop)
    else:
        dataset_id, row = np.zeros(len(task.rows), np.int32), task.rows
    costs = {phase: spec.costs.costs(phase, dataset_id, row) for phase in spec.costs.phases}
    stream_rank = stream_ranks(start, len(row), spec.order.streams, spec.num_ranks)
    batch = _GlobalBatch(spec, dataset_id, row, {phase: costs[phase] for phase in spec.shared_phases})
    rank = assign(batch.costs, spec.balance, spec.num_ranks, stream_rank)
    llm_positions = spec.costs.positions("llm", dataset_id, row)
    if spec.costs.padded is None:
        microbatch, num_microbatches = batch.split(rank, spec.balance.caps)
    else:
        shares = share_out_padded(
            batch.costs,
            llm_positions,
            rank,
            spec.num_ranks,
            spec.balance,
            spec.costs.padded,
            {phase: spec.costs.positions(phase, dataset_id, row) for phase in spec.balance.caps},
        )
        rank, microbatch, num_microbatches = shares.rank, shares.microbatch, shares.num_microbatches
    parts: dict[str, Parts] = {}
    if spec.balance.assignment == "per_phase":
        microbatch, num_microbatches, parts = batch.split_per_phase(rank, microbatch, num_microbatches)
    return Plan(
        epoch=task.epoch,
        step=task.step,
        num_ranks=spec.num_ranks,
        num_microbatches=num_microbatches,
        dataset_id=dataset_id,
        row=row,
        rank=rank,
        microbatch=microbatch,
        costs=costs,
        llm_positions=llm_positions,
        padded=spec.costs.padded,
        loss_tokens=int(spec.costs.loss_tokens(dataset_id, row).sum()),
        stream_rank=stream_rank,
        group_size=spec.balance.group_size,
        ranks_per_node=spec.ranks_per_node,
        parts=parts,
    )


@dataclass(frozen=True)
class _GlobalBatch:
    """The samples of one step; `costs` of the phases that a sample's rank and microbatch decide about."""

    spec: PlanSpec
    dataset_id: NDArray[np.int32]
    row: Ints
    costs: Mapping[str, Ints]

    def split(
        self, rank: NDArray[np.int32], caps: Mapping[str, int], num_microbatches: int | None = None
    ) -> tuple[NDArray[np.int32], int]:
        """Microbatches of all ranks within `caps`, the fewest unless a number is given. Raises ValueError."""
        if not caps and num_microbatches is None:
            return np.zeros(len(self.row), np.int32), 1
        balance = self.spec.balance
        sizes = [self.spec.costs.positions(phase, self.dataset_id, self.row) for phase in caps or ("llm",)]
        return split_microbatches(
            np.sum(list(self.costs.values()), axis=0),
            rank,
            self.spec.num_ranks,
            sizes=np.stack(sizes, axis=1),
            max_size=np.array(list(caps.values()) or [MAX_TOTAL], np.int64),
            num_microbatches=num_microbatches,
            oversize="own" if balance.oversize == "own" else "error",
            # Ranks that wait after each phase wait in each microbatch.
            in_step=balance.assignment == "per_phase" or (balance.objective == "barrier" and balance.order is None),
        )

    def split_per_phase(
        self, rank: NDArray[np.int32], microbatch: NDArray[np.int32], num_microbatches: int
    ) -> tuple[NDArray[np.int32], int, dict[str, Parts]]:
        """Microbatches and who encodes which part: the fewest in which encoders keep within their caps too.

        Args:
            microbatch, num_microbatches: within all caps with parts where their samples are. Spread over ranks, the
                parts of larger micro-steps may fit.
        """
        spec = self.spec
        found = {phase: spec.costs.parts(phase, self.dataset_id, self.row) for phase in spec.costs.phases[:-1]}
        capped = {phase: cap for phase, cap in spec.balance.caps.items() if phase in found}
        if capped and spec.costs.padded is None:
            llm = {phase: cap for phase, cap in spec.balance.caps.items() if phase == "llm"}
            room = [-(-int(found[phase].positions.sum()) // (cap * spec.num_ranks)) for phase, cap in capped.items()]
            fewest = max(self.split(rank, llm)[1], *room)
            for number in range(fewest, min(fewest + _TRIES, num_microbatches)):
                candidate, _ = self.split(rank, llm, number)
                fitted = self._fit(found, rank, candidate, number)
                if len(fitted) == len(found):
                    return candidate, number, fitted
        return microbatch, num_microbatches, self._fit(found, rank, microbatch, num_microbatches, or_home=True)

    def _fit(
        self,
        found: Mapping[str, Parts],
        rank: NDArray[np.int32],
        microbatch: NDArray[np.int32],
        num_microbatches: int,
        *,
        or_home: bool = False,
    ) -> dict[str, Parts]:
        """Who encodes which part; without the phases whose cap cannot be kept, unless parts may stay at home."""
        balance, where = self.spec.balance, (rank, microbatch, num_microbatches, self.spec.num_ranks)
        node = self.spec.ranks_per_node
        fitted = {
            phase: share_out_parts(parts, *where, balance, ranks_per_node=node)
            if phase not in balance.caps
            else fit_parts(parts, balance.caps[phase], *where, balance, ranks_per_node=node, or_home=or_home)
            for phase, parts in found.items()
        }
        return {phase: parts for phase, parts in fitted.items() if parts is not None}
