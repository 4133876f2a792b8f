"""The order of an epoch: every sample once, from anywhere, evenly from the streams, bounded by the window."""

from __future__ import annotations

import itertools
import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from listed_tokens import Listed
from map_dataset import Numbers
from numpy.typing import NDArray
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.native.permutation import BLOCK
from orchdata.order.order import Order, Shuffle, TokenSums, shuffle_quality
from orchdata.order.steps import Begin, GlobalBatches, TokenBatches


def whole(order: Order, epoch: int = 0) -> NDArray[np.int64]:
    return order.rows(epoch, 0, order.num_samples)[1]


@given(data=st.data())
def test_any_slice_equals_the_same_slice_of_the_epoch(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 3000))
    shuffle = data.draw(
        st.none() | st.builds(Shuffle, window=st.integers(1, 9), streams=st.integers(1, 9) | st.just(num_rows + 3))
    )
    excluded = np.array(sorted(data.draw(st.sets(st.integers(0, num_rows - 1), max_size=20))), np.int64)
    order = Order(num_rows, shuffle=shuffle, seed=data.draw(st.integers(-5, 1 << 70)), excluded=excluded, source=3)
    epoch = data.draw(st.integers(0, 5))
    start = data.draw(st.integers(0, order.num_samples))
    stop = data.draw(st.integers(start, order.num_samples))

    rows = whole(order, epoch)
    assert np.array_equal(np.sort(rows), np.setdiff1d(np.arange(num_rows), excluded))
    datasets, got = order.rows(epoch, start, stop)
    assert np.array_equal(got, rows[start:stop])
    assert datasets.dtype == np.int32 and datasets.tolist() == [3] * (stop - start)


def test_no_shuffle_is_the_order_of_the_dataset_without_the_excluded() -> None:
    order = Order(6, shuffle=None, seed=0, excluded=np.array([0, 3]))
    assert whole(order).tolist() == [1, 2, 4, 5]
    assert order.num_samples == 4


