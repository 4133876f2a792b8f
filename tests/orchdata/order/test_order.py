"""The order of an epoch: every sample once, from anywhere, evenly from the streams, bounded by the window."""

from __future__ import annotations

import itertools
import json
import pickle
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from map_dataset import Numbers
from numpy.typing import NDArray
from scipy.stats import chisquare

import orchdata as od
from orchdata.native.permutation import BLOCK
from orchdata.order.order import Order, Shuffle, shuffle_quality
from orchdata.order.steps import GlobalBatches, StepTask


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
    default = shuffle_quality(Order(num_samples, shuffle=Shuffle(), seed=0), 0, batch)
    assert default.mean_displacement == pytest.approx(1 / 3, abs=0.02)
    assert 60 < default.sources_per_batch < 2 * 64 + 3  # all 64 blocks of the window, most cut in two by the rotation
    shards = np.arange(num_samples) // 10_000
    assert (
        shuffle_quality(Order(num_samples, shuffle=Shuffle(), seed=0), 0, batch, source=shards).sources_per_batch > 40
    )


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


def test_another_process_gets_the_rows_and_never_the_sampler() -> None:
    loader = od.DataLoader(Numbers(9), batch_size=2, sampler=Counting(), cost=[1] * 9)
    spec = pickle.dumps(loader._runtime.prepared.spec)
    assert b"Counting" in spec and b"draws" not in spec  # its name, for errors
    task = next(loader._runtime.prepared.steps.tasks(0, 1, None, again=False))
    assert task.step == 1 and task.rows is not None and task.rows.tolist() == [3, 4]
    builder = pickle.loads(spec).open()
    assert builder.build(pickle.loads(pickle.dumps(task))).batches[0]["number"].tolist() == [3, 4]
    with pytest.raises(ValueError, match="Counting is drawn where the loader iterates: give the StepTask its rows"):
        builder.build(StepTask(0, 1))


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
