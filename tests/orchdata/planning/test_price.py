"""The price of a plan against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orchdata.planning.parts import Parts
from orchdata.planning.plan import Plan
from orchdata.planning.price import step_cost, step_lower_bound

PHASES = ("image", "llm")


def plan() -> Plan:
    """Four samples on two ranks in two microbatches: rank 0 has the first two, rank 1 the others.

    image: rank 0 has 5 then 0, rank 1 has 1 then 4. llm: rank 0 has 2 then 6, rank 1 has 3 then 1.
    """
    return Plan(
        epoch=0,
        step=0,
        num_ranks=2,
        num_microbatches=2,
        dataset_id=np.zeros(4, np.int32),
        row=np.arange(4),
        rank=np.array([0, 0, 1, 1], np.int32),
        microbatch=np.array([0, 1, 0, 1], np.int32),
        costs={"image": np.array([5, 0, 1, 4]), "llm": np.array([2, 6, 3, 1]), "audio": np.array([9, 9, 9, 9])},
        llm_positions=np.array([2, 6, 3, 1]),
        loss_tokens=0,
        stream_rank=np.array([0, 0, 1, 1], np.int32),
    )


def test_under_a_barrier_every_phase_of_every_micro_step_is_waited_for() -> None:
    assert step_cost(plan(), "barrier", ("image",)) == 5 + 4
    assert step_cost(plan(), "barrier", ("llm",)) == 3 + 6
    assert step_cost(plan(), "barrier", PHASES) == 9 + 9


def test_under_sum_the_largest_rank_counts() -> None:
    assert step_cost(plan(), "sum", ("image",)) == 5
    assert step_cost(plan(), "sum", PHASES) == 5 + 0 + 2 + 6  # rank 1 has 1 + 4 + 3 + 1


def test_where_encoders_are_apart_ranks_meet_in_every_exchange() -> None:
    parts = Parts(
        sample=np.array([0, 2, 3]),
        part=np.arange(3),
        positions=np.array([5, 1, 4]),
        tokens=np.array([5, 1, 4]),
        costs=np.array([5, 1, 4]),
        rank=np.array([1, 1, 0], np.int32),
    )
    apart = replace(plan(), parts={"image": parts})
    assert step_cost(apart, "sum", PHASES) == step_cost(apart, "barrier", PHASES) == (6 + 4) + (3 + 6)


def test_the_bound_is_below_both_prices() -> None:
    # image: 5 is the largest of a total of 10, llm: 6 of 12; together 22 on two ranks.
    assert step_lower_bound(plan(), "barrier", PHASES) == 5 + 6
    assert step_lower_bound(plan(), "sum", PHASES) == 11
