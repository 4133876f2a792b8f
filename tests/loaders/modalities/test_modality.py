"""A modality that the library does not know, up to the index: how it is counted, named in records, and refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from own_modalities import Points, Tracks, cloud, track
from own_shards import Clouds, Wide, indexed, one_shard, parts_of, reasons, recipe_of
from shard_factory import RECIPE as PLAIN
from shard_factory import jpeg, png

import orchdata as od
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.modalities.modality import stored

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

NAMES = ("text", "image", "audio", "points", "tracks")


@dataclass(frozen=True, kw_only=True)
class Odd(od.Modality):
    """Counts nonsense where its bytes ask for it."""

    fields = ("odd",)
    num_extents = 1

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {"rows": od.ArraySpec((2,))}

    def count(self, data: bytes | memoryview, limits: od.Limits) -> od.PartSize:
        sizes: dict[bytes, Any] = {
            b"float": od.PartSize(4.0, 1),  # type: ignore[arg-type]
            b"late float": od.PartSize(4, 1, 4, (2.5,)),  # type: ignore[arg-type]
            b"zero": od.PartSize(0, 1),
            b"no tokens": od.PartSize(1, 0),
            b"long extent": od.PartSize(1, 1, 1, (1, 2)),
            b"huge": od.PartSize(2**40, 1),
            b"tuple": (4, 1),
            b"NumPy": od.PartSize(np.int64(4), np.uint8(1), np.int32(4), (np.int64(2),)),
        }
        if bytes(data) == b"raise":
            raise RuntimeError("no idea")
        return sizes[bytes(data)]


def test_what_is_no_size_fails_its_sample_alone(tmp_path: Path) -> None:
    kinds = b"float|late float|zero|no tokens|long extent|huge|tuple|raise|unknown".split(b"|")
    samples = [{"odd": data} for kind in kinds for data in (kind, b"NumPy")]
    recipe = recipe_of(odd=Odd())
    index = indexed(one_shard(tmp_path, *samples), recipe)
    errors = reasons(index)
    assert list(errors) == [f"s{2 * number}" for number in range(len(kinds))]
    assert {field for field, _ in errors.values()} <= {"odd", "*"}
    assert errors["s0"] == ("odd", "cannot be measured: TypeError: 'float' object cannot be interpreted as an integer")
    assert errors["s14"] == ("odd", "cannot be measured: RuntimeError: no idea")
    # What the failed ones would have left would show here.
    assert parts_of(index, "odd", recipe) == [od.PartSize(4, 1, 4, (2,))] * len(kinds)


@dataclass(frozen=True, kw_only=True)
class Video(Tracks):
    """Named as what conversations of today name next to their text."""

    fields = ("mp4",)
    words = ("video_url",)
    slot = od.Slot()


VIDEO = recipe_of(video=Video())
ITEMS = [{"type": "video", "video": "x.mp4"}, {"type": "text", "text": "what?"}]
TURNS = [{"from": "human", "value": "<video> what?"}, {"from": "gpt", "value": "this"}]


@pytest.mark.parametrize(
    "record",
    [
        [{"role": "user", "content": ITEMS}, {"role": "assistant", "content": "this"}],
        {"video": "x.mp4", "conversations": TURNS},
        {"videos": ["x.mp4"], "conversations": TURNS},
        {"video": "x.mp4", "text": "<video> it is"},
    ],
)
def test_records_may_name_a_users_modality(tmp_path: Path, record: Any) -> None:
    shard = one_shard(tmp_path, {"mp4": track(8), "json": json.dumps(record).encode()})
    index = indexed(shard, VIDEO)
    assert reasons(index) == {} and [size.positions for size in parts_of(index, "video", VIDEO)] == [8]
    # To a recipe that does not know it, the same record would lose what it names.
    assert "video" in reasons(indexed(shard, PLAIN))["s0"][1]


def test_a_mark_without_its_part_is_refused(tmp_path: Path) -> None:
    errors = reasons(indexed(one_shard(tmp_path, {"txt": b"a <points> of view"}, {"npy": cloud(3), "txt": b"<track>"})))
    assert 'or od.Slot(mark="") of the modality, says so' in errors["s0"][1]
    assert errors["s1"][1].startswith("<track> placeholder 1 of 1 has no tracks")
    unmarked = indexed(one_shard(tmp_path, {"txt": b"a <clouds> of view"}), recipe_of(clouds=Clouds()))
    assert reasons(unmarked) == {}


def test_parquet_columns_are_found_by_name_and_suffix(tmp_path: Path) -> None:
    table = {
        "id": ["a", "b", "c"],
        "points": [cloud(5), cloud(9), None],
        "track": [[track(4), track(6)], [], [track(3)]],
        "scan.npy": [None, cloud(2), cloud(12)],
        "text": ["<points> <track> <track>", "<points> <points>", "plain <points> with <track>"],
    }
    types = {"track": pa.list_(pa.binary()), "points": pa.binary(), "scan.npy": pa.large_binary()}
    arrays = {name: pa.array(values, types.get(name)) for name, values in table.items()}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(arrays), path)
    recipe = recipe_of(points=Points(), tracks=Tracks())
    index = indexed(path, recipe)
    assert reasons(index) == {}
    for row, points, tracks in ((0, [5], [4, 6]), (1, [9, 2], []), (2, [12], [3])):
        for name, expected in (("points", points), ("tracks", tracks)):
            parts, _ = index.parts_of(np.array([row]), name)
            assert index.part_positions[parts].tolist() == expected
    # Without the modalities they are no one's, and the marks in the text are text.
    plain = indexed(path, PLAIN)
    assert plain.modalities == NAMES[:3] and plain.totals["modalities"]["text"]["tokens"] > 60


@pytest.mark.parametrize(
    ("values", "dtype", "fine"),
    [
        (np.zeros(3, np.float32), "float32", True),
        (np.zeros(3, np.float64), "float32", False),
        (np.zeros(3, ">f4"), "float32", False),
        ([1, 2, 3], "int64", True),
        (torch.zeros(3, dtype=torch.bfloat16), "bfloat16", True),
        (torch.zeros(3, dtype=torch.bfloat16), "uint16", False),
        (torch.zeros(3, requires_grad=True), "float32", True),
        (np.array([None, 1]), "float32", False),
    ],
)
def test_decoded_values_are_taken_in_their_own_dtype_alone(values: Any, dtype: str, fine: bool) -> None:
    if fine:
        assert len(stored(values, dtype)) == 3
    else:
        with pytest.raises(DecodeError, match=f"arrays\\(\\) says {dtype}"):
            stored(values, dtype)


class Plain(Points):
    """No dataclass of its own: its parameter would be in no fingerprint."""

    def __init__(self, step: int) -> None:
        super().__init__()
        object.__setattr__(self, "step", step)


def test_parameters_that_no_fingerprint_sees_are_refused() -> None:
    with pytest.raises(TypeError, match="Plain is no dataclass, so that no fingerprint would see its step"):
        od.Recipe(points=Plain(2)).fingerprint()


class OwnImage(Points):
    slot = od.Slot(mark="<pc>", token_id=9)


def test_an_image_of_ones_own_has_its_own_slot_and_members(tmp_path: Path) -> None:
    recipe = od.Recipe(image=OwnImage())
    assert recipe.slots["image"] == od.Slot(mark="<pc>", token_id=9)
    index = indexed(one_shard(tmp_path, {"npy": cloud(5), "jpg": jpeg(40, 40), "txt": b"a <pc>"}), recipe)
    assert reasons(index) == {}
    assert [size.positions for size in parts_of(index, "image", recipe)] == [5]
    assert index.totals["ignored_fields"] == {"jpg": 1}


@dataclass(frozen=True, kw_only=True)
class Depth(od.ImagePreprocessor):
    fields = ("depth.png",)
    words = ()


def test_the_longest_name_decides_whose_a_member_is(tmp_path: Path) -> None:
    samples = {"png": png(64, 32), "depth.png": png(32, 32), "1.depth.png": png(16, 64)}
    shard = one_shard(tmp_path, samples | {"txt": b"deep"})
    small = {"patch_size": 8, "min_tokens": 1, "max_tokens": 12}
    recipe = recipe_of(depth=Depth(**small))
    index = indexed(shard, recipe)
    assert [size.extent for size in parts_of(index, "image", recipe)] == [(4, 8)]
    assert [size.extent for size in parts_of(index, "depth", recipe)] == [(4, 4), (8, 2)]
    # Without the modality all three are images.
    assert len(parts_of(indexed(shard, PLAIN), "image", PLAIN)) == 3


class Framed(od.ImagePreprocessor):
    fields = ("png", "depth.png")


class Marked(Points):
    fields = ("cloud",)
    slot = od.Slot(mark="<image>")


class Worded(Points):
    fields = ("cloud",)
    words = ("image_url",)


@dataclass(frozen=True, kw_only=True)
class Arrays(Points):
    name: str = "points"
    dtype: str = "float32"
    per: Any = "row"
    row_shape: tuple[int, ...] = (3,)

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {self.name: od.ArraySpec(self.row_shape, self.dtype, self.per)}


@pytest.mark.parametrize(
    ("modalities", "error", "message"),
    [
        ({"points": Points(), "clouds": Clouds()}, ValueError, "clouds and points both claim the field 'npy'"),
        ({"image": Framed(), "depth": Depth()}, ValueError, "image and depth both claim the field 'depth.png'"),
        ({"a": Tracks(), "b": Wide(), "wide": Tracks()}, ValueError, "b and wide both claim the field 'wide'|'track'"),
        ({"marked": Marked()}, ValueError, "the marks of image and marked are both '<image>'"),
        ({"worded": Worded()}, ValueError, "image and worded both claim items of type 'image_url'"),
        ({"points": 3}, TypeError, "Recipe.points must be an od.Modality, got int"),
        ({"text": Points()}, TypeError, "Recipe.text must be TextPreprocessor, got Points"),
        ({"image": od.AudioPreprocessor()}, TypeError, "Recipe.image must be ImagePreprocessor, got AudioPreprocessor"),
        ({"points": Arrays(name="positions")}, ValueError, "an array of points cannot be called 'positions'"),
        ({"input": Arrays(name="ids")}, ValueError, "every batch and input both have an input called input_ids"),
        ({"a": Arrays(name="b_values"), "a_b": Tracks()}, ValueError, "a and a_b both have an input called a_b_values"),
        ({"points": Arrays(row_shape=(0,))}, ValueError, "sides are ints of at least 1"),
        ({"points": Arrays(dtype="object")}, TypeError, "dtype 'object'"),
    ],
)
def test_what_a_modality_may_not_claim_be_or_hold_is_refused(
    modalities: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        od.Recipe(**modalities)


class Probe:
    calls = 0


@dataclass(frozen=True, kw_only=True)
class Counted(Tracks):
    """Counts how often members are probed."""

    @classmethod
    def probe(cls, data: bytes, limits: od.Limits) -> tuple[int, ...]:
        Probe.calls += 1
        return super().probe(data, limits)


@dataclass(frozen=True, kw_only=True)
class Same(Counted):
    """Keeps the probe."""

    fields = ("track", "other")


@dataclass(frozen=True, kw_only=True)
class Raised(Counted):
    version = 2


@dataclass(frozen=True, kw_only=True)
class Own(Counted):
    @classmethod
    def probe(cls, data: bytes, limits: od.Limits) -> tuple[int, ...]:
        return super().probe(data, limits)


@pytest.fixture
def probed(tmp_path: Path) -> Any:
    """Indexes tracks, and tells how many members were probed."""
    shard = one_shard(tmp_path, *[{"track": track(3 + n)} for n in range(5)], {"track": b"no track at all"})

    def run(modality: od.Modality, **options: Any) -> int:
        before = Probe.calls
        recipe = recipe_of(tracks=modality)
        index = indexed(shard, recipe, **options)
        stride = getattr(modality, "stride", 2)
        assert [size.tokens for size in parts_of(index, "tracks", recipe)] == [-(-n // stride) for n in range(3, 8)]
        assert reasons(index) == {"s5": ("track", "not a track")}
        return Probe.calls - before

    run.shard = shard  # type: ignore[attr-defined]
    return run


def test_headers_are_kept_for_a_probe_and_its_version_under_all_parameters(probed: Any) -> None:
    assert probed(Counted(stride=2)) == 6
    assert probed(Counted(stride=3)) == 0  # the failed one is not tried again either
    assert probed(Same()) == 6  # its class attributes may be what the probe reads
    assert probed(Raised()) == 6
    assert probed(Own()) == 6
    assert probed(Counted(stride=4)) == 0
