"""Two ranks, whose torch generators stand elsewhere, over loaders that shuffle by them; and DistributedSamplers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_jobs import run_rank
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

import orchdata as od

DATA = range(21)


def rows(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def drawn(**options: Any) -> dict[str, Any]:
    """Two epochs, the second resumed inside by a loader of other generators."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed + dist.get_rank())
        return od.DataLoader(DATA, batch_size=3, shuffle=True, **options)

    one = make(5)
    epochs = [rows(one)]
    steps = iter(one)
    first = [next(steps).tolist(), next(steps).tolist()]
    state = one.state_dict()
    epochs.append(first + rows(steps))
    again = make(70)
    again.load_state_dict(state)
    return {"epochs": epochs, "resumed": first + rows(again), "state": state}


def taken_over(batched: bool, shuffle: bool, drop_last: bool) -> list[Any]:
    """Three epochs by our loader and by torch's, with a sampler of the same arguments each."""

    def epochs(loader: type[Any]) -> list[Any]:
        sampler: Any = DistributedSampler(DATA, shuffle=shuffle, seed=3, drop_last=drop_last)  # type: ignore[arg-type]
        options: dict[str, Any] = {"batch_size": 3, "sampler": sampler}
        if batched:
            options = {"batch_sampler": BatchSampler(sampler, 3, False)}
        one = loader(DATA, **options)
        found = [rows(one), len(one)]
        for epoch in (1, 4):
            inner = one.batch_sampler.sampler if batched else one.sampler
            inner.set_epoch(epoch)
            found.append(rows(one))
        return found

    return [epochs(od.DataLoader), epochs(DataLoader)]


def refused() -> list[str]:
    size, rank = dist.get_world_size(), dist.get_rank()
    other = list(DATA)
    samplers = [
        DistributedSampler(DATA, num_replicas=4, rank=rank),  # type: ignore[arg-type]
        DistributedSampler(DATA, num_replicas=size, rank=1 - rank),  # type: ignore[arg-type]
        DistributedSampler(other, num_replicas=size, rank=rank),  # type: ignore[arg-type]
        RandomSampler(other),
        [1, 2, 3],
    ]
    found = []
    for sampler in samplers:
        try:
            od.DataLoader(DATA, sampler=sampler)
        except ValueError as error:
            found.append(str(error))
    return found


def work() -> dict[str, Any]:
    import warnings

    warnings.simplefilter("ignore")
    world = dist.group.WORLD
    return {
        "default": drawn(),
        "group": drawn(dp=world),
        "generator": drawn(generator=torch.Generator().manual_seed(30 + dist.get_rank())),
        "costs": drawn(cost=list(range(1, 22))),
        "taken over": [taken_over(*options) for options in OPTIONS],
        "refused": refused(),
        "sampler": rows(od.DataLoader(DATA, batch_size=3, sampler=RandomSampler(DATA))),  # type: ignore[arg-type]
    }


OPTIONS = [(False, True, False), (False, False, False), (False, True, True), (True, True, True)]

if __name__ == "__main__":
    run_rank(work)
