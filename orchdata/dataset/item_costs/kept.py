"""Costs of items, kept in the cache folder under a name that the user gives.

name --> file of the cache folder --some items are tried again--> costs, if they are the same; else all are measured

Nothing identifies a map-style data set and a function safely, so without a name nothing is kept for another run. Of
several processes with one cache folder, one measures, and the others wait for its file. The ranks of a job agree on a
name of their own if none is given.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from orchdata.dataset.item_costs.measure import FAILED, ItemCosts
from orchdata.engines.engine import Workers
from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import DataError
from orchdata.loaders.functions import source_digest
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.opening import names_in
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.notices import warn_user
from orchdata.ranks.first_comer import done_by_first

Ints = NDArray[np.int64]
KIND: Final = b"item"
FORMAT: Final = 1
_CHECKED: Final = 8
"""Items whose costs are compared when they are read."""
_JOB_PREFIX: Final = "job-"
"""Of files that only the ranks of one job read."""
_KEEP_SECONDS: Final = 24 * 3600
_made_in_job: Counter[str] = Counter()


def costs_of_items(
    items: ItemCosts,
    cost_id: str | None,
    workers: Workers,
    progress: Callable[[float, int], None] | None = None,
    *,
    is_shared: bool = False,
) -> tuple[Ints, list[DataError]]:
    """Return the cost of each item, 0 for those that cannot be loaded, and their failures. Raises as `measured`.

    Args:
        cost_id: names the data set's content and the function; None: nothing is kept for another run.
        is_shared: whether other ranks of this job make a loader of the same data set.
    """
    name, prefix = cost_id, ""
    if name is None and is_shared and (name := _name_in_job(items)) is not None:
        prefix = _JOB_PREFIX
    if name is None:
        costs, failures = items.measured(np.arange(len(items.dataset)), workers, progress)
    else:
        costs, failures = _kept(items, name, prefix, workers, progress)
    return np.maximum(costs, 0), failures


def _name_in_job(items: ItemCosts) -> str | None:
    """Return a new name that all ranks of this job have for these costs; None without a process group.

    Their order distinguishes loaders that look alike. It may differ between ranks: items are compared as always.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    alike = _digest([*_identity(items, "").values(), source_digest(items.cost)])
    _made_in_job[alike] += 1
    return str(done_by_first(f"item costs/{alike}/{_made_in_job[alike]}", lambda: secrets.token_hex(16)))


def _kept(
    items: ItemCosts, cost_id: str, prefix: str, workers: Workers, progress: Callable[[float, int], None] | None
) -> tuple[Ints, list[DataError]]:
    cache = CacheFolder()
    identity = _identity(items, cost_id)
    name = prefix + _digest(list(identity.values()))
    path = cache.file("item_costs", f"{name}.costs")
    function = source_digest(items.cost)
    with closing(Claims(cache.file("locks", "item_costs"))) as claims, claims.claim(name, lambda: True):
        costs = _read(path, identity, len(items.dataset))
        if costs is not None and (problem := _problem(items, *costs, function)):
            warn_user(f"costs that were kept as {cost_id!r} (cost_id) are measured again: {problem}")
            costs = None
        values = np.full(len(items.dataset), FAILED, np.int64) if costs is None else costs[0]
        # Items that could not be loaded are tried again: it may have had to do with the machine.
        left = np.flatnonzero(values == FAILED)
        values[left], failures = items.measured(left, workers, progress)
        if costs is None or (len(left) and len(failures) < len(left)):
            head = {"identity": identity, "function": function}
            write_whole(path, seal(KIND, FORMAT, head, [np.ascontiguousarray(values, "<i8").tobytes()])[0])
            if prefix:
                _remove_old(path.parent)
    return values, failures


def _remove_old(folder: Path) -> None:
    """Remove day-old files of jobs, which no other run reads. Best effort."""
    with contextlib.suppress(OSError):
        for name in names_in(folder):
            if name.startswith(_JOB_PREFIX) and time.time() - (folder / name).lstat().st_mtime > _KEEP_SECONDS:
                (folder / name).unlink()


def _digest(texts: list[str]) -> str:
    return hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _identity(items: ItemCosts, cost_id: str) -> dict[str, str]:
    """Return what the file is named by."""
    dataset = items.dataset
    fingerprint = getattr(dataset, "_fingerprint", None)  # of a `datasets.Dataset`
    return {
        "cost_id": cost_id,
        "type": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        "length": str(len(dataset)),
        "fingerprint": fingerprint if isinstance(fingerprint, str) else "",
    }


def _read(path: Path, identity: dict[str, str], count: int) -> tuple[Ints, str] | None:
    """Return the costs of a file, and the digest of the function that made them; None if there is none, or no whole
    one.
    """
    with contextlib.suppress(OSError, ValueError):
        head, body = read_sealed(path, KIND, FORMAT)
        function: Any = head.values.get("function")
        if head.values.get("identity") == identity and isinstance(function, str) and len(body) == 8 * count:
            costs = np.frombuffer(body, "<i8").astype(np.int64)
            return (costs, function) if not count or int(costs.min()) >= FAILED else None
    return None


def _problem(items: ItemCosts, costs: Ints, made_by: str, function: str) -> str | None:
    """Return why costs that were kept are not those of these items, or None."""
    if made_by != function:
        return "the source text of the function is another one"
    usable = np.flatnonzero(costs != FAILED)
    chosen = np.random.default_rng(len(costs)).permutation(usable)[:_CHECKED]
    for row in np.sort(chosen).tolist():
        now = items.of(row)
        if now != costs[row]:
            then = int(costs[row])
            return (
                f"item {row} had the cost {then}, and now "
                + (f"has {now}" if isinstance(now, int) else f"none ({now if isinstance(now, str) else now[3]})")
                + ". Give changed data, or another function, another cost_id"
            )
    return None
