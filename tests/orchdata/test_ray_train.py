"""Loaders inside of Ray Train: what its `prepare_data_loader` would do to them is an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import torch
from ray.train.torch import prepare_data_loader
from ray.train.v2.torch import train_loop_utils
from shard_factory import RECIPE, omni_shards

import orchdata as od


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def ray_train(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray Train knows in a worker of its."""
    context = SimpleNamespace(get_world_size=lambda: request.param, get_world_rank=lambda: 0)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(train_loop_utils, "record_extra_usage_tag", lambda *_: None)
    assert prepare_data_loader is train_loop_utils.prepare_data_loader


@pytest.mark.usefixtures("ray_train")
@pytest.mark.parametrize("kind", ["shards", "map-style"])
def test_a_prepared_loader_is_an_error_that_says_what_to_do(kind: str, tmp_path: Path) -> None:
    data: Any = list(range(8))
    if kind == "shards":
        data = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=4), RECIPE)
    loader = od.DataLoader(data, batch_size=2, dp=(0, 1))
    message = r"iterate over the loader itself.*batch\.to\(ray\.train\.torch\.get_device"
    with pytest.raises(TypeError, match=message):
        iter(prepare_data_loader(loader))
    assert len(list(loader)) == (2 if kind == "shards" else 4)


@pytest.mark.usefixtures("ray_train")
def test_torchs_own_loaders_are_prepared_as_ever() -> None:
    sampler = torch.utils.data.DistributedSampler(range(8), 1, 0)
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, sampler=sampler)
    assert len(list(prepare_data_loader(loader))) == 4
