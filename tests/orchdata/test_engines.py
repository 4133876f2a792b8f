"""One contract for all engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from orchdata.balance import Balance
from orchdata.collating import SampleAssembler
from orchdata.costs import ArrayCosts
from orchdata.engines import Engine, InlineEngine, ThreadEngine
from orchdata.loaders.errors import DataError
from orchdata.loaders.order import Order, Shuffle
from orchdata.plan import PlanSpec
from orchdata.step import StepSpec, build_step

ENGINES: dict[str, Callable[[StepSpec], Engine]] = {
    "inline": InlineEngine,
    "one thread": lambda spec: ThreadEngine(spec, num_threads=1, depth=3),
    "four threads": lambda spec: ThreadEngine(spec, num_threads=4, depth=3),
}


def load(row: int) -> int:
    if row == 13:
        raise DataError("shard", "13", "field", "unlucky")
    if row % 5 == 0:
        time.sleep(0.001)
    return row * row


def spec(load: Callable[[int], Any] = load) -> StepSpec:
    plan = PlanSpec(
        source=ArrayCosts(np.arange(40, dtype=np.int64) % 7 + 1),
        order=Order(40, shuffle=Shuffle(), seed=1),
        balance=Balance(),
        num_ranks=2,
        global_batch_size=9,
        drop_last=False,
    )
    return StepSpec(plan=plan, assembler=SampleAssembler(load=load, collate_fn=list, repeat_first=False), rank=1)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_builds_the_same_steps(engine: str) -> None:
    running = ENGINES[engine](spec())
    futures = [running.submit(0, step) for step in range(5)]
    for step, future in enumerate(futures):
        built, expected = future.result(10), build_step(spec(), 0, step)
        assert built.batches == expected.batches
        assert built.failures == expected.failures
        assert built.plan.hash == expected.plan.hash
    running.close()
    running.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_passes_exceptions_on(engine: str) -> None:
    def explode(row: int) -> int:
        raise ZeroDivisionError(f"row {row}")

    running = ENGINES[engine](spec(explode))
    with pytest.raises(ZeroDivisionError):
        running.submit(0, 0).result(10)
    with pytest.raises(IndexError):
        running.submit(0, 99).result(10)
    running.close()


def test_close_leaves_no_thread() -> None:
    before = threading.active_count()
    running = ThreadEngine(spec(), num_threads=3, depth=2)
    for step in range(4):
        running.submit(0, step)
    running.close()
    assert threading.active_count() == before


def test_threads_are_numbered() -> None:
    numbers: list[int] = []
    running = ThreadEngine(spec(), num_threads=3, depth=2, initializer=numbers.append)
    [future.result(10) for future in [running.submit(0, step) for step in range(5)]]
    running.close()
    assert sorted(numbers) == list(range(len(numbers)))


def test_a_failing_initializer_is_raised_by_steps() -> None:
    def explode(number: int) -> None:
        raise ZeroDivisionError(f"thread {number}")

    running = ThreadEngine(spec(), num_threads=2, depth=2, initializer=explode)
    for step in range(4):
        with pytest.raises(ZeroDivisionError, match="thread"):
            running.submit(0, step).result(10)
    running.close()


def test_torch_is_not_touched_by_engines() -> None:
    threads = torch.get_num_threads()
    ENGINES["four threads"](spec()).close()
    assert torch.get_num_threads() == threads
