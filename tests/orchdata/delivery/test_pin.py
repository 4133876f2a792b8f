"""Pinning as in torch's loader, in a separate thread. There is no accelerator here: tests record calls that pin."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards
from torch import Tensor

import orchdata as od
from orchdata.order.steps import StepTask


class Pinned:
    """Tensors that were pinned, and the threads that pinned them."""

    def __init__(self) -> None:
        self.tensors: set[int] = set()
        self.threads: set[threading.Thread] = set()
        self.devices: set[int] = set()

    def pin(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self.tensors.add(id(copy))
        self.threads.add(threading.current_thread())
        return copy


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pinned]:
    record = Pinned()
    for devices in (torch.accelerator, torch.cuda):  # torch 2.6 asks for CUDA
        monkeypatch.setattr(devices, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", record.devices.add)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: record.pin(tensor))
    yield record


@pytest.mark.parametrize("threads", [0, 2])
def test_a_separate_thread_pins_batches_of_shards(pinned: Pinned, tmp_path: Path, threads: int) -> None:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=10), recipe=RECIPE)
    loader = od.DataLoader(dataset, batch_size=5, num_threads=threads, pin_memory=True)
    loader._runtime.context.builder.build(StepTask(0, 0))
    assert not pinned.tensors  # not in the build
    kept = list(loader)
    for batch in kept:
        tensors = [value for value in batch.model_inputs().values() if torch.is_tensor(value)]
        assert tensors and {id(value) for value in tensors} <= pinned.tensors
    gone = weakref.ref(kept.pop(0))
    del batch
    assert gone() is None  # only the caller refers to a delivered batch
    assert len(pinned.threads) == 1 and threading.current_thread() not in pinned.threads
    assert pinned.devices == {3}  # of the thread that trains


@dataclass
class Own:
    rows: list[int]
    thread: threading.Thread | None = None

    def pin_memory(self) -> Own:
        return Own(self.rows, threading.current_thread())


class Pair(NamedTuple):
    own: Own
    tensors: dict[str, Tensor]


def collate(samples: list[dict[str, Any]]) -> Pair:
    rows = [sample["number"] for sample in samples]
    return Pair(Own(rows), {"rows": torch.tensor(rows)})


@pytest.mark.parametrize("options", [{}, {"num_threads": 2, "cost": [1] * 8}], ids=["torch's", "threads"])
def test_batches_of_a_collate_fn_are_pinned_as_torch_does(pinned: Pinned, options: Any) -> None:
    loader = od.DataLoader(Numbers(8), batch_size=4, collate_fn=collate, pin_memory=True, **options)
    for batch in loader:
        assert isinstance(batch, Pair) and batch.own.thread in pinned.threads
        assert id(batch.tensors["rows"]) in pinned.tensors
    plain = list(od.DataLoader(Numbers(8), batch_size=4, collate_fn=collate, **options))
    assert all(batch.own.thread is None for batch in plain)


class Refusing:
    def pin_memory(self) -> None:
        raise SystemExit("no memory to pin")


def test_an_error_while_pinning_fails_the_step_and_leaves_no_thread(pinned: Pinned) -> None:
    before = set(threading.enumerate())
    threads: dict[str, Any] = {"batch_size": 4, "num_threads": 2, "pin_memory": True}
    loader = od.DataLoader(Numbers(8), collate_fn=lambda samples: Refusing(), cost=[1] * 8, **threads)
    with pytest.raises(RuntimeError, match="no memory to pin"):
        next(iter(loader))
    failing = od.DataLoader(Numbers(8, bad=(0,)), cost=[1] * 8, **threads)
    with pytest.raises(OSError, match="disk on fire"):
        list(failing)
    batches = iter(od.DataLoader(Numbers(80), cost=[1] * 80, **threads))
    next(batches)
    del batches
    assert not set(threading.enumerate()) - before


def test_without_an_accelerator_pin_memory_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="pin_memory has no effect") as warned:
        loader = od.DataLoader(Numbers(8), batch_size=4, collate_fn=collate, pin_memory=True)
    assert warned[0].filename == __file__
    assert all(batch.own.thread is None for batch in loader)
