"""Padded plans: never above the packed plan in this layout, caps on rectangles, the same count of microbatches."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from global_batches import GlobalBatch, check_step, steps, waits
from hypothesis import given, settings
from hypothesis import strategies as st

from orchdata.balancers import PhaseCost
from orchdata.planning.balance import Balance
from orchdata.planning.sharing.packed import PaddedCost, split_padded
from orchdata.planning.sharing.shares import Shares, StepSamples, one_microbatch

TOKENS = PaddedCost(PhaseCost(1.0))
LINEAR = PaddedCost(PhaseCost(4.0, 0.001))  # As `global_batches` has it.


def step_of(
    costs: dict[str, np.ndarray], num_ranks: int, balance: Balance, sizes: dict[str, np.ndarray] | None = None
) -> StepSamples:
    """Samples that are all drawn from the first rank's streams."""
    streams = np.zeros(len(costs["llm"]), np.int32)
    return StepSamples(costs, sizes or {}, costs["llm"], num_ranks, balance, streams)


def shared_out(
    costs: dict[str, np.ndarray], num_ranks: int, balance: Balance, sizes: dict[str, np.ndarray] | None = None
) -> Shares:
    return TOKENS.share_out(step_of(costs, num_ranks, balance, sizes))


def cut(rank: np.ndarray, positions: np.ndarray, balance: Balance) -> Shares:
    return split_padded(step_of({"llm": positions}, 1, balance, {"llm": positions}), rank)


def padded_loads(positions: np.ndarray, rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """In one microbatch."""
    return TOKENS.loads(positions, positions, one_microbatch(rank), num_ranks)[:, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 3))
def test_one_microbatch_is_as_good_as_the_best_of_all_assignments(lengths: list[int], num_ranks: int) -> None:
    positions = np.maximum(np.array(lengths, np.int64), 1)
    shares = shared_out({"llm": positions}, num_ranks, Balance())
    found = int(padded_loads(positions, shares.rank, num_ranks).max())
    every = product(range(num_ranks), repeat=len(lengths))
    best = min(padded_loads(positions, np.array(rank), num_ranks).max() for rank in every)
    assert found == best == TOKENS.lower_bound(positions, positions, num_ranks, 1)


def test_where_ranks_are_given_only_microbatches_are_chosen() -> None:
    positions = np.array([10, 2, 10, 2, 2, 2])
    for balance in (Balance(scope="none"), Balance(scope="none", max_tokens=20)):
        sizes = {"llm": positions} if balance.caps else {}
        shares = shared_out({"llm": positions}, 2, balance, sizes)
        assert shares.rank.tolist() == [0, 1, 0, 1, 0, 1]
    assert shares.microbatch.tolist() == [0, 0, 0, 0, 1, 0]  # 2 * 10, then the 2; rank 1 has 3 * 2


@pytest.mark.parametrize("oversize", ["error", "own"])
def test_a_sample_above_the_cap(oversize: str) -> None:
    positions = np.array([50, 10, 10])
    balance = Balance(max_tokens=20, oversize=oversize)  # type: ignore[arg-type]
    rank = np.zeros(3, np.int32)
    if oversize == "error":
        with pytest.raises(ValueError, match="a sample has 50 llm positions, max_tokens allows 20"):
            cut(rank, positions, balance)
    else:
        assert cut(rank, positions, balance).microbatch.tolist() == [0, 1, 1]


@settings(max_examples=150, deadline=None)
@given(steps())
def test_a_step_is_within_its_limits_and_no_dearer_than_the_packed_plan_in_this_layout(
    step: tuple[GlobalBatch, Balance],
) -> None:
    batch, balance = step
    samples = batch.step(balance)
    shares = LINEAR.share_out(samples)
    check_step(batch, shares, balance, padded=True)
    assert LINEAR.share_out(samples).rank.tolist() == shares.rank.tolist()

    def held(shares: Shares) -> np.ndarray:
        """Each cell is rows times its longest one, in llm; a sum in encoders."""
        cells = np.zeros((len(batch.costs), batch.num_ranks, shares.num_microbatches), np.int64)
        for rank, microbatch in np.ndindex(cells.shape[1:]):
            mine = (shares.rank == rank) & (shares.microbatch == microbatch)
            for of_phase, (phase, column) in zip(cells, batch.costs.items(), strict=True):
                longest = mine.sum() * column[mine].max(initial=0)
                of_phase[rank, microbatch] = longest if phase == "llm" else column[mine].sum()
        return cells

    found = waits(held(shares), balance)
    assert found == LINEAR.price(samples, shares)
    packed, backbone = (split_padded(each, each.assign()) for each in (samples, samples.of_phases("llm")))
    assert shares.num_microbatches <= packed.num_microbatches
    for other in (packed, backbone):
        if other.num_microbatches <= packed.num_microbatches:
            assert found <= waits(held(other), balance)


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(0, 2))
def test_as_many_micro_steps_as_are_asked_for_or_fewer(step: tuple[GlobalBatch, Balance], more: int) -> None:
    batch, balance = step
    samples = batch.step(balance)
    fewest = LINEAR.share_out(samples).num_microbatches
    shares = LINEAR.share_out(samples, fewest + more)
    assert shares.num_microbatches <= fewest + more
    check_step(batch, shares, balance, padded=True)
