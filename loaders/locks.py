"""One lock for each object that must not be used by two threads at once, such as a tokenizer.

The lock belongs to the object and not to whoever holds it: two recipes with the same tokenizer take turns, and a recipe
stays a frozen value that pickles.
"""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from types import ModuleType
from typing import Any


class Turn:
    """A lock that one thread at a time holds in a block. Who waits for it waits in here, which `slow` looks for."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_locks: dict[int, tuple[Turn, object]] = {}
_making = threading.Lock()


def lock_of(used: Any) -> Turn:
    """The lock of an object; a bound method's is that of the object behind it, a partial function's of its function.

    The thread that holds it may take it again.
    """
    behind = _behind(used)
    found = _locks.get(id(behind))
    return found[0] if found is not None else _make(behind)


def _behind(used: Any) -> Any:
    while isinstance(used, partial):
        used = used.func
    owner = getattr(used, "__self__", None)
    return (
        used if owner is None or isinstance(owner, ModuleType) else owner
    )  # a built-in function's owner is its module


def _make(behind: Any) -> Turn:
    with _making:
        if id(behind) not in _locks:
            held: object
            try:
                # Its id may be another's once it is gone.
                held = weakref.ref(behind, partial(_forget, id(behind)))
            except TypeError:
                held = behind  # kept for ever, as an object without weak references cannot say when it is gone
            _locks[id(behind)] = (Turn(), held)
        return _locks[id(behind)][0]


def _forget(identity: int, reference: object) -> None:
    found = _locks.get(identity)
    if found is not None and found[1] is reference:
        del _locks[identity]


def _begin_anew() -> None:
    """In a forked child, nobody is left to release what other threads of the parent held."""
    global _making
    _making = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
