"""Mixtures of made-up sources, by number: the same on every machine."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from listed_tokens import Listed
from numpy.typing import NDArray

from orchdata.order.merge import Stage
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import MixedSource, Order, Shuffle, TokenSums

Ints = NDArray[np.int64]


def sources_of(lengths: list[Ints], shuffle: Shuffle | None = None) -> list[MixedSource]:
    """One source for each list of lengths, with a seed of its own."""
    found, first = [], 0
    for number, tokens in enumerate(lengths):
        order = Order(len(tokens), shuffle=shuffle, seed=number, source=number)
        counts = Listed(tokens)
        found.append(MixedSource(f"s{number}", order, counts, TokenSums(order, counts), first))
        first += len(tokens)
    return found


def periods_of(weights: Any) -> tuple[int, ...]:
    """Integer periods of weights, as `od.Mixture` makes them."""
    return tuple(round((1 << 16) * (max(weights) / weight)) if weight else 0 for weight in weights)


def single_stage(case: int) -> MixtureOrder:
    """A mixture with one stage: any number of sources, lengths, weights, ends and shuffles."""
    rng = np.random.default_rng(case)
    lengths = [
        rng.integers(1, int(rng.choice([1, 3, 4000])) + 1, int(rng.integers(1, 500))) for _ in range(rng.integers(1, 7))
    ]
    weights = [float(weight) for weight in rng.choice([0.7, 0.3, 0.1, 0.005, 1e-6, 0.0], len(lengths))]
    if not any(weights):
        weights[0] = 1.0
    shuffle = [None, Shuffle(window=2), Shuffle(window=1, streams=3)][case % 3]
    stop: Any = ["first", "all", "repeat"][case // 3 % 3]
    by: Any = ["tokens", "samples"][case // 9 % 2]
    size: Any = None
    if stop == "repeat":
        unit = ["tokens", "samples"][case // 18 % 2]
        size = (unit, 300 * max(int(each.max()) for each in lengths) if unit == "tokens" else 400)
    stages = [Stage(0, periods_of(weights))]
    return MixtureOrder(sources_of(lengths, shuffle), stages, by=by, stop=stop, epoch_size=size)


def digest_of(order: MixtureOrder, epochs: int = 3) -> str:
    """Of the (source, row, pass) of the first epochs."""
    found = hashlib.blake2b(digest_size=6)
    for epoch in range(epochs):
        length = order.length(epoch)
        samples = order.samples(epoch, 0, length)
        for column in (samples.source, samples.row, samples.passes):
            assert column is not None
            found.update(column.astype("<i8").tobytes())
    return found.hexdigest()
