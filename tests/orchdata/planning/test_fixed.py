"""Plans of one length: caps are kept, as few micro-steps as packed plans need or fewer, none costs more; pinned."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.distributions import image_patches, text_lengths
from orchdata.balancers import CostModel, PhaseCost
from orchdata.bench.plan import OMNI_COST
from orchdata.planning.balance import Balance, Scope
from orchdata.planning.sharing.accumulated import FixedCost
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Shares, StepSamples

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


@settings(max_examples=60)
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
