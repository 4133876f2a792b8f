"""One lock for each object that must not be used by two threads at once, such as a tokenizer.

The lock belongs to the object and not to its owner: two recipes with the same tokenizer take turns, and a recipe stays
a frozen value that pickles.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any

Lock = AbstractContextManager[Any]

_locks: dict[int, tuple[Lock, object]] = {}
_making = threading.Lock()


def lock_of(used: Any) -> Lock:
    """Return the lock of an object: for a bound method that of its object, for a partial function that of its function.
    The thread that has it may take it again.
    """
    while isinstance(used, partial):
        used = used.func
    owner = getattr(used, "__self__", None)  # a built-in function's is its module
    target = used if owner is None or isinstance(owner, ModuleType) else owner
    if (entry := _locks.get(id(target))) is not None:
        return entry[0]
    with _making:
        if id(target) not in _locks:
            reference: object
            try:
                # Another object may get its id once it is gone.
                reference = weakref.ref(target, partial(_forget, id(target)))
            except TypeError:
                reference = target  # kept for ever: an object without weak references cannot say when it is gone
            _locks[id(target)] = (threading.RLock(), reference)
        return _locks[id(target)][0]


def _forget(identity: int, reference: object) -> None:
    entry = _locks.get(identity)
    if entry is not None and entry[1] is reference:
        del _locks[identity]


def _reset() -> None:
    """In a forked child, drop the locks: those of the parent's other threads would never be released."""
    global _making
    _making = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
