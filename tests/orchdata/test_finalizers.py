"""Finalizers: one that the collector runs, in any thread, waits for nothing, and what it found is ended."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from map_dataset import Numbers
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import orchdata as od
from orchdata.engines.engine import Engine, InlineEngine, ThreadPool
from orchdata.engines.supervisor import Supervisor
from orchdata.finalizers import Ending, wait_for_finalizers

OURS = "orchdata finalizers"


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(40)


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leave_in_a_cycle(items: Any) -> None:
    """Leave an iteration to the collector, as an exception in a variable of its frame does."""
    iterator = iter(items)
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)


def collected() -> None:
    thread = threading.Thread(target=gc.collect, name="collects", daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the collector waits"
    wait_for_finalizers()


def threads_of(monkeypatch: pytest.MonkeyPatch, kind: Any, name: str) -> set[str]:
    """The threads that call a method."""
    seen: set[str] = set()
    method = getattr(kind, name)

    def recorded(self: Any, *arguments: Any, **named: Any) -> Any:
        seen.add(threading.current_thread().name)
        return method(self, *arguments, **named)

    monkeypatch.setattr(kind, name, recorded)
    return seen


@pytest.mark.parametrize(
    ("data", "options", "kind", "end"),
    [
        (Numbers(40), {"num_threads": 2, "cost": [1] * 40}, ThreadPool, "close"),
        (Numbers(40), {"num_workers": 1, "cost": [1] * 40}, Supervisor, "stop"),
        (Numbers(40), {"num_workers": 1}, _MultiProcessingDataLoaderIter, "_shutdown_workers"),
        (Counting(), {"num_workers": 1}, _MultiProcessingDataLoaderIter, "_shutdown_workers"),
        (
            Counting(),
            {"num_workers": 1, "persistent_workers": True},
            _MultiProcessingDataLoaderIter,
            "_shutdown_workers",
        ),
    ],
    ids=["threads", "processes", "torch's processes", "of an iterable", "of an iterable, kept"],
)
def test_the_collector_ends_no_engine_itself(
    data: Any, options: Any, kind: Any, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = od.DataLoader(data, batch_size=2, **options)
    seen = threads_of(monkeypatch, kind, end)
    leave_in_a_cycle(loader)
    collected()
    assert seen == {OURS}

    # Not even where it goes on only after our thread has done its part.
    seen.clear()
    soon = Ending.soon
    with monkeypatch.context() as patch:
        patch.setattr(Ending, "soon", lambda ending: (soon(ending), wait_for_finalizers(60)))
        leave_in_a_cycle(loader)
        collected()
    assert seen == {OURS}

    seen.clear()
    for _ in loader:
        break
    assert seen == {"MainThread"}  # `break` waits
    assert OURS not in {thread.name for thread in threading.enumerate()}


class Waiting(Engine):
    """Ends once the thread that collects goes on, as Ray's calls do in a callback of Ray."""

    depth = 1

    def __init__(self, spec: Any) -> None:
        self._inline = InlineEngine(spec.open())

    def submit(self, task: Any) -> Any:
        return self._inline.submit(task)

    def close(self) -> None:
        ended.append(goes_on.wait(20))


ended: list[bool] = []
goes_on = threading.Event()


def test_an_engine_that_ends_with_the_collecting_thread_is_no_deadlock() -> None:
    engine = SimpleNamespace(open=lambda spec, run: Waiting(spec))
    leave_in_a_cycle(od.DataLoader(Numbers(8), batch_size=2, num_workers=1, engine=engine))
    gc.collect()
    goes_on.set()
    wait_for_finalizers()
    assert ended == [True]
