"""Errors on the way: torch's types, at the same place, with workers and without."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import orchdata as od


class Broken:
    """Six items; one of them, or what is around them, is not there."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        if self.error is not None:
            raise self.error
        return torch.ones(1 + number)


class NoIterator(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return 3


class BrokenIterable(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise ZeroDivisionError
        yield


class BrokenSampler:
    def __init__(self, *given: Any) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        yield from self.given
        raise ZeroDivisionError


def fails(samples: list[Any]) -> Any:
    raise LookupError(str(len(samples)))


FIRST: dict[str, tuple[Any, dict[str, Any]]] = {
    "the data set": (Broken(OSError("disk")), {}),
    "memory": (Broken(MemoryError("7 frames too many")), {}),
    "default_collate, of other shapes": (Broken(), {"batch_size": 2}),
    "default_collate, of an object": ([object()], {}),
    "collate_fn": (Broken(), {"collate_fn": fails}),
    "no iterator": (NoIterator(), {}),
    "an iterable": (BrokenIterable(), {}),
    "a sampler": (Broken(), {"sampler": BrokenSampler()}),
    "a sampler that is none": (Broken(), {"sampler": 3}),
    "a batch sampler of integers": (Broken(), {"batch_sampler": [1, 2]}),
    "a key that is not there": ([1, 2], {"sampler": [7]}),
    "a key of another kind": ([1, 2], {"sampler": ["a"]}),
}


def error_of(loader: type[Any], data: Any, options: dict[str, Any]) -> BaseException:
    with pytest.raises(Exception) as raised:
        next(iter(loader(data, **options)))
    return raised.value


@pytest.mark.parametrize("name", FIRST)
def test_the_first_batch_is_refused_with_torchs_type_with_workers_and_without(name: str) -> None:
    data, options = FIRST[name]
    theirs = error_of(DataLoader, data, options)
    alone = error_of(od.DataLoader, data, options)
    worker = error_of(od.DataLoader, data, options | {"num_workers": 1, "multiprocessing_context": "fork"})
    assert type(theirs) is type(alone) is type(worker)
    assert str(alone) == str(theirs) and str(theirs) in str(worker)


def refuse(number: int) -> None:
    raise ZeroDivisionError(f"worker {number}")


@pytest.mark.parametrize("data", [[1, 2, 3], BrokenIterable()], ids=["items", "iterable"])
def test_what_worker_init_fn_raises_comes_with_the_first_batch(data: Any) -> None:
    batches = iter(od.DataLoader(data, num_workers=1, worker_init_fn=refuse, multiprocessing_context="fork"))
    with pytest.raises(ZeroDivisionError) as raised:
        next(batches)
    lines = str(raised.value).splitlines()
    assert (lines[0], lines[-1]) == (
        "Caught ZeroDivisionError in DataLoader worker process 0.",  # torch's words
        "ZeroDivisionError: worker 0",
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stop_iteration_of_an_item_does_not_end_the_epoch(num_workers: int) -> None:
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    batches = iter(od.DataLoader(Broken(StopIteration()), num_workers=num_workers, **options))
    for _ in range(6):  # torch's loader gives none, and says nothing
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(batches)
    assert next(batches, None) is None


class Refusing(Dataset[int]):
    def __init__(self, refused: set[int]) -> None:
        self.refused = refused

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> int:
        if number in self.refused:
            raise OSError(f"refused {number}")
        return number


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def refuse_batch(samples: list[int]) -> None:
    raise ValueError(f"refused {samples}")


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_caught_error_does_not_keep_the_workers_of_an_iteration(persistent_workers: bool) -> None:
    """They would run until the next collection; with persistent workers, the next iteration would start others."""
    loader = od.DataLoader(
        Refusing({2}), batch_size=2, num_workers=1, persistent_workers=persistent_workers, collate_fn=list
    )
    with no_collection():
        for _ in range(3):
            taken_with_an_error(loader)
            processes = multiprocessing.active_children()
            assert len(processes) == int(persistent_workers)
    loader.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: od.DataLoader(Refusing({2}), batch_size=2),
        lambda: od.DataLoader(Refusing(set()), batch_size=2, num_workers=1, collate_fn=refuse_batch),
        lambda: od.DataLoader(Stream(), batch_size=2, collate_fn=refuse_batch),
        lambda: od.DataLoader(Stream(), batch_size=2, collate_fn=refuse_batch, num_workers=1),
    ],
)
def test_a_caught_error_does_not_keep_the_iteration(make: Callable[[], od.DataLoader]) -> None:
    with no_collection():
        assert taken_with_an_error(make())() is None


def taken_with_an_error(loader: od.DataLoader) -> weakref.ref[Any]:
    """Take three steps, of which one or more fail. This frame, which has the iterator, is in the errors' tracebacks."""
    steps, num_errors = iter(loader), 0
    for _ in range(3):
        try:
            next(steps)
        except (OSError, ValueError):
            num_errors += 1
    assert num_errors
    return weakref.ref(steps)


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_step_that_fails_after_one_that_others_had_overtaken_is_tried_in_its_own_epoch() -> None:
    data = Refusing({10})
    loader = od.DataLoader(data, batch_size=2, collate_fn=list)
    next(iter(loader))
    state = loader.state_dict() | {"step": 5, "left": [3]}  # as in_order=False writes it
    loader.load_state_dict(state)
    steps = iter(loader)
    assert next(steps) == [6, 7]
    with pytest.raises(OSError, match="refused 10"):
        next(steps)
    data.refused.clear()
    assert list(loader) == [[10, 11]]
    assert loader.state_dict()["epoch"] == state["epoch"] + 1
