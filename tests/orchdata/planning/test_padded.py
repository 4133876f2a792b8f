"""Padded plans: never above the packed plan in this layout, caps on rectangles, the same count of microbatches."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from global_batches import GlobalBatch, check_step, steps, waits
from hypothesis import given, settings
from hypothesis import strategies as st

from orchdata.balancers import PhaseCost
from orchdata.planning.assign import assign
from orchdata.planning.balance import Balance
from orchdata.planning.padded import (
    PaddedCost,
    assign_blocks,
    assign_padded,
    padded_cells_of,
    padded_in_turn,
    padded_loads,
    padded_lower_bound,
    share_out_padded,
    split_padded,
)
from orchdata.planning.shares import Shares

TOKENS = PaddedCost(PhaseCost(1.0))
LINEAR = PaddedCost(PhaseCost(4.0, 0.001))  # As `global_batches` has it.


def in_turn(num_samples: int, num_ranks: int) -> np.ndarray:
    return (np.arange(num_samples) % num_ranks).astype(np.int32)


def one_microbatch(rank: np.ndarray) -> Shares:
    return Shares(rank, np.zeros_like(rank), 1)


def shared_out(
    costs: dict[str, np.ndarray], num_ranks: int, balance: Balance, sizes: dict[str, np.ndarray] | None = None
) -> Shares:
    """Of samples that are all drawn from the first rank's streams."""
    streams = np.zeros(len(costs["llm"]), np.int32)
    return share_out_padded(costs, sizes or {}, num_ranks, balance, streams, None, costs["llm"], TOKENS)


def test_the_example_by_hand() -> None:
    positions = np.array([10, 2, 10, 2, 2, 2])
    rank = assign_padded(positions, 2, PhaseCost(1.0))
    assert rank[0] == rank[2] != rank[1]  # two rows of 10 together: 20, and four of 2: 8
    assert sorted(padded_loads(positions, one_microbatch(rank), 2).tolist()) == [8, 20]
    assert padded_loads(positions, one_microbatch(in_turn(6, 2)), 2).tolist() == [30, 6]
    # equal counts: the longest three, 3 * 10, and the shortest, 3 * 2
    assert padded_loads(positions, one_microbatch(assign_blocks(positions, 2)), 2).tolist() == [30, 6]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 3))
def test_one_microbatch_is_as_good_as_the_best_of_all_assignments(lengths: list[int], num_ranks: int) -> None:
    positions = np.maximum(np.array(lengths, np.int64), 1)
    shares = shared_out({"llm": positions}, num_ranks, Balance())
    found = int(padded_loads(positions, shares, num_ranks).max())
    every = product(range(num_ranks), repeat=len(lengths))
    best = min(padded_loads(positions, one_microbatch(np.array(rank)), num_ranks).max() for rank in every)
    assert found == best == padded_lower_bound(positions, positions, num_ranks, TOKENS)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    num_ranks=st.integers(1, 5),
    image_cap=st.one_of(st.none(), st.integers(300, 900)),
    equal_count=st.booleans(),
    objective=st.sampled_from(["barrier", "sum"]),
)
def test_caps_hold_and_every_sample_is_shared_out(
    lengths: list[int], num_ranks: int, image_cap: int | None, equal_count: bool, objective: str
) -> None:
    positions = np.array(lengths, np.int64)
    image = np.where(positions % 3 == 0, np.minimum(positions, 300), 0)
    caps = {"llm": 700} | ({"image": image_cap} if image_cap else {})
    balance = Balance(max_tokens=caps, equal_count=equal_count, objective=objective)  # type: ignore[arg-type]
    sizes = {"llm": positions, "image": image}
    costs = {"image": image, "llm": positions}
    shares = shared_out(costs, num_ranks, balance, {phase: sizes[phase] for phase in caps})
    assert shares.rank.dtype == shares.microbatch.dtype == np.int32
    assert set(shares.rank) <= set(range(num_ranks))
    assert set(shares.microbatch) == set(range(shares.num_microbatches))
    for rank, microbatch in product(range(num_ranks), range(shares.num_microbatches)):
        mine = (shares.rank == rank) & (shares.microbatch == microbatch)
        assert mine.sum() * positions[mine].max(initial=0) <= 700
        assert image[mine].sum() <= (image_cap or 1 << 40)
    if equal_count:
        counts = np.bincount(shares.rank, minlength=num_ranks)
        assert counts.max() - counts.min() <= 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(30, 90))
def test_a_rank_has_as_few_microbatches_as_its_cap_allows(lengths: list[int], cap: int) -> None:
    positions = np.array(lengths, np.int64)
    shares = split_padded(in_turn(len(lengths), 1), 1, {"llm": positions}, Balance(max_tokens=cap))

    def fits(groups: tuple[int, ...]) -> bool:
        held = np.array(groups)
        return all((held == g).sum() * positions[held == g].max() <= cap for g in set(groups))

    fewest = (
        min(len(set(groups)) for groups in product(range(len(lengths)), repeat=len(lengths)) if fits(groups))
        if (len(lengths) <= 5)
        else shares.num_microbatches
    )
    assert shares.num_microbatches == fewest


def test_encoders_count_when_candidates_are_compared() -> None:
    """Padded LLM balancing alone would put both giant images on the rank of the long samples."""
    positions = np.array([100, 100, 99, 99])
    image = np.array([10_000, 10_000, 0, 0])
    shares = shared_out({"image": image, "llm": positions}, 2, Balance())
    assert shares.rank[0] != shares.rank[1]  # 10,000 + 200 against 20,000 + 200


