"""Planning batches of one length: every microbatch is exactly so many tokens, padding behind its samples.

    global batch --pack_bins, over all ranks and micro-steps--> cells --balanced inside each micro-step-+
    ranks and microbatches as for packed batches, within the same caps ---------------------------------+-> the cheapest

A cell costs what its samples do and, as one more sequence, its padding: so a step costs most by its number of
micro-steps, and what differs between cells is what grows faster than length. All in integers: every rank computes the
same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import pack_bins
from orchdata.balancers.assignment import cells_of, loads_of
from orchdata.native.costs import Coefficients, sequence_costs
from orchdata.planning.assign import counted_groups, dealt
from orchdata.planning.balance import Balance
from orchdata.planning.shares import Shares, balanced_inside, cells, counts_kept, near_streams, share_out_packed

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_FEW_SAMPLES = 4096  # Up to so many, ranks and microbatches are also found apart.


_FULL = 985, 1000  # of the tokens of a step's microbatches, which samples fill
_WELL = 95, 100


def better_budget(budget: int, length: int, num_ranks: int) -> int | None:
    """Tokens of a step, near `budget`, that fill its microbatches of `length` on each rank; None where it does.

    A budget that just misses a multiple of what all ranks hold opens a micro-step for little.
    """
    held = length * num_ranks
    micro_steps = max(1, -(-budget * _FULL[1] // (held * _FULL[0])))
    if budget * _WELL[1] >= micro_steps * held * _WELL[0]:
        return None
    fuller = [number * held * _FULL[0] // _FULL[1] for number in (micro_steps - 1, micro_steps) if number]
    return min(fuller, key=lambda tokens: abs(tokens - budget))


@dataclass(frozen=True, slots=True, eq=False)
class FixedCost:
    """The length of every `llm` microbatch, and what a sequence costs, as `CostModel.coefficients` gives it."""

    length: int
    coefficients: Coefficients

    def beyond_length(self, positions: Ints) -> Ints:
        """What sequences cost beyond their length's share, which a cell costs however it is filled: int64 (n,)."""
        _, quadratic, constant, windows = self.coefficients
        return sequence_costs(positions, 0, quadratic, constant, windows)

    def cells(self, costs: Ints, positions: Ints, shares: Shares, num_ranks: int) -> Ints:
        """Cost of each rank's microbatches with their padding, int64 (num_ranks, num_microbatches)."""
        where = (shares.rank, shares.microbatch, num_ranks, shares.num_microbatches)
        padding = np.maximum(0, self.length - cells_of(positions, *where))
        padded: Ints = sequence_costs(padding.ravel(), *self.coefficients).reshape(padding.shape)
        return cells_of(costs, *where) + padded

    def loads_in_turn(self, costs: Ints, positions: Ints, num_ranks: int) -> Ints:
        """What ranks would cost had samples been dealt out in turn, int64 (num_ranks,): each in full microbatches, as
        many as the fullest rank needs.
        """
        rank = dealt(len(costs), num_ranks)
        held = loads_of(positions, rank, num_ranks)
        room = -(-int(held.max(initial=0)) // self.length) * self.length
        linear, _, _, windows = self.coefficients
        return loads_of(costs, rank, num_ranks) + sequence_costs(room - held, linear, 0, 0, windows[:0])


def share_out_fixed(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    num_microbatches: int | None,
    positions: Ints,
    fixed: FixedCost,
) -> Shares:
    """Assign samples to ranks and microbatches of one length, as few as are found, and of these the cheapest way.

    Args:
        costs: balanced phase -> int64 (n,), `llm` last.
        sizes: capped phase -> int64 (n,), its positions; `llm` is among them, and no sample is above a cap.
        stream_rank: int32 (n,), whose streams each sample is drawn from.
        num_microbatches: how many; by default the fewest.
        positions: int64 (n,), of `llm`.

    Raises:
        ValueError: a sample above a cap, or too few microbatches.
    """
    beyond = {**costs, "llm": fixed.beyond_length(positions)}
    found: list[Shares] = []
    if balance.scope != "none":
        filled = _filled(beyond, sizes, num_ranks, balance, stream_rank, num_microbatches)
        found = [filled]
        if len(costs) > 1 or balance.scope == "grid" or balance.equal_count or balance.max_samples is not None:
            columns = np.stack(list(sizes.values()), axis=1)
            caps = np.array([balance.caps[phase] for phase in sizes], np.int64)
            inside = balanced_inside(beyond, columns, caps, filled, num_ranks, balance, stream_rank)
            found += [] if inside is None else [inside]
        if balance.scope == "grid":  # Packed over all ranks, which it may not be.
            found = [near_streams(beyond, sizes, one, num_ranks, balance, stream_rank) for one in found[1:]]
        found = [one for one in found if counts_kept(one.rank, num_ranks, balance)]
    if not found or len(positions) <= _FEW_SAMPLES:
        found.append(share_out_packed(costs, sizes, num_ranks, balance, stream_rank))
    if num_microbatches is not None:
        found = [Shares(one.rank, one.microbatch, max(num_microbatches, one.num_microbatches)) for one in found]
        found = [one for one in found if one.num_microbatches == num_microbatches]
        if not found:
            raise ValueError(f"the samples do not fit into {num_microbatches} microbatches of {fixed.length} tokens")
    fewest = min(one.num_microbatches for one in found)
    fewest_found = [one for one in found if one.num_microbatches == fewest]
    return min(fewest_found, key=lambda one: balance.price.of(fixed_cells_of(costs, one, num_ranks, positions, fixed)))


def fixed_cells_of(
    costs: Mapping[str, Ints], shares: Shares, num_ranks: int, positions: Ints, fixed: FixedCost
) -> list[Ints]:
    """`cells` of shares of which `llm`, the last phase, is padded to a length."""
    encoders = {phase: column for phase, column in costs.items() if phase != "llm"}
    return [*cells(encoders, shares, num_ranks), fixed.cells(costs["llm"], positions, shares, num_ranks)]


def _filled(
    beyond: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    num_microbatches: int | None,
) -> Shares:
    """Cells filled over all ranks and micro-steps at once, or over those of each group."""
    groups = counted_groups(balance, num_ranks) if balance.scope == "grouped" else [range(num_ranks)]
    columns, by_sample = np.stack(list(sizes.values()), axis=1), np.stack(list(beyond.values()), axis=1)
    caps = np.array([balance.caps[phase] for phase in sizes], np.int64)
    members = [np.flatnonzero((stream_rank >= group.start) & (stream_rank < group.stop)) for group in groups]
    packed = [
        pack_bins(columns[mine], caps, None, by_sample[mine], num_ranks=len(group))
        for mine, group in zip(members, groups, strict=True)
    ]
    counts = [int(bins.max(initial=0)) // len(group) + 1 for bins, group in zip(packed, groups, strict=True)]
    number = max(*counts, num_microbatches or 1)
    rank, microbatch = np.empty((2, len(stream_rank)), np.int32)
    for mine, group, count, bins in zip(members, groups, counts, packed, strict=True):
        if count < number:
            with contextlib.suppress(ValueError):  # with more room, more even
                bins = pack_bins(columns[mine], caps, number * len(group), by_sample[mine], num_ranks=len(group))
        rank[mine], microbatch[mine] = group.start + bins % len(group), bins // len(group)
    return Shares(rank, microbatch, number)
