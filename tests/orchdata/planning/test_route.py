"""Routes: every rank's view, put together, carries each row from where it is encoded to where it is needed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import orchdata as od
from orchdata.planning.route import Route, grouped_route, make_route

Row = tuple[int, int]  # part, row of it


@dataclass(frozen=True)
class Parts:
    num_ranks: int
    encoder_rank: list[int]
    llm_rank: list[int]
    tokens: list[int]
    encoder_order: list[int] | None = None
    llm_order: list[int] | None = None

    def route(self, rank: int) -> Route:
        return make_route(
            rank,
            self.num_ranks,
            encoder_rank=self.encoder_rank,
            llm_rank=self.llm_rank,
            tokens=self.tokens,
            encoder_order=self.encoder_order,
            llm_order=self.llm_order,
        )

    def held(self, rank: int) -> list[Row]:
        """The plain-Python twin: rows of the encoder's output."""
        return self._rows(self.encoder_rank, self.encoder_order, rank)

    def wanted(self, rank: int) -> list[Row]:
        """The plain-Python twin: rows that the LLM needs."""
        return self._rows(self.llm_rank, self.llm_order, rank)

    def _rows(self, ranks: list[int], order: list[int] | None, rank: int) -> list[Row]:
        sequence = range(len(self.tokens)) if order is None else order
        return [(part, row) for part in sequence if ranks[part] == rank for row in range(self.tokens[part])]


@st.composite
def parts(draw: st.DrawFn) -> Parts:
    num_ranks, count = draw(st.integers(1, 5)), draw(st.integers(0, 12))
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=count, max_size=count)
    order = st.none() | st.permutations(range(count))
    tokens = st.lists(st.integers(0, 4), min_size=count, max_size=count)
    return Parts(num_ranks, draw(ranks), draw(ranks), draw(tokens), draw(order), draw(order))


def carry(routes: list[Route], rows: list[list[Any]]) -> list[list[Any]]:
    """What each rank has after the all-to-all: `rows` in, one list for each rank."""
    boxes: list[list[list[Any]]] = []
    for route, mine in zip(routes, rows, strict=True):
        assert len(mine) == route.num_rows_in
        grouped = mine if route.send_order is None else [mine[row] for row in route.send_order]
        ends = np.cumsum(route.send_rows)
        boxes.append([grouped[end - size : end] for end, size in zip(ends, route.send_rows, strict=True)])
    found = []
    for route in routes:
        coming = [box[route.rank] for box in boxes]
        assert [len(box) for box in coming] == route.receive_rows.tolist()
        received = list(itertools.chain.from_iterable(coming))
        assert len(received) == route.num_rows_out
        found.append(received if route.receive_order is None else [received[row] for row in route.receive_order])
    return found


@given(parts())
def test_a_route_is_the_inverse_of_encoding_then_the_llm_assignment(parts: Parts) -> None:
    routes = [parts.route(rank) for rank in range(parts.num_ranks)]
    held = [parts.held(rank) for rank in range(parts.num_ranks)]
    assert carry(routes, held) == [parts.wanted(rank) for rank in range(parts.num_ranks)]


@given(parts())
def test_the_reverse_route_brings_every_row_back(parts: Parts) -> None:
    routes = [parts.route(rank) for rank in range(parts.num_ranks)]
    held = [parts.held(rank) for rank in range(parts.num_ranks)]
    assert carry([route.reverse() for route in routes], carry(routes, held)) == held
    assert all(route.num_rows is None for route in routes)
    assert [route.reverse().reverse() for route in routes] == routes


