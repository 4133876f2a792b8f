"""One lock for each object that must not be used by two threads at once, such as a tokenizer; tokenizers in forks.

The lock belongs to the object and not to its owner: two recipes with the same tokenizer take turns, and a recipe stays
a frozen value that pickles.

Hugging Face's `tokenizers` starts one thread a core at its first batch, or RAYON_NUM_THREADS, and asks at each batch
whether to use them: TOKENIZERS_PARALLELISM. In a forked process they do not exist, and a batch would wait for them for
ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any, Final

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


_USE: Final = "TOKENIZERS_PARALLELISM"
_COUNT: Final = "RAYON_NUM_THREADS"


class _Forks:
    """What this process knows about its threads and forks: `may_have_threads` if a tokenizer was used in it,
    `lost_threads` if it is a fork of such a process.
    """

    def __init__(self) -> None:
        self.may_have_threads = self.lost_threads = False
        self._lock = threading.Lock()
        self._under_way = 0

    def before(self) -> None:
        """In a process with threads, set the variable for the fork: `tokenizers` then prints no warning in it."""
        with self._lock:
            if self.may_have_threads and (self._under_way or _USE not in os.environ):
                self._under_way += 1
                os.environ[_USE] = "false"

    def after_in_parent(self) -> None:
        with self._lock:
            if self._under_way:
                self._under_way -= 1
                if not self._under_way:
                    del os.environ[_USE]

    def after_in_child(self) -> None:
        self.lost_threads |= self.may_have_threads
        self.may_have_threads = False
        self._lock = threading.Lock()
        self._under_way = 0
        self.use_no_lost_threads()

    def use_no_lost_threads(self) -> None:
        if self.lost_threads:
            os.environ[_USE] = "false"


_forks = _Forks()
os.register_at_fork(before=_forks.before, after_in_parent=_forks.after_in_parent, after_in_child=_forks.after_in_child)


def note_threads() -> None:
    """Note that this process may have threads of `tokenizers` from now on."""
    _forks.may_have_threads = True


def share_cores(processes: int) -> None:
    """Let the tokenizers of this process use its part of the cores, as one of so many at work. Call it before the first
    text. What the user has set holds, except that a fork of a process with threads of `tokenizers` uses none.
    """
    os.environ.setdefault(_COUNT, str(max(1, len(os.sched_getaffinity(0)) // processes)))
    _forks.use_no_lost_threads()
