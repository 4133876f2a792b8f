"""Padding of each layout against the batches of loaders on all ranks, with the dummies that these have."""

from __future__ import annotations

from pathlib import Path

import pytest
from shard_factory import RECIPE, jpeg, omni_samples, write_shard

import orchdata as od
from orchdata.planning.layout import Layout

WITH_AUDIO = od.CostModel(image=od.PhaseCost(3.0), audio=od.PhaseCost(1.0), llm=od.PhaseCost(1.0, 0.01))
WITHOUT = od.CostModel(image=od.PhaseCost(3.0), llm=od.PhaseCost(1.0, 0.01))
STEPS = 8


def pictures(folder: Path, ranks: int) -> od.ShardDataset:
    """Images alone, of a recipe that reads audio too."""
    samples = [
        {"__key__": str(n), "jpg": jpeg(40 + 9 * n % 150, 60), "txt": b"x" * (5 + 31 * n % 90)}
        for n in range(2 * ranks * STEPS)
    ]
    return od.ShardDataset(write_shard(folder / "a.tar", samples), recipe=RECIPE)


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


@pytest.mark.parametrize("layout", [od.Padded(multiple_of=4), od.Packed(multiple_of=16)], ids=repr)
@pytest.mark.parametrize("cost", [WITH_AUDIO, WITHOUT], ids=["audio", "images"])
def test_padding_is_that_of_batches(tmp_path: Path, cost: od.CostModel | None, layout: Layout) -> None:
    """Where the cost model names audio, which no sample has, each batch has a dummy of it in a row of its own."""
    dataset = pictures(tmp_path, 2)
    expected, has_dummies = measured(dataset, 2, cost, layout)
    assert has_dummies == (cost is WITH_AUDIO)
    assert said(dataset, 2, cost, layout) == pytest.approx(expected)


@pytest.mark.parametrize("layout", [od.Padded(), od.Packed(), od.Padded(empty="zero")], ids=repr)
def test_padding_counts_the_batches_that_lack_a_modality(tmp_path: Path, layout: Layout) -> None:
    dataset = omni(tmp_path, 2)
    expected, has_dummies = measured(dataset, 2, WITH_AUDIO, layout)
    assert has_dummies == (layout.empty == "dummy")
    assert said(dataset, 2, WITH_AUDIO, layout) == pytest.approx(expected)


def said(dataset: od.ShardDataset, ranks: int, cost: od.CostModel | None, layout: Layout) -> float:
    profile = dataset.profile(cost=cost, ranks=(ranks,), batch_size=2, layout=layout)
    return next(each.padding for each in profile.layouts if each.layout == profile.layout)
