"""Compressed tars of a store that the cache folder cannot hold decompressed: each is fetched several times an epoch."""

from __future__ import annotations

from orchdata.caching.own import streams_of_node
from orchdata.loaders.index.index import Index
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.notices import warn_once
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order
from orchdata.planning.make_plan import PlanSpec
from orchdata.ranks.parallel import Rank


def warn_of_fetches(index: Index, plan: PlanSpec, rank: Rank) -> None:
    """Warn once, on the first rank, that compressed tars are fetched again and again."""
    order = plan.order
    if rank.rank or not isinstance(order, Order | MixtureOrder):
        return
    own, cap = streams_of_node(rank, plan, order.streams), CacheFolder().max_bytes
    num_bytes = int(decompressed(index) * (1.0 if own is None else len(own) / order.streams))
    if num_bytes > cap:
        warn_once(
            f"compressed tars of {index.fingerprint}",
            f"the compressed tars that a node reads take about {num_bytes:,} bytes decompressed, and its cache folder "
            f"holds {cap:,}: they are fetched several times in an epoch. Store plain tars, or fewer for each node: "
            'balance="grouped" and shuffle=od.Shuffle(streams=<groups>)',
        )


def decompressed(index: Index) -> int:
    """Return about how many bytes the compressed tars of object storage have decompressed: little besides members."""
    stored = sum(shard.size for shard in index.shards if shard.packed and is_remote(shard.url))
    whole = sum(shard.size for shard in index.shards)
    return max(stored, int(index.totals["bytes"]) * stored // max(1, whole))
