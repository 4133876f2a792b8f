"""What a state tells of a mixture: what each source has given, and was due, now and where weights last changed.

MixtureOrder, place --> {"weights", "now", "changed", ...}, JSON-safe --> where the run goes on

Its size does not depend on how many stages there are, or were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from orchdata.loaders.errors import StateError
from orchdata.order.merge import Place, Reached
from orchdata.order.mixture import MixtureOrder, Resumed
from orchdata.order.stretch import DUE_BITS

_LARGEST = 1 << 62


class ToldPlace(NamedTuple):
    """What a state tells.

    Attributes:
        now: what each source has given and was due where the state stands.
        periods: that hold there.
        resumed: what the run goes on from.
    """

    now: Reached
    periods: tuple[int, ...]
    resumed: Resumed


def tell_place(order: MixtureOrder, epoch: int, position: int) -> dict[str, Any]:
    """What a state tells at a position of an epoch; of a run with one set of weights all that is the weights."""
    resumed = order.resumed
    if len(order.stages) == 1 and (resumed is None or not resumed.is_changed):
        return {"stages": order.told_stages()}
    place = order.place(epoch, position)
    found = order.resumed_at(epoch, place)
    told = {
        "weights": list(order.periods(epoch, place)),
        "begun": list(found.begun),
        "now": _tell(Reached(place, order.due(epoch, place)), order),
        "is_changed": found.is_changed,
    }
    if found.reached is not None:
        told["changed"] = _tell(found.reached, order)
    if order.stop == "repeat":
        told["start"] = {"samples": list(found.start.counts), "tokens": list(found.start.given)}
    return {"given": told}


def read_place(told: Any, order: MixtureOrder, epoch: int) -> ToldPlace:
    """What `tell_place` told of an epoch. Raises StateError for anything else."""
    count = len(order.sources)
    try:
        none = (0,) * count
        start = Place(none, none)
        if order.stop == "repeat":
            start = _place(told["start"], count)
        begun = _ints(told["begun"], 2)
        reached = _read(told["changed"], order) if "changed" in told else None
        resumed = Resumed(epoch, (begun[0], begun[1]), start, reached, told["is_changed"] is True)
        return ToldPlace(_read(told["now"], order), _ints(told["weights"], count), resumed)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"the state is damaged: what the sources of its mixture have given is {told!r}"[:300]
        ) from error


def _tell(reached: Reached, order: MixtureOrder) -> dict[str, list[int]]:
    place, due = reached
    # Less digits than what is due has.
    debts = [each - (amount << DUE_BITS) for each, amount in zip(due, place.amounts(order.by), strict=True)]
    return {"samples": list(place.counts), "tokens": list(place.given), "debts": debts}


def _read(told: Mapping[str, Any], order: MixtureOrder) -> Reached:
    count = len(order.sources)
    place, debts = _place(told, count), _ints(told["debts"], count, least=-(_LARGEST << DUE_BITS))
    due = tuple(debt + (amount << DUE_BITS) for debt, amount in zip(debts, place.amounts(order.by), strict=True))
    return Reached(place, due)


def _place(told: Mapping[str, Any], count: int) -> Place:
    return Place(_ints(told["samples"], count), _ints(told["tokens"], count))


def _ints(values: Any, count: int, least: int = 0) -> tuple[int, ...]:
    found = tuple(values)
    if len(found) != count or not all(type(value) is int and least <= value <= _LARGEST << DUE_BITS for value in found):
        raise ValueError(values)
    return found
