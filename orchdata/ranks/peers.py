"""Peers: the rows that each peer of a rank has -> those of all peers, and gradients -> the peer that encoded the rows.

    rows of this peer ----along the last of encoder_dims, then the one before it--> rows of all peers of the rank
    gradient of its rows <--along the first, then the next: taken once, or summed-- gradient of all rows, on each peer

Nothing is padded: a route says how many rows each peer brings. Whether gradients along a dim are equal on its peers
(tensor parallelism), or parts of a sum (context parallelism), is found out in backward, by all ranks together.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from orchdata.planning.route import Route
from orchdata.ranks.parallel import DataParallel, Gradients, group_timeout, resolve_rank

CHECK_EVERY = 1_000
"""Backward passes between comparisons of what was found out."""
_SAMPLED_ROWS = 10


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim of encoder_dims: its process group, the global ranks of that, and this process's number among them."""

    name: str
    group: Any
    ranks: list[int]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class _Found:
    """What is known of the gradients of one exchange between two backward passes, the same on every rank."""

    kinds: dict[str, Gradients] = field(default_factory=dict)
    passes: int = 0


@dataclass
class _Calls:
    """Exchanges with a gradient along one route object, until a backward of one of them has run."""

    count: int = 0
    has_run: bool = False


Place = tuple[_Calls, int]
"""An exchange: those along the same route, and its number among them."""


@dataclass
class Links:
    """The process groups of a DataParallel, and what is known of its gradients.

    Attributes:
        group: of the data-parallel ranks that have this process's peer number.
        dims: of encoder_dims, in their order, without those of size 1.
        peer, num_peers: row-major in encoder_dims.
        given: `DataParallel.gradients`.
        factor: (ranks over which gradients of encoders are averaged) / (those over which gradients of the LLM are).
        found: (modality, number of an exchange among those along one route, how many these are) -> what is known.
            Tensors of a modality may differ: rows that the first layer takes are gathered in backward, and those of a
            later one may not be.
        started: id of a route -> its exchanges.
    """

    group: Any
    dims: tuple[_Dim, ...] = ()
    peer: int = 0
    num_peers: int = 1
    given: dict[str, Gradients] = field(default_factory=dict)
    factor: float = 1.0
    found: dict[tuple[str, int, int], _Found] = field(default_factory=dict)
    started: dict[int, _Calls] = field(default_factory=dict)

    def place(self, route: Route) -> Place:
        """Return the place of the next exchange with a gradient along a route."""
        if id(route) not in self.started:
            weakref.finalize(route, self.started.pop, id(route), None)
        calls = self.started.get(id(route))
        if calls is None or calls.has_run:
            calls = self.started[id(route)] = _Calls()
        calls.count += 1
        return calls, calls.count - 1

    def own(self, route: Route) -> slice:
        """Return where the rows of this peer are among those of all."""
        if route.peer_rows is None:
            return slice(None)
        start = int(route.peer_rows[: self.peer].sum())
        return slice(start, start + int(route.peer_rows[self.peer]))

    def gather(self, rows: Tensor, route: Route) -> None:
        """Fill `rows`, (route.num_rows_out, ...), in which this peer's own are there."""
        for dim, edges in reversed(list(zip(self.dims, self._edges(route), strict=True))):
            blocks = [rows[start:end] for start, end in pairwise(edges)]
            ops = []
            for step in range(1, dim.size):
                to, source = (dim.index + step) % dim.size, (dim.index - step) % dim.size
                # Both sides know all sizes, and leave out messages without rows.
                if len(blocks[dim.index]):
                    ops.append(dist.P2POp(dist.isend, blocks[dim.index], dim.ranks[to], dim.group))
                if len(blocks[source]):
                    ops.append(dist.P2POp(dist.irecv, blocks[source], dim.ranks[source], dim.group))
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()

    def combined(self, gradient: Tensor, route: Route, place: Place, name: str) -> Tensor:
        """Return the gradient of this peer's own rows from that of all rows, as its encoder's averaging needs it.
        Raises ValueError, the same on every rank, if a dim's gradients are equal on some ranks and partial on others,
        or not as they were or as `DataParallel.gradients` says.
        """
        calls, number = place
        calls.has_run = True
        found = self.found.setdefault((route.label.partition(",")[0], number, calls.count), _Found())
        found.passes += 1
        # Reductions in another order differ by some roundings, which in half precision are more than a thousandth.
        tolerance = max(1e-3, 4 * torch.finfo(gradient.dtype).eps)
        for dim, edges in zip(self.dims, self._edges(route), strict=True):
            if dim.name not in found.kinds:
                self._compare(gradient, gradient, dim, found, tolerance, name)
            elif found.passes % CHECK_EVERY == 0:
                self._compare(_sampled(gradient, found.passes), gradient, dim, found, tolerance, name)
            start, end = (edge - edges[0] for edge in edges[dim.index : dim.index + 2])
            # Of gradients that are all zero, or not finite, nothing is found. A sum loses neither.
            if found.kinds.get(dim.name) == "equal":
                gradient = gradient[start:end]
            else:
                sizes, own = np.diff(edges).tolist(), end - start
                pieces = gradient.new_empty((dim.size * own, *gradient.shape[1:]))
                dist.all_to_all_single(pieces, gradient.contiguous(), [own] * dim.size, sizes, dim.group)
                gradient = pieces.view(dim.size, own, *gradient.shape[1:]).sum(0)
        return gradient if self.factor == 1 else gradient * self.factor

    def _edges(self, route: Route) -> list[list[int]]:
        """Return for each dim where the blocks of its peers, with all peers of later dims, start and end."""
        ends = np.cumsum([0, *(route.peer_rows if route.peer_rows is not None else ())])
        edges, first, width = [], 0, self.num_peers
        for dim in self.dims:
            block = width // dim.size
            edges.append(ends[first : first + width + 1 : block].tolist())
            first, width = first + dim.index * block, block
        return edges

    def _compare(self, rows: Tensor, whole: Tensor, dim: _Dim, found: _Found, tolerance: float, name: str) -> None:
        """Find out of what kind the gradients of a dim are, over all ranks; leave it open if they are zero."""
        verdict = torch.tensor(_verdict(rows, whole, dim, tolerance), dtype=torch.int32, device=rows.device)
        for group in (self.group, *(each.group for each in self.dims)):
            dist.all_reduce(verdict, dist.ReduceOp.MAX, group)
        is_equal, is_partial = verdict.tolist()
        if not (is_equal or is_partial):
            return
        if is_equal and is_partial:
            raise ValueError(
                f"backward of {name}: gradients of the features are the same on the peers of {dim.name!r} in some "
                "data-parallel ranks, and differ in others: every rank must compute its loss in the same way"
            )
        kind: Gradients = "equal" if is_equal else "partial"
        known = found.kinds.get(dim.name) or self.given.get(dim.name, kind)
        if known != kind:
            origin = "were" if dim.name in found.kinds else "are, by od.DataParallel(gradients=...),"
            raise ValueError(
                f"backward of {name}: gradients of the features {origin} {known!r} over {dim.name!r}, and in this "
                f"backward they are {kind!r}: peers must compute the loss in one way (equal: each has the whole "
                "gradient; partial: the sum over peers is the gradient)"
            )
        found.kinds[dim.name] = kind


