"""Tokens along an order, and where steps of so many tokens begin, against running sums over the whole epoch."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from listed_tokens import Listed
from numpy.typing import NDArray

from orchdata.order.order import Order, Shuffle, TokenSums
from orchdata.order.steps import Begin, TokenBatches

Ints = NDArray[np.int64]


def running(order: Order, counts: Listed, epoch: int) -> Ints:
    return np.cumsum(counts.tokens[order.rows(epoch, 0, order.num_samples)[1]])


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, Listed]:
    num_rows = draw(st.integers(1, 30) | st.integers(1, 4000))
    streams = st.integers(1, 7) if num_rows > 30 else st.integers(1, num_rows + 2) | st.just(320)
    shuffle = draw(st.none() | st.builds(Shuffle, window=st.integers(1, 6), streams=streams))
    excluded = np.array(sorted(draw(st.sets(st.integers(0, num_rows - 1), max_size=min(20, num_rows - 1)))), np.int64)
    order = Order(num_rows, shuffle=shuffle, seed=draw(st.integers(0, 1 << 70)), excluded=excluded)
    seed, largest = draw(st.integers(0, 1 << 30)), draw(st.sampled_from([1, 2, 5000]))
    return order, Listed(np.random.default_rng(seed).integers(1, largest + 1, num_rows))


@given(case=orders(), data=st.data())
def test_sums_are_those_of_the_whole_epoch(case: tuple[Order, Listed], data: st.DataObject) -> None:
    order, counts = case
    sums = TokenSums(order, counts)
    for epoch in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)):
        ends = running(order, counts, epoch)
        assert sums.total == ends[-1]
        tokens = data.draw(st.integers(0, int(ends[-1])))
        assert sums.position(epoch, tokens) == np.searchsorted(ends, tokens, side="right")
        position = data.draw(st.integers(0, order.num_samples))
        assert sums.before(epoch, position) == (ends[position - 1] if position else 0)


@pytest.mark.parametrize("num_samples", [3 * 256, 3 * 256 + 1, 3 * 512 + 2, 3 * 1408 + 1])
@pytest.mark.parametrize("window", [1, 2])
def test_streams_may_have_a_window_less_than_others(num_samples: int, window: int) -> None:
    order = Order(num_samples, shuffle=Shuffle(window=window, streams=3), seed=8)
    counts = Listed(np.random.default_rng(1).integers(1, 900, num_samples))
    ends = running(order, counts, 1)
    for position in range(num_samples, 0, -31):
        # Others each time, because a look-up begins with the span of the last one.
        assert TokenSums(order, counts).before(1, position) == ends[position - 1]
        assert TokenSums(order, counts).position(1, int(ends[position - 1])) == position
        assert TokenSums(order, counts).position(1, int(ends[position - 1]) - 1) == position - 1


@given(case=orders(), data=st.data())
def test_a_sample_belongs_to_the_step_its_last_token_falls_into(
    case: tuple[Order, Listed], data: st.DataObject
) -> None:
    order, counts = case
    largest = int(counts.tokens.max())
    budget = data.draw(st.integers(largest, 20 * largest))
    drop_last, epoch = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    batches = TokenBatches(sums=TokenSums(order, counts), budgets=((0, budget),), drop_last=drop_last)
    ends = running(order, counts, epoch)
    step_of = (ends - 1) // budget
    total = int(ends[-1])
    assert batches.count(order.num_samples, epoch) == (total // budget if drop_last else -(-total // budget))
    for step in range(batches.count(order.num_samples, epoch)):
        start, stop = batches.bounds(step, order.num_samples, epoch)
        assert np.array_equal(np.flatnonzero(step_of == step), np.arange(start, stop))
        assert stop > start
    with pytest.raises(IndexError, match="outside"):
        batches.bounds(batches.count(order.num_samples, epoch), order.num_samples, epoch)


@given(case=orders(), data=st.data())
def test_ramps_and_new_cuts_leave_out_nothing(case: tuple[Order, Listed], data: st.DataObject) -> None:
    order, counts = case
    largest, total = int(counts.tokens.max()), int(running(order, counts, 0)[-1])
    bounds = sorted(data.draw(st.sets(st.integers(1, 4 * total), max_size=4)))
    budgets = tuple((bound, data.draw(st.integers(largest, 9 * largest))) for bound in (0, *bounds))
    batches = TokenBatches(sums=TokenSums(order, counts), budgets=budgets)
    epoch = data.draw(st.integers(0, 3))
    begin = data.draw(st.none() | st.builds(Begin, st.integers(1, 50), st.integers(1, order.num_samples)))
    step, at = begin or (0, 0)
    ends = running(order, counts, epoch)
    for number in range(step, batches.count(order.num_samples, epoch, begin)):
        start, stop = batches.bounds(number, order.num_samples, epoch, begin)
        assert start == at < stop
        done = epoch * total + (int(ends[start - 1]) if start else 0)
        tokens = int(ends[stop - 1]) - (int(ends[start - 1]) if start else 0)
        # Samples that began before the cut may make the new budget hold one step earlier or later.
        applying = {size for bound, size in budgets if bound <= done + largest}
        assert tokens < max(applying) + largest
        at = stop
    assert at == order.num_samples


def test_a_budget_applies_from_the_first_cut_after_its_bound() -> None:
    order = Order(100, shuffle=None, seed=0)
    sums = TokenSums(order, Listed(np.ones(100, np.int64)))
    batches = TokenBatches(sums=sums, budgets=((0, 10), (25, 20), (170, 50)))
    first, second = (
        [batches.bounds(step, 100, epoch) for step in range(batches.count(100, epoch))] for epoch in (0, 1)
    )
    assert first == [(0, 10), (10, 20), (20, 30), (30, 50), (50, 70), (70, 90), (90, 100)]
    assert second == [(0, 20), (20, 40), (40, 60), (60, 80), (80, 100)]


def test_steps_in_turn_look_at_few_samples_and_keep_fewer() -> None:
    counts = Listed(np.full(2_000_000, 7, np.int64))
    order = Order(len(counts.tokens), shuffle=Shuffle(window=4), seed=1)
    batches = TokenBatches(sums=TokenSums(order, counts), budgets=((0, 7 * 64),))
    counts.asked = 0
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(3_000, 3_200):
        batches.bounds(step, order.num_samples)
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert counts.asked < 40 * 1024, "a step looks at the window that it is in"
    assert kept < 4_000_000
