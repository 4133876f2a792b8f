"""Posting: each rank posts a value per round in the store of the job; any rank may read it, and posting never waits.

    of/RANK       digest of the rank's value            with/DIGEST   the number of ranks with this value
    says/DIGEST   the value, as JSON                    all           the number of ranks that have posted

Two counters show whether all values are equal, for any number of ranks: no rank reads the values of others. Ranks that
have seen this delete the round; which ranks differ, or are missing, is looked up only for an error or a warning.
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

T = TypeVar("T")

_INIT_SECONDS = 10.0  # Rank 0 calls init_process_group at about the same time as the others.


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


class Counts(NamedTuple):
    """The number of ranks that have posted, and of those with the same value as this one."""

    all: int
    alike: int


class Round:
    """One value from each of `ranks`. Every method makes short calls of the store, which `JobStore.ask` passes.

    Args:
        name: of the round, the same on all ranks.
        rank: this one, of `ranks`.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], value: Mapping[str, Any]) -> None:
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._text = json.dumps(value, sort_keys=True)
        digest = hashlib.blake2b(self._text.encode(), digest_size=12).hexdigest()
        self._digest = digest
        self._says, self._with, self._all = self._key("says", digest), self._key("with", digest), self._key("all")

    def post(self, store: Any) -> None:
        """Post this rank's value. The counters come last: a value that is counted can be read."""
        if not store.check([self._says]):
            store.set(self._says, self._text)
        store.set(self._of(self._rank), self._digest)
        store.add(self._with, 1)
        store.add(self._all, 1)

    def counts(self, store: Any) -> Counts:
        """Return the counts. `alike` below `all` means a difference: posts between the two reads only raise `alike`."""
        return Counts(int(store.add(self._all, 0)), int(store.add(self._with, 0)))

    def values(self, store: Any) -> dict[int, dict[str, Any]]:
        """Return the values of the ranks that have posted."""
        silent = set(self.silent(store, len(self._ranks)))
        posted = [rank for rank in self._ranks if rank not in silent]
        digests = dict(zip(posted, (each.decode() for each in _values(store, map(self._of, posted))), strict=True))
        different = sorted(set(digests.values()))
        texts = _values(store, (self._key("says", digest) for digest in different))
        values = dict(zip(different, map(json.loads, texts), strict=True))
        return {rank: values[digest] for rank, digest in digests.items()}

    def silent(self, store: Any, most: int) -> list[int]:
        """Return the first ranks that have not posted, `most` at most. Searches by halves, as few ranks are missing."""
        silent: list[int] = []
        parts = [list(self._ranks)]
        while parts and len(silent) < most:
            part = parts.pop()
            if not part or store.check([self._of(rank) for rank in part]):
                continue
            if len(part) == 1:
                silent += part
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        return silent

    def clear(self, store: Any) -> None:
        """Delete this rank's post; the last rank deletes the counters. For a round in which all values are equal."""
        store.delete_key(self._of(self._rank))
        if int(store.add(self._key("seen"), 1)) >= len(self._ranks):
            for key in (self._says, self._with, self._all, self._key("seen")):
                store.delete_key(key)

    def seen_by_all(self, store: Any) -> bool:
        """Return whether all ranks have cleared a round that this rank has cleared."""
        return not store.check([self._all])

    def _of(self, rank: int) -> str:
        return self._key("of", rank)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._name, *parts)))


def job_store() -> Any:
    """Return the store that init_process_group was given or created; None if the backend has none (MPI, fake)."""
    return None if distributed_c10d.get_backend() in ("fake", "mpi") else distributed_c10d._get_default_store()


def name_job(store: Any, counter: str) -> str:
    """Return a name for the process group among those that one store serves, the same on all its ranks.

    It is a digest of an entry of init_process_group in the store: the address at which gloo on rank 0 listens. A group
    without gloo leaves no entry: `counter` then counts the groups in which this rank has made a loader.
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
    store = distributed_c10d._get_default_store()
    address = "cpu//0/0"  # by torch's prefixes: device, its first interface, rank
    if not store.check([address]):
        return None
    until = time.monotonic() + _INIT_SECONDS
    while True:  # gloo connects in the background: rank 0 may be late, and the entry is then of its last group
        name = hashlib.blake2b(store.get(address), digest_size=8).hexdigest()
        if name not in _used or time.monotonic() >= until:
            return name
        time.sleep(0.01)


def _values(store: Any, keys: Any) -> list[bytes]:
    listed = list(keys)
    if not listed:
        return []
    return list(store.multi_get(listed)) if store.has_extended_api() else [store.get(key) for key in listed]
