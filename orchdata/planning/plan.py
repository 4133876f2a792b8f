"""The plan of a step: who gets which sample of a global batch, and who encodes which part."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import lower_bound
from orchdata.balancers.assignment import cells_of, loads_of
from orchdata.planning.assign import dealt
from orchdata.planning.padded import (
    PaddedCost,
    padded_cells,
    padded_in_turn,
    padded_loads,
    padded_lower_bound,
)
from orchdata.planning.parts import Parts, arrival_order, encoding_order
from orchdata.planning.route import Route, make_route
from orchdata.planning.shares import Shares

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Who gets which sample of one global batch of n samples.

    Who builds and reports asks what a rank has: `places`, `encoded`, `arriving`, `route`, `cells`. `rank` alone says
    that one rank holds a sample; where groups of ranks of unequal size hold samples together, these answers change and
    no caller does.

    Attributes:
        dataset_id, row: the global batch, int32 (n,) and int64 (n,), in the order's sequence.
        rank, microbatch: int32 (n,). Within a rank and microbatch samples keep the order's sequence.
        costs: phase -> int64 (n,), 0 where the sample lacks the phase.
        llm_positions: int64 (n,).
        loss_tokens: planned loss tokens of the whole step over all ranks.
        stream_rank: int32 (n,), the rank whose streams each sample is drawn from.
        group_size: ranks of a group; None where ranks are not grouped.
        ranks_per_node: consecutive ranks of a node; None where that is not known.
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
    stream_rank: NDArray[np.int32]
    group_size: int | None = None
    ranks_per_node: int | None = None
    padded: PaddedCost | None = None
    parts: Mapping[str, Parts] = field(default_factory=dict)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.costs)

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

    def _micro_step(self, phase: str, microbatch: int) -> tuple[Parts, Ints]:
        parts = self.parts[phase]
        return parts, np.flatnonzero(self.microbatch[parts.sample] == microbatch)

    def cells(self, phase: str) -> Ints:
        """Cost of `phase` in each rank's microbatches, int64 (num_ranks, num_microbatches); with the padding, where
        `llm` is padded.
        """
        if phase == "llm" and self.padded is not None:
            shares = Shares(self.rank, self.microbatch, self.num_microbatches)
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
            shares = padded_in_turn(self.llm_positions, self.num_ranks, self.num_microbatches)
            return padded_loads(self.costs[phase], shares, self.num_ranks)
        return loads_of(self.costs[phase], dealt(len(self.row), self.num_ranks), self.num_ranks)

    def own_streams(self, rank: int) -> float | None:
        """Share of a rank's samples that are drawn from its group's own streams; None where ranks are not grouped."""
        if self.group_size is None:
            return None
        mine = self.stream_rank[self.rank == rank] // self.group_size
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


def _max_over_mean(loads: Ints) -> float:
    total = int(loads.sum())
    return float(int(loads.max()) * len(loads) / total) if total else 1.0
