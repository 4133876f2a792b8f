"""The data-parallel rank of this process, and the number of ranks."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from typing import Any, Literal, get_args

from orchdata.balancers.assignment import checked_count

DIMS = ("dp_replicate", "dp_shard")

Replicate = Literal["read", "broadcast"]
Gradients = Literal["equal", "partial"]


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Which ranks of a mesh are data-parallel, and how their peers get the same batches.

    Attributes:
        mesh: a DeviceMesh with named dims, or the process group of the data-parallel ranks, which has no peers.
        dims: names of data-parallel dims; those that the mesh lacks are ignored. Together they count as one dim,
            row-major in the mesh's order. Ranks that differ only in other dims (tensor, context, pipeline) are peers.
        replicate: "broadcast": one peer of each data-parallel rank, at 0 in all other dims, builds the steps and sends
            them to its peers on the CPU; "read": every peer builds them itself. Default: "read" with `encoder_dims`.
        ranks_per_node: data-parallel ranks of a node: the groups of balance="grouped" and "grid"; if it divides the
            number of ranks, assignment="per_phase" prefers to send features within a node. Default: from
            LOCAL_WORLD_SIZE, as torchrun sets it.
        check_plan_every: compare plan hashes over all ranks of the mesh before an iteration's first step, and before
            every `check_plan_every`-th step after it; 0: never.
        encoder_dims: names of further dims over which encoders are data-parallel: each of these peers encodes some of
            the parts of its rank, and `od.exchange(group=...)`, given this value, gathers their features.
        averaged: dims over which gradients of the LLM are averaged; default: `dims`. () where the gradients of LLM and
            encoders are summed.
        gradients: of dims in `encoder_dims`, whether the gradients of features are the same on their peers ("equal", as
            under tensor parallelism) or parts of a sum ("partial", as under context parallelism). Those of the other
            dims are found out in the first backward.
    """

    mesh: Any
    dims: tuple[str, ...] = DIMS
    replicate: Replicate | None = None
    ranks_per_node: int | None = None
    check_plan_every: int = 0  # steps between comparisons of plans; 0: none
    encoder_dims: tuple[str, ...] = ()
    averaged: tuple[str, ...] | None = None
    gradients: Mapping[str, Gradients] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.dims, str) or not self.dims or not all(isinstance(name, str) for name in self.dims):
            raise ValueError(f"DataParallel.dims must be names of mesh dims, as ('dp',), got {self.dims!r}")
        if self.replicate not in (None, *get_args(Replicate)):
            raise ValueError(f"DataParallel.replicate must be 'read' or 'broadcast', got {self.replicate!r}")
        if self.replicate is None:
            object.__setattr__(self, "replicate", "read" if self.encoder_dims else "broadcast")
        elif self.encoder_dims and self.replicate == "broadcast":
            raise ValueError(
                "DataParallel.encoder_dims has each peer read what it encodes, and replicate='broadcast' would send "
                "all peers the same: leave replicate out"
            )
        self._check_encoder_dims()
        if self.ranks_per_node is not None:
            checked_count(self.ranks_per_node, "DataParallel.ranks_per_node")
        checked_count(self.check_plan_every, "DataParallel.check_plan_every", 0)

    def _check_encoder_dims(self) -> None:
        names = self.encoder_dims
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"DataParallel.encoder_dims must be names of mesh dims, as ('tp',), got {names!r}")
        if not names:
            if self.averaged is not None or self.gradients:
                raise ValueError("DataParallel.averaged and gradients are of peers that encode: give encoder_dims too")
            return
        of_mesh = getattr(self.mesh, "mesh_dim_names", None) or ()
        if wrong := [name for name in names if name in self.dims or name not in of_mesh or names.count(name) > 1]:
            raise ValueError(
                f"DataParallel.encoder_dims are dims of the mesh that are not data-parallel; {wrong} are not: it has "
                f"{of_mesh}, and dims={self.dims}"
            )
        if pipelines := [name for name in names if name in ("pp", "pipeline")]:
            raise ValueError(
                f"DataParallel.encoder_dims has {pipelines}: stages of a pipeline run different layers, and only the "
                "first needs features; name tensor- and context-parallel dims"
            )
        if wrong := [name for name in self.averaged or () if name not in (*self.dims, *names)]:
            raise ValueError(f"DataParallel.averaged has {wrong}, which are neither in dims nor in encoder_dims")
        for name, value in self.gradients.items():
            if name not in names or value not in get_args(Gradients):
                raise ValueError(
                    f"DataParallel.gradients names dims of encoder_dims as equal or partial, got {name!r}: {value!r}"
                )


