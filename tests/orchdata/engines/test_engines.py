"""One contract for all engines."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from orchdata.building.collate import SampleAssembler
from orchdata.building.step import StepSpec, build_step
from orchdata.engines.thread_pool import ThreadPool
from orchdata.engines.threads import Engine, InlineEngine, ThreadEngine
from orchdata.loaders.errors import DataError
from orchdata.order.order import Order, Shuffle
from orchdata.planning.balance import Balance
from orchdata.planning.costs import ArrayCosts
from orchdata.planning.plan import PlanSpec

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
        built, expected = future.result(120), build_step(spec(), 0, step)
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
        running.submit(0, 0).result(120)
    with pytest.raises(IndexError):
        running.submit(0, 99).result(120)
    running.close()


def test_close_leaves_no_thread() -> None:
    before = threading.active_count()
    running = ThreadEngine(spec(), num_threads=3, depth=2)
    for step in range(4):
        running.submit(0, step)
    running.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_would_end_a_thread_is_an_error_of_the_step(ending: BaseException) -> None:
    def leave(row: int) -> int:
        raise ending

    running = ThreadEngine(spec(leave), num_threads=2, depth=2)
    with pytest.raises(RuntimeError, match=re.escape(repr(ending))):
        running.submit(0, 0).result(120)
    with pytest.raises(RuntimeError, match=re.escape(repr(ending))):
        running.submit(0, 1).result(120)  # the threads are still there
    running.close()


def test_threads_of_an_engine_that_nobody_holds_end() -> None:
    before = set(threading.enumerate())
    running = ThreadEngine(spec(), num_threads=3, depth=2)
    [future.result(120) for future in [running.submit(0, step) for step in range(5)]]
    started = set(threading.enumerate()) - before
    assert started
    del running
    gc.collect()
    for thread in started:
        thread.join(120)
        assert not thread.is_alive()


def test_a_closed_pool_starts_no_thread() -> None:
    pool = ThreadPool(2, prepare=lambda: None)
    before = threading.active_count()
    pool.close()
    pool.submit(lambda: None)
    assert threading.active_count() == before


def test_a_forked_child_ends_without_the_threads_of_its_parent() -> None:
    program = (
        "import os, sys, orchdata as od\n"
        "batches = iter(od.DataLoader(list(range(1000)), batch_size=2, num_threads=3))\n"
        "next(batches)\n"
        "child = os.fork()\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "sys.exit(7)\n"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (7, "")


def test_a_collate_fn_is_in_one_step_at_a_time() -> None:
    inside = threading.Lock()
    several: list[bool] = []

    class Collate:
        def __call__(self, samples: list[int]) -> list[int]:
            several.append(not inside.acquire(blocking=False))
            time.sleep(0.002)  # long enough for another step's to come in, were it let
            if not several[-1]:
                inside.release()
            return samples

    assembler = SampleAssembler(load=load, collate_fn=Collate().__call__, repeat_first=False)
    running = ThreadEngine(replace(spec(), assembler=assembler), num_threads=4, depth=4)
    [future.result(120) for _ in range(5) for future in [running.submit(0, step) for step in range(5)]]
    running.close()
    assert len(several) == 25 and not any(several)


@pytest.mark.parametrize("engine", ENGINES)
def test_torch_keeps_its_threads_where_it_trains_and_has_one_where_it_decodes(engine: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen: dict[int, int] = {}

        def noting(row: int) -> int:
            seen[threading.get_ident()] = torch.get_num_threads()
            return row

        running = ENGINES[engine](spec(noting))
        for step in range(3):
            running.submit(0, step).result(60)
        running.close()
        here = threading.get_ident()
        assert torch.get_num_threads() == 3
        assert (here in seen) == (engine == "inline") and set(seen.values()) == {3 if engine == "inline" else 1}
    finally:
        torch.set_num_threads(threads)
