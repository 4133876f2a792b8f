"""Work that one rank of a job does for all: the first rank that requests it does it, the others wait for the result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchdata.ranks.agreement import JobStore

PATIENCE_SECONDS = 120.0
"""After this time a rank does the work itself: the first one may be lost."""


def done_by_first(name: str, work: Callable[[], Any]) -> Any:
    """Return the result of `work()`, a JSON value, done by the first rank of the job that requests this name; maybe
    twice. A rank does not wait for ranks that never request it, so a loader on one rank alone does not hang. Without
    torch.distributed, or a store, every process does it. Where `work` raises on the first rank, others do it
    themselves. Raises RuntimeError if the store of the job does not answer.
    """
    job, key = _job(), f"first/{name}/result"
    if job is None:
        return work()
    if job.ask(lambda store: store.add(f"first/{name}/askers", 1)) == 1:
        try:
            result = work()
        except BaseException:
            job.ask(lambda store: store.set(key, "[]"))
            raise
        job.ask(lambda store: store.set(key, json.dumps([result])))
        return result
    import torch.distributed as dist

    until, pause = time.monotonic() + min(job.timeout, PATIENCE_SECONDS), 0.002
    while not job.ask(lambda store: store.check([key])):
        if time.monotonic() >= until:
            return work()
        time.sleep(pause)
        pause = min(2 * pause, max(0.1, dist.get_world_size() / 5000))  # one server answers all ranks
    results = json.loads(job.ask(lambda store: store.get(key)))
    return results[0] if results else work()


def is_first(name: str) -> bool:
    """Return whether this rank, or every process without a store, is the first of the job that asks for this name.
    Raises RuntimeError as `done_by_first`.
    """
    job = _job()
    return job is None or job.ask(lambda store: store.add(f"first/{name}/askers", 1)) == 1


def _job() -> JobStore | None:
    """Return the store of the job; None if there are no other ranks."""
    if "torch.distributed" not in sys.modules:  # then there is no group; importing it takes a second
        return None
    import torch.distributed as dist

    from orchdata.ranks.agreement import JobStore, job_store
    from orchdata.ranks.parallel import group_timeout

    store = job_store() if dist.is_available() and dist.is_initialized() else None
    if store is None or dist.get_world_size() == 1:
        return None
    return JobStore(store, group_timeout(dist.group.WORLD).total_seconds())
