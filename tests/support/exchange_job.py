"""Run by test_exchange, one process a rank: every check that needs a process group, and what came of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from exchange_cases import CHECKS, Case, check, loss_of, raises, reference, run_checks, swap
from rank_jobs import run_rank
from torch import Tensor
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint

from orchdata.planning.route import Route
from orchdata.ranks.exchange import exchange

PATIENCE = timedelta(seconds=60)
IMPATIENCE = timedelta(seconds=2)
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)


@check
def forward_and_backward_are_those_of_one_process() -> None:
    for seed in range(12):
        case = Case.random(seed)
        for rest in ((), (3,), (2, 3)):
            everything = case.everything(*rest)
            mine = everything[case.held()].requires_grad_()
            result = exchange(mine, case.route(), requires_grad=True)
            assert result.requires_grad
            assert torch.equal(result, everything[case.wanted()])
            loss_of(result, dist.get_rank()).backward()
            torch.testing.assert_close(mine.grad, reference(case, everything)[case.held()], rtol=1e-12, atol=0)


@check
def every_dtype_travels_bit_by_bit() -> None:
    for seed, dtype in enumerate(DTYPES):
        case = Case.random(seed)
        everything = case.everything(5, dtype=dtype)
        is_floating = dtype.is_floating_point
        result = exchange(everything[case.held()], case.route(), requires_grad=is_floating)
        assert result.dtype == dtype
        assert torch.equal(result, everything[case.wanted()])
        if is_floating:
            result.sum().backward()


@check
def features_and_gradients_need_not_be_contiguous() -> None:
    for seed in range(6):
        case = Case.random(seed)
        everything = case.everything(4)
        leaf = everything[case.held()].T.contiguous().requires_grad_()
        result = exchange(leaf.T, case.route(), requires_grad=True)
        assert torch.equal(result, everything[case.wanted()])
        result.sum().backward()  # its gradient is one number, expanded
        assert torch.equal(leaf.grad, torch.ones_like(leaf))


@check
def no_part_anywhere_still_joins_the_graph() -> None:
    case = Case(*[np.zeros(0, np.int64)] * 3)
    encoder = torch.nn.Linear(2, 3)
    result = exchange(encoder(torch.ones(1, 2)), case.route(), requires_grad=True)  # a dummy on every rank
    assert (result.shape, result.requires_grad) == ((0, 3), True)
    result.sum().backward()
    assert torch.equal(encoder.weight.grad, torch.zeros(3, 2))


@check
def a_dummy_goes_nowhere_and_gets_zeros() -> None:
    size = dist.get_world_size()
    case = Case(np.zeros(3, np.int64), np.full(3, size - 1), np.array([1, 2, 1]))  # rank 0 encodes all
    first = dist.get_rank() == 0
    everything = case.everything(3)
    mine = (everything if first else torch.full((2, 3), float("nan"), dtype=torch.float64)).requires_grad_()
    result = exchange(mine, case.route(), requires_grad=True)
    assert torch.equal(result, everything[case.wanted()])
    result.sum().backward()
    assert torch.equal(mine.grad, torch.full_like(mine, float(first)))


@check
def the_caller_says_whether_the_result_requires_a_gradient() -> None:
    case = swap()
    frozen = dist.get_rank() == 0
    mine = case.everything(2)[case.held()].requires_grad_(not frozen)
    result = exchange(mine, case.route(), requires_grad=True)
    assert result.requires_grad
    result.sum().backward()
    assert (mine.grad is None) == frozen
    assert not exchange(mine, case.route(), requires_grad=False).requires_grad


@check
def several_may_be_under_way_and_waited_for_in_any_sequence() -> None:
    image, audio = Case.random(1, "image"), Case.random(2, "audio")
    pixels, sound = image.everything(3), audio.everything(2)
    one, other = pixels[image.held()].requires_grad_(), sound[audio.held()].requires_grad_()
    images = exchange(one, image.route(), requires_grad=True, async_op=True)
    sounds = exchange(other, audio.route(), requires_grad=True, async_op=True)
    flags = exchange(torch.ones(image.route().parts.num_rows_in), image.route().parts, requires_grad=False)
    heard, saw = sounds.wait(), images.wait()
    assert images.wait() is saw
    assert torch.equal(saw, pixels[image.wanted()])
    assert torch.equal(heard, sound[audio.wanted()])
    assert len(flags) == image.route().parts.num_rows_out
    (loss_of(saw, dist.get_rank()) + loss_of(heard, dist.get_rank())).backward()
    torch.testing.assert_close(one.grad, reference(image, pixels)[image.held()], rtol=1e-12, atol=0)
    torch.testing.assert_close(other.grad, reference(audio, sound)[audio.held()], rtol=1e-12, atol=0)


@check
def without_grad_mode_it_only_moves() -> None:
    case = swap()
    mine = case.everything(2)[case.held()].requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result = exchange(mine, case.route(), requires_grad=True)
            waited = exchange(mine, case.route(), requires_grad=True, async_op=True).wait()
        assert not result.requires_grad
        assert torch.equal(result, case.everything(2)[case.wanted()])
        assert torch.equal(waited, result)


@check
def a_checkpointed_region_is_refused() -> None:
    case = swap("image")
    mine = case.everything(2)[case.held()].requires_grad_()

    def region(features: Tensor) -> Tensor:
        return exchange(features * 2, case.route(), requires_grad=True) ** 2

    for reentrant in (False, True):
        raises(
            RuntimeError,
            r"exchange \(image\) was called inside a checkpointed region.*Call it outside",
            lambda reentrant=reentrant: checkpoint(region, mine, use_reentrant=reentrant),
        )
    handle = exchange(mine, case.route(), requires_grad=True, async_op=True)
    raises(
        RuntimeError,
        "inside a checkpointed region",
        lambda: checkpoint(lambda rows: handle.wait() + rows, mine, use_reentrant=False),
    )
    result = handle.wait()
    checkpoint(torch.sin, result, use_reentrant=False).sum().backward()  # around it is fine
    assert mine.grad is not None


class Region(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, features: Tensor) -> Tensor:
        return exchange(features * 2, self.case.route(), requires_grad=True) ** 2


class Recomputed(torch.autograd.Function):
    """How frameworks with a checkpoint of their own call a region again."""

    @staticmethod
    def forward(ctx, region, features):
        ctx.region = region
        ctx.save_for_backward(features)
        return region(features)

    @staticmethod
    def backward(ctx, gradient):
        features = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.region(features)
        torch.autograd.backward(again, gradient)
        return None, features.grad


@check
def other_checkpoints_are_refused_when_they_recompute() -> None:
    mine = swap().everything(2)[swap().held()].requires_grad_()
    refused = "inside a checkpointed region"
    result = Recomputed.apply(Region(swap()), mine)
    raises(RuntimeError, refused, lambda: result.sum().backward())
    region = Region(swap())
    composable_checkpoint(region)
    result = region(mine)
    raises(RuntimeError, refused, lambda: result.sum().backward())


@check
def a_compiled_model_may_have_it_inside() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encoder, self.head = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)

        def forward(self, inputs: Tensor, route: Route) -> Tensor:
            handle = exchange(torch.relu(self.encoder(inputs)), route, requires_grad=True, async_op=True)
            doubled = exchange(self.encoder(inputs) * 2, route, requires_grad=True)
            return self.head(torch.sin(handle.wait()) + doubled).sum()

    plain, other = Model(), Model()
    compiled = torch.compile(other, backend="eager")
    for seed in range(3):
        case = Case.random(seed)
        inputs = case.everything(2, dtype=torch.float32)[case.held()]
        losses = [model(inputs, case.route()) for model in (plain, compiled)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@check
def a_subgroup_counts_its_own_ranks() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    num = size - 1
    group = dist.new_group(list(range(1, size)))
    case = Case(np.arange(num), (np.arange(num) + 1) % num, np.arange(num) + 1)
    route = case.route(max(0, rank - 1), num)
    mine = case.everything(2)[case.held(max(0, rank - 1))]
    if rank == 0:
        raises(ValueError, "does not belong", lambda: exchange(mine, route, group=group, requires_grad=True))
    else:
        result = exchange(mine, route, group=group, requires_grad=True)
        assert torch.equal(result, case.everything(2)[case.wanted(rank - 1)])
        result.sum().backward()


@check
def what_does_not_fit_the_route_is_refused() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    case = swap("image")
    mine, route = case.everything(2)[case.held()], case.route()

    def refused(pattern: str, features: Tensor, route: Route = route, requires_grad: bool = True) -> None:
        raises(ValueError, pattern, lambda: exchange(features, route, requires_grad=requires_grad))

    refused(rf"\(image\): the features have 2 rows, but rank {rank} sends 3 in the plan", mine[:2])
    refused("must have rows", torch.tensor(3.0))
    refused("int64 cannot require a gradient: pass requires_grad=False", mine.long())
    refused(
        rf"the route is of rank {rank} of {size + 1}, the process is rank {rank} of {size}",
        mine,
        case.route(num_ranks=size + 1),
    )
    if size > 1:
        other = (rank + 1) % size
        refused(rf"the route is of rank {other} of {size}, the process is rank {rank} of", mine, case.route(rank=other))
        refused("the features are on meta, the group's backend serves cpu", mine.to("meta"))


@check
def a_rank_with_other_rows_than_planned_fails_the_others_in_time() -> None:
    def go_wrong(group: dist.ProcessGroup) -> None:
        case = swap("image of step 7")
        mine = case.everything(2)[case.held()]
        if dist.get_rank() == 0:
            refused = r"the features have 1 rows, but rank 0 sends 3 in the plan"
            raises(ValueError, refused, lambda: exchange(mine[:1], case.route(), group=group, requires_grad=True))
        else:
            message = (
                rf"forward of exchange \(image of step 7\) on rank {dist.get_rank()} of {dist.get_world_size()} failed"
            )
            raises(RuntimeError, message, lambda: exchange(mine, case.route(), group=group, requires_grad=True))

    impatiently(go_wrong)


@check
def an_unused_result_fails_the_others_in_time_and_says_what_to_do() -> None:
    def go_wrong(group: dist.ProcessGroup) -> None:
        case = swap("image")
        mine = case.everything(2)[case.held()].requires_grad_()
        result = exchange(mine, case.route(), group=group, requires_grad=True)
        own = mine.sum()
        if dist.get_rank() == 0:
            own.backward()
        else:
            error = r"backward of exchange \(image\) on rank .* did not run this backward .* add result\[:0\]\.sum\(\)"
            raises(RuntimeError, error, lambda: (own + result.sum()).backward())

    impatiently(go_wrong)


@check
def an_unused_result_that_is_joined_takes_part() -> None:
    case = swap()
    mine = case.everything(2)[case.held()].requires_grad_()
    result = exchange(mine, case.route(), requires_grad=True)
    unused = dist.get_rank() == 0
    (mine.sum() + (result[:0] if unused else result).sum()).backward()
    size = dist.get_world_size()
    receiver = (dist.get_rank() + 1) % size
    assert torch.equal(mine.grad, torch.full_like(mine, 1.0 if receiver == 0 else 2.0))


def impatiently(function: Callable[[dist.ProcessGroup], None]) -> None:
    """Run with a group of its own: after a failure it is of no use."""
    if dist.get_world_size() == 1:
        return
    group = impatient_group()
    started = time.monotonic()
    function(group)
    assert time.monotonic() - started < 15 * IMPATIENCE.total_seconds()
    dist.barrier()


def impatient_group() -> dist.ProcessGroup:
    dist.barrier()  # a rank that comes late must not use up the patience
    group = dist.new_group(timeout=IMPATIENCE)
    dist.barrier()
    return group


def run_killed() -> dict[str, Any]:
    case = swap("image of step 3")
    mine = case.everything(2)[case.held()]
    group = impatient_group()
    exchange(mine, case.route(), group=group, requires_grad=False)
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    message = ""
    try:
        for _ in range(3):  # what was under way when the rank died may still arrive
            exchange(mine, case.route(), group=group, requires_grad=False)
    except RuntimeError as error:
        message = str(error)
    return {"error": message, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    run_rank(lambda job: run_checks(CHECKS) if job == "checks" else run_killed(), timeout=PATIENCE)
