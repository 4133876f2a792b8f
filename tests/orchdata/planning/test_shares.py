"""Sharing out packed steps: each sample once, within every cap, and never dearer than what balancing alone would give.

What is compared with comes from the balancers one by one, and its price from the definition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from global_batches import GlobalBatch, check_counts, check_step, global_batch, steps, waits
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.balancers import CostModel, PhaseCost, balance_phases, split_microbatches
from orchdata.planning.balance import Balance
from orchdata.planning.sharing.accumulated import FixedCost, share_out_in
from orchdata.planning.sharing.packed import NO_PADDING, PaddedCost
from orchdata.planning.sharing.shares import Padding, Shares, StepSamples, assign

Ints = NDArray[np.int64]


def shared_out(batch: GlobalBatch, balance: Balance, num_microbatches: int | None = None) -> Shares:
    return NO_PADDING.share_out(batch.step(balance), num_microbatches)


def split(batch: GlobalBatch, phases: list[str], balance: Balance) -> Shares:
    """Ranks by these phases, then each rank's samples by the sum of their costs."""
    costs = {phase: batch.costs[phase] for phase in phases}
    rank = assign(costs, balance, batch.num_ranks, batch.stream_rank)
    columns = list(batch.sizes(balance).values()) or [np.zeros(len(rank), np.int64)]
    microbatch, count = split_microbatches(
        np.sum(list(costs.values()), axis=0),
        rank,
        batch.num_ranks,
        sizes=np.stack(columns, axis=1),
        max_size=np.array([*balance.caps.values()] or [1]),
        oversize="own",
        in_step=balance.price.meets_in_micro_steps,
    )
    return Shares(rank, microbatch, count)


def cells(batch: GlobalBatch, shares: Shares) -> Ints:
    """Costs int64 (num_phases, num_ranks, num_microbatches)."""
    held = np.zeros((len(batch.costs), batch.num_ranks, shares.num_microbatches), np.int64)
    for of_phase, column in zip(held, batch.costs.values(), strict=True):
        np.add.at(of_phase, (shares.rank, shares.microbatch), column)
    return held


def check_not_dearer(batch: GlobalBatch, shares: Shares, balance: Balance) -> None:
    """Than the split by sums, in at most as many micro-steps, nor than the backbone alone where it has no more.

    A grid in micro-steps: than all ranks at once, but for 2 % at most, and never below these.
    """
    found = waits(cells(batch, shares), balance)
    assert found == batch.step(balance).price(shares)
    by_sums, backbone = split(batch, list(batch.costs), balance), split(batch, ["llm"], balance)
    assert shares.num_microbatches <= by_sums.num_microbatches
    if (
        balance.scope == "grid"
        and balance.price.meets_in_micro_steps
        and balance.caps
        and by_sums.num_microbatches > 1 < batch.num_ranks
    ):
        anywhere = replace(balance, scope="global", group_size=None)
        everywhere = shared_out(batch, anywhere)
        if everywhere.num_microbatches <= by_sums.num_microbatches:
            least = waits(cells(batch, everywhere), anywhere)
            assert least <= found <= 1.02 * least
        return
    for other in (by_sums, backbone):
        if other.num_microbatches <= by_sums.num_microbatches:
            assert found <= waits(cells(batch, other), balance)


@given(steps())
def test_a_step_is_within_its_limits_and_no_dearer_than_what_it_is_chosen_from(
    step: tuple[GlobalBatch, Balance],
) -> None:
    batch, balance = step
    before = [column.copy() for column in (*batch.costs.values(), *batch.positions.values())]
    shares = shared_out(batch, balance)
    check_step(batch, shares, balance)
    check_not_dearer(batch, shares, balance)
    assert len(np.unique(shares.microbatch)) in (0, shares.num_microbatches)
    again = shared_out(batch, balance)
    assert (again.rank.tolist(), again.microbatch.tolist()) == (shares.rank.tolist(), shares.microbatch.tolist())
    for column, given_ in zip((*batch.costs.values(), *batch.positions.values()), before, strict=True):
        assert column.tolist() == given_.tolist()


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(0, 3))
def test_as_many_micro_steps_as_are_asked_for(step: tuple[GlobalBatch, Balance], more: int) -> None:
    batch, balance = step
    if not balance.caps:
        balance = replace(balance, max_tokens={"llm": 700})
    fewest = shared_out(batch, balance).num_microbatches
    shares = shared_out(batch, balance, fewest + more)
    assert shares.num_microbatches == fewest + more
    check_step(batch, shares, balance)


