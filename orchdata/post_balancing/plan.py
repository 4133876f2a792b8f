"""The plan of one step of post_balance: what every rank drew -> who gets which sample. Pure, the same everywhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import balance, balance_from, balance_grid, balance_grouped
from orchdata.balancers.assignment import loads_of
from orchdata.planning.balance import Scope

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRule:
    """When and how far samples move.

    Attributes:
        scope: "none", "grouped", "grid" or "global".
        group_size: consecutive ranks of a group under "grouped", of a row under "grid".
        ranks_per_node: consecutive ranks that share a node.
        equal_count, max_samples: as in `od.Balance`.
        gain: least share of the makespan that moving must take off; below it nothing moves.
    """

    scope: Scope
    group_size: int
    ranks_per_node: int
    equal_count: bool
    max_samples: int | None
    gain: float


@dataclass(frozen=True, eq=False)
class PostPlan:
    """Who held each sample of a step, and who gets it. Samples are listed by rank, each rank's in the order drawn.

    Attributes:
        costs: int64 (num_samples,), at least 1.
        sizes: int64 (num_samples,), bytes on the wire; 0 where nothing can move.
        owner: int32 (num_samples,), the rank that drew it.
        rank: int32 (num_samples,), the rank that gets it.
        num_ranks: of the group.
        ranks_per_node: consecutive ranks that share a node.
        below_gain: moving would have helped, but by less than the gain asked for.
    """

    costs: Ints
    sizes: Ints
    owner: Ranks
    rank: Ranks
    num_ranks: int
    ranks_per_node: int
    below_gain: bool = False

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits; equal plans have equal ones."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (np.array([self.num_ranks]), self.costs, self.sizes, self.owner, self.rank):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def loads_before(self) -> Ints:
        """int64 (num_ranks,), had nothing moved."""
        return loads_of(self.costs, self.owner, self.num_ranks)

    @cached_property
    def loads(self) -> Ints:
        """int64 (num_ranks,)."""
        return loads_of(self.costs, self.rank, self.num_ranks)

    def positions(self, rank: int) -> Ints:
        """Samples that `rank` gets, ascending."""
        return np.flatnonzero(self.rank == rank)

    def leaving(self, rank: int) -> Ints:
        """Samples that leave `rank`, by where they go, then ascending."""
        leaving = np.flatnonzero((self.owner == rank) & (self.rank != rank))
        return leaving[np.argsort(self.rank[leaving], kind="stable")]

    def arriving(self, rank: int) -> Ints:
        """Samples that come to `rank`, ascending, and so by where they come from."""
        return np.flatnonzero((self.owner != rank) & (self.rank == rank))

    @cached_property
    def moved_within(self) -> Ints:
        """Samples that change their rank and stay on their node."""
        return np.flatnonzero((self.rank != self.owner) & ~self._leaves_node)

    @cached_property
    def moved_between(self) -> Ints:
        """Samples that change their node."""
        return np.flatnonzero(self._leaves_node)

    @cached_property
    def _leaves_node(self) -> NDArray[np.bool_]:
        leaves: NDArray[np.bool_] = self.rank // self.ranks_per_node != self.owner // self.ranks_per_node
        return leaves


def make_post_plan(costs: Ints, sizes: Ints, owner: Ranks, num_ranks: int, rule: MoveRule) -> PostPlan:
    """Plan one step.

    Args:
        costs: int64 (num_samples,), at least 1.
        sizes: int64 (num_samples,), bytes on the wire.
        owner: int32 (num_samples,), ascending.
        num_ranks: of the group.
        rule: when and how far samples move.

    Raises:
        ValueError: more samples than `max_samples` allows.
    """
    stay = PostPlan(costs, sizes, owner, owner, num_ranks, rule.ranks_per_node)
    if rule.scope == "none" or num_ranks == 1 or not len(costs):
        return stay
    move = PostPlan(
        costs, sizes, owner, _share_out(costs, sizes, owner, num_ranks, rule), num_ranks, rule.ranks_per_node
    )
    before, after = int(stay.loads.max()), int(move.loads.max())
    if before - after >= rule.gain * before or not _counts_hold(owner, num_ranks, rule):
        return move
    return PostPlan(costs, sizes, owner, owner, num_ranks, rule.ranks_per_node, below_gain=after < before)


def _share_out(costs: Ints, sizes: Ints, owner: Ranks, num_ranks: int, rule: MoveRule) -> Ranks:
    if rule.equal_count or rule.max_samples is not None:
        return _counted(costs, sizes, owner, num_ranks, rule)
    if rule.scope == "grid":
        return balance_grid(costs, owner, num_ranks, rule.group_size).rank
    if rule.scope == "grouped":
        return balance_grouped(costs, owner, num_ranks, rule.group_size).rank
    return balance_from(costs, owner, num_ranks, sizes=sizes, ranks_per_node=rule.ranks_per_node).rank


def _groups(num_ranks: int, rule: MoveRule) -> list[range]:
    size = rule.group_size if rule.scope == "grouped" else num_ranks
    return [range(first, min(first + size, num_ranks)) for first in range(0, num_ranks, size)]


def _counts_hold(owner: Ranks, num_ranks: int, rule: MoveRule) -> bool:
    """Whether every rank may keep what it drew."""
    counts = np.bincount(owner, minlength=num_ranks)
    if rule.max_samples is not None and counts.max() > rule.max_samples:
        return False
    return not rule.equal_count or all(int(np.ptp(counts[list(group)])) <= 1 for group in _groups(num_ranks, rule))


def _counted(costs: Ints, sizes: Ints, owner: Ranks, num_ranks: int, rule: MoveRule) -> Ranks:
    """Balance each group anew under its limits on counts, and name its ranks so that much stays where it is."""
    rank = np.empty(len(costs), np.int32)
    for group in _groups(num_ranks, rule):
        held = np.flatnonzero((owner >= group.start) & (owner < group.stop))
        found = balance(costs[held], len(group), equal_count=rule.equal_count, max_samples=rule.max_samples).rank
        rank[held] = group.start + _renamed(found, owner[held] - group.start, sizes[held], len(group))
    return rank


def _renamed(found: Ranks, owner: Ranks, sizes: Ints, num_ranks: int) -> Ranks:
    """Pair found ranks with owners greedily, by the bytes that then stay; ties go to the lower ranks."""
    pairs, pair = np.unique(found.astype(np.int64) * num_ranks + owner, return_inverse=True)
    kept = np.zeros(len(pairs), np.int64)
    np.add.at(kept, pair, sizes)
    name = np.full(num_ranks, -1, np.int32)
    free = np.ones(num_ranks, np.bool_)
    for old, new in (divmod(int(pairs[index]), num_ranks) for index in np.argsort(-kept, kind="stable")):
        if name[old] < 0 and free[new]:
            name[old], free[new] = new, False
    name[name < 0] = np.flatnonzero(free)
    return name[found]
