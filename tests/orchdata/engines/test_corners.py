"""Several loaders at the same time, in threads, over forks, and dropped: the same batches, and no thread remains."""

from __future__ import annotations

import fcntl
import gc
import json
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_job
from children import in_a_child
from ray_clusters import ACTOR
from ray_data import Deadly, FromFarStorage
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.dataset.indexed import IndexCosts
from orchdata.engines import warm
from orchdata.engines.warm import Warming
from orchdata.finalizers import wait_for_finalizers


class Numbers:
    """Row -> itself. Once `free` is cleared, `__getitem__` waits until it is set again."""

    def __init__(self, size: int = 24) -> None:
        self.size = size
        self.free = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.free.set()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> int:
        self.waiting.release()
        assert self.free.wait(120)
        return row


def loader_of(data: Any, **options: Any) -> od.DataLoader[Any]:
    return od.DataLoader(data, **{"batch_size": 2, "num_threads": 2, "collate_fn": list, "cost": [1] * 24, **options})


def batches_of(size: int = 24) -> list[list[int]]:
    return [[row, row + 1] for row in range(0, size, 2)]


@pytest.fixture
def started() -> Iterator[Any]:
    """Returns the threads of engines started since the test began; at its end there are none, nor others."""
    before = set(threading.enumerate())
    yield lambda: {each for each in threading.enumerate() if each.name != "orchdata finalizers"} - before
    gc.collect()
    assert_over(set(threading.enumerate()) - before)


def assert_over(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


@pytest.mark.slow
def test_two_loaders_at_the_same_time_deliver_the_same_batches_as_each_alone(tmp_path: Path, started: Any) -> None:
    dataset = od.ShardDataset(omni_shards(tmp_path), recipe=od.Recipe())

    def make(seed: int) -> od.DataLoader[Any]:
        return od.DataLoader(dataset, batch_size=6, shuffle=True, seed=seed, num_threads=2)

    alone = [[batch.sample_ids for batch in make(seed)] for seed in (1, 2)]
    assert alone[0] != alone[1]
    together = list(zip(make(1), make(2), strict=True))
    assert [[batch.sample_ids for batch in batches] for batches in zip(*together, strict=True)] == alone


def test_a_loader_may_be_iterated_in_two_threads(started: Any) -> None:
    loader = loader_of(Numbers())
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.extend(loader))
    thread.start()
    here = list(loader)
    thread.join(120)
    assert batches == here == batches_of()


def test_an_iteration_dropped_while_it_builds_ends_after_that_step(started: Any) -> None:
    data = Numbers()
    steps = iter(loader_of(data))
    next(steps)
    data.free.clear()
    threads = started()
    for _ in batches_of():
        if data.waiting.acquire(timeout=0.1) and any(data.waiting.acquire(timeout=0.1) for _ in range(2)):
            break
    freed = threading.Timer(0.1, data.free.set)
    freed.start()
    del steps
    assert_over(threads)
    freed.join()


def test_a_child_forked_while_threads_build_loads_for_itself() -> None:
    mine = loader_of(Numbers(), num_threads=3)
    for delivered in range(1, 4):
        steps = iter(mine)
        batches = [next(steps) for _ in range(delivered)]

        def load() -> None:
            assert list(mine) == batches_of()
            assert list(loader_of(Numbers(), num_threads=3)) == batches_of()

        in_a_child(load, seconds=60)
        assert batches + list(steps) == batches_of()


# One contract for engines with workers, processes and Ray actors alike: what is lost with a worker is built again.


SKIP = od.ErrorPolicy("skip", max_failures=2)


@pytest.fixture(
    params=[pytest.param("fork", marks=pytest.mark.slow), pytest.param("actors of Ray", marks=pytest.mark.slow)]
)
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "fork":
        monkeypatch.setattr("orchdata.engines.supervisor._FRESH_SECONDS", 1.0)
        return {"multiprocessing_context": "fork"}
    request.getfixturevalue("ray_cluster")
    return {"engine": od.RayEngine(**ACTOR)}


def rows_of(data: Any, **options: Any) -> tuple[list[int], list[Any], list[str]]:
    """Iterate twice -> rows in the order of delivery, failures, warnings."""
    loader = od.DataLoader(data, batch_size=4, num_workers=1, cost=[1] * 24, on_error=SKIP, **options)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        rows = [row for _ in range(2) for batch in loader for row in batch.tolist()]
    return rows, loader.gather_failures(), [str(each.message) for each in noted]


