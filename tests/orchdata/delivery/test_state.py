from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from orchdata.dataset.options import PreparedDataset
from orchdata.dataset.resume import check_allowed, restore
from orchdata.loaders.errors import StateError
from orchdata.loop.loop import Position
from orchdata.loop.state import State
from orchdata.order.steps import Begin, GlobalBatches, OrderedSteps, draw_of_cut

FINGERPRINT = {"dataset": "abc", "order": {"seed": 3, "shuffle": {"window": 64, "streams": 1}}, "global_batch_size": 24}

EPOCHS = OrderedSteps(batches=GlobalBatches(size=24), length=lambda _: 240)


def dump_state(position: Position, fingerprint: dict[str, Any], steps: OrderedSteps) -> dict[str, Any]:
    location = steps.location(position.epoch, position.step, position.draw)
    return State(position=position, location=location, fingerprint=fingerprint).to_json()


def load_state(state: Any, fingerprint: dict[str, Any], steps: OrderedSteps, allow: tuple[str, ...] = ()) -> Position:
    spec: Any = SimpleNamespace(plan=SimpleNamespace(order=None))
    prepared = PreparedDataset(spec=spec, fingerprint=fingerprint, failures=(), num_indexed=0, torch_steps=steps)
    return restore(prepared, State.from_json(state), allow, 0)[1]


def test_a_state_with_tuples_in_place_of_lists_loads() -> None:
    state = dump_state(Position(2, 5, left=(1, 3)), FINGERPRINT, EPOCHS)
    assert load_state({**state, "left": tuple(state["left"])}, FINGERPRINT, EPOCHS) == Position(2, 5, left=(1, 3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 99}, "version 99"),
        ({"step": 11}, "step 11"),
        ({"step": -1}, "damaged: ValueError: step must be at least 0, got -1"),
        ({"step": 5, "position": 119}, "step 5 of epoch 0 begins after 119 samples in the state and 120 here"),
        ({"epoch": "x"}, "'x'"),
        ({"epoch": 10**30}, "damaged: ValueError: epoch must be below"),
        ({"fingerprint": None}, "damaged"),
        ({"left": 3}, "damaged"),
        ({"drawn": {"cut": "x"}}, "no draw of this loader's order"),
        ({"drawn": {"seed": 3}}, "no draw of this loader's order"),
    ],
    ids=str,
)
def test_impossible_states_raise_an_error(change: dict[str, object], reason: str) -> None:
    state = {**dump_state(Position(), FINGERPRINT, EPOCHS), **change}
    with pytest.raises(StateError, match=reason):
        load_state(state, FINGERPRINT, EPOCHS)


def test_a_dict_that_is_no_state_raises_an_error() -> None:
    with pytest.raises(StateError, match="not a state"):
        load_state({"_index": 3}, FINGERPRINT, EPOCHS)


def test_another_size_cuts_the_rest_again_if_that_is_allowed() -> None:
    state = dump_state(Position(2, 5), FINGERPRINT, EPOCHS)
    other = OrderedSteps(batches=GlobalBatches(size=50), length=lambda _: 240)
    fingerprint = FINGERPRINT | {"global_batch_size": 50}
    with pytest.raises(StateError, match=r"allow=\('global_batch_size',\)"):
        load_state(state, fingerprint, other)
    loaded = load_state(state, fingerprint, other, ("global_batch_size",))
    assert loaded == Position(2, 5, draw_of_cut(Begin(5, 120)))
    steps = [other.batches.bounds(task.step, 240, 2, task.begin) for task in other.tasks(2, 5, loaded.draw, again=True)]
    assert steps == [(120, 170), (170, 220), (220, 240)]
    later = dump_state(Position(2, 6, loaded.draw), fingerprint, other)
    assert load_state(json.loads(json.dumps(later)), fingerprint, other) == Position(2, 6, loaded.draw)


def test_other_differences_cannot_be_allowed() -> None:
    with pytest.raises(ValueError, match="'global_batch_tokens'"):
        check_allowed(("seed",))


def test_a_state_of_another_order_format_names_the_way_out() -> None:
    state = dump_state(Position(), FINGERPRINT | {"order": {"format": 1}}, EPOCHS)
    with pytest.raises(StateError, match="finish the epoch with the orchdata that began it"):
        load_state(state, FINGERPRINT | {"order": {"format": 2}}, EPOCHS)
