"""A collate_fn that asks for its step gets it: which one it is, and how to scale a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.building.collate import takes_step


def named(samples: list[Any], step: od.StepInfo) -> Any:
    return step


def keyword_only(samples: list[Any], *, step: od.StepInfo | None = None) -> Any:
    return step


def after_another(prefix: str, samples: list[Any], step: od.StepInfo) -> Any:
    return step


class Callable_:
    def __call__(self, samples: list[Any], step: od.StepInfo) -> Any:
        return step

    def method(self, samples: list[Any], /, *, step: od.StepInfo) -> Any:
        return step


@pytest.mark.parametrize(
    "collate_fn", [named, keyword_only, partial(after_another, "prefix"), Callable_(), Callable_().method]
)
def test_a_parameter_named_step_gets_it(collate_fn: Callable[..., Any]) -> None:
    for info in od.DataLoader(Numbers(4), batch_size=2, collate_fn=collate_fn):
        assert isinstance(info, od.StepInfo)


def bound(samples: list[Any], step: Any = "default") -> Any:
    return step


@pytest.mark.parametrize(
    ("collate_fn", "made"),
    [
        (partial(bound, step="bound"), "bound"),  # what the user gave stays
        (lambda step: len(step), 2),  # these are the samples
        (lambda samples, **options: options, {}),
        (list, [{"number": 0, "length": 1}, {"number": 1, "length": 2}]),
    ],
)
def test_whoever_does_not_ask_gets_none(collate_fn: Callable[..., Any], made: Any) -> None:
    assert next(iter(od.DataLoader(Numbers(4), batch_size=2, collate_fn=collate_fn))) == made
    assert not takes_step(collate_fn)


def test_shards_scale_a_sum_over_loss_tokens(tmp_path: Path) -> None:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=15), recipe=RECIPE)
    dataset.index()

    def loss_tokens(samples: list[od.Sample], step: od.StepInfo) -> tuple[int, od.StepInfo]:
        return sum(int(part.loss.sum()) for sample in samples for part in sample.parts if hasattr(part, "loss")), step

    balance = od.Balance(max_tokens=150, oversize="own")
    options: dict[str, Any] = {"global_batch_size": 10, "balance": balance, "collate_fn": loss_tokens, "num_threads": 0}
    ranks = [list(od.DataLoader(dataset, dp=(rank, 3), **options).steps()) for rank in range(3)]
    for number, step in enumerate(zip(*ranks, strict=True)):
        counts = [count for rank in step for count, _ in rank]
        infos = [[info for _, info in rank] for rank in step]
        assert infos[0] == infos[1] == infos[2] and len(infos[0]) > 1
        for place, info in enumerate(infos[0]):
            expected = {
                "epoch": 0,
                "step": number,
                "microbatch": place,
                "num_microbatches": len(infos[0]),
                "dp_size": 3,
            }
            assert {name: getattr(info, name) for name in expected} == expected
            assert info.num_step_samples == (10, 5)[number]
            assert info.loss_tokens == sum(counts) and info.loss_scale == 3 / sum(counts)
    packed = [list(od.DataLoader(dataset, dp=(0, 3), **options | {"collate_fn": None}))]
    assert [batch.num_step_samples for batch in packed[0]] == [
        info.num_step_samples for step in ranks[0] for _, info in step
    ]
    assert [batch.loss_scale for batch in packed[0]] == [info.loss_scale for rank in ranks[0] for _, info in rank]


def test_map_style_data_scale_a_sum_over_samples() -> None:
    def scaled(samples: list[dict[str, Any]], step: od.StepInfo) -> float:
        assert step.loss_tokens == 0 and step.num_microbatches == 1
        assert step.loss_scale == 2 / step.num_step_samples
        return step.loss_scale * sum(sample["number"] for sample in samples)

    options: dict[str, Any] = {"global_batch_size": 7, "collate_fn": scaled, "cost": np.arange(1, 18)}
    ranks = [list(od.DataLoader(Numbers(17), dp=(rank, 2), **options)) for rank in range(2)]
    means = [sum(step) / 2 for step in zip(*ranks, strict=True)]  # as gradients are averaged over ranks
    assert means == pytest.approx([np.mean(range(7)), np.mean(range(7, 14)), np.mean(range(14, 17))])
