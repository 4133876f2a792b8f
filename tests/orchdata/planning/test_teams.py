"""Plans with teams: aligned, complete, within caps, never dearer than whole samples; loads are counted again here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import CostModel, PhaseCost
from orchdata.native.costs import sequence_costs
from orchdata.order.order import Order
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan
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
