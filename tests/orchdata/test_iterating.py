"""Where iterations begin: after an epoch, a break, an error, a state, and at the same time."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from children import in_a_child
from map_dataset import Numbers

import orchdata as od

STEPS = 6  # of 10 samples


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


def test_an_error_in_the_body_of_the_loop_is_a_break(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    with pytest.raises(ZeroDivisionError):
        for batch in one:
            _ = 1 // (1 - batch.step)
    assert one.state_dict()["step"] == 2
    assert position_of(next(iter(one))) == (1, 0)


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


def test_set_epoch_inside_an_iteration_holds_for_the_next(dataset: od.ShardDataset) -> None:
    one = loader(dataset)
    for step, batch in enumerate(one):
        one.set_epoch(7)
        assert position_of(batch) == (0, step)
    assert one.state_dict()["epoch"] == 7
    assert position_of(next(iter(one))) == (7, 0)


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


def test_an_iteration_belongs_to_its_process() -> None:
    steps = iter(od.DataLoader(range(8), batch_size=2))
    next(steps)

    def go_on() -> None:
        with pytest.raises(RuntimeError, match=re.escape("begin a fresh iter()")):
            next(steps)

    in_a_child(go_on)
    assert next(steps).tolist() == [2, 3]
