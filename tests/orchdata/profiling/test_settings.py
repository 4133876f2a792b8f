"""Standard errors and paired differences of settings, and lengths counted in chunks, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_factory import RECIPE, omni_samples, write_shard

import orchdata as od
from orchdata.planning.balance import Layout
from orchdata.profiling.content import PERCENTILES, LengthCounts
from orchdata.profiling.planned import PlannedStep, PlannedSteps, is_better, make_settings


def steps(costs: list[int], totals: list[int]) -> PlannedSteps:
    """Steps of 4 ranks in one phase."""
    return PlannedSteps(
        num_ranks=4,
        balanced=("llm",),
        adds_up=True,
        steps=tuple(
            PlannedStep(
                cost=cost,
                phase_costs={"llm": cost},
                totals={"llm": total},
                microbatches=1,
                samples=8,
                tokens=total,
            )
            for cost, total in zip(costs, totals, strict=True)
        ),
    )


def drawn(count: int, times: int) -> list[PlannedSteps]:
    """Samples of `count` steps, each of other work."""
    generator = np.random.default_rng(0)
    work = generator.integers(100, 300, (times, count))
    costs = (work * generator.uniform(1.0, 2.0, work.shape)).astype(int)
    return [steps(*of) for of in zip(costs.tolist(), (4 * work).tolist(), strict=True)]


def test_waiting_of_steps_worked_out_by_hand() -> None:
    # Ranks work 40 / 4 of 20, and 80 / 4 of 30: they wait for 20 of 50.
    planned = steps([20, 30], [40, 80])
    assert planned.waiting == pytest.approx(20 / 50)
    assert planned.waiting_in("llm") == pytest.approx(20 / 50)
    # Each step's share of the ratio: (cost x (1 - waiting) - work) / mean cost.
    deviations = np.array([20 * 0.6 - 10, 30 * 0.6 - 20]) / 25
    assert planned.waiting_error is not None
    assert planned.waiting_error > 10 * deviations.std(ddof=1) / np.sqrt(2)  # two steps say nearly nothing
    assert steps([20], [40]).waiting_error is None


def test_the_error_is_that_of_repeated_draws() -> None:
    """The standard error of a sample of many steps is the spread of the figure over many such samples."""
    many = drawn(64, 400)
    spread = np.std([each.waiting for each in many])
    assert np.mean([each.waiting_error for each in many]) == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize(("count", "quantile"), [(3, 19.21), (8, 4.53), (64, 3.12)])
def test_the_factor_for_few_steps_is_that_of_student(count: int, quantile: float) -> None:
    """Quantiles of Student's t for the probability that a normal value lies within three deviations, from tables."""
    planned = steps(list(range(10, 10 + count)), [40] * count)
    costs = np.arange(10, 10 + count)
    deviations = (costs * (1 - planned.waiting) - 10) / costs.mean()
    plain = deviations.std(ddof=1) / np.sqrt(count)
    assert planned.waiting_error == pytest.approx(quantile / 3 * plain, rel=0.25 if count < 5 else 0.03)


def test_settings_of_the_same_steps_differ_where_each_step_does() -> None:
    """A small difference in each step is clear, though the steps themselves vary much more."""
    work = np.random.default_rng(1).integers(100, 1000, 16)
    one = steps((work * 2).tolist(), (4 * work).tolist())
    little_less = steps((work * 2 - 5).tolist(), (4 * work).tolist())
    assert is_better(little_less, one, paired=True)
    assert not is_better(one, little_less, paired=True)
    noise = steps((work * 2 + np.tile([40, -40], 8)).tolist(), (4 * work).tolist())
    assert not is_better(noise, one, paired=True)
    assert not is_better(one, noise, paired=True)
    assert not is_better(steps([10], [40]), steps([20], [40]), paired=True)  # one step shows no error


def test_a_setting_names_those_that_it_beats() -> None:
    work = [100, 200, 300, 400]
    totals = [4 * each for each in work]
    settings = make_settings(
        {"none": steps([2 * each for each in work], totals), "joint": steps([each + 1 for each in work], totals)}
    )
    assert settings["joint"].better_than == ("none",)
    assert settings["none"].better_than == ()


@given(st.lists(st.lists(st.integers(0, 5000), max_size=40), min_size=1, max_size=5))
def test_lengths_in_chunks_are_those_of_all(chunks: list[list[int]]) -> None:
    counts = LengthCounts()
    for chunk in chunks:
        counts.add(np.array(chunk, np.int64))
    found = counts.lengths()
    values = np.array([value for chunk in chunks for value in chunk if value], np.int64)
    assert (found.samples, found.total, sum(found.bins)) == (len(values), int(values.sum()), len(values))
    for name, percent in PERCENTILES.items():
        if len(values):
            assert found.percentiles[name] == int(np.percentile(values, percent, method="lower"))
    for power, count in enumerate(found.bins):
        assert count == int(np.count_nonzero((values >= 2**power) & (values < 2 ** (power + 1))))


# Padding of each layout against the batches of loaders on all ranks, with the dummies that these have.


WITH_AUDIO = od.CostModel(image=od.PhaseCost(3.0), audio=od.PhaseCost(1.0), llm=od.PhaseCost(1.0, 0.01))
STEPS = 8


def omni(folder: Path, ranks: int) -> od.ShardDataset:
    """Images and audio, which few microbatches of two samples have both."""
    return od.ShardDataset(write_shard(folder / "a.tar", omni_samples(2 * ranks * STEPS)), recipe=RECIPE)


def measured(dataset: od.ShardDataset, ranks: int, cost: od.CostModel | None, layout: Layout) -> tuple[float, bool]:
    """The padding of an epoch's batches on all ranks, and whether one of them has a dummy."""
    dataset.index()
    used = held = 0
    has_dummies = False
    for rank in range(ranks):
        loader = od.DataLoader(
            dataset,
            batch_size=2,
            shuffle=True,
            drop_last=True,
            cost=cost,
            collate_fn=layout,
            dp=(rank, ranks),
            num_threads=0,
        )
        assert len(loader) == STEPS
        for batch in loader:
            used += int(batch.llm.lengths[: len(batch.sample_ids)].sum())
            held += batch.llm.input_ids.numel()
            has_dummies = has_dummies or bool(batch.llm.dummies)
    return 1 - used / held, has_dummies


@pytest.mark.parametrize("layout", [od.Padded(), od.Packed(), od.Padded(empty="zero")], ids=repr)
def test_padding_counts_the_batches_that_lack_a_modality(tmp_path: Path, layout: Layout) -> None:
    dataset = omni(tmp_path, 2)
    expected, has_dummies = measured(dataset, 2, WITH_AUDIO, layout)
    assert has_dummies == (layout.empty == "dummy")
    assert said(dataset, 2, WITH_AUDIO, layout) == pytest.approx(expected)


def said(dataset: od.ShardDataset, ranks: int, cost: od.CostModel | None, layout: Layout) -> float:
    profile = dataset.profile(cost=cost, ranks=(ranks,), batch_size=2, layout=layout)
    return next(each.padding for each in profile.layouts if each.layout == profile.layout)
