"""Run by test_exchange, one process a GPU: a tensor- or context-parallel LLM on features of encoders on every peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from exchange_cases import raises, run_checks
from rank_jobs import run_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import orchdata as od
from orchdata.planning.route import Route, grouped_route
from orchdata.ranks import peers

Loss = Callable[[Tensor, Tensor, nn.Module], Tensor]
WIDTH = 8


class Along(torch.autograd.Function):
    """A collective of rows along a dim, another in backward: "keep", "sum", "split" or "join"."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, there: str, back: str) -> Tensor:
        ctx.back = partial(Along.move, group=group, how=back)
        return Along.move(rows, group, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.back(gradient), None, None, None

    @staticmethod
    def move(rows: Tensor, group: dist.ProcessGroup, how: str) -> Tensor:
        if how == "join":
            joined = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
            dist.all_gather(joined, rows.contiguous(), group)
            return torch.cat(joined)
        rows = rows.clone()
        if "sum" in how:
            dist.all_reduce(rows, group=group)
        return rows.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone() if "split" in how else rows


def linears() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, WIDTH, bias=False), nn.Tanh())
    llm = nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    return encoder.double(), llm.double()


def plain_loss(rows: Tensor, weights: Tensor, llm: nn.Module) -> Tensor:
    return ((llm(rows) ** 2).sum(1) * weights).sum()


def tensor_parallel(rows: Tensor, weights: Tensor, llm: nn.Module, group: dist.ProcessGroup, kind: str) -> Tensor:
    """The loss of rows that all peers have; kind "tp", or "sp" with the rows between layers split among peers."""
    size, index = dist.get_world_size(group), dist.get_rank(group)
    if kind == "sp":
        over = -len(rows) % size
        rows, weights = nn.functional.pad(rows, (0, 0, 0, over)), nn.functional.pad(weights, (0, over))
        rows = Along.apply(Along.apply(rows, group, "split", "join"), group, "join", "sum split")
    else:
        rows = Along.apply(rows, group, "keep", "sum")
    first, last = (next(llm[at].parameters()) for at in (0, 2))
    hidden = torch.relu(rows @ first.chunk(size)[index].T) @ last.chunk(size, 1)[index].T
    if kind == "tp":
        return ((Along.apply(hidden, group, "sum", "keep") ** 2).sum(1) * weights).sum()
    hidden = Along.apply(hidden, group, "sum split", "join")
    own = ((hidden**2).sum(1) * weights.chunk(size)[index]).sum()
    return Along.apply(own, group, "sum", "keep")


def half(loss: Loss, group: dist.ProcessGroup) -> Loss:
    """The loss of this peer's rows among those of a context-parallel group."""
    size, index = dist.get_world_size(group), dist.get_rank(group)
    return lambda rows, weights, llm: loss(rows[index::size], weights[index::size], llm)


