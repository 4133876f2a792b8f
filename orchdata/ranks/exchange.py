"""Exchange: rows of a tensor -> the ranks that need them, in one ragged all-to-all with autograd.

    features --start--> reverse route remembered, all-to-all under way --wait--> features of this rank's samples
    gradient <--wait--- all-to-all of the reverse route under way     <--start-- gradient of those

Where peers share a rank's parts, a gather among them follows the all-to-all, and its reverse comes before the reverse
all-to-all (see `peers.py`).

The route contains every split size (see `route.py`), so ranks need not agree on sizes at run time. Forward and backward
are both collectives: every rank of the group must take part in each, in the same sequence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from orchdata.planning.route import Route
from orchdata.ranks.parallel import DataParallel, served_devices
from orchdata.ranks.peers import Links, Place, links_of

if TYPE_CHECKING:
    Group = dist.ProcessGroup | dist.device_mesh.DeviceMesh | DataParallel | None

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kept_from_compilers(function: _Function) -> _Function:
    """Put a graph break around a function: torch.compile must not trace a collective with autograd.

    Only if the compiler was imported: importing it takes a second and 70 MB, which a loader does not need.
    """
    disabled: _Function | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return cast(_Function, call)


@overload
def exchange(
    features: Tensor, route: Route, *, group: Group = None, requires_grad: bool, async_op: Literal[False] = False
) -> Tensor: ...


@overload
def exchange(
    features: Tensor, route: Route, *, group: Group = None, requires_grad: bool, async_op: Literal[True]
) -> ExchangeHandle: ...


@kept_from_compilers
def exchange(
    features: Tensor, route: Route, *, group: Group = None, requires_grad: bool, async_op: bool = False
) -> Tensor | ExchangeHandle:
    """Send each row to the rank that needs it; gradients take the reverse route.

    Every rank must run the backward too. A rank whose loss does not depend on the result must join it, as
    `Batch.merge` does: `loss = loss + result[:0].sum()` adds nothing and keeps the graph. Otherwise the other ranks
    wait for it in backward, and fail at the group's timeout with a RuntimeError that says so (with NCCL a watchdog
    ends the process). Several exchanges may be under way: start them in the same sequence on every rank, and wait for
    them in any sequence that is the same on every rank.

    Args:
        features: (num_rows, ...), any dtype, on a device the group's backend serves; rows in the order the route was
            made with. All dimensions but the first, the dtype and the device type must be the same on every rank, empty
            ones included (this is not checked; gloo ends a process that receives more than it expects). If the route
            takes no row from this rank, its rows are a dummy's: they are not sent, and their gradient is zero.
        route: of this rank, from `make_route`.
        group: the process group, or mesh of one dim, that the route's ranks count in, or the DataParallel that the
            loader was given, which a route with peers needs; default: all. A route of one rank needs no
            torch.distributed, and no message is sent. With peers, the gradient of features is made one that fits
            encoders whose gradients are averaged over all ranks and peers: taken once where peers have the whole
            gradient, summed where each has a part, and multiplied by (ranks and peers) / (ranks in
            `DataParallel.averaged`). Nothing else is to be multiplied.
        requires_grad: whether the result requires a gradient. It must be the same on every rank, and is never taken
            from `features`. Without grad mode the result requires none.
        async_op: return a handle immediately; its `wait()` returns the result. Until then the features must not be
            changed in place.

    Returns:
        (num_rows_out, ...), a new tensor in the receiver's order; or a handle.

    Raises:
        ValueError: features do not fit the route, the route is of another group, rank or peer, integers cannot require
            a gradient, or the backend does not serve the device. Only this rank raises it: the others fail at the
            group's timeout. In backward, on every rank: gradients are the same on the peers of some ranks and differ in
            others, or are not as before, or not as `DataParallel.gradients` says.
        RuntimeError: inside a checkpointed region, which would run the collective again in backward; features changed
            before `wait()`; or another rank died or did not take part within the group's timeout.
    """
    _check_no_recomputation(route)
    _check_features(features, route, requires_grad)
    links = links_of(group)
    _check_group(features, route, links)
    handle = ExchangeHandle(features, route, links, requires_grad)
    return handle if async_op else handle.wait()


class ExchangeHandle:
    """An exchange under way, from `exchange(..., async_op=True)`."""

    def __init__(self, features: Tensor, route: Route, links: Links, requires_grad: bool) -> None:
        has_backward = requires_grad and torch.is_grad_enabled()
        self._flight = _Flight(route, links, links.place(route) if has_backward else None)
        self._watched = None if features.is_inference() else (features, features._version)
        self._ticket: Tensor | None = None
        self._result: Tensor | None = None
        if has_backward:
            # The anchor makes the result require a gradient whether or not the features do.
            anchor = torch.empty(0, device=features.device, requires_grad=True)
            self._ticket = _Start.apply(features, anchor, self._flight)  # type: ignore[no-untyped-call]
        else:
            self._flight.start(features.detach(), "forward")

    @kept_from_compilers
    def wait(self) -> Tensor:
        """Return the result; waits for it the first time. Raises RuntimeError as `exchange` does."""
        if self._result is None:
            _check_no_recomputation(self._flight.route)
            watched, self._watched = self._watched, None
            if watched is not None and watched[0]._version != watched[1]:  # their memory is sent, not a copy
                raise RuntimeError(
                    f"{_name(self._flight.route)}: the features were changed in place while they were sent: do not "
                    "change them before wait()"
                )
            if self._ticket is None:
                self._result = self._flight.finish("forward")
            else:
                with torch.enable_grad():
                    self._result = _Finish.apply(self._ticket, self._flight)  # type: ignore[no-untyped-call]
        return self._result


Direction = Literal["forward", "backward"]


@dataclass
class _Move:
    """Rows under way: the tensors that `work` reads and writes must live until it is done. `received` is a part of
    `whole`, which has place for the rows of all peers.
    """

    sent: Tensor
    received: Tensor
    whole: Tensor
    work: Any


class _Flight:
    """The collectives of one exchange, each started and finished by different nodes of the graph."""

    def __init__(self, route: Route, links: Links, place: Place | None) -> None:
        self.route = route
        self._links, self._place = links, place
        self._moves: dict[Direction, _Move] = {}

    def start(self, rows: Tensor, direction: Direction) -> None:
        route, links = self._way(direction), self._links
        if direction == "forward":
            rows = _without(rows, self.route)
        else:
            assert self._place is not None
            with self._errors(direction):
                rows = links.combined(rows, self.route, self._place, _name(self.route))
        sent = _placed(rows[: route.num_rows_in], route.send_order, route, int(route.send_rows.sum())).contiguous()
        arriving = int((route.receive_rows if route.peer_rows is None else route.peer_rows).sum())
        whole = sent.new_empty((arriving, *sent.shape[1:]))
        received, work = whole[links.own(route)], None
        if route.num_ranks == 1:
            received.copy_(sent)
        else:
            splits = route.receive_rows.tolist(), route.send_rows.tolist()
            try:
                work = dist.all_to_all_single(received, sent, *splits, links.group, async_op=True)
            except RuntimeError as error:
                raise RuntimeError(f"{self._name(direction)} could not start: {error}") from error
        self._moves[direction] = _Move(sent, received, whole, work)

    def finish(self, direction: Direction) -> Tensor:
        move, route = self._moves.pop(direction), self._way(direction)
        with self._errors(direction):
            if move.work is not None:
                move.work.wait()
            received, whole = move.received, move.whole
            del move  # Frees the sent rows before rows are reordered.
            ordered = _placed(received, route.receive_order, route, route.num_rows_out)
            if route.peer_rows is None:
                return ordered
            if ordered is not received:
                received.copy_(ordered)
            self._links.gather(whole, route)
        return whole

    @contextmanager
    def _errors(self, direction: Direction) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"{self._name(direction)} failed: {_CAUSES[direction]}. {error}") from error

    def _way(self, direction: Direction) -> Route:
        return self.route if direction == "forward" else self.route.reverse()

    def _name(self, direction: Direction) -> str:
        return f"{direction} of {_name(self.route)} on rank {self.route.rank} of {self.route.num_ranks}"


_CAUSES: dict[Direction, str] = {
    "forward": "a rank died, or did not take part with the same route within the group's timeout",
    "backward": (
        "a rank died, or did not run this backward within the group's timeout: if a rank's loss does not depend on the "
        "result, add result[:0].sum() to it"
    ),
}


class _Start(torch.autograd.Function):
    """Starts the exchange, and ends its backward. The ticket it returns only connects it to `_Finish`."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, _anchor: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        ctx.num_rows = features.shape[0]
        flight.start(features, "forward")
        return torch.empty(0, device=features.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _ticket: Tensor) -> tuple[Tensor | None, None, None]:
        gradient: Tensor = _without(ctx.flight.finish("backward"), ctx.flight.route)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        if len(gradient) != ctx.num_rows:  # a dummy's
            gradient = gradient.new_zeros((ctx.num_rows, *gradient.shape[1:]))
        return gradient, None, None


