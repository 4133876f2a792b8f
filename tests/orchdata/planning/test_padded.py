"""Padded plans: never above the packed plan in this layout, caps on rectangles, the same count of microbatches."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchdata.balancers import PhaseCost
from orchdata.planning.balance import Balance
from orchdata.planning.padded import (
    PaddedCost,
    PaddedShares,
    assign_blocks,
    assign_padded,
    dealt_shares,
    padded_loads,
    padded_lower_bound,
    share_out_padded,
    split_padded,
)

TOKENS = PaddedCost(PhaseCost(1.0))


def in_turn(num_samples: int, num_ranks: int) -> np.ndarray:
    return (np.arange(num_samples) % num_ranks).astype(np.int32)


def one_microbatch(rank: np.ndarray) -> PaddedShares:
    return PaddedShares(rank, np.zeros_like(rank), 1)


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
    shares = share_out_padded(
        {"llm": positions}, positions, in_turn(len(lengths), num_ranks), num_ranks, Balance(), TOKENS, {}
    )
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
    shares = share_out_padded(
        {"image": image, "llm": positions},
        positions,
        in_turn(len(lengths), num_ranks),
        num_ranks,
        balance,
        TOKENS,
        {phase: sizes[phase] for phase in caps},
    )
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
    packed = np.array([0, 1, 0, 1], np.int32)
    shares = share_out_padded({"image": image, "llm": positions}, positions, packed, 2, Balance(), TOKENS, {})
    assert shares.rank.tolist() == [0, 1, 0, 1]  # 10,000 + 200 against 20,000 + 200


def test_where_ranks_are_given_only_microbatches_are_chosen() -> None:
    positions = np.array([10, 2, 10, 2, 2, 2])
    for balance in (Balance(scope="none"), Balance(scope="none", max_tokens=20)):
        sizes = {"llm": positions} if balance.caps else {}
        shares = share_out_padded({"llm": positions}, positions, in_turn(6, 2), 2, balance, TOKENS, sizes)
        assert shares.rank.tolist() == [0, 1, 0, 1, 0, 1]
    assert shares.microbatch.tolist() == [0, 0, 0, 0, 1, 0]  # 2 * 10, then the 2; rank 1 has 3 * 2


def test_most_samples_a_rank_may_get_holds() -> None:
    positions = np.array([1000, *[1] * 11])
    shares = share_out_padded({"llm": positions}, positions, in_turn(12, 3), 3, Balance(max_samples=5), TOKENS, {})
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
    assert padded_loads(positions, dealt_shares(positions, 2, 1), 2).tolist() == [32, 4]
    # in two microbatches: 2 * 8 and 2 * 2
    assert padded_loads(positions, dealt_shares(positions, 2, 2), 2).tolist() == [20, 4]
