from __future__ import annotations

import json

import pytest

from orchdata.delivery.state import Position, dump_state, load_state
from orchdata.loaders.errors import StateError

FINGERPRINT = {"dataset": "abc", "order": {"seed": 3, "shuffle": {"window": 64, "streams": 1}}, "global_batch_size": 24}


def test_state_survives_json() -> None:
    state = json.loads(json.dumps(dump_state(Position(2, 5), FINGERPRINT)))
    assert load_state(state, FINGERPRINT, num_steps=10) == Position(2, 5)


def test_mismatch_names_every_difference() -> None:
    other = {**FINGERPRINT, "order": {"seed": 4, "shuffle": {"window": 64, "streams": 8}}, "global_batch_size": 48}
    with pytest.raises(StateError) as raised:
        load_state(dump_state(Position(), FINGERPRINT), other, num_steps=10)
    for part in ("order.seed is 3", "and 4 here", "order.shuffle.streams is 1", "global_batch_size is 24"):
        assert part in str(raised.value)
    assert "dataset" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"version": 99}, "version 99"), ({"step": 11}, "step 11"), ({"step": -1}, "step -1"), ({"epoch": "x"}, "'x'")],
)
def test_impossible_states_are_refused(change: dict[str, object], reason: str) -> None:
    state = {**dump_state(Position(), FINGERPRINT), **change}
    with pytest.raises(StateError, match=reason):
        load_state(state, FINGERPRINT, num_steps=10)


def test_a_foreign_dict_is_refused() -> None:
    with pytest.raises(StateError, match="not a state"):
        load_state({"_index": 3}, FINGERPRINT, num_steps=10)
