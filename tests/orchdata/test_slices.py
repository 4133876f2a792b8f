"""Sequences that a loader cuts: slices of a team's members, put together, are what one rank has of whole sequences."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from digests import digest

import orchdata as od
from orchdata.batch.tensors import whole_lengths
from orchdata.building.step import StartedStep
from orchdata.order.steps import StepTask

RANKS = 4
COST = od.CostModel(llm=od.PhaseCost(1.0, 0.01))
TEAMS = od.Teams(largest=4)
RECIPE = od.Recipe(image=None, audio=None)

pytestmark = [pytest.mark.usefixtures("same_cache"), pytest.mark.filterwarnings("ignore:len")]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> str:
    """Chats of several turns: loss begins and ends inside of slices."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("chats") / "a.jsonl"
    lengths = np.minimum(rng.lognormal(3, 1.4, 60).astype(int) + 2, 900)
    lengths[0] = 2000
    rows = []
    for length in lengths.tolist():
        said = [chr(97 + int(at)) * int(rng.integers(1, length + 1)) for at in rng.integers(0, 26, 4)]
        turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
        rows.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(rows))
    od.ShardDataset(str(path), RECIPE).index()
    return str(path)


def loader(chats: str, rank: int, ranks: int = RANKS, **options: Any) -> od.DataLoader[Any]:
    """Two sources with the same chats but the longest, whose tokens count otherwise."""
    data = od.ShardDataset(chats, RECIPE)
    short = od.Source(data.filter("tokens < 3000"), loss_weight=3.0)
    mixture = od.Mixture({"one": od.Source(data), "two": short}, stop="all")
    common = {"global_batch_size": 12, "cost": COST, "balance": od.Balance(teams=TEAMS), "num_threads": 0}
    return od.DataLoader(mixture, dp=(rank, ranks), **common | options)


def steps(chats: str, **options: Any) -> list[list[list[od.Batch]]]:
    """For each step the microbatches of each rank."""
    ours = [loader(chats, rank, **options).steps() for rank in range(RANKS)]
    return [list(step) for step in zip(*ours, strict=True)]


def wholes(chats: str, layout: od.Packed) -> dict[Any, dict[str, torch.Tensor]]:
    """What a rank that has everything has of each sample, with labels shifted inside of it."""
    found = {}
    for batch in loader(chats, 0, 1, balance="global", collate_fn=layout):
        weights = batch.loss_weights
        for at, where in enumerate(batch.samples):
            llm, labels = batch.llm, batch.llm.labels[where]
            found[batch.step, batch.sample_ids[at], int(batch.sources[at])] = {
                "ids": llm.input_ids[where],
                "positions": llm.position_ids[..., where],
                "labels": torch.cat([labels[1:], labels.new_full((1,), -100)]),
                "weights": weights[where],
            }
    return found


LAYOUTS = [od.Packed(), od.Packed(multiple_of=16, positions="mrope")]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["text", "mrope"])
def test_slices_of_all_members_are_the_whole(chats: str, layout: od.Packed, accumulate: int) -> None:
    expected, sizes, differs = wholes(chats, layout), set(), {"after": 0, "borders": 0}
    for step in steps(chats, collate_fn=layout, accumulate=accumulate):
        counted, plan = 0, step[0][0].plan
        for micro in zip(*step, strict=True):
            teams = defaultdict[Any, list[tuple[od.Batch, od.Team]]](list)
            for batch in micro:
                assert batch.llm.labels is None and batch.teams[-1].rows.stop == len(batch.llm.input_ids)
                assert [team.rows.start for team in batch.teams] == [0, *(team.rows.stop for team in batch.teams[:-1])]
                counted += batch.loss_tokens
                for team in batch.teams:
                    teams[team.ranks].append((batch, team))
            for ranks, members in teams.items():
                (first, team), *_ = members
                sizes.add(team.size)
                assert [each.place for _, each in members] == list(range(len(ranks)))
                assert all(torch.equal(each.cu_seqlens, team.cu_seqlens) for _, each in members)
                whole = {
                    "ids": torch.cat([batch.llm.input_ids[each.rows] for batch, each in members]),
                    "positions": torch.cat([batch.llm.position_ids[..., each.rows] for batch, each in members], -1),
                    "labels": torch.cat([batch.llm.shift_labels[each.rows] for batch, each in members]),
                    "weights": torch.cat([batch.loss_weights[each.rows] for batch, each in members]),
                }
                borders = list(pairwise(team.cu_seqlens.tolist()))
                assert borders[-1][1] == team.size * (team.rows.stop - team.rows.start) == len(whole["ids"])
                for at, (start, stop) in zip(range(team.samples.start, team.samples.stop), borders, strict=False):
                    sample = expected[first.step, first.sample_ids[at], int(first.sources[at])]
                    for name, values in sample.items():
                        assert torch.equal(whole[name][..., start:stop], values), name
                assert (whole["labels"][borders[team.samples.stop - team.samples.start - 1][1] :] == -100).all()
                # Controls: labels that each member shifts in its slice; borders that each member's slice has.
                unshifted = F.pad(whole["labels"], (1, 0), value=-100)[:-1].chunk(team.size)
                after = torch.cat([F.pad(each[1:], (0, 1), value=-100) for each in unshifted])
                differs["after"] += team.size > 1 and not torch.equal(after, whole["labels"])
                own = [batch.llm.cu_seqlens[each.samples.start : each.samples.stop + 1] for batch, each in members]
                differs["borders"] += team.size > 1 and not torch.equal(own[0] - own[0][0], team.cu_seqlens)
        assert counted == plan.loss_tokens
    assert sizes == {1, 2, 4} and min(differs.values()) > 3


