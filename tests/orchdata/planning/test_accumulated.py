"""Steps of a given number of micro-steps: as even as bounds of our own allow, within all limits, on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from orchdata.balancers import CostModel, PhaseCost
from orchdata.planning.balance import Balance
from orchdata.planning.sharing.accumulated import FixedCost, share_out_in
from orchdata.planning.sharing.packed import NO_PADDING, PaddedCost
from orchdata.planning.sharing.shares import Padding, Shares, StepSamples

Ints = NDArray[np.int64]

TOKENS = PaddedCost(PhaseCost(1.0))
FIXED = FixedCost(6000, CostModel(llm=PhaseCost(1.0, 0.01)).coefficients("llm"))


def samples(count: int, ranks: int, balance: Balance, seed: int = 0) -> StepSamples:
    """Texts, images of four positions a token, and clips."""
    random = np.random.default_rng(seed)
    kind = random.integers(0, 3, count)
    image = np.where(kind == 0, random.integers(100, 2000, count), 0)
    audio = np.where(kind == 1, random.integers(100, 1000, count), 0)
    tokens = image // 4 + audio // 2 + random.integers(1, 400, count)
    costs = {"image": image, "audio": audio, "llm": tokens}
    sizes = {name: costs[name] for name in balance.caps}
    stream_rank = (np.arange(count) * ranks // max(1, count)).astype(np.int32)
    return StepSamples(costs, sizes, tokens, ranks, balance, stream_rank)


def counts_of(shares: Shares, ranks: int) -> Ints:
    return shares.loads(np.ones(len(shares.rank), np.int64), ranks)


def bound(step: StepSamples, number: int) -> int:
    """No way has a smaller sum of peaks: the mean of each phase, and the samples that must begin other micro-steps.

    The largest sample of the m-th micro-step, sorted by these, is at least the (m * full)-th of all.
    """
    full = step.num_ranks * -(-step.num_samples // (step.num_ranks * number))
    total = 0
    for column in step.costs.values():
        first = np.sort(column)[::-1][::full][:number]
        total += max(-(-int(column.sum()) // step.num_ranks), int(first.sum()))
    return total


@pytest.mark.parametrize(
    ("each", "number", "ranks", "above"), [(2, 4, 4, 1.25), (1, 4, 8, 1.25), (8, 2, 8, 1.03), (16, 4, 2, 1.03)]
)
def test_ranks_wait_little_in_micro_steps_of_as_many_samples(each: int, number: int, ranks: int, above: float) -> None:
    waits = dealt = least = 0
    for seed in range(4):
        step = samples(each * number * ranks, ranks, Balance(), seed)
        shares = share_out_in(step, NO_PADDING, number)
        assert (counts_of(shares, ranks) == each).all() and shares.num_microbatches == number
        in_turn = share_out_in(samples(each * number * ranks, ranks, Balance(scope="none"), seed), NO_PADDING, number)
        waits, dealt = waits + step.price(shares), dealt + step.price(in_turn)
        least += bound(step, number)
    assert waits < above * least
    assert dealt > 1.1 * waits


def test_samples_dealt_in_turn_are_cut_as_by_torch() -> None:
    shares = share_out_in(samples(24, 4, Balance(scope="none")), NO_PADDING, 3)
    assert shares.rank.tolist() == [number % 4 for number in range(24)]
    assert shares.microbatch.tolist() == [number // 8 for number in range(24)]  # 2 samples on each of 4 ranks


@pytest.mark.parametrize("padding", [NO_PADDING, TOKENS, FIXED])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"objective": "sum"},
        {"equal_count": True},
        {"max_samples": 6},
        {"scope": "none"},
        {"scope": "grouped", "group_size": 2},
        {"scope": "grid", "group_size": 2},
        {"scope": "grid", "group_size": 2, "objective": "sum"},
        {"order": "1f1b", "num_stages": 4},
        {"effort": 0},
    ],
)
@pytest.mark.parametrize("count", [0, 3, 19, 24])
def test_every_rank_has_all_micro_steps_and_no_more_than_its_share(
    count: int, options: dict[str, Any], padding: Padding
) -> None:
    step = samples(count, 4, Balance(**options))
    shares = share_out_in(step, padding, 3)
    counts = counts_of(shares, 4)
    assert counts.shape == (4, 3) and counts.sum() == count
    assert counts.max() <= -(-count // (4 * 3))
    if options.get("equal_count"):
        assert np.ptp(counts.sum(axis=1)) <= 1
    if options.get("scope") == "grouped":
        assert (shares.rank // 2 == step.stream_rank // 2).all()


def test_caps_are_kept_or_named() -> None:
    step = samples(24, 4, Balance(max_tokens={"llm": 900, "image": 2500}))
    shares = share_out_in(step, NO_PADDING, 4)
    for name, cap in step.balance.caps.items():
        assert shares.loads(step.sizes[name], 4).max() <= cap
    with pytest.raises(
        ValueError, match=r"accumulate=2 .* max_tokens=\{'llm': 900, 'image': 2500\}.*at most 3 of them"
    ):
        share_out_in(step, NO_PADDING, 2)


def test_a_sample_above_a_cap_may_be_alone() -> None:
    step = samples(24, 4, Balance(max_tokens=700, oversize="own"))
    step.positions[5] = step.sizes["llm"][5] = step.costs["llm"][5] = 5000
    shares = share_out_in(step, NO_PADDING, 6)
    own = (shares.rank == shares.rank[5]) & (shares.microbatch == shares.microbatch[5])
    assert own.sum() == 1 and counts_of(shares, 4).max() == 1
