"""Windows that are shared out: costs of their pieces, and which rank has which window in which micro-step."""

from __future__ import annotations

import numpy as np
import pytest

from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import PhaseCost
from orchdata.native.costs import sequence_costs
from orchdata.planning.balance import Balance
from orchdata.planning.layout import Attention
from orchdata.planning.sharing.shares import StepSamples
from orchdata.planning.windows import WindowCost

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