@dataclass
class World:
    """Parts of all samples on the ranks and peers of a mesh, the first dims of which are data-parallel."""

    dp: od.DataParallel
    seed: int = 0

    def __post_init__(self) -> None:
        self.links = peers.links_of(self.dp)
        self.num_ranks, self.rank = dist.get_world_size(self.links.group), dist.get_rank(self.links.group)
        rng = np.random.default_rng(self.seed)
        num_peers = self.links.num_peers
        sizes = {"home": self.num_ranks, "encoder": self.num_ranks, "peer": num_peers, "tokens": 5}
        of_part = {name: rng.integers(0, size, 12) for name, size in sizes.items()}
        self.home, self.encoder, self.peer, self.tokens = of_part.values()
        self.peer[self.encoder == 0] = 0  # other peers of rank 0 encode nothing
        self.num_rows = int(self.tokens.sum())
        self.inputs = torch.from_numpy(rng.normal(size=(self.num_rows, 6)))
        self.weights = torch.from_numpy(rng.uniform(1, 2, self.num_rows))

    def rows_of(self, parts: np.ndarray) -> Tensor:
        ends = self.tokens.cumsum()
        return torch.tensor([row for at in parts for row in range(ends[at] - self.tokens[at], ends[at])], dtype=int)

    @property
    def encoded(self) -> np.ndarray:
        mine = np.flatnonzero((self.encoder == self.rank) & (self.peer == self.links.peer))
        return mine[np.argsort(self.home[mine], kind="stable")]

    @property
    def arriving(self) -> np.ndarray:
        expected = np.flatnonzero(self.home == self.rank)
        return expected[np.lexsort((self.encoder[expected], self.peer[expected]))]

    def route(self) -> Route:
        mine, coming = self.encoded, self.arriving
        return grouped_route(
            self.rank,
            self.num_ranks,
            receivers=self.home[mine],
            sent=self.tokens[mine],
            senders=self.encoder[coming],
            received=self.tokens[coming],
            label="image, step 0",
            peer=self.links.peer,
            num_peers=self.links.num_peers,
            arriving_peers=self.peer[coming] if self.links.num_peers > 1 else None,
        )

    def features(self, encoder: Callable[[Tensor], Tensor]) -> Tensor:
        mine = self.rows_of(self.encoded)
        rows = self.inputs[mine] if len(mine) else torch.ones(1, 6, dtype=torch.float64)  # a dummy
        return od.exchange(encoder(rows), self.route(), group=self.dp, requires_grad=True)

    @property
    def averaged(self) -> int:
        names = self.dp.dims if self.dp.averaged is None else self.dp.averaged
        return prod(self.dp.mesh[name].size() for name in names if name in self.dp.mesh.mesh_dim_names)

    def loss(self, encoder: Callable[[Tensor], Tensor], llm: nn.Module, loss: Loss) -> Tensor:
        weights = self.weights[self.rows_of(self.arriving)]
        return loss(self.features(encoder), weights, llm) * (self.averaged / self.num_rows)

    def reference(self) -> list[Tensor]:
        encoder, llm = linears()
        (plain_loss(encoder(self.inputs), self.weights, llm) / self.num_rows).backward()
        return [each.grad for model in (encoder, llm) for each in model.parameters()]

    def error(self, loss: Loss, scale: float = 1.0, swap: bool = False) -> float:
        """The error of encoder and LLM gradients, reduced by hand, over the largest: of a whole step."""
        encoder, llm = linears()

        def given(rows: Tensor, weights: Tensor, model: nn.Module) -> Tensor:
            if swap:
                rows = torch.cat(rows.split(self.route().peer_rows.tolist())[::-1])
            return loss(rows, weights, model)

        (self.loss(encoder, llm, given) * scale).backward()
        found = []
        of_encoder = 1 if self.dp.averaged == () else self.dp.mesh.size()
        for model, count in ((encoder, of_encoder), (llm, self.averaged)):
            for each in model.parameters():
                dist.all_reduce(each.grad)
                found.append(each.grad / count)
        return largest_error(found, self.reference())


def largest_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max(float((one - two).abs().max() / two.abs().max()) for one, two in zip(found, wanted, strict=True))


def world(shape: Sequence[int], names: str, encoder_dims: Sequence[str], seed: int = 0, **given: Any) -> World:
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names.split()))
    return World(od.DataParallel(mesh, dims=("dp", "dp_shard"), encoder_dims=tuple(encoder_dims), **given), seed)


def loss_on(mesh: DeviceMesh, tensor: str = "tp") -> Loss:
    """The loss of an LLM that is parallel over the dims "cp" and "tp" of a mesh."""
    names = mesh.mesh_dim_names
    loss: Loss = plain_loss
    if "tp" in names:
        loss = partial(tensor_parallel, group=mesh.get_group("tp"), kind=tensor)
    return half(loss, mesh.get_group("cp")) if "cp" in names else loss


CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def parity(shape: Sequence[int], names: str, encoder_dims: Sequence[str], tensor: str = "tp", **given: Any) -> None:
    of = world(shape, names, encoder_dims, **given)
    for seed in range(3):
        at = World(of.dp, seed)
        error = at.error(loss_on(of.dp.mesh, tensor))
        assert error < 1e-12, f"{shape} {names} {tensor} {given}: {error}"
    found = {kind for each in of.links.found.values() for kind in each.kinds.items()}
    assert found == {
        (name, "equal" if name == "tp" else "partial") for name in encoder_dims if of.dp.mesh[name].size() > 1
    }


