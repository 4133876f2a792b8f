"""Torch map-style data sets in the same loader."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from map_dataset import Numbers
from shard_factory import SKIP_ANY

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


def test_map_style_failures() -> None:
    with pytest.raises(OSError, match="disk on fire"):
        list(od.DataLoader(Numbers(6, bad=(2,)), batch_size=3))
    one = od.DataLoader(Numbers(6, bad=(2,)), batch_size=3, on_error="skip")
    assert [batch["number"].tolist() for batch in one] == [[0, 1], [3, 4, 5]]
    assert one.stats()["failures"]["by_reason"] == {"OSError: disk on fire": 1}


def test_map_style_global_batch_that_fails_whole_repeats_the_next_that_works() -> None:
    one = od.DataLoader(Numbers(6, bad=(2, 3, 5)), batch_size=1, on_error=SKIP_ANY)
    assert [batch["number"].tolist() for batch in one] == [[0], [1], [4], [4], [4], [0]]
    assert one.stats()["failures"]["count"] == 3
    with pytest.raises(od.DataError, match="disk on fire"):
        list(od.DataLoader(Numbers(2, bad=(0, 1)), on_error=SKIP_ANY))


@pytest.mark.parametrize(
    ("cost", "reason"),
    [([1, 2], "10 of them"), ([0.5] * 10, "costs are integers"), ([1] * 9 + [-3], "sample 9 has -3")],
)
def test_map_style_bad_costs(cost: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        od.DataLoader(Numbers(10), cost=cost)


def test_one_sample_at_a_time_without_a_batch_size() -> None:
    converted = list(od.DataLoader(Numbers(3), batch_size=None))
    assert converted == [{"number": row, "length": 1 + row} for row in range(3)]
    arrays = list(od.DataLoader([np.array([row]) for row in range(3)], batch_size=None))
    assert [one.tolist() for one in arrays] == [[0], [1], [2]] and torch.is_tensor(arrays[0])
    own = od.DataLoader(Numbers(3), batch_size=None, collate_fn=lambda sample: -sample["number"], sampler=[2, 0, 1])
    assert list(own) == [-2, 0, -1]
    ranks = [od.DataLoader(Numbers(5), batch_size=None, dp=(rank, 2)) for rank in range(2)]
    steps = [[one["number"] for one in step] for step in zip(*ranks, strict=True)]
    assert len(steps) == 3 and {number for step in steps for number in step} == set(range(5))
    with pytest.raises(ValueError, match="no remainder to drop"):
        od.DataLoader(Numbers(3), batch_size=None, drop_last=True)


class Threads(Numbers):
    """Which threads load it, and random numbers as an augmentation draws them."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.seen: set[threading.Thread] = set()

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.seen.add(threading.current_thread())
        return {"number": number, "noise": torch.rand(2)}


def test_map_style_data_load_in_the_thread_that_iterates() -> None:
    dataset = Threads(20)

    def noise() -> list[Any]:
        torch.manual_seed(3)
        return [batch["noise"].tolist() for batch in od.DataLoader(dataset, batch_size=4, shuffle=True)]

    assert noise() == noise()
    assert dataset.seen == {threading.current_thread()}


@pytest.mark.parametrize(
    "error",
    [od.StorageError("a.bin", "Input/output error", 5), MemoryError(), OSError(errno.ESTALE, "Stale file handle")],
    ids=repr,
)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_what_says_nothing_about_a_sample_is_never_skipped(error: Exception, num_threads: int) -> None:
    class Unreadable(Numbers):
        def __getitem__(self, number: int) -> dict[str, int]:
            if number == 2:
                raise error
            return super().__getitem__(number)

    one = od.DataLoader(Unreadable(6), batch_size=3, on_error="skip", num_threads=num_threads)
    with pytest.raises(type(error)):
        list(one)
    assert one.stats()["failures"]["count"] == 0
    with pytest.raises(type(error)):
        od.DataLoader(Unreadable(6), batch_size=3, on_error="skip", cost=lambda sample: 1)


def test_without_costs_a_sampler_may_yield_any_index() -> None:
    named = {"a": 1, "b": 2, ("c", 3): 4}
    assert list(od.DataLoader(named, batch_size=2, sampler=["b", ("c", 3), "a"], collate_fn=list)) == [[2, 4], [1]]
    assert list(od.DataLoader(named, batch_sampler=[["a"], ["b", "a"]], collate_fn=list)) == [[1], [2, 1]]
    with pytest.raises(KeyError, match="'d'"):
        list(od.DataLoader(named, sampler=["d"]))


@pytest.mark.parametrize("given", [2, 4])
def test_an_epoch_ends_where_its_sampler_does(given: int) -> None:
    class Sampler(list[int]):
        def __len__(self) -> int:
            return 3

    one = od.DataLoader(Numbers(5), sampler=Sampler(range(given)))
    assert len(one) == 3 and len(list(iter(one))) == given


def test_a_data_set_that_grows_grows_and_one_with_costs_or_an_order_of_ours_is_refused() -> None:
    numbers = Numbers(6)
    one, shuffled = od.DataLoader(numbers, batch_size=3), od.DataLoader(numbers, batch_size=3, shuffle=True)
    seeded = od.DataLoader(numbers, batch_size=3, shuffle=True, seed=1)
    assert len(list(one)) == len(list(seeded)) == 2
    numbers.count = 8
    assert len(one) == len(shuffled) == len(list(one)) == len(list(shuffled)) == 3
    with pytest.raises(ValueError, match="Numbers had 6 samples when this loader was created and has 8 now"):
        list(seeded)


