"""The plan of one step of post_balance: samples drawn by each rank -> samples of each. Pure, equal on all ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_of
from orchdata.planning.assign import assign
from orchdata.planning.balance import Balance

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRule:
    """When and how far samples move.

    Attributes:
        balance: scope, and a group size if the scope needs one.
        ranks_per_node: consecutive ranks that share a node.
        gain: minimum share of the makespan that moving must save; below it nothing moves.
    """

    balance: Balance
    ranks_per_node: int
    gain: float


@dataclass(frozen=True, eq=False)
class PostPlan:
    """The rank that drew each sample of a step, and the rank that gets it. Samples are sorted by the rank that drew
    them, then in the order drawn.

    Attributes:
        costs: int64 (num_samples,), at least 1.
        sizes: int64 (num_samples,), bytes on the wire; 0 if nothing can move.
        owner: int32 (num_samples,), the rank that drew it.
        rank: int32 (num_samples,), the rank that gets it.
        num_ranks: ranks of the group.
        below_gain: whether moving would have helped, but by less than the required gain.
    """

    costs: Ints
    sizes: Ints
    owner: Ranks
    rank: Ranks
    num_ranks: int
    below_gain: bool = False

    @cached_property
    def hash(self) -> str:
        """Hash of 16 hexadecimal digits; equal plans have equal hashes."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (np.array([self.num_ranks]), self.costs, self.sizes, self.owner, self.rank):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def loads_before(self) -> Ints:
        """Loads without any move, int64 (num_ranks,)."""
        return loads_of(self.costs, self.owner, self.num_ranks)

    @cached_property
    def loads(self) -> Ints:
        """Loads after the move, int64 (num_ranks,)."""
        return loads_of(self.costs, self.rank, self.num_ranks)

    def places(self, rank: int) -> Ints:
        """Return the indices, in the step, of the samples that `rank` gets, ascending."""
        return np.flatnonzero(self.rank == rank)

    def leaving(self, rank: int) -> Ints:
        """Return the samples that leave `rank`, by destination, then ascending."""
        leaving = np.flatnonzero((self.owner == rank) & (self.rank != rank))
        return leaving[np.argsort(self.rank[leaving], kind="stable")]

    def arriving(self, rank: int) -> Ints:
        """Return the samples that come to `rank`, ascending, and so by origin."""
        return np.flatnonzero((self.owner != rank) & (self.rank == rank))

    @cached_property
    def moved(self) -> Ints:
        """Samples that change their rank."""
        return np.flatnonzero(self.rank != self.owner)


def make_post_plan(costs: Ints, sizes: Ints, owner: Ranks, num_ranks: int, rule: MoveRule) -> PostPlan:
    """Plan one step.

    Args:
        costs: int64 (num_samples,), at least 1.
        sizes: int64 (num_samples,), bytes on the wire.
        owner: int32 (num_samples,), ascending.
        num_ranks: ranks of the group.
        rule: when and how far samples move.
    """
    stay = PostPlan(costs, sizes, owner, owner, num_ranks)
    if not len(costs):
        return stay
    rank = assign({"llm": costs}, rule.balance, num_ranks, owner, sizes=sizes, ranks_per_node=rule.ranks_per_node)
    if rank is owner:
        return stay
    move = PostPlan(costs, sizes, owner, rank, num_ranks)
    before, after = int(stay.loads.max()), int(move.loads.max())
    if before - after >= rule.gain * before:
        return move
    return PostPlan(costs, sizes, owner, owner, num_ranks, below_gain=after < before)