@check
def tensor_parallel_gradients_are_those_of_one_process() -> None:
    for kind in ("tp", "sp"):
        for shape in ((2, 2), (1, 4), (4, 1)):
            parity(shape, "dp tp", ["tp"], kind)


@check
def context_parallel_gradients_are_those_of_one_process() -> None:
    parity((2, 2), "dp cp", ["cp"])
    parity((2, 2), "dp cp", ["cp"], averaged=("dp", "cp"))
    parity((2, 2), "dp cp", ["cp"], averaged=())


@check
def each_dim_is_equal_or_partial_by_itself() -> None:
    for order in (["cp", "tp"], ["tp", "cp"]):
        parity((1, 2, 2), "dp cp tp", order)
    parity((2, 1, 2), "dp dp_shard tp", ["tp"])  # two data-parallel dims


@check
def eight_processes() -> None:
    for kind in ("tp", "sp"):
        parity((2, 2, 2), "dp cp tp", ["cp", "tp"], kind)
        parity((2, 2, 2), "dp cp tp", ["cp", "tp"], kind, averaged=("dp", "cp"))
    parity((2, 2, 2), "dp dp_shard tp", ["tp"])


@check
def what_is_wrong_shows() -> None:
    of = world((2, 2), "dp tp", ["tp"])
    loss = loss_on(of.dp.mesh)
    assert of.error(loss, swap=True) > 1e-3  # rows of two peers swapped
    once = World(replace(of.dp, averaged=("dp", "tp")))  # the factor left out
    assert once.error(loss, scale=1 / 2) > 0.1
    of = world((2, 2), "dp cp", ["cp"])
    loss = loss_on(of.dp.mesh)
    assert of.error(loss, scale=2) > 0.1  # the loss times C without averaged=
    assert of.error(loss) < 1e-12
    for each in of.links.found.values():
        each.kinds["cp"] = "equal"  # a slice in place of a sum
    assert of.error(loss) > 0.1


@check
def tensors_of_one_step_may_differ_and_zeros_decide_nothing() -> None:
    of = world((2, 2), "dp tp", ["tp"])
    half_of = half(plain_loss, of.dp.mesh.get_group("tp"))
    for times, count in ((0.0, 2), (1.0, 2), (2.0, 2), (1.0, 3), (1.0, 2)):
        route = of.route()
        features = torch.ones(route.num_rows_in or 1, WIDTH, dtype=torch.float64, requires_grad=True)
        # The last one is cut; a step with more of them is found out by itself. What is not run backward counts nowhere.
        od.exchange(features, of.route(), group=of.dp, requires_grad=True)
        *equal, split = (od.exchange(features, route, group=of.dp, requires_grad=True) for _ in range(count))
        weights = torch.arange(len(split)) + 1.0
        own = half_of(split, weights, nn.Identity()) + sum(plain_loss(each, weights, nn.Identity()) for each in equal)
        (own * times).backward()
        found = [of.links.found["image", number, count].kinds for number in range(count)]
        assert found == ([{}, {}] if not times else [{"tp": "equal"}] * (count - 1) + [{"tp": "partial"}])
        wanted = torch.ones_like(features, requires_grad=True)
        back = od.exchange(wanted, of.route(), group=replace(of.dp, averaged=("dp", "tp")), requires_grad=True)
        (plain_loss(back, weights, nn.Identity()) * times).backward()
        torch.testing.assert_close(features.grad, wanted.grad * 2 * count, rtol=1e-12, atol=0)


@check
def half_precision_and_gradients_that_are_not_finite() -> None:
    of = world((2, 2), "dp tp", ["tp"])
    for times in (float("nan"), 1 + 0.01 * of.links.peer):
        features = torch.ones(of.route().num_rows_in or 1, 4, dtype=torch.bfloat16, requires_grad=True)
        (od.exchange(features, of.route(), group=of.dp, requires_grad=True) * times).sum().backward()
        assert not of.route().num_rows_in or features.grad.isfinite().all() == (times == times)
    assert [each.kinds for each in of.links.found.values()] == [{"tp": "equal"}]


