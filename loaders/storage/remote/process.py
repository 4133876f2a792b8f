"""What a process may do with clients of object storage: none works in a child that was forked after one was used.

The threads of a client do not exist in a forked child, so that its first request would never end. A child knows that it
was forked from a process that used one through this library, and refuses at once. If only the user's own code had used
one, its first request is given up after `SECONDS`.
"""

from __future__ import annotations

import os
from typing import Final

from orchdata.loaders.errors import StorageError

SECONDS: Final = 10.0
_WHY: Final = (
    "this process was forked from one that had used object storage, and no client works in it: start processes with "
    'multiprocessing_context="forkserver" or "spawn" instead of "fork"'
)


class _Process:
    """What this process has done.

    Attributes:
        used: whether it has made a request.
        answered: whether a request was answered, or failed: clients work in this process.
        is_forked: whether a fork made it.
        parent_used: whether the process that it was forked from had made a request.
    """

    def __init__(self) -> None:
        self.used = self.answered = self.is_forked = self.parent_used = False


HERE: Final = _Process()


def check(url: str) -> None:
    """Note that this process uses a client. Raises StorageError if none can work in it."""
    if HERE.parent_used:
        raise error(url)
    HERE.used = True


def is_hopeless(seconds: float) -> bool:
    """Return whether a request that has waited so long will never be answered."""
    return HERE.is_forked and not HERE.answered and seconds >= SECONDS


def error(url: str) -> StorageError:
    """Return the error for a request in a process where no client works."""
    return StorageError(url, f"cannot be read: {_WHY}")


def _in_child() -> None:
    HERE.parent_used = HERE.used or HERE.parent_used
    HERE.is_forked, HERE.used, HERE.answered = True, False, False


os.register_at_fork(after_in_child=_in_child)
