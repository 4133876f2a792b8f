"""Lost ranks: a collective failed -> which ranks of its group are gone.

Every rank that sees it fail leaves a note in the group's store; who leaves none has died or hangs.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

_NOTES_SECONDS = 3.0  # Others see the same failure at about the same time.


def name_lost(group: Any = None) -> str:
    """What to add to an error: "; no word from rank 3, which died or hangs". Empty where it cannot be known: without a
    store, which goes with the process that serves it, or where every rank has only lost connections.

    Args:
        group: of the collective; default: all ranks. Its ranks are named as the group numbers them.
    """
    missing = _missing(dist.group.WORLD if group is None else group)
    if not missing:
        return ""
    named = ", ".join(map(str, missing))
    if len(missing) == 1:
        return f"; no word from rank {named}, which died or hangs"
    return f"; no word from ranks {named}, which died or hang"


def _missing(group: Any) -> list[int]:
    try:
        store = group.get_group_store()
        store.set(f"orchdata/lost/{dist.get_rank(group)}", "1")
        waiting = set(range(dist.get_world_size(group)))
        deadline = time.monotonic() + _NOTES_SECONDS
        while waiting and time.monotonic() < deadline:
            waiting = {rank for rank in waiting if not store.check([f"orchdata/lost/{rank}"])}
            time.sleep(0.02)
    except (RuntimeError, AttributeError):
        return []
    return sorted(waiting)
