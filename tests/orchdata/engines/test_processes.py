"""Worker processes: the same batches as without them, even if the processes crash or hang."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from children import in_a_child
from delivered_once import row_of, tar_keys, wrong_deliveries
from digests import digest
from map_dataset import Numbers
from shard_factory import SKIP_ANY, omni_shards

import orchdata as od
from orchdata.engines.processes import engine as process_module
from orchdata.engines.processes.slabs import Slabs, StepMemory
from orchdata.engines.supervisor import Trial

JOB = Path(__file__).parents[2] / "support" / "workers_job.py"


def no_children() -> bool:
    return not multiprocessing.active_children()


class Items(torch.utils.data.Dataset[Any]):
    """Items of every kind that a worker may send."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        return {
            "number": number,
            "noise": torch.rand(3),
            "numpy": np.random.rand(2),  # noqa: NPY002
            "python": random.random(),
            "name": str(number),
        }


class Own:
    """A user's own object, with arrays in it."""

    def __init__(self, batch: list[Any]) -> None:
        self.numbers = torch.tensor([item["number"] for item in batch])
        self.turned = torch.arange(24).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
        self.names = np.array([item["name"] for item in batch])
        self.empty = torch.zeros(0, 3)


def test_map_style_batches_and_random_states_are_torchs() -> None:
    def both(**options: Any) -> list[list[Any]]:
        batches = []
        for kind in (torch.utils.data.DataLoader, od.DataLoader):
            torch.manual_seed(3)
            batches.append(list(kind(Items(), batch_size=6, **options)))
        return batches

    for options in ({"num_workers": 2}, {"num_workers": 1, "drop_last": True, "prefetch_factor": 1}):
        theirs, ours = both(**options)
        assert len(theirs) == len(ours)
        for one, two in zip(theirs, ours, strict=True):
            assert one.keys() == two.keys() and one["name"] == two["name"]
            assert all(torch.equal(one[key], two[key]) for key in ("number", "noise", "numpy", "python"))


def test_the_batch_of_a_collate_fn_arrives_unchanged() -> None:
    (one,) = od.DataLoader(Items(), batch_size=40, num_workers=1, collate_fn=Own)
    assert type(one) is Own and one.numbers.tolist() == list(range(40))
    assert one.turned.is_contiguous(memory_format=torch.channels_last) and one.turned.stride() == (24, 1, 8, 2)
    assert torch.equal(one.turned, torch.arange(24).view(1, 2, 3, 4).to(memory_format=torch.channels_last))
    assert one.names.tolist() == [str(number) for number in range(40)] and one.empty.shape == (0, 3)
    one.numbers += 1  # the caller's own memory


class Informed(Items):
    def __getitem__(self, number: int) -> Any:
        info = torch.utils.data.get_worker_info()
        return info.id, info.num_workers, info.seed, os.getpid(), os.environ.get("SET_BY"), type(info.dataset).__name__


def set_by(number: int) -> None:
    os.environ["SET_BY"] = str(number)


def test_microbatches_of_a_step_share_no_memory(omni: list[str]) -> None:
    constant = {"ones": torch.ones(3), "none": torch.empty(0, 4)}
    dataset = od.ShardDataset(omni)
    dataset.index()
    options = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": lambda samples: dict(constant)}
    for batch in od.DataLoader(dataset, batch_size=2, accumulate=2, **options):
        assert batch["ones"].tolist() == [1, 1, 1] and batch["none"].shape == (0, 4)
        batch["ones"].zero_()


def test_workers_know_who_they_are() -> None:
    torch.manual_seed(5)
    loader = od.DataLoader(Informed(), batch_size=10, num_workers=2, worker_init_fn=set_by, collate_fn=list)
    batches = list(loader)
    torch.manual_seed(5)
    base = int(torch.empty((), dtype=torch.int64).random_().item())
    for step, batch in enumerate(batches):
        number = step % 2
        assert {item[:3] for item in batch} == {(number, 2, base + number)}
        assert {item[4:] for item in batch} == {(str(number), "Informed")}
    assert len({item[3] for batch in batches for item in batch}) == 2 and no_children()
    assert torch.utils.data.get_worker_info() is None


class CutFile(OSError):
    """Made of something else than its `args`."""

    def __init__(self, path: str, number: int) -> None:
        super().__init__(f"{path} is cut at {number}")
        self.number = number


