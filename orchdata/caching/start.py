"""What fills the cache of a loader."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from orchdata.building.spec import BuildSpec
from orchdata.caching.filler import Filler, Place
from orchdata.caching.own import streams_of_node, warn_of_none
from orchdata.caching.packed import warn_of_fetches
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.storage.node.cache import Cache
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loop.loop import Stream
from orchdata.notices import warn_once
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order
from orchdata.ranks.parallel import Rank


def filler_of(
    spec: BuildSpec, rank: Rank, cache: Cache | None, reads: ReadBytes | None, *, forks: bool
) -> Filler | None:
    """Return what fills the cache of a loader; None if there is nothing to fill. Warns once if that is a surprise.

    Args:
        reads: counts what is fetched.
        forks: whether workers are forked from this process.
    """
    shards = spec.shards
    order = spec.plan.order
    if shards is None or not isinstance(order, Order | MixtureOrder):
        return None
    if not any(is_remote(shard.url) for shard in shards.index.shards):
        return None
    warn_of_fetches(shards.index, spec.plan, rank)
    if cache is None or reads is None:
        return None
    own = streams_of_node(rank, spec.plan, order.streams)
    if own is None:
        warn_of_none(rank, spec.plan)
        return None
    if forks:
        if not rank.rank:
            warn_once(
                "a cache and forked workers",
                "cache= fetches no shard: workers that are forked from a process that fetches cannot read object "
                'storage. Leave multiprocessing_context out, or pass "forkserver"',
            )
        return None
    streams = None if len(own) == order.streams else own
    return Filler(cache, shards.index, shards.files, order, streams, reads)


def place_of(stream: Stream, num_steps: int | None) -> Callable[[], Place]:
    """Return what says where an iteration stands, without keeping it alive.

    Args:
        num_steps: of its epoch; None if that is not known.
    """
    reference = weakref.ref(stream)
    last = Place(stream.position.epoch, 0.0)

    def where() -> Place:
        nonlocal last
        running = reference()
        if running is not None:
            last = Place(running.position.epoch, running.next_step / num_steps if num_steps else 0.0)
        return last

    return where
