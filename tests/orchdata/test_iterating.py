"""Where iterations begin: after an epoch, a break, an error, a state, and at the same time."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from children import in_a_child
from map_dataset import Numbers
from shard_factory import omni_shards

import orchdata as od

STEPS = 6  # of 10 samples


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return omni_shards(tmp_path_factory.mktemp("omni"), shards=3, samples=20)


@pytest.fixture
def dataset(shards: list[str]) -> od.ShardDataset:
    dataset = od.ShardDataset(shards)
    dataset.index()
    return dataset


def loader(dataset: Any, **options: Any) -> od.DataLoader:
    return od.DataLoader(dataset, **({"global_batch_size": 10, "shuffle": True, "num_threads": 2, "seed": 5} | options))


def keys(one: od.DataLoader) -> list[tuple[str, str]]:
    return [key for batch in one for key in batch.sample_ids]


def position_of(batch: od.Batch) -> tuple[int, int]:
    return batch.plan.epoch, batch.step


def test_epochs_differ_and_follow_each_other(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    first, second = keys(one), keys(one)
    assert sorted(first) == sorted(second) and first != second
    again = loader(dataset)
    again.set_epoch(1)
    assert keys(again) == second
    assert again.state_dict()["epoch"] == 2


@pytest.mark.parametrize("steps", [False, True], ids=["microbatches", "steps"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iteration_after_break_begins_the_next_epoch(
    dataset: od.ShardDataset, persistent: bool, steps: bool
) -> None:
    one = loader(dataset, persistent_workers=persistent)
    limited = [
        [position_of(batch) for batch in itertools.islice(_batches(one, steps), 2)] for _ in range(3)
    ]  # as a trainer that limits its batches does
    assert limited == [[(epoch, 0), (epoch, 1)] for epoch in range(3)]
    assert one.state_dict()["epoch"] == 2 and one.state_dict()["step"] == 2  # what was delivered, not what comes next
    one.close()


def _batches(one: od.DataLoader, steps: bool) -> Any:
    return (batches[0] for batches in one.steps()) if steps else iter(one)


def test_first_batches_of_a_shuffled_loader_differ_and_of_a_plain_one_are_the_same() -> None:
    shuffled = od.DataLoader(Numbers(656), batch_size=20, shuffle=True)
    seen = {number for _ in range(20) for number in next(iter(shuffled))["number"].tolist()}
    assert len(seen) > 200  # 20 draws of 20; the same prefix again and again would be 20
    plain = od.DataLoader(Numbers(656), batch_size=20)
    assert [next(iter(plain))["number"].tolist() for _ in range(3)] == [list(range(20))] * 3


def test_an_error_in_the_body_of_the_loop_is_a_break(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    with pytest.raises(ZeroDivisionError):
        for batch in one:
            _ = 1 // (1 - batch.step)
    assert one.state_dict()["step"] == 2
    assert position_of(next(iter(one))) == (1, 0)


def test_an_iteration_that_delivered_nothing_has_not_begun_its_epoch(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    iter(one)
    iter(one.steps())
    assert position_of(next(iter(one))) == (0, 0)


@pytest.mark.parametrize("delivered", [0, 3])
def test_after_an_error_of_its_own_the_next_iteration_goes_on_with_the_step_that_failed(delivered: int) -> None:
    bad = 4 * delivered + 1
    numbers = Numbers(40, bad=(bad,))
    one = od.DataLoader(numbers, batch_size=4)
    seen = []
    with pytest.raises(OSError, match="disk on fire"):
        for batch in one:
            seen += batch["number"].tolist()
    assert one.state_dict()["step"] == delivered
    with pytest.raises(OSError, match="disk on fire"):
        next(iter(one))
    numbers.bad = ()
    seen += [number for batch in one for number in batch["number"].tolist()]
    assert seen == list(range(40))
    assert one.state_dict()["epoch"] == 1


def test_going_on_after_an_error_keeps_to_what_a_random_sampler_drew() -> None:
    numbers = Numbers(40, bad=(7,))
    one = od.DataLoader(numbers, batch_size=4, sampler=torch.utils.data.RandomSampler(numbers))
    seen = []
    with pytest.raises(OSError, match="disk on fire"):
        for batch in one:
            seen += batch["number"].tolist()
    numbers.bad = ()
    seen += [number for batch in one for number in batch["number"].tolist()]
    assert sorted(seen) == list(range(40))
    following = [number for batch in one for number in batch["number"].tolist()]
    assert sorted(following) == list(range(40)) and following != seen  # drawn again


def test_set_epoch_keeps_a_restored_position_until_a_step_is_delivered(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    steps = iter(one.steps())
    next(steps)
    resumed = loader(dataset)
    resumed.load_state_dict(one.state_dict())
    for _ in range(2):
        resumed.set_epoch(0)
    assert position_of(next(iter(resumed))) == (0, 1)
    resumed.set_epoch(0)
    assert position_of(next(iter(resumed))) == (0, 0)


def test_set_epoch_begins_an_epoch_at_its_start(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    for epoch in (0, 1, 1, 4):
        one.set_epoch(epoch)
        assert position_of(next(iter(one))) == (epoch, 0)


def test_set_epoch_inside_an_iteration_holds_for_the_next(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    for step, batch in enumerate(one):
        one.set_epoch(7)
        assert position_of(batch) == (0, step)
    assert one.state_dict()["epoch"] == 7
    assert position_of(next(iter(one))) == (7, 0)


def test_a_state_taken_after_break_goes_on_inside_the_epoch(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    for batch in one:
        if batch.step == 2:
            break
    resumed = loader(dataset)
    resumed.load_state_dict(one.state_dict())
    assert [position_of(batch) for batch in resumed] == [(0, step) for step in range(3, STEPS)]


@pytest.mark.parametrize("persistent", [False, True])
def test_two_iterations_at_once_are_independent(dataset: od.ShardDataset, persistent: bool) -> None:
    one = loader(dataset, persistent_workers=persistent)
    for step, (left, right) in enumerate(zip(one, one, strict=True)):
        assert position_of(left) == position_of(right) == (0, step)
        assert left.sample_ids == right.sample_ids
        assert one.state_dict()["step"] == step + 1
    assert one.state_dict()["epoch"] == 1
    left_one, right_one = iter(one), iter(one)
    next(left_one), next(right_one)
    left_one.close()  # type: ignore[attr-defined]
    assert len(list(right_one)) == STEPS - 1  # closing one must not take the other's threads
    one.close()


def test_a_look_at_another_epoch_leaves_the_loop_around_it_alone(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    for step, batch in enumerate(one):
        assert position_of(batch) == (0, step)
        assert one.state_dict()["step"] == step + 1  # the step delivered last
        if step == 2:
            assert position_of(next(iter(one))) == (1, 0)
            assert one.state_dict()["epoch"] == 1
    assert one.state_dict()["epoch"] == 2  # epoch 1 was begun, inside


def test_two_iterations_over_a_random_sampler_see_every_sample_once() -> None:
    numbers = Numbers(12)
    one = od.DataLoader(numbers, batch_size=3, sampler=torch.utils.data.RandomSampler(numbers))
    seen: tuple[list[int], list[int]] = ([], [])
    for pair in zip(one, one, strict=True):
        for numbers_of_one, batch in zip(seen, pair, strict=True):
            numbers_of_one += batch["number"].tolist()
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(12))


def test_len_under_max_tokens_says_once_that_it_counts_steps(
    dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchdata.notices._warned", set())
    one = loader(dataset, balance=od.Balance(max_tokens=500, oversize="own"))
    assert len(list(one)) > STEPS  # no warning without a call of len()
    with pytest.warns(UserWarning, match=rf"{STEPS}; iterating yields microbatches.*loader\.steps\(\)") as said:
        assert len(one) == STEPS
    assert said[0].filename == __file__
    assert len(one) == STEPS == len(list(one.steps()))


class Failing:
    """Items that are their index; one of them fails once."""

    def __init__(self, row: int) -> None:
        self.row: int | None = row

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        if row == self.row:
            self.row = None
            raise KeyError("not this time")
        return row


@pytest.mark.parametrize("name", ["__iter__", "steps"])
def test_an_iteration_that_failed_never_looks_like_the_end_of_the_epoch(name: str) -> None:
    loader = od.DataLoader(Failing(6), batch_size=2, collate_fn=list, dp=(0, 2))
    steps = iter(getattr(loader, name)())
    next(steps)
    with pytest.raises(KeyError):
        next(steps)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended with KeyError.*a fresh iter.. of the loader continues"):
            next(steps)
    rest = [list(batch) for batch in loader]
    assert rest == [[4, 6]]
    assert next(iter(loader)) == [0, 2]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_on_one_rank_an_iteration_continues_after_an_error_as_torchs_does(num_threads: int) -> None:
    loader = od.DataLoader(Failing(3), batch_size=2, collate_fn=list, num_threads=num_threads)
    steps = iter(loader)
    assert next(steps) == [0, 1]
    with pytest.raises(KeyError):
        next(steps)
    assert loader.state_dict()["step"] == 1  # a fresh iteration would try it again
    assert list(steps) == [[4, 5], [6, 7]]
    assert loader.state_dict()["epoch"] == 1
    assert len(list(loader)) == 4


@pytest.mark.parametrize("name", ["dataset", "batch_size", "collate_fn", "drop_last", "sampler", "num_workers"])
def test_arguments_set_later_are_refused(name: str) -> None:
    loader = od.DataLoader(range(4), batch_size=2)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set .* create another loader"):
        setattr(loader, name, None)
    loader.note = "free"


def test_an_iteration_belongs_to_its_process() -> None:
    steps = iter(od.DataLoader(range(8), batch_size=2))
    next(steps)

    def go_on() -> None:
        with pytest.raises(RuntimeError, match=re.escape("begin a fresh iter()")):
            next(steps)

    in_a_child(go_on)
    assert next(steps).tolist() == [2, 3]
