"""Route: (encoder rank, llm rank, tokens of each part) -> the rows that a rank sends and receives, and their order.

    encoder output --send_order--> grouped by receiver --all-to-all--> grouped by sender --receive_order--> merge

The route is composed from both assignments: features travel once, and every rank knows all split sizes without
communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import checked_count

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32] | Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """How the rows of one modality and micro-step travel, seen from one rank.

    Attributes:
        rank, num_ranks: of the group.
        send_rows, receive_rows: int64 (num_ranks,), rows to and from each rank, this one included.
        send_order: int64 (num_rows_in,); `features[send_order]` is grouped by receiver. None where it already is.
        receive_order: int64 (num_rows_out,); `received[receive_order]` is in the receiver's order. None where rows
            already arrive so, grouped by sender.
        part_route: the same with one row a part; None where each row is a part.
        zeroed: int64, rows that this rank sends as zeros, with a gradient of zeros: those of parts that failed.
        label: its name in errors: "image, step 12, micro-step 0".
        peer: of this process, among those of `DataParallel.encoder_dims`; the fields above are of the all-to-all among
            the ranks that have the same peer number.
        peer_rows: int64 (num_peers,), rows that each peer has after it, in the receiver's order; gathered, they are
            the rows of the rank's samples. `peer_rows[peer]` is the sum of `receive_rows`. None without peers.
    """

    rank: int
    num_ranks: int
    send_rows: Ints
    receive_rows: Ints
    send_order: Ints | None = None
    receive_order: Ints | None = None
    part_route: Route | None = None
    zeroed: Ints | None = None
    label: str = ""
    peer: int = 0
    peer_rows: Ints | None = None

    @property
    def num_rows_in(self) -> int:
        """Rows this rank sends, to itself included."""
        return int(self.send_rows.sum())

    @property
    def num_rows_out(self) -> int:
        """Rows this rank receives, from itself and its peers included."""
        return int(self.receive_rows.sum() if self.peer_rows is None else self.peer_rows.sum())

    @property
    def parts(self) -> Route:
        """The route of one row a part: for validity flags, uint8 (num_parts,)."""
        return self if self.part_route is None else self.part_route

    def reverse(self) -> Route:
        """The way back through the all-to-all, which gradients take."""
        return replace(
            self,
            send_rows=self.receive_rows,
            receive_rows=self.send_rows,
            send_order=_inverse(self.receive_order),
            receive_order=_inverse(self.send_order),
            part_route=None if self.part_route is None else self.part_route.reverse(),
            zeroed=None,
            peer_rows=None,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Route):
            return NotImplemented
        return (
            (self.rank, self.num_ranks, self.label, self.peer) == (other.rank, other.num_ranks, other.label, other.peer)
            and np.array_equal(self.send_rows, other.send_rows)
            and np.array_equal(self.receive_rows, other.receive_rows)
            and _same(self.send_order, other.send_order)
            and _same(self.receive_order, other.receive_order)
            and _same(self.zeroed, other.zeroed)
            and _same(self.peer_rows, other.peer_rows)
            and self.part_route == other.part_route
        )

    __hash__ = None  # type: ignore[assignment]


def make_route(
    rank: int,
    num_ranks: int,
    *,
    encoder_rank: ArrayLike,
    llm_rank: ArrayLike,
    tokens: ArrayLike,
    encoder_order: ArrayLike | None = None,
    llm_order: ArrayLike | None = None,
    label: str = "",
) -> Route:
    """The route of one modality in one global micro-step, composed from both assignments.

    Parts are numbered in canonical order: by the index of their sample in the global batch, then by their position in
    the sample. Every rank has and expects its parts in canonical order unless an order is given. With
    `encoder_order=np.argsort(llm_rank, kind="stable")` and `llm_order=np.argsort(encoder_rank, kind="stable")` no row
    is copied to group or order it.

    Args:
        rank, num_ranks: of this process, and of the group.
        encoder_rank: integers (num_parts,), the rank that encodes each part.
        llm_rank: integers (num_parts,), the rank that has the part's sample in the llm phase.
        tokens: integers (num_parts,), at least 0: rows the encoder yields for each part.
        encoder_order: integers (num_parts,), a permutation of the parts: their order in every rank's encoder output.
        llm_order: the same for the parts that every rank expects to receive.
        label: its name in errors.

    Raises:
        ValueError: shapes that differ, a rank outside the group, negative tokens, an order that is no permutation.
    """
    num_ranks = checked_count(num_ranks, "num_ranks")
    if checked_count(rank, "rank", 0) >= num_ranks:
        raise ValueError(f"rank must be in 0..{num_ranks - 1}, got {rank}")
    sizes = _integers(tokens, "tokens", np.asarray(tokens).size, None)
    count = len(sizes)
    encoders = _integers(encoder_rank, "encoder_rank", count, num_ranks)
    receivers = _integers(llm_rank, "llm_rank", count, num_ranks)
    sending, receiving = _order(encoder_order, "encoder_order", count), _order(llm_order, "llm_order", count)

    encoded = sending[encoders[sending] == rank]
    grouped = encoded[np.argsort(receivers[encoded], kind="stable")]
    # Every rank groups its parts by receiver and keeps their order within a group.
    coming = sending[receivers[sending] == rank]
    arrival = coming[np.argsort(encoders[coming], kind="stable")]
    expected = receiving[receivers[receiving] == rank]

    def ordered(route: Route, row_counts: Ints) -> Route:
        return replace(
            route,
            send_order=_row_order(encoded, grouped, row_counts),
            receive_order=_row_order(arrival, expected, row_counts),
        )

    route = grouped_route(
        rank,
        num_ranks,
        receivers=receivers[encoded],
        sent=sizes[encoded],
        senders=encoders[coming],
        received=sizes[coming],
        label=label,
    )
    return replace(ordered(route, sizes), part_route=ordered(route.parts, np.ones(count, np.int64)))


def grouped_route(
    rank: int,
    num_ranks: int,
    *,
    receivers: Ranks,
    sent: Ints,
    senders: Ranks,
    received: Ints,
    label: str = "",
    peer: int = 0,
    num_peers: int = 1,
    arriving_peers: Ranks | None = None,
) -> Route:
    """Return the route of parts that are grouped by receiver and expected by sender: no row is copied to order it.

    Args:
        receivers, sent: (num_encoded,), the rank that needs each part that `rank` encodes, and the rows of the part; of
            several peers, what `peer` of `rank` encodes.
        senders, received: (num_expected,), the rank that encodes each part that `rank` expects, and its rows.
        arriving_peers: (num_expected,), ascending, the peer that encodes each of these; None with one peer.
    """

    def by(rows_sent: Ints, rows_received: Ints, part_route: Route | None) -> Route:
        own = slice(None) if arriving_peers is None else np.asarray(arriving_peers) == peer
        return Route(
            rank=rank,
            num_ranks=num_ranks,
            send_rows=_totals(receivers, rows_sent, num_ranks),
            receive_rows=_totals(senders[own], rows_received[own], num_ranks),
            part_route=part_route,
            label=label,
            peer=peer,
            peer_rows=None if arriving_peers is None else _totals(arriving_peers, rows_received, num_peers),
        )

    return by(sent, received, by(np.ones_like(sent), np.ones_like(received), None))


def _row_order(given: Ints, wanted: Ints, sizes: Ints) -> Ints | None:
    """Return the rows of parts in the order `given`, reordered to `wanted`; None where that changes nothing."""
    if np.array_equal(given, wanted):
        return None
    starts = np.zeros(len(sizes), np.int64)
    starts[given] = np.cumsum(sizes[given]) - sizes[given]
    lengths = sizes[wanted]
    shifts = starts[wanted] - (np.cumsum(lengths) - lengths)
    return np.repeat(shifts, lengths) + np.arange(int(lengths.sum()))


def _totals(ranks: Ranks, sizes: Ints, num_ranks: int) -> Ints:
    totals = np.zeros(num_ranks, np.int64)
    np.add.at(totals, ranks, sizes)
    return totals


def _inverse(order: Ints | None) -> Ints | None:
    if order is None:
        return None
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def _same(first: Ints | None, second: Ints | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def _integers(values: ArrayLike, name: str, count: int, limit: int | None) -> Ints:
    """int64 (count,), from 0 to below `limit`."""
    array = np.asarray(values)
    if array.shape != (count,):
        raise ValueError(f"{name} must have one entry for each of {count} parts, got shape {array.shape}")
    if count and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}")
    wrong = (array < 0) | (array >= limit) if limit is not None else array < 0
    if wrong.any():
        part = int(wrong.argmax())
        allowed = "at least 0" if limit is None else f"from 0 to {limit - 1}"
        raise ValueError(f"{name}[{part}] is {array[part]}; it must be {allowed}")
    return array.astype(np.int64)


def _order(order: ArrayLike | None, name: str, count: int) -> Ints:
    if order is None:
        return np.arange(count)
    checked = _integers(order, name, count, count)
    if len(np.unique(checked)) != count:
        raise ValueError(
            f"{name} must contain each of {count} parts once, got {count - len(np.unique(checked))} repeats"
        )
    return checked
