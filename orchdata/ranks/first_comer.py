"""Work that one rank of a job does for all: the rank that asks first does it, the others wait for what it found."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from orchdata.ranks.parallel import group_timeout
from orchdata.ranks.posting import JobStore, job_store

PATIENCE_SECONDS = 120.0
"""After so long a rank does the work itself: the first one may be lost."""


def done_by_first(name: str, work: Callable[[], Any]) -> Any:
    """What `work()` returns, done by the first rank of the job that asks for this name, once in a job.

    A rank on which nobody else waits is its own first, so that a loader on one rank alone does not hang. Without
    torch.distributed, or a store, every process works for itself. Errors of `work` are raised where they happen; then
    the other ranks work for themselves.

    Args:
        name: of the work; the same work has the same name on all ranks.
        work: returns what JSON can hold; does no harm if it is done twice.

    Raises RuntimeError where the store of the job does not answer.
    """
    store = job_store() if dist.is_available() and dist.is_initialized() else None
    if store is None or dist.get_world_size() == 1:
        return work()
    timeout = group_timeout(dist.group.WORLD).total_seconds()
    job, found = JobStore(store, timeout), f"first/{name}/found"
    if job.ask(lambda store: store.add(f"first/{name}/askers", 1)) == 1:
        try:
            result = work()
        except BaseException:
            job.ask(lambda store: store.set(found, "[]"))
            raise
        job.ask(lambda store: store.set(found, json.dumps([result])))
        return result
    until, pause = time.monotonic() + min(timeout, PATIENCE_SECONDS), 0.002
    while not job.ask(lambda store: store.check([found])):
        if time.monotonic() >= until:
            return work()
        time.sleep(pause)
        pause = min(2 * pause, max(0.1, dist.get_world_size() / 5000))  # one server answers all ranks
    told = json.loads(job.ask(lambda store: store.get(found)))
    return told[0] if told else work()
