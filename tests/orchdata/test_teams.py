"""Batches of steps in which ranks share long texts: each member has the whole text, and one of them counts it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_jobs import run_ranks
from teams_job import RECIPE, SIZE, loader
from teams_job import __file__ as JOB

import orchdata as od

RANKS = 4
PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron_torchtitan.md"

pytestmark = pytest.mark.usefixtures("same_cache")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> str:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("texts") / "a.jsonl"
    lengths = np.minimum(rng.lognormal(3, 1.4, 60).astype(int) + 2, 900)
    lengths[0] = 2000  # shared in the first step
    path.write_text("".join(json.dumps({"text": "ab" * n, "n": int(n)}) + "\n" for n in lengths))
    od.ShardDataset(str(path), RECIPE).index()
    return str(path)


def loaders(texts: str, **options: Any) -> list[od.DataLoader]:
    return [loader(texts, (rank, RANKS), **options) for rank in range(RANKS)]


def steps(texts: str, multiple_of: int = 1, **options: Any) -> list[tuple[od.Batch, ...]]:
    """The batches of all ranks, a step each."""
    return list(zip(*loaders(texts, collate_fn=od.Packed(multiple_of=multiple_of), **options), strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_members_have_whole_texts_and_the_first_counts_them(texts: str, accumulate: int) -> None:
    ours, sizes = loaders(texts, accumulate=accumulate), set()
    by_source = {name: np.zeros(3, np.int64) for name in ("one", "two")}
    for shares in zip(*(each.steps() for each in ours), strict=True):
        plan, every = shares[0][0].plan, [batch for share in shares for batch in share]
        sizes |= set(plan.team_size.tolist())
        assert sum(int(batch.is_counted.sum()) for batch in every) == len(plan.row)
        assert sum(batch.loss_tokens for batch in every) == plan.loss_tokens == every[0].global_loss_tokens
        for name, counts in (each for batch in every for each in batch.by_source().items()):
            by_source[name] += list(counts.values())
        for rank, batch in enumerate(every):
            rank, stop = rank // accumulate, 0
            for team in batch.teams:
                assert team.samples.start == stop and team.ranks[0] % team.size == 0 and team.valid.all()
                assert (len(team.ranks), team.ranks[team.place]) == (team.size, rank)
                stop, borders = team.samples.stop, batch.llm.cu_seqlens[team.samples.start : team.samples.stop + 1]
                assert torch.equal(team.cu_seqlens, borders - team.rows.start) and borders[-1] == team.rows.stop
                first = shares[team.ranks[0]][batch.microbatch]
                (other,) = [each for each in first.teams if each.size == team.size]
                assert first.sample_ids[other.samples] == batch.sample_ids[team.samples]
                assert torch.equal(first.llm.labels[other.rows], batch.llm.labels[team.rows])
            assert batch.is_counted[stop:].all()
    assert sizes == {1, 2, 4} and plan.num_microbatches == accumulate
    assert sum(each.stats()["samples"] for each in ours) == 119
    for name, counts in ours[0].stats()["sources"].items():
        assert by_source[name].tolist() == [counts[each] for each in ("samples", "tokens", "loss_tokens")]


def test_a_blank_text_is_counted_once(texts: str) -> None:
    plan = loader(texts, (0, RANKS)).plan_at(0, 0)
    at = int(plan.team_size.argmax())
    key = od.ShardDataset(texts, RECIPE).index().key(int(plan.row[at]) % 60)
    ours = loaders(texts, on_error=od.ErrorPolicy(blank=[(plan.sources[plan.source[at]], "a.jsonl", key)]))
    for batches in zip(*ours, strict=True):
        trained = sum(batch.loss_tokens for batch in batches)
        assert trained == batches[0].plan.loss_tokens or batches[0].step == 0
    assert sorted(each.stats()["failures"]["blank"] for each in ours) == [0, 0, 0, 1]


def test_no_plain_model_gets_a_team_and_ranks_without_a_group_skip_nothing(texts: str) -> None:
    (batches, *_) = steps(texts)
    assert any(batch.teams for batch in batches)
    for batch in batches:
        for each in (batch, replace(batch, inputs=object())) if batch.teams else ():
            for media in (True, False):
                with pytest.raises(ValueError, match=r"od\.megatron_packed"):
                    each.model_inputs(media=media)
        assert batch.teams or batch.model_inputs()
    with pytest.raises(ValueError, match=r"dp=\(0, 4\) has no process group"):
        loader(texts, (0, RANKS), on_error="skip")


@pytest.mark.slow
def test_megatron_packs_one_team(texts: str) -> None:
    ours, mixed = (steps(texts, 8, global_batch_size=size)[0] for size in (1, SIZE))
    for batch in ours:
        given = od.megatron_packed(batch, cp_group="group of {}".format)["packed_seq_params"]
        assert (given["local_cp_size"], given["cp_group"]) == (4, "group of 4")
    with pytest.raises(ValueError, match=r"teams of \[4\].*cp_group=function_of_size"):
        od.megatron_packed(ours[0])
    with pytest.raises(ValueError, match=r"teams of \[\d, .*od\.Teams\(mixed=False\)"):
        od.megatron_packed(mixed[0], cp_group=str)
    whole = replace(mixed[0], teams=())
    assert od.megatron_packed(whole, cp_group=str)["packed_seq_params"]["local_cp_size"] == 1
    assert "cp_group" not in od.megatron_packed(whole)["packed_seq_params"]
    with pytest.raises(ValueError, match="multiple of 8; 2 x Teams.largest"):
        for batches in steps(texts, 2, global_batch_size=1):
            od.megatron_packed(batches[0], cp_group=str)


def test_the_code_of_the_page_counts_each_label_once(texts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/megatron_torchtitan.md, with stand-ins for Megatron, and for the cut of Transformer Engine."""

    def cut(borders: torch.Tensor, tokens: int, size: int, place: int) -> torch.Tensor:
        pieces = [torch.arange(*each).chunk(2 * size) for each in pairwise(borders.tolist())]
        return torch.cat([each for of in pieces for each in (of[place], of[-1 - place])]).int()

    group = SimpleNamespace(rank=lambda: batch.teams[0].place)
    state = SimpleNamespace(get_hybrid_data_context_parallel_groups=lambda group_size: group)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", SimpleNamespace(thd_get_partitioned_indices=cut))
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(parallel_state=state))
    names: dict[str, Any] = {"od": od, "PackedSeqParams": SimpleNamespace}
    exec(PAGE.read_text().split("```python\n")[2].partition("```")[0], names)
    for batches in steps(texts, 8, global_batch_size=1):
        counted = 0
        for batch in batches:
            losses, count = names["forward_step"](iter([batch]), lambda tokens, *_, labels, **__: labels.float() ** 0)
            loss, number, _ = count(losses)
            counted += int(number)
            assert int(loss) == int(number) and losses.shape[1] * RANKS == len(batch.llm.labels)
        assert counted == batch.plan.loss_tokens


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4])
def ranks(request: pytest.FixtureRequest, texts: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    kept = {"ORCHDATA_CACHE": os.environ["ORCHDATA_CACHE"]}
    return run_ranks(JOB, texts, num_ranks=request.param, folder=tmp_path_factory.mktemp("job"), environment=kept)


def test_members_that_count_their_part_have_the_gradients_of_one_rank(ranks: list[dict[str, Any]]) -> None:
    assert max(rank["apart"] for rank in ranks) < 1e-12
    assert min(rank["control"] for rank in ranks) > 1e-3, "a text that two members count must show"


@pytest.mark.parametrize("cut", ["failing", "slices failing"])
def test_what_fails_on_one_member_is_blank_on_all_and_counted_once(cut: str, ranks: list[dict[str, Any]]) -> None:
    found = [rank[cut] for rank in ranks]
    (shared, whole), (first, home) = found[0]["failed"], found[0]["first"]
    holders = [rank for rank, each in enumerate(found) if shared in each["places"]]
    assert len(holders) > 1
    for rank, each in enumerate(found):
        failed = [at for at in each["places"] if at in (shared, whole)]
        assert each["blank"] == [failed] * 3 and each["invalid"] == (rank in holders)
        assert each["count"] == (rank == first + 1) + (rank == home)
        error = "TooManyFailures" if each["count"] else "RuntimeError: other ranks gave up"
        assert ranks[rank]["none allowed"]["error"].startswith(error)
    assert sum(each["samples"] for each in found) == SIZE


def test_peers_get_by_broadcast_what_they_would_read(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks if len(ranks) == 4 else ():
        assert rank["broadcast"] == rank["read"]
        assert rank["read"][1][0], "each rank has a text that failed"
