"""The price of a plan against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.papers.disttrain import order_after_disttrain
from orchdata.balancers import simulate_1f1b
from orchdata.planning.balance import Balance
from orchdata.planning.parts import Parts
from orchdata.planning.plan import Plan

PHASES = ("image", "llm")
BARRIER = Balance().price
SUM = Balance(objective="sum").price
PIPELINE = Balance(order="1f1b", num_stages=2).price


def plan() -> Plan:
    """Four samples on two ranks in two microbatches: rank 0 has the first two, rank 1 the others.

    image: rank 0 has 5 then 0, rank 1 has 1 then 4. llm: rank 0 has 2 then 6, rank 1 has 3 then 1.
    """
    return Plan(
        epoch=0,
        step=0,
        num_ranks=2,
        num_microbatches=2,
        source=np.zeros(4, np.int32),
        row=np.arange(4),
        rank=np.array([0, 0, 1, 1], np.int32),
        microbatch=np.array([0, 1, 0, 1], np.int32),
        costs={"image": np.array([5, 0, 1, 4]), "llm": np.array([2, 6, 3, 1]), "audio": np.array([9, 9, 9, 9])},
        llm_positions=np.array([2, 6, 3, 1]),
        loss_tokens=0,
        stream_rank=np.array([0, 0, 1, 1], np.int32),
    )


def test_under_a_barrier_every_phase_of_every_micro_step_is_waited_for() -> None:
    assert plan().cost(BARRIER, ("image",)) == 5 + 4
    assert plan().cost(BARRIER, ("llm",)) == 3 + 6
    assert plan().cost(BARRIER, PHASES) == 9 + 9


def test_under_sum_the_largest_rank_counts() -> None:
    assert plan().cost(SUM, ("image",)) == 5
    assert plan().cost(SUM, PHASES) == 5 + 0 + 2 + 6  # rank 1 has 1 + 4 + 3 + 1


def test_in_a_pipeline_the_slowest_makespan_counts() -> None:
    # The first of two stages has the encoders: their cost counts twice, plus half of the LLM's.
    makespans = []
    for image, llm in (((5, 0), (2, 6)), ((1, 4), (3, 1))):
        forward = np.array([[2 * image[0] + llm[0], 2 * image[1] + llm[1]], llm], float)
        makespans.append(simulate_1f1b(forward, 2 * forward, order_after_disttrain(forward, 2 * forward)))
    assert plan().cost(PIPELINE, PHASES) == max(makespans)


def test_an_even_step_costs_its_means_and_in_a_pipeline_also_what_fills_it() -> None:
    assert BARRIER.of_even([5.0, 6.0], 2) == SUM.of_even([5.0, 6.0], 2) == 5 + 6
    # Two microbatches of 5/2 and 6/2 on two stages: forwards of 2 * 2.5 + 3 and 3, then twice as long back.
    forward = np.array([[8.0, 8.0], [3.0, 3.0]])
    assert PIPELINE.of_even([5.0, 6.0], 2) == simulate_1f1b(forward, 2 * forward) > 3 * (8 + 8)
    even = [np.full((2, 2), 5), np.full((2, 2), 6)]
    for price in (BARRIER, SUM, PIPELINE):
        assert price.of(even) == price.of_even([10.0, 12.0], 2)


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
    for balance in (
        Balance(assignment="per_phase"),
        Balance(assignment="per_phase", objective="sum"),
        Balance(assignment="per_phase", order="1f1b", num_stages=2),
    ):
        assert balance.price == BARRIER
        assert apart.cost(balance.price, PHASES) == (6 + 4) + (3 + 6)
