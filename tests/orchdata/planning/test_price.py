"""The price of a plan against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shard_factory import omni_shards

import orchdata as od
from benchmarks.papers.disttrain import order_after_disttrain
from orchdata.balancers import simulate_1f1b
from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import PhaseCost
from orchdata.dataset.indexed import IndexCosts
from orchdata.native.costs import sequence_costs
from orchdata.planning.balance import Attention, Balance
from orchdata.planning.parts import Parts
from orchdata.planning.plan import Plan
from orchdata.planning.sharing.shares import StepSamples
from orchdata.planning.windows import WindowCost

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


# Costs of an index's rows: what each part and each sequence costs by itself, windows too.


RECIPE = od.Recipe(image=od.ImagePreprocessor(max_tokens=64))
WINDOWS = od.CostModel(
    image=od.PhaseCost(1, 2, windows=((16, 3), (40, 5))), llm=od.PhaseCost(7, 0, 11, windows=((20, 13),))
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHDATA_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=1, samples=12), recipe=RECIPE)
        made.index()
        return made


def test_every_part_and_sequence_costs_what_its_phase_says(dataset: od.ShardDataset) -> None:
    costs = IndexCosts(dataset.index(), WINDOWS)
    rows = np.arange(12)
    parts = costs.parts("image", rows)
    patches = parts.positions
    assert patches.min() == 16 < 40 < patches.max()
    by_hand = patches + 2 * patches**2 + 3 * patches * np.minimum(patches, 16) + 5 * patches * np.minimum(patches, 40)
    assert parts.costs.tolist() == by_hand.tolist()
    assert costs.costs("image", rows).tolist() == np.bincount(parts.sample, by_hand, minlength=12).tolist()
    tokens = costs.positions("llm", rows)
    by_hand = 7 * tokens + 11 + 13 * tokens * np.minimum(tokens, 20)
    assert costs.costs("llm", rows).tolist() == by_hand.tolist()


# Windows that are shared out: costs of their pieces, and which rank has which window in which micro-step.


LENGTH = 100
COEFFICIENTS = CostModel(llm=PhaseCost(3.0, 0.25, 7.0)).coefficients("llm")


def pieces(number: int, seed: int = 0) -> np.ndarray:
    """Tokens of the pieces of `number` full windows, some of one document and some of many."""
    random = np.random.default_rng(seed)
    cuts = [
        np.unique(np.append(random.integers(1, LENGTH, size=random.choice([0, 1, 30])), LENGTH)) for _ in range(number)
    ]
    return np.concatenate([np.diff(cut, prepend=0) for cut in cuts]).astype(np.int64)


def step_of(cost: WindowCost, tokens: np.ndarray, ranks: int, balance: Balance) -> StepSamples:
    costs = {"llm": cost.of_pieces(tokens)}
    return StepSamples(costs, {"llm": tokens}, tokens, ranks, balance, np.zeros(len(tokens), np.int32))


def test_pieces_of_one_sequence_share_its_cost() -> None:
    tokens = pieces(40)
    cost = WindowCost(LENGTH, COEFFICIENTS, "window")
    whole = int(sequence_costs(np.array([LENGTH]), *COEFFICIENTS)[0])
    sums = np.bincount(cost.windows_of(tokens), weights=cost.of_pieces(tokens))
    assert sums.tolist() == [whole] * 40


@pytest.mark.parametrize("attention", ["document", "window"])
@pytest.mark.parametrize(("number", "ranks"), [(12, 4), (12, 1), (10, 4), (3, 5)])
def test_a_window_is_one_microbatch(attention: Attention, number: int, ranks: int) -> None:
    tokens = pieces(number)
    cost = WindowCost(LENGTH, COEFFICIENTS, attention)
    shares = cost.share_out(step_of(cost, tokens, ranks, Balance()))
    cells = shares.loads(tokens, ranks)
    assert shares.num_microbatches == -(-number // ranks)
    assert sorted(cells.ravel().tolist()) == [0] * (cells.size - number) + [LENGTH] * number
    place = shares.rank * shares.num_microbatches + shares.microbatch
    assert (np.diff(place) == 0)[np.diff(cost.windows_of(tokens)) == 0].all()


def test_windows_of_one_micro_step_cost_about_the_same() -> None:
    tokens = pieces(64)
    cost = WindowCost(LENGTH, COEFFICIENTS, "document")
    price = {}
    for scope in ("none", "global"):
        step = step_of(cost, tokens, 8, Balance(scope=scope))  # type: ignore[arg-type]
        cells = cost.share_out(step).loads(step.costs["llm"], 8)
        price[scope] = int(cells.max(axis=0).sum())
        sums = cells.sum(axis=1)
    windows = np.sort(np.bincount(cost.windows_of(tokens), weights=cost.of_pieces(tokens)))
    assert price["global"] == windows[7::8].sum()  # no way to fill micro-steps has a smaller sum of largest
    assert price["global"] < price["none"]
    assert sums.max() * len(sums) < 1.02 * sums.sum()