def test_where_ranks_are_given_only_microbatches_are_chosen() -> None:
    positions = np.array([10, 2, 10, 2, 2, 2])
    for balance in (Balance(scope="none"), Balance(scope="none", max_tokens=20)):
        sizes = {"llm": positions} if balance.caps else {}
        shares = shared_out({"llm": positions}, 2, balance, sizes)
        assert shares.rank.tolist() == [0, 1, 0, 1, 0, 1]
    assert shares.microbatch.tolist() == [0, 0, 0, 0, 1, 0]  # 2 * 10, then the 2; rank 1 has 3 * 2


def test_most_samples_a_rank_may_get_holds() -> None:
    positions = np.array([1000, *[1] * 11])
    shares = shared_out({"llm": positions}, 3, Balance(max_samples=5))
    assert np.bincount(shares.rank).max() <= 5


@pytest.mark.parametrize("oversize", ["error", "own"])
def test_a_sample_above_the_cap(oversize: str) -> None:
    positions = np.array([50, 10, 10])
    balance = Balance(max_tokens=20, oversize=oversize)  # type: ignore[arg-type]
    rank = np.zeros(3, np.int32)
    if oversize == "error":
        with pytest.raises(ValueError, match="a sample has 50 llm positions, max_tokens allows 20"):
            split_padded(rank, 1, {"llm": positions}, balance)
    else:
        assert split_padded(rank, 1, {"llm": positions}, balance).microbatch.tolist() == [0, 1, 1]


def test_padding_is_aligned_before_it_is_counted() -> None:
    aligned = np.array([64, 64, 64, 128])  # 1, 60, 64 and 65 positions in multiples of 64
    rank = assign_padded(np.array([1, 60, 64, 65]), 2, PhaseCost(1.0), multiple_of=64)
    assert padded_loads(aligned, one_microbatch(rank), 2).max() == 192  # 3 * 64


def test_what_dealing_out_in_turn_would_cost() -> None:
    positions = np.array([8, 1, 2, 1, 4, 1, 2, 1])
    assert padded_loads(positions, padded_in_turn(positions, 2, 1), 2).tolist() == [32, 4]
    # in two microbatches: 2 * 8 and 2 * 2
    assert padded_loads(positions, padded_in_turn(positions, 2, 2), 2).tolist() == [20, 4]


def test_micro_steps_of_neighbours_in_length_cost_less() -> None:
    """Ranks first: in each micro-step one of them has a long sample, and its rows are padded to that."""
    rng = np.random.default_rng(1)
    positions = np.clip(np.exp(rng.normal(5, 1, 400)), 1, 2000).astype(np.int64)
    costs, balance = {"llm": positions}, Balance(max_tokens=4096)
    first = split_padded(assign(costs, balance, 8, np.zeros(400, np.int32)), 8, costs, balance)
    found = shared_out(costs, 8, balance, costs)
    taken = [balance.price.of(padded_cells_of(costs, shares, 8)) for shares in (found, first)]
    assert found.num_microbatches <= first.num_microbatches
    assert taken[0] < 0.97 * taken[1]


@settings(max_examples=150, deadline=None)
@given(steps())
def test_a_step_is_within_its_limits_and_no_dearer_than_the_packed_plan_in_this_layout(
    step: tuple[GlobalBatch, Balance],
) -> None:
    batch, balance = step
    sizes, positions = batch.sizes(balance), batch.positions["llm"]
    arguments = (batch.costs, sizes, batch.num_ranks, balance, batch.stream_rank, None, positions, LINEAR)
    shares = share_out_padded(*arguments)
    check_step(batch, shares, balance, padded=True)
    assert share_out_padded(*arguments).rank.tolist() == shares.rank.tolist()

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
    assert found == balance.price.of(padded_cells_of(batch.costs, shares, batch.num_ranks))
    packed, backbone = (
        split_padded(assign(costs, balance, batch.num_ranks, batch.stream_rank), batch.num_ranks, sizes, balance)
        for costs in (batch.costs, {"llm": batch.costs["llm"]})
    )
    assert shares.num_microbatches <= packed.num_microbatches
    for other in (packed, backbone):
        if other.num_microbatches <= packed.num_microbatches:
            assert found <= waits(held(other), balance)


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(0, 2))
def test_as_many_micro_steps_as_are_asked_for_or_fewer(step: tuple[GlobalBatch, Balance], more: int) -> None:
    batch, balance = step
    sizes, positions = batch.sizes(balance), batch.positions["llm"]
    arguments = (batch.costs, sizes, batch.num_ranks, balance, batch.stream_rank)
    fewest = share_out_padded(*arguments, None, positions, LINEAR).num_microbatches
    shares = share_out_padded(*arguments, fewest + more, positions, LINEAR)
    assert shares.num_microbatches <= fewest + more
    check_step(batch, shares, balance, padded=True)


def test_no_candidate_is_left_out_for_another() -> None:
    """What is chosen never costs more than the packed plan or the LLM-only plan in this layout."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        positions = rng.integers(1, 400, 60)
        image = np.where(rng.random(60) < 0.4, rng.integers(1, 2000, 60), 0)
        costs, sizes, balance = {"image": image, "llm": positions}, {"llm": positions}, Balance(max_tokens=1200)
        found = shared_out(costs, 4, balance, sizes)
        streams = np.zeros(60, np.int32)
        for rank in (assign(costs, balance, 4, streams), assign({"llm": positions}, balance, 4, streams)):
            other = split_padded(rank, 4, sizes, balance)
            if other.num_microbatches <= found.num_microbatches:
                limit = balance.price.of(padded_cells_of(costs, other, 4))
                assert balance.price.of(padded_cells_of(costs, found, 4)) <= limit
