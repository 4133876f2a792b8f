"""Which data-parallel rank this process is, and out of how many."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

from orchdata.balancers.checks import checked_count


@dataclass(frozen=True, slots=True)
class Rank:
    """A data-parallel rank: its number, how many there are, and the process group if one is known."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"dp size must be at least 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"dp rank must be in 0..{self.size - 1}, got {self.rank}")


def resolve_rank(dp: Any = None) -> Rank:
    """The rank meant by `dp`: None (torch.distributed's world, else a single rank), (rank, size), a process
    group, or a one-dimensional DeviceMesh.

    Raises ValueError for a process that is not in the group, or a mesh whose data-parallel dims are not named.
    """
    import torch.distributed as dist

    if isinstance(dp, Rank):
        return dp
    if isinstance(dp, tuple):
        if len(dp) != 2:
            raise ValueError(f"dp as a tuple is (rank, size), got {dp!r}")
        return Rank(checked_count(dp[0], "dp rank", 0), checked_count(dp[1], "dp size"))
    if dp is None:
        if not (dist.is_available() and dist.is_initialized()):
            _warn_of_a_launcher()
            return Rank()
        return Rank(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    if hasattr(dp, "get_group") and hasattr(dp, "ndim"):
        if dp.ndim != 1:
            raise ValueError(
                f"dp is a mesh of {dp.ndim} dims {dp.mesh_dim_names}: pass the data-parallel one, mesh['dp']"
            )
        dp = dp.get_group()
    if dist.is_available() and dp == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("dp is a process group this process does not belong to")
    if not (dist.is_available() and isinstance(dp, dist.ProcessGroup)):
        raise TypeError(f"dp is a process group, a one-dimensional DeviceMesh or (rank, size), got {dp!r}")
    rank = dist.get_rank(dp)
    if rank < 0:
        raise ValueError("dp is a process group this process does not belong to")
    return Rank(rank, dist.get_world_size(dp), dp)


def _warn_of_a_launcher() -> None:
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE is {launched}, but torch.distributed is not initialized, so this loader takes itself for the "
            "only rank and every rank gets every sample: make it after init_process_group, or pass dp=(rank, size)",
            stacklevel=4,
        )
