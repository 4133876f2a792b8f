"""Teams: aligned, complete, within caps, near the bound and the best of every plan; loads are counted again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.teams import (
    OTHERS,
    POWERS,
    TeamsBench,
    against_flexsp,
    best_of_every_plan,
    lists,
    member_loads,
    over_bound,
    partitions_of,
    sizes_of,
    steps,
    team_costs,
)
from orchdata.balancers import TeamAssignment, balance, balance_teams

Ints = NDArray[np.int64]


def check(costs: Ints, found: TeamAssignment, num_ranks: int) -> None:
    """Every sequence once, in a team that is aligned and inside the ranks, and loads that add up."""
    assert found.size.dtype == found.rank.dtype == np.int32 and found.loads.dtype == np.int64
    assert found.size.shape == found.rank.shape == (len(costs),) and found.loads.shape == (num_ranks,)
    placed = found.rank >= 0
    assert (costs[~placed, 0] == 0).all() and (found.size[~placed] == 1).all()
    assert (found.rank[placed] % found.size[placed] == 0).all(), "a team is not aligned"
    assert (found.rank + found.size <= num_ranks).all()
    assert member_loads(costs, found, num_ranks).tolist() == found.loads.tolist(), "loads do not add up"
    assert found.makespan == found.loads.max() >= found.lower_bound


def halved(lengths: Sequence[int] | Ints, num_sizes: int) -> Ints:
    """Squares, shared without loss."""
    return -(-(np.asarray(lengths, np.int64)[:, None] ** 2) // (1 << np.arange(num_sizes)))


tables = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 99), min_size=width, max_size=width), min_size=1, max_size=24)
)


@given(tables, st.integers(1, 20))
def test_any_costs_give_a_plan_of_aligned_teams(rows: list[list[int]], num_ranks: int) -> None:
    costs = np.array(rows, np.int64)
    found = balance_teams(costs, num_ranks)
    check(costs, found, num_ranks)
    again = balance_teams(costs, num_ranks)
    assert (again.size.tolist(), again.rank.tolist()) == (found.size.tolist(), found.rank.tolist())
    assert found.makespan <= balance(costs[:, 0], num_ranks).makespan


def two_members(found: TeamAssignment) -> TeamAssignment:
    """The first sequence also counts on the rank after its team."""
    loads = found.loads.copy()
    loads[found.rank[0] + found.size[0]] += 1
    return replace(found, loads=loads, makespan=int(loads.max()))


@pytest.mark.parametrize("wrong", [two_members, lambda found: replace(found, rank=found.rank + found.size // 2)])
def test_a_wrong_plan_is_noticed(wrong: Callable[[TeamAssignment], TeamAssignment]) -> None:
    costs = halved([90, 20, 10, 10], 2)
    found = balance_teams(costs, 4)
    check(costs, found, 4)
    assert found.size.max() == 2
    with pytest.raises(AssertionError):
        check(costs, wrong(found), 4)


@pytest.mark.parametrize("name", [*lists(), "random"])
def test_close_to_the_best_of_every_plan(name: str) -> None:
    """40 cases a list of 6 sequences on 8 ranks, and costs without any rule; none is below the best."""
    ratios = []
    for seed in range(40):
        generator = np.random.default_rng(seed)
        if name == "random":
            costs = -np.sort(-generator.integers(1, 1000, (6, 4)), axis=1)
        else:
            costs = team_costs(-np.sort(-lists()[name](generator, 6)), sizes_of(8))
        found = balance_teams(costs, 8)
        check(costs, found, 8)
        best = best_of_every_plan(costs, 8, found.makespan + 1)
        assert found.lower_bound <= best <= found.makespan
        ratios.append(found.makespan / best)
    assert np.mean(ratios) <= 1.05 and max(ratios) <= 1.2


@pytest.mark.slow
def test_largest_loads_are_near_the_bound() -> None:
    """600 random cases of 8 to 16 samples a rank, and 600 of 1 to 8 and of equal lengths."""
    powers, others = (over_bound(TeamsBench(seed=1), ranks) for ranks in (POWERS, OTHERS))
    assert powers.mean() <= 1.005 and powers.max() <= 1.03
    assert others.mean() <= 1.02 and others.max() <= 1.25
    few = over_bound(TeamsBench(seed=1), POWERS + OTHERS, few=True)
    assert few.mean() <= 1.03 and (few > 1.15).mean() <= 0.02


@pytest.mark.usefixtures("fixtures_dir")
def test_steps_of_real_lengths() -> None:
    """Wikipedia and books, 64 and 512 ranks: near the mean of whole sequences, where these reach 3 to 23 times it."""
    _, results = steps(TeamsBench(seeds=2))
    loads = [result for result in results if result.unit == "x"]
    assert len(loads) == 4 and all(result.met for result in loads), loads


@pytest.mark.usefixtures("fixtures_dir")
def test_never_slower_than_every_partition_by_published_costs() -> None:
    assert len(partitions_of(64, sizes_of(64))) == 1828
    assert against_flexsp(TeamsBench(batches=8), lists()["Wikipedia"]).max() <= 1.0


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 13), st.integers(10, 60))
def test_slices_keep_their_cap(lengths: list[int], num_ranks: int, cap: int) -> None:
    tokens, width = np.array(lengths), num_ranks.bit_length()
    costs = halved(lengths, width)
    most = cap << (width - 1)
    if max(lengths) > most:
        with pytest.raises(ValueError, match=rf"has {max(lengths)} tokens, but the largest team of .* holds {most}"):
            balance_teams(costs, num_ranks, tokens=tokens, max_tokens=cap)
    else:
        found = balance_teams(costs, num_ranks, tokens=tokens, max_tokens=cap)
        check(costs, found, num_ranks)
        assert (-(-tokens // found.size) <= cap).all()


def test_no_rank_is_idle_for_a_large_team() -> None:
    costs = halved([2000, *[100] * 400], 6)
    for num_ranks, largest in ((36, 32), (6, 4), (7, 4)):
        found = balance_teams(costs, num_ranks)
        check(costs, found, num_ranks)
        assert (found.size[0], found.rank[0]) == (largest, 0)
        assert found.loads.min() > 0.95 * found.makespan


def test_members_have_whole_sequences_besides() -> None:
    found = balance_teams(halved([130, *[10] * 60], 4), 4)
    assert (found.size[0], found.rank[0]) == (4, 0)
    assert np.bincount(found.rank[1:], minlength=4).tolist() == [15] * 4


def test_nothing_shared_is_balance_to_the_bit() -> None:
    lengths = np.random.default_rng(0).integers(50, 100, 640)
    whole = np.stack([lengths * lengths] * 5, axis=1)  # a team would pay as much
    for costs, num_ranks in ((halved(lengths, 5), 24), (whole, 1000)):
        found, alone = balance_teams(costs, num_ranks), balance(costs[:, 0], num_ranks)
        assert found.size.tolist() == [1] * 640
        assert found.rank.tolist() == alone.rank.tolist() and found.loads.tolist() == alone.loads.tolist()


def test_plans_are_pinned() -> None:
    lengths = np.rint(np.exp(np.linspace(4, 11, 900))).astype(np.int64)
    parts = []
    for num_ranks in (8, 36, 64):
        capped = balance_teams(halved(lengths, 6), num_ranks, tokens=lengths, max_tokens=10_000)
        for found in (balance_teams(halved(lengths, 6), num_ranks), capped):
            parts += [found.size.astype("<i4").tobytes(), found.rank.astype("<i4").tobytes()]
    assert hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest() == "a82cd1418b89835d"


def test_extremes() -> None:
    assert balance_teams(np.empty((0, 3), np.int64), 2).loads.tolist() == [0, 0]
    huge = np.array([[1 << 59, 1 << 58, 1 << 57], [3, 3, 3], [1 << 57, 1 << 56, 1 << 55]])
    check(huge, balance_teams(huge, 4), 4)
    some = balance_teams([[64, 16], [1, 1]], 8, sizes=[1, 4])
    assert (some.size.tolist(), some.makespan) == ([4, 1], 16)


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        ([1, 2], {}, r"a row for each sequence and a column for each size, got \(2,\)"),
        ([[1, -2]], {}, r"costs\[:, 1\]\[0\] is -2; it must be at least 0"),
        ([[1 << 60, 1 << 60, 1], [1, 1, 1]], {}, r"costs sum to more than 2\*\*62 in teams of 4: scale them down"),
        (
            [[4, 2]],
            {"sizes": [1, 3]},
            r"sizes must be ascending powers of two from 1, one for each of 2 columns .* \[1, 3\]",
        ),
        ([[4, 2]], {"sizes": [2, 4]}, "sizes must be ascending powers of two from 1"),
        ([[4, 2]], {"tokens": [4]}, "tokens and max_tokens go together"),
        (
            [[4, 2]],
            {"tokens": [4, 4], "max_tokens": 2},
            "tokens must have one entry for each of the 1 sequences, got 2",
        ),
        (
            [[4, 2], [9, 5]],
            {"tokens": [4, 9], "max_tokens": 4},
            "sequence 1 has 9 tokens, but the largest team of 2 ranks holds 8",
        ),
    ],
)
def test_refused(costs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_teams(costs, 2, **options)