@pytest.mark.parametrize(
    "options",
    [
        {"collate_fn": od.Packed()},
        {"collate_fn": od.Packed(multiple_of=16), "accumulate": 2},
        {"collate_fn": od.Packed(multiple_of=16), "balance": od.Balance(max_tokens=1450, teams=TEAMS)},
        {"balance": od.Balance(max_tokens=1450, teams=replace(TEAMS, mixed=False))},
    ],
    ids=["plain", "accumulate", "capped", "not mixed"],
)
def test_planned_lengths_are_those_of_every_microbatch(chats: str, options: dict[str, Any]) -> None:
    shared, by_source = 0, defaultdict[str, np.ndarray](lambda: np.zeros(3, np.int64))
    for step in steps(chats, **options):
        plan = step[0][0].plan
        delivered = [[len(batch.llm.input_ids) for batch in share] for share in step]
        empty = [[not batch.sample_ids for batch in share] for share in step]
        np.testing.assert_array_equal(np.where(empty, 0, delivered), plan.microbatch_tokens)
        assert (plan.microbatch_tokens <= (options["balance"].caps["llm"] if "balance" in options else 1 << 40)).all()
        shared += int(plan.team_size.max() > 1)
        tokenized = 0
        for batch in (batch for share in step for batch in share):
            here = torch.tensor([stop > first for first, stop in batch.token_ranges], dtype=torch.bool)
            tokenized += int(whole_lengths(batch.llm, batch.teams)[here].sum()) if len(here) else 0
            for name, counts in batch.by_source().items():
                by_source[name] += list(counts.values())
        assert tokenized == plan.tokenized and sum(plan.llm_positions) <= tokenized
    assert shared > 2
    ours = [loader(chats, rank, **options) for rank in range(RANKS)]
    for _ in zip(*(each.steps() for each in ours), strict=True):
        pass
    for name, counts in ours[0].stats()["sources"].items():
        assert by_source[name].tolist() == [counts[each] for each in ("samples", "tokens", "loss_tokens")]
    assert sum(each.stats()["samples"] for each in ours) == 119


WAYS = [{"num_threads": 2}, {"num_workers": 1, "num_threads": 2, "multiprocessing_context": "fork"}]


@pytest.mark.parametrize("way", WAYS, ids=["threads", "processes"])
def test_every_engine_builds_the_same_slices(chats: str, way: dict[str, Any]) -> None:
    alone, ours = ([[list(map(digest, each)) for each in step] for step in steps(chats, **each)] for each in ({}, way))
    assert alone == ours


def test_a_member_holds_its_part_of_a_long_text(tmp_path: Path) -> None:
    length, ranks, multiple_of = 1 << 19, 32, 128
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "x" * (length - 1)}) + "\n")
    data = od.ShardDataset(str(path), RECIPE)
    data.index()
    balance = od.Balance(teams=od.Teams(largest=ranks))
    layout = od.Packed(multiple_of=multiple_of)
    given = {"global_batch_size": 1, "cost": COST, "num_threads": 0, "collate_fn": layout}
    made = od.DataLoader(data, dp=(3, ranks), balance=balance, **given)
    started = made._runtime.context.builder.start(StepTask(0, 0))
    alone = od.DataLoader(data, dp=(0, 1), **given)._runtime.context.builder.start(StepTask(0, 0))
    assert isinstance(started, StartedStep) and started.plan.team_size.tolist() == [ranks]
    a_row = 4 * 8 * multiple_of  # ids, labels, positions, ids of text alone
    assert started.num_bytes <= alone.num_bytes // ranks + a_row
    (batch,) = next(iter(made.steps()))
    (team,) = batch.teams
    held = [*vars(batch.llm).values(), *vars(batch.text).values(), team.cu_seqlens]
    num_bytes = sum(each.nbytes for each in held if isinstance(each, torch.Tensor))
    assert num_bytes <= alone.num_bytes // ranks + a_row + 64


def test_inputs_that_no_attention_used_are_an_error(chats: str) -> None:
    ours = loader(chats, 0)
    batches = iter(ours)
    inputs = next(batches).to("cpu").model_inputs()
    assert inputs.keys() == {"input_ids", "position_ids", "shift_labels", "teams"}
    inputs["teams"][0].use.mark()
    batch, state = next(batches), ours.state_dict()
    batch.model_inputs()
    for act in (batches.__next__, ours.state_dict, iter(ours).__next__):
        with pytest.raises(RuntimeError, match=r"step 1, microbatch 0 were taken.*may have been applied"):
            act()
    last = loader(chats, 0)
    last.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"od\.TeamAttention"):  # at the end of the epoch
        for batch in last:
            if batch.step == len(last) - 1:
                batch.model_inputs()


def test_megatron_takes_no_slices(chats: str) -> None:
    with pytest.raises(ValueError, match=r'cut="trainer"'):
        od.megatron_packed(next(iter(loader(chats, 0))), cp_group=str)
