"""The kernels that deal items into bins against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.microbatches.micro_steps import (
    KEY_BITS,
    LEVELS,
    bins_cost,
    deal_cells,
    descending_floats,
    first_fit,
    pack_in_orders,
    packing_orders,
    relink,
)

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

Table = list[list[int]]
items = st.tuples(st.integers(1, 3), st.integers(1, 2)).flatmap(
    lambda wide: st.lists(
        st.tuples(
            st.tuples(*[st.one_of(st.just(0), st.integers(0, 300))] * wide[0]),
            st.tuples(*[st.one_of(st.just(0), st.integers(0, 40))] * wide[1]),
        ),
        min_size=1,
        max_size=24,
    )
)
Items = list[tuple[tuple[int, ...], tuple[int, ...]]]


def arrays(given_items: Items) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Costs (num_items, num_phases) and sizes (num_items, num_caps)."""
    costs, sizes = zip(*given_items, strict=True)
    return np.array(costs, np.int64), np.array(sizes, np.int64)


def descending_twin(values: list[float]) -> list[int]:
    largest, scale = max(values, default=0.0), float((1 << KEY_BITS) - 1)
    keys = [int(value / largest * scale) if largest > 0 else 0 for value in values]
    return sorted(range(len(values)), key=lambda item: -keys[item])


def orders_twin(costs: Table, sizes: Table, primary: int) -> list[list[int]]:
    phases = range(len(costs[0]))
    totals = [sum(row[p] for row in costs) for p in phases]
    by_phase = [descending_twin([float(row[p]) for row in costs]) for p in phases]
    ways = [[p] for p in phases]
    if len(phases) > 2:
        ways.append([p for p in sorted(phases, key=lambda p: -totals[p]) if p != primary])
    found = []
    for way in ways:
        order: dict[int, None] = {}  # Kept from the first time.
        for p in way:
            order |= dict.fromkeys(item for item in by_phase[p] if costs[item][p] > 0 or p == primary)
        found.append(list(order | dict.fromkeys(by_phase[primary])))
    found.append(descending_twin([sum(row) / max(1, size[0]) for row, size in zip(costs, sizes, strict=True)]))
    if len(phases) > 1:
        found.append(descending_twin([max(row[p] / max(1, totals[p]) for p in phases) for row in costs]))
    return found


def first_fit_twin(order: list[int], sizes: Table, limits: list[int], num_bins: int) -> list[int]:
    loads = [[0] * len(limits) for _ in range(num_bins)]
    bins = [-1] * len(order)
    for item in order:
        room = [
            b
            for b in range(num_bins)
            if all(load + size <= limit for load, size, limit in zip(loads[b], sizes[item], limits, strict=True))
        ]
        emptiest = min(range(num_bins), key=lambda b: max(x / y for x, y in zip(loads[b], limits, strict=True)))
        bins[item] = room[0] if room else emptiest
        loads[bins[item]] = [load + size for load, size in zip(loads[bins[item]], sizes[item], strict=True)]
    return bins


