"""Sharing out steps of a given number of micro-steps, or of microbatches of one length. All in integers.

    ways of packed steps, with a cap on samples --swaps between all cells--+
    in turn, as torch deals samples out (scope "none") --------------------+-> the cheapest
    padded: neighbours in length, cell by cell ----------------------------+

A cell is one rank's microbatch; its cap on samples is one more cap. Cells of one length are filled over all ranks and
micro-steps (`pack_bins`), and balanced inside each micro-step; or shared out as packed steps are, within the same caps.
Such a cell costs what its samples do and, as one more sequence, its padding: a step's cost depends most on its number
of micro-steps, and cells differ by what grows faster than length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_of
from orchdata.balancers.bins import pack_bins
from orchdata.native.assign.bounds import NO_PINS
from orchdata.native.costs import Coefficients, sequence_costs
from orchdata.native.microbatches.microbatch import lower_all_peaks
from orchdata.planning.sharing.micro_steps import balanced_inside, in_scope, near_streams
from orchdata.planning.sharing.packed import NO_PADDING, PaddedCost
from orchdata.planning.sharing.shares import Padding, Shares, StepSamples, dealt

Ints = NDArray[np.int64]

SAMPLES = "samples of a microbatch"  # The name of their cap; no phase has such a name.
_PAIRS, _PAIRS_OF_A_SAMPLE = 50_000, 8  # Exchanges to look at: at least, and for each pair of samples on a rank.
_MOST_PAIRS = 2_000_000


def share_out_in(step: StepSamples, padding: Padding, number: int) -> Shares:
    """Return the cheapest way found into exactly `number` micro-steps, none of which has more samples on a rank than an
    even share, rounded up. Micro-steps of small steps may be empty. Raises ValueError for caps that need more
    micro-steps.
    """
    own, is_padded = counted(step, number), isinstance(padding, PaddedCost)
    if step.balance.scope == "none" and _keeps_caps(own, in_turn := _in_turn(own, number), is_padded):
        return in_turn
    ways = [shares for shares in _ways(own, padding, number) if _keeps_caps(own, shares, is_padded)]
    if not ways and _keeps_caps(own, at_home := _on_own_ranks(own, number), is_padded):
        return at_home
    if not ways:
        raise ValueError(
            f"accumulate={number} micro-steps do not hold the {step.num_samples} samples of a step within "
            f"{_caps(step, padding)}, at most {own.balance.caps[SAMPLES]} of them in a microbatch: raise one of "
            "these, give a step fewer samples, or leave accumulate out to get the micro-steps that it needs"
        )
    return padding.cheapest(step, ways)


def _caps(step: StepSamples, padding: Padding) -> str:
    """Return the arguments that cap microbatches."""
    caps = {name: cap for name, cap in step.balance.caps.items() if name in step.sizes}
    given = []
    if isinstance(padding, FixedCost):
        caps.pop("llm")
        given = [f"Packed(length={padding.length})"]
    return " and ".join([*given, f"max_tokens={caps}"] if caps or not given else given)


def counted(step: StepSamples, number: int) -> StepSamples:
    """Return the step with a cap on the samples of a cell, and so of a rank."""
    most = max(1, -(-step.num_samples // (step.num_ranks * number)))
    caps = {name: step.balance.caps[name] for name in step.sizes}
    balance = replace(step.balance, max_tokens={**caps, SAMPLES: most})
    if balance.scope != "grid":
        limit = most * number
        balance = replace(balance, max_samples=min(limit, balance.max_samples or limit))
    return replace(step, sizes={**step.sizes, SAMPLES: np.ones(step.num_samples, np.int64)}, balance=balance)


def _ways(step: StepSamples, padding: Padding, number: int) -> Iterator[Shares]:
    if isinstance(padding, PaddedCost):
        yield from _padded(step, padding, number)
    sought = step
    if isinstance(padding, FixedCost):  # A cell costs its length however it is filled.
        beyond = np.maximum(padding.beyond_length(step.positions), 1)
        sought = replace(step, costs={**step.costs, "llm": beyond})
    with contextlib.suppress(ValueError):  # It may need more microbatches.
        yield _lowered(sought, _packed(sought, number))


def _packed(step: StepSamples, number: int) -> Shares:
    """Share out as packed steps are. A grid without micro-steps that ranks meet in starts from all ranks too."""
    if step.balance.scope != "grid" or step.meets_in_micro_steps:
        return NO_PADDING.share_out(step, number)
    everywhere = step.over_all_ranks()
    balance = replace(everywhere.balance, max_samples=step.balance.caps[SAMPLES] * number)
    return in_scope(step, NO_PADDING.share_out(replace(everywhere, balance=balance), number))


def _in_turn(step: StepSamples, number: int) -> Shares:
    """Deal samples to ranks in turn, and cut those of each rank in their order, as torch's samplers do."""
    most = step.balance.caps[SAMPLES]
    turn = np.arange(step.num_samples) // step.num_ranks
    return Shares(dealt(step.num_samples, step.num_ranks), (turn // most).astype(np.int32), number)


def _on_own_ranks(step: StepSamples, number: int) -> Shares:
    """Leave samples on the ranks that their streams belong to, and cut those of each rank in their order."""
    order = np.argsort(step.stream_rank, kind="stable")
    own = step.stream_rank[order]
    microbatch = np.empty(step.num_samples, np.int32)
    microbatch[order] = (np.arange(step.num_samples) - np.searchsorted(own, own)) // step.balance.caps[SAMPLES]
    return Shares(step.stream_rank, microbatch, number)


def _padded(step: StepSamples, padding: PaddedCost, number: int) -> Iterator[Shares]:
    """Yield the ways of padded steps, and cells of neighbours in length, from the longest; the m-th of all ranks then
    have about the same length.
    """
    if step.balance.scope == "global":
        most, order = step.balance.caps[SAMPLES], np.argsort(-step.positions, kind="stable")
        cell = np.empty(step.num_samples, np.int32)
        cell[order] = np.arange(step.num_samples) // most
        yield Shares(cell % np.int32(step.num_ranks), cell // np.int32(step.num_ranks), number)
    if "llm" not in step.sizes:  # Rows are cut in the order of their lengths if these are capped.
        longest = step.balance.caps[SAMPLES] * int(step.positions.max(initial=1))
        balance = replace(step.balance, max_tokens={**step.balance.caps, "llm": longest})
        step = replace(step, sizes={**step.sizes, "llm": step.positions}, balance=balance)
    with contextlib.suppress(ValueError):
        shares = padding.share_out(step, number)
        if shares.num_microbatches <= number:
            yield replace(shares, num_microbatches=number)


def _lowered(step: StepSamples, shares: Shares) -> Shares:
    """Swap samples between all cells of a group of ranks while that lowers what ranks wait for."""
    balance = step.balance
    if not step.meets_in_micro_steps or balance.scope not in ("global", "grouped") or not balance.effort:
        return shares
    columns, caps = step.capped
    group = np.empty(step.num_ranks, np.int32)
    for which, ranks in enumerate(step.groups):
        group[ranks.start : ranks.stop] = which
    per_rank = -(-step.num_samples // step.num_ranks)
    pairs = min(max(_PAIRS, _PAIRS_OF_A_SAMPLE * step.num_samples * per_rank), _MOST_PAIRS)
    rank, microbatch = shares.rank.copy(), shares.microbatch.copy()
    # A move changes how many samples a rank has.
    may_move = not balance.equal_count and balance.max_samples == balance.caps[SAMPLES] * shares.num_microbatches
    lower_all_peaks(
        *(step.by_sample, columns, caps, group, shares.num_microbatches),
        *(rank, microbatch, may_move, int(pairs * balance.effort), NO_PINS),
    )
    return replace(shares, rank=rank, microbatch=microbatch)


def _keeps_caps(step: StepSamples, shares: Shares, is_padded: bool) -> bool:
    """Return whether no cell is above a cap, except by a single sample that may be, and ranks keep their counts."""
    counts, balance = shares.loads(np.ones(step.num_samples, np.int64), step.num_ranks), step.balance
    if int(counts.max(initial=0)) > balance.caps[SAMPLES] or not step.keeps_counts(shares.rank):
        return False
    may_be_above = (counts <= 1) if balance.oversize == "own" else np.zeros_like(counts, np.bool_)
    for name, column in step.sizes.items():
        filled = shares.loads(column, step.num_ranks)
        if name == "llm" and is_padded:
            longest = np.zeros_like(filled)
            np.maximum.at(longest, (shares.rank, shares.microbatch), column)
            filled = counts * longest
        if name != SAMPLES and not ((filled <= balance.caps[name]) | may_be_above).all():
            return False
    return True


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
    """The length of every `llm` microbatch, and what a sequence costs, as `CostModel.coefficients` gives it. `llm` is
    among the capped phases, and no sample is above a cap.
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
