"""Sharing out steps of microbatches of one length: each has the same number of tokens, its padding at the end.

    global batch --pack_bins, over all ranks and micro-steps--> cells --balanced inside each micro-step-+
    ranks and microbatches as for packed steps, within the same caps -----------------------------------+-> the cheapest

A cell costs what its samples do and, as one more sequence, its padding. So a step's cost depends most on its number of
micro-steps, and cells differ by what grows faster than length. All in integers: every rank computes the same.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_of
from orchdata.balancers.bins.pack import pack_bins
from orchdata.native.costs import Coefficients, sequence_costs
from orchdata.planning.assign import dealt
from orchdata.planning.sharing.micro_steps import balanced_inside, near_streams
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Padding, Shares, StepSamples

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_FEW_SAMPLES = 4096  # Up to this number, the way of packed steps is also tried.

_FULL = 985, 1000  # of the tokens of a step's microbatches, which samples fill
_WELL = 95, 100


def better_budget(budget: int, length: int, num_ranks: int) -> int | None:
    """Tokens of a step, near `budget`, that fill its microbatches of `length` on each rank; None where it does.

    A budget just above a multiple of what all ranks hold opens a micro-step for little.
    """
    room = length * num_ranks
    micro_steps = max(1, -(-budget * _FULL[1] // (room * _FULL[0])))
    if budget * _WELL[1] >= micro_steps * room * _WELL[0]:
        return None
    fuller = [number * room * _FULL[0] // _FULL[1] for number in (micro_steps - 1, micro_steps) if number]
    return min(fuller, key=lambda tokens: abs(tokens - budget))


@dataclass(frozen=True, slots=True, eq=False)
class FixedCost(Padding):
    """The length of every `llm` microbatch, and what a sequence costs, as `CostModel.coefficients` gives it.

    `llm` is among the capped phases, and no sample is above a cap.
    """

    length: int
    coefficients: Coefficients

    def share_out(self, step: StepSamples, num_microbatches: int | None = None) -> Shares:
        """As few micro-steps as can be found, and the cheapest way to fill them."""
        candidates = self._filled_and_balanced(step, num_microbatches) if step.balance.scope != "none" else []
        if not candidates or step.num_samples <= _FEW_SAMPLES:
            candidates.append(NO_PADDING.share_out(step))
        if num_microbatches is not None:
            candidates = [
                replace(one, num_microbatches=max(num_microbatches, one.num_microbatches)) for one in candidates
            ]
            candidates = [one for one in candidates if one.num_microbatches == num_microbatches]
            if not candidates:
                raise ValueError(f"the samples do not fit into {num_microbatches} microbatches of {self.length} tokens")
        fewest = min(one.num_microbatches for one in candidates)
        return self.cheapest(step, [one for one in candidates if one.num_microbatches == fewest])

    def _filled_and_balanced(self, step: StepSamples, num_microbatches: int | None) -> list[Shares]:
        """Cells filled over all ranks, and the same balanced inside each micro-step; without what breaks a rule."""
        balance = step.balance
        beyond = replace(step, costs={**step.costs, "llm": self.beyond_length(step.positions)})
        columns = np.stack(list(step.sizes.values()), axis=1)
        caps = np.array([balance.caps[phase] for phase in step.sizes], np.int64)
        filled = _filled(beyond, columns, caps, num_microbatches)
        candidates = [filled]
        if len(step.costs) > 1 or balance.scope == "grid" or balance.equal_count or balance.max_samples is not None:
            inside = balanced_inside(beyond, filled, (columns, caps))
            candidates += [] if inside is None else [inside]
        if balance.scope == "grid":  # A grid may not take what is packed over all ranks.
            candidates = [near_streams(beyond, one) for one in candidates[1:]]
        return [one for one in candidates if step.keeps_counts(one.rank)]

    def beyond_length(self, positions: Ints) -> Ints:
        """What sequences cost beyond their length's share, which a cell costs however it is filled: int64 (n,)."""
        _, quadratic, constant, windows = self.coefficients
        return sequence_costs(positions, 0, quadratic, constant, windows)

    def loads(self, costs: Ints, positions: Ints, shares: Shares, num_ranks: int) -> Ints:
        padding = np.maximum(0, self.length - shares.loads(positions, num_ranks))
        padded: Ints = sequence_costs(padding.ravel(), *self.coefficients).reshape(padding.shape)
        return shares.loads(costs, num_ranks) + padded

    def cells_in_turn(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> Ints:
        """Each rank has so many full microbatches, or more if the fullest rank needs more: cost is spread evenly."""
        rank = dealt(len(costs), num_ranks)
        tokens = loads_of(positions, rank, num_ranks)
        room = max(-(-int(tokens.max(initial=0)) // self.length), num_microbatches) * self.length
        linear, _, _, windows = self.coefficients
        loads = loads_of(costs, rank, num_ranks) + sequence_costs(room - tokens, linear, 0, 0, windows[:0])
        cells = np.tile((loads // num_microbatches)[:, None], num_microbatches)
        cells[:, 0] += loads % num_microbatches
        return cells

    def capacity(self, num_microbatches: int) -> int | None:
        return num_microbatches * self.length


def _filled(step: StepSamples, columns: Ints, caps: Ints, num_microbatches: int | None) -> Shares:
    """Cells filled over all ranks and micro-steps together, or over those of each group."""
    groups, by_sample = step.groups, step.by_sample
    members = [step.members(group) for group in groups]
    packed = [
        pack_bins(columns[mine], caps, None, by_sample[mine], num_ranks=len(group))
        for mine, group in zip(members, groups, strict=True)
    ]
    counts = [int(bins.max(initial=0)) // len(group) + 1 for bins, group in zip(packed, groups, strict=True)]
    number = max(*counts, num_microbatches or 1)
    rank, microbatch = np.empty((2, step.num_samples), np.int32)
    for mine, group, count, bins in zip(members, groups, counts, packed, strict=True):
        if count < number:
            with contextlib.suppress(ValueError):  # with more room, more even
                bins = pack_bins(columns[mine], caps, number * len(group), by_sample[mine], num_ranks=len(group))
        rank[mine], microbatch[mine] = group.start + bins % len(group), bins // len(group)
    return Shares(rank, microbatch, number)
