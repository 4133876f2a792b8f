"""Scopes of balancing: membership never changes, groups keep to their streams, and the plan is the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from shard_factory import omni_shards

import orchdata as od
from benchmarks.distributions import omni_phases
from orchdata.balancers import CostModel, PhaseCost, balance_phases
from orchdata.balancers.assignment import loads_of
from orchdata.native.costs import sequence_costs
from orchdata.order.order import Order
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance, Teams
from orchdata.planning.plan import Plan, PlanSpec, make_plan
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import assign, stream_ranks


@given(st.integers(0, 99), st.integers(0, 60), st.integers(1, 9), st.integers(1, 9))
def test_ranks_share_out_the_streams_in_order(start: int, num_samples: int, streams: int, num_ranks: int) -> None:
    stream = (start + np.arange(num_samples)) % streams
    near = stream_ranks(stream, num_ranks)
    counts = np.bincount(near, minlength=num_ranks)
    assert counts.max() - counts.min() <= 1
    for one, other in zip(range(num_samples), range(1, num_samples), strict=False):
        if stream[one] < stream[other]:
            assert near[one] <= near[other]


def waiting(costs: dict[str, Any], rank: Any, num_ranks: int) -> int:
    """The sum over phases of the largest load."""
    return sum(int(loads_of(of_all, rank, num_ranks).max()) for of_all in costs.values())


@pytest.mark.parametrize("held", [False, True])
def test_every_scope_lowers_what_ranks_wait_for_after_each_phase(held: bool) -> None:
    num_ranks, size = 32, 8
    costs: dict[str, Any] = omni_phases(np.random.default_rng(5), num_ranks * 32)
    owner = (np.arange(num_ranks * 32) // 32).astype(np.int32)
    moving = {"sizes": costs["llm"], "ranks_per_node": size} if held else {}
    together = {"llm": np.sum(list(costs.values()), axis=0)}
    found: dict[str, int] = {}
    for scope in ("grouped", "grid", "global"):
        balance = od.Balance(scope=scope, group_size=None if scope == "global" else size)  # type: ignore[arg-type]
        rank = assign(costs, balance, num_ranks, owner, **moving)
        found[scope] = waiting(costs, rank, num_ranks)
        by_sum = assign(together, balance, num_ranks, owner, **moving)
        assert found[scope] < waiting(costs, by_sum, num_ranks) < waiting(costs, owner, num_ranks)
        summed = assign(costs, replace(balance, objective="sum"), num_ranks, owner, **moving)
        assert summed.tolist() == by_sum.tolist()
        if scope == "grouped":
            assert (rank // size == owner // size).all()
            for first in range(0, num_ranks, size):
                mine = {phase: of_all[owner // size == first // size] for phase, of_all in costs.items()}
                alone = sum(balance_phases(mine, size).makespans)
                assert waiting(mine, rank[owner // size == first // size] - first, size) <= 1.02 * alone
    assert found["grid"] <= 1.05 * found["global"]


def test_batches_come_in_the_order_of_the_pipeline(tmp_path: Path) -> None:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=2, samples=20), recipe=od.Recipe())
    dataset.index()
    caps = {"max_tokens": 400, "oversize": "own", "objective": "sum"}
    plain, piped = (  # Of one phase: of several, a pipeline may take other microbatches.
        od.DataLoader(dataset, global_batch_size=40, num_threads=0, balance=balance)
        for balance in (od.Balance(**caps), od.Balance(order="1f1b", num_stages=4, **caps))  # type: ignore[arg-type]
    )
    first, second = next(iter(plain.steps())), next(iter(piped.steps()))
    plan, index = second[0].plan, dataset.index()
    order = plan.pipeline_order(0, 4)
    assert len(order) > 4
    planned = [[index.key(row) for row in plan.row[plan.places(0, microbatch)]] for microbatch in order.tolist()]
    assert [[key for _, key in batch.sample_ids] for batch in second] == planned
    assert sorted(key for batch in first for key in batch.sample_ids) == sorted(
        key for batch in second for key in batch.sample_ids
    )
    assert [batch.microbatch for batch in second] == list(range(len(order)))
    assert [batch.is_last_microbatch for batch in second] == [False] * (len(order) - 1) + [True]
    assert piped.state_dict()["step"] == plain.state_dict()["step"]


@pytest.mark.parametrize("scope", ["grouped", "grid"])
def test_a_loader_takes_groups_from_the_launcher(tmp_path: Path, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=2, samples=20), recipe=od.Recipe())
    dataset.index()
    options: dict[str, Any] = {"global_batch_size": 20, "shuffle": od.Shuffle(streams=2), "num_threads": 0}
    with pytest.raises(ValueError, match=rf"balance='{scope}' needs a group size: od.Balance\(scope='{scope}'"):
        od.DataLoader(dataset, balance=scope, dp=(0, 4), **options)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks = [od.DataLoader(dataset, balance=scope, dp=(rank, 4), **options) for rank in range(4)]
    keys = [key for rank in ranks for batch in rank for key in batch.sample_ids]
    assert len(keys) == len(set(keys)) == 40
    own = [rank.stats()["own_streams"] for rank in ranks]
    assert own == [1.0] * 4 if scope == "grouped" else all(0 < share <= 1 for share in own)
    shards = {
        rank: {
            key[0]
            for batch in od.DataLoader(dataset, balance=scope, dp=(rank, 4), **options)
            for key in batch.sample_ids
        }
        for rank in (0, 3)
    }
    if scope == "grouped":
        assert shards[0].isdisjoint(shards[3])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scope": "most"}, "scope must be one of"),
        ({"objective": "max"}, "objective must be one of"),
        ({"max_tokens": 0}, "of phase 'llm' must be at least 1, got 0"),
        ({"max_tokens": {"image": -2}}, "of phase 'image' must be at least 1, got -2"),
        ({"max_samples": 0}, "max_samples must be at least 1"),
        ({"oversize": "shrink"}, "oversize must be one of"),
        ({"scope": "global", "group_size": 8}, "group_size is for scope 'grouped' or 'grid', got scope='global'"),
        ({"scope": "grid", "equal_count": True}, "scope='grid', which moves samples by cost alone"),
        ({"scope": "grid", "max_samples": 3}, "scope='grid', which moves samples by cost alone"),
        ({"order": "1f1b"}, "order and num_stages go together, got order='1f1b', num_stages=None"),
        ({"num_stages": 4}, "order and num_stages go together, got order=None, num_stages=4"),
        ({"scope": "grouped", "group_size": 0}, "Balance.group_size must be at least 1, got 0"),
        ({"effort": -1}, "Balance.effort must be a finite number of at least 0, got -1"),
        ({"effort": float("nan")}, "Balance.effort must be a finite number of at least 0, got nan"),
    ],
)
def test_combinations_that_say_nothing_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        od.Balance(**options)


# Plans with teams: aligned, complete, within caps, never dearer than whole samples; loads are counted again here.


Ints = NDArray[np.int64]

MODEL = CostModel(image=PhaseCost(3.0, 0.001), llm=PhaseCost(10.0, 0.001))
RANKS = (1, 2, 3, 4, 6, 8, 36)


class Samples:
    """Lengths of texts, and image positions next to some."""

    padded = NO_PADDING

    def __init__(self, tokens: Ints, image: Ints | None = None) -> None:
        self.tokens, self.image = tokens, image
        self.phases = self.balanced = ("llm",) if image is None else ("image", "llm")
        self.exponent = MODEL.exponent

    def positions(self, phase: str, row: Ints) -> Ints:
        return (self.tokens if phase == "llm" or self.image is None else self.image)[row]

    def costs(self, phase: str, row: Ints) -> Ints:
        return sequence_costs(self.positions(phase, row), *MODEL.coefficients(phase))

    def loss_tokens(self, row: Ints) -> Ints:
        return self.tokens[row]

    def parts(self, phase: str, row: Ints) -> Any:
        raise NotImplementedError


def plan_of(samples: Samples, num_ranks: int, balance: Balance, accumulate: int = 1) -> Plan:
    order, batches = Order(len(samples.tokens), shuffle=None, seed=0), GlobalBatches(size=len(samples.tokens))
    spec = PlanSpec(
        costs=samples, order=order, batches=batches, balance=balance, num_ranks=num_ranks, accumulate=accumulate
    )
    return make_plan(spec, StepTask(0, 0))


def check(plan: Plan, balance: Balance, accumulate: int = 1) -> int:
    """Every sample once, in an aligned team, and within the caps of each cell; return the price by own sums."""
    size, rank, shape = plan.team_size, plan.rank, (plan.num_ranks, plan.num_microbatches)
    assert (rank >= 0).all() and (rank % size == 0).all(), "a team is not aligned"
    assert (rank + size <= plan.num_ranks).all() and (size & (size - 1) == 0).all()
    cells = {phase: np.zeros(shape, np.int64) for phase in plan.phases}
    tokens, samples, widths = np.zeros(shape, np.int64), np.zeros(shape, np.int64), {}
    for at, (first, width, number) in enumerate(
        zip(rank.tolist(), size.tolist(), plan.microbatch.tolist(), strict=True)
    ):
        samples[first, number] += 1
        for member in range(first, first + width):
            tokens[member, number] += -(-int(plan.llm_positions[at]) // width)
            widths.setdefault((member, number), set()).add(width)
            for phase, costs in plan.costs.items():
                cells[phase][member, number] += -(-int(costs[at]) // width) if phase == "llm" else int(costs[at])
    assert all((cells[phase] == plan.cells(phase)).all() for phase in plan.phases), "loads do not add up"
    if "image" in plan.phases:
        assert (size[plan.costs["image"] > 0] == 1).all(), "a sample with media is shared"
    cap = balance.caps.get("llm")
    above = tokens > (cap or tokens.max())
    assert (samples[above] <= 1).all() and all(len(plan.places(*cell)) == 1 for cell in np.argwhere(above).tolist())
    if accumulate > 1:
        assert plan.num_microbatches == accumulate
        assert samples.max() <= -(-len(rank) // (plan.num_ranks * accumulate))
    if balance.teams is not None and not balance.teams.mixed:
        assert all(len(found) == 1 for found in widths.values())
    price = plan.cost(balance.price, plan.phases)
    assert price == balance.price.of(list(cells.values())) >= plan.cost_bound(balance.price, plan.phases)
    return price


def drawn(seed: int, *, images: bool) -> tuple[Samples, int]:
    random = np.random.default_rng(seed)
    num_ranks = RANKS[seed % len(RANKS)]
    count = int(random.integers(1, 12 * num_ranks + 2))
    tokens = np.rint(random.lognormal(6, 1.6, count)).clip(1, 60_000).astype(np.int64)
    image = np.where(random.random(count) < 0.4, np.rint(random.lognormal(5, 1, count)), 0).astype(np.int64)
    return Samples(tokens, image if images else None), num_ranks


@pytest.mark.parametrize("objective", ["barrier", "sum"])
@pytest.mark.parametrize("cap", [None, 2_000, 20_000])
@pytest.mark.parametrize(("accumulate", "mixed"), [(1, True), (1, False), (3, True)])
def test_plans_of_random_lists(objective: Any, cap: int | None, accumulate: int, mixed: bool) -> None:
    shared = 0
    for seed in range(21):
        samples, num_ranks = drawn(seed, images=seed % 2 > 0)
        teams = Teams(largest=8, cut="trainer", mixed=mixed)
        balance = Balance(max_tokens=cap, objective=objective, oversize="own", teams=teams)
        whole_balance = replace(balance, teams=None)
        try:
            plan = plan_of(samples, num_ranks, balance, accumulate)
        except ValueError:  # Micro-steps of a given number do not hold them, whole or shared.
            with pytest.raises(ValueError, match="do not hold"):
                plan_of(samples, num_ranks, whole_balance, accumulate)
            continue
        price = check(plan, balance, accumulate)
        shared += int((plan.team_size > 1).sum())
        may_share = np.ones(len(plan.row), np.bool_) if samples.image is None else samples.image == 0
        above = may_share & (samples.tokens > (cap or 60_000))
        if num_ranks > 1:
            assert (plan.team_size[above] > 1).all(), "a sample above the cap is whole"
        if above.any():
            continue
        whole = plan_of(samples, num_ranks, whole_balance, accumulate)
        if plan.teams is None:
            assert plan.hash == whole.hash
        else:
            assert plan.hash != replace(plan, teams=None).hash
            assert price <= 0.98 * whole.cost(balance.price, whole.phases)
    assert shared > 0


def test_a_wrong_plan_is_noticed() -> None:
    samples = Samples(np.array([9_000, 500, 400, 300, 200, 100]))
    balance = Balance(teams=Teams(largest=2, cut="trainer"))
    plan = plan_of(samples, 4, balance)
    check(plan, balance)
    assert plan.teams is not None and plan.team_size.tolist()[0] == 2
    with pytest.raises(AssertionError, match="not aligned"):
        check(replace(plan, rank=(plan.rank + 1) % 3), balance)
    fewer = replace(plan.teams, size=np.ones_like(plan.team_size))
    wrong = replace(plan, teams=plan.teams)
    object.__setattr__(wrong, "cells", lambda phase: replace(plan, teams=fewer).cells(phase))
    with pytest.raises(AssertionError, match="do not add up"):
        check(wrong, balance)


def test_too_few_ranks_are_named() -> None:
    samples, teams = Samples(np.array([9_000, 100])), Teams(largest=16, cut="trainer")
    for num_ranks in (1, 2, 6):
        with pytest.raises(ValueError, match="Take 16 ranks or more"):
            plan_of(samples, num_ranks, Balance(max_tokens=1_000, teams=teams))
        plan_of(samples, num_ranks, Balance(max_tokens=1_000, teams=teams, oversize="own"))
    plan = plan_of(samples, 16, Balance(max_tokens=1_000, teams=teams))
    assert plan.team_size[0] == 16


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"largest": 6}, "power of two"),
        ({"cut": "model"}, "must be one of loader, trainer"),
        ({"gain": 1.0}, "below 1"),
        ({"mixed": 1}, "must be one of True, False"),
        ({"per_token": {2: 1.0}}, "each of the sizes"),
        ({"cost": {3: PhaseCost(1.0)}}, "among"),
        ({"cost": {4: 1.0}}, "PhaseCost"),
    ],
)
def test_teams_say_what_is_wrong(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Teams(**{"largest": 4, "cut": "trainer", **given})