_links: dict[int, dict[Any, Links]] = {}


def links_of(dp: Any) -> Links:
    """Return the links of a DataParallel, the same object for the same values while its mesh lives; or of a process
    group, or a mesh of one dim, which have no peers.

    With several data-parallel dims the first call creates a process group: all its ranks must call in the same order.
    """
    mesh = dp.mesh if isinstance(dp, DataParallel) else dp
    if not hasattr(mesh, "get_group"):
        return Links(mesh)
    if mesh is dp:
        return Links(mesh.get_group())
    if id(mesh) not in _links:
        weakref.finalize(mesh, _links.pop, id(mesh), None)
    kept = _links.setdefault(id(mesh), {})
    averaged = None if dp.averaged is None else tuple(dp.averaged)
    key = (tuple(dp.dims), tuple(dp.encoder_dims), averaged, tuple(dp.gradients.items()))
    if key not in kept:
        kept[key] = _made(dp)
    return kept[key]


def _made(dp: DataParallel) -> Links:
    mesh, resolved = dp.mesh, resolve_rank(dp)
    names = mesh.mesh_dim_names
    group = resolved.group
    if group is None:
        mine = [slice(None) if name in dp.dims else at for name, at in zip(names, mesh.get_coordinate(), strict=True)]
        ranks = mesh.mesh[tuple(mine)].flatten().tolist()
        timeout = group_timeout(mesh.get_group(0))
        # Stages of a pipeline that have no encoder do not come here.
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    dims = tuple(
        _Dim(name, mesh.get_group(name), dist.get_process_group_ranks(mesh.get_group(name)), mesh.get_local_rank(name))
        for name in dp.encoder_dims
        if mesh[name].size() > 1
    )
    if any(dist.get_rank(dim.group) != dim.index for dim in dims):
        raise ValueError("od.exchange takes a mesh whose ranks ascend along each of encoder_dims")
    averaged = dp.dims if dp.averaged is None else dp.averaged
    of_llm = prod(size for name, size in zip(names, mesh.shape, strict=True) if name in averaged)
    factor = resolved.size * resolved.num_peers / of_llm if averaged else 1.0
    return Links(group, dims, resolved.peer, resolved.num_peers, dict(dp.gradients), factor)


def _verdict(rows: Tensor, whole: Tensor, dim: _Dim, tolerance: float) -> tuple[bool, bool]:
    """Return whether this dim's peers have the same rows, to within a share of their largest number, and whether they
    differ by that share of the largest of the whole gradient; neither if all are zero or some are not finite. Every
    peer of the dim returns the same.
    """
    if not rows.numel():
        return False, False
    first = rows.clone(memory_format=torch.contiguous_format)
    dist.broadcast(first, dim.ranks[0], dim.group)
    wide = torch.promote_types(rows.dtype, torch.float32)
    rows, first = rows.to(wide), first.to(wide)
    figures = torch.stack([rows.abs().max(), (rows - first).abs().max(), whole.abs().max().to(wide)])
    figures = figures.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(figures, dist.ReduceOp.MAX, dim.group)
    own, apart, largest = figures.tolist()
    if float("inf") in (own, apart, largest):
        return False, False
    return own > 0 and apart <= own * tolerance, apart > largest * tolerance


def _sampled(rows: Tensor, seed: int) -> Tensor:
    """Return the mean of ten rows, the same on every peer; no row if there is none."""
    if not len(rows):
        return rows
    chosen = np.random.default_rng(seed).integers(0, len(rows), _SAMPLED_ROWS)
    mean = rows[torch.from_numpy(chosen).to(rows.device)].to(torch.promote_types(rows.dtype, torch.float32)).mean(0)
    return mean[None]
