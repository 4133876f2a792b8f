"""Posting: what each rank says in a round, in the store of the job; any rank may read it, none waits for another to.

    of/RANK       digest of what the rank said          with/DIGEST   how many ranks said that
    says/DIGEST   it, as JSON                           all           how many have said anything

Equal ranks are found by two counters, however many they are: nobody reads what the others said. A round that ended so
is deleted by those who saw it; who differs, or is missing, is looked up only where that is to be told.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Thread
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from orchdata.held_threads import hold_at_end

T = TypeVar("T")

_INIT_SECONDS = 10.0  # Rank 0 comes to init_process_group about when the others do.

Said = Mapping[str, Any]


class JobStore:
    """The store of the job, under names of our own. Raises RuntimeError where it is gone or does not answer."""

    def __init__(self, store: Any, timeout: float) -> None:
        self._store = distributed_c10d.PrefixStore("orchdata", store)
        self.timeout = timeout

    def ask(self, call: Callable[[Any], T], seconds: float | None = None) -> T:
        """`call(store)`, given up after some seconds: a store whose server hangs takes no timeout and no Ctrl-C."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call(self._store))
            except BaseException as error:  # noqa: BLE001 - it is passed on
                answer.set_exception(error)

        limit = self.timeout if seconds is None else seconds
        asking = Thread(target=run, daemon=True, name="orchdata-store")
        hold_at_end(asking)
        asking.start()
        try:
            return answer.result(limit)
        except FutureTimeout:
            reason = f"does not answer within {limit:g} seconds"
        except RuntimeError as error:
            reason = f"cannot be reached: {error}"
        raise RuntimeError(
            f"ranks are compared through the store of the job, which {reason}; rank 0 serves it, or the launcher: look "
            "there for what ended or stopped"
        )


class Counts(NamedTuple):
    """How many ranks have said anything, and how many of them the same as this one."""

    all: int
    alike: int


class Round:
    """What `ranks` say, each once. Every method is one short exchange with the store, given by `JobStore.ask`.

    Args:
        name: of the round, the same on all ranks.
        rank: this one, of `ranks`.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], said: Said) -> None:
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._text = json.dumps(said, sort_keys=True)
        digest = hashlib.blake2b(self._text.encode(), digest_size=12).hexdigest()
        self._digest = digest
        self._says, self._with, self._all = self._key("says", digest), self._key("with", digest), self._key("all")

    def post(self, store: Any) -> None:
        """Say it. What counts comes last: nothing is counted that cannot be read."""
        if not store.check([self._says]):
            store.set(self._says, self._text)
        store.set(self._of(self._rank), self._digest)
        store.add(self._with, 1)
        store.add(self._all, 1)

    def counts(self, store: Any) -> Counts:
        """`alike` below `all` is a difference; what others say meanwhile can only make `alike` the larger one."""
        return Counts(int(store.add(self._all, 0)), int(store.add(self._with, 0)))

    def told(self, store: Any) -> dict[int, dict[str, Any]]:
        """What each rank said, of those that did."""
        silent = set(self.silent(store, len(self._ranks)))
        spoke = [rank for rank in self._ranks if rank not in silent]
        digests = dict(zip(spoke, (found.decode() for found in _values(store, map(self._of, spoke))), strict=True))
        different = sorted(set(digests.values()))
        texts = _values(store, (self._key("says", digest) for digest in different))
        said = dict(zip(different, map(json.loads, texts), strict=True))
        return {rank: said[digest] for rank, digest in digests.items()}

    def silent(self, store: Any, most: int) -> list[int]:
        """The first ranks that have said nothing, at most so many: by halves, for most ranks mostly have."""
        found: list[int] = []
        parts = [list(self._ranks)]
        while parts and len(found) < most:
            part = parts.pop()
            if not part or store.check([self._of(rank) for rank in part]):
                continue
            if len(part) == 1:
                found += part
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        return found

    def clear(self, store: Any) -> None:
        """Delete what this rank said; the last one deletes the counters. For a round in which all said the same."""
        store.delete_key(self._of(self._rank))
        if int(store.add(self._key("seen"), 1)) >= len(self._ranks):
            for key in (self._says, self._with, self._all, self._key("seen")):
                store.delete_key(key)

    def seen_by_all(self, store: Any) -> bool:
        """Of a round that this rank has cleared."""
        return not store.check([self._all])

    def _of(self, rank: int) -> str:
        return self._key("of", rank)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._name, *parts)))


def job_store() -> Any:
    """The store that init_process_group was given or made; None where the backend does without (MPI, fake)."""
    return None if distributed_c10d.get_backend() in ("fake", "mpi") else distributed_c10d._get_default_store()


def name_job(store: Any, counter: str) -> str:
    """A name for the process group among those that one store serves, the same on all its ranks.

    It is made of what init_process_group itself left in the store: the address that gloo on rank 0 listens at. A group
    without gloo leaves no such trace: counted by `counter` are then those in which this rank has made a loader.
    """
    if not dist.is_initialized():
        return str(store.add(counter, 1))
    if dist.group.WORLD not in _names:
        _names[dist.group.WORLD] = _left_by_gloo() or str(store.add(counter, 1))
        _used.add(_names[dist.group.WORLD])
    return _names[dist.group.WORLD]


_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_used: set[str] = set()


def _left_by_gloo() -> str | None:
    left = distributed_c10d._get_default_store()
    address = "cpu//0/0"  # by torch's prefixes: device, its first interface, rank
    if not left.check([address]):
        return None
    until = time.monotonic() + _INIT_SECONDS
    while True:  # gloo connects in the background: rank 0 may not have come, and what is left is its last group's
        name = hashlib.blake2b(left.get(address), digest_size=8).hexdigest()
        if name not in _used or time.monotonic() >= until:
            return name
        time.sleep(0.01)


def _values(store: Any, keys: Any) -> list[bytes]:
    listed = list(keys)
    if not listed:
        return []
    return list(store.multi_get(listed)) if store.has_extended_api() else [store.get(key) for key in listed]
