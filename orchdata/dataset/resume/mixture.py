"""The state of a mixture: what each source has given and is due, now and where weights that it does not know changed.

MixtureOrder, position --> {"weights", "now", "changed", ...}, JSON-safe --> where the run continues

Its size does not depend on the number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from orchdata.loaders.errors import StateError
from orchdata.order.due import FINE_BITS, Piece, StretchStart
from orchdata.order.mixture import MixtureOrder, ResumePoint
from orchdata.order.sources import SourceProgress
from orchdata.order.stretch import DUE_BITS

_LARGEST = 1 << 62
_MOST_DUE = _LARGEST << FINE_BITS


class MixtureState(NamedTuple):
    """What a state stores of a mixture.

    Attributes:
        now: what each source has given and is due at the position of the state.
        periods: the periods at that position.
        resumed: where the run continues.
    """

    now: StretchStart
    periods: tuple[int, ...]
    resumed: ResumePoint


def dump_mixture(order: MixtureOrder, epoch: int, position: int) -> dict[str, Any]:
    """Return what a state stores at a position of an epoch."""
    progress = order.progress_at(epoch, position)
    resumed = order.resumed_at(epoch, progress)
    now = resumed.now or StretchStart(progress, order.due(epoch, progress))
    state = {
        "weights": list(order.periods(epoch, progress)),
        "begun": list(resumed.given_before),
        "now": _dump_start(now, order),
        "is_changed": resumed.is_changed,
    }
    if resumed.changed is not None:
        state["changed"] = _dump_start(resumed.changed, order)
    if order.stop == "repeat":
        state["start"] = {"samples": list(resumed.start.counts), "tokens": list(resumed.start.given)}
    return {"given": state}


def mixture_of(state: Mapping[str, Any], order: MixtureOrder, epoch: int) -> MixtureState:
    """Return what a state says that its sources have given. Raises StateError if its position is another one."""
    mixture = load_mixture(state.get("given"), order, epoch)
    given = mixture.now.progress.position - mixture.resumed.start.position
    if state.get("position") != given:
        raise StateError(
            f"the state is damaged: its mixture has given other amounts at this position than it says, {given} samples "
            f"of the epoch at position {state.get('position')!r:.40}"
        )
    return mixture


def load_mixture(state: Any, order: MixtureOrder, epoch: int) -> MixtureState:
    """Return the "given" that `dump_mixture` returned for an epoch. Raises StateError for anything else."""
    count = len(order.sources)
    try:
        none = (0,) * count
        start = SourceProgress(none, none)
        if order.stop == "repeat":
            start = _load_progress(state["start"], count)
        samples, tokens = _ints(state["begun"], 2)
        changed = _load_start(state["changed"], order) if "changed" in state else None
        now = _load_start(state["now"], order)
        continues_at = None if now.piece is None else now
        resumed = ResumePoint(epoch, (samples, tokens), start, changed, continues_at, state["is_changed"] is True)
        return MixtureState(now, _ints(state["weights"], count), resumed)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"the state is damaged: invalid amounts that the sources of its mixture have given: {state!r}"[:300]
        ) from error


def _dump_start(start: StretchStart, order: MixtureOrder) -> dict[str, Any]:
    progress, due, piece = start
    amounts = progress.amounts(order.by)
    # Debts have fewer digits than what is due.
    debts = [each - (amount << DUE_BITS) for each, amount in zip(due, amounts, strict=True)]
    state = {"samples": list(progress.counts), "tokens": list(progress.given), "debts": debts}
    if piece is None:
        return state
    fine = [each - (amount << FINE_BITS) for each, amount in zip(piece.due, amounts, strict=True)]
    lists = {"due": fine, "late": list(piece.late), "live": list(piece.live)}
    return state | {"piece": piece._asdict() | lists}


def _load_start(state: Mapping[str, Any], order: MixtureOrder) -> StretchStart:
    count = len(order.sources)
    progress, debts = _load_progress(state, count), _ints(state["debts"], count, least=-(_LARGEST << DUE_BITS))
    amounts = progress.amounts(order.by)
    due = tuple(debt + (amount << DUE_BITS) for debt, amount in zip(debts, amounts, strict=True))
    if "piece" not in state:
        return StretchStart(progress, due)
    stored = state["piece"]
    clock, floor, at = _ints((stored["clock"], stored["floor"] or 0, stored["at"]), 3, least=-_LARGEST)
    fine, late = (_ints(stored[name], count, -_MOST_DUE, _MOST_DUE) for name in ("due", "late"))
    live = _ints(stored["live"], len(stored["live"]), most=count - 1)
    fine = tuple(debt + (amount << FINE_BITS) for debt, amount in zip(fine, amounts, strict=True))
    return StretchStart(progress, due, Piece(clock, stored["floor"] and floor, at, fine, late, live))


def _load_progress(state: Mapping[str, Any], count: int) -> SourceProgress:
    samples, tokens = (_ints(state[name], count, most=_LARGEST) for name in ("samples", "tokens"))
    return SourceProgress(samples, tokens)


def _ints(values: Any, count: int, least: int = 0, most: int = _LARGEST << DUE_BITS) -> tuple[int, ...]:
    ints = tuple(values)
    if len(ints) != count or not all(type(value) is int and least <= value <= most for value in ints):
        raise ValueError(values)
    return ints
