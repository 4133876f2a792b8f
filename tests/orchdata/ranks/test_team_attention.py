"""Attention over teams, over gloo: one job for each number of ranks runs every case, and tests read what it found."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_jobs import run_ranks
from team_attention_job import CASES, Case, Model, train
from team_attention_job import __file__ as JOB
from teams_job import RECIPE, loader

import orchdata as od

pytestmark = [pytest.mark.usefixtures("same_cache"), pytest.mark.slow]
UNHURRIED = pytest.mark.timeout(1200)
ranks = pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=UNHURRIED)])


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> str:
    """Chats of four turns, in which answers are learned."""
    rng, rows = np.random.default_rng(0), []
    for n in [200, 150, 120, 90, 60, *range(3, 30)]:
        said = ["".join(map(chr, rng.integers(97, 123, n))) for _ in range(4)]
        turns = [{"role": role, "content": each} for role, each in zip(("user", "assistant") * 2, said, strict=True)]
        rows.append(json.dumps({"messages": turns, "n": n}) + "\n")
    path = tmp_path_factory.mktemp("chats") / "a.jsonl"
    path.write_text("".join(rows))
    od.ShardDataset(str(path), RECIPE).index()
    return str(path)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, chats: str) -> Any:
    texts = tmp_path_factory.mktemp("texts") / "a.jsonl"
    texts.write_text("".join(json.dumps({"text": "ab" * n, "n": n}) + "\n" for n in [1000, 150, *range(3, 15)]))
    od.ShardDataset(str(texts), RECIPE).index()

    @functools.cache
    def results(num_ranks: int) -> list[dict[str, Any]]:
        return run_ranks(JOB, str(texts), chats, num_ranks=num_ranks, folder=tmp_path_factory.mktemp("ranks"))

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
@pytest.mark.parametrize("way", ["", "fsdp2", "ddp"])
def test_a_llama_trains_slices_of_its_loader_as_one_rank_trains_the_whole(found: Any, way: str, num_ranks: int) -> None:
    for each in (results[f"Llama {way}"] for results in found(num_ranks)):
        assert each["distance"] < 1e-12 and max(each["sizes"]) == num_ranks
        assert "call od.hf.share_attention(model, loader) first" in each["refused"]


@ranks
def test_answers_of_packed_chats_are_trained_as_on_one_rank(found: Any, num_ranks: int) -> None:
    for each in (results["chats"] for results in found(num_ranks)):
        assert each["distance"] < 1e-12 and max(each["sizes"]) == num_ranks and 0.3 < each["learned"] < 0.7


@UNHURRIED
def test_a_killed_run_goes_on_with_other_ranks(chats: str, tmp_path: Path) -> None:
    run_ranks(JOB, chats, tmp_path, "killed", num_ranks=4, folder=tmp_path, lost=range(4))
    before = [row for rank in range(4) for row in json.loads((tmp_path / f"{rank}.json").read_text())]
    alone = Model(Case())
    wanted = tokens_and_labels(train(alone, loader(chats, (0, 1), balance="global", shuffle=True), None))
    assert set(wanted[0].values()) == {1} and len({sample[1:4] for sample in wanted[0]}) == 64
    weights = torch.cat([each.detach().flatten() for each in alone.parameters()])
    for num_ranks in (2, 6):
        after = run_ranks(JOB, chats, tmp_path, "resumed", num_ranks=num_ranks, folder=tmp_path)
        rows = [row for rank in after for row in rank["rows"]]
        assert {row[0] for row in before} == {0, 1} and max(size for row in rows for size in row[3]) == min(
            num_ranks, 4
        )
        assert tokens_and_labels(before + rows) == wanted
        for rank in after:
            assert (
                torch.tensor(rank["weights"], dtype=weights.dtype) - weights
            ).abs().max() < 1e-12 * weights.abs().max()


def tokens_and_labels(rows: Iterable[Any]) -> tuple[Counter[Any], Counter[int]]:
    """How often each token of each sample was trained in a step, and how many labels counted in it."""
    tokens, labels = Counter[Any](), Counter[int]()
    for step, samples, counted, _ in rows:
        tokens.update((step, *sample, at) for *sample, first, stop in samples for at in range(first, stop))
        labels[step] += counted
    return tokens, labels


@pytest.mark.parametrize("num_ranks", [2, 4])
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
