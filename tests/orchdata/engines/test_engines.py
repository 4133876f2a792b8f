"""One contract for all engines."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_specs import Specs, make_specs
from map_dataset import Numbers
from shard_factory import SKIP_ANY
from spec_job import delivered

import orchdata as od
from orchdata.building.collate import SampleAssembler
from orchdata.building.step import Builder, BuildSpec, BuiltStep
from orchdata.engines.engine import Engine, InlineEngine, ThreadEngine, Workers
from orchdata.engines.processes.engine import ProcessEngine
from orchdata.loaders.errors import DataError
from orchdata.loaders.watch import Watch
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.parts import ArrayCosts
from orchdata.planning.plan import PlanSpec

ENGINES: dict[str, Callable[[Builder], Engine]] = {
    "inline": InlineEngine,
    "one thread": lambda builder: ThreadEngine(builder, num_threads=1, depth=3),
    "four threads": lambda builder: ThreadEngine(builder, num_threads=4, depth=3),
}
SPEC_JOB = Path(__file__).parents[2] / "support" / "spec_job.py"


def load(row: int) -> int:
    if row == 13:
        raise DataError("shard", "13", "field", "unlucky")
    if row % 5 == 0:
        time.sleep(0.001)
    return row * row


def builder(load: Callable[[int], Any] = load, collate_fn: Callable[..., Any] = list) -> Builder:
    plan = PlanSpec(
        costs=ArrayCosts(np.arange(40, dtype=np.int64) % 7 + 1),
        order=Order(40, shuffle=Shuffle(), seed=1),
        balance=Balance(),
        num_ranks=2,
        batches=GlobalBatches(size=9),
    )
    assembler = SampleAssembler(
        loader=load, watch=Watch(), refuse=lambda row, why: RuntimeError(f"{row}: {why}"), collate_fn=collate_fn
    )
    return Builder(BuildSpec(plan=plan, rank=1, content=None), assembler)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Specs:
    """Every kind of spec there is, with some tasks of each."""
    return make_specs(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def alone(specs: Specs) -> dict[str, list[str]]:
    """Spec -> digests of its steps, built in this thread."""
    return {name: [delivered(spec.open().build(task)) for task in tasks] for name, (spec, tasks) in specs.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_builds_the_same_batches_of_every_spec(
    engine: str, specs: Specs, alone: dict[str, list[str]]
) -> None:
    for name, (spec, tasks) in specs.items():
        running = ENGINES[engine](spec.open())
        futures = [running.submit(task) for task in tasks]
        assert [delivered(future.result(120)) for future in futures] == alone[name], name
        running.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_worker_processes_build_the_same_batches_of_every_spec(
    method: str, specs: Specs, alone: dict[str, list[str]], module_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(module_cache))
    count = 1 if method == "spawn" else 2
    for name, (spec, tasks) in specs.items():
        if method != "spawn" or name == "shards, packed, joint":
            for threads, in_turn in ((2, False), (0, True)):
                running = ProcessEngine(spec, workers(method, count, threads, in_turn=in_turn))
                futures = [running.submit(task) for task in tasks]
                assert [delivered(future.result(120)) for future in futures] == alone[name], name
                running.close()
                running.close()


def workers(method: str, count: int, threads: int, *, in_turn: bool) -> Workers:
    context = multiprocessing.get_context(method)
    return Workers(num_workers=count, num_threads=threads, multiprocessing_context=context, in_turn=in_turn)


@pytest.mark.slow
def test_a_fresh_process_builds_the_same_batches_of_every_spec(
    specs: Specs, alone: dict[str, list[str]], module_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(module_cache))
    for name, (spec, tasks) in specs.items():
        data = pickle.dumps(spec)
        assert len(data) < 4000, name
        (tmp_path / name).write_bytes(pickle.dumps((data, tasks)))
    ended = subprocess.run([sys.executable, SPEC_JOB, tmp_path], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    digests = json.loads(ended.stdout)
    assert digests == alone
    # Steps of other seeds and epochs have other digests, and so has a step with one changed bit.
    assert len({each for steps in digests.values() for each in steps}) == sum(map(len, digests.values()))
    spec, tasks = specs["shards, packed, joint"]
    built = spec.open().build(tasks[0])
    built.batches[0].llm.labels[0] ^= 1
    assert delivered(built) != alone["shards, packed, joint"][0]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_passes_exceptions_on(engine: str) -> None:
    def explode(row: int) -> int:
        raise ZeroDivisionError(f"row {row}")

    running = ENGINES[engine](builder(explode))
    with pytest.raises(ZeroDivisionError):
        running.submit(StepTask(0, 0)).result(120)
    with pytest.raises(IndexError):
        running.submit(StepTask(0, 99)).result(120)
    running.close()


def test_an_exception_that_would_end_a_thread_is_an_error_of_the_step() -> None:
    def leave(row: int) -> int:
        raise SystemExit(3)

    running = ThreadEngine(builder(leave), num_threads=2, depth=2)
    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        running.submit(StepTask(0, 0)).result(120)
    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        running.submit(StepTask(0, 1)).result(120)  # the threads are still there
    running.close()


def test_one_step_at_a_time_calls_a_collate_fn() -> None:
    inside = threading.Lock()
    several: list[bool] = []

    class Collate:
        def __call__(self, samples: list[int]) -> list[int]:
            several.append(not inside.acquire(blocking=False))
            time.sleep(0.002)  # long enough for another step's call, if it were allowed
            if not several[-1]:
                inside.release()
            return samples

    running = ThreadEngine(builder(collate_fn=Collate().__call__), num_threads=4, depth=4)
    [future.result(120) for _ in range(5) for future in [running.submit(StepTask(0, step)) for step in range(5)]]
    running.close()
    assert len(several) == 25 and not any(several)


@pytest.mark.parametrize("engine", ENGINES)
def test_torch_keeps_its_threads_in_the_training_thread_and_has_one_in_decoding_threads(engine: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen: dict[int, int] = {}

        def noting(row: int) -> int:
            seen[threading.get_ident()] = torch.get_num_threads()
            return row

        running = ENGINES[engine](builder(noting))
        for step in range(3):
            running.submit(StepTask(0, step)).result(60)
        running.close()
        here = threading.get_ident()
        assert torch.get_num_threads() == 3
        assert (here in seen) == (engine == "inline") and set(seen.values()) == {3 if engine == "inline" else 1}
    finally:
        torch.set_num_threads(threads)


# `od.check_engine`: it passes engines of the library, and finds what is wrong with others.


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


OMNI = {"shards": 2, "samples": 12}


@pytest.fixture(autouse=True)
def _same(same_cache: None) -> None:
    _memory.clear()


def test_an_engine_of_the_users_passes(dataset: od.ShardDataset) -> None:
    assert od.check_engine(OwnEngine(), dataset, batch_size=4, shuffle=True).batches == 12
    numbers = od.check_engine(OwnEngine(), Numbers(20, bad=(7,)), batch_size=4, on_error=SKIP_ANY)
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
