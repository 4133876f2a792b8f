"""The threads of Hugging Face's tokenizers in a process, and what becomes of them in a fork.

`tokenizers` starts one thread a core at its first batch, or RAYON_NUM_THREADS, and asks at each batch whether to use
them: TOKENIZERS_PARALLELISM. In a forked process they do not exist, and a batch would wait for them for ever.
"""

from __future__ import annotations

import os
import threading
from typing import Final

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