class _Finish(torch.autograd.Function):
    """Ends the exchange, and starts its backward, so that other nodes may run in between."""

    @staticmethod
    def forward(ctx: Any, _ticket: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.finish("forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.flight.start(gradient, "backward")
        return torch.zeros(0, device=gradient.device), None


def _placed(rows: Tensor, order: NDArray[Any] | None, route: Route, num_rows: int) -> Tensor:
    """Return the rows in this order, or `num_rows` rows to which they are added in it."""
    if order is None:
        return rows
    index = torch.tensor(order, device=rows.device)
    if route.adds:
        return rows.new_zeros((num_rows, *rows.shape[1:])).index_add_(0, index, rows)
    return rows.index_select(0, index)


def _without(rows: Tensor, route: Route) -> Tensor:
    """Return the rows, with zeros for those of failed parts."""
    if route.zeroed is None:
        return rows
    return rows.index_fill(0, torch.tensor(route.zeroed, device=rows.device), 0)


def _name(route: Route) -> str:
    return f"exchange ({route.label})" if route.label else "exchange"


def _check_features(features: Tensor, route: Route, requires_grad: bool) -> None:
    if features.dim() == 0:
        raise ValueError(f"{_name(route)}: features must have rows, (num_rows, ...), got a single number")
    if requires_grad and not (features.is_floating_point() or features.is_complex()):
        raise ValueError(
            f"{_name(route)}: features of {features.dtype} cannot require a gradient: pass requires_grad=False"
        )
    # As in Batch.merge: if no rows are expected, they are a dummy's.
    if route.num_rows_in and features.shape[0] != route.num_rows_in:
        raise ValueError(
            f"{_name(route)}: the features have {features.shape[0]} rows, but rank {route.rank} sends "
            f"{route.num_rows_in} in the plan: pass the encoder's output for all parts of this batch, one row for each "
            "merged token"
        )


def _check_group(features: Tensor, route: Route, links: Links) -> None:
    group = links.group
    num_peers = 1 if route.peer_rows is None else len(route.peer_rows)
    if num_peers != links.num_peers:
        raise ValueError(
            f"{_name(route)}: the route is of {num_peers} peers, and the group has {links.num_peers}: pass the "
            "od.DataParallel that the loader was given, od.exchange(..., group=dp)"
        )
    if route.num_ranks == 1 and group is None:
        return
    if not (dist.is_available() and dist.is_initialized()):
        if route.num_ranks > 1 or group is not None:
            raise ValueError(
                f"{_name(route)}: the route is of {route.num_ranks} ranks, but torch.distributed is not initialized: "
                "call init_process_group first"
            )
        return
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{_name(route)}: this process does not belong to the group")
    if route.peer != links.peer:
        raise ValueError(
            f"{_name(route)}: the route is of peer {route.peer}, and this process is peer {links.peer}: each peer "
            "encodes the parts of its own batch, so do not send one peer's batch to the others"
        )
    if (size, rank) != (route.num_ranks, route.rank):
        raise ValueError(
            f"{_name(route)}: the route is of rank {route.rank} of {route.num_ranks}, the process is rank {rank} of "
            f"{size} in the group: pass the group that the loader was given"
        )
    served = served_devices(group)
    if size * num_peers > 1 and features.device.type not in served:
        raise ValueError(
            f"{_name(route)}: the features are on {features.device}, the group's backend serves {', '.join(served)}: "
            "move them, or pass a group for their device"
        )


def _check_no_recomputation(route: Route) -> None:
    """Raise inside a checkpointed region: in forward if it is torch's own checkpoint, else when it recomputes.

    torch has no public function for either. The stack shows both kinds of torch's checkpoint, and their recomputation;
    other implementations call their function in backward, which is a running graph task of the engine.
    """
    inside = torch._C._current_graph_task_id() != -1
    frame = inspect.currentframe()
    while frame is not None and not inside:
        inside = frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        frame = frame.f_back
    if inside:
        raise RuntimeError(
            f"{_name(route)} was called inside a checkpointed region (or in backward): recomputing it would run the "
            "collective again. Call it outside of torch.utils.checkpoint: checkpoint the encoder and the blocks, not "
            "the code between them"
        )
