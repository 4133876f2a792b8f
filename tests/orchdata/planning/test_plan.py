from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan, PlanSpec, make_plan
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Padding

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """Costs held in arrays: what an index is to a plan."""

    columns: dict[str, Ints]
    balanced: tuple[str, ...] = ("image", "llm")
    phases: tuple[str, ...] = field(default=("image", "llm"))
    padded: Padding = NO_PADDING
    exponent: ClassVar[int] = 0

    def costs(self, phase: str, row: Ints) -> Ints:
        return self.columns[phase][row]

    def positions(self, phase: str, row: Ints) -> Ints:
        return self.columns[phase][row]

    def loss_tokens(self, row: Ints) -> Ints:
        return self.columns["llm"][row] - 1


def table(num_samples: int, seed: int = 0) -> Table:
    random = np.random.default_rng(seed)
    image = np.where(random.random(num_samples) < 0.4, random.integers(1, 2000, num_samples), 0)
    return Table({"image": image, "llm": image // 4 + random.integers(1, 300, num_samples)})


def spec(num_samples: int = 500, **changes: Any) -> PlanSpec:
    plan = PlanSpec(
        costs=table(num_samples),
        order=Order(num_samples, shuffle=Shuffle(), seed=3),
        balance=Balance(),
        num_ranks=8,
        batches=GlobalBatches(size=64),
    )
    return replace(plan, **changes)


def keys(plan: Plan) -> list[int]:
    return plan.row.tolist()


def test_plans_are_equal_to_the_bit_and_hashes_tell_them_apart() -> None:
    assert {make_plan(spec(), StepTask(0, 2)).hash for _ in range(20)} == {make_plan(spec(), StepTask(0, 2)).hash}
    others = [
        make_plan(spec(), StepTask(0, 3)),
        make_plan(spec(), StepTask(1, 2)),
        make_plan(spec(num_ranks=4), StepTask(0, 2)),
        make_plan(spec(balance=Balance(scope="none")), StepTask(0, 2)),
    ]
    assert len({make_plan(spec(), StepTask(0, 2)).hash, *(plan.hash for plan in others)}) == 5


def test_a_step_outside_the_epoch_is_an_error() -> None:
    with pytest.raises(IndexError, match="epoch of 8 steps"):  # ceil(500 / 64)
        make_plan(spec(), StepTask(0, 8))


@given(
    num_samples=st.integers(1, 200),
    num_ranks=st.integers(1, 20),
    global_batch_size=st.integers(1, 80),
    drop_last=st.booleans(),
    scope=st.sampled_from(["none", "global", "grouped", "grid"]),
    cap=st.sampled_from([None, 900, 5000]),
)
def test_each_sample_is_planned_once(
    num_samples: int, num_ranks: int, global_batch_size: int, drop_last: bool, scope: Any, cap: int | None
) -> None:
    plans = spec(
        num_samples,
        num_ranks=num_ranks,
        batches=GlobalBatches(size=global_batch_size, drop_last=drop_last),
        balance=Balance(scope=scope, max_tokens=cap, group_size=3 if scope in ("grouped", "grid") else None),
    )
    whole = replace(plans, num_ranks=1, balance=Balance())  # membership depends on neither
    seen: list[int] = []
    for step in range(plans.num_steps):
        plan = make_plan(plans, StepTask(0, step))
        shares = [
            plan.places(rank, microbatch) for rank in range(num_ranks) for microbatch in range(plan.num_microbatches)
        ]
        assert sorted(np.concatenate(shares).tolist()) == list(range(len(plan.row)))
        if cap is not None:
            assert all(plan.llm_positions[share].sum() <= cap for share in shares)
        assert keys(plan) == keys(make_plan(whole, StepTask(0, step)))
        seen += keys(plan)
    assert len(seen) == len(set(seen))
    assert len(seen) == (num_samples // global_batch_size * global_batch_size if drop_last else num_samples)
