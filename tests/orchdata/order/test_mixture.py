"""The order of a mixture against a plain merge, sample by sample; its shares, stages and memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixture_cases import periods_of, sources_of

from orchdata.order.merge import Stage, Stop, Stretch
from orchdata.order.mixture import MixtureOrder, SourcePass, StretchStart
from orchdata.order.order import By, MixedSource, Shuffle


class Taken(NamedTuple):
    source: int
    number: int
    row: int
    tokens: int
    stream: int


def plain_pass(order: MixtureOrder, number: int, given_before: int) -> Iterator[Taken]:
    """Yield one pass, a sample at a time: the next sample has the smallest virtual time."""
    endless = order.stop == "repeat"
    queues = [plain_source(source, number, endless) for source in order.sources]
    waiting = [next(queue, None) for queue in queues]
    amount, stage, base = given_before, -1, [0] * len(queues)
    given, delays = [0] * len(queues), [0] * len(queues)
    while True:
        # A pass ends if its sources are exhausted where another stage begins: that stage does not begin.
        if stage >= 0 and has_ended(order, stage, waiting):
            return
        now = max(stage_number for stage_number, each in enumerate(order.stages) if each.bound <= amount)
        if now != stage:
            stage, base = now, list(given)
            delays = plain_delays(order, order.stages[stage].periods)
            if has_ended(order, stage, waiting):
                return
        periods = order.stages[stage].periods
        best = None
        for source, sample in enumerate(waiting):
            if sample is not None and periods[source]:
                size = sample.tokens if order.by == "tokens" else 1
                time = (given[source] + size - base[source]) * periods[source] + delays[source], source
                best = time if best is None else min(best, time)
        assert best is not None
        source = best[1]
        sample = waiting[source]
        assert sample is not None
        size = sample.tokens if order.by == "tokens" else 1
        given[source] += size
        amount += size
        waiting[source] = next(queues[source], None)
        yield sample


def has_ended(order: MixtureOrder, stage: int, waiting: list[Taken | None]) -> bool:
    """Whether a lap gives nothing more in a stage."""
    if order.stop == "repeat":
        return False
    out = [waiting[source] is None for source, period in enumerate(order.stages[stage].periods) if period]
    return all(out) or (order.stop == "first" and any(out))


def plain_delays(order: MixtureOrder, periods: tuple[int, ...]) -> list[int]:
    """The k-th of n sources that give something is k/n of its mean sample ahead."""
    ahead, numbers = [0] * len(periods), [number for number, period in enumerate(periods) if period]
    for k, number in enumerate(numbers):
        tokens = order.sources[number].counts.tokens  # type: ignore[attr-defined]
        mean = int(tokens.sum()) // len(tokens) if order.by == "tokens" else 1
        ahead[number] = periods[number] * mean * k // len(numbers)
    return [max(ahead) - each for each in ahead]


def plain_source(source: MixedSource, number: int, endless: bool) -> Iterator[Taken]:
    while True:
        _, rows = source.order.rows(number, 0, source.order.num_samples)
        tokens = source.counts(rows)
        for position, (row, count) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            stream = position % source.order.streams
            yield Taken(source.order.source, number, source.first_row + row, count, stream)
        if not endless:
            return
        number += 1


def plain_epochs(order: MixtureOrder, num_epochs: int) -> list[list[Taken]]:
    epochs: list[list[Taken]] = []
    if order.epoch_size is None:
        for epoch in range(num_epochs):
            given_before = sum(sample.tokens if order.by == "tokens" else 1 for each in epochs for sample in each)
            epochs.append(list(plain_pass(order, epoch, given_before)))
        return epochs
    unit, size = order.epoch_size
    run, amount = plain_pass(order, 0, 0), 0
    for epoch in range(num_epochs):
        epochs.append([])
        while amount < (epoch + 1) * size:
            epochs[-1].append(next(run))
            amount += epochs[-1][-1].tokens if unit == "tokens" else 1
    return epochs


@st.composite
def mixtures(draw: st.DrawFn, *, one_stage: bool = False) -> MixtureOrder:
    num_sources = draw(st.integers(1, 4))
    sizes = st.integers(1, 12) | st.integers(1, 600)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    lengths = [rng.integers(1, draw(st.sampled_from([1, 3, 4000])) + 1, draw(sizes)) for _ in range(num_sources)]
    total = sum(int(each.sum()) for each in lengths)
    streams = st.integers(1, 5) | st.just(64)
    shuffle = draw(st.none() | st.builds(Shuffle, window=st.integers(1, 3), streams=streams))
    by: By = draw(st.sampled_from(["tokens", "samples"]))
    stop: Stop = draw(st.sampled_from(["first", "all", "repeat"]))
    weights = st.lists(st.integers(0, 1 << 18), min_size=num_sources, max_size=num_sources).filter(any)
    bounds = sorted(draw(st.sets(st.integers(1, 2 * total), max_size=3)))
    stages = [Stage(bound, periods_of(draw(weights))) for bound in ((0,) if one_stage else (0, *bounds))]
    epoch_size: tuple[By, int] | None = None
    if stop == "repeat":
        epoch_size = draw(st.sampled_from(["tokens", "samples"])), draw(st.integers(1, 500))
        if epoch_size[0] == "tokens":
            epoch_size = "tokens", -(-epoch_size[1] // 50) * max(int(each.max()) for each in lengths)
    return MixtureOrder(sources_of(lengths, shuffle), stages, by=by, stop=stop, epoch_size=epoch_size)


@given(order=mixtures(one_stage=True), data=st.data())
@settings(max_examples=25, deadline=None)
def test_one_stage_is_the_merge_by_virtual_times(order: MixtureOrder, data: st.DataObject) -> None:
    expected = plain_epochs(order, 3)
    for epoch in data.draw(st.permutations(range(3))):
        mine = expected[epoch]
        ends = np.cumsum([sample.tokens for sample in mine], dtype=np.int64)
        assert order.length(epoch) == len(mine)
        assert order.of_epoch(epoch) == sum(sample.tokens for sample in mine)
        assert order.of_epochs_before(epoch) == sum(sample.tokens for each in expected[:epoch] for sample in each)
        for _ in range(3):
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(mine))] * 2)))
            columns = (each.tolist() for each in order.samples(epoch, start, stop) if each is not None)
            assert list(zip(*columns, strict=True)) == [
                (sample.source, sample.row, sample.stream, sample.number) for sample in mine[start:stop]
            ]
            assert order.before(epoch, start) == (int(ends[start - 1]) if start else 0)
            tokens = data.draw(st.integers(0, order.of_epoch(epoch)))
            assert order.position(epoch, tokens) == np.searchsorted(ends, tokens, side="right")


@given(order=mixtures(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_part_of_an_epoch_is_found_alone(order: MixtureOrder, data: st.DataObject) -> None:
    """In stages too: each (source, pass, row) comes once, and any span is that of the whole epoch."""
    epoch = data.draw(st.integers(0, 2))
    length = order.length(epoch)
    source, row, _, passes, *_ = order.samples(epoch, 0, length)
    assert passes is not None
    assert len(set(zip(source.tolist(), passes.tolist(), row.tolist(), strict=True))) == length
    sizes = np.concatenate([each.counts.tokens for each in order.sources])[row]  # type: ignore[attr-defined]
    ends = np.cumsum(sizes)
    alone = order.restaged(order.stages)
    for _ in range(3):
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2)))
        for one, whole in zip(alone.rows(epoch, start, stop), (source, row), strict=True):
            assert np.array_equal(one, whole[start:stop])
        assert alone.before(epoch, start) == (int(ends[start - 1]) if start else 0)
        tokens = data.draw(st.integers(0, alone.of_epoch(epoch)))
        assert alone.position(epoch, tokens) == np.searchsorted(ends, tokens, side="right")


@given(order=mixtures(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_other_weights_from_a_place_on_repeat_nothing(order: MixtureOrder, data: st.DataObject) -> None:
    """A run continues with other weights."""
    epoch = data.draw(st.integers(0, 2))
    at = data.draw(st.integers(0, order.length(epoch)))
    progress = order.progress_at(epoch, at)
    weights = st.lists(st.integers(1, 1 << 18), min_size=len(order.sources), max_size=len(order.sources))
    start = StretchStart(progress, order.due(epoch, progress)) if progress.position else None
    resumed = order.resumed_at(epoch, progress)._replace(stretch_start=start, is_changed=True)
    changed = order.restaged([Stage(0, periods_of(data.draw(weights)))], resumed)
    length = changed.length(epoch)
    assert length >= at
    taken = [
        each
        for source, stop in ((order, at), (changed, length))
        for start in [0 if source is order else at]
        for each in zip(*(each for each in source.samples(epoch, start, stop) if each is not None), strict=True)
    ]
    assert len(set(taken)) == len(taken) == length


@pytest.mark.parametrize("by", ["tokens", "samples"])
@pytest.mark.parametrize("stop", ["all", "repeat"])
def test_shares_hold_in_any_window(by: By, stop: Stop) -> None:
    """Within 0.5 %, or two of the longest samples over the window, of the sources still present."""
    rng = np.random.default_rng(3)
    lengths = [rng.integers(1, 3000, 20_000), rng.geometric(1 / 40, 60_000), rng.integers(1, 9000, 300)]
    weights = [0.5, 0.3, 0.2]
    periods = tuple(round((1 << 16) * 0.5 / weight) for weight in weights)
    size: Any = ("tokens", 30_000_000) if stop == "repeat" else None
    order = MixtureOrder(sources_of(lengths, Shuffle(window=8)), [Stage(0, periods)], by=by, stop=stop, epoch_size=size)
    length = order.length(0)
    source, row = order.rows(0, 0, length)
    sizes = np.concatenate(lengths)[row] if by == "tokens" else np.ones(length, np.int64)
    given = np.stack([np.cumsum(sizes * (source == each)) for each in range(3)], axis=1)
    last = [int(np.flatnonzero(source == each)[-1]) if stop == "all" else length for each in range(3)]
    for _ in range(300):
        start, end = np.sort(rng.integers(0, length, 2))
        if stop == "all":  # within one set of sources
            end = min([end, *(at for at in last if at > start)])
        window = given[end] - given[start]
        total = int(window.sum())
        present = np.array([weight if at > start else 0.0 for weight, at in zip(weights, last, strict=True)])
        if total and present.any():
            allowed = max(0.005, 2 * (9000 if by == "tokens" else 1) / total)
            assert np.abs(window / total - present / present.sum()).max() <= allowed


@pytest.mark.parametrize("stop", ["all", "repeat"])
def test_a_source_that_hardly_ever_comes_stays_exact(stop: Stop) -> None:
    """Virtual times beyond 64 bits: Python's integers take over."""
    rng = np.random.default_rng(1)
    lengths = [rng.integers(1, 1 << 20, 40), rng.integers(1, 1 << 20, 30)]
    stages = [Stage(0, (1 << 16, 1 << 48))]
    size: Any = ("samples", 90) if stop == "repeat" else None
    order = MixtureOrder(sources_of(lengths), stages, stop=stop, epoch_size=size)
    (expected,) = plain_epochs(order, 1)
    source, row = order.rows(0, 0, order.length(0))
    assert list(zip(source.tolist(), row.tolist(), strict=True)) == [(each.source, each.row) for each in expected]


def test_threads_that_look_for_stages_at_once_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = sources_of([np.full(900, 3), np.full(700, 5)], Shuffle())
    stages = [Stage(0, (1 << 16, 1 << 16)), Stage(2_000, (1 << 16, 4 << 16)), Stage(4_000, (9 << 16, 1 << 16))]
    order, alone = (MixtureOrder(sources, stages, stop="repeat", epoch_size=("tokens", 9_000)) for _ in range(2))
    has_looked, goes_on, after = threading.Event(), threading.Event(), SourcePass._after

    def found_late(source_pass: SourcePass, last: Stretch) -> Stretch | None:
        result = after(source_pass, last)
        if threading.current_thread() is late and not has_looked.is_set():
            has_looked.set()
            assert goes_on.wait(60)
        return result

    late = threading.Thread(target=order.length, args=(0,))
    monkeypatch.setattr(SourcePass, "_after", found_late)
    late.start()
    assert has_looked.wait(60)
    length = order.length(0)  # past all stages, while the other has computed the first
    goes_on.set()
    late.join()
    assert np.array_equal(order.rows(0, 0, length)[1], alone.rows(0, 0, alone.length(0))[1])