class Failing(Numbers):
    def __getitem__(self, number: int) -> Any:
        if number == 7:
            raise CutFile("a.bin", number)
        return super().__getitem__(number)


def test_errors_arrive_with_the_workers_traceback() -> None:
    with pytest.raises(CutFile, match="a.bin is cut at 7") as caught:
        list(od.DataLoader(Failing(20), batch_size=5, num_workers=2))
    item, story = caught.value.__notes__
    assert caught.value.number == 7 and item == "item 7 of Failing"
    assert "raised in DataLoader worker process 1" in story and "__getitem__" in story
    loader = od.DataLoader(Failing(20), batch_size=5, num_workers=2, on_error=SKIP_ANY)
    assert sum(len(batch["number"]) for batch in loader) == 19
    assert [failure.key for failure in loader.gather_failures()] == ["7"]

    def refuse(number: int) -> None:
        raise ArithmeticError(f"worker {number}")

    with pytest.raises(ArithmeticError, match="worker [01]"):
        list(od.DataLoader(Numbers(20), num_workers=2, worker_init_fn=refuse))
    assert no_children()


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=20)


@pytest.mark.filterwarnings("ignore:DataLoader worker")
@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_workers_killed_at_random_moments_change_nothing(omni: list[str], kills: int) -> None:
    dataset, rng, killed = od.ShardDataset(omni), random.Random(kills), 0
    options: dict[str, Any] = {"batch_size": 1, "shuffle": True, "num_threads": 2}
    expected = [digest(batch) for batch in od.DataLoader(dataset, **options)]
    loader = od.DataLoader(dataset, num_workers=2, multiprocessing_context="fork", **options)
    delivered, rows = [], []
    for left, batch in zip(range(len(expected), 0, -1), loader, strict=True):
        delivered.append(digest(batch))
        rows.append(row_of(0, [batch]))
        for _ in range(-(-(kills - killed) // left)):
            time.sleep(rng.random() * 0.05)
            while not (workers := multiprocessing.active_children()):
                time.sleep(0.001)  # the last one is being replaced
            process = rng.choice(workers)
            with contextlib.suppress(ProcessLookupError):  # it has been waited for
                os.kill(process.pid or 0, signal.SIGKILL)
            killed += 1
    assert delivered == expected and killed == kills
    assert wrong_deliveries([rows], tar_keys(omni), epochs=1) == []
    stats = loader.stats()
    assert stats["failures"]["count"] == 0 and stats["milliseconds"]["handing_over"] > 0 and no_children()


@pytest.mark.parametrize(
    ("killed", "verdict"), [((True,) * 4, "ended"), ((True,) * 3, None), ((False,), None), ((False, False), "ended")]
)
def test_a_sample_gets_more_trials_if_its_processes_are_killed(killed: tuple[bool, ...], verdict: str | None) -> None:
    def start(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(rows=(7,), is_ready=True)

    transport: Any = SimpleNamespace(num_spare=2, start=start, end=lambda worker: None)
    trial = Trial(7, transport, 0.0)
    for is_killed in killed:
        trial.ended(trial.workers[0], "ended", is_killed=is_killed)
    assert trial.verdict == verdict
    if verdict is None:
        trial.survived(trial.workers[0])
        assert trial.verdict == ""


def test_a_warning_names_a_killed_worker_and_the_step_that_was_built_again() -> None:
    class Dies(Numbers):
        flag = multiprocessing.get_context("fork").Value("i", 0)

        def __getitem__(self, number: int) -> Any:
            if number == 7 and not self.flag.value:
                self.flag.value = 1
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(number)

    two: dict[str, Any] = {"batch_size": 5, "num_workers": 2}
    with pytest.warns(UserWarning, match=r"killed by signal: Killed; built again: step 1 of epoch 0") as warned:
        batches = [batch["number"].tolist() for batch in od.DataLoader(Dies(20), cost=[1] * 20, **two)]
    assert warned[0].filename == __file__
    assert batches == [list(range(at, at + 5)) for at in range(0, 20, 5)]


def eats(number: int) -> None:
    np.ones(1 << 30, np.uint8)


def says_so(number: int) -> None:
    raise MemoryError("7 frames too many")


class Bad(Numbers):
    def __init__(self, size: int, what: Any) -> None:
        super().__init__(size)
        self.what = what

    def __getitem__(self, number: int) -> Any:
        if number == 7:
            self.what(number)
        return super().__getitem__(number)


@pytest.mark.slow  # processes that are not forked start from scratch
@pytest.mark.filterwarnings("ignore:DataLoader worker", "ignore:item 7")
@pytest.mark.parametrize(
    ("what", "options", "reason"),
    [
        (eats, {"worker_memory": 200 << 20}, " went beyond worker_memory (Unable to allocate 1.00 GiB for an array"),
        (says_so, {"worker_memory": 200 << 20}, " went beyond worker_memory (7 frames too many), whenever"),
    ],
    ids=["eats", "says so"],
)
def test_a_sample_that_takes_too_much_memory_alone_is_marked_bad(
    what: Any, options: dict[str, Any], reason: str
) -> None:
    common: dict[str, Any] = {"batch_size": 5, "num_workers": 2} | options
    loader = od.DataLoader(Bad(20, what), on_error=SKIP_ANY, **common)
    for _ in range(2):  # the second time it is known
        numbers = sorted(number for batch in loader for number in batch["number"].tolist())
        assert numbers == [number for number in range(20) if number != 7]
    (failure,) = loader.gather_failures()
    assert failure.key == "7" and reason in failure.reason and loader.stats()["failures"]["count"] == 2
    with pytest.raises(od.DataError, match=f"Bad: sample '7'.*{re.escape(reason)}"):
        list(od.DataLoader(Bad(20, what), cost=[1] * 20, **common))
    assert no_children()


POOL = threading.Lock()
"""As a library's pool of threads has one: held at a fork, it is held in the child for ever."""


class Pooled(Numbers):
    def __getitem__(self, number: int) -> Any:
        with POOL:
            return super().__getitem__(number)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DataLoader worker", "ignore:item")
def test_a_sample_that_hangs_only_in_forked_workers_is_not_blamed() -> None:
    loader = od.DataLoader(
        Pooled(4), batch_size=4, num_workers=1, timeout=0.5, on_error="skip", multiprocessing_context="fork"
    )
    with POOL, pytest.raises(RuntimeError, match=r"timed out.*Workers are forked.*multiprocessing_context='forkserver"):
        list(loader)
    assert not loader._runtime._source._known_bad_rows


class Grouped(Numbers):
    def __getitem__(self, number: int) -> Any:
        if number == 5:
            raise ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("row 5 is cut"), OSError("reset")])
        return number


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Grouped(8))


