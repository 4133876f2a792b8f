"""Plans with teams: aligned, complete, within caps, never dearer than whole samples; loads are counted again here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from orchdata.balancers import CostModel, PhaseCost
from orchdata.native.costs import sequence_costs
from orchdata.order.order import Order
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance, Teams
from orchdata.planning.plan import Plan, PlanSpec, make_plan
from orchdata.planning.sharing.packed import NO_PADDING

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
        ({"mixed": 1}, "True or False"),
        ({"per_token": {2: 1.0}}, "each of the sizes"),
        ({"cost": {3: PhaseCost(1.0)}}, "among"),
        ({"cost": {4: 1.0}}, "PhaseCost"),
    ],
)
def test_teams_say_what_is_wrong(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Teams(**{"largest": 4, "cut": "trainer", **given})
