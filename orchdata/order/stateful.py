"""States of the user's data sets and samplers, by torchdata's convention: `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

StateGetter = Callable[[], dict[str, Any]]
"""Returns the state of a data set after the step that it came with."""


def is_stateful(owner: Any) -> bool:
    """Return whether a data set, a sampler, or an iterator of one has a state."""
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def states_of(**owners: Any) -> dict[str, Any]:
    """Return name -> state of each owner that has one."""
    return {name: owner.state_dict() for name, owner in owners.items() if is_stateful(owner)}


def restore_states(states: Any, **owners: Any) -> None:
    """Load what `states_of` returned for the same owners."""
    for name, owner in owners.items():
        if name in states and is_stateful(owner):
            owner.load_state_dict(states[name])


def exhaust(items: Iterator[Any]) -> None:
    """Take all items that are left, without `iter()`, which may start from the beginning."""
    end = object()
    while next(items, end) is not end:
        pass
