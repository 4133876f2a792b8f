"""Planning parts: which rank encodes each, where encoders are balanced separately (`Balance(assignment="per_phase")`).

    sample -> rank, microbatch (llm) --+
    parts of the samples, their costs -+-> part -> encoder rank, in each micro-step -> route from encoder to sample

A micro-step is the m-th microbatch of all ranks. Its parts are those of its samples, and any rank in the scope may
encode them. A part stays with its sample where that costs nothing. Under `Balance(encode=...)` the same holds in
rounds, each some consecutive micro-steps. Pure numpy: every rank computes the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_by_rank_and_microbatch
from orchdata.balancers.packed import balance as balance_packed
from orchdata.balancers.placement import renamed
from orchdata.planning.assign import assign
from orchdata.planning.balance import Balance
from orchdata.planning.sharing.shares import Shares

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """The parts of one modality in a global batch, ordered by their sample, then by their position in the sample.

    Attributes:
        sample: int64 (num_parts,), index of the sample in the global batch.
        part: int64 (num_parts,), numbers in the index.
        positions: int64 (num_parts,), what enters the encoder.
        tokens: int64 (num_parts,), rows the encoder yields.
        costs: int64 (num_parts,), at least 1.
        rank: int32 (num_parts,), the rank that encodes each.
    """

    sample: Ints
    part: Ints
    positions: Ints
    tokens: Ints
    costs: Ints
    rank: Ranks

    def __len__(self) -> int:
        return len(self.part)

    def take(self, index: Ints) -> Parts:
        """Return some of the parts."""
        return Parts(**{each.name: getattr(self, each.name)[index] for each in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)
class OwnParts:
    """What one rank has of `Parts`: for each micro-step, int64 indices of parts.

    Attributes:
        encoded: what it encodes, grouped by the rank that needs it: rows are sent without a copy.
        arriving: the parts of its samples, grouped by the rank that encodes them: the order in which they arrive.
    """

    encoded: list[Ints]
    arriving: list[Ints]


def share_out_parts(
    parts: Parts, shares: Shares, num_ranks: int, balance: Balance, *, ranks_per_node: int | None = None
) -> Parts:
    """Decide which rank encodes each part. Every micro-step is balanced by itself.

    Args:
        shares: of the samples of the global batch.
        ranks_per_node: consecutive ranks of a node, inside which features travel if possible; None if not known.
    """
    home, step = shares.rank[parts.sample], shares.microbatch[parts.sample]
    of_parts = replace(balance, equal_count=False, max_samples=None)  # these count samples
    rank = np.empty(len(parts), np.int32)
    for number in range(shares.num_microbatches):
        members = np.flatnonzero(step == number)
        if len(members):
            costs, tokens = {"llm": parts.costs[members]}, parts.tokens[members]
            rank[members] = assign(
                costs, of_parts, num_ranks, home[members], sizes=tokens, ranks_per_node=ranks_per_node
            )
    return replace(parts, rank=rank)


def fit_parts(
    parts: Parts,
    cap: int,
    shares: Shares,
    num_ranks: int,
    balance: Balance,
    *,
    ranks_per_node: int | None = None,
    or_home: bool = False,
) -> Parts | None:
    """`share_out_parts` with at most `cap` positions on a rank in a micro-step. Where that is not possible, return
    None, or with `or_home` leave the parts of that micro-step with their samples.

    A part above the cap is the only one of its rank in its micro-step.
    """
    shared = share_out_parts(parts, shares, num_ranks, balance, ranks_per_node=ranks_per_node)
    home, step = shares.rank[parts.sample], shares.microbatch[parts.sample]
    for number in np.unique(_overfull(shared, step, cap, num_ranks)):
        members = np.flatnonzero(step == number)
        sizes = parts.positions[members]
        if balance.scope == "global" and int(sizes.max()) <= cap:
            with contextlib.suppress(ValueError):
                within_cap = balance_packed(sizes, num_ranks, max_cost=cap).rank
                tokens = parts.tokens[members]
                shared.rank[members] = renamed(within_cap, home[members], tokens, num_ranks, ranks_per_node or 1)
                continue
        if not or_home:
            return None
        shared.rank[members] = home[members]
    return shared


def by_rounds(shares: Shares, rounds: Ranks) -> Shares:
    """Return `shares` with the round, int32 (num_microbatches,), of each micro-step in its place."""
    return Shares(shares.rank, rounds[shares.microbatch], int(rounds[-1]) + 1)


def share_out_in_rounds(
    parts: Mapping[str, Parts],
    shares: Shares,
    num_ranks: int,
    balance: Balance,
    *,
    ranks_per_node: int | None = None,
    stays: bool = False,
) -> tuple[Ranks, dict[str, Parts]]:
    """Cut micro-steps into rounds, and decide which rank encodes each part of a round.

    A round has as many micro-steps as `balance.encode` and the caps allow, and at least one: of that one, phases with a
    cap keep their ranks.

    Args:
        parts: encoder phase -> its parts, with ranks in phases that have a cap.
        stays: parts have the ranks of their samples, and keep them.

    Returns:
        int32 (num_microbatches,), the round of each micro-step, ascending from 0; and the parts.
    """
    number = shares.num_microbatches
    most = number if balance.encode == "step" else max(1, int(balance.encode))
    capped = {phase: cap for phase, cap in balance.caps.items() if phase in parts}
    rounds, found = np.arange(number, dtype=np.int32) // np.int32(most), dict(parts)
    first = round_ = 0
    while capped and first < number:
        for stop in range(min(first + most, number), first, -1):
            fitted = {}
            for phase, cap in capped.items():
                own = _fit_round(
                    parts[phase], cap, shares, range(first, stop), num_ranks, balance, ranks_per_node, stays
                )
                if own is None:
                    break
                fitted[phase] = own
            if len(fitted) == len(capped):
                break
        for phase, (members, rank) in fitted.items():
            found[phase].rank[members] = rank
        rounds[first:stop] = round_
        first, round_ = stop, round_ + 1
    if not stays:
        where = (by_rounds(shares, rounds), num_ranks, balance)
        for phase in parts.keys() - capped.keys():
            found[phase] = share_out_parts(parts[phase], *where, ranks_per_node=ranks_per_node)
    return rounds, {phase: found[phase] for phase in parts}


def _fit_round(
    parts: Parts,
    cap: int,
    shares: Shares,
    micro_steps: range,
    num_ranks: int,
    balance: Balance,
    ranks_per_node: int | None,
    stays: bool,
) -> tuple[Ints, Ranks] | None:
    """Return the parts of a round and their ranks within the cap; None where that is not possible. One micro-step is
    returned as it is.
    """
    step = shares.microbatch[parts.sample]
    members = np.flatnonzero((step >= micro_steps.start) & (step < micro_steps.stop))
    own, one = parts.take(members), Shares(shares.rank, np.zeros_like(shares.microbatch), 1)
    if len(micro_steps) == 1:
        return members, own.rank
    if int(np.minimum(own.positions, cap).sum()) > cap * num_ranks:
        return None
    if stays:
        overfull = len(_overfull(own, np.zeros(len(own), np.int32), cap, num_ranks))
        return None if overfull else (members, own.rank)
    fitted = fit_parts(own, cap, one, num_ranks, balance, ranks_per_node=ranks_per_node)
    return None if fitted is None else (members, fitted.rank)


def own_parts(parts: Parts, rank: int, shares: Shares) -> OwnParts:
    """Return what `rank` has of `parts`; `shares` are those of the samples of the global batch."""

    def by_step(members: Ints, others: Ranks) -> list[Ints]:
        step = shares.microbatch[parts.sample[members]]
        ordered = members[np.lexsort((others[members], step))]  # stable: the index breaks ties
        return np.split(ordered, np.cumsum(np.bincount(step, minlength=shares.num_microbatches))[:-1])

    home = shares.rank[parts.sample]
    return OwnParts(
        by_step(np.flatnonzero(parts.rank == rank), home),
        by_step(np.flatnonzero(home == rank), parts.rank),
    )


def _overfull(parts: Parts, step: Ranks, cap: int, num_ranks: int) -> Ints:
    """Return the micro-steps in which several parts together exceed the cap on some rank."""
    num_steps = int(step.max(initial=-1)) + 1
    positions = loads_by_rank_and_microbatch(parts.positions, parts.rank, step, num_ranks, num_steps)
    counts = loads_by_rank_and_microbatch(np.ones_like(parts.positions), parts.rank, step, num_ranks, num_steps)
    return np.nonzero((positions > cap) & (counts > 1))[1]