@pytest.mark.parametrize("dataset", [Grouped(8), Streamed()], ids=["ours", "torch's"])
def test_a_group_of_exceptions_of_a_worker_keeps_type_message_and_parts(dataset: Any) -> None:
    with pytest.raises(ExceptionGroup, match="unhandled errors in a TaskGroup") as caught:
        list(od.DataLoader(dataset, batch_size=2, num_workers=1))
    assert [str(each) for each in caught.value.exceptions] == ["row 5 is cut", "reset"]
    assert "raised in DataLoader worker process 0" in caught.value.__notes__[-1]
    assert no_children()


def test_memory_of_a_failed_step_is_not_reused() -> None:
    slabs = Slabs(4)
    failed = StepMemory(slabs)
    stray = failed.take(1 << 17)  # another thread of the step may still write there
    failed.drop()
    assert not np.shares_memory(stray, StepMemory(slabs).take(1 << 17))
    assert slabs.take_dropped() == [1]


@pytest.mark.filterwarnings("ignore:DataLoader worker")
def test_workers_that_all_end_are_an_error_each_time() -> None:
    options: dict[str, Any] = {"num_workers": 2, "cost": [1] * 8}
    loader = od.DataLoader(Numbers(8), worker_init_fn=lambda worker: os._exit(3), **options)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="worker processes do not start"):
            next(iter(loader))


def test_a_forked_child_leaves_its_parents_workers_alone() -> None:
    iterators = [iter(od.DataLoader(Numbers(40), batch_size=2, num_workers=2))]
    next(iterators[0])

    def drop() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            iterators.clear()
            gc.collect()

    in_a_child(drop)
    assert len(list(iterators[0])) == 19


