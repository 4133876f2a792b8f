"""Fitting costs: known coefficients come back, noise is borne, nothing is negative, clear errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchdata.balancers import CostModel, PhaseCost
from orchdata.balancers.costs.model import fit_phase_cost, fit_phase_costs

LENGTHS = np.unique(np.geomspace(10, 1_000_000, 40).astype(np.int64))
# Seconds a sequence, position and pair of positions: both ends of the range of lengths show each of them.
TRUTHS = {
    "all three": PhaseCost(1e-7, 1e-13, 1e-4),
    "no quadratic": PhaseCost(3e-7, 0.0, 1e-3),
    "no constant": PhaseCost(2e-6, 5e-12),
    "quadratic only": PhaseCost(0.0, 1e-9),
    "constant only": PhaseCost(0.0, 0.0, 0.25),
}


def values(cost: PhaseCost) -> tuple[float, float, float]:
    return cost.linear, cost.quadratic, cost.constant


@pytest.mark.parametrize("name", TRUTHS)
def test_known_coefficients_come_back(name: str) -> None:
    truth = TRUTHS[name]
    fitted = fit_phase_cost(LENGTHS, [truth.at(int(length)) for length in LENGTHS])
    # One that is not there comes back as nothing, or as less than a millionth of a sequence's time.
    for found, exact, power in zip(values(fitted.cost), values(truth), (1, 2, 0), strict=True):
        smallest = min(truth.at(int(length)) / float(length) ** power for length in LENGTHS)
        assert found == pytest.approx(exact, rel=1e-6, abs=1e-9 * smallest)
    assert fitted.residual <= fitted.worst_residual < 1e-6
    assert fitted.num_samples == len(LENGTHS)


@pytest.mark.parametrize("name", TRUTHS)
def test_five_per_cent_of_noise(name: str) -> None:
    truth = TRUTHS[name]
    generator = np.random.default_rng(3)
    lengths = np.repeat(LENGTHS, 5)
    exact = np.array([truth.at(int(length)) for length in lengths])
    fitted = fit_phase_cost(lengths, exact * (1 + 0.05 * generator.standard_normal(len(lengths))))
    predicted = np.array([fitted.cost.at(int(length)) for length in lengths])
    assert np.abs(predicted / exact - 1).max() < 0.05  # Short and long alike.
    assert 0.04 < fitted.residual < 0.06
    assert fitted.residual < fitted.worst_residual < 0.25  # Five sigma.


@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e3)), min_size=3, max_size=30, unique_by=lambda pair: pair[0]
    )
)
def test_no_measurements_make_a_fit_negative(measured: list[tuple[int, float]]) -> None:
    lengths, seconds = zip(*measured, strict=True)
    fitted = fit_phase_cost(lengths, seconds)
    assert all(value >= 0 for value in values(fitted.cost))
    assert fitted.residual <= fitted.worst_residual * (1 + 1e-12)


@pytest.mark.parametrize("as_list", [True, False])
def test_packed_measurements_are_sums_over_their_sequences(as_list: bool) -> None:
    truth = PhaseCost(1e-6, 1e-11, 1e-4)
    generator = np.random.default_rng(1)
    batches = [generator.integers(10, 10_000, size=count) for count in generator.integers(1, 40, 20)]
    seconds = [sum(truth.at(int(length)) for length in batch) for batch in batches]
    fitted = fit_phase_cost([batch.tolist() for batch in batches] if as_list else batches, seconds)
    assert values(fitted.cost) == pytest.approx(values(truth), rel=1e-6)
    assert fitted.num_samples == 20


@pytest.mark.parametrize("truth", [PhaseCost(1e-9, 1e-15, 1e-6), PhaseCost(1e-3, 1e-9, 1e-3), PhaseCost(1e-9)])
def test_a_cost_model_takes_seconds(truth: PhaseCost) -> None:
    fitted = fit_phase_cost(LENGTHS, [truth.at(int(length)) for length in LENGTHS])
    model = CostModel(llm=fitted.cost)
    costs = model.sequence_costs("llm", LENGTHS)
    exact = np.array([truth.at(int(length)) for length in LENGTHS]) * 2.0**model.exponent
    assert np.abs(costs / exact - 1).max() < 1e-4
    longest = int(model.sequence_costs("llm", [2**20])[0])
    assert 2**40 < longest <= 2**42  # 2**20 of them sum to at most 2**62.


@pytest.mark.parametrize(
    ("lengths", "seconds", "message"),
    [
        ([10, 20, 10], [1.0, 2.0, 1.0], "3 measurements do not tell .* at least 3 different lengths"),
        ([10, 20, 30], [1.0, 2.0], "got 3 of lengths and 2 of seconds"),
        ([10, 20, 30], [1.0, float("nan"), 2.0], r"seconds\[1\] is nan; it must be finite and above 0"),
        ([10, 20, 30], ["1", "2", "3"], "seconds must be numbers"),
        ([10, 0, 30], [1.0, 2.0, 3.0], r"lengths\[1\] is 0; a measured sequence has at least 1 position"),
        ([10, 2.5, 30], [1.0, 2.0, 3.0], r"lengths\[1\] is 2.5"),
        (["a", "b", "c"], [1.0, 2.0, 3.0], "lengths must be integers"),
        (7, [1.0], "lengths must have one dimension"),
        ([[1, 2], [], [3]], [1.0, 2.0, 3.0], r"lengths\[1\] is empty"),
    ],
)
def test_bad_input(lengths: object, seconds: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_phase_cost(lengths, seconds)  # type: ignore[arg-type]


def steps(seed: int, count: int = 60) -> dict[str, list[list[int]]]:
    """What some steps have of two phases; some have nothing of the first."""
    random = np.random.default_rng(seed)
    return {
        "image": [random.integers(16, 4_000, random.integers(0, 9)).tolist() for _ in range(count)],
        "llm": [random.integers(10, 3_000, random.integers(1, 17)).tolist() for _ in range(count)],
    }


def seconds_of(lengths: dict[str, list[list[int]]], truth: dict[str, PhaseCost], constant: float) -> np.ndarray:
    times = [
        sum(truth[phase].at(length) for phase in truth for length in lengths[phase][step])
        for step in range(len(lengths["llm"]))
    ]
    return np.array(times) + constant


def test_the_costs_of_phases_are_fitted_from_times_of_whole_steps() -> None:
    truth = {"image": PhaseCost(2e-5, 4e-8, 1e-3), "llm": PhaseCost(6e-5, 5e-8, 1e-4)}
    lengths = steps(0)
    fitted = fit_phase_costs(lengths, seconds_of(lengths, truth, 0.02))
    assert fitted.seconds == pytest.approx(0.02, rel=1e-6)
    for phase, exact in truth.items():
        assert values(fitted.costs[phase]) == pytest.approx(values(exact), rel=1e-6)
    assert fitted.residual <= fitted.worst_residual < 1e-9
    assert fitted.num_samples == 60
    assert fitted.model.phases == ("image", "llm")


def test_noise_in_times_of_whole_steps_leaves_predictions() -> None:
    truth = {"image": PhaseCost(2e-5, 4e-8), "llm": PhaseCost(6e-5, 5e-8)}
    lengths, others = steps(1), steps(2)
    noise = 1 + 0.05 * np.random.default_rng(3).standard_normal(60)
    fitted = fit_phase_costs(lengths, seconds_of(lengths, truth, 0.02) * noise)
    predicted = seconds_of(others, dict(fitted.costs), fitted.seconds)
    assert np.abs(predicted / seconds_of(others, truth, 0.02) - 1).mean() < 0.03


def test_measurements_that_do_not_show_a_phase_are_refused() -> None:
    with pytest.raises(ValueError, match="phase 'audio' costs nothing by these measurements"):
        fit_phase_costs({"audio": [[], [], []], "llm": [[1], [10], [100]]}, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="the same measurements"):
        fit_phase_costs({"audio": [[1]], "llm": [[1], [10]]}, [1.0, 2.0])
    with pytest.raises(ValueError, match="a measured sequence has at least 1 position"):
        fit_phase_costs({"llm": [[0]]}, [1.0])
    with pytest.raises(ValueError, match="lengths must map"):
        fit_phase_costs({}, [1.0])
