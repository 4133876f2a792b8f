"""The order of a mixture: its shares and stages, from any place, as it was before."""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixture_cases import Ints, digest_of, periods_of, single_stage, sources_of

from orchdata.order.merge import Stage, Stop, Stretch
from orchdata.order.mixture import MixtureOrder, SourcePass
from orchdata.order.order import By, Shuffle


@st.composite
def mixtures(draw: st.DrawFn) -> MixtureOrder:
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
    stages = [Stage(bound, periods_of(draw(weights))) for bound in (0, *bounds)]
    epoch_size: tuple[By, int] | None = None
    if stop == "repeat":
        epoch_size = draw(st.sampled_from(["tokens", "samples"])), draw(st.integers(1, 500))
        if epoch_size[0] == "tokens":
            epoch_size = "tokens", -(-epoch_size[1] // 50) * max(int(each.max()) for each in lengths)
    return MixtureOrder(sources_of(lengths, shuffle), stages, by=by, stop=stop, epoch_size=epoch_size)


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
    source, row = order.rows(0, 0, order.length(0))
    # The rare one begins half of a mean sample ahead, and its first is shorter; its next is due after 2 ** 32 others.
    expected = [1] + ([0] * 40 + [1] * 29 if stop == "all" else [0] * 89)
    assert source.tolist() == expected and sorted(row[1:41].tolist()) == list(range(40))


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


# Debts are carried over stages: bounds over every prefix of a run by a checker in plain Python and fractions.


GOLDEN = json.loads((Path(__file__).parent / "golden" / "single_stage.json").read_text())["digests"]


class Furthest(NamedTuple):
    """Over prefixes: the largest lag, in own longest samples, and lead, in its largest weight times the longest of all.

    Prefixes before the first change of weights are ignored: until then the order is that of one stage. The
    lead is that of a source where a sample of it comes.
    """

    lag: Fraction
    lead: Fraction


def furthest(order: MixtureOrder, stages: Sequence[Stage], lengths: Sequence[Ints], settle: int) -> Furthest:
    """As documented, a sample at a time: what is due is the integral of the weights over tokens.

    Args:
        settle: tokens or samples after the first change at which the order of one stage is made up for.
    """
    by_tokens, count = order.by == "tokens", len(lengths)
    bounds = [stage.bound for stage in stages]
    change = next((stage.bound for stage in stages if stage.periods != stages[0].periods), None)
    weights = [[Fraction(1, period) if period else Fraction(0) for period in stage.periods] for stage in stages]
    longest = [int(each.max()) if by_tokens else 1 for each in lengths]
    left = [len(each) if order.stop != "repeat" else -1 for each in lengths]
    most = [max(each[k] / sum(each) for each in weights) for k in range(count)]
    source, row = order.rows(0, 0, order.length(0))
    sizes = np.concatenate(lengths)[row].tolist() if by_tokens else [1] * len(row)
    due, has_given, done = [Fraction(0)] * count, [0] * count, 0
    lag = lead = Fraction(0)
    for taken, size in zip(source.tolist(), sizes, strict=True):
        at, end = done, done + size
        while at < end:
            stage = bisect_right(bounds, at) - 1
            stop = min(end, bounds[stage + 1]) if stage + 1 < len(bounds) else end
            live = [weight if left[k] else Fraction(0) for k, weight in enumerate(weights[stage])]
            whole = sum(live)
            for k in range(count):
                due[k] += (stop - at) * live[k] / whole if whole else 0
            at = stop
        has_given[taken] += size
        left[taken] -= 1
        done = end
        if change is not None and done > change + settle:
            present = [k for k in range(count) if left[k]]
            together = sum(longest[k] for k in range(count))
            lag = max([lag, *((due[k] - has_given[k]) / longest[k] for k in present)])
            # What the first stage gave in advance stays given; no sample after it comes further in advance.
            lead = max(lead, (has_given[taken] - due[taken]) / (most[taken] * together))
    return Furthest(lag, lead)


@st.composite
def staged(draw: st.DrawFn) -> tuple[MixtureOrder, list[Stage], list[Ints]]:
    """Mixtures of sources with samples of about one size, in stages that may be shorter than their samples."""
    count = draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    by: By = draw(st.sampled_from(["tokens", "samples"]))
    longest = draw(st.sampled_from([1, 7, 300]))
    lengths = [rng.integers(1, longest + 1, rng.integers(100, 300)) for _ in range(count)]
    width = draw(st.sampled_from([1, 3, 20, 200])) * (longest if by == "tokens" else 1)
    weight = st.sampled_from([0.7, 0.5, 0.295, 0.1, 0.005])
    several = draw(st.lists(st.lists(weight, min_size=count, max_size=count), min_size=2, max_size=5))
    stages = [Stage(max(1, width // 2) * k, periods_of(several[k % len(several)])) for k in range(40)]
    order = MixtureOrder(
        sources_of(lengths, Shuffle(window=2)), stages, by=by, stop="repeat", epoch_size=("samples", 500)
    )
    return order, stages, lengths


@given(case=staged())
@settings(max_examples=25, deadline=None)
def test_no_prefix_lags_two_longest_samples_or_leads_more_than_its_weight_allows(case: Any) -> None:
    order, stages, lengths = case
    longest = max(int(each.max()) for each in lengths) if order.by == "tokens" else 1
    lags = furthest(order, stages, lengths, settle=8 * len(lengths) * longest)
    assert lags.lag <= 2
    assert lags.lead <= 2


def issue_like(size: int, near: int) -> tuple[MixtureOrder, list[Stage], list[Ints]]:
    """A source of half a percent, in stages of `size` tokens, with all but equal weights."""
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 401, 2000) for _ in range(3)]
    one = periods_of([0.7, 0.295, 0.005])
    stages = [Stage(size * k, (one[0], one[1] + near * (k % 2), one[2])) for k in range(300_000 // size)]
    order = MixtureOrder(sources_of(lengths, Shuffle()), stages, stop="repeat", epoch_size=("tokens", 300_000))
    return order, stages, lengths


@pytest.mark.parametrize("size", [100_000, 30_000, 6_000, 1_600, 100])
def test_short_stages_starve_no_source(size: int) -> None:
    """0.005 of 300,000 tokens are 1,500, to within two of its longest samples, of 400 tokens."""
    order, stages, lengths = issue_like(size, near=1)
    source, row = order.rows(0, 0, order.length(0))
    assert abs(int(np.concatenate(lengths)[row][source == 2].sum()) - 1_500) <= 800
    assert furthest(order, stages, lengths, settle=4_800).lag <= 2


@pytest.mark.parametrize("stop", ["first", "all", "repeat"])
def test_equal_weights_again_change_nothing(stop: Any) -> None:
    rng = np.random.default_rng(5)
    sources = sources_of([rng.integers(1, 400, 300) for _ in range(3)], Shuffle())
    size: Any = ("tokens", 30_000) if stop == "repeat" else None
    weights = periods_of([0.7, 0.295, 0.005])
    one, many = (
        MixtureOrder(sources, [Stage(bound, weights) for bound in bounds], stop=stop, epoch_size=size)
        for bounds in ([0], range(0, 200_000, 500))
    )
    assert digest_of(one) == digest_of(many)


@pytest.mark.slow_cases("72", "108", "144", "180")
@pytest.mark.parametrize("first", range(0, 216, 36))
def test_one_stage_keeps_the_order_of_before(first: int) -> None:
    """To the bit, in the first three epochs of mixtures of all kinds."""
    for case in range(first, first + 36, 3):
        assert digest_of(single_stage(case + first // 36 % 3)) == GOLDEN[case + first // 36 % 3], f"case {case}"


def test_a_source_stays_owed_where_another_leaves_or_joins() -> None:
    """A fifth of 20,000 tokens are 4,000, to within two samples of 300 tokens; a stage has 100 of them."""
    lengths = [np.full(600, 10), np.full(40, 300), np.full(600, 10)]
    weights = [periods_of([0.8, 0.2, 0]), periods_of([0.7, 0.2, 0.1])]
    stages = [Stage(500 * k, weights[k % 2]) for k in range(40)]
    order = MixtureOrder(sources_of(lengths), stages, stop="repeat", epoch_size=("tokens", 20_000))
    source, _ = order.rows(0, 0, order.length(0))
    assert abs(300 * np.count_nonzero(source == 1) - 4_000) <= 600


def test_stages_are_of_the_run_and_not_of_an_epoch() -> None:
    """The first stage is over after 10 samples of 10 tokens, and an epoch has 90 and more."""
    stages = [Stage(0, periods_of([1, 1])), Stage(100, periods_of([8, 1]))]
    order = MixtureOrder(sources_of([np.full(90, 10), np.full(90, 10)]), stages, stop="first")
    counts = [np.bincount(order.rows(epoch, 0, 10)[0], minlength=2).tolist() for epoch in range(2)]
    assert counts[0] == [5, 5] and counts[1][1] <= 2
