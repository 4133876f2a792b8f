"""Map-style data on two ranks: one draw for all, and DistributedSamplers taken over (shared_draws_job.py)."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import shared_draws_job
import torch
from rank_jobs import run_ranks
from shared_draws_job import DATA, OPTIONS

import orchdata as od

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(shared_draws_job.__file__, num_ranks=2, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["default", "group", "generator", "costs"])
def test_rank_0_draws_for_all_and_a_state_holds_what_it_drew(ranks: Ranks, name: str) -> None:
    left, right = (rank[name] for rank in ranks)
    assert left["state"] == right["state"] and left["state"]["step"] == 2
    orders = []
    for one, other in zip(left["epochs"], right["epochs"], strict=True):
        batches = [sorted(mine + theirs) for mine, theirs in zip(one, other, strict=True)]
        assert sorted(chain(*batches)) == list(DATA) and [len(batch) for batch in batches] == [6, 6, 6, 3]
        orders.append(batches)
    assert orders[0] != orders[1]
    for rank in (left, right):
        assert rank["resumed"] == rank["epochs"][1]


def test_global_batches_are_those_of_one_rank_with_rank_0s_generator(ranks: Ranks) -> None:
    torch.manual_seed(5)
    alone = [sorted(batch.tolist()) for batch in od.DataLoader(DATA, batch_size=6, shuffle=True)]
    left, right = (rank["default"]["epochs"][0] for rank in ranks)
    assert [sorted(mine + theirs) for mine, theirs in zip(left, right, strict=True)] == alone


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_a_matching_distributed_sampler_gives_what_it_gives_with_torchs_loader(ranks: Ranks, number: int) -> None:
    for rank, found in enumerate(ranks):
        ours, theirs = found["taken over"][number]
        length = ours.pop(1)
        assert length == theirs.pop(1)
        for mine, torchs in zip(ours, theirs, strict=True):
            assert mine[:-1] == torchs[:-1]
            # torch repeats a sample to make the shares of 21 equal; here a share is one smaller, which is counted.
            kept = torchs[-1] if OPTIONS[number][2] or rank == 0 else torchs[-1][:-1]
            assert mine[-1] == kept


def test_a_sampler_of_other_ranks_or_data_is_refused_with_the_difference(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks):
        replicas, other_rank, data, random, listed = found["refused"]
        assert "DistributedSampler has num_replicas=4, and this loader's is 2" in replicas
        assert f"DistributedSampler has rank={1 - rank}, and this loader's is {rank}" in other_rank
        assert "DistributedSampler has another data set" in data
        assert "sharded twice" in random and "sharded twice" in listed