def leftovers(tag: str) -> Iterator[str]:
    """Processes of a job that carry its tag in their environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (
                    tag.encode() in (entry / "environ").read_bytes()
                    and "\nState:\tZ" not in (entry / "status").read_text()
                ):
                    yield entry.name
            except OSError:
                continue


@pytest.mark.slow
@pytest.mark.parametrize(("method", "sent"), [("fork", signal.SIGKILL), ("forkserver", signal.SIGINT)])
def test_workers_end_with_their_parent_even_if_they_hold_the_gil(
    method: str, sent: signal.Signals, tmp_path: Path
) -> None:
    tag = f"WORKERS_JOB={tmp_path}"
    environ = os.environ | {"WORKERS_JOB": str(tmp_path)}
    with subprocess.Popen([sys.executable, JOB, method], env=environ, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert json.loads(job.stdout.readline()) == "a worker hangs"
        maps = [Path("/proc", pid, "maps").read_text() for pid in leftovers(tag)]
        assert len(maps) > 2 and not any("/dev/shm" in each for each in maps)  # a file with a name there may remain
        job.send_signal(sent)
        job.wait(60)
    deadline = time.monotonic() + 30
    while list(leftovers(tag)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(leftovers(tag))


def test_keys_of_a_sampler_that_are_not_integers_reach_the_workers() -> None:
    words = {"a": 1, "b": 2, "c": 3}
    loader = od.DataLoader(words, sampler=["b", "a", "c"], batch_size=2, num_workers=2)  # type: ignore[arg-type, var-annotated]
    assert [batch.tolist() for batch in loader] == [[2, 1], [3]]


class Leaves(Numbers):
    def __getitem__(self, number: int) -> Any:
        if number == 5:
            sys.exit(3)
        return super().__getitem__(number)


def drained(loader: Any) -> list[Any]:
    """Return all batches and errors."""
    results, batches = [], iter(loader)
    while True:
        try:
            results.append(next(batches)["number"].tolist())
        except StopIteration:
            return results
        except RuntimeError as error:
            results.append(str(error))


def test_sys_exit_in_a_worker_is_an_error_of_its_step_alone() -> None:
    results = drained(od.DataLoader(Leaves(12), batch_size=3, num_workers=2))
    assert results[0::2] == [[0, 1, 2], [6, 7, 8]] and "SystemExit(3)" in results[1] and results[3] == [9, 10, 11]
    results = drained(od.DataLoader(Leaves(12), batch_size=3, num_workers=2, on_error=SKIP_ANY))
    assert results == [[0, 1, 2], [3, 4], [6, 7, 8], [9, 10, 11]]


@pytest.mark.filterwarnings("ignore:DataLoader worker")
def test_a_step_that_was_queued_after_one_that_hangs_is_not_lost_with_it() -> None:
    def stuck(batch: list[Any]) -> Any:
        if batch[0]["number"] == 3:
            threading.Event().wait()
        return {"number": torch.tensor([item["number"] for item in batch])}

    options: dict[str, Any] = {"batch_size": 3, "num_workers": 2, "cost": [1] * 12}
    steps = iter(od.DataLoader(Numbers(12), timeout=0.5, collate_fn=stuck, **options))
    assert next(steps)["number"].tolist() == [0, 1, 2]
    for message in ("DataLoader timed out after 0.5 seconds, waiting for step 1", "this iteration ended with"):
        with pytest.raises(RuntimeError, match=message):
            next(steps)


def test_few_descriptors_are_enough_to_keep_batches() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, limits[1]))
    try:
        large = [torch.full((40_000,), number) for number in range(100)]
        kept = list(od.DataLoader(large, batch_size=2, num_workers=2, cost=[1] * 100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [int(batch[1, 7]) for batch in kept] == list(range(1, 100, 2))


@pytest.mark.filterwarnings("ignore:DataLoader worker")
def test_a_forked_process_that_never_runs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = multiprocessing.get_context("fork").Value("i", 2)
    run = process_module.run_worker

    def run_or_not(*arguments: Any) -> None:
        with stuck.get_lock():
            stuck.value -= 1
            waits = stuck.value >= 0
        if waits:  # as for a lock of a thread that the fork did not copy
            threading.Event().wait()
        run(*arguments)

    monkeypatch.setattr(process_module, "run_worker", run_or_not)
    monkeypatch.setattr("orchdata.engines.processes.engine.FORK_SECONDS", 0.5)
    results = drained(od.DataLoader(Numbers(12), batch_size=3, num_workers=2, cost=[1] * 12))
    assert results == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]] and stuck.value < 0
