"""A modality that the library does not know, from plan to model: its arrays, tokens, positions, routes and failures.

All ranks of a step are made in this process, and what `exchange` would carry is carried by hand along their routes.
What each sample must get is written down in `own_samples`, from its bytes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import own_modalities_job
import pytest
import torch
from own_modalities import Bad, Points, Posed, Tracks, cloud, track
from own_samples import (
    COST,
    EXPECTED,
    GROUP,
    OWN,
    RECIPE,
    SAMPLES,
    STRIDE,
    carry,
    delivered,
    differ,
    encoded,
    features_of,
    loader,
    token_rows,
    track_rows,
)
from rank_jobs import run_ranks
from shard_factory import RECIPE as PLAIN
from shard_factory import chat, write_shard
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.engines.processes.message import plain, revive
from orchdata.planning.layout import Layout
from orchdata.profiling.profile import profile
from orchdata.ranks.wire import describe, read

LAYOUTS: tuple[Layout, ...] = (
    od.Packed(),
    od.Packed(positions="mrope", multiple_of=8),
    od.Padded(),
    od.Padded(encoders="padded", positions="mrope"),
)
ONE = od.Balance(scope="none")
BALANCES = {
    "joint": od.Balance(),
    "joint, microbatches": od.Balance(max_tokens=220, oversize="own"),
    "per phase": od.Balance(assignment="per_phase"),
    "per phase, microbatches": od.Balance(
        assignment="per_phase", max_tokens={"llm": 260, "points": 120, "tracks": 130}, oversize="own"
    ),
}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("mixed") / "mixed.tar", SAMPLES)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["packed", "packed mrope", "padded", "padded all mrope"])
@pytest.mark.parametrize("balance", BALANCES)
def test_every_sample_gets_its_own(shard: str, balance: str, layout: Layout, num_ranks: int) -> None:
    balancing = BALANCES[balance]
    if layout == od.Padded(encoders="padded", positions="mrope") and balancing.max_tokens:
        balancing = replace(balancing, max_tokens=260)  # padding of encoders is not planned
    options = {"balance": balancing, "collate_fn": layout}
    steps = [list(loader(shard, rank, num_ranks, **options)) for rank in range(num_ranks)]
    assert differ(delivered(steps), EXPECTED, mrope=layout.positions == "mrope") == []
    assert ("microbatches" in balance) == any(batch.num_microbatches > 1 for batch in steps[0])
    if num_ranks > 1 and "per phase" in balance:
        for name in OWN:
            routes = [batch.route(name) for batches in steps for batch in batches]
            assert any(int(route.send_rows.sum() - route.send_rows[route.rank]) for route in routes)


def test_what_is_another_samples_would_be_seen(shard: str) -> None:
    """Guards the comparison above."""
    received = delivered([list(loader(shard, balance=ONE))])
    assert differ(received, EXPECTED, mrope=False) == []
    clouds, tracks = ([key for key in received if int(key[1:]) % 5 == kind] for kind in (1, 2))
    received[clouds[0]].features["points"] = received[clouds[0]].features["points"].flip(0)
    received[tracks[0]].features["tracks"] = received[tracks[1]].features["tracks"]
    received[clouds[1]].labels[-1] = -100
    received[clouds[2]].mrope[1] = received[clouds[2]].mrope[1][::-1]
    assert sorted(differ(received, EXPECTED, mrope=False)) == sorted([*clouds[:3], tracks[0]])


def test_threads_build_the_same(shard: str) -> None:
    one = delivered([list(loader(shard, num_threads=2, balance=BALANCES["per phase"]))])
    assert differ(one, EXPECTED, mrope=False) == []


# The batch's face


def test_a_batch_speaks_of_them_by_name(shard: str) -> None:
    batch = next(iter(loader(shard, 0, 3, balance=BALANCES["per phase"])))
    assert list(batch.media) == ["image", "audio", "points", "tracks"]
    assert batch.plan.parts.keys() == {"image", "audio", "points", "tracks"}
    inputs = batch.model_inputs()
    for name, arrays in (("points", {"points"}), ("tracks", {"values", "times"})):
        part = batch.media[name]
        assert set(part.arrays) == arrays
        assert all(inputs[f"{name}_{array}"] is part.arrays[array] for array in arrays)
        assert inputs[f"{name}_cu_seqlens"] is part.cu_seqlens and inputs[f"{name}_max_seqlen"] == part.max_seqlen
        assert inputs[f"{name}_positions"] is batch.llm.media_positions[name]
        assert inputs[f"{name}_route"] is batch.route(name)
        assert getattr(batch.llm, f"{name}_positions") is inputs[f"{name}_positions"]
    assert batch.media["tracks"].times.shape == (int(batch.media["tracks"].cu_seqlens[-1]),)
    with pytest.raises(AttributeError, match="no 'colors'; its arrays are points"):
        batch.media["points"].colors  # noqa: B018
    moved = batch.to("cpu")
    assert torch.equal(moved.media["tracks"].times, batch.media["tracks"].times)
    padded = next(iter(loader(shard, collate_fn=od.Padded(encoders="padded")))).model_inputs()
    assert padded["tracks_mask"].shape == padded["tracks_times"].shape == padded["tracks_values"].shape[:2]
    assert {"points_token_places", "points_mask"} <= padded.keys()


def test_merge_puts_features_where_they_belong_and_asks_for_all(shard: str) -> None:
    batch = next(iter(loader(shard, balance=ONE)))
    embeds = torch.zeros(*batch.llm.input_ids.shape, 5)
    features = {name: torch.full((part.num_tokens, 5), 1.0 + n) for n, (name, part) in enumerate(batch.media.items())}
    merged = batch.merge(embeds, features)
    ids = batch.llm.input_ids
    for number, token_id in enumerate((256, 257, 0, 7)):
        assert (merged[ids == token_id] == 1 + number).all() and (ids == token_id).any()
    assert (merged[(ids > 7) & (ids < 256)] == 0).all()
    with pytest.raises(ValueError, match="the batch has points, but no features of it were given"):
        batch.merge(embeds, {name: rows for name, rows in features.items() if name != "points"})
    with pytest.raises(ValueError, match="features of 'lidar' were given"):
        batch.merge(embeds, features | {"lidar": features["points"]})
    with pytest.raises(ValueError, match="tracks tokens, the features have"):
        batch.merge(embeds, features | {"tracks": features["tracks"][1:].repeat(2, 1)})


def test_costs_decide_who_gets_what(tmp_path: Path) -> None:
    samples = [{"__key__": f"s{n}", "npy": cloud(80 if n in (0, 1, 4, 5) else 4, n), "txt": b"text"} for n in range(8)]
    shard = write_shard(tmp_path / "a.tar", samples)
    recipe = od.Recipe(points=Points())
    cost = od.CostModel(points=od.PhaseCost(1.0), llm=od.PhaseCost(0.001))
    options: dict[str, Any] = {"recipe": recipe, "global_batch_size": 8, "cost": cost}
    plan = next(iter(loader(shard, 0, 4, **options))).plan
    in_turn = next(iter(loader(shard, 0, 4, balance=ONE, **options))).plan
    unit = int(plan.loads("points").sum()) // 336
    assert (plan.loads("points") / unit).tolist() == [84] * 4
    assert (in_turn.loads("points") / unit).tolist() == [160, 160, 8, 8]
    with pytest.raises(ValueError, match="the cost model names phase 'tracks', and the recipe has no modality"):
        loader(shard, **options | {"cost": COST})
    with pytest.raises(ValueError, match="names phase 'points'"):
        loader(shard, **options | {"recipe": od.Recipe()})


@pytest.mark.parametrize("layout", [od.Packed(), od.Padded(encoders="padded")], ids=["packed", "padded"])
@pytest.mark.parametrize("balance", ["joint", "per phase"])
def test_a_rank_that_has_none_gets_a_dummy(tmp_path: Path, layout: Layout, balance: str) -> None:
    samples = [{"__key__": "a", "npy": cloud(7)}, {"__key__": "b", "txt": b"text"}, {"__key__": "c", "txt": b"more"}]
    shard = write_shard(tmp_path / "a.tar", samples)
    options = {"global_batch_size": 3, "balance": BALANCES[balance], "collate_fn": layout}
    batches = [next(iter(loader(shard, rank, 3, **options))) for rank in range(3)]
    apart = balance == "per phase"  # a dummy's features then stay where they are
    assert sorted(batch.media["points"].num_tokens for batch in batches) == ([0, 0, 2] if apart else [1, 1, 2])
    for batch in batches:
        assert batch.media["tracks"].num_tokens == (not apart)  # of the cost model, though no sample has one
        for name, array, row in (("points", "points", (3,)), ("tracks", "values", (2,)), ("tracks", "times", ())):
            part = batch.media[name]
            if part.num_tokens == 2:
                continue
            assert part.arrays[array].shape == ((1, *row) if part.mask is None else (1, 1, *row))
            assert not part.arrays[array].any() and part.cu_seqlens.tolist() == [0, 1]
            missing = (name, batch.sample_ids[0][1]) != ("points", "a")
            assert (name in batch.llm.dummies) == missing
            at = batch.llm.media_positions[name]
            assert len(at) == (2 if not missing else 0 if apart else 1)
            if missing:  # in a last sequence without loss, which is of no sample
                assert len(batch.llm.cu_seqlens) == len(batch.sample_ids) + 2
                ends = batch.llm.cu_seqlens.tolist()
                last = slice(ends[-2], ends[-1])
                assert ends[-1] - ends[-2] == len(batch.llm.dummies)
                if layout == od.Packed():
                    token_ids = [RECIPE.slots[each].token_id for each in batch.llm.dummies]
                    assert batch.llm.input_ids[last].tolist() == token_ids
                    assert batch.llm.labels[last].tolist() == [-100] * len(token_ids)
        weight = torch.zeros(4, requires_grad=True)
        features = {
            name: part.arrays[next(iter(part.arrays))].double().reshape(-1, 1)[:1].expand(max(1, part.num_tokens), 4)
            * weight
            for name, part in batch.media.items()
        }
        if not batch.routes:
            batch.merge(torch.zeros(*batch.llm.input_ids.shape, 4), features).sum().backward()
            assert weight.grad is not None


@pytest.mark.parametrize("encoders", ["packed", "padded"])
def test_all_that_a_modality_may_define_is_used(tmp_path: Path, encoders: Any) -> None:
    lengths = [5, 2, 9]
    samples = [{"__key__": f"s{n}", "posed": track(n, n), "txt": b"a"} for n in lengths]
    shard = write_shard(tmp_path / "a.tar", [*samples, {"__key__": "none", "txt": b"text"}])
    recipe = od.Recipe(image=PLAIN.image, posed=Posed())  # its extent is as wide
    options = {"recipe": recipe, "cost": None, "balance": ONE, "collate_fn": od.Padded(encoders=encoders)}
    batch, dummy = loader(shard, global_batch_size=3, **options)
    posed_part = batch.media["posed"]
    assert (
        posed_part.lengths.tolist() == lengths
        and posed_part.num_tokens == 9
        and posed_part.cu_seqlens.tolist() == [0, 5, 7, 16]
    )
    assert posed_part.pose.tolist() == [[[n, n], [n, n]] for n in lengths] and posed_part.pose.dtype == torch.uint8
    rows = posed_part.values[posed_part.mask] if encoders == "padded" else posed_part.values
    expected = [np.frombuffer(track(n, n), "<f4", 2 * n, 8 + 8 * n).reshape(n, 2) for n in lengths]
    assert np.array_equal(rows.numpy(), np.concatenate(expected))
    assert {"posed_values", "posed_pose", "posed_lengths"} <= batch.model_inputs().keys()
    posed_part = dummy.media["posed"]
    assert posed_part.lengths.tolist() == [2] and posed_part.pose.shape == (1, 2, 2) and not posed_part.pose.any()
    assert posed_part.values.shape == ((1, 2, 2) if encoders == "padded" else (2, 2)) and posed_part.num_tokens == 3
    (sample, *_), _ = loader(shard, global_batch_size=3, **options | {"collate_fn": list})
    (part,) = [part for part in sample.parts if hasattr(part, "modality")]
    assert part.values.shape == (5, 2) and part.pose.tolist() == [[[5, 5], [5, 5]]] and part.lengths == 5
    # 9 values, and the memory that decoding takes besides them: 9 * (8 + 1,000) bytes.
    for most, bad in ((9 * 1_008, []), (9 * 1_008 - 1, ["s9"])):
        limited = od.Recipe(posed=Posed(), limits=od.Limits(sample_decoded_bytes=most))
        index = od.ShardDataset(shard, recipe=limited).index()
        assert [index.failure(int(row)).key for row in index.bad_rows()] == bad


def test_steps_travel_to_peers_as_they_are(shard: str) -> None:
    batches = list(loader(shard, 0, 3, balance=BALANCES["per phase"]))
    message = describe([plain(batch, batch.plan) for batch in batches])
    received = np.empty(message.num_bytes, np.uint8)
    message.write_to(received)
    for batch, again in zip(batches, [revive(each, batches[0].plan) for each in read(received)], strict=True):
        for name, part in batch.media.items():
            for array, tensor in part.arrays.items():
                theirs = again.media[name].arrays[array]
                assert theirs.dtype == tensor.dtype and torch.equal(theirs, tensor)
            assert torch.equal(again.llm.media_positions[name], batch.llm.media_positions[name])
            assert np.array_equal(again.route(name).send_rows, batch.route(name).send_rows)


def test_a_state_of_other_parameters_is_refused(shard: str) -> None:
    one = loader(shard)
    next(iter(one))
    state = one.state_dict()
    loader(shard).load_state_dict(state)
    other = loader(
        shard, recipe=od.Recipe(image=PLAIN.image, audio=PLAIN.audio, points=Points(group=5), tracks=Tracks())
    )
    with pytest.raises(od.StateError, match="points"):
        other.load_state_dict(state)


def test_the_command_line_profiles_them(shard: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_recipe.py").write_text(
        "import orchdata as od\nfrom own_modalities import Points, Tracks\n"
        "recipe = od.Recipe(points=Points(), tracks=Tracks())\n"
        "cost = od.CostModel(points=od.PhaseCost(1.0), llm=od.PhaseCost(1.0))\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["profile", shard, "--recipe", "my_recipe:recipe", "--cost", "my_recipe:cost", "--ranks", "2"]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0, printed.output
    assert "points" in printed.output and "tracks *" not in printed.output and "tracks" in printed.output
    profiled = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert profiled["balanced_phases"] == ["points", "llm"] and profiled["modalities"]["points"]["parts"] == 15


def test_a_profile_counts_them_by_name(shard: str) -> None:
    index = od.ShardDataset(shard, recipe=RECIPE).index()
    profiled = profile(index, cost=COST, ranks=(2, 4), batch_size=2)
    assert set(profiled.modalities) == {"text", "image", "audio", "points", "tracks"}
    assert set(profiled.phases) == {"image", "audio", "points", "tracks", "llm"}
    for name, key in (("points", "npy"), ("tracks", "track")):
        having = [sample for sample in SAMPLES if any(field.endswith(key) for field in sample)]
        tokens = sum(len(expected.features.get(name, ())) for expected in EXPECTED.values())
        assert (profiled.modalities[name].samples, profiled.modalities[name].tokens) == (len(having), tokens)
        assert profiled.phases[name].samples == len(having)
        assert all(name in scale.phases for scale in profiled.scales)
    assert "points" in json.dumps(profiled.to_dict())


# What fails


REASONS = {
    "raises": "cannot be decoded: KeyError: 'odd'",
    "damaged": "not a .npy file: ",
    "shape": "decoded to points of shape (12, 3), the index says (13, 3): index again",
    "dtype": "decoded to float64, arrays() says float32",
    "names": "decode() and arrays() differ in clouds, points",
    "too many": "decode() and arrays() differ in colors",
    "none": "cannot be decoded: AttributeError: ",
}


@pytest.fixture(scope="module")
def bad_shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [{"__key__": f"s{n}", "npy": cloud(5 + n, n), "track": track(4 + n), "txt": b"text"} for n in range(12)]
    return write_shard(tmp_path_factory.mktemp("bad") / "bad.tar", samples)


@pytest.mark.parametrize("balance", ["joint", "per phase"])
@pytest.mark.parametrize("kind", REASONS)
def test_a_part_that_fails_is_named_and_nothing_else_is_lost(bad_shard: str, kind: str, balance: str) -> None:
    recipe = od.Recipe(points=Bad(kind=kind), tracks=Tracks())
    options = {"recipe": recipe, "balance": BALANCES[balance], "global_batch_size": 12, "cost": None}
    loaders = [
        loader(bad_shard, rank, 2, on_error=od.ErrorPolicy("skip", max_failures=None), **options) for rank in range(2)
    ]
    steps = [list(each) for each in loaders]
    failures = [failure for each in loaders for failure in each.stats()["failures"]["samples"]]
    (failure,) = failures  # each rank has its own, and the one that failed is one rank's
    assert (failure["key"], failure["field"]) == ("s8", "npy") and failure["shard"] == bad_shard
    assert failure["reason"].startswith(REASONS[kind])
    kept = {key for batches in steps for batch in batches for _, key in batch.sample_ids}
    per_phase = balance == "per phase"
    assert kept == {f"s{n}" for n in range(12) if per_phase or n != 8}
    for batches in zip(*steps, strict=True):
        rows = [encoded(batch, "points")[: batch.media["points"].num_tokens] for batch in batches]
        owners = [batch.llm.input_ids[batch.llm.media_positions["points"]] for batch in batches]
        if per_phase:
            valid = torch.cat([batch.media["points"].valid for batch in batches])
            assert int((~valid).sum()) == 1
            rows = carry(rows, [batch.route("points") for batch in batches])
        assert [len(each) for each in rows] == [len(each) for each in owners]
        for batch, mine in zip(batches, rows, strict=True):
            starts = batch.llm.cu_seqlens.tolist()
            for row, (_, key) in enumerate(batch.sample_ids):
                where = batch.llm.media_positions["points"]
                here = (where >= starts[row]) & (where < starts[row + 1])
                number = int(key[1:])
                expected = features_of("npy", cloud(5 + number, number))
                assert torch.equal(mine[here], torch.zeros_like(expected) if number == 8 else expected)
    with pytest.raises(od.DataError) as raised:
        for rank in range(2):
            list(loader(bad_shard, rank, 2, **options))
    error = raised.value
    assert (error.shard, error.key, error.field) == (bad_shard, "s8", "npy")
    assert error.reason.startswith(REASONS[kind])


@pytest.mark.parametrize("balance", ["joint", "per phase"])
def test_a_damaged_cloud_is_found_when_it_is_counted(tmp_path: Path, balance: str) -> None:
    samples = [{"__key__": f"s{n}", "npy": cloud(9)[: -4 if n == 2 else None], "txt": b"text"} for n in range(4)]
    shard = write_shard(tmp_path / "a.tar", samples)
    one = loader(
        shard, on_error=od.ErrorPolicy("skip", max_failures=None), balance=BALANCES[balance], global_batch_size=4
    )
    assert sorted(key for batch in one for _, key in batch.sample_ids) == ["s0", "s1", "s3"]
    (failure,) = one.stats()["failures"]["samples"]
    assert (failure["key"], failure["field"]) == ("s2", "npy") and failure["reason"].startswith("not a .npy file")
    with pytest.raises(od.DataError, match="'s2', field 'npy'"):
        loader(shard, balance=BALANCES[balance])


class Opened:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickled_cloud_is_never_unpickled(tmp_path: Path) -> None:
    out = io.BytesIO()
    mark = tmp_path / "unpickled"
    np.save(out, np.array([Opened(mark)], object), allow_pickle=True)
    shard = write_shard(tmp_path / "a.tar", [{"__key__": "a", "npy": out.getvalue()}, {"__key__": "b", "txt": b"b"}])
    one = loader(shard, on_error=od.ErrorPolicy("skip", max_failures=None))
    assert [key for batch in one for _, key in batch.sample_ids] == ["b"]
    assert "allow_pickle=False" in one.stats()["failures"]["samples"][0]["reason"]
    assert not mark.exists()
    np.load(io.BytesIO(out.getvalue()), allow_pickle=True)
    assert mark.exists()  # or the above would say nothing


@dataclass(frozen=True, kw_only=True)
class Bent(Tracks):
    def rope(self, size: od.PartSize) -> Any:
        return np.zeros((3, 1), np.int64)


def test_positions_of_another_shape_are_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [{"__key__": "a", "track": track(8)}])
    one = loader(shard, recipe=od.Recipe(tracks=Bent()), cost=None, collate_fn=od.Packed(positions="mrope"))
    with pytest.raises(ValueError, match=r"rope\(\) of tracks gave shape \(3, 1\) for .*, not \(3, 4\)"):
        list(one)


# Fields that are kept


def test_a_collate_fn_gets_parts_of_any_modality(shard: str) -> None:
    samples: Sequence[od.Sample] = [sample for batch in loader(shard, collate_fn=list, balance=ONE) for sample in batch]
    for sample in samples:
        for name, per_token in (("points", GROUP), ("tracks", STRIDE)):
            rows = []
            for part in sample.parts:
                if getattr(part, "modality", None) != name:
                    continue
                values = part.points if name == "points" else None
                values = (
                    torch.from_numpy(values)
                    if values is not None
                    else track_rows(part.tensor("values"), part.tensor("times"))
                )
                rows.append(token_rows(values.double(), per_token))
            expected = EXPECTED[sample.key].features
            assert (name in expected) == bool(rows)
            assert not rows or torch.equal(torch.cat(rows), expected[name])
    with_two = next(part for sample in samples for part in sample.parts if getattr(part, "modality", "") == "tracks")
    with pytest.raises(ValueError, match="name one of the arrays of tracks: values, times"):
        with_two.tensor()
    with pytest.raises(AttributeError, match="a part of tracks has no 'colors'"):
        with_two.colors  # noqa: B018


# Training


def training_samples() -> list[dict[str, Any]]:
    """Steps of six in which a modality is missing on one rank, on both and on none; a cloud of 13 points fails."""
    steps = ["tptbpt", "tttttt", "pppppp", "trtttt", "rbrbrr", "fptbrt", "b"]
    samples = []
    for number, kind in enumerate("".join(steps)):
        points, length = cloud(13 if kind == "f" else 14 + 5 * (number % 7), number), track(4 + number % 9, number)
        words = b"word " * (1 + number % 4)
        both = {"npy": points, "track": length, "json": chat("<track> is <points>", words.decode())}
        members: dict[str, dict[str, Any]] = {
            "t": {"txt": words},
            "p": {"npy": points, "txt": words},
            "f": {"npy": points, "txt": words},
            "r": {"0.track": length, "1.track": track(3), "txt": b"<track> and <track> " + words},
            "b": both,
        }
        samples.append({"__key__": f"{kind}{number}", **members[kind]})
    return samples


def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "train.tar", training_samples())
    od.ShardDataset(shard, recipe=own_modalities_job.RECIPE).index()
    ranks = run_ranks(own_modalities_job.__file__, shard, num_ranks=2, folder=tmp_path)
    for by_rank in ranks:
        assert by_rank["moved"] > 1e-3
        apart = {name: by_rank[name]["apart"] for name in own_modalities_job.CASES}
        assert apart.pop("without loss_scale") > 1e-5  # or the comparison would say nothing
        assert {name: distance for name, distance in apart.items() if not distance < 1e-9} == {}
    for name, case in own_modalities_job.CASES.items():
        seen = [by_rank[name] for by_rank in ranks]
        assert [failure for each in seen for failure in each["failures"]] == [["f30", "npy"]]
        assert (seen[0]["microbatches"] > 1) == case.microbatched
        assert any(each["rows_away"] for each in seen) == (case.assignment == "per_phase")
        # Dummies stood in on one rank, and on both.
        for modality in ("points", "tracks"):
            assert {0, 1, 2} == {sum(map(bool, had)) for had in zip(*[each[modality] for each in seen], strict=True)}
        assert any(not all(had) for had in zip(*[each["samples"] for each in seen], strict=True))