@dataclass(frozen=True, slots=True)
class Rank:
    """A data-parallel rank: its number, the number of ranks, and what is known of the others; empty where it is not."""

    rank: int = 0
    size: int = 1
    group: Any = None  # process group of the data-parallel ranks
    groups: tuple[Any, ...] = ()  # process groups that together reach all ranks that run this loader, to compare plans
    shared: tuple[tuple[int, ...], ...] = ()  # of each rank, the global ranks that get its batches, the reader first
    ranks_per_node: int | None = None  # data-parallel ones
    check_plan_every: int = 0  # steps between comparisons of plans; 0: none
    dp_groups: tuple[Any, ...] = ()  # process groups that together reach the data-parallel ranks
    ranks: tuple[int, ...] = ()  # global numbers of the ranks that run this loader
    column: tuple[int, ...] = ()  # those of the data-parallel ones at this process's place in the mesh's other dims
    peer_dims: tuple[str, ...] = ()
    peer: int = 0  # among the peers of `DataParallel.encoder_dims`, row-major
    num_peers: int = 1
    peer_groups: tuple[Any, ...] = ()  # process groups that together reach the peers


def resolve_rank(dp: Any = None) -> Rank:
    """Return the rank that `dp` means: None (torch.distributed's world, else a single rank), (rank, size), a process
    group, a DeviceMesh or a DataParallel.

    Raises ValueError if the process is not in the group or mesh, or the mesh has no data-parallel dim.
    """
    import torch.distributed as dist

    if isinstance(dp, Rank):
        return dp
    if isinstance(dp, tuple):
        if len(dp) != 2:
            raise ValueError(f"dp as a tuple is (rank, size), got {dp!r}")
        rank, size = checked_count(dp[0], "dp rank", 0), checked_count(dp[1], "dp size")
        if rank >= size:
            raise ValueError(f"dp rank must be in 0..{size - 1}, got {rank}")
        return Rank(rank, size, ranks_per_node=ranks_per_node())
    if dp is None:
        if not (dist.is_available() and dist.is_initialized()):
            _warn_of_a_launcher()
            return Rank(ranks_per_node=ranks_per_node())
        return replace(_of_group(dist.group.WORLD), groups=())
    if isinstance(dp, DataParallel):
        resolved = _of_mesh(dp) if _is_mesh(dp.mesh) else _of_group(dp.mesh)
        per_node = dp.ranks_per_node or resolved.ranks_per_node
        return replace(resolved, ranks_per_node=per_node, check_plan_every=dp.check_plan_every)
    if _is_mesh(dp):
        return _of_group(dp.get_group()) if dp.ndim == 1 else _of_mesh(DataParallel(dp, dims=(*DIMS, "dp", "data")))
    return _of_group(dp)


def check_still_alone(rank: Rank) -> None:
    """Raise RuntimeError if `rank`, by default the only one, was resolved before torch.distributed was initialized."""
    import torch.distributed as dist

    if rank.size == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"this loader was created before torch.distributed was initialized, for one rank, and there are "
            f"{dist.get_world_size()} now: each would get every sample. Create it afterwards (with Lightning in "
            "train_dataloader()), or pass dp=(0, 1) if each rank should get all samples"
        )


def _is_mesh(value: Any) -> bool:
    return hasattr(value, "get_group") and hasattr(value, "ndim")


def _of_group(group: Any) -> Rank:
    import torch.distributed as dist

    if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("dp is a process group this process does not belong to")
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"dp must be a process group, a DeviceMesh, an od.DataParallel or (rank, size), got {group!r}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("dp is a process group this process does not belong to")
    ranks = tuple(dist.get_process_group_ranks(group))
    return Rank(
        *(rank, len(ranks), group, (group,), (), ranks_per_node()), dp_groups=(group,), ranks=ranks, column=ranks
    )


