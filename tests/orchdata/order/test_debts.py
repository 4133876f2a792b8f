"""Debts are carried over stages: bounds over every prefix of a run by a checker in plain Python and fractions."""

from __future__ import annotations

import json
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

from orchdata.order.merge import Stage
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import By, Shuffle

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
