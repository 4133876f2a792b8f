"""`od.check_engine`: it passes engines of the library, and finds what is wrong with others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.building.step import BuildSpec, BuiltStep
from orchdata.engines.engine import Engine, Workers
from orchdata.order.steps import StepTask


def right(task: StepTask, built: BuiltStep) -> BuiltStep:
    return built


def other_step(task: StepTask, built: BuiltStep) -> BuiltStep:
    for batch in built.batches:
        if task.step == 2:
            batch.llm.input_ids[0] += 1
    return built


def read_only(task: StepTask, built: BuiltStep) -> BuiltStep:
    for batch in built.batches:
        batch.llm.input_ids.set_(torch.zeros(1, dtype=torch.int64).expand(batch.llm.input_ids.shape))
    return built


_memory: dict[Any, torch.Tensor] = {}


def shared(task: StepTask, built: BuiltStep) -> BuiltStep:
    """Each epoch gets the memory of the one before."""
    for batch in built.batches:
        batch.llm.input_ids.set_(_memory.setdefault((task.step, batch.llm.input_ids.shape), batch.llm.input_ids))
    return built


@dataclass(frozen=True)
class OwnEngine:
    """Builds steps in the thread that submits them."""

    change: Callable[[StepTask, BuiltStep], BuiltStep] = right

    def open(self, spec: BuildSpec, workers: Workers) -> Engine:
        return Opened(spec, self.change)


class Opened(Engine):
    depth = 2

    def __init__(self, spec: BuildSpec, change: Callable[[StepTask, BuiltStep], BuiltStep]) -> None:
        self._builder = spec.open()
        self._change = change

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        try:
            future.set_result(self._change(task, self._builder.build(task)))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    data = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=12), RECIPE)
    data.index()
    return data


@pytest.fixture(autouse=True)
def _same(same_cache: None) -> None:
    _memory.clear()


def test_an_engine_of_the_users_passes(dataset: od.ShardDataset) -> None:
    assert od.check_engine(OwnEngine(), dataset, batch_size=4, shuffle=True).batches == 12
    numbers = od.check_engine(
        OwnEngine(), Numbers(20, bad=(7,)), batch_size=4, on_error=od.ErrorPolicy("skip", max_failures=None)
    )
    assert numbers.failures == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_step, "epoch 0: batch 2 differs: llm.input_ids is"),
        (read_only, "differs: llm.input_ids|cannot be written to"),
        (shared, "batch 0 differs: llm.input_ids"),
    ],
)
def test_what_is_wrong_is_said(dataset: od.ShardDataset, change: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        od.check_engine(OwnEngine(change), dataset, batch_size=4, shuffle=True)
