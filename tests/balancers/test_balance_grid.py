"""Groups and grids of ranks: balanced from local knowledge only, and the same plan as from all of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.distributions import DISTRIBUTIONS, LARGE_VISION_COST, omni_phases
from orchdata.balancers import (
    CostModel,
    balance_from,
    balance_grid,
    balance_grouped,
    balance_phases,
    grid_round,
    lower_bound,
)
from orchdata.bench import OMNI_COST

held_samples = st.tuples(st.integers(1, 10), st.integers(1, 4)).flatmap(
    lambda shape: st.tuples(
        st.just(shape[0]),
        st.just(shape[1]),
        st.lists(st.tuples(st.integers(0, 500), st.integers(0, shape[0] - 1)), max_size=60),
    )
)
Held = tuple[int, int, list[tuple[int, int]]]


class Rank:
    """What one rank knows: its own samples, and what it receives from the members of its row and column."""

    def __init__(self, rank: int, ranks_per_node: int, samples: NDArray[np.int64], costs: NDArray[np.int64]) -> None:
        self.node, self.column = divmod(rank, ranks_per_node)
        self.samples = samples
        self.sent = costs.astype(np.float32)


def two_rounds(costs: NDArray[np.int64], owner: NDArray[np.int64], num_ranks: int, ranks_per_node: int) -> list[int]:
    """The grid's plan, made by ranks that only hear their row, then their column; costs of samples, or by phase too."""
    present = costs.any(axis=1) if costs.ndim == 2 else costs > 0
    ranks = [
        Rank(rank, ranks_per_node, np.flatnonzero(present & (owner == rank)), costs[present & (owner == rank)])
        for rank in range(num_ranks)
    ]
    plan = [-1] * len(costs)
    after: list[Rank] = []
    for me in ranks:
        row = [rank for rank in ranks if rank.node == me.node]
        goes_to = grid_round([rank.sent for rank in row])  # Heard: 4-byte costs of the row, by who holds them.
        mine = [(member, goes == me.column) for member, goes in zip(row, goes_to, strict=True)]
        holding = Rank(me.node * ranks_per_node + me.column, ranks_per_node, me.samples, me.sent)
        holding.samples = np.concatenate([member.samples[chosen] for member, chosen in mine])
        holding.sent = np.concatenate([member.sent[chosen] for member, chosen in mine])
        after.append(holding)
    for me in after:
        column = [rank for rank in after if rank.column == me.column]
        goes_to = grid_round([rank.sent for rank in column])
        place = column.index(me)
        for sample, node in zip(me.samples.tolist(), goes_to[place].tolist(), strict=True):
            plan[sample] = node * ranks_per_node + me.column
    return plan


@given(held_samples)
def test_ranks_that_hear_only_row_and_column_find_the_same_plan(held: Held) -> None:
    num_ranks, ranks_per_node, samples = held
    costs = np.array([cost for cost, _ in samples], np.int64)
    owner = np.array([rank for _, rank in samples], np.int64)
    found = balance_grid(costs, owner, num_ranks, ranks_per_node)
    assert two_rounds(costs, owner, num_ranks, ranks_per_node) == found.rank.tolist()


