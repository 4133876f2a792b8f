"""The plan of a step: who gets which sample of a global batch, and who encodes which part."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import lower_bound, order_microbatches
from orchdata.balancers.assignment import loads_by_rank_and_microbatch
from orchdata.planning.parts import OwnParts, Parts, own_parts
from orchdata.planning.price import StepPrice
from orchdata.planning.route import Route, grouped_route
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Padding, Shares

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Who gets which sample of one global batch of n samples.

    Who builds and reports asks what a rank has: `places`, `encoded`, `arriving`, `route`, `cells`. `rank` alone says
    that one rank holds a sample; where groups of ranks of unequal size hold samples together, these answers change and
    no caller does.

    Attributes:
        source, row: the global batch, int32 (n,) and int64 (n,), in the order's sequence.
        rank, microbatch: int32 (n,). Within a rank and microbatch samples keep the order's sequence.
        costs: phase -> int64 (n,), 0 where the sample lacks the phase.
        llm_positions: int64 (n,).
        loss_tokens: planned loss tokens of the whole step over all ranks.
        stream_rank: int32 (n,), the rank whose streams each sample is drawn from.
        group_size: ranks of a group; None where ranks are not grouped.
        ranks_per_node: consecutive ranks of a node; None where that is not known.
        padded: how `llm` microbatches are padded, and what that costs.
        sources: names of a mixture's sources by `source`; empty where there is none.
        passes: which pass through its source each sample is of, int32 (n,); None where there are no sources.
        source_loss_tokens: planned loss tokens of each source in the step, int64 (num_sources,); else None.
        loss_weights: what a loss token of each source counts.
        parts: encoder phase -> its parts and who encodes them, where phases are assigned apart; empty where encoders
            work on their rank's own samples.
    """

    epoch: int
    step: int
    num_ranks: int
    num_microbatches: int
    source: NDArray[np.int32]
    row: Ints
    rank: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    costs: Mapping[str, Ints]
    llm_positions: Ints
    loss_tokens: int
    stream_rank: NDArray[np.int32]
    group_size: int | None = None
    ranks_per_node: int | None = None
    padded: Padding = NO_PADDING
    sources: tuple[str, ...] = ()
    passes: NDArray[np.int32] | None = None
    source_loss_tokens: Ints | None = None
    loss_weights: tuple[float, ...] = ()
    parts: Mapping[str, Parts] = field(default_factory=dict)
    _own_parts: dict[tuple[str, int], OwnParts] = field(default_factory=dict, init=False, repr=False)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.costs)

    @property
    def global_loss_tokens(self) -> float:
        """What the step's loss is divided by: its planned loss tokens, each times the loss weight of its source."""
        if self.source_loss_tokens is None or all(weight == 1 for weight in self.loss_weights):
            return self.loss_tokens
        total = 0.0
        for weight, tokens in zip(self.loss_weights, self.source_loss_tokens.tolist(), strict=True):
            total += weight * tokens
        return total

    def places(self, rank: int, microbatch: int | None = None) -> Ints:
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
        return self._own(phase, rank).encoded[microbatch]

    def arriving(self, phase: str, rank: int, microbatch: int) -> Ints:
        """Places in `parts[phase]` of what `rank`'s samples have in a micro-step, in the sequence it arrives in."""
        return self._own(phase, rank).arriving[microbatch]

    def route(self, phase: str, rank: int, microbatch: int) -> Route:
        """The way of `phase`'s features in a micro-step, from `encoded` to `arriving`, seen from `rank`."""
        parts = self.parts[phase]
        encoded, arriving = self.encoded(phase, rank, microbatch), self.arriving(phase, rank, microbatch)
        return grouped_route(
            rank,
            self.num_ranks,
            receivers=self.rank[parts.sample[encoded]],
            sent=parts.tokens[encoded],
            senders=parts.rank[arriving],
            received=parts.tokens[arriving],
            label=f"{phase}, step {self.step}, micro-step {microbatch}",
        )

    def feature_rows(self, phase: str) -> Ints:
        """Rows of `phase`'s features over all ranks, by their way to the samples: int64 (3,), those that stay on their
        rank, move inside a node and cross nodes. Where nodes are not known each rank is one.
        """
        parts = self.parts[phase]
        home, node = self.rank[parts.sample], self.ranks_per_node or 1
        way = (parts.rank != home).astype(np.int64) + (parts.rank // node != home // node)
        rows = np.zeros(3, np.int64)
        np.add.at(rows, way, parts.tokens)
        return rows

    def _own(self, phase: str, rank: int) -> OwnParts:
        """Sorted once for all micro-steps. Threads that ask at the same time find the same."""
        found = self._own_parts.get((phase, rank))
        if found is None:
            found = own_parts(self.parts[phase], rank, self.rank, self.microbatch, self.num_microbatches)
            self._own_parts[phase, rank] = found
        return found

    def cells(self, phase: str) -> Ints:
        """Cost of `phase` in each rank's microbatches, int64 (num_ranks, num_microbatches); with the padding, where
        `llm` is padded.
        """
        if phase in self.parts:
            parts = self.parts[phase]
            where = (parts.rank, self.microbatch[parts.sample], self.num_ranks, self.num_microbatches)
            return loads_by_rank_and_microbatch(parts.costs, *where)
        shares = Shares(self.rank, self.microbatch, self.num_microbatches)
        return self._padding(phase).loads(self.costs[phase], self.llm_positions, shares, self.num_ranks)

    def loads(self, phase: str) -> Ints:
        """Cost of `phase` on each rank, int64 (num_ranks,): its `cells` together."""
        loads: Ints = self.cells(phase).sum(axis=1)
        return loads

    def loads_unbalanced(self, phase: str) -> Ints:
        """What `loads` would be had samples been dealt out in turn."""
        sizes = (self.num_ranks, self.num_microbatches)
        return self._padding(phase).loads_in_turn(self.costs[phase], self.llm_positions, *sizes)

    def _padding(self, phase: str) -> Padding:
        return self.padded if phase == "llm" else NO_PADDING

    def own_streams(self, rank: int) -> float | None:
        """Share of a rank's samples that are drawn from its group's own streams; None where ranks are not grouped."""
        if self.group_size is None:
            return None
        mine = self.stream_rank[self.rank == rank] // self.group_size
        return float(np.mean(mine == rank // self.group_size)) if len(mine) else 1.0

    def lower_bound(self, phase: str) -> int:
        """No assignment of whole samples has a smaller largest load in `phase`; of parts, where they are apart."""
        if phase in self.parts:
            return lower_bound(self.parts[phase].costs, self.num_ranks)
        sizes = (self.num_ranks, self.num_microbatches)
        return self._padding(phase).lower_bound(self.costs[phase], self.llm_positions, *sizes)

    def cost(self, price: StepPrice, phases: Sequence[str]) -> int:
        """Cost of the step.

        Args:
            phases: those that count, `SampleCosts.balanced`: others of the plan are in units of their own.
        """
        return price.of([self.cells(phase) for phase in phases])

    def cost_bound(self, price: StepPrice, phases: Sequence[str]) -> int:
        """No assignment of whole samples, or of parts where they are apart, has a smaller `cost`."""
        bounds = [self.lower_bound(phase) for phase in phases]
        return price.lower_bound([self.costs[phase] for phase in phases], bounds, self.num_ranks)

    @property
    def filled(self) -> tuple[int, int] | None:
        """Tokens of samples, and of all microbatches, which have one length; None where lengths vary."""
        capacity = self.padded.capacity(self.num_ranks * self.num_microbatches)
        return None if capacity is None else (int(self.llm_positions.sum()), capacity)

    def pipeline_order(self, rank: int, num_stages: int) -> NDArray[np.int32]:
        """Microbatches of one rank in a good order for 1F1B: int32 (num_microbatches,), the planned number of each.

        Times are costs: every stage takes an equal share of the LLM's, the first one all encoders' too, and backward
        takes twice the forward. Only their ratios matter. Where encoders are balanced by themselves, ranks meet in
        every micro-step: all take the order of the largest costs.
        """
        encoders = [self.cells(phase) for phase in self.phases if phase != "llm"]
        llm = self.cells("llm")
        cells = np.stack([np.sum([np.zeros_like(llm), *encoders], axis=0), llm])
        work = cells.max(axis=1) if self.parts else cells[:, rank]
        forward = np.tile(work[1], (num_stages, 1))
        forward[0] += num_stages * work[0]
        return order_microbatches(forward, 2 * forward).order

    def imbalance(self, phase: str) -> float:
        """max/mean of the rank loads in `phase`; 1 where the phase is empty."""
        return _max_over_mean(self.loads(phase))

    @cached_property
    def hash(self) -> str:
        """Equal on all ranks, machines and runs for the same plan."""
        digest = hashlib.blake2b(digest_size=16)
        sizes = (self.epoch, self.step, self.num_ranks, self.num_microbatches, self.loss_tokens)
        digest.update(np.array(sizes, "<i8").tobytes())
        columns: list[NDArray[Any]] = [self.source, self.row, self.rank, self.microbatch]
        for column in [*columns, *(parts.rank for parts in self.parts.values())]:
            digest.update(column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes())
        return digest.hexdigest()


def _max_over_mean(loads: Ints) -> float:
    total = int(loads.sum())
    return float(int(loads.max()) * len(loads) / total) if total else 1.0
