"""Several loaders at the same time, in threads, over forks, and dropped: the same batches, and no thread remains."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import in_a_child
from ray_clusters import ACTOR
from ray_data import Deadly, FromFarStorage
from shard_factory import omni_shards

import orchdata as od


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
