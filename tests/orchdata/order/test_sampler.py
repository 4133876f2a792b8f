"""Samplers are drawn where the loader iterates: once an epoch, when it begins; a step's rows travel in its task."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from map_dataset import Numbers

import orchdata as od
from orchdata.order.steps import GlobalBatches, StepTask


class Counting:
    """Gives other indices each time, and counts the times."""

    def __init__(self) -> None:
        self.draws = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        self.draws += 1
        return iter(range(self.draws, self.draws + 5))


def test_a_sampler_is_drawn_once_an_epoch_and_not_before_it_begins() -> None:
    sampler = Counting()
    loader = od.DataLoader(Numbers(9), batch_size=2, sampler=sampler)
    assert sampler.draws == 0
    batches = iter(loader)
    assert sampler.draws == 0
    assert next(batches)["number"].tolist() == [1, 2] and sampler.draws == 1
    assert [batch["number"].tolist() for batch in loader] == [[2, 3], [4, 5], [6]]  # the next epoch
    assert [batch["number"].tolist() for batch in batches] == [[3, 4], [5]]  # its own rows
    assert sampler.draws == 2


def test_another_process_gets_the_rows_and_never_the_sampler() -> None:
    loader = od.DataLoader(Numbers(9), batch_size=2, sampler=Counting(), cost=[1] * 9)
    spec = pickle.dumps(loader._runtime.prepared.spec)
    assert b"Counting" in spec and b"draws" not in spec  # its name, for errors
    task = next(loader._runtime.prepared.steps.tasks(0, 1, None, again=False))
    assert task.step == 1 and task.rows is not None and task.rows.tolist() == [3, 4]
    builder = pickle.loads(spec).open()
    assert builder.build(pickle.loads(pickle.dumps(task))).batches[0]["number"].tolist() == [3, 4]
    with pytest.raises(ValueError, match="Counting is drawn where the loader iterates: give the StepTask its rows"):
        builder.build(StepTask(0, 1))


@pytest.mark.parametrize(
    ("drop_last", "num_samples", "count", "last"),
    [(True, 14, 3, (8, 12)), (False, 14, 4, (12, 14)), (False, 13, 4, (12, 13)), (False, 12, 3, (8, 12))],
)
def test_global_batches_cut_an_epoch(drop_last: bool, num_samples: int, count: int, last: tuple[int, int]) -> None:
    batches = GlobalBatches(size=4, drop_last=drop_last)
    assert batches.count(num_samples) == count
    assert batches.bounds(count - 1, num_samples) == last
    for step in (-1, count):
        with pytest.raises(IndexError, match=f"step {step} is outside the epoch of {count} steps"):
            batches.bounds(step, num_samples)