def test_too_few_micro_steps_are_an_error_that_says_how_many_hold_the_samples() -> None:
    batch, balance = global_batch(1, 40, 2), Balance(max_tokens={"llm": 500}, oversize="own")
    with pytest.raises(ValueError, match=r"do not fit into 1 microbatches within max_tokens=.*: \d+ are enough"):
        shared_out(batch, balance, 1)


@pytest.mark.parametrize(
    ("num_samples", "num_ranks", "options"),
    [(8300, 64, {}), (2600, 16, {"equal_count": True}), (2600, 16, {"max_samples": 170})],
)
def test_large_global_batches_are_dealt_too(num_samples: int, num_ranks: int, options: dict[str, Any]) -> None:
    """Of which fewer ways are looked at."""
    batch = global_batch(1, num_samples, num_ranks)
    balance = Balance(max_tokens={"llm": 6000, "image": 12_000}, **options)
    shares = shared_out(batch, balance)
    check_step(batch, shares, balance)
    check_not_dearer(batch, shares, balance)
    by_sums = split(batch, list(batch.costs), balance)
    assert 1.1 * waits(cells(batch, shares), balance) < waits(cells(batch, by_sums), balance)


def long_batch(
    seed: int, num_samples: int, num_ranks: int, phases: tuple[str, ...] = ("image", "audio", "llm")
) -> GlobalBatch:
    """None of its samples has more than 2,400 tokens."""
    batch = global_batch(seed, num_samples, num_ranks, phases)
    return replace(batch, positions={**batch.positions, "llm": np.minimum(batch.positions["llm"], 2400)})


def sorted_and_cut(batch: GlobalBatch, by: str, cap: int, num_micro_steps: int) -> int:
    """What ranks wait for where samples sorted by a phase are cut into micro-steps, each balanced within the cap."""
    tokens = batch.positions["llm"]
    order = np.lexsort((-tokens, -batch.costs[by]))
    before = np.cumsum(tokens[order]) - tokens[order]
    cut, total = before * num_micro_steps // int(tokens.sum()), 0
    for number in range(num_micro_steps):
        mine = order[cut == number]
        part = {phase: column[mine] for phase, column in batch.costs.items()}
        total += sum(balance_phases(part, batch.num_ranks, sizes=tokens[mine], max_size=cap).makespans)
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("phases", [("image", "llm"), ("image", "audio", "llm")])
def test_very_many_samples_cost_no_more_than_any_simpler_plan(seed: int, phases: tuple[str, ...]) -> None:
    num_ranks, balance = 512, Balance(max_tokens=2400)
    batch = long_batch(seed, num_ranks * 36, num_ranks, phases)
    shares = shared_out(batch, balance)
    check_counts(shares, num_ranks, balance)
    held = np.zeros((num_ranks, shares.num_microbatches), np.int64)
    np.add.at(held, (shares.rank, shares.microbatch), batch.positions["llm"])
    assert held.max() <= 2400
    assert shares.num_microbatches == -(-int(batch.positions["llm"].sum()) // (2400 * num_ranks)) > 1
    found = waits(cells(batch, shares), balance)
    for by in phases:
        assert found <= sorted_and_cut(batch, by, 2400, shares.num_microbatches)
    by_sums = split(batch, list(phases), balance)
    backbone = NO_PADDING.share_out(batch.step(balance, "llm"))
    grid = shared_out(batch, Balance(max_tokens=2400, scope="grid", group_size=8))
    assert found <= waits(cells(batch, grid), balance) <= 1.03 * found
    for other in (by_sums, backbone):
        assert 1.02 * found < waits(cells(batch, other), balance)


# Steps of a given number of micro-steps: as even as bounds of our own allow, within all limits, on every rank.


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
    with pytest.raises(ValueError, match=r"accumulate=2 .* max_tokens=\{'llm': 900, 'image': 2500\}.*at most 3 "):
        share_out_in(step, NO_PADDING, 2)


def test_a_sample_above_a_cap_may_be_alone() -> None:
    step = samples(24, 4, Balance(max_tokens=700, oversize="own"))
    step.positions[5] = step.sizes["llm"][5] = step.costs["llm"][5] = 5000
    shares = share_out_in(step, NO_PADDING, 6)
    own = (shares.rank == shares.rank[5]) & (shares.microbatch == shares.microbatch[5])
    assert own.sum() == 1 and counts_of(shares, 4).max() == 1
