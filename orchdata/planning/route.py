"""Route: (encoder rank, llm rank, tokens of each part) -> the rows that a rank sends and receives, and their order.

    encoder output --send_order--> grouped by receiver --all-to-all--> grouped by sender --receive_order--> merge

A part may go to several ranks in segments, (part, first row, number of rows). Then rows of the encoder's output are
sent several times or not at all, and the way back adds up what comes for each.

The route is composed from both assignments: features travel once, and every rank knows all split sizes without
communication.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import checked_count

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32] | Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """How the rows of one modality and micro-step travel, seen from one rank.

    Attributes:
        rank, num_ranks: of the group.
        send_rows, receive_rows: int64 (num_ranks,), rows to and from each rank, this one included.
        send_order: int64 (num_sent,); `features[send_order]` is grouped by receiver. None where it already is.
        receive_order: int64 (num_rows_out,); `received[receive_order]` is in the receiver's order. None where rows
            already arrive so, grouped by sender.
        num_rows: rows of the encoder's output, where segments travel: `send_order` may repeat rows and leave some out,
            and `receive_order` may leave some out. None where every row is sent once, and needed.
        adds: of a way back with `num_rows`: rows are added at the places that the orders name, to zeros.
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
    num_rows: int | None = None
    adds: bool = False
    part_route: Route | None = None
    zeroed: Ints | None = None
    label: str = ""
    peer: int = 0
    peer_rows: Ints | None = None

    @property
    def num_rows_in(self) -> int:
        """Rows of this rank's features: each is sent once, maybe to itself, or in segments."""
        return self._rows(self.send_order, self.adds, int(self.send_rows.sum()))

    @property
    def num_rows_out(self) -> int:
        """Rows this rank has after it, from itself and its peers included."""
        if self.peer_rows is not None:
            return int(self.peer_rows.sum())
        return self._rows(self.receive_order, not self.adds, int(self.receive_rows.sum()))

    def _rows(self, order: Ints | None, at_samples: bool, moved: int) -> int:
        """Return the rows on one side of the all-to-all: at the samples, or where they were encoded."""
        if self.num_rows is None:
            return moved
        return self.num_rows if not at_samples else moved if order is None else len(order)

    @property
    def parts(self) -> Route:
        """The route of one row a part: for validity flags, uint8 (num_parts,)."""
        return self if self.part_route is None else self.part_route

    def reverse(self) -> Route:
        """The way back through the all-to-all, which gradients take: those of a row that was sent several times add
        up, and that of a row that was sent to no one is zero.
        """
        orders = self.receive_order, self.send_order
        if self.num_rows is None:
            orders = _inverse(orders[0]), _inverse(orders[1])
        return replace(
            self,
            send_rows=self.receive_rows,
            receive_rows=self.send_rows,
            send_order=orders[0],
            receive_order=orders[1],
            adds=self.num_rows is not None and not self.adds,
            part_route=None if self.part_route is None else self.part_route.reverse(),
            zeroed=None,
            peer_rows=None,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Route):
            return NotImplemented
        return all(np.array_equal(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))

    __hash__ = None  # type: ignore[assignment]


