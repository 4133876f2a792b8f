"""Torch map-style data sets behind the same loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from map_dataset import Numbers

import orchdata as od


def test_map_style_balances_equal_counts() -> None:
    dataset = Numbers(48)
    loaders = [
        od.DataLoader(dataset, batch_size=4, shuffle=True, cost=lambda sample: sample["length"], dp=(rank, 4))
        for rank in range(4)
    ]
    seen = []
    for step in zip(*loaders, strict=True):
        assert [len(batch["number"]) for batch in step] == [4] * 4
        sums = [int(batch["length"].sum()) for batch in step]
        assert max(sums) - min(sums) <= 2
        seen += [number for batch in step for number in batch["number"].tolist()]
    assert sorted(seen) == list(range(48))


def test_map_style_rank_without_a_sample_repeats_the_first() -> None:
    loaders = [od.DataLoader(Numbers(5), global_batch_size=3, dp=(rank, 4), num_threads=0) for rank in range(4)]
    for step in zip(*loaders, strict=True):
        assert all(len(batch["number"]) >= 1 for batch in step)


@pytest.mark.parametrize("path", ["train-{000..127}.tar", Path("train.tar")])
def test_a_path_is_not_a_data_set(path: str | Path) -> None:
    with pytest.raises(TypeError, match="od.ShardDataset"):
        od.DataLoader(path, batch_size=4)  # a str has a length and items: its characters


def test_map_style_samplers() -> None:
    dataset = Numbers(10)
    one = od.DataLoader(dataset, batch_size=3, sampler=torch.utils.data.SequentialSampler(dataset))
    assert [batch["number"].tolist() for batch in one] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    batches = [[1, 2], [7], [3, 4, 5]]
    assert [batch["number"].tolist() for batch in od.DataLoader(dataset, batch_sampler=batches)] == batches
    with pytest.raises(ValueError, match="sharded twice"):
        od.DataLoader(dataset, sampler=[1, 2], dp=(0, 2))


def test_map_style_failures() -> None:
    with pytest.raises(OSError, match="disk on fire"):
        list(od.DataLoader(Numbers(6, bad=(2,)), batch_size=3))
    one = od.DataLoader(Numbers(6, bad=(2,)), batch_size=3, on_error="skip")
    assert [batch["number"].tolist() for batch in one] == [[0, 1], [3, 4, 5]]
    assert one.stats()["failures"]["by_reason"] == {"OSError: disk on fire": 1}


def test_map_style_global_batch_that_fails_whole_repeats_the_next_that_works() -> None:
    one = od.DataLoader(Numbers(6, bad=(2, 3, 5)), batch_size=1, on_error="skip")
    assert [batch["number"].tolist() for batch in one] == [[0], [1], [4], [4], [4], [0]]
    assert one.stats()["failures"]["count"] == 3
    with pytest.raises(od.DataError, match="disk on fire"):
        list(od.DataLoader(Numbers(2, bad=(0, 1)), on_error="skip"))


def test_map_style_resumes() -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 1, "cost": np.arange(1, 41)}
    one = od.DataLoader(Numbers(40), **options)
    whole = [batch["number"].tolist() for batch in one]
    again = od.DataLoader(Numbers(40), **options)
    steps = iter(again)
    next(steps), next(steps), next(steps)
    resumed = od.DataLoader(Numbers(40), **options)
    resumed.load_state_dict(again.state_dict())
    assert [batch["number"].tolist() for batch in resumed] == whole[3:]


@pytest.mark.parametrize(
    ("cost", "reason"),
    [([1, 2], "10 of them"), ([0.5] * 10, "costs are integers"), ([1] * 9 + [-3], "sample 9 has -3")],
)
def test_map_style_bad_costs(cost: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        od.DataLoader(Numbers(10), cost=cost)


def test_an_iterable_is_refused() -> None:
    with pytest.raises(TypeError, match="map-style"):
        od.DataLoader(iter([1, 2, 3]))