def _of_mesh(dp: DataParallel) -> Rank:
    import torch.distributed as dist

    mesh = dp.mesh
    names = mesh.mesh_dim_names or ()
    dims = [dim for dim, name in enumerate(names) if name in dp.dims]
    if not dims:
        raise ValueError(
            f"the mesh has the dims {names or 'without names'}, and none of {dp.dims} is among them: pass the names of "
            "the data-parallel ones, od.DataParallel(mesh, dims=...)"
        )
    peers = [dim for dim in range(mesh.ndim) if dim not in dims]
    size = prod(mesh.size(dim) for dim in dims)
    ranks = mesh.mesh.cpu().permute(*dims, *peers).reshape(size, -1)
    ranks = ranks[ranks[:, 0].argsort()]  # Numbered as torch numbers the ranks of a group.
    mine = (ranks == dist.get_rank()).nonzero()
    if not len(mine):
        raise ValueError(
            f"dp is a mesh of the ranks {mesh.mesh.tolist()}; this process, rank {dist.get_rank()}, is not among them"
        )
    peer, num_peers = 0, 1
    for name in dp.encoder_dims:
        peer, num_peers = peer * mesh[name].size() + mesh.get_local_rank(name), num_peers * mesh[name].size()
    shared: tuple[tuple[int, ...], ...] = ()
    if dp.replicate == "broadcast" and ranks.shape[1] > 1:
        if ranks.numel() != dist.get_world_size():
            raise ValueError(
                f"replicate='broadcast' creates process groups, which takes all {dist.get_world_size()} ranks of the "
                f"job, and the mesh has {ranks.numel()}: pass the mesh of all ranks, or replicate='read'"
            )
        shared = tuple(tuple(row) for row in ranks.tolist())
    return Rank(
        int(mine[0, 0]),
        size,
        mesh.get_group(dims[0]) if len(dims) == 1 else None,
        tuple(mesh.get_group(dim) for dim in range(mesh.ndim)),
        shared,
        _ranks_of_a_node(ranks[:, 0].tolist()),
        dp_groups=tuple(mesh.get_group(dim) for dim in dims),
        ranks=tuple(sorted(ranks.flatten().tolist())),
        column=tuple(ranks[:, mine[0, 1]].tolist()),
        peer_dims=tuple(names[dim] for dim in peers if mesh.size(dim) > 1),
        peer=peer,
        num_peers=num_peers,
        peer_groups=tuple(mesh.get_group(name) for name in dp.encoder_dims),
    )


def _ranks_of_a_node(first_peers: list[int]) -> int | None:
    """Count data-parallel ranks on the first node, by their first peers; nodes have LOCAL_WORLD_SIZE ranks each."""
    local = ranks_per_node()
    return local and sum(rank // local == first_peers[0] // local for rank in first_peers)


def served_devices(group: Any) -> list[str]:
    """Return the device types that the group supports: ["cpu"] for gloo, ["cpu", "cuda"] together with NCCL."""
    import torch.distributed as dist

    return [entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")]


def group_timeout(group: Any) -> timedelta:
    """Return how long a collective of the group waits for its ranks, as set by `init_process_group(timeout=)`; torch's
    default if the backend does not say.
    """
    import torch
    from torch.distributed import distributed_c10d

    for device in served_devices(group):
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout = group._get_backend(torch.device(device)).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    default: timedelta = distributed_c10d.default_pg_timeout
    return default


def ranks_per_node() -> int | None:
    """Return the number of ranks that the launcher started on this node (LOCAL_WORLD_SIZE, as torchrun sets it); None
    if it is not set.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() and int(local) else None


def _warn_of_a_launcher() -> None:
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE is {launched}, but torch.distributed is not initialized, so this loader assumes one rank and "
            "every rank gets every sample: create it after init_process_group, or pass dp=(rank, size)",
            stacklevel=4,
        )
