"""The plan of a step: (what is known of the samples, order, epoch, step) -> who gets which sample.

    order --positions--> rows --costs--> balance --rank--> split --microbatch--> Plan
                                                             +--parts--> balance --encoder rank--+   (per_phase)

`make_plan` is pure and asks nobody: every rank computes the same plan alone, to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import lower_bound, split_microbatches
from orchdata.balancers.assignment import cells_of, loads_of
from orchdata.balancers.checks import MAX_TOTAL
from orchdata.planning.assign import assign, dealt, near_ranks
from orchdata.planning.balance import Balance
from orchdata.planning.padded import (
    PaddedCost,
    PaddedShares,
    dealt_shares,
    padded_cells,
    padded_loads,
    padded_lower_bound,
    share_out_padded,
)
from orchdata.planning.parts import Parts, arrival_order, encoding_order, fit_parts, share_out_parts
from orchdata.planning.route import Route, make_route

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


class SampleOrder(Protocol):
    """The seeded sequence of an epoch's samples, with O(1) access to any place of it."""

    @property
    def num_samples(self) -> int: ...

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], Ints]: ...


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Everything a plan depends on, apart from epoch and step.

    Attributes:
        streams: of the order: position p is drawn from stream p % streams.
    """

    source: SampleCosts
    order: SampleOrder
    balance: Balance
    num_ranks: int
    global_batch_size: int
    drop_last: bool
    streams: int = 1

    def __post_init__(self) -> None:
        if self.balance.scope in ("grouped", "grid") and self.balance.group_size is None:
            raise ValueError(f"Balance.scope={self.balance.scope!r} needs group_size, the ranks of a group")
        cap, most = self.balance.max_samples, min(self.global_batch_size, self.order.num_samples)
        if cap is not None and cap * self.num_ranks < most:
            raise ValueError(
                f"Balance.max_samples={cap} on {self.num_ranks} ranks holds {cap * self.num_ranks} samples, but a "
                f"global batch has {most}: raise it to at least {-(-most // self.num_ranks)}"
            )

    @property
    def shared_phases(self) -> tuple[str, ...]:
        """Balanced phases in which whole samples are assigned: without encoders, where these are apart."""
        return ("llm",) if self.balance.assignment == "per_phase" else self.source.balanced

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch."""
        full, rest = divmod(self.order.num_samples, self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Who gets which sample of one global batch of n samples.

    Who builds and reports asks what a rank has: `positions`, `encoded`, `arriving`, `route`, `cells`. `rank` alone says
    that one rank holds a sample; where groups of ranks of unequal size hold samples together, these answers change and
    no caller does.

    Attributes:
        dataset_id, row: the global batch, int32 (n,) and int64 (n,), in the order's sequence.
        rank, microbatch: int32 (n,). Within a rank and microbatch samples keep the order's sequence.
        costs: phase -> int64 (n,), 0 where the sample lacks the phase.
        llm_positions: int64 (n,).
        loss_tokens: planned loss tokens of the whole step over all ranks.
        near: int32 (n,), the rank whose streams each sample is drawn from.
        group_size: ranks of a group; None where ranks are not grouped.
        parts: encoder phase -> its parts and who encodes them, where phases are assigned apart; empty where encoders
            work on their rank's own samples.
    """

    epoch: int
    step: int
    num_ranks: int
    num_microbatches: int
    dataset_id: NDArray[np.int32]
    row: Ints
    rank: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    costs: Mapping[str, Ints]
    llm_positions: Ints
    loss_tokens: int
    near: NDArray[np.int32]
    group_size: int | None = None
    padded: PaddedCost | None = None
    parts: Mapping[str, Parts] = field(default_factory=dict)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.costs)

    def positions(self, rank: int, microbatch: int | None = None) -> Ints:
        """Places in the global batch of what `rank` gets, ascending; of one microbatch or of all."""
        mine = self.rank == rank
        return np.flatnonzero(mine if microbatch is None else mine & (self.microbatch == microbatch))

    def assignment(self, phase: str) -> NDArray[np.int32]:
        """The rank of each sample in `phase`, int32 (n,); -1 where the sample has nothing for it. Where parts are
        assigned apart, the rank of each part, int32 (num_parts,).
        """
        if phase in self.parts:
            return self.parts[phase].rank
        return np.where(self.costs[phase] > 0, self.rank, np.int32(-1))

    def encoded(self, phase: str, rank: int, microbatch: int) -> Ints:
        """Places in `parts[phase]` of what `rank` encodes in a micro-step, in the sequence it encodes them."""
        parts, members = self._micro_step(phase, microbatch)
        return encoding_order(parts, members[parts.rank[members] == rank], self.rank)

    def arriving(self, phase: str, rank: int, microbatch: int) -> Ints:
        """Places in `parts[phase]` of what `rank`'s samples have in a micro-step, in the sequence it arrives in."""
        parts, members = self._micro_step(phase, microbatch)
        return arrival_order(parts, members[self.rank[parts.sample[members]] == rank])

    def route(self, phase: str, rank: int, microbatch: int) -> Route:
        """The way of `phase`'s features in a micro-step, from `encoded` to `arriving`, seen from `rank`."""
        parts, members = self._micro_step(phase, microbatch)
        encoder_rank, llm_rank = parts.rank[members], self.rank[parts.sample[members]]
        return make_route(
            rank,
            self.num_ranks,
            encoder_rank=encoder_rank,
            llm_rank=llm_rank,
            tokens=parts.tokens[members],
            encoder_order=np.argsort(llm_rank, kind="stable"),
            llm_order=np.argsort(encoder_rank, kind="stable"),
            label=f"{phase}, step {self.step}, micro-step {microbatch}",
        )

    def _micro_step(self, phase: str, microbatch: int) -> tuple[Parts, Ints]:
        parts = self.parts[phase]
        return parts, np.flatnonzero(self.microbatch[parts.sample] == microbatch)

    def cells(self, phase: str) -> Ints:
        """Cost of `phase` in each rank's microbatches, int64 (num_ranks, num_microbatches); with the padding, where
        `llm` is padded.
        """
        if phase == "llm" and self.padded is not None:
            shares = PaddedShares(self.rank, self.microbatch, self.num_microbatches)
            return padded_cells(self.costs[phase], shares, self.num_ranks)
        if phase in self.parts:
            parts = self.parts[phase]
            microbatch = self.microbatch[parts.sample]
            return cells_of(parts.costs, parts.rank, microbatch, self.num_ranks, self.num_microbatches)
        return cells_of(self.costs[phase], self.rank, self.microbatch, self.num_ranks, self.num_microbatches)

    def loads(self, phase: str) -> Ints:
        """Cost of `phase` on each rank, int64 (num_ranks,): its `cells` together."""
        loads: Ints = self.cells(phase).sum(axis=1)
        return loads

    def loads_unbalanced(self, phase: str) -> Ints:
        """What `loads` would be had samples been dealt out in turn."""
        if phase == "llm" and self.padded is not None:
            shares = dealt_shares(self.llm_positions, self.num_ranks, self.num_microbatches)
            return padded_loads(self.costs[phase], shares, self.num_ranks)
        return loads_of(self.costs[phase], dealt(len(self.row), self.num_ranks), self.num_ranks)

    def own_streams(self, rank: int) -> float | None:
        """Share of a rank's samples that are drawn from its group's own streams; None where ranks are not grouped."""
        if self.group_size is None:
            return None
        mine = self.near[self.rank == rank] // self.group_size
        return float(np.mean(mine == rank // self.group_size)) if len(mine) else 1.0

    def lower_bound(self, phase: str) -> int:
        """No assignment of whole samples has a smaller largest load in `phase`; of parts, where they are apart."""
        if phase in self.parts:
            return int(lower_bound(self.parts[phase].costs, self.num_ranks))
        if phase == "llm" and self.padded is not None and self.num_microbatches == 1:
            return padded_lower_bound(self.costs[phase], self.llm_positions, self.num_ranks, self.padded)
        return int(lower_bound(self.costs[phase], self.num_ranks))

    def imbalance(self, phase: str) -> float:
        """max/mean of the rank loads in `phase`; 1 where the phase is empty."""
        return _max_over_mean(self.loads(phase))

    @cached_property
    def hash(self) -> str:
        """Equal on all ranks, machines and runs for the same plan."""
        digest = hashlib.blake2b(digest_size=16)
        sizes = (self.epoch, self.step, self.num_ranks, self.num_microbatches, self.loss_tokens)
        digest.update(np.array(sizes, "<i8").tobytes())
        columns: list[NDArray[Any]] = [self.dataset_id, self.row, self.rank, self.microbatch]
        for column in [*columns, *(parts.rank for parts in self.parts.values())]:
            digest.update(column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes())
        return digest.hexdigest()


def make_plan(spec: PlanSpec, epoch: int, step: int) -> Plan:
    """The plan of one step. Raises IndexError for a step outside the epoch."""
    if not 0 <= step < spec.num_steps:
        raise IndexError(f"step {step} is outside the epoch of {spec.num_steps} steps")
    start = step * spec.global_batch_size
    stop = min(start + spec.global_batch_size, spec.order.num_samples)
    dataset_id, row = spec.order.rows(epoch, start, stop)
    costs = {phase: spec.source.costs(phase, dataset_id, row) for phase in spec.source.phases}
    near = near_ranks(start, len(row), spec.streams, spec.num_ranks)
    batch = _GlobalBatch(spec, dataset_id, row, {phase: costs[phase] for phase in spec.shared_phases})
    rank = assign(batch.costs, spec.balance, spec.num_ranks, near)
    llm_positions = spec.source.positions("llm", dataset_id, row)
    if spec.source.padded is None:
        microbatch, num_microbatches = batch.split(rank, spec.balance.caps)
    else:
        shares = share_out_padded(
            batch.costs,
            llm_positions,
            rank,
            spec.num_ranks,
            spec.balance,
            spec.source.padded,
            {phase: spec.source.positions(phase, dataset_id, row) for phase in spec.balance.caps},
        )
        rank, microbatch, num_microbatches = shares.rank, shares.microbatch, shares.num_microbatches
    parts: dict[str, Parts] = {}
    if spec.balance.assignment == "per_phase":
        microbatch, num_microbatches, parts = batch.split_apart(rank, microbatch, num_microbatches)
    return Plan(
        epoch=epoch,
        step=step,
        num_ranks=spec.num_ranks,
        num_microbatches=num_microbatches,
        dataset_id=dataset_id,
        row=row,
        rank=rank,
        microbatch=microbatch,
        costs=costs,
        llm_positions=llm_positions,
        padded=spec.source.padded,
        loss_tokens=int(spec.source.loss_tokens(dataset_id, row).sum()),
        near=near,
        group_size=spec.balance.group_size,
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
        sizes = [self.spec.source.positions(phase, self.dataset_id, self.row) for phase in caps or ("llm",)]
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

    def split_apart(
        self, rank: NDArray[np.int32], microbatch: NDArray[np.int32], num_microbatches: int
    ) -> tuple[NDArray[np.int32], int, dict[str, Parts]]:
        """Microbatches and who encodes which part: the fewest in which encoders keep within their caps too.

        Args:
            microbatch, num_microbatches: within all caps with parts where their samples are. Spread over ranks, the
                parts of larger micro-steps may fit.
        """
        spec = self.spec
        found = {phase: spec.source.parts(phase, self.dataset_id, self.row) for phase in spec.source.phases[:-1]}
        capped = {phase: cap for phase, cap in spec.balance.caps.items() if phase in found}
        if capped and spec.source.padded is None:
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
        fitted = {
            phase: share_out_parts(parts, *where, balance)
            if phase not in balance.caps
            else fit_parts(parts, balance.caps[phase], *where, balance, or_home=or_home)
            for phase, parts in found.items()
        }
        return {phase: parts for phase, parts in fitted.items() if parts is not None}


def _max_over_mean(loads: Ints) -> float:
    total = int(loads.sum())
    return float(int(loads.max()) * len(loads) / total) if total else 1.0
