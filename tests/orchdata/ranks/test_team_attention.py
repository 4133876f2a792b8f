"""Attention over teams, over gloo: one job for each number of ranks runs every case, and tests read what it found."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import run_ranks
from team_attention_job import CASES
from team_attention_job import __file__ as JOB
from teams_job import RECIPE

import orchdata as od
from orchdata.ranks.team_attention import key_heads

pytestmark = pytest.mark.usefixtures("same_cache")
ranks = pytest.mark.parametrize("num_ranks", [2, 4])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Any:
    texts = tmp_path_factory.mktemp("texts") / "a.jsonl"
    texts.write_text("".join(json.dumps({"text": "ab" * n, "n": n}) + "\n" for n in [1600, 150, *range(3, 25)]))
    od.ShardDataset(str(texts), RECIPE).index()

    @functools.cache
    def results(num_ranks: int) -> list[dict[str, Any]]:
        return run_ranks(JOB, str(texts), num_ranks=num_ranks, folder=tmp_path_factory.mktemp("ranks"))

    return results


@ranks
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(found: Any, case: str, num_ranks: int) -> None:
    assert max(each[case] for each in found(num_ranks)) < 1e-12


@ranks
def test_a_fault_would_be_seen(found: Any, num_ranks: int) -> None:
    for name, distance in found(num_ranks)[0]["controls"].items():
        assert distance > 1e-3, name


@ranks
@pytest.mark.parametrize("way", ["", "checkpointed", "fsdp2"])
def test_a_llama_trains_slices_of_its_loader_as_one_rank_trains_the_whole(found: Any, way: str, num_ranks: int) -> None:
    for each in (results[f"Llama {way}"] for results in found(num_ranks)):
        assert each["distance"] < 1e-12 and max(each["sizes"]) == num_ranks
        assert "call od.hf.share_attention(model, loader) first" in each["refused"]


@ranks
def test_what_cannot_be_shared_is_refused_on_every_rank(found: Any, num_ranks: int) -> None:
    says = {
        "heads": ["2 ranks cannot share 3 query heads", "No team works"],
        "no teams": ["no teams in this batch"],
        "a loader without teams": ["a loader that shares sequences"],
        "(rank, size)": ["dp=mesh or a group, not dp=(rank, size)"],
    }
    if num_ranks == 4:
        says |= {
            "heads": ["4 ranks cannot share 5 query heads", "od.Teams(largest=2)"],
            "pipeline": ["the mesh's dim pp"],
            "groups of some": ["different numbers of process groups", "before dist.new_group for some"],
        }
    for rank, results in enumerate(found(num_ranks)):
        for name, parts in says.items():
            assert all(part in results["refusals"][name] for part in parts), results["refusals"][name]
        assert "no attention over teams was used" in results["forgotten"]
        if num_ranks == 4:  # ranks that differ in the tensors' dim alone have groups apart
            assert results["refusals"]["over tp"] == [rank % 2, rank % 2 + 2]


def test_heads_are_shared_out_evenly() -> None:
    assert key_heads(28, 4, 2) == [0, 1, 2, 3]
    assert key_heads(28, 4, 8)[12:16] == [1, 1, 2, 2]  # heads 12 to 15, of which 7 share one
    assert key_heads(4, 2, 4) == [0, 0, 1, 1]