def bins_cost_twin(costs: Table, bins: list[int], num_bins: int, ranks_per_bin: int) -> int:
    total = 0
    for b in range(num_bins):
        inside = [row for row, bin_ in zip(costs, bins, strict=True) if bin_ == b]
        for p in range(len(costs[0])):
            held = [row[p] for row in inside]
            total += max(max(held, default=0), -(-sum(held) // ranks_per_bin))
    return total


def deal_twin(
    order: list[int], sizes: Table, caps: list[int], room: list[int], num_bins: int, num_ranks: int
) -> tuple[list[int], list[int]]:
    """Bin and rank of each. Ranks of a level stand in a list, the one that was given something last in front."""
    loads = [[[0] * len(caps) for _ in range(num_ranks)] for _ in range(num_bins)]
    levels = [[list(range(num_ranks)), *([] for _ in range(LEVELS))] for _ in range(num_bins)]
    bins, rank = [-1] * len(order), [-1] * len(order)
    for item in order:
        size = sizes[item]
        highest = min(max(0, cap - own) * LEVELS // cap for cap, own in zip(caps, size, strict=True))
        for b in range(num_bins):
            held = [sum(of_rank[k] for of_rank in loads[b]) for k in range(len(caps))]
            if any(held[k] + size[k] > room[k] for k in range(len(caps))):
                continue
            ways = [step for step in range(highest, -1, -1) if levels[b][step]]
            ways = [step for step in ways if fits(loads[b][levels[b][step][0]], size, caps)]
            if not ways:
                continue
            r = levels[b][ways[0]].pop(0)
            loads[b][r] = [load + own for load, own in zip(loads[b][r], size, strict=True)]
            full = max(-(-load * LEVELS // cap) for load, cap in zip(loads[b][r], caps, strict=True))
            levels[b][max(1, min(LEVELS, full))].insert(0, r)
            bins[item], rank[item] = b, r
            break
    return bins, rank


def fits(load: list[int], size: list[int], caps: list[int]) -> bool:
    return all(held + own <= cap for held, own, cap in zip(load, size, caps, strict=True))


@given(st.lists(st.integers(0, 2**40), max_size=30))
def test_floats_are_sorted_as_their_twin_does(values: list[int]) -> None:
    found = descending_floats(np.array(values, np.float64))
    assert found.tolist() == descending_twin([float(value) for value in values])


@given(items, st.data())
def test_orders_equal_their_twins_and_hold_every_item(given_items: Items, data: st.DataObject) -> None:
    costs, sizes = arrays(given_items)
    primary = data.draw(st.integers(0, costs.shape[1] - 1))
    orders = packing_orders(costs, sizes, primary)
    assert orders.tolist() == orders_twin(costs.tolist(), sizes.tolist(), primary)
    for order in orders:
        assert sorted(order.tolist()) == list(range(len(costs)))


@given(items, st.integers(1, 5), st.integers(1, 120), st.randoms())
def test_first_fit_equals_its_twin(given_items: Items, num_bins: int, limit: int, random: object) -> None:
    _, sizes = arrays(given_items)
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    limits = [limit, 60][: sizes.shape[1]]
    bins = np.empty(len(sizes), np.int32)
    first_fit(np.array(order, np.int32), sizes, np.array(limits, np.int64), num_bins, bins)
    assert bins.tolist() == first_fit_twin(order, sizes.tolist(), limits, num_bins)


@given(items, st.integers(1, 5), st.integers(1, 4))
def test_the_orders_are_packed_and_priced_as_their_twins(given_items: Items, num_bins: int, ranks_per_bin: int) -> None:
    costs, sizes = arrays(given_items)
    orders = packing_orders(costs, sizes, costs.shape[1] - 1)
    limits = np.full(sizes.shape[1], 50, np.int64)
    packed, taken = pack_in_orders(orders, costs, sizes, limits, num_bins, ranks_per_bin)
    for order, bins, cost in zip(orders, packed, taken, strict=True):
        assert bins.tolist() == first_fit_twin(order.tolist(), sizes.tolist(), limits.tolist(), num_bins)
        assert cost == bins_cost_twin(costs.tolist(), bins.tolist(), num_bins, ranks_per_bin)
        assert cost == bins_cost(costs, bins, num_bins, ranks_per_bin)


def test_a_bin_takes_its_largest_item_or_an_even_share() -> None:
    costs = np.array([[100, 1], [20, 9], [0, 50]], np.int64)
    # Bin 0: 100 (more than 120 / 2), and 9 (more than 10 / 2); bin 1: none, and 50.
    assert bins_cost(costs, np.array([0, 0, 1], np.int32), 2, 2) == 100 + 9 + 0 + 50
    assert bins_cost(costs, np.array([0, 0, 1], np.int32), 2, 1) == 120 + 10 + 0 + 50


@given(items, st.integers(1, 4), st.integers(1, 6), st.integers(20, 90), st.integers(1, 4), st.randoms())
def test_dealing_into_cells_equals_its_twin_within_all_caps(
    given_items: Items, num_bins: int, num_ranks: int, cap: int, quarters: int, random: object
) -> None:
    _, sizes = arrays(given_items)
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    caps = np.array([cap, 45][: sizes.shape[1]], np.int64)
    room = caps * num_ranks * quarters // 4
    bins, rank = np.empty((2, len(sizes)), np.int32)
    left = deal_cells(np.array(order, np.int32), sizes, caps, room, num_bins, num_ranks, bins, rank)
    twin = deal_twin(order, sizes.tolist(), caps.tolist(), room.tolist(), num_bins, num_ranks)
    assert (bins.tolist(), rank.tolist()) == twin
    assert left == (bins < 0).sum() == (rank < 0).sum()
    dealt = bins >= 0
    cells = np.zeros((num_bins, num_ranks, len(caps)), np.int64)
    np.add.at(cells, (bins[dealt], rank[dealt]), sizes[dealt])
    assert (cells <= caps).all()
    assert (cells.sum(axis=1) <= room).all()


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30))
def test_ranks_change_between_the_lists_of_their_levels(num_ranks: int, moves: list[tuple[int, int]]) -> None:
    lists: list[list[int]] = [list(range(num_ranks)), [], [], []]
    heads = np.array([0, -1, -1, -1], np.int32)
    after = np.append(np.arange(1, num_ranks), -1).astype(np.int32)
    before = np.arange(-1, num_ranks - 1).astype(np.int32)
    for rank, new in moves:
        if rank >= num_ranks:
            continue
        old = next(level for level in range(4) if rank in lists[level])
        relink(heads, after, before, rank, old, new)
        lists[old].remove(rank)
        lists[new].insert(0, rank)
        for level, expected in enumerate(lists):
            found, at = [], heads[level]
            while at >= 0:
                assert before[at] == (found[-1] if found else -1)
                found.append(int(at))
                at = after[at]
            assert found == expected
