"""Compressed tars of a store: how often each is fetched in an epoch, where the cache folder cannot hold all of them."""

from __future__ import annotations

from typing import Final, NamedTuple

from orchdata.caching.own import streams_of_node
from orchdata.loaders.index.index import Index
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.native.permutation import BLOCK
from orchdata.notices import warn_once
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order, Shuffle
from orchdata.planning.make_plan import PlanSpec
from orchdata.ranks.parallel import Rank

_OPEN: Final = 64
"""Shards that a process keeps open: an open one is read after it was removed from the folder."""


class Fetches(NamedTuple):
    """Fetches of compressed tars.

    Attributes:
        times: how often a node fetches each in an epoch.
        decompressed: estimated bytes of all that it reads.
    """

    times: float
    decompressed: int


def warn_of_fetches(index: Index, plan: PlanSpec, rank: Rank) -> None:
    """Warn once, on the first rank, that compressed tars are fetched again and again."""
    order = plan.order
    if rank.rank or not isinstance(order, Order | MixtureOrder):
        return
    own = streams_of_node(rank, plan, order.streams)
    cap = CacheFolder().max_bytes
    found = fetches_of(
        index,
        (order if isinstance(order, Order) else order.sources[0].order).shuffle,
        shards=1.0 if own is None else len(own) / order.streams,
        samples=min(1.0, (rank.ranks_per_node or rank.size) / rank.size),
        cap=cap,
    )
    if found is not None:
        warn_once(
            f"compressed tars of {index.fingerprint}",
            f"the compressed tars that a node reads take about {found.decompressed:,} bytes decompressed, and its "
            f"cache folder holds {cap:,}: each is fetched about {found.times:.1f} times in an epoch. Store plain tars, "
            'or fewer for each node: balance="grouped" and shuffle=od.Shuffle(streams=<groups>)',
        )


def fetches_of(index: Index, shuffle: Shuffle | None, *, shards: float, samples: float, cap: int) -> Fetches | None:
    """Estimate how often a node fetches each compressed tar in an epoch; None if the cache folder holds all of them, or
    there are none.

    The blocks of a shard are in different windows of the order. When the order comes to a shard again, the folder has
    it with the probability cap / decompressed bytes.

    Args:
        shuffle: of the loader; None without shuffling.
        shards, samples: the parts of shards and samples that a node reads.
        cap: bytes of decompressed shards that the folder holds.
    """
    packed = [shard for shard in index.shards if shard.packed and is_remote(shard.url)]
    if not packed:
        return None
    stored, all_stored = sum(shard.size for shard in packed), sum(shard.size for shard in index.shards)
    # A tar has little besides its members.
    decompressed = int(shards * max(stored, index.totals["bytes"] * stored / max(1, all_stored)))
    if decompressed <= cap:
        return None
    number, per_shard = shards * len(index.shards), index.num_rows / len(index.shards)
    visits = 1.0
    if shuffle is not None:
        windows = max(1.0, index.num_rows / (BLOCK * shuffle.window))
        visits = windows * (1 - (1 - 1 / windows) ** max(1.0, per_shard / BLOCK))
        together = min(number, BLOCK * shuffle.window / max(1.0, min(per_shard, BLOCK)))
        if together > _OPEN and together * decompressed / max(1.0, number) > cap:
            visits = per_shard * samples  # one window alone is above the cap
    return Fetches(max(1.0, visits * (1 - cap / decompressed)), decompressed)
