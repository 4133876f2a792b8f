"""What surrounds teams in a loader: usable samples on any ranks, refusals, figures, exports and the profile."""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from digests import digest
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards
from torch.utils.data import ChainDataset
from typer.testing import CliRunner

import orchdata as od
from orchdata.batch.tensors import whole_lengths
from orchdata.building.step import StartedStep
from orchdata.cli import app
from orchdata.dataset.arguments import check_teams
from orchdata.dataset.indexed import layout_costs, oversize_rows
from orchdata.order.steps import StepTask
from orchdata.runtime import stable

pytestmark = [pytest.mark.usefixtures("same_cache"), pytest.mark.filterwarnings("ignore:len")]

COST = od.CostModel(llm=od.PhaseCost(1.0, 0.01))
TEAMS = od.Teams(largest=4)
LENGTHS = [*np.random.default_rng(0).integers(20, 100, 76).tolist(), 900, 800, 700, 600]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    """Samples of so many bytes, which are their tokens."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in LENGTHS))
    dataset = od.ShardDataset(str(path))
    dataset.index()
    return dataset


def loader(dataset: Any, rank: int, ranks: int, **options: Any) -> od.DataLoader[Any]:
    common = {"global_batch_size": 16, "shuffle": True, "cost": COST, "balance": od.Balance(teams=TEAMS)}
    return od.DataLoader(dataset, dp=(rank, ranks), num_threads=0, **common | options)


def test_usable_samples_length_and_state_are_those_of_any_number_of_ranks(dataset: od.ShardDataset) -> None:
    # 4 x 210 rounded down to 200 tokens: 900 is too long for a team of 4, and 800 needs all four.
    capped = {
        "balance": od.Balance(max_tokens=210, teams=TEAMS, oversize="drop"),
        "collate_fn": od.Packed(multiple_of=100),
    }
    plain, dropping = loader(dataset, 0, 1, balance="global"), loader(dataset, 0, 4, **capped)
    for ranks in (1, 2, 3, 4, 6, 8):
        shared = loader(dataset, ranks - 1, ranks)
        assert (len(shared), shared.state_dict()) == (len(plain), plain.state_dict())
        if ranks < 4:
            with pytest.raises(ValueError, match=f"a team of 4 ranks .* there are {ranks}: use at least 4 ranks"):
                loader(dataset, 0, ranks, **capped)
        else:
            again = loader(dataset, ranks - 1, ranks, **capped)
            assert (len(again), again.state_dict()) == (len(dropping), dropping.state_dict())
    assert dropping.state_dict()["rows"][0]["num_usable"] == plain.state_dict()["rows"][0]["num_usable"] - 1
    with pytest.raises(ValueError, match="225 llm positions a rank, even in the largest team of 4"):
        loader(dataset, 0, 4, balance=od.Balance(max_tokens=210, teams=TEAMS))
    loader(dataset, 0, 1, balance=od.Balance(max_tokens=210, teams=TEAMS, oversize="own"))


def test_samples_with_media_keep_the_limit_that_they_have_without_teams(tmp_path: Path) -> None:
    index = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=40), RECIPE).index()
    costs, none = layout_costs(index, None, od.Packed()), np.zeros(0, np.int64)
    row = np.arange(index.num_rows)
    llm, media = costs.positions("llm", row), sum(costs.positions(phase, row) for phase in costs.phases[:-1])
    cap = int(np.median(llm)) // 3
    limit = np.where(media > 0, cap, 4 * cap)
    above = oversize_rows(costs, od.Balance(max_tokens=cap, teams=TEAMS, oversize="drop"), none)["llm"]
    np.testing.assert_array_equal(above, np.flatnonzero(llm > limit))
    whole = oversize_rows(costs, od.Balance(max_tokens=cap, oversize="drop"), none)["llm"]
    assert 0 < len(above) < len(whole)


def test_sizes_without_a_cost_are_not_taken(dataset: od.ShardDataset) -> None:
    teams = od.Teams(largest=16, cut="trainer", cost={2: od.PhaseCost(0.6, 0.006), 16: od.PhaseCost(0.1, 0.001)})
    made = loader(dataset, 0, 6, balance=od.Balance(max_tokens=200, teams=teams, oversize="own"))
    plans = [made.plan_at(0, step) for step in range(len(made))]
    above = np.concatenate([plan.team_size[plan.llm_positions > 200] for plan in plans])
    assert above.tolist() == [2] * 4  # the largest team that 6 ranks have
    with pytest.raises(ValueError, match="a team of 16 ranks .* there are 6"):
        loader(dataset, 0, 6, balance=od.Balance(max_tokens=250, teams=teams))


def test_a_step_that_shares_nothing_has_the_plan_of_whole_samples(dataset: od.ShardDataset) -> None:
    dear = od.Teams(largest=4, cut="trainer", gain=0.0, per_token=1e3)
    balances = od.Balance(max_tokens=1000), od.Balance(max_tokens=1000, teams=dear)
    whole, shared = (loader(dataset, 0, 4, balance=balance, global_batch_size=1) for balance in balances)
    assert all(whole.plan_at(0, step).hash == shared.plan_at(0, step).hash for step in range(len(whole)))


@pytest.mark.parametrize("later", [2, 6])
def test_a_run_on_four_ranks_goes_on_on_others(later: int, dataset: od.ShardDataset) -> None:
    ours = [loader(dataset, rank, 4) for rank in range(4)]
    steps, sizes = [], Counter[int]()
    for count in (2, 3):
        streams = [iter(each.steps()) for each in ours]
        for _ in range(count):
            shares = [next(stream) for stream in streams]
            plan = shares[0][0].plan
            keys = Counter(key for share in shares for batch in share for key in batch.sample_ids)
            assert sorted(keys.values()) == sorted(plan.team_size)  # each member has the sample
            steps.append(set(keys))
            sizes.update(plan.team_size.tolist())
        state = ours[0].state_dict()
        assert all(each.state_dict() == state for each in ours)
        ours = [loader(dataset, rank, later) for rank in range(later)]
        for each in ours:
            each.load_state_dict(json.loads(json.dumps(state)))
    assert sum(map(len, steps)) == len(set[Any]().union(*steps)) == len(LENGTHS)
    assert max(sizes) > 1  # something was shared


@pytest.mark.parametrize("options", [{}, {"global_batch_size": None, "global_batch_tokens": 2000}], ids=["n", "tokens"])
def test_global_batches_of_a_mixture_are_those_without_teams(options: dict[str, Any], dataset: od.ShardDataset) -> None:
    mixture = od.Mixture({"long": od.Source(dataset[70:]), "short": od.Source(dataset[:70])})
    shared, whole = loader(mixture, 1, 4, **options), loader(mixture, 0, 1, balance="none", **options)
    assert len(shared) == len(whole)
    plans = [(shared.plan_at(0, step), whole.plan_at(0, step)) for step in range(len(shared))]
    assert all(np.array_equal(one.row, other.row) and one.loss_tokens == other.loss_tokens for one, other in plans)
    assert any(one.team_size.max() > 1 for one, _ in plans)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"collate_fn": od.Padded()}, r"od\.Padded.*use od\.Packed\(\)"),
    ({"collate_fn": od.Packed(length=1000)}, r"length.*leave length out"),
    ({"collate_fn": od.Packed(length=1000, concatenate=True)}, r"concatenate.*leave length out"),
    ({"collate_fn": len}, r"collate_fn of yours.*use od\.Packed"),
    ({"accumulate": 2, "balance": od.Balance(teams=od.Teams(largest=4, cut="trainer", mixed=False))}, "max_tokens"),
    ({"dataset": Numbers(20), "cost": None}, r"is for an od\.ShardDataset"),
    ({"dataset": ChainDataset([]), "cost": None, "shuffle": None}, r"is for an od\.ShardDataset"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_a_loader_refuses_says_what_to_do(options: dict[str, Any], said: str, dataset: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match=said):
        loader(options.get("dataset", dataset), 0, 1, **{name: options[name] for name in options if name != "dataset"})


def test_what_others_refuse_says_what_to_do() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("dp", "cp"), size=(4, 2).__getitem__)
    with pytest.raises(ValueError, match="its dim cp: make these ranks data-parallel"):
        check_teams(od.Balance(teams=TEAMS), None, dp=od.DataParallel(mesh))
    peers = SimpleNamespace(mesh_dim_names=("dp", "tp"), size=(4, 2).__getitem__)
    with pytest.raises(ValueError, match="encoder_dims"):
        check_teams(od.Balance(teams=TEAMS), None, dp=od.DataParallel(peers, encoder_dims=("tp",)))
    check_teams(od.Balance(teams=TEAMS), None, dp=SimpleNamespace(mesh_dim_names=("dp", "cp"), size=lambda dim: 1))
    with pytest.raises(ValueError, match="for a DataLoader"):
        od.post_balance([[1]], cost=int, balance=od.Balance(teams=TEAMS))
    for name, value in {"scope": "none", "equal_count": True, "max_samples": 9}.items():
        with pytest.raises(ValueError, match=f"Balance.teams.* alone, got {value!r}: leave one"):
            od.Balance(teams=TEAMS, **{name: value})  # type: ignore[arg-type]


def test_ranks_compare_teams_and_send_them() -> None:
    balance = od.Balance(teams=od.Teams(largest=4, cut="trainer", per_token={2: 1, 4: 2.0}))
    assert pickle.loads(pickle.dumps(balance)) == balance
    others = [{}, {"gain": 0.1}, {"per_token": {2: 1.0, 4: 3.0}}, {"cost": {4: od.PhaseCost(1.0)}}]
    described = [json.dumps(stable(od.Balance(teams=od.Teams(largest=4, cut="trainer", **each)))) for each in others]
    assert len({json.dumps(stable(balance)), *described}) == 1 + len(others)


def test_figures_and_exports_know_the_teams(dataset: od.ShardDataset, tmp_path: Path) -> None:
    made = loader(dataset, 0, 4, balance=od.Balance(max_tokens=200, teams=TEAMS, oversize="own"))
    plans = [batches[0].plan for batches in made.steps()]
    size, length = (np.concatenate([getattr(plan, name) for plan in plans]) for name in ("team_size", "llm_positions"))
    shares = {str(each): length[size == each].sum() / sum(LENGTHS) for each in np.unique(size[size > 1])}
    above = int(np.count_nonzero(-(-length // size) > 200))
    assert made.stats()["teams"] == {"share": shares, "above_cap": above}
    assert above and shares and loader(dataset, 0, 4, balance="global").stats()["teams"] == {}
    made.export_plan(tmp_path / "plan.arrow")
    table = pa.ipc.open_file(tmp_path / "plan.arrow").read_all()
    assert table["team_size"].to_pylist() == [size for plan in plans for size in plan.team_size.tolist()]


def test_the_profile_shows_what_teams_bring(dataset: od.ShardDataset) -> None:
    given: dict[str, Any] = {"cost": COST, "ranks": (8,), "batch_size": 2, "steps": 5, "most_steps": 5}
    plain, shared = dataset.profile(**given), dataset.profile(**given, balance=od.Balance(teams=TEAMS))
    settings = shared.main_scale.settings
    assert settings["teams"].waiting < settings["joint"].waiting / 2
    others = {name: its.waiting for name, its in settings.items() if name != "teams"}
    assert others == {name: its.waiting for name, its in plain.main_scale.settings.items()}
    assert "balance=od.Balance(teams=od.Teams(largest=4))" in shared.call
    assert any("of ranks (their communication not counted) brings that to" in said for said in shared.summary)
    # Members read whole texts, which is much from 2 tokens a token of the step on.
    pairs = dataset.profile(**given, balance=od.Balance(teams=od.Teams(largest=2)))
    ratios = [each.main_scale.settings["teams"].tokenized for each in (pairs, shared)]
    assert 1 < ratios[0] < 2 < ratios[1]
    assert [any("That is much" in said for said in each.summary) for each in (pairs, shared)] == [False, True]
    # Without them they are named as the remedy, except where they are refused.
    assert any("--teams 8" in said for said in plain.summary) and "teams" not in plain.main_scale.settings
    refused = dataset.profile(**given, layout=od.Padded())
    assert not any("--teams" in said for said in (*shared.summary, *refused.summary))
    # A team of 8 holds every sample within its cap, and 7 ranks have none.
    capped = od.Balance(max_tokens=120, teams=od.Teams(largest=8, cut="trainer"))
    few = dataset.profile(**given | {"ranks": (7,)}, balance=capped)
    assert "teams" not in few.main_scale.settings and any("so few ranks" in said for said in few.summary)


@pytest.mark.slow
def test_the_command_plans_teams(dataset: od.ShardDataset, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    common = ["profile", *dataset.urls, "--ranks", "8", "--batch-size", "2", "--teams", "4"]
    shown = CliRunner().invoke(app, [*common, "--html", str(page), "--samples", "0"])
    assert shown.exit_code == 0 and "shared by teams" in shown.stdout and "shared by teams" in page.read_text()
    as_json = json.loads(CliRunner().invoke(app, [*common, "--json"]).stdout)
    assert as_json["teams"] == "od.Teams(largest=4)" and "teams" in as_json["scales"][0]["settings"]
    assert "use od.Packed()" in CliRunner().invoke(app, [*common, "--padded"]).stderr


# Sequences that a loader cuts: slices of a team's members, put together, are what one rank has of whole sequences.


RANKS = 4
TEXT_ALONE = od.Recipe(image=None, audio=None)


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
    od.ShardDataset(str(path), TEXT_ALONE).index()
    return str(path)


def mixed_loader(chats: str, rank: int, ranks: int = RANKS, **options: Any) -> od.DataLoader[Any]:
    """Two sources with the same chats but the longest, whose tokens count otherwise."""
    data = od.ShardDataset(chats, TEXT_ALONE)
    short = od.Source(data.filter("tokens < 3000"), loss_weight=3.0)
    mixture = od.Mixture({"one": od.Source(data), "two": short}, stop="all")
    common = {"global_batch_size": 12, "cost": COST, "balance": od.Balance(teams=TEAMS), "num_threads": 0}
    return od.DataLoader(mixture, dp=(rank, ranks), **common | options)


def steps(chats: str, **options: Any) -> list[list[list[od.Batch]]]:
    """For each step the microbatches of each rank."""
    ours = [mixed_loader(chats, rank, **options).steps() for rank in range(RANKS)]
    return [list(step) for step in zip(*ours, strict=True)]


def wholes(chats: str, layout: od.Packed) -> dict[Any, dict[str, torch.Tensor]]:
    """What a rank that has everything has of each sample, with labels shifted inside of it."""
    found = {}
    for batch in mixed_loader(chats, 0, 1, balance="global", collate_fn=layout):
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


@pytest.mark.slow_cases("mrope-2")
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


@pytest.mark.slow_cases("accumulate", "capped", "not mixed")
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
    ours = [mixed_loader(chats, rank, **options) for rank in range(RANKS)]
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
    data = od.ShardDataset(str(path), TEXT_ALONE)
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
    ours = mixed_loader(chats, 0)
    batches = iter(ours)
    inputs = next(batches).to("cpu").model_inputs()
    assert inputs.keys() == {"input_ids", "position_ids", "shift_labels", "teams"}
    inputs["teams"][0].use.mark()
    batch, state = next(batches), ours.state_dict()
    batch.model_inputs()
    for act in (batches.__next__, ours.state_dict, iter(ours).__next__):
        with pytest.raises(RuntimeError, match=r"step 1, microbatch 0 were taken.*may have been applied"):
            act()
    last = mixed_loader(chats, 0)
    last.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"od\.TeamAttention"):  # at the end of the epoch
        for batch in last:
            if batch.step == len(last) - 1:
                batch.model_inputs()


def test_megatron_takes_no_slices(chats: str) -> None:
    with pytest.raises(ValueError, match=r'cut="trainer"'):
        od.megatron_packed(next(iter(mixed_loader(chats, 0))), cp_group=str)
