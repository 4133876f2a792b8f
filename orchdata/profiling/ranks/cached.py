"""What the nodes read from object storage if each has a cache: predicted from sizes, for each scope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from orchdata.caching.own import own_streams
from orchdata.planning.balance import Balance
from orchdata.ranks.parallel import Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReads:
    """Predicted reads of a node with a cache in an epoch, from the second on.

    Attributes:
        hits: share of the bytes that it reads from its cache.
        fetched_bytes: bytes that it reads from object storage.
    """

    hits: float
    fetched_bytes: int


class NodeCache(NamedTuple):
    """A cache on each node, and the data.

    Attributes:
        max_bytes: cap of each cache.
        stored_bytes: of all shards.
        read_bytes: what samples take in an epoch, over all nodes, read by range.
    """

    max_bytes: int
    stored_bytes: int
    read_bytes: int

    def reads(self, balance: Balance, *, ranks: int, group_size: int, streams: int) -> NodeReads:
        """Return what a node reads, if nodes are groups of ranks."""
        own = own_streams(Rank(0, ranks, ranks_per_node=group_size), balance, streams)
        part = min(1.0, group_size / ranks)
        hits = 0.0
        if own is not None:
            stored = self.stored_bytes * len(own) / streams
            hits = min(1.0, self.max_bytes / max(1.0, stored))
        return NodeReads(hits=hits, fetched_bytes=round(self.read_bytes * part * (1 - hits)))
