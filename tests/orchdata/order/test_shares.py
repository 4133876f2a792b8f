"""Shares of a mixture in any window, by brute force, next to a merge by virtual time in plain Python and fractions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listed_tokens import Listed
from numpy.typing import NDArray

import orchdata as od
from orchdata.order.merge import By, MixedSource
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order, Shuffle
from orchdata.order.token_sums import TokenSums

Ints = NDArray[np.int64]


def mixed(lengths: Sequence[Ints], weights: Sequence[float], by: By, stop: Any, size: int | None) -> MixtureOrder:
    """As the values `od.Mixture` makes of these weights."""
    names = [f"s{number:02d}" for number in range(len(lengths))]
    dataset = od.ShardDataset.__new__(od.ShardDataset)  # only its weights are read
    options = {"epoch_samples": size} if stop == "repeat" else {}
    sources = {name: od.Source(dataset, weight=weight) for name, weight in zip(names, weights, strict=True)}
    mixture = od.Mixture(sources, by=by, stop=stop, **options)
    mixed, first = [], 0
    for number, (name, tokens) in enumerate(zip(names, lengths, strict=True)):
        order = Order(len(tokens), shuffle=Shuffle(window=2), seed=number, source=number)
        mixed.append(MixedSource(name, order, Listed(tokens), TokenSums(order, Listed(tokens)), first))
        first += len(tokens)
    return MixtureOrder(mixed, mixture.quantised(), by=by, stop=stop, epoch_size=mixture.epoch_size)


def given_by(order: MixtureOrder, lengths: Sequence[Ints]) -> Ints:
    """What each source has given before each place of the first epoch, (num_samples + 1, num_sources)."""
    length = order.length(0)
    source, row = order.rows(0, 0, length)
    sizes = np.concatenate(lengths)[row] if order.by == "tokens" else np.ones(length, np.int64)
    steps = np.zeros((length + 1, len(lengths)), np.int64)
    steps[np.arange(length) + 1, source] = sizes
    return np.cumsum(steps, axis=0)


def exact(order: MixtureOrder, lengths: Sequence[Ints], weights: Sequence[float], count: int) -> Ints:
    """The same by the words of the documentation: the sample that ends first in virtual time, in fractions."""
    by_tokens, num_sources = order.by == "tokens", len(lengths)
    queues: list[list[int]] = []
    for number, source in enumerate(order.sources):
        passes = range(1 if order.stop != "repeat" else 1 + count // len(lengths[number]))
        rows = np.concatenate([source.order.rows(each, 0, len(lengths[number]))[1] for each in passes])
        queues.append((lengths[number][rows] if by_tokens else np.ones(len(rows), np.int64)).tolist()[::-1])
    heaviest = max(weights)
    periods = [Fraction(heaviest) / Fraction(weight) for weight in weights]
    means = [int(each.sum()) // len(each) if by_tokens else 1 for each in lengths]
    given, counts = [0] * num_sources, [[0] * num_sources]
    for _ in range(count):
        ends = [
            ((given[k] + queues[k][-1]) * periods[k] - periods[k] * means[k] * k / num_sources, k)
            for k in range(num_sources)
            if queues[k]
        ]
        _, taken = min(ends)
        given[taken] += queues[taken].pop()
        counts.append(list(given))
    return np.array(counts)


def furthest(given: Ints, weights: Sequence[float], longest: int) -> tuple[float, float]:
    """Over all windows: how far a share is off, in longest samples of what 0.5 % of the window leaves; and in samples
    of the longest alone.
    """
    shares, most, plain = np.array(weights) / sum(weights), 0.0, 0.0
    for width in range(1, len(given)):
        window = given[width:] - given[:-width]
        total = window.sum(axis=1)
        off = np.abs(window - np.outer(total, shares)).max(axis=1)
        plain = max(plain, float(off.max()) / longest)
        most = max(most, float(np.where(off > 0.005 * total, off, 0).max()) / longest)
    return most, plain


def present_stretches(order: MixtureOrder, lengths: Sequence[Ints]) -> list[tuple[int, int, list[int]]]:
    """Stretches of an epoch of "all", each with the sources that are still there."""
    source, _ = order.rows(0, 0, order.length(0))
    last = [int(np.flatnonzero(source == number)[-1]) + 1 for number in range(len(lengths))]
    bounds = sorted({0, *last})
    return [
        (start, stop, [number for number, end in enumerate(last) if end > start])
        for start, stop in itertools.pairwise(bounds)
    ]


WEIGHTS = {
    "seven, two, one": [0.7, 0.2, 0.1],
    "a thousandth": [1.0, 1e-3],
    "a thousandth of three": [0.6, 0.4, 1e-3],
    "equal": [1.0] * 7,
    "a half and fifths of it": [0.5, 0.1, 0.1, 0.1, 0.1, 0.1],
    "one": [3.0],
}


@pytest.mark.parametrize("weights", list(WEIGHTS.values()), ids=list(WEIGHTS))
@pytest.mark.parametrize("by", ["tokens", "samples"])
@pytest.mark.parametrize("sizes", ["even", "uneven"])
@pytest.mark.parametrize("stop", ["all", "repeat"])
def test_shares_hold_in_every_window(weights: list[float], by: By, sizes: str, stop: str) -> None:
    rng = np.random.default_rng(4)
    high = 1 if sizes == "even" else 60
    lengths = [rng.integers(1, high + 1, rng.integers(40, 400)) for _ in weights]
    order = mixed(lengths, weights, by, stop, 900 if stop == "repeat" else None)
    given, longest = given_by(order, lengths), high if by == "tokens" else 1
    stretches = present_stretches(order, lengths) if stop == "all" else [(0, 900, list(range(len(weights))))]
    for start, end, there in stretches:
        off, _ = furthest(given[start : end + 1][:, there], [weights[number] for number in there], longest)
        assert off <= 2


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_no_window_is_further_off_than_its_sources_allow(data: st.DataObject) -> None:
    """One longest sample, and for each source more than two the share times one: no order by time does better."""
    num_sources = data.draw(st.integers(1, 6))
    weight = st.sampled_from([0.7, 0.5, 0.2, 0.1, 1.0, 1e-3, 1 / 3])
    weights = data.draw(st.lists(weight, min_size=num_sources, max_size=num_sources))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    highest = data.draw(st.sampled_from([1, 2, 50]))
    lengths = [rng.integers(1, highest + 1, rng.integers(1, 80)) for _ in weights]
    by: By = data.draw(st.sampled_from(["tokens", "samples"]))
    order = mixed(lengths, weights, by, "repeat", 250)
    given, longest = given_by(order, lengths), max(int(each.max()) for each in lengths) if by == "tokens" else 1
    _, off = furthest(given, weights, longest)
    largest = max(weights) / sum(weights)
    assert off <= 1 + largest * max(0, num_sources - 2) + 1e-3
    plain = exact(order, lengths, weights, 250)
    # Weights are integers there, exact to 1 in 100,000: a sample may come before another one.
    assert np.abs(given - plain).max() <= longest * (1 + 1e-3)


def test_a_share_that_is_wrong_is_seen() -> None:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 61, 300), rng.integers(1, 61, 300)]
    given = given_by(mixed(lengths, [0.7, 0.3], "tokens", "repeat", 600), lengths)
    assert furthest(given, [0.7, 0.3], 60)[0] <= 2
    assert furthest(given, [0.72, 0.28], 60)[0] > 2
