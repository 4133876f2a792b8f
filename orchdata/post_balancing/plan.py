"""The plan of one step of post_balance: samples drawn by each rank -> samples of each. Pure, equal on all ranks.

Objects are what travels: the samples; or, per phase, the rests of samples, then the parts of one encoder after another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_of, lower_bound
from orchdata.balancers.placement import renamed
from orchdata.planning.assign import assign
from orchdata.planning.balance import Balance
from orchdata.planning.parts import Encoders, Parts, share_out_parts
from orchdata.planning.sharing.shares import one_microbatch

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_ENOUGH = 200  # Moving little is good enough where a phase then takes at most this part more.


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRule:
    """When and how far samples move: scope and assignment, with a group size if the scope needs one; consecutive ranks
    that share a node; the minimum share of the step's price that moving must save, below which nothing moves.
    """

    balance: Balance
    ranks_per_node: int
    gain: float


@dataclass(frozen=True, eq=False)
class PostPlan:
    """The rank that drew each sample of a step, and the rank that gets it. Samples are sorted by the rank that drew
    them, then in the order drawn.

    Attributes:
        costs: int64 (num_samples,), at least 1; per phase, those of the LLM.
        sizes: int64 (num_objects,), bytes on the wire; 0 if nothing can move.
        owner: int32 (num_samples,), the rank that drew it.
        rank: int32 (num_samples,), the rank that gets it.
        num_ranks: ranks of the group.
        parts: encoder phase -> its parts, with the ranks that encode them; `part` is the number in the sample.
        below_gain: whether moving would have helped, but by less than the required gain.
    """

    costs: Ints
    sizes: Ints
    owner: Ranks
    rank: Ranks
    num_ranks: int
    parts: Mapping[str, Parts] = field(default_factory=dict)
    below_gain: bool = False

    @cached_property
    def hash(self) -> str:
        """Hash of 16 hexadecimal digits; equal plans have equal hashes."""
        digest = hashlib.blake2b(digest_size=8)
        arrays = [np.array([self.num_ranks]), self.costs, self.sizes, self.owner, self.rank]
        for parts in self.parts.values():
            arrays += [np.array([len(parts)]), parts.sample, parts.costs, parts.tokens, parts.rank]
        for array in arrays:
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def loads_before(self) -> Ints:
        """Loads without any move, int64 (num_phases, num_ranks): of the phases of `parts`, then of `costs`."""
        return self._loads(self.owner, [self.owner[parts.sample] for parts in self.parts.values()])

    @cached_property
    def loads(self) -> Ints:
        """Loads after the move, shaped as `loads_before`."""
        return self._loads(self.rank, [parts.rank for parts in self.parts.values()])

    def _loads(self, rank: Ranks, encoder_ranks: list[Ranks]) -> Ints:
        costs = [*(parts.costs for parts in self.parts.values()), self.costs]
        return np.stack([loads_of(*each, self.num_ranks) for each in zip(costs, [*encoder_ranks, rank], strict=True)])

    @cached_property
    def object_owner(self) -> Ranks:
        """The rank that drew each object, int32 (num_objects,)."""
        return np.concatenate([self.owner, *(self.owner[parts.sample] for parts in self.parts.values())])

    @cached_property
    def object_rank(self) -> Ranks:
        """The rank that gets each object, int32 (num_objects,)."""
        return np.concatenate([self.rank, *(parts.rank for parts in self.parts.values())])

    def places(self, rank: int) -> Ints:
        """Return the indices, in the step, of the samples that `rank` gets, ascending."""
        return np.flatnonzero(self.rank == rank)

    def leaving(self, rank: int) -> Ints:
        """Return the objects that leave `rank`, by destination, then ascending."""
        leaving = np.flatnonzero((self.object_owner == rank) & (self.object_rank != rank))
        return leaving[np.argsort(self.object_rank[leaving], kind="stable")]

    def arriving(self, rank: int) -> Ints:
        """Return the objects that come to `rank`, by origin, then ascending."""
        arriving = np.flatnonzero((self.object_owner != rank) & (self.object_rank == rank))
        return arriving[np.argsort(self.object_owner[arriving], kind="stable")]

    @cached_property
    def moved(self) -> Ints:
        """Objects that change their rank."""
        return np.flatnonzero(self.object_rank != self.object_owner)


def make_post_plan(
    costs: Ints,
    sizes: Ints,
    owner: Ranks,
    num_ranks: int,
    rule: MoveRule,
    parts: Mapping[str, Parts] | None = None,
) -> PostPlan:
    """Plan one step.

    Costs, int64 (num_samples,), are at least 1; sizes, int64 (num_objects,), are bytes on the wire of the samples, then
    of the parts of each phase; owner, int32 (num_samples,), ascends. `parts`, per phase: encoder phase -> its parts, on
    the ranks that drew them.
    """
    stay = PostPlan(costs, sizes, owner, owner, num_ranks, parts or {})
    if not len(costs):
        return stay
    if parts is None:
        move = replace(stay, rank=_move_little(costs, sizes, owner, num_ranks, rule))
    else:
        move = _moved_per_phase(stay, rule)
    before, after = (int(loads.max(axis=1).sum()) for loads in (stay.loads, move.loads))
    if before > after and before - after >= rule.gain * before:
        return move
    return replace(stay, below_gain=after < before)


def _moved_per_phase(stay: PostPlan, rule: MoveRule) -> PostPlan:
    """Balance each phase by itself.

    Where moving little leaves a phase above what a loader plans, that is taken, with ranks named so that much stays.
    """
    num_ranks, num_samples = stay.num_ranks, len(stay.costs)

    @cache
    def dealt() -> Ranks:
        return assign({"llm": stay.costs}, rule.balance, num_ranks, stay.owner)

    def moved(costs: Ints, sizes: Ints, owner: Ranks, planned: Callable[[], Ranks]) -> Ranks:
        little = _move_little(costs, sizes, owner, num_ranks, rule)
        enough = int(loads_of(costs, little, num_ranks).max()) * _ENOUGH
        if rule.balance.scope != "global" or enough <= lower_bound(costs, num_ranks) * (_ENOUGH + 1):
            return little
        rank = planned()
        if enough <= int(loads_of(costs, rank, num_ranks).max()) * (_ENOUGH + 1):
            return little
        return renamed(rank, owner, sizes, num_ranks, rule.ranks_per_node)

    spread, stop = {}, num_samples
    for phase, parts in stay.parts.items():
        start, stop = stop, stop + len(parts)

        def planned(parts: Parts = parts) -> Ranks:
            return share_out_parts(parts, one_microbatch(dealt()), Encoders(rule.balance, num_ranks)).rank

        spread[phase] = replace(parts, rank=moved(parts.costs, stay.sizes[start:stop], parts.rank, planned))
    rank = moved(stay.costs, stay.sizes[:num_samples], stay.owner, dealt)
    return replace(stay, rank=rank, parts=spread)


def _move_little(costs: Ints, sizes: Ints, owner: Ranks, num_ranks: int, rule: MoveRule) -> Ranks:
    if not len(costs):
        return owner
    return assign({"llm": costs}, rule.balance, num_ranks, owner, sizes=sizes, ranks_per_node=rule.ranks_per_node)
