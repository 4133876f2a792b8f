"""torchdata's convention: what has `state_dict` and `load_state_dict` is asked what it holds, and given it back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def is_stateful(owner: Any) -> bool:
    """Whether a data set, sampler, or an iterator of one says where it stands."""
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def held_by(**owners: Any) -> dict[str, Any]:
    """name -> state of each that has one."""
    return {name: owner.state_dict() for name, owner in owners.items() if is_stateful(owner)}


def give_back(held: Any, **owners: Any) -> None:
    """Load what `held_by` found of the same owners."""
    for name, owner in owners.items():
        if name in held and is_stateful(owner):
            owner.load_state_dict(held[name])


def exhaust(items: Iterator[Any]) -> None:
    """Have an iterator give what is left, without `iter()` of it, which may begin anew."""
    end = object()
    while next(items, end) is not end:
        pass


def is_place(held: Any) -> bool:
    """Whether nothing of the data set's own is in what it held: only where its iteration stood."""
    return not held.keys() - {"epoch", "steps", "ended"}


def steps_to_skip(held: Any, epoch: int) -> int:
    """Steps of an iteration that are built for nothing, to get behind what was held."""
    return int(held["steps"]) if "steps" in held and is_place(held) and held["epoch"] == epoch else 0
