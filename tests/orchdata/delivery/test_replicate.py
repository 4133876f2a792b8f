"""A reader's message creates batches on its peers, and nothing else."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import TeamUse
from orchdata.engines.processes.message import _BATCHES
from orchdata.engines.processes.message import revive as revive_of
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route
from orchdata.ranks.wire import WireError

ROUTE = {field.name: None for field in fields(Route)}


def classes_of(annotation: Any) -> set[type]:
    """Return the dataclasses that a value of this type may contain."""
    classes: set[type] = set()
    waiting = [annotation]
    while waiting:
        one = waiting.pop()
        waiting += typing.get_args(one)
        if isinstance(one, type) and is_dataclass(one) and one not in classes:
            classes.add(one)
            waiting += typing.get_type_hints(one).values()
    return classes


def test_all_classes_in_a_batch_can_be_sent_and_no_others() -> None:
    within = classes_of(Batch)
    assert Plan in within
    # Each loader has a TeamUse of its own, which its batches get when they are delivered.
    assert set(_BATCHES.values()) == within - classes_of(Plan) - {TeamUse}


def revive(value: Any) -> Any:
    return revive_of(value, object())  # type: ignore[arg-type]


def test_a_route_comes_back() -> None:
    route = revive({"<class>": "Route", "fields": ROUTE | {"rank": 1, "num_ranks": 2}})
    assert isinstance(route, Route)
    assert (route.rank, route.num_ranks) == (1, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"<class>": "subprocess:Popen", "fields": {"args": ["true"]}}, "Route, and a peer sent 'subprocess:Popen'"),
        ({"<class>": "orchdata.batch.batch:Batch", "fields": {}}, "a peer sent 'orchdata.batch.batch:Batch'"),
        ({"<class>": ["Route"], "fields": ROUTE}, r"a peer sent \['Route'\]"),
        ({"<class>": "Route", "fields": [1]}, "a peer sent 'Route'"),
        ({"<class>": "Route"}, "a peer sent 'Route'"),
        (
            {"<class>": "Route", "fields": ROUTE | {"more": 1}},
            "Route has other fields than what a peer sent for it: 'more'",
        ),
        ({"<class>": "Route", "fields": {"rank": 0}}, "what a peer sent for it: 'adds', 'label', 'num_ranks'"),
        ([{"a": {"<class>": "Nothing", "fields": {}}}], "a peer sent 'Nothing'"),
    ],
)
def test_an_unknown_class_or_field_is_named(value: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        revive(value)