def test_seeds_and_epochs_differ_and_repeat() -> None:
    sequences = [whole(Order(3000, shuffle=Shuffle(), seed=seed), epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for i, one in enumerate(sequences):
        for other in sequences[:i]:
            assert (one == other).mean() < 0.01  # 1/3000 expected by chance
    assert np.array_equal(whole(Order(3000, shuffle=Shuffle(), seed=1), 2), sequences[5])


@pytest.mark.parametrize("num_samples", [17, 1000, 4099])
@pytest.mark.parametrize("streams", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [1, 7, 24, 64])
def test_every_batch_takes_equal_shares_of_the_streams(num_samples: int, streams: int, batch: int) -> None:
    sizes = [len(range(s, num_samples, streams)) for s in range(streams)]
    assert max(sizes) - min(sizes) <= 1
    stream_of = np.repeat(np.arange(streams), sizes)  # streams are contiguous ranges of the rows
    sources = stream_of[whole(Order(num_samples, shuffle=Shuffle(window=2, streams=streams), seed=4))]
    for start in range(0, num_samples, batch):
        shares = np.bincount(sources[start : start + batch], minlength=streams)
        assert shares.max() - shares.min() <= 1


@pytest.mark.parametrize("window", [1, 4, 10])
@pytest.mark.parametrize("num_samples", [40 * BLOCK, 40 * BLOCK + 100])
def test_samples_in_the_air_are_bounded_by_the_window(num_samples: int, window: int) -> None:
    order = Order(num_samples, shuffle=Shuffle(window=window), seed=1)
    rows = whole(order)
    blocks, bounds = order.blocks(0), order.window_bounds()[0]
    sizes = np.minimum((blocks + 1) * BLOCK, num_samples) - blocks * BLOCK
    starts = np.append(0, np.cumsum(sizes))[bounds]
    assert np.diff(bounds).max() <= window
    for number, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        contained = blocks[bounds[number] : bounds[number + 1]]
        assert np.array_equal(np.unique(rows[start:stop] // BLOCK), np.sort(contained)), "a window has whole blocks"
    for start in range(0, num_samples - num_samples % BLOCK, window * BLOCK):
        assert np.unique(rows[start : start + window * BLOCK] // BLOCK).size <= 2 * window + 3


def test_up_to_one_window_is_a_uniform_permutation() -> None:
    from scipy.stats import chisquare  # a second

    num_samples, trials = 1000, 3000
    order = Order(num_samples, shuffle=Shuffle(), seed=0)
    rows = np.stack([whole(order, epoch) for epoch in range(trials)])
    for position in (0, 1, 255, 256, 511, 767, 768, 999):  # the partial block begins at 768
        assert chisquare(np.bincount(rows[:, position] // 10, minlength=100)).pvalue > 1e-4
    gap = (rows[:, 1] - rows[:, 0]) % num_samples
    assert chisquare(np.bincount((gap - 1) // 27, minlength=37)).pvalue > 1e-4
    distance = np.abs(rows - np.arange(num_samples)).mean() / num_samples
    assert distance == pytest.approx(1 / 3, abs=0.002)


def test_shuffle_quality_of_a_long_epoch() -> None:
    num_samples, batch = 2000 * 512, 512
    none = shuffle_quality(Order(num_samples, shuffle=None, seed=0), 0, batch)
    assert none == (0.0, 2.0)  # 512 consecutive rows are in two blocks of 256
    order = Order(num_samples, shuffle=Shuffle(), seed=0)
    default = shuffle_quality(order, 0, batch)
    assert default.mean_displacement == pytest.approx(1 / 3, abs=0.02)
    assert 60 < default.sources_per_batch < 2 * 64 + 3  # all 64 blocks of the window, most cut in two by the rotation
    shards = np.arange(num_samples) // 10_000
    assert shuffle_quality(order, 0, batch, source=shards).sources_per_batch > 40


def test_ten_million_samples_cost_what_a_step_costs() -> None:
    order = Order(10_000_000, shuffle=Shuffle(streams=8), seed=0, excluded=np.arange(0, 1000, dtype=np.int64) * 7)
    order.rows(0, 0, 1)
    tracemalloc.start()
    seconds = []
    for step in (0, 100, 243):
        begin = time.perf_counter()
        order.rows(3, step * 40_960, (step + 1) * 40_960)
        seconds.append(time.perf_counter() - begin)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 5 * 40_960 * 8
    assert min(seconds) < 0.05  # 4 ms here; slack for a busy machine


def test_describe_names_what_the_sequence_depends_on() -> None:
    def describe(seed: int = 0, shuffle: Shuffle | None = None, excluded: tuple[int, ...] = ()) -> str:
        return json.dumps(Order(10, shuffle=shuffle, seed=seed, excluded=np.array(excluded, np.int64)).describe())

    texts = [describe(), describe(0, Shuffle()), describe(1, Shuffle()), describe(0, Shuffle(streams=2))]
    texts += [describe(0, None, (1,))]
    texts.append(describe(0, None, (2,)))
    assert len(set(texts)) == len(texts)
    assert describe() == describe(1)  # without shuffling the seed has no effect


@pytest.mark.parametrize("name", ["window", "streams"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, 1 << 40])
def test_shuffle_refuses_what_is_not_a_count(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"Shuffle.{name} must be an integer"):
        Shuffle(**{name: value})  # type: ignore[arg-type]


# Samplers are drawn where the loader iterates: once an epoch, when it begins; a step's rows travel in its task.


class Counting:
    """Gives other indices each time, and counts the times."""

    def __init__(self) -> None:
        self.draws = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        self.draws += 1
        return iter(range(self.draws, self.draws + 5))


def test_a_sampler_is_drawn_once_an_epoch_and_not_before_it_begins() -> None:
    sampler = Counting()
    loader = od.DataLoader(Numbers(9), batch_size=2, sampler=sampler)
    assert sampler.draws == 0
    batches = iter(loader)
    assert sampler.draws == 0
    assert next(batches)["number"].tolist() == [1, 2] and sampler.draws == 1
    assert [batch["number"].tolist() for batch in loader] == [[2, 3], [4, 5], [6]]  # the next epoch
    assert [batch["number"].tolist() for batch in batches] == [[3, 4], [5]]  # its own rows
    assert sampler.draws == 2


@pytest.mark.parametrize(
    ("drop_last", "num_samples", "count", "last"),
    [(True, 14, 3, (8, 12)), (False, 14, 4, (12, 14)), (False, 13, 4, (12, 13)), (False, 12, 3, (8, 12))],
)
def test_global_batches_cut_an_epoch(drop_last: bool, num_samples: int, count: int, last: tuple[int, int]) -> None:
    batches = GlobalBatches(size=4, drop_last=drop_last)
    assert batches.count(num_samples) == count
    assert batches.bounds(count - 1, num_samples) == last
    for step in (-1, count):
        with pytest.raises(IndexError, match=f"step {step} is outside the epoch of {count} steps"):
            batches.bounds(step, num_samples)


# Tokens along an order, and where steps of so many tokens begin, against running sums over the whole epoch.


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


# An order of the user's own, and plans written as a table.


@pytest.fixture
def dataset(tmp_path: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=2, samples=15), RECIPE)
    dataset.index()
    return dataset


def loader_of(dataset: Any, rank: int = 0, ranks: int = 1, **options: Any) -> od.DataLoader:
    return od.DataLoader(dataset, dp=(rank, ranks), num_threads=0, **options)


def keys_of(loader: od.DataLoader) -> list[tuple[str, str]]:
    return [key for batch in loader for key in batch.sample_ids]


@pytest.mark.parametrize("size", [{"batch_size": 4}, {"global_batch_tokens": 600}])
def test_samples_come_in_the_order_of_an_array(dataset: od.ShardDataset, size: dict[str, int]) -> None:
    index = dataset.index()
    shortest_first = np.argsort(index.llm_tokens, kind="stable")[:25]
    wanted = [(index.shard_of(row).url, index.key(row)) for row in shortest_first.tolist()]
    loader = loader_of(dataset, shuffle=shortest_first, **size)
    assert [keys_of(loader) for _ in range(2)] == [wanted, wanted], "the same in each epoch"
    state = loader.state_dict()
    with pytest.raises(od.StateError, match="the order of your own, shuffle=array,"):
        loader_of(dataset, shuffle=shortest_first[::-1].copy(), **size).load_state_dict(state)
    left_out = [wanted[3]]
    assert keys_of(loader_of(dataset, shuffle=shortest_first, quarantine=left_out, **size)) == wanted[:3] + wanted[4:]
    workers = od.DataLoader(dataset, dp=(0, 1), num_workers=1, num_threads=1, shuffle=shortest_first, **size)
    assert keys_of(workers) == wanted


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.array([0, 1, 1]), "distinct rows"),
        (np.array([0.0, 1.0]), "distinct rows, integers"),
        (np.array([[0, 1]]), "distinct rows, integers"),
        (np.array([0, 30]), "names rows 0 to 30, and the index has 30"),
        (np.array([-1, 3]), "names rows -1 to 3"),
    ],
)
def test_what_is_no_order_is_refused(dataset: od.ShardDataset, rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loader_of(dataset, shuffle=rows)


def test_an_array_is_for_one_data_set_of_shards(dataset: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="use sampler="):
        od.DataLoader(Numbers(5), shuffle=np.arange(5))
    with pytest.raises(ValueError, match="the sources of a mixture are merged"):
        loader_of(od.Mixture({"a": od.Source(dataset)}), shuffle=np.arange(5))


def test_plans_are_written_as_they_are_delivered(dataset: od.ShardDataset, tmp_path: Path) -> None:
    mixture = od.Mixture(
        {"a": od.Source(dataset, weight=2), "b": od.Source(dataset)}, stop="repeat", epoch_tokens=6_000
    )
    options = {"global_batch_tokens": 900, "shuffle": True, "balance": od.Balance(max_tokens=400, oversize="own")}
    ours = [loader_of(mixture, rank, 2, **options) for rank in range(2)]
    rows = ours[0].export_plan(tmp_path / "plan.arrow", epochs=(0, 1))
    table = pa.ipc.open_file(tmp_path / "plan.arrow").read_all()
    assert table.num_rows == rows
    assert json.loads(table.schema.metadata[b"orchdata"])["num_ranks"] == 2
    written = {tuple(row.values()) for row in table.select(_COLUMNS).to_pylist()}
    delivered = {
        (epoch, batch.step, batch.plan.sources[source], *key, rank, batch.microbatch)
        for epoch in range(2)
        for rank, loader in enumerate(ours)
        for batch in loader
        for key, source in zip(batch.sample_ids, batch.sources.tolist(), strict=True)
    }
    assert written == delivered
    some = ours[0].export_plan(tmp_path / "some.arrow", steps=range(2, 4))
    again = pa.ipc.open_file(tmp_path / "some.arrow").read_all()
    assert some == again.num_rows
    assert set(again["step"].to_pylist()) == {2, 3}
    with pytest.raises(ValueError, match="it needs an od.ShardDataset"):
        od.DataLoader(Numbers(5)).export_plan(tmp_path / "none.arrow")


_COLUMNS = ["epoch", "step", "source", "shard", "key", "rank", "microbatch"]
