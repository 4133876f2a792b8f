"""What Ray says of an actor that did not return: whether its process ended by itself, or was taken away."""

from __future__ import annotations

import re
from typing import Any, Final

_OWN_END: Final = "its worker process has died"
_DETAIL: Final = re.compile(r"Worker exit detail: (.*?)(?:\n|$)")
_NODE_ADDRESS: Final = re.compile(r"\bip: (\S+)")
_MOST_CHARACTERS: Final = 300


def is_loss(error: BaseException) -> bool:
    """Return whether a call did not return because its process, its node or its result was lost."""
    from ray import exceptions

    return isinstance(
        error,
        exceptions.RayActorError
        | exceptions.OutOfMemoryError
        | exceptions.NodeDiedError
        | exceptions.WorkerCrashedError
        | exceptions.ObjectLostError
        | exceptions.LocalRayletDiedError,
    ) and not getattr(error, "actor_init_failed", False)


def is_own_end(error: BaseException) -> bool:
    """Return whether the process of an actor that Ray does not restart ended by what it was doing.

    False for an end by Ray's memory monitor, with its node, by preemption and by `ray.kill`.
    """
    from ray import exceptions

    return isinstance(error, exceptions.ActorDiedError) and not error.preempted and _OWN_END in str(error)


def is_dead(error: BaseException) -> bool:
    """Return whether Ray will not restart the actor."""
    from ray import exceptions

    return isinstance(error, exceptions.ActorDiedError | exceptions.ActorUnschedulableError)


def described(error: BaseException) -> str:
    """Return why a call did not return, on one line."""
    text = str(error)
    detail = _DETAIL.search(text)
    said = (detail.group(1) if detail else " ".join(text.split())).partition(" Some common causes")[0]
    address = _NODE_ADDRESS.search(text)
    where = f" on node {address.group(1)}" if address and address.group(1) not in said else ""
    return f"{said[:_MOST_CHARACTERS].rstrip('. ')}{where}"


def cause_of(error: Any) -> Exception:
    """Return the error of our own code that Ray wrapped, or Ray's."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error