def test_with_peers_an_all_to_all_for_each_and_a_gather_bring_every_row() -> None:
    rng = np.random.default_rng(0)
    home, encoder, peer, tokens = (rng.integers(0, high, 12) for high in (2, 2, 3, 4))
    rows = [[(part, row) for row in range(tokens[part])] for part in range(12)]

    def rows_of(parts: np.ndarray) -> list[Row]:
        return [row for part in parts for row in rows[part]]

    def arriving(rank: int) -> np.ndarray:
        expected = np.flatnonzero(home == rank)
        return expected[np.lexsort((encoder[expected], peer[expected]))]

    def route(rank: int, number: int) -> tuple[Route, list[Row]]:
        mine = np.flatnonzero((encoder == rank) & (peer == number))
        mine = mine[np.argsort(home[mine], kind="stable")]
        coming = arriving(rank)
        sent = {"receivers": home[mine], "sent": tokens[mine]}
        coming_rows = {"senders": encoder[coming], "received": tokens[coming], "arriving_peers": peer[coming]}
        return grouped_route(rank, 2, **sent, **coming_rows, peer=number, num_peers=3), rows_of(mine)

    gathered: list[list[Row]] = [[], []]
    for number in range(3):
        routes, held = zip(*(route(rank, number) for rank in range(2)), strict=True)
        without = [replace(each, peer_rows=None) for each in routes]
        found = carry(without, list(held))
        assert carry([each.reverse() for each in routes], found) == list(held)
        for rank in range(2):
            assert len(found[rank]) == routes[rank].peer_rows[number]
            assert routes[rank].num_rows_out == sum(len(rows[part]) for part in np.flatnonzero(home == rank))
            assert routes[rank].parts.num_rows_out == (home == rank).sum()
            gathered[rank] += found[rank]
    assert gathered == [rows_of(arriving(rank)) for rank in range(2)]
    assert routes[0] != replace(routes[0], peer=0)


@given(parts(), st.data())
def test_segments_go_to_every_rank_that_needs_them(parts: Parts, data: st.DataObject) -> None:
    part = st.sampled_from([part for part, tokens in enumerate(parts.tokens) if tokens] or [-1])
    drawn = data.draw(st.lists(st.tuples(part, st.integers(0, 3), st.integers(0, 4)), max_size=9))
    segments = [(at, min(first, parts.tokens[at] - 1), 1) for at, first, _ in drawn if at >= 0]
    needs = [rank % parts.num_ranks for at, _, rank in drawn if at >= 0]
    order = data.draw(st.permutations(range(len(needs))))
    given: Any = {"encoder_rank": parts.encoder_rank, "tokens": parts.tokens, "encoder_order": parts.encoder_order}
    given |= {"llm_rank": needs, "segments": segments, "llm_order": order}
    routes = [make_route(rank, parts.num_ranks, **given) for rank in range(parts.num_ranks)]
    held = [parts.held(rank) for rank in range(parts.num_ranks)]
    wanted = [[segments[at][:2] for at in order if needs[at] == rank] for rank in range(parts.num_ranks)]
    assert carry(routes, held) == wanted
    assert [route.reverse().reverse() for route in routes] == routes


def test_gradients_of_rows_that_are_sent_twice_add_up_and_others_are_zero() -> None:
    segments = [(1, 0, 2), (1, 1, 1), (0, 2, 1)]
    route = make_route(0, 1, encoder_rank=[0, 0], llm_rank=[0, 0, 0], tokens=[3, 2], segments=segments)
    rows = torch.arange(5.0).requires_grad_()
    arrived = od.exchange(rows, route, requires_grad=True)
    assert arrived.tolist() == [3, 4, 4, 2]
    (arrived * torch.tensor([1.0, 2.0, 4.0, 8.0])).sum().backward()
    assert rows.grad is not None and rows.grad.tolist() == [0, 0, 8, 1, 6]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 2}, r"rank must be in 0\.\.1, got 2"),
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"encoder_rank": [0, 2]}, r"encoder_rank\[1\] is 2; it must be from 0 to 1"),
        ({"llm_rank": [-1, 0]}, r"llm_rank\[0\] is -1; it must be from 0 to 1"),
        ({"llm_rank": [0]}, r"llm_rank must have one entry for each of 2 parts, got shape \(1,\)"),
        ({"tokens": [1, -4]}, r"tokens\[1\] is -4; it must be at least 0"),
        ({"tokens": [[1, 4]]}, r"tokens must have one entry for each of 2 parts, got shape \(1, 2\)"),
        ({"tokens": [1.5, 2.0]}, "tokens must be integers, got dtype float64"),
        ({"encoder_order": [1, 1]}, "encoder_order must contain each of 2 parts once, got 1 repeats"),
        ({"segments": [[0, 1, 2], [1, 0, 3]]}, r"segments\[0\] is \[0, 1, 2\]; part 0 has 2 rows"),
        ({"llm_order": [0, 2]}, r"llm_order\[1\] is 2; it must be from 0 to 1"),
    ],
)
def test_what_is_no_route_is_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"rank": 0, "num_ranks": 2, "encoder_rank": [0, 1], "llm_rank": [1, 0], "tokens": [2, 3]}
    with pytest.raises(ValueError, match=message):
        make_route(**{**given, **changed})
