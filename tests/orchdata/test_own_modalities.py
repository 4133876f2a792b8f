"""A modality that the library does not know, from plan to model: its arrays, tokens, positions, routes and failures."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_modalities import Bad, Cropped, Loud, Lowered, Points, Posed, Shouted, Tracks, cloud, track
from own_samples import EXPECTED, OWN, RECIPE, SAMPLES, carry, delivered, differ, encoded, features_of, loader
from shard_factory import RECIPE as PLAIN
from shard_factory import SKIP_ANY, audio, chat, jpeg, write_shard

import orchdata as od
from orchdata.planning.balance import Layout

LAYOUTS: tuple[Layout, ...] = (
    od.Packed(positions="mrope", multiple_of=8),
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=["packed mrope", "padded all mrope"])
@pytest.mark.parametrize("balance", BALANCES)
def test_every_sample_gets_its_own(shard: str, balance: str, layout: Layout) -> None:
    balancing, num_ranks = BALANCES[balance], 3
    if layout == od.Padded(encoders="padded", positions="mrope") and balancing.max_tokens:
        balancing = replace(balancing, max_tokens=260)  # padding of encoders is not planned
    options = {"balance": balancing, "collate_fn": layout}
    steps = [list(loader(shard, rank, num_ranks, **options)) for rank in range(num_ranks)]
    assert differ(delivered(steps), EXPECTED, mrope=layout.positions == "mrope") == []
    assert ("microbatches" in balance) == any(batch.num_microbatches > 1 for batch in steps[0])
    if "per phase" in balance:
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
    assert posed_part.lengths.tolist() == lengths and posed_part.num_tokens == 9
    assert posed_part.cu_seqlens.tolist() == [0, 5, 7, 16]
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


# What fails


REASONS = {
    "raises": "cannot be decoded: KeyError: 'odd'",
    "damaged": "not a .npy file: ",
    "shape": "decoded to points of shape (12, 3), the index says (13, 3): index again",
    "dtype": "decoded to float64, arrays() says float32",
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
    loaders = [loader(bad_shard, rank, 2, on_error=SKIP_ANY, **options) for rank in range(2)]
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
    one = loader(shard, on_error=SKIP_ANY)
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


# What recipes are known by: subclasses, parameters, and what no fingerprint would see.


IMAGE = {"patch_size": 8, "merge": 2, "min_tokens": 1, "max_tokens": 12, "dtype": "float32"}


SUBCLASSES: dict[str, dict[str, Any]] = {
    "image": {"image": Cropped(**IMAGE)},  # type: ignore[arg-type]
    "audio": {"audio": Loud()},
    "template": {"text": od.TextPreprocessor(template=Shouted())},
    "text": {"text": Lowered()},
}


BASES: dict[str, Any] = {"image": od.ImagePreprocessor(**IMAGE)}  # type: ignore[arg-type]


def test_subclasses_are_obeyed(tmp_path: Path) -> None:
    sample = {"jpg": jpeg(64, 32), "wav": audio(0.3), "json": chat("<image> and <audio> SO", "Be it")}
    shard = write_shard(tmp_path / "a.tar", [{"__key__": "a", **sample}])

    def only(**changed: Any) -> od.Batch:
        (batch,) = loader(shard, recipe=od.Recipe(**BASES | changed), cost=None)
        return batch

    plain = only()
    cropped = only(**SUBCLASSES["image"]).media["image"]
    assert cropped.grid_hw.tolist() == [[4, 4]] and plain.image.grid_hw.tolist() == [[4, 8]]
    assert len(cropped.patches) == 16
    left = plain.image.patches.reshape(2, 4, 4, -1)[:, :2].reshape(16, -1)  # merged tokens, row by row
    assert (cropped.patches - left).abs().mean() < 0.05 < (cropped.patches - left.flip(0)).abs().mean()
    assert torch.equal(only(**SUBCLASSES["audio"]).audio.features, plain.audio.features * 2)

    def text(batch: od.Batch) -> str:
        return bytes(batch.text.input_ids.tolist()).decode()

    assert text(plain) == "<|im_start|>user\n and  SO<|im_end|>\n<|im_start|>assistant\nBe it<|im_end|>\n"
    assert text(only(**SUBCLASSES["template"])) == "USER! and  SO<|im_end|>\nASSISTANT!Be it<|im_end|>\n"
    assert text(only(**SUBCLASSES["text"])) == text(plain).lower()
    assert (only(text=Lowered(shift=1)).text.input_ids - 1).tolist() == list(text(plain).lower().encode())


@pytest.mark.slow
def test_subclasses_have_fingerprints_of_their_own_in_every_process() -> None:
    recipes = {name: od.Recipe(**BASES | changed) for name, changed in SUBCLASSES.items()}
    recipes |= {
        "none": od.Recipe(**BASES),
        "image, other parameter": od.Recipe(image=Cropped(half=False, **IMAGE)),  # type: ignore[arg-type]
        "text, other parameter": od.Recipe(**BASES, text=Lowered(shift=1)),
        "template, other parameter": od.Recipe(**BASES, text=od.TextPreprocessor(template=Shouted(mark="?"))),
        "points": od.Recipe(points=Points()),
        "points, other parameter": od.Recipe(points=Points(group=3)),
        "points, other name": od.Recipe(clouds=Points()),
        "tracks": od.Recipe(points=Tracks()),
        "keep": od.Recipe(keep=("cls",)),
    }
    prints = {name: recipe.fingerprint() for name, recipe in recipes.items()}
    assert len(set(prints.values())) == len(prints)
    program = "import pickle, sys; print(*[recipe.fingerprint() for recipe in pickle.load(sys.stdin.buffer)])"
    code = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}; {program}"
    finished = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(list(recipes.values())), capture_output=True, check=True
    )
    assert finished.stdout.decode().split() == list(prints.values())


@pytest.mark.parametrize(
    ("recipe", "fingerprint"),
    [
        (od.Recipe(), "9dd9203dc2ed2cfbe7179db61c02a615"),
        (od.Recipe(audio=None), "3791b5c3df3c0bd9dc3fba3af8ab5260"),
        (od.Recipe(image=None, audio=None), "def8a2c3c029dfee61bed392968eb5d2"),
        (
            od.Recipe(
                image=od.ImagePreprocessor(patch_size=16, max_tokens=256, dtype="uint8"),
                audio=od.AudioPreprocessor(num_mels=80),
                text=od.TextPreprocessor(
                    eos_token_id=5, template=od.ChatTemplate(suffix="\n"), image_placeholder="<img>"
                ),
                limits=od.Limits(image_pixels=10**6),
            ),
            "476f2f83ecfd630551269b5d751bc61c",
        ),
    ],
)
def test_fingerprints_of_plain_recipes_stay(recipe: od.Recipe, fingerprint: str) -> None:
    """Indexes that people have belong to these: they change with what recipes give, and only then."""
    assert recipe.fingerprint() == fingerprint


class Loose(od.Modality):
    """Not a dataclass: what it holds is no part of it."""

    fields = ("loose",)

    def __init__(self, size: int) -> None:
        self.size = size

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {"rows": od.ArraySpec((self.size,))}


def test_what_a_fingerprint_would_not_see_is_refused() -> None:
    with pytest.raises(TypeError, match="Loose is no dataclass, so that .* its size: make it a frozen dataclass"):
        od.Recipe(loose=Loose(3)).fingerprint()
