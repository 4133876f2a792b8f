"""Notes: ranks leave them in the store of their group after a collective failed, so that an error names lost ranks.

    rank that cannot continue --why--+
    ranks that notice ---------------+--store--> the others; a rank without a note has died or hangs

Backends report a lost rank only to some ranks, and never say which one it is. Notes are about one call, or one object,
so that those of an earlier failure are not mistaken for a later one's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_WAIT_SECONDS = 5.0  # Other ranks see the same failure at about the same time.
_calls: Counter[tuple[str, str]] = Counter()


class Reason(NamedTuple):
    """Why a rank of the group could not continue."""

    rank: int
    text: str


class Notes:
    """The notes of a group's ranks about one call or object. Without a store there are none; the store ends with the
    process that serves it.

    Args:
        group: ranks are numbered as in it; None for a single rank.
        about: name of the call or object, the same on all ranks, and used once in the group.
    """

    def __init__(self, group: Any, about: str) -> None:
        self._store = group
        self._store = self._ask(store_of)  # some backends do without, or raise
        self._about = about
        self._rank, self._size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    @property
    def readable(self) -> bool:
        """Whether the store has answered all calls so far."""
        return self._store is not None

    def leave(self, why: str = "") -> None:
        """Leave this rank's note, if it has left none: why it cannot continue, or "" if it only noticed a failure."""
        if self._has(self._of(self._rank)):
            return
        if why:  # the first reason explains the others
            text = f"{self._rank} {why}".encode(errors="replace").decode()
            self._ask(lambda store: store.compare_set(self._key("reason"), "", text))
        self._ask(lambda store: store.set(self._of(self._rank), "1"))

    def close(self) -> None:
        """Note that no rank continues: ranks that are in no collective now check this with `closed`."""
        self._ask(lambda store: store.set(self._key("closed"), "1"))

    def closed(self) -> bool:
        return self._has(self._key("closed"))

    def reason(self) -> Reason | None:
        """Return the first reason that a rank left."""
        if not self._has(self._key("reason")):
            return None
        rank, _, text = (self._ask(lambda store: store.get(self._key("reason"))) or b"").decode().partition(" ")
        return Reason(int(rank), text) if rank else None

    def missing(self) -> list[int]:
        """Return the ranks without a note, after all have left one, a rank gave a reason, or some seconds."""
        deadline = time.monotonic() + _WAIT_SECONDS
        keys = [self._of(rank) for rank in range(self._size)]
        while self.readable and time.monotonic() < deadline:
            if self._has(*keys) or self._has(self._key("reason")):
                break
            time.sleep(0.02)
        missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
        return missing if self.readable else []

    def _of(self, rank: int) -> str:
        return self._key(f"of/{rank}")

    def _key(self, name: str) -> str:
        return f"orchdata/notes/{self._about}/{name}"

    def _has(self, *keys: str) -> bool:
        return bool(self._ask(lambda store: store.check(list(keys))))

    def _ask(self, call: Callable[[Any], T]) -> T | None:
        if self._store is None:
            return None
        try:
            return call(self._store)
        except (RuntimeError, AttributeError, KeyError):
            self._store = None  # another call would only make torch warn again
            return None


def store_of(group: Any) -> Any:
    """Return the store through which the ranks of a group connected."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)  # before torch 2.7


def name_call(kind: str, group: Any = None) -> str:
    """Return a name for notes about the call that begins. It is the same on all ranks of the group, which make calls of
    a kind in the same sequence. Calls are counted by the group's name: a later group of that name has the same store.

    Args:
        group: default: all ranks.
    """
    group = dist.group.WORLD if group is None else group
    named = kind, getattr(group, "group_name", "")
    _calls[named] += 1
    return f"{kind}/{_calls[named]}"


def name_missing(group: Any, about: str) -> str:
    """Leave a note, and return what to add to an error: "; no word from rank 3, which died or hangs"; "" if it cannot
    be known: without a store, or if every rank has only lost connections.

    Args:
        group: of the collective that failed; None: all ranks.
        about: as in `Notes`.
    """
    notes = Notes(dist.group.WORLD if group is None else group, about)
    notes.leave()
    missing = notes.missing()
    return f"; {no_word_from(missing)}" if missing else ""


def no_word_from(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks))
    if len(ranks) == 1:
        return f"no word from rank {named}, which died or hangs"
    return f"no word from ranks {named}, which died or hang"
