"""Advice: the right limit in cases worked by hand, remedies that are balanced for real, plain words, clear errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.distributions import DISTRIBUTIONS
from orchdata.balancers import balance
from orchdata.balancers.advice import Option, advise

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")


def test_one_giant_among_equals() -> None:
    found = advise([10, 1000, *[10] * 99], 8)  # 2,000 over 8 ranks.
    assert (found.limit, found.makespan, found.mean, found.lower_bound) == ("giant sample", 1000, 250.0, 1000)
    assert found.giants == (1,)
    assert "sample 1 costs 4.000 x the mean load" in found.reason
    assert found.options == (
        Option("context parallel", 2, 500, 2.0),
        Option("context parallel", 4, 250, 1.0),  # Four ranks hold 250 each, and four 25 samples of 10.
        Option("more samples", 2, 500, 2.0),  # 1,000 in each of two giants, for two steps.
        Option("more samples", 4, 250, 1.0),
    )


def test_one_sample_more_than_ranks() -> None:
    found = advise([8] * 9, 8)  # A rank holds two: 16 against 9.
    assert (found.limit, found.makespan, found.mean, found.giants) == ("few samples", 16, 9.0, ())
    assert "1.12 samples per rank" in found.reason
    assert found.options == (
        Option("more samples", 2, 12, pytest.approx(12 / 9)),  # 18 on 8 ranks: three, so 24 in two steps.
        Option("more samples", 4, 10, pytest.approx(10 / 9)),  # 36 on 8: five, 40 in four.
        Option("more samples", 8, 9, 1.0),  # 72 on 8: nine each.
    )


def test_even_costs_need_nothing() -> None:
    found = advise([5] * 64, 8)
    assert (found.limit, found.makespan, found.mean, found.options) == ("nothing", 40, 40.0, ())
    assert "1.000 x the mean" in found.reason


@pytest.mark.parametrize("costs", [[], [0, 0, 0]])
def test_without_load_nothing_holds_the_step_back(costs: list[int]) -> None:
    found = advise(costs, 4)
    assert (found.limit, found.makespan, found.mean, found.lower_bound) == ("nothing", 0, 0.0, 0)
    assert found.reason == "no sample costs anything"
    assert found.options == found.giants == ()


def test_fewer_samples_than_ranks() -> None:
    found = advise([5, 0, 5, 5, 5], 8)  # Four samples that cost anything, 2.5 a rank.
    assert (found.limit, found.makespan, found.mean) == ("few samples", 5, 2.5)
    assert "0.50 samples per rank" in found.reason
    # Two ranks each, or two a rank pair: 2.5, which is 3 as a whole number.
    assert found.options == (Option("context parallel", 2, 3, 1.0), Option("more samples", 2, 3, 1.0))


def test_a_giant_among_fewer_samples_than_ranks_is_still_the_limit() -> None:
    assert advise([1000, 1, 1, 1], 8).limit == "giant sample"  # Four like it would be the lesser problem.
    assert advise([3, 1], 8).limit == "few samples"  # Two even ones would not fill eight ranks either.


def test_one_rank_needs_no_advice() -> None:
    assert advise([100, 1, 3], 1).limit == "nothing"


def test_samples_are_shared_by_as_many_ranks_as_they_need() -> None:
    # Mean 100: 350 is above three times it and takes four ranks of 87.5, 180 takes two of 90, and the rest is small.
    found = advise([350, 180, *[1] * 270], 8)
    assert found.mean == 100
    assert found.giants == (0, 1)
    # Four ranks have 87.5 and whole samples: one of the eight must hold 100.5.
    assert found.options[:2] == (Option("context parallel", 2, 175, 1.75), Option("context parallel", 4, 101, 1.005))


def test_the_longest_samples_of_a_heavy_tail_are_named() -> None:
    costs = DISTRIBUTIONS["long tail"](np.random.default_rng(0), 512 * 16)
    found = advise(costs, 512)
    assert found.limit == "giant sample"
    assert set(found.giants) == set(np.flatnonzero(costs > costs.sum() / 512).tolist())
    assert costs[found.giants[0]] == costs.max()
    assert {option.remedy for option in found.options} == {"context parallel", "more samples"}
    assert found.options[-1].imbalance <= 1.02


@given(st.lists(st.integers(0, 500), max_size=40), st.integers(1, 12))
def test_numbers_agree_with_balance(costs: list[int], num_ranks: int) -> None:
    found = advise(costs, num_ranks)
    now = balance(costs, num_ranks)
    assert (found.makespan, found.lower_bound) == (now.makespan, now.lower_bound)
    assert (found.limit == "nothing") == (now.imbalance <= 1.02)
    assert (found.limit == "nothing") == (found.options == ())
    assert [costs[sample] for sample in found.giants] == sorted((c for c in costs if c > found.mean), reverse=True)
    for option in found.options:
        assert option.imbalance >= 1 - 1e-12
        assert option.makespan >= found.mean - 1e-9
        assert option.makespan - 1 < option.imbalance * found.mean * (1 + 1e-12)  # Rounded up.
        if option.remedy == "more samples":
            whole = balance(costs * option.factor, num_ranks).makespan
            assert option.makespan == -(-whole // option.factor)
        else:
            # Pieces of a sample are on different ranks: it is never faster than its cost over that many.
            assert option.makespan >= max(costs) / min(option.factor, num_ranks)
    shared = [option.makespan for option in found.options if option.remedy == "context parallel"]
    assert shared == sorted(shared, reverse=True)


def test_pieces_of_a_sample_never_meet_on_a_rank() -> None:
    # Mean 7/3. Halves 2, 2, 1.5 and 1.5 would fit three ranks as 2, 2 and 3, but then one rank holds all of the second
    # sample; apart, one rank holds 2 + 1.5.
    found = advise([4, 3], 3)
    assert found.options[0] == Option("context parallel", 2, 4, pytest.approx(3.5 / (7 / 3)))


def test_costs_at_the_limit_do_not_overflow() -> None:
    found = advise([2**61, *[2**50] * 9], 4)
    assert found.limit == "giant sample"
    assert {option.remedy for option in found.options} == {"context parallel"}  # Twice the samples would pass 2**62.
    assert advise([2**62], 2).options == (Option("context parallel", 2, 2**61, 1.0),)


def test_it_reads_plainly() -> None:
    found = advise([10, 1000, *[10] * 99], 8)
    numbers, reason, *options = str(found).splitlines()
    assert numbers == "makespan 1,000, mean 250.0, lower bound 1,000"
    assert reason == f"giant sample holds the step back: {found.reason}"
    assert found.reason.endswith("; no assignment of whole samples is below 4.000 x the mean load")
    share, *_, take = options
    sharing = "- share each sample above the mean load among up to 2 ranks (context parallelism)"
    assert share == f"{sharing}: makespan 500, 2.000 x the mean"
    taking = "- take 4 times the samples per rank and step"
    assert take == f"{taking}: makespan 250, 1.000 x the mean, per step of the present size"
    assert len(options) == 4
    assert "few samples hold the step back" in str(advise([8] * 9, 8))
    assert "nothing holds the step back" in str(advise([8] * 8, 8))
    assert "(2 samples cost more than the mean)" in advise([350, 180, *[1] * 270], 8).reason


@pytest.mark.parametrize(
    ("costs", "num_ranks", "message"),
    [
        ([1, -2], 2, r"costs\[1\] is -2"),
        ([1.5], 2, r"costs\[0\] is 1.5"),
        ([float("nan")], 2, r"costs\[0\] is nan"),
        ([[1]], 2, "one dimension"),
        ([2**62, 1], 2, r"sum to more than 2\*\*62"),
        ([1], 0, "num_ranks must be at least 1, got 0"),
        ([1], 2.0, "num_ranks must be an integer"),
    ],
)
def test_bad_input(costs: object, num_ranks: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advise(costs, num_ranks)  # type: ignore[arg-type]


def test_only_what_helps_is_offered() -> None:
    # Halves of both on both ranks would be even, but what is left over goes longest first.
    for costs, num_ranks in (([15_000_001, 10_000_001], 2), ([9, 7, 7, 6, 5, 5, 5, 5, 4, 4, 3, 3, 1], 8)):
        found = advise(costs, num_ranks)
        assert all(option.makespan <= found.makespan for option in found.options)
        assert all(option.imbalance < found.makespan / found.mean for option in found.options)
