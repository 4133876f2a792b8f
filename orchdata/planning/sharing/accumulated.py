"""Sharing out steps of a given number of micro-steps, each with about the same number of samples on every rank.

    ways of packed steps, with a cap on samples --swaps between all cells--+
    in turn, as torch deals samples out (scope "none") --------------------+-> the cheapest
    padded: neighbours in length, cell by cell ----------------------------+

A cell is one rank's microbatch. Its cap on samples is one more cap, next to those of `Balance.max_tokens`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from orchdata.native.microbatches.swaps import lower_peaks
from orchdata.planning.assign import dealt
from orchdata.planning.sharing.fixed import FixedCost
from orchdata.planning.sharing.micro_steps import in_scope
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.padded import PaddedCost
from orchdata.planning.sharing.shares import Padding, Shares, StepSamples

Ints = NDArray[np.int64]

SAMPLES = "samples of a microbatch"  # The name of their cap; no phase has such a name.
_PAIRS, _PAIRS_OF_A_SAMPLE = 50_000, 8  # Exchanges to look at: at least, and for each pair of samples on a rank.
_MOST_PAIRS = 2_000_000


def share_out_in(step: StepSamples, padding: Padding, number: int) -> Shares:
    """Return the cheapest way found into exactly `number` micro-steps, none of which has more samples on a rank than an
    even share, rounded up. Micro-steps of small steps may be empty.

    Raises:
        ValueError: caps that need more micro-steps.
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
    lower_peaks(
        *(step.by_sample, columns, caps, group, shares.num_microbatches),
        *(rank, microbatch, may_move, int(pairs * balance.effort)),
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
