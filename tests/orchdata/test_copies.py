"""Copies of a loader: the same arguments, the same position, and nothing that runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")

COPIES = [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=20), RECIPE)
    dataset.index()
    return dataset


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


def nothing(loader: od.DataLoader) -> None:
    pass


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


def at_the_end(loader: od.DataLoader) -> None:
    contents(loader, 1)


def at_a_set_epoch(loader: od.DataLoader) -> None:
    loader.set_epoch(7)


MOVES = [nothing, inside_an_epoch, broken_off, at_the_end, at_a_set_epoch]
WAYS = [(move, copy.deepcopy) for move in MOVES] + [(broken_off, copied) for copied in COPIES]


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
    if make is drawn and copied is copy.copy:  # both draw from one generator
        loader = copy.deepcopy(loader)
        assert contents(other) == contents(loader)
        return
    first = contents(other)
    assert first == contents(loader)
    stays = move is nothing or (make is drawn and move is at_a_set_epoch)
    assert stays or first != contents(make(dataset))  # the control: a new loader stands elsewhere


def test_stages_of_a_mixture_are_copied(dataset: od.ShardDataset) -> None:
    loader = mixed(dataset)
    state = stopped_after(loader, 2).state_dict()
    sources = {"a": od.Source(dataset, weight=0.1), "b": od.Source(dataset.split("train", 0.5), weight=0.9)}
    other = od.DataLoader(od.Mixture(sources, stop="all"), global_batch_size=8, shuffle=True, num_threads=0)
    other.load_state_dict(state, allow=("weights",))
    again = copy.deepcopy(other)
    assert again.state_dict() == other.state_dict() and contents(again) == contents(other)


def test_what_runs_stays_with_the_original() -> None:
    loader = od.DataLoader(Numbers(24), batch_size=4, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    other = copy.deepcopy(loader)
    assert len(other._runtime._engines.idle.processes() if other._runtime._engines.idle else []) == 0
    assert other.stats()["steps"] == 0 and loader.stats()["steps"] == 1
    assert next(batch["number"].tolist() for batch in iterator) == [4, 5, 6, 7]
    assert contents(other, 1)[0] == [0, 1, 2, 3]
    for each in (loader, other):
        each.close()


def _iterated(number: int, loader: od.DataLoader, queue: Any) -> None:
    queue.put((number, contents(loader, 1)))


def test_a_loader_is_an_argument_of_spawned_processes(dataset: od.ShardDataset) -> None:
    loader = od.DataLoader(dataset, global_batch_size=8, shuffle=True, num_workers=1)
    broken_off(loader)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_iterated, (loader, queue), nprocs=1)
    assert queue.get() == (0, contents(loader, 1))


def test_a_subclass_keeps_its_arguments_and_attributes() -> None:
    class Sorted(od.DataLoader):
        def __init__(self, count: int) -> None:
            super().__init__(Numbers(count), batch_size=4)
            self.count = count

    loader = Sorted(8)
    loader.note = ["mine"]
    other = copy.deepcopy(loader)
    assert type(other) is Sorted and other.count == 8 and other.note == ["mine"] and other.note is not loader.note
    assert repr(loader) == "Sorted(Numbers of 8, batch_size=4; rank 0 of 1; epoch 0, step 0)"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_has_the_sampler_as_the_user_changed_it(copied: Callable[[od.DataLoader], od.DataLoader]) -> None:
    loader = od.DataLoader(list(range(10)), batch_size=2, collate_fn=list)
    loader.batch_sampler.batch_size = 4
    other = copied(loader)
    assert len(other) == 3 and list(other) == list(loader)
    object.__setattr__(loader, "batch_sampler", [[1], [2, 3]])
    assert len(loader.steps()) == 2
    other = copied(loader)
    assert len(other) == 2 and list(other) == list(loader) == [[1], [2, 3]]


def test_copies_that_would_be_wrong_are_refused(dataset: od.ShardDataset) -> None:
    with pytest.raises(TypeError, match="iterator for sampler="):
        copy.deepcopy(od.DataLoader(Numbers(8), sampler=iter(range(8))))
    loader = od.DataLoader(dataset, global_batch_size=8, num_threads=0, dp=(1, 2))
    assert copy.deepcopy(loader)._runtime.rank.rank == 1
    loader._given["dp"] = object()  # as of a process group
    with pytest.raises(TypeError, match="over a process group or mesh cannot be copied"):
        copy.deepcopy(loader)


def test_a_copy_on_another_rank_is_refused(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(sharded(dataset))
    from orchdata import dataloader
    from orchdata.ranks.parallel import Rank

    monkeypatch.setattr(dataloader, "resolve_rank", lambda dp: Rank(1, 2))
    with pytest.raises(ValueError, match="copied on rank 0 of 1, and this process is rank 1 of 2"):
        pickle.loads(pickled)


def test_the_text_of_a_loader_tells_what_matters(dataset: od.ShardDataset) -> None:
    text = repr(od.DataLoader(dataset, global_batch_size=8, num_threads=2, dp=(1, 2), shuffle=True))
    assert text.startswith("DataLoader(ShardDataset(40 samples")
    assert text.endswith("shuffle=True, num_threads=2, global_batch_size=8; rank 1 of 2; epoch 0, step 0)")
    listed = repr(od.DataLoader(Numbers(1000), cost=[1] * 1000, collate_fn=len, seed=3))
    assert listed == (
        "DataLoader(Numbers of 1,000, batch_size=1, collate_fn=len, seed=3, cost=[1, 1, 1, 1, 1, 1, ...]; "
        "rank 0 of 1; epoch 0, step 0)"
    )
    assert " at 0x" not in text + listed