@check
def contradictions_are_the_same_error_on_every_rank() -> None:
    def backward(of: World, is_partial: bool) -> None:
        features = torch.ones(of.route().num_rows_in or 1, 4, requires_grad=True)
        result = od.exchange(features, of.route(), group=of.dp, requires_grad=True)
        (result * (of.links.peer if is_partial else 1.0)).sum().backward()

    of = world((2, 2), "dp tp", ["tp"])
    raises(ValueError, "image, step 0.*are the same on the peers of 'tp' in some", lambda: backward(of, of.rank == 1))
    of = world((2, 2), "dp tp", ["tp"], gradients={"tp": "equal"})
    raises(ValueError, "are, by od.DataParallel.*, 'equal' over 'tp', and .* 'partial'", lambda: backward(of, True))
    of = world((2, 2), "dp tp", ["tp"])
    with patch.object(peers, "CHECK_EVERY", 3):
        backward(of, True)
        backward(of, False)  # not compared
        raises(ValueError, "were 'partial' over 'tp', and in this backward .* 'equal'", lambda: backward(of, False))


@check
def batches_of_another_peer_and_plain_groups_are_refused() -> None:
    of = world((2, 2), "dp tp", ["tp"])
    route, rows = of.route(), torch.ones(of.route().num_rows_in or 1, 4)
    other = replace(route, peer=1 - route.peer)
    refused = partial(od.exchange, rows, requires_grad=True)
    raises(ValueError, "is of peer ., and this process is peer", lambda: refused(other, group=of.dp))
    raises(ValueError, "is of 2 peers.*pass the od.DataParallel", lambda: refused(route, group=of.links.group))
    without = replace(route, peer_rows=None, peer=0)
    raises(ValueError, "is of 1 peers, and the group has 2", lambda: refused(without, group=of.dp))
    alone = replace(route, num_ranks=1, rank=0)
    raises(ValueError, "is of 2 peers", lambda: refused(alone))


@contextmanager
def counted() -> Iterator[list[int]]:
    """Rows that this process sends to others."""
    sent: list[int] = []
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def to_all(output: Tensor, rows: Tensor, receive: list[int], send: list[int], group: Any, **others: Any) -> Any:
        sent.append(sum(send) - send[dist.get_rank(group)])
        return all_to_all(output, rows, receive, send, group, **others)

    def one_by_one(ops: list[dist.P2POp]) -> Any:
        sent.append(sum(len(op.tensor) for op in ops if op.op is dist.isend))
        return batch(ops)

    with patch.object(dist, "all_to_all_single", to_all), patch.object(dist, "batch_isend_irecv", one_by_one):
        yield sent


@check
def nothing_is_padded_and_flags_travel() -> None:
    of = world((2, 2), "dp tp", ["tp"], seed=3)
    route = of.route()
    canonical = torch.arange(of.num_rows)
    with counted() as sent:
        rows = od.exchange(canonical[of.rows_of(of.encoded)], route, group=of.dp, requires_grad=False, async_op=True)
        assert torch.equal(rows.wait(), of.rows_of(of.arriving))
    away = route.num_rows_in - int(route.send_rows[of.rank])
    gathered = int(route.receive_rows.sum())
    assert sum(sent) == away + gathered
    bad = torch.arange(12, dtype=torch.uint8)
    flags = od.exchange(bad[of.encoded], route.parts, group=of.dp, requires_grad=False)
    assert flags.tolist() == of.arriving.tolist()
    leaf = torch.ones(route.num_rows_in, 2, requires_grad=True)
    for _ in range(2):  # the first finds out that gradients are equal
        with counted() as sent:
            od.exchange(leaf, route, group=of.dp, requires_grad=True).sum().backward()
    back = gathered - int(route.receive_rows[of.rank])
    assert sum(sent) == away + gathered + back  # equal gradients: nothing among peers


if __name__ == "__main__":
    run_rank(lambda *names: run_checks({name: CHECKS[name] for name in names}), timeout=timedelta(seconds=60))