def test_a_batch_sampler_may_reuse_its_list() -> None:
    class Reusing:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[list[int]]:
            batch = [0, 0]
            for start in range(3):
                batch[:] = [2 * start, 2 * start + 1]
                yield batch

    one = od.DataLoader(Numbers(6), batch_sampler=Reusing(), batch_size=1)  # torch's default, given
    assert [batch["number"].tolist() for batch in one] == [[0, 1], [2, 3], [4, 5]]


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes this process a rank of two; the other never starts."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it adds the backend

    def be(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        monkeypatch.setattr("orchdata.notices._warned", set())
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=2)

    yield be
    dist.destroy_process_group()


def test_sharing_map_style_data_over_ranks_is_said_once_on_rank_0(of_two: Callable[[int], None]) -> None:
    of_two(0)
    with pytest.warns(UserWarning, match=r"the 10 samples of Numbers are shared over 2 ranks.*dp=\(0, 1\)") as said:
        od.DataLoader(Numbers(10))
    assert len(said) == 1 and said[0].filename == __file__
    od.DataLoader(Numbers(10))
    of_two(1)
    od.DataLoader(Numbers(10))


def test_data_that_look_split_by_rank_are_named(of_two: Callable[[int], None]) -> None:
    of_two(0)
    with pytest.warns(UserWarning, match=r"already split by rank \(this Subset has 5 of 11 samples, and seems to be\)"):
        od.DataLoader(torch.utils.data.Subset(Numbers(11), range(1, 11, 2)))


class Batchwise(list[int]):
    """What an item looks like depends on the items it is asked for with."""

    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        return [torch.full((max(rows),), row) for row in rows]


def test_items_are_asked_for_by_the_batch_where_the_data_set_can(recwarn: pytest.WarningsRecorder) -> None:
    data = Batchwise(range(1, 8))
    ours, theirs = od.DataLoader(data, batch_size=3), torch.utils.data.DataLoader(data, batch_size=3)
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]


class Stateful(Numbers):
    state_dict = load_state_dict = dict


@pytest.mark.parametrize("ours", [{"cost": [1] * 23}, {"on_error": "skip"}])
def test_data_with_a_state_of_their_own_are_for_torchs_loader(ours: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Stateful has a state of its own"):
        od.DataLoader(Stateful(23), **ours)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_read_each_index_once_and_a_state_goes_on_on_more_of_them(num_workers: int) -> None:
    def ranks_of(size: int) -> list[od.DataLoader]:
        options: dict[str, Any] = {"global_batch_size": 6, "shuffle": True, "seed": 1, "num_workers": num_workers}
        return [od.DataLoader(Numbers(23), dp=(rank, size), **options) for rank in range(size)]

    def rows(step: tuple[Any, ...]) -> list[int]:
        return [row for batch in step for row in batch["number"].tolist()]

    two, seven = ranks_of(2), ranks_of(7)
    begun = zip(*map(iter, two), strict=True)
    steps = [rows(next(begun)) for _ in range(2)]
    for loader in seven:
        loader.load_state_dict(two[0].state_dict())
    rest = [rows(step) for step in zip(*seven, strict=True)]
    assert [sorted(step) for step in map(rows, begun)] == [sorted(set(step)) for step in rest]
    assert sorted({row for step in steps + rest for row in step}) == list(range(23))
    for number, step in enumerate(rest, 2):  # a rank without a sample repeats the first
        planned = seven[0].plan_at(0, number).row.tolist()
        assert step == planned + planned[:1] * (7 - len(planned))


def test_a_state_of_one_rank_with_a_distributed_sampler_goes_on_on_two() -> None:
    def loader(rank: int, size: int, shuffle: bool) -> od.DataLoader:
        sampler = torch.utils.data.DistributedSampler(numbers, size, rank, shuffle=shuffle, seed=4)
        return od.DataLoader(numbers, batch_size=4 // size, sampler=sampler, dp=(rank, size))

    numbers = Numbers(16)
    for shuffle in (False, True):
        one = loader(0, 1, shuffle)
        steps = iter(one)
        next(steps)
        two = [loader(rank, 2, shuffle) for rank in range(2)]
        for each in two:
            each.load_state_dict(one.state_dict())
        rest = [sorted(row for batch in step for row in batch["number"].tolist()) for step in zip(*two, strict=True)]
        assert rest == [sorted(batch["number"].tolist()) for batch in steps]


class Nested(Numbers):
    """Each item is read by a loader in this process."""

    def __getitem__(self, number: int) -> Any:
        return [batch["number"].tolist() for batch in od.DataLoader(Numbers(3), batch_size=2)]


def test_a_loader_in_a_worker_of_another_yields_batches() -> None:
    outer = od.DataLoader(Nested(1), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert list(outer) == [[[0, 1], [2]]]


class Dying(Numbers):
    is_well = False

    def __getitem__(self, number: int) -> Any:
        if number == 8 and not self.is_well:
            time.sleep(0.5)  # all before it are delivered
            os._exit(1)
        return super().__getitem__(number)


def test_a_lost_worker_is_torchs_error_and_the_next_iteration_goes_on_there() -> None:
    data = Dying(12)
    loader = od.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="DataLoader worker .* exited unexpectedly"):
        list(loader)
    assert loader.state_dict()["step"] == 4
    data.is_well = True
    assert [batch["number"].tolist() for batch in loader] == [[8, 9], [10, 11]]
