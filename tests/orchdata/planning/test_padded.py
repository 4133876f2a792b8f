"""Padded plans: never above the packed plan in this layout, caps on rectangles, the same count of microbatches."""

from __future__ import annotations

import hashlib
from itertools import product

import numpy as np
import pytest
from global_batches import GlobalBatch, check_step, steps, waits
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.distributions import image_patches, text_lengths
from orchdata.balancers import CostModel, PhaseCost
from orchdata.bench import OMNI_COST
from orchdata.planning.balance import Balance, Scope
from orchdata.planning.sharing.accumulated import FixedCost
from orchdata.planning.sharing.packed import NO_PADDING, PaddedCost, split_padded
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


def padded_loads(positions: np.ndarray, rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """In one microbatch."""
    return TOKENS.loads(positions, positions, one_microbatch(rank), num_ranks)[:, 0]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 3))
def test_one_microbatch_is_as_good_as_the_best_of_all_assignments(lengths: list[int], num_ranks: int) -> None:
    positions = np.maximum(np.array(lengths, np.int64), 1)
    shares = shared_out({"llm": positions}, num_ranks, Balance())
    found = int(padded_loads(positions, shares.rank, num_ranks).max())
    every = product(range(num_ranks), repeat=len(lengths))
    best = min(padded_loads(positions, np.array(rank), num_ranks).max() for rank in every)
    assert found == best == TOKENS.lower_bound(positions, positions, num_ranks, 1)


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


# Plans of one length: caps are kept, as few micro-steps as packed plans need or fewer, none costs more; pinned.


Ints = NDArray[np.int64]
COST = CostModel(image=PhaseCost(1.0, 0.01), llm=PhaseCost(2.0, 0.02))


def shared(
    tokens: Ints, patches: Ints, length: int, num_ranks: int, balance: Balance, model: CostModel = COST
) -> tuple[Shares, Shares, int, int]:
    """As planned, as packed, and the price of both."""
    costs = {"image": model.sequence_costs("image", patches), "llm": model.sequence_costs("llm", tokens)}
    sizes = {"llm": tokens, "image": patches}
    streams = (np.arange(len(tokens)) * num_ranks // max(1, len(tokens))).astype(np.int32)
    fixed = FixedCost(length, model.coefficients("llm"))
    step = StepSamples(costs, sizes, tokens, num_ranks, balance, streams)
    found, packed = fixed.share_out(step), NO_PADDING.share_out(step)
    return found, packed, fixed.price(step, found), fixed.price(step, packed)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 0, 4, 20])), max_size=30),
    st.integers(1, 4),
    st.sampled_from(["none", "grouped", "grid", "global"]),
    st.booleans(),
)
def test_plans_keep_the_caps_and_are_never_worse_than_packed_ones(
    samples: list[tuple[int, int]], num_ranks: int, scope: Scope, equal_count: bool
) -> None:
    table = np.array(samples, np.int64).reshape(-1, 2)
    tokens, patches = table[:, 0].copy(), table[:, 1].copy()
    group_size = 2 if scope in ("grouped", "grid") else None
    counted = equal_count and scope != "grid"
    balance = Balance(scope=scope, max_tokens={"llm": 48, "image": 30}, group_size=group_size, equal_count=counted)
    found, packed, mine, theirs = shared(tokens, patches, 50, num_ranks, balance)
    assert found.num_microbatches <= packed.num_microbatches
    assert mine <= theirs or found.num_microbatches < packed.num_microbatches
    assert (found.loads(tokens, num_ranks) <= 48).all() and (found.loads(patches, num_ranks) <= 30).all()
    if counted and scope == "global":
        assert np.ptp(np.bincount(found.rank, minlength=num_ranks)) <= 1


GOLDEN = {
    "none": "324094074bbe1c66",
    "grouped": "9a92a0528cb7140d",
    "grid": "b532227dad37510a",
    "global": "b505cea933a7eb74",
}


@pytest.mark.parametrize("scope", GOLDEN)
def test_plans_are_pinned(scope: Scope) -> None:
    generator = np.random.default_rng(11)
    tokens = text_lengths(generator, 256)
    patches = np.where(generator.random(256) < 0.4, image_patches(generator, 256) // 4 * 4, 0)
    balance = Balance(
        scope=scope, max_tokens={"llm": 8192, "image": 40_000}, group_size=4 if scope in ("grouped", "grid") else None
    )
    found, packed, _, _ = shared(tokens, patches, 8200, 8, balance, OMNI_COST)
    assert found.num_microbatches <= packed.num_microbatches
    digest = hashlib.blake2b(found.rank.tobytes() + found.microbatch.tobytes(), digest_size=8)
    assert digest.hexdigest() == GOLDEN[scope]
