"""The state of a loader: where in which epoch it stands, and of what.

Small, JSON-safe, versioned and the same on every rank, so rank 0's loads everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchdata.loaders.errors import StateError

VERSION = 1


@dataclass(frozen=True)
class Position:
    """A place between two optimizer steps: `step` steps of `epoch` were delivered."""

    epoch: int = 0
    step: int = 0


def dump_state(position: Position, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "epoch": position.epoch,
        "step": position.step,
        "fingerprint": dict(fingerprint),
    }


def load_state(state: Mapping[str, Any], fingerprint: Mapping[str, Any], num_steps: int) -> Position:
    """The position of `state`. Raises StateError, naming each difference, if it belongs to something else."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError("this is not a state of an orchdata DataLoader: it has no 'version'")
    if state["version"] != VERSION:
        raise StateError(f"the state has version {state['version']}, this orchdata reads version {VERSION}")
    differences = list(_differences(state.get("fingerprint", {}), fingerprint, ""))
    if differences:
        raise StateError("the state belongs to another loader: " + "; ".join(differences))
    epoch, step = state["epoch"], state["step"]
    if not (isinstance(epoch, int) and epoch >= 0 and isinstance(step, int) and 0 <= step <= num_steps):
        raise StateError(f"the state points at epoch {epoch!r}, step {step!r}; an epoch has {num_steps} steps")
    return Position(epoch, step)


def _differences(theirs: Any, ours: Any, path: str) -> list[str]:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        names = [*ours, *(name for name in theirs if name not in ours)]
        return [
            found
            for name in names
            for found in _differences(theirs.get(name), ours.get(name), f"{path}.{name}" if path else str(name))
        ]
    return [] if theirs == ours else [f"{path} is {theirs!r} in the state and {ours!r} here"]