@settings(max_examples=40)
@given(held_samples, st.integers(0, 99))
def test_ranks_that_hear_only_row_and_column_find_the_same_plan_by_phase(held: Held, seed: int) -> None:
    num_ranks, ranks_per_node, samples = held
    owner = np.array([rank for _, rank in samples], np.int64)
    image = np.array([cost for cost, _ in samples], np.int64)
    llm = np.random.default_rng(seed).integers(1, 300, len(samples))
    found = balance_grid({"image": image, "llm": llm}, owner, num_ranks, ranks_per_node)
    assert two_rounds(np.stack([image, llm], axis=1), owner, num_ranks, ranks_per_node) == found.rank.tolist()
    # Twice as many costs are heard as of one phase, and no more counts.
    counts = 4 * max(
        min(ranks_per_node, num_ranks - rank // ranks_per_node * ranks_per_node)
        + len(range(rank % ranks_per_node, num_ranks, ranks_per_node))
        for rank in range(num_ranks)
    )
    assert found.metadata_bytes <= counts + 4 * 2 * 2 * len(samples)


@given(held_samples)
def test_every_sample_once_and_what_a_rank_hears_is_counted(held: Held) -> None:
    num_ranks, ranks_per_node, samples = held
    costs = np.array([cost for cost, _ in samples], np.int64)
    owner = np.array([rank for _, rank in samples], np.int64)
    found = balance_grid(costs, owner, num_ranks, ranks_per_node)
    assert [r == -1 for r in found.rank] == [cost == 0 for cost in costs]
    assert found.loads.tolist() == [int(costs[found.rank == rank].sum()) for rank in range(num_ranks)]
    assert found.makespan >= found.lower_bound == lower_bound(costs, num_ranks)
    present = costs > 0
    ranks = np.arange(num_ranks)
    # A sample keeps its node in the first round, and its column in the second.
    heard = [
        4 * ((ranks // ranks_per_node == rank // ranks_per_node).sum())
        + 4 * (ranks % ranks_per_node == rank % ranks_per_node).sum()
        + 4 * (present & (owner // ranks_per_node == rank // ranks_per_node)).sum()
        + 4 * (present & (found.rank % ranks_per_node == rank % ranks_per_node)).sum()
        for rank in range(num_ranks)
    ]
    assert found.metadata_bytes == max(heard)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_grid_comes_close_to_balancing_all_ranks(name: str) -> None:
    costs = DISTRIBUTIONS[name](np.random.default_rng(3), 512 * 16)
    found = balance_grid(costs, np.arange(len(costs)) % 512, 512, 8)
    assert found.makespan <= found.lower_bound * 1.003


@pytest.mark.parametrize("cost", [OMNI_COST, LARGE_VISION_COST])
@pytest.mark.parametrize("num_ranks", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_by_phase_a_grid_comes_close_to_balancing_all_ranks_and_groups_to_balancing_them_from_scratch(
    num_ranks: int, cost: CostModel
) -> None:
    costs = omni_phases(np.random.default_rng(3), num_ranks * 32, cost)
    owner = np.arange(num_ranks * 32) // 32
    everywhere = sum(balance_phases(costs, num_ranks).makespans)
    summed = balance_grid(sum(costs.values()), owner, num_ranks, 8).rank  # type: ignore[arg-type]
    by_sum = sum(int(np.bincount(summed, weights=of_all).max()) for of_all in costs.values())
    grid = balance_grid(costs, owner, num_ranks, 8)
    assert sum(grid.makespans) <= everywhere * 1.05
    assert sum(grid.makespans) < by_sum
    assert grid.moved_cost_between < sum(int(of_all.sum()) for of_all in costs.values()) / 3  # Nodes keep the most.
    grouped = balance_grouped(costs, owner, num_ranks, 8)
    assert grouped.moved_cost_between == 0
    for first in range(0, num_ranks, 8):
        members = owner // 8 == first // 8
        alone = balance_phases({phase: of_all[members] for phase, of_all in costs.items()}, 8)
        assert grouped.loads[:, first : first + 8].max(axis=1).sum() <= 1.02 * sum(alone.makespans)


@given(held_samples)
def test_groups_are_balanced_alone_and_nothing_leaves_them(held: Held) -> None:
    num_ranks, group_size, samples = held
    costs = np.array([cost for cost, _ in samples], np.int64)
    owner = np.array([rank for _, rank in samples], np.int64)
    sizes = costs[::-1] + 1
    found = balance_grouped(costs, owner, num_ranks, group_size, sizes=sizes)
    assert found.moved_cost_between == 0
    bound = 0
    for first in range(0, num_ranks, group_size):
        mine = (owner >= first) & (owner < first + group_size)
        members = min(group_size, num_ranks - first)
        # Listed by holder, as the ranks of a group tell each other.
        listed = np.flatnonzero(mine)[np.argsort(owner[mine], kind="stable")]
        alone = balance_from(costs[listed], owner[listed] - first, members, sizes=sizes[listed])
        assert np.where(alone.rank >= 0, alone.rank + first, -1).tolist() == found.rank[listed].tolist()
        bound = max(bound, alone.lower_bound)
    assert found.lower_bound == bound


@pytest.mark.parametrize("function", [balance_grid, balance_grouped])
def test_errors_name_value_and_limit(function: object) -> None:
    for arguments, message in (
        (([1, 2], [0], 2, 1), r"owner must have one entry for each of the 2 costs, got shape \(1,\)"),
        (([1, 2], [0, 5], 2, 1), r"owner\[1\] is 5; it must be from 0 to 1"),
        (([1.5, 2], [0, 1], 2, 1), r"costs\[0\] is 1.5"),
        (([1, 2], [0, 1], 2, 0), "must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)  # type: ignore[operator]


def test_a_round_needs_a_member_and_whole_costs() -> None:
    with pytest.raises(ValueError, match="at least one member, got none"):
        grid_round([])
    with pytest.raises(ValueError, match=r"costs held by member 1\[0\] is 0.5"):
        grid_round([np.array([1.0]), np.array([0.5])])
    assert [goes.tolist() for goes in grid_round([[], [4, 4]])] == [[], [0, 1]]
    with pytest.raises(ValueError, match="costs of the same phases"):
        grid_round([np.ones((2, 2)), np.ones(2)])
