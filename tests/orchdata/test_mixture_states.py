"""States of mixtures: what they say is checked, and their size does not grow with the number of stages."""

# ruff: noqa: F811 (a fixture is imported)

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from mixed_data import data, mixture, planned  # noqa: F401
from mixture_cases import periods_of, sources_of
from rank_loaders import loaders, steps_of

import orchdata as od
from orchdata.dataset.prepared import mixture_at
from orchdata.loop.loop import Position
from orchdata.loop.state import State
from orchdata.order.merge import Stage
from orchdata.order.mixture import MixtureOrder
from orchdata.order.steps import Location

pytestmark = pytest.mark.usefixtures("same_cache")

WEIGHTS = [{"omni": 5, "chat": 3, "text": 1}, {"omni": 1, "chat": 3, "text": 2}, {"chat": 3, "text": 1}]


def test_a_state_is_small_with_many_stages_and_sources(data: dict[str, od.ShardDataset]) -> None:
    names = [f"source-{number:02d}" for number in range(50)]
    rng = np.random.default_rng(0)
    stages = [(400 * k, dict(zip(names, rng.uniform(0.1, 1, 50).tolist(), strict=True))) for k in range(1000)]
    sources = {name: od.Source(data[("omni", "chat", "text")[k % 3]]) for k, name in enumerate(names)}
    mixed = od.Mixture(sources, stages=stages, stop="repeat", epoch_tokens=400_000)
    (loader,) = loaders(mixed, 1)
    steps = iter(loader.steps())
    for _ in range(5):
        next(steps)
    state = loader.state_dict()
    assert "changed" in state["given"]
    assert len(json.dumps(state)) < 20_000
    assert loaders(mixed, 1, state)[0].state_dict() == state
    other = od.Mixture(
        {**sources, names[0]: od.Source(data["text"])}, stages=stages, stop="repeat", epoch_tokens=400_000
    )
    with pytest.raises(od.StateError, match="source-00"):
        loaders(other, 1, state)


def test_a_state_that_says_what_cannot_be_is_refused(data: dict[str, od.ShardDataset]) -> None:
    mixed = mixture(data, stages=list(zip((0, 2000, 4500), WEIGHTS, strict=True)))
    (loader,) = loaders(mixed, 1)
    steps_of([loader], 6)
    state = loader.state_dict()
    for field, value in (("now", {}), ("weights", [1]), ("begun", None), ("start", {"samples": [0], "tokens": [0]})):
        with pytest.raises(od.StateError, match="have given"):
            loaders(mixed, 1, state | {"given": state["given"] | {field: value}})
    counts = [each + 1 for each in state["given"]["now"]["samples"]]
    with pytest.raises(od.StateError, match="has given other amounts at this position"):
        loaders(mixed, 1, state | {"given": state["given"] | {"now": state["given"]["now"] | {"samples": counts}}})


@pytest.mark.parametrize("by", ["tokens", "samples"])
def test_what_a_state_tells_goes_on_the_same(by: Any) -> None:
    """Through stages in which sources leave and return."""
    rng = np.random.default_rng(2)
    lengths = [rng.integers(1, 90, 400) for _ in range(3)]
    weights = [[5, 3, 1], [5, 0, 1], [1, 3, 1], [0, 3, 0], [2, 3, 4]]
    scale = 900 if by == "tokens" else 20
    stages = [Stage(scale * k, periods_of(weights[k % 5])) for k in range(20)]
    order = MixtureOrder(sources_of(lengths), stages, by=by, stop="repeat", epoch_size=("samples", 700))
    whole, fingerprint = order.rows(0, 0, 700), {"mixture": order.describe()}
    for position in range(1, 700, 23):
        known, location = mixture_at(order, 0, position), Location(position)
        state = State(position=Position(), location=location, fingerprint=fingerprint, mixture=known).to_json()
        loaded = State.from_json(json.loads(json.dumps(state))).mixture
        assert loaded == known
        later = order.restaged(stages, loaded.resumed)
        for one, other in zip(later.rows(0, position, 700), whole, strict=True):
            assert np.array_equal(one, other[position:])
        assert mixture_at(later, 0, position) == known
        assert np.array_equal(later.rows(0, 0, 700)[1], whole[1]), "earlier samples are the same too"
