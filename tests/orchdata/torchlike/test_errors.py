"""Errors on the way: torch's types, at the same place, with workers and without."""

from __future__ import annotations

import _thread
import gc
import multiprocessing
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any

import pytest
import torch
from map_dataset import Numbers
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

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


@pytest.mark.slow_cases("True")
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


@pytest.mark.slow_cases("<lambda>3")
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


# Iterations that meet an error, Ctrl-C, or a changed sampler continue as torch's loader does.


THREADS = {"num_threads": 2, "cost": [1] * 8}
FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}


class Failing(Dataset[int]):
    """Items 3 and 8 cannot be read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> int:
        if number in (3, 8):
            raise OSError(f"item {number}")
        return number


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class FailingStream(IterableDataset[int]):
    """Its iterator fails at 3 and 8, and goes on."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        self.number = 0
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number in (3, 8):
            raise OSError(f"item {self.number}")
        if self.number > 12:
            raise StopIteration
        return self.number


def outcomes(iterator: Iterator[Any], most: int = 40) -> list[Any]:
    """Each batch, or the type of the error in its place, up to the end."""
    given: list[Any] = []
    for _ in range(most):
        try:
            given.append(next(iterator))
        except StopIteration:
            return given
        except Exception as error:
            given.append(type(error).__name__)
    raise AssertionError(f"no end after {most} calls")


@pytest.mark.parametrize("data", [Failing, FailingStream])
@pytest.mark.parametrize("options", [{}, FORKED], ids=["inline", "workers"])
@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_an_iteration_continues_after_the_error_of_an_item(data: Any, options: Any, batch_size: int | None) -> None:
    options = {"batch_size": batch_size, "collate_fn": list if batch_size else None} | options
    ours, theirs = (outcomes(iter(loader(data(), **options))) for loader in (od.DataLoader, DataLoader))
    assert ours == theirs and ours.count("OSError") >= 2


class Interrupted(Dataset[int]):
    """Ctrl-C comes while item 4 is read for the first time."""

    def __init__(self) -> None:
        self.has_come = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        if number == 4 and not self.has_come:
            self.has_come = True
            raise KeyboardInterrupt
        return number


def test_ctrl_c_inline_is_as_with_torch() -> None:
    given = []
    for loader in (od.DataLoader, DataLoader):
        iterator = iter(loader(Interrupted(), batch_size=2, collate_fn=list))
        first = list(islice(iterator, 2))
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        given.append([first, list(iterator)])
    assert given[0] == given[1] == [[[0, 1], [2, 3]], [[6, 7]]]


class InterruptedSampler(list[int]):
    """Ctrl-C comes while it is asked for its third item."""

    def __iter__(self) -> Iterator[int]:
        yield from islice(super().__iter__(), 2)
        raise KeyboardInterrupt


def test_ctrl_c_while_a_step_is_drawn_does_not_look_like_the_end_of_the_epoch() -> None:
    iterator = iter(od.DataLoader(range(6), sampler=InterruptedSampler(range(6)), collate_fn=list))
    assert list(islice(iterator, 2)) == [[0], [1]]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="ended with KeyboardInterrupt"):
        next(iterator)


class Slow(Dataset[int]):
    """Item 2 comes once `free` is set."""

    def __init__(self) -> None:
        self.free = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> int:
        if number == 2:
            assert self.free.wait(120)
        return number


def kill() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


# A signal that comes just as a wait begins does not end the wait: nor does `interrupt_main`.
@pytest.mark.parametrize(
    ("options", "interrupt"),
    [({"num_threads": 1, "cost": [1] * 6}, _thread.interrupt_main), (FORKED, kill)],
    ids=["threads", "workers"],
)
def test_ctrl_c_while_a_step_is_awaited_loses_nothing(options: Any, interrupt: Callable[[], None]) -> None:
    data = Slow()
    iterator = iter(od.DataLoader(data, batch_size=1, collate_fn=list, **options))
    given = list(islice(iterator, 2))
    came = threading.Timer(0.2, interrupt)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            came.start()
            next(iterator)
        data.free.set()
        assert given + list(iterator) == [[number] for number in range(6)]
    finally:
        came.join()  # or it would come where the previous handler ends pytest
        signal.signal(signal.SIGINT, previous)


def other_size(loader: Any) -> None:
    loader.batch_sampler.batch_size = 4


def drops_last(loader: Any) -> None:
    loader.batch_sampler.batch_size = 4
    loader.batch_sampler.drop_last = True


def other_sampler(loader: Any) -> None:
    loader.batch_sampler.sampler = [5, 3, 1]


def other_batch_sampler(loader: Any) -> None:
    object.__setattr__(loader, "batch_sampler", BatchSampler(RandomSampler(range(9)), 4, False))


class Repeating:
    """timm's and ultralytics' way: the same batch sampler, for ever."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def repeating(loader: Any) -> None:
    object.__setattr__(loader, "batch_sampler", Repeating(loader.batch_sampler))


CHANGES = [other_size, drops_last, other_sampler, other_batch_sampler, repeating]


@pytest.mark.slow_cases("workers")
@pytest.mark.parametrize(
    ("shuffle", "options"), [(False, {}), (True, {}), (True, FORKED)], ids=["in order", "inline", "workers"]
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_sampler_that_is_changed_in_the_run_is_what_is_iterated(
    shuffle: bool, change: Callable[[Any], None], options: dict[str, Any]
) -> None:
    given = []
    for loader in (od.DataLoader, DataLoader):
        torch.manual_seed(2)
        one: Any = loader(Numbers(9), batch_size=2, shuffle=shuffle, **options)
        epochs = [[batch["number"].tolist() for batch in one]]
        change(one)
        epochs.append([batch["number"].tolist() for batch in islice(one, 7)])
        given.append([epochs, len(one)])
    assert given[0] == given[1]
    assert given[0][0][0] != given[0][0][1]  # the change was no matter of chance


@pytest.mark.slow_cases("persistent workers")
@pytest.mark.parametrize("is_left", [False, True], ids=["to the end", "left"])
@pytest.mark.parametrize(
    "options",
    [{}, THREADS, THREADS | {"persistent_workers": True}, FORKED | {"persistent_workers": True}],
    ids=["inline", "threads", "persistent threads", "persistent workers"],
)
@pytest.mark.parametrize("data", [Numbers(8), Counting()], ids=["map-style", "iterable"])
def test_a_loader_and_what_runs_for_it_end_with_its_last_reference(
    data: Any, options: Any, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))  # its loops are looked for in the frames
    if isinstance(data, IterableDataset) and "num_threads" in options:
        pytest.skip("an IterableDataset takes no threads")
    loader = od.DataLoader(data, batch_size=2, **options)
    gc.collect()
    gc.disable()
    try:
        iterator = iter(loader)
        next(iterator) if is_left else outcomes(iterator)
        runs = weakref.ref(loader._runtime)
        del loader, iterator
        assert runs() is None
    finally:
        gc.enable()
