"""Copies of a loader: the same arguments, the same position, and nothing that runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from map_dataset import Numbers

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")


def sharded(dataset: od.ShardDataset) -> od.DataLoader:
    return od.DataLoader(dataset, global_batch_size=8, shuffle=True, seed=3, num_threads=0)


def seeded(dataset: od.ShardDataset) -> od.DataLoader:
    return od.DataLoader(Numbers(24), batch_size=4, shuffle=True, seed=5)


def drawn(dataset: od.ShardDataset) -> od.DataLoader:
    return od.DataLoader(Numbers(24), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))


def mixed(dataset: od.ShardDataset) -> od.DataLoader:
    sources = {"a": od.Source(dataset, weight=0.6), "b": od.Source(dataset.split("train", 0.5), weight=0.4)}
    return od.DataLoader(od.Mixture(sources, stop="all"), global_batch_size=8, shuffle=True, num_threads=0)


def contents(loader: od.DataLoader, epochs: int = 2) -> list[Any]:
    items = [item for _ in range(epochs) for item in loader]
    return [item.sample_ids if isinstance(item, od.Batch) else item["number"].tolist() for item in items]


def inside_an_epoch(loader: od.DataLoader) -> None:
    loader.load_state_dict(stopped_after(loader, 2).state_dict())


def stopped_after(loader: od.DataLoader, steps: int) -> od.DataLoader:
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    del iterator
    return loader


def broken_off(loader: od.DataLoader) -> None:
    stopped_after(loader, 2)


def at_a_set_epoch(loader: od.DataLoader) -> None:
    loader.set_epoch(7)


MOVES = [inside_an_epoch, broken_off, at_a_set_epoch]
WAYS = [(move, copy.deepcopy) for move in MOVES] + [(broken_off, lambda loader: pickle.loads(pickle.dumps(loader)))]


@pytest.mark.parametrize(("move", "copied"), WAYS)
@pytest.mark.parametrize("make", [sharded, seeded, drawn, mixed])
def test_a_copy_goes_on_as_the_original(
    dataset: od.ShardDataset,
    make: Callable[[od.ShardDataset], od.DataLoader],
    move: Callable[[od.DataLoader], None],
    copied: Callable[[od.DataLoader], od.DataLoader],
) -> None:
    loader = make(dataset)
    move(loader)
    other = copied(loader)
    if (
        make is not drawn
    ):  # a state settles what torch's generators draw for the next epoch, on the loader that is asked
        states = [each.state_dict() for each in (other, loader)]
        assert states[0] | {"base_seed": 0} == states[1] | {"base_seed": 0}
    first = contents(other)
    assert first == contents(loader)
    stays = make is drawn and move is at_a_set_epoch
    assert stays or first != contents(make(dataset))  # the control: a new loader stands elsewhere


def _iterated(number: int, loader: od.DataLoader, queue: Any) -> None:
    queue.put((number, contents(loader, 1)))


@pytest.mark.slow
def test_a_loader_is_an_argument_of_spawned_processes(dataset: od.ShardDataset) -> None:
    loader = od.DataLoader(dataset, global_batch_size=8, shuffle=True, num_workers=1)
    broken_off(loader)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_iterated, (loader, queue), nprocs=1)
    assert queue.get() == (0, contents(loader, 1))


def test_a_copy_on_another_rank_is_refused(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(sharded(dataset))
    from orchdata import dataloader
    from orchdata.ranks.parallel import Rank

    monkeypatch.setattr(dataloader, "resolve_rank", lambda dp: Rank(1, 2))
    with pytest.raises(ValueError, match="copied on rank 0 of 1, and this process is rank 1 of 2"):
        pickle.loads(pickled)


def test_copies_that_would_be_wrong_are_refused(dataset: od.ShardDataset) -> None:
    with pytest.raises(TypeError, match="iterator for sampler="):
        copy.deepcopy(od.DataLoader(Numbers(8), sampler=iter(range(8))))
    loader = od.DataLoader(dataset, global_batch_size=8, num_threads=0, dp=(1, 2))
    assert copy.deepcopy(loader)._runtime.rank.rank == 1
    loader._given["dp"] = object()  # as of a process group
    with pytest.raises(TypeError, match="over a process group or mesh cannot be copied"):
        copy.deepcopy(loader)
