"""Which shards a node has of its own: those that no other node reads. A cache keeps these, and no others.

streams of the order --shared out evenly over the ranks, under scope "grouped"--> streams of the node
"""

from __future__ import annotations

from orchdata.notices import warn_once
from orchdata.planning.balance import Balance
from orchdata.planning.make_plan import PlanSpec
from orchdata.planning.windows import WindowBatches
from orchdata.ranks.parallel import Rank


def own_streams(rank: Rank, balance: Balance, num_streams: int) -> range | None:
    """Return the streams of the order that this rank's node alone reads; None if every node reads every shard.

    A node has streams of its own if it is the only one, or if samples stay in groups of ranks (scope "grouped"), and
    both groups and streams end where the ranks of a node do.

    Args:
        balance: of the loader, with a group size under scope "grouped".
    """
    per_node = _ranks_per_node(rank, balance)
    if per_node is None:
        return None
    if per_node >= rank.size:
        return range(num_streams)
    if balance.scope != "grouped":
        return None
    bounds = range(0, rank.size, per_node)
    if any(bound * num_streams % rank.size or bound % (balance.group_size or per_node) for bound in bounds):
        return None
    first = rank.rank // per_node * per_node
    stop = min(first + per_node, rank.size)
    return range(first * num_streams // rank.size, stop * num_streams // rank.size)


def streams_of_node(rank: Rank, plan: PlanSpec, num_streams: int) -> range | None:
    """Return `own_streams` under a plan: windows of concatenated documents take documents of all streams."""
    own = own_streams(rank, plan.balance, num_streams)
    is_mixed = isinstance(plan.batches, WindowBatches) and own is not None and len(own) < num_streams
    return None if is_mixed else own


def warn_of_none(rank: Rank, plan: PlanSpec) -> None:
    """Warn once, on the first rank, that a cache has nothing to keep, and say what would change that."""
    if rank.rank:
        return
    per_node = _ranks_per_node(rank, plan.balance)
    if per_node is None:
        nodes, groups = "every node", "<groups>"
        unknown = ", and LOCAL_WORLD_SIZE or od.DataParallel(ranks_per_node=...) must say which ranks a node has"
    else:
        number = -(-rank.size // per_node)
        nodes, groups, unknown = f"each of the {number} nodes", str(number), ""
    way_out = (
        f'balance="grouped" and shuffle=od.Shuffle(streams={groups}) (or a multiple), with groups that are nodes, give '
        f"each node shards of its own{unknown}"
    )
    if isinstance(plan.batches, WindowBatches):
        way_out = (
            f"windows of concatenated documents take documents of all streams; without concatenate=True, {way_out}"
        )
    warn_once(
        "a cache that keeps nothing",
        f"cache= fetches no shard: in this order {nodes} reads from every shard, and a sample that a node reads in one "
        f"epoch is read by another in the next; {way_out}",
    )


def _ranks_per_node(rank: Rank, balance: Balance) -> int | None:
    """Return the ranks of a node; by default a group is a node."""
    if rank.size == 1:
        return 1
    return rank.ranks_per_node or (balance.group_size if balance.scope == "grouped" else None)
