"""Costs of items, kept in the cache folder under a name that the user gives.

name --> file of the cache folder --some items are tried again--> costs, if they are the same; else all are measured

Nothing identifies a map-style data set and a function safely, so without a name nothing is kept. Of several processes
with one cache folder, such as the ranks of a job, one measures, and the others wait for its file.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.item_costs.measure import FAILED, ItemCosts, Workers
from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import DataError
from orchdata.loaders.functions import source_digest
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.notices import warn_user

Ints = NDArray[np.int64]
KIND: Final = b"item"
FORMAT: Final = 1
_CHECKED: Final = 8
"""Items whose costs are compared when they are read."""


def costs_of_items(
    items: ItemCosts,
    cost_id: str | None,
    workers: Workers,
    progress: Callable[[float, int], None] | None = None,
) -> tuple[Ints, list[DataError]]:
    """Return the cost of each item, 0 for those that cannot be loaded, and their failures. Raises as `measured`.

    Args:
        cost_id: names the data set's content and the function; None: nothing is kept.
    """
    rows = np.arange(len(items.dataset))
    if cost_id is None:
        costs, failures = items.measured(rows, workers, progress)
    else:
        costs, failures = _kept(items, cost_id, workers, progress)
    return np.maximum(costs, 0), failures


def _kept(
    items: ItemCosts, cost_id: str, workers: Workers, progress: Callable[[float, int], None] | None
) -> tuple[Ints, list[DataError]]:
    cache = CacheFolder()
    identity = _identity(items, cost_id)
    name = hashlib.blake2b("\0".join(identity.values()).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    path = cache.file("item_costs", f"{name}.costs")
    function = source_digest(items.cost)
    with closing(Claims(cache.file("locks", "item_costs"))) as claims, claims.claim(name, lambda: True):
        costs = _read(path, identity, len(items.dataset))
        if costs is not None and (problem := _problem(items, *costs, function)):
            warn_user(f"costs that were kept as cost_id={cost_id!r} are measured again: {problem}")
            costs = None
        values = np.full(len(items.dataset), FAILED, np.int64) if costs is None else costs[0]
        # Items that could not be loaded are tried again: it may have had to do with the machine.
        left = np.flatnonzero(values == FAILED)
        values[left], failures = items.measured(left, workers, progress)
        if costs is None or (len(left) and len(failures) < len(left)):
            head = {"identity": identity, "function": function}
            write_whole(path, seal(KIND, FORMAT, head, [np.ascontiguousarray(values, "<i8").tobytes()])[0])
    return values, failures


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
