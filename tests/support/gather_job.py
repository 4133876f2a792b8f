"""Run by test_accelerate: what Accelerate's gather_for_metrics gives over map-style data of every number of samples."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from accelerate import Accelerator
from map_dataset import Numbers
from rank_jobs import run_rank
from torch.utils.data import DistributedSampler

import orchdata as od

SIZE = 2


def main() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    num_ranks = accelerator.num_processes
    wrong: list[Any] = []
    for count, drop_last in itertools.product(range(1, 2 * num_ranks * SIZE + 1), (False, True)):
        data: Any = Numbers(count)
        sampler: Any = DistributedSampler(data, num_ranks, accelerator.process_index)
        expected = count - count % (num_ranks * SIZE) * drop_last
        for options in ({}, {"shuffle": True, "seed": 1}, {"sampler": sampler}):
            loader = od.hf.accelerate(od.DataLoader(data, SIZE, drop_last=drop_last, **options), accelerator)
            for epoch in range(2):
                found = [n for batch in loader for n in accelerator.gather_for_metrics(batch)["number"].tolist()]
                if len(found) != expected or len(set(found)) != expected:
                    wrong.append([count, drop_last, list(options), epoch, found])
    plain = [len(batch["number"]) for batch in od.DataLoader(Numbers(4 * num_ranks + 1), 2 * SIZE)]
    uneven = torch.arange(accelerator.process_index + 1)
    try:
        accelerator.gather_for_metrics(uneven)
        error = ""
    except ValueError as caught:
        error = str(caught)
    whole = [int(item) for item in accelerator.gather_for_metrics(uneven, use_gather_object=True)]
    return {"wrong": wrong, "plain": plain, "error": error, "whole": whole}


if __name__ == "__main__":
    run_rank(main)