@pytest.mark.parametrize(
    ("options", "ending"), [({}, ""), ({"timeout": 2}, "timed out after 2 seconds")], ids=["ends", "hangs"]
)
def test_a_sample_that_ends_or_hangs_two_workers_alone_is_a_failure(
    options: dict[str, Any], ending: str, workers: dict[str, Any], tmp_path: Path
) -> None:
    data = Deadly(tmp_path, row=6, times=1000, hangs=bool(options))
    rows, (failure,), notes = rows_of(data, **options, **workers)
    assert rows == [row for row in range(24) if row != 6] * 2  # the second time it is known
    assert failure.key == "6" and f"{ending}, whenever this sample was loaded alone" in str(failure)
    assert any("built again: " in each and "step 1 of epoch 0" in each for each in notes)


def test_a_sample_that_ends_its_worker_once_is_no_failure(workers: dict[str, Any], tmp_path: Path) -> None:
    rows, failures, notes = rows_of(Deadly(tmp_path, row=6, times=1), **workers)
    assert rows == [*range(24)] * 2 and not failures
    assert sum("built again: " in each and "step 1 of epoch 0" in each for each in notes) == 1


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_sample_that_waits_for_storage_has_more_time(
    num_threads: int, workers: dict[str, Any], tmp_path: Path
) -> None:
    data = FromFarStorage(tmp_path, row=6, seconds=8)
    rows, failures, _ = rows_of(data, num_threads=num_threads, timeout=3, **workers)
    assert rows == [*range(24)] * 2 and not failures
    assert len(list(tmp_path.iterdir())) == 2  # its worker is not replaced


# Warming: after it a step loads and compiles nothing; children compile missing kernels, and end with their parent.


def reports(folder: Path, *names: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, warm_job.__file__, folder, *names], check=True, capture_output=True, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(folder: Path, *names: str) -> None:
    checked = reports(folder, *names)
    assert [report["balance"] for report in checked] == list(names)
    for report in checked:
        assert report["loaded"] == [], report["balance"]
        assert report["several"] == [], report["balance"]
        assert report["shared"] or report["balance"] != "teams, caps"
        assert int(str(report["kernels"])) > 4  # else nothing was checked


@pytest.mark.slow
def test_after_warming_a_step_loads_no_kernel_and_none_has_two_signatures(tmp_path: Path) -> None:
    check(tmp_path, "per phase, caps", "grid", "accumulated")


@pytest.mark.slow
def test_the_same_of_every_way_to_balance(tmp_path: Path) -> None:
    check(tmp_path, *warm_job.BALANCES)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no kernel were stored."""
    monkeypatch.setattr(warm, "_is_stored", lambda head: False)


@pytest.mark.slow
@pytest.mark.usefixtures("absent")
def test_children_compile_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    warming = Warming(["padded", "pipeline"])
    children = list(warming._children)
    assert children
    warming.wait()
    assert [child.returncode for child in children] == [0] * len(children)
    monkeypatch.undo()
    assert not Warming(["padded", "pipeline"])._children


@pytest.mark.usefixtures("absent")
def test_children_end_with_the_loader_and_with_its_process() -> None:
    folder = warm._cache_folder(warm._head("pipeline"))
    assert folder is not None
    with (folder / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # children wait for the process that compiles it
        warming, other = Warming(["pipeline"]), Warming(["pipeline"])
        (child,), (orphan,) = warming._children, other._children
        assert orphan.stdin is not None
        orphan.stdin.close()  # as the end of this process does
        assert orphan.wait(60) in (0, -signal.SIGKILL)  # 0: before it was armed
        assert child.poll() is None
        del warming
        gc.collect()
        wait_for_finalizers()
        assert child.returncode is not None


def test_a_step_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    counted = IndexCosts.loss_tokens
    monkeypatch.setattr(IndexCosts, "loss_tokens", lambda self, row: planned.append(len(row)) or counted(self, row))
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=12), recipe=RECIPE)
    dataset.index()
    loader = od.DataLoader(dataset, batch_size=2, dp=(0, 2))
    assert sum(1 for _ in loader) == len(planned) == len(loader) == 3


@pytest.mark.slow
def test_the_command_says_where_kernels_are() -> None:
    command = [sys.executable, "-m", "orchdata.cli", "warm", "--json"]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert set(said) == {"folders", "seconds"} and said["folders"] == warm.stored_in()


@pytest.mark.slow
@pytest.mark.usefixtures("absent")
def test_a_loader_and_a_profile_say_at_once_that_kernels_are_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 16)
    with monkeypatch.context() as patched:
        patched.setattr(Warming, "wait", lambda warming: None)
        od.profile(od.ShardDataset(str(tmp_path / "a.jsonl")), ranks=(2,), batch_size=2)
    assert "compiling kernels, once on this machine: about " in capsys.readouterr().err
    warming = Warming(["padded"])
    assert capsys.readouterr().err.startswith("compiling kernels, once on this machine: about 30 s (`orchdata warm`")
    warming.wait()
    monkeypatch.undo()
    Warming(["padded"])
    assert not capsys.readouterr().err
