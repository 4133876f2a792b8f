"""Samplers are drawn where the loader iterates: once an epoch, when it begins; a step's rows travel in its task."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from map_dataset import Numbers

import orchdata as od
from orchdata.engines.pickling import pickle_spec
from orchdata.order.sampler import SamplerDraws
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
    assert [batch["number"].tolist() for batch in batches] == [[3, 4], [5]]  # what its own was
    assert sampler.draws == 2


def test_iterations_of_one_epoch_share_its_draw() -> None:
    draws = SamplerDraws(Counting(), batched=False)
    first = draws.draw(0)
    assert draws.draw(0) is first
    draws.draw(1)
    assert draws.draw(0) is first  # still held
    del first
    assert draws.draw(0).rows(0, 2).tolist() == [1, 2]  # the last one
    draws.draw(1)
    assert draws.draw(0).rows(0, 2).tolist() == [4, 5]  # neither held nor the last: drawn anew


def test_another_process_gets_the_rows_and_never_the_sampler() -> None:
    loader = od.DataLoader(Numbers(9), batch_size=2, sampler=Counting())
    spec = pickle_spec(loader._prepared.spec)
    assert b"Counting" in spec and b"draws" not in spec  # its name, for errors
    task = loader._prepared.epoch_tasks(0)(1)
    assert task.rows is not None and task.rows.tolist() == [3, 4]
    builder = pickle.loads(spec).open()
    assert builder.build(pickle.loads(pickle.dumps(task))).batches[0]["number"].tolist() == [3, 4]
    with pytest.raises(ValueError, match="Counting is drawn where the loader iterates: give the StepTask its rows"):
        builder.build(StepTask(0, 1))


@pytest.mark.parametrize(("drop_last", "count", "last"), [(True, 3, (8, 12)), (False, 4, (12, 14))])
def test_global_batches_cut_an_epoch(drop_last: bool, count: int, last: tuple[int, int]) -> None:
    batches = GlobalBatches(size=4, drop_last=drop_last)
    assert batches.count(14) == count
    assert batches.bounds(count - 1, 14) == last
    for step in (-1, count):
        with pytest.raises(IndexError, match=f"step {step} is outside the epoch of {count} steps"):
            batches.bounds(step, 14)
