"""The stores of torch.distributed: that of the job, and notes that ranks leave in their group's after a failure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")

_WAIT_SECONDS = 5.0  # Other ranks see the same failure at about the same time.
_calls: Counter[tuple[str, str]] = Counter()


class JobStore:
    """The store of the job, with a prefix for our keys. Raises RuntimeError if it has ended or does not answer."""

    def __init__(self, store: Any, timeout: float) -> None:
        self._store = distributed_c10d.PrefixStore("orchdata", store)
        self.timeout = timeout

    def ask(self, call: Callable[[Any], T], seconds: float | None = None) -> T:
        """Return `call(store)`, with a timeout: a store with a server that hangs takes no timeout, and no Ctrl-C."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call(self._store))
            except BaseException as error:  # noqa: BLE001 - it is passed on
                answer.set_exception(error)

        limit = self.timeout if seconds is None else seconds
        asking = Thread(target=run, daemon=True, name="orchdata-store")
        asking.start()
        try:
            return answer.result(limit)
        except FutureTimeout:
            reason = f"does not answer within {limit:g} seconds"
        except RuntimeError as error:
            reason = f"cannot be reached: {error}"
        raise RuntimeError(
            f"ranks are compared through the store of the job, which {reason}; rank 0 or the launcher serves it: check "
            "there whether it ended or stopped"
        )


def job_store() -> Any:
    """Return the store that init_process_group was given or created; None if the backend has none (MPI, fake)."""
    return None if distributed_c10d.get_backend() in ("fake", "mpi") else distributed_c10d._get_default_store()


class Reason(NamedTuple):
    """Why a rank of the group could not continue."""

    rank: int
    text: str


class Notes:
    """What ranks of a group leave in its store after a collective failed: backends report a lost rank only to some of
    the others, and never say which one it is. A rank without a note has died or hangs.

    Without a store there are none; the store ends with the process that serves it.

    Args:
        group: ranks are numbered as in it; None for a single rank.
        about: name of the call or object, the same on all ranks, and used once in the group.
    """

    def __init__(self, group: Any, about: str) -> None:
        self._store = group
        self._store = self._ask(store_of)  # some backends do without, or raise
        self._about = f"orchdata/notes/{about}"
        self._rank, self._size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    @property
    def readable(self) -> bool:
        """Whether the store has answered all calls so far."""
        return self._store is not None

    def leave(self, why: str = "") -> None:
        """Leave this rank's note, if it has left none: why it cannot continue, or "" if it only noticed a failure."""
        if self._has(f"of/{self._rank}"):
            return
        if why:  # the first reason explains the others
            text = f"{self._rank} {why}".encode(errors="replace").decode()
            self._ask(lambda store: store.compare_set(f"{self._about}/reason", "", text))
        self._ask(lambda store: store.set(f"{self._about}/of/{self._rank}", "1"))

    def close(self) -> None:
        """Note that no rank continues: ranks that are in no collective now check this with `closed`."""
        self._ask(lambda store: store.set(f"{self._about}/closed", "1"))

    def closed(self) -> bool:
        return self._has("closed")

    def reason(self) -> Reason | None:
        """Return the first reason that a rank left."""
        if not self._has("reason"):
            return None
        rank, _, text = (self._ask(lambda store: store.get(f"{self._about}/reason")) or b"").decode().partition(" ")
        return Reason(int(rank), text) if rank else None

    def missing(self) -> list[int]:
        """Return the ranks without a note, after all have left one, a rank gave a reason, or some seconds."""
        deadline = time.monotonic() + _WAIT_SECONDS
        names = [f"of/{rank}" for rank in range(self._size)]
        while self.readable and time.monotonic() < deadline and not (self._has(*names) or self._has("reason")):
            time.sleep(0.02)
        missing = [rank for rank, name in enumerate(names) if not self._has(name)]
        return missing if self.readable else []

    def _has(self, *names: str) -> bool:
        return bool(self._ask(lambda store: store.check([f"{self._about}/{name}" for name in names])))

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
    return distributed_c10d._get_process_group_store(group)  # before torch 2.7


def name_call(kind: str, group: Any = None) -> str:
    """Return a name for notes about the call that begins, the same on all ranks of the group (default: all), which make
    calls of a kind in the same sequence. They are counted by the group's name: a later one of that name has its store.
    """
    named = kind, getattr(dist.group.WORLD if group is None else group, "group_name", "")
    _calls[named] += 1
    return f"{kind}/{_calls[named]}"


def name_missing(group: Any, about: str) -> str:
    """Leave a note about a collective of the group (None: all ranks) that failed, and return what to add to an error:
    "; no word from rank 3, which died or hangs"; "" if it cannot be known: without a store, or if every rank has only
    lost connections.
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