def make_route(
    rank: int,
    num_ranks: int,
    *,
    encoder_rank: ArrayLike,
    llm_rank: ArrayLike,
    tokens: ArrayLike,
    segments: ArrayLike | None = None,
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
        llm_rank: integers (num_parts,), the rank that has the part's sample in the llm phase; with segments
            (num_segments,), the rank that needs each.
        tokens: integers (num_parts,), at least 0: rows the encoder yields for each part.
        segments: integers (num_segments, 3), part, first row and number of rows of each: a part may have several, to
            one rank or several ranks, or none. None where each part is one.
        encoder_order: integers (num_parts,), a permutation of the parts: their order in every rank's encoder output.
        llm_order: the same for the parts, or the segments, that every rank expects to receive.
        label: its name in errors.

    Raises:
        ValueError: shapes that differ, a rank outside the group, negative tokens, rows that a part does not have, an
            order that is no permutation.
    """
    num_ranks = checked_count(num_ranks, "num_ranks")
    if checked_count(rank, "rank", 0) >= num_ranks:
        raise ValueError(f"rank must be in 0..{num_ranks - 1}, got {rank}")
    sizes = _integers(tokens, "tokens", np.asarray(tokens).size, None)
    count = len(sizes)
    encoders = _integers(encoder_rank, "encoder_rank", count, num_ranks)
    part, first, rows = np.arange(count), np.zeros(count, np.int64), sizes
    if segments is not None:
        part, first, rows = _segments(segments, sizes)
    receivers = _integers(llm_rank, "llm_rank", len(part), num_ranks)
    sending, receiving = _order(encoder_order, "encoder_order", count), _order(llm_order, "llm_order", len(part))

    # Every rank groups what it sends by receiver, and keeps the order of parts within a group.
    encoded, place = sending[encoders[sending] == rank], np.argsort(sending)
    sequence = np.argsort(place[part], kind="stable")
    mine = sequence[encoders[part[sequence]] == rank]
    grouped = mine[np.argsort(receivers[mine], kind="stable")]
    coming = sequence[receivers[sequence] == rank]
    arrival = coming[np.argsort(encoders[part[coming]], kind="stable")]
    expected = receiving[receivers[receiving] == rank]

    route = grouped_route(
        rank,
        num_ranks,
        receivers=receivers[grouped],
        sent=rows[grouped],
        senders=encoders[part[arrival]],
        received=rows[arrival],
        label=label,
    )
    by_part, once = np.argsort(encoded, kind="stable"), np.ones(len(part), np.int64)
    number = by_part[np.searchsorted(encoded[by_part], part[grouped])]
    route = in_segments(route, sizes[encoded], number, first[grouped], rows[grouped], as_parts=segments is None)
    received = replace(route.parts, receive_order=_row_order(arrival, expected, once))
    return replace(route, receive_order=_row_order(arrival, expected, rows), part_route=received)


def in_segments(route: Route, sizes: Ints, part: Ints, first: Ints, rows: Ints, *, as_parts: bool = False) -> Route:
    """Return a grouped route with the order in which a rank sends segments of what it encodes: `sizes` are the rows of
    its parts; `part` (number in them), `first` row and `rows` are of segments, grouped by receiver. With `as_parts`
    each is a part.
    """
    if as_parts and np.array_equal(part, np.arange(len(sizes))):
        return route
    starts = np.cumsum(sizes) - sizes
    whole, each = (None, None) if as_parts else (int(sizes.sum()), len(sizes))
    parts = replace(route.parts, send_order=part, num_rows=each)
    return replace(route, send_order=_spans(starts[part] + first, rows), num_rows=whole, part_route=parts)


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
    Given are the rank that needs each part that (`peer` of) `rank` encodes, and its rows; the rank that encodes each
    expected part, its rows and, with several, its peer, ascending.
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
    return _spans(starts[wanted], sizes[wanted])


def _spans(starts: Ints, lengths: Ints) -> Ints:
    """Return the rows of spans, one after another: int64 (sum of lengths,)."""
    spans: Ints = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    return spans


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


def _segments(segments: ArrayLike, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    """Return part, first row and rows of each."""
    array = np.asarray(segments).reshape(-1, 3) if np.size(segments) == 0 else np.asarray(segments)
    if array.ndim != 2 or array.shape[1] != 3:
        raise ValueError(f"segments must be (num_segments, 3): part, first row, rows; got shape {array.shape}")
    limits = ("part", len(sizes)), ("first row", None), ("rows", None)
    part, first, rows = (
        _integers(column, f"segments' {name}", len(array), limit)
        for (name, limit), column in zip(limits, array.T, strict=True)
    )
    if (beyond := first + rows > sizes[part]).any():
        at = int(beyond.argmax())
        raise ValueError(f"segments[{at}] is {array[at].tolist()}; part {part[at]} has {sizes[part[at]]} rows")
    return part, first, rows


def _order(order: ArrayLike | None, name: str, count: int) -> Ints:
    if order is None:
        return np.arange(count)
    checked = _integers(order, name, count, count)
    if len(np.unique(checked)) != count:
        raise ValueError(
            f"{name} must contain each of {count} parts once, got {count - len(np.unique(checked))} repeats"
        )
    return checked
