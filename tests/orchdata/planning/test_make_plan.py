"""Plans per phase compared to joint ones: parts stay where that costs about the same, in few micro-steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from albums import Album
from hypothesis import given
from hypothesis import strategies as st

from orchdata.balancers import PhaseCost
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan, PlanSpec, make_plan
from orchdata.planning.sharing.packed import NO_PADDING, PaddedCost

PHASES = ("image", "llm")


def plan_of(source: Album, num_ranks: int, balance: Balance, num_peers: int = 1) -> Plan:
    num_samples = len(source.text)
    spec = PlanSpec(
        costs=source,
        order=Order(num_samples, shuffle=Shuffle(), seed=0),
        balance=balance,
        num_ranks=num_ranks,
        num_peers=num_peers,
        batches=GlobalBatches(size=num_samples),
    )
    return make_plan(spec, StepTask(0, 0))


def at_home(plan: Plan) -> bool:
    parts = plan.parts["image"]
    return bool((parts.rank == plan.rank[parts.sample]).all())


def joint(balance: Balance) -> Balance:
    return Balance(
        scope=balance.scope, group_size=balance.group_size, max_tokens=balance.max_tokens, oversize=balance.oversize
    )


@st.composite
def albums(draw: Any) -> tuple[dict[str, Any], int, Balance]:
    """Arguments of an Album, ranks, and a balance per phase."""
    num_samples, num_ranks = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    caps = {"llm": draw(st.sampled_from([500, 800, 2000]))} if draw(st.booleans()) else {}
    caps |= {"image": draw(st.sampled_from([300, 700, 1500]))} if draw(st.booleans()) else {}
    scope, group_size = draw(st.sampled_from([("global", None), ("global", None), ("grouped", 2), ("grid", 2)]))
    balance = Balance(
        assignment="per_phase", scope=scope, group_size=group_size, max_tokens=caps or None, oversize="own"
    )
    padded = PaddedCost(PhaseCost(1.0)) if draw(st.booleans()) else NO_PADDING
    return {"num_samples": num_samples, "seed": draw(st.integers(0, 10_000)), "padded": padded}, num_ranks, balance


@pytest.mark.slow
@given(albums())
def test_a_plan_that_moves_nothing_is_taken_where_it_costs_about_the_same(
    drawn: tuple[dict[str, Any], int, Balance],
) -> None:
    options, num_ranks, balance = drawn
    plan = plan_of(Album(**options), num_ranks, balance)
    assert plan.hash == plan_of(Album(**options), num_ranks, balance).hash
    whole = plan_of(Album(**options), num_ranks, joint(balance))
    apart = plan_of(Album(**options, balanced=("llm",)), num_ranks, balance)  # Where there is nothing to weigh.
    price, price_whole, price_apart = (one.cost(Balance().price, PHASES) for one in (plan, whole, apart))
    assert plan.num_microbatches == min(whole.num_microbatches, apart.num_microbatches)
    if whole.num_microbatches < apart.num_microbatches:
        assert price <= price_whole
        expected = whole
    elif whole.num_microbatches == apart.num_microbatches and price_whole * 200 <= price_apart * 201:
        assert at_home(plan)
        assert plan.feature_rows("image")[1:].tolist() == [0, 0]
        expected = whole
    else:
        assert plan.parts["image"].rank.tolist() == apart.parts["image"].rank.tolist()
        expected = apart
    assert plan.rank.tolist() == expected.rank.tolist()
    assert plan.microbatch.tolist() == expected.microbatch.tolist()
    for rank, microbatch in np.ndindex(num_ranks, plan.num_microbatches):
        mine = plan.encoded("image", rank, microbatch)
        held = plan.parts["image"].positions[mine].sum()
        samples = set(plan.parts["image"].sample[mine])
        assert held <= balance.caps.get("image", held) or len(samples) == 1


@given(albums(), st.sampled_from(["step", 2, 3]))
def test_rounds_are_as_long_as_fit_and_costs_count_them(
    drawn: tuple[dict[str, Any], int, Balance], encode: Any
) -> None:
    options, num_ranks, balance = drawn
    plan = plan_of(Album(**options), num_ranks, replace(balance, encode=encode))
    number, parts = plan.num_microbatches, plan.parts["image"]
    most, rounds = number if encode == "step" else encode, np.array([plan.round_of(m) for m in range(number)])
    lengths = np.bincount(rounds)
    assert rounds.tolist() == sorted(rounds)
    assert 1 <= lengths.min() <= lengths.max() <= most
    loads, positions, counts = np.zeros((3, num_ranks, len(lengths)), np.int64)
    for of, each in ((loads, parts.costs), (positions, parts.positions), (counts, 1)):
        np.add.at(of, (parts.rank, rounds[plan.microbatch[parts.sample]]), each)
    assert plan.cells("image").tolist() == loads.tolist()
    assert plan.cells_unbalanced("image").shape == loads.shape
    assert plan.cost(balance.price, PHASES) == loads.max(axis=0).sum() + plan.cells("llm").max(axis=0).sum()
    cap = balance.caps.get("image")
    if cap is None:
        assert len(lengths) == -(-number // most)
        if balance.scope == "global" and not at_home(plan):
            assert loads.max() <= -(-loads.sum(axis=0).max() // num_ranks) + parts.costs.max()
    else:
        assert ((positions <= cap) | (counts <= 1) | (lengths == 1)).all()
        if num_ranks == 1:  # One micro-step more does not fit.
            each = np.bincount(plan.microbatch[parts.sample], parts.positions, number)
            first = np.cumsum(lengths)[:-1]
            assert all(positions[0, r] + each[m] > cap for r, m in enumerate(first) if lengths[r] < most)


def test_encoders_are_even_over_a_whole_step_and_not_over_its_micro_steps() -> None:
    balance = Balance(assignment="per_phase", max_tokens=400, oversize="own")
    by_micro_step, by_step = (
        plan_of(Album(120, 3), 16, replace(balance, encode=encode)) for encode in ("micro_step", "step")
    )
    bound = by_step.lower_bound("image")
    assert by_step.num_microbatches == by_micro_step.num_microbatches > 2
    assert by_step.cost(balance.price, ("image",)) <= 1.01 * bound
    assert by_micro_step.cost(balance.price, ("image",)) > 1.01 * bound
    assert plan_of(Album(120, 3), 16, replace(balance, encode=1)).hash == by_micro_step.hash != by_step.hash


@given(albums(), st.integers(2, 4), st.sampled_from(["micro_step", "step", 2]))
def test_peers_share_parts_within_caps_and_loads_are_of_gpus(
    drawn: tuple[dict[str, Any], int, Balance], num_peers: int, encode: Any
) -> None:
    options, num_ranks, balance = drawn
    plan = plan_of(Album(**options), num_ranks, replace(balance, encode=encode), num_peers)
    parts, gpus = plan.parts["image"], num_ranks * num_peers
    assert parts.peer is not None
    assert ((parts.peer >= 0) & (parts.peer < num_peers)).all()
    rounds = np.array([plan.round_of(m) for m in range(plan.num_microbatches)])
    lengths, samples = np.bincount(rounds), {}
    loads, positions, counts = np.zeros((3, gpus, len(lengths)), np.int64)
    for rank, peer, sample, size in zip(parts.rank, parts.peer, parts.sample, parts.positions, strict=True):
        at = rank * num_peers + peer, rounds[plan.microbatch[sample]]
        for of, each in ((loads, size), (positions, size), (counts, 1)):  # A part of an Album costs its positions.
            of[at] += each
        samples.setdefault(at, set()).add(sample)
    assert plan.cells("image").tolist() == loads.tolist()
    assert plan.loads("image").tolist() == loads.sum(axis=1).tolist()
    assert plan.lower_bound("image") <= loads.sum(axis=1).max()
    assert len(plan.cells_unbalanced("image")) == num_ranks
    llm = plan.cells("llm").max(axis=0).sum()
    assert plan.cost(balance.price, PHASES) == num_peers * loads.max(axis=0).sum() + llm
    assert plan.cost_bound(balance.price, PHASES) <= plan.cost(balance.price, PHASES)
    cap = balance.caps.get("image", positions.sum())
    for at in zip(*np.nonzero(positions > cap), strict=True):
        assert counts[at] == 1 or (lengths[at[1]] == 1 and len(samples[at]) == 1), "several parts above the cap"
    if balance.caps.keys() <= {"llm"} and balance.scope == "global":  # Also where all parts stay with their samples.
        at_least = parts.costs.max(initial=0)
        for rank in range(num_ranks):
            mine = loads[rank * num_peers : (rank + 1) * num_peers]
            assert (mine.max(axis=0) - mine.min(axis=0) <= at_least).all()


@given(albums(), st.integers(2, 4))
def test_routes_of_all_peers_and_a_gather_bring_every_part_once(
    drawn: tuple[dict[str, Any], int, Balance], num_peers: int
) -> None:
    options, num_ranks, balance = drawn
    plan = plan_of(Album(**options), num_ranks, balance, num_peers)
    parts = plan.parts["image"]
    for microbatch in range(plan.num_microbatches):
        gathered: list[list[list[int]]] = [[] for _ in range(num_ranks)]
        for peer in range(num_peers):
            sent = []
            for rank in range(num_ranks):
                route, mine = (of("image", rank, microbatch, peer) for of in (plan.route, plan.encoded))
                assert (route.rank, route.peer, len(route.peer_rows)) == (rank, peer, num_peers)
                assert route.num_rows_in == parts.tokens[mine].sum()
                sent.append(np.split(mine, np.cumsum(route.parts.send_rows)[:-1]))
            for rank in range(num_ranks):
                route = plan.route("image", rank, microbatch, peer)
                coming = [pieces[rank].tolist() for pieces in sent]
                assert route.parts.receive_rows.tolist() == [len(piece) for piece in coming]
                gathered[rank].append([part for piece in coming for part in piece])
                assert route.peer_rows[peer] == parts.tokens[gathered[rank][-1]].sum()
        for rank, of_peers in enumerate(gathered):
            arriving = plan.arriving("image", rank, microbatch)
            assert arriving.tolist() == [part for each in of_peers for part in each]
            home = (plan.rank[parts.sample] == rank) & (plan.microbatch[parts.sample] == microbatch)
            assert sorted(arriving.tolist()) == np.flatnonzero(home).tolist()
            if all(of_peers):  # Rows of two peers swapped do not arrive in order.
                assert arriving.tolist() != [part for each in of_peers[::-1] for part in each]


def test_peers_are_level_over_a_step_and_part_of_the_hash() -> None:
    balance = Balance(assignment="per_phase", max_tokens=400, oversize="own", encode="step")
    one, two = plan_of(Album(120, 3), 8, balance), plan_of(Album(120, 3), 8, balance, 2)
    assert one.parts["image"].peer is None
    assert two.cost(balance.price, ("image",)) <= 1.01 * 2 * two.lower_bound("image")
    assert len({one.hash, two.hash, *(plan_of(Album(120, seed), 4, balance).hash for seed in (3, 4))}) == 4
    peer = two.parts["image"].peer
    assert peer is not None
    assert replace(two, parts={"image": replace(two.parts["image"], peer=1 - peer)}).hash != two.hash


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encode": "step"}, "assignment='per_phase' alone, got 'joint'"),
        ({"encode": 2, "assignment": "per_phase", "order": "1f1b", "num_stages": 2}, "order=None alone, got '1f1b'"),
        ({"encode": 0, "assignment": "per_phase"}, "Balance.encode"),
        ({"encode": "round", "assignment": "per_phase"}, "Balance.encode"),
    ],
)
def test_rounds_need_parts_and_consecutive_micro_steps(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Balance(**options)
