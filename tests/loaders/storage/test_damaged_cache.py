"""Damaged cache files: built again, or a clear error; never a crash, other data, or a hang."""

from __future__ import annotations

import os
import pickle
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from children import in_a_child
from fresh_index import whole
from shard_factory import omni_samples, write_shard

from orchdata.dataset.indexed import IndexCosts
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.errors import NOT_DATA, DamagedIndexError, MissingIndexError, StorageError
from orchdata.loaders.index import index as index_module
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import KIND, Index, open_index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.index.table import LAYOUT, OFFSETS, TABLE_FORMAT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage import sealed as verified
from orchdata.loaders.storage.cache import CacheFolder, MappedArray
from orchdata.loaders.storage.local import opened
from orchdata.loaders.storage.sealed import Damaged, head_of, read_sealed, seal

IMAGE, AUDIO = 1, 2

RECIPE = Recipe()
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of threads that have ended


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Two shards; in the second, one of its samples is bad."""
    bad = {"__key__": "bad", "txt": b"see <image>"}
    return [
        write_shard(tmp_path / "a.tar", omni_samples(7, prefix="a")),
        write_shard(tmp_path / "b.tar", [*omni_samples(4, prefix="b"), bad]),
    ]


def kept_files() -> list[Path]:
    return sorted(path for path in CacheFolder().root.rglob("*") if path.suffix in (".facts", ".costs", ".index"))


def damages(data: bytes, head_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Alter every byte of the head, and alter, zero and cut the rest at some offsets."""
    places = [*range(head_bytes), *range(head_bytes, len(data), 211), len(data) - 1]
    for offset in places:
        yield f"byte {offset}", data[:offset] + bytes([data[offset] ^ (1 << offset % 8)]) + data[offset + 1 :]
    for offset in range(0, len(data), max(1, len(data) // 8)):
        yield f"cut to {offset}", data[:offset]
        if any(data[offset : offset + 512]):
            yield f"zeros from {offset}", (data[:offset] + bytes(512) + data[offset + 512 :])[: len(data)]
    yield "nothing but zeros", bytes(len(data))
    yield "twice", data + data


def with_note(path: Path, data: bytes) -> None:
    """Write a file, and a note that it was verified, as if it had been damaged afterwards without notice."""
    path.write_bytes(data)
    verified.note(path, path.stat())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is built again")
def test_no_damage_to_a_kept_file_changes_what_is_built(shards: list[str]) -> None:
    expected = whole(build_index(shards, RECIPE))
    files = kept_files()
    assert [path.suffix for path in files] == [".costs", ".costs", ".facts", ".facts", ".index"]
    costs, index = files[:2], files[-1]

    def damage_all() -> None:
        for path in (files[1], files[3], index):
            data = path.read_bytes()
            for number, (what, damaged) in enumerate(damages(data, 48 if path != index else 2048)):
                print(path.name, what, file=sys.stderr)
                path.write_bytes(damaged)
                if path == index:
                    with pytest.raises(DamagedIndexError):
                        open_index(shards, RECIPE)
                    if number % 50:  # as building takes longer
                        continue
                elif path.suffix == ".facts":
                    for other in costs:  # otherwise the facts would not be read
                        other.unlink()
                assert whole(build_index(shards, RECIPE, num_threads=1)) == expected
                assert path.read_bytes() == data

    in_a_child(damage_all)


def use(index: Index) -> None:
    """Use an index in all the ways in which steps use it."""
    rows = np.arange(len(index))
    for phase in ("image", "audio", "llm"):
        costs = IndexCosts(index)
        costs.positions(phase, rows)
        costs.parts(phase, rows) if phase != "llm" else None
    for row in index.bad_rows().tolist():
        index.failure(row)
    shards = OpenShards(limits=RECIPE.limits, cache=CacheFolder())
    for row in rows.tolist():
        sample = StoredSample(index, shards, row)
        index.read_spec(row)
        [sample.member_of(part) for part in sample.parts]
        index.find(sample.shard, sample.key)
    for modality in ("image", "audio"):
        index.parts_of(rows, modality)


@pytest.mark.slow
def test_numbers_that_lead_outside_are_errors_at_their_use(shards: list[str]) -> None:
    built = build_index(shards, RECIPE)
    path, data = built.path, built.path.read_bytes()
    with opened(path) as fd:
        start = head_of(fd, KIND, TABLE_FORMAT).start
    size = built.size
    places = size.places()
    wrong = (-(1 << 31), -1, 1 << 20, (1 << 31) - 1)
    columns = [*OFFSETS, "shard", "part_member", "member_field", "bad_row"]

    def try_all() -> None:
        seen = 0
        for name in columns:
            dtype, of, more = LAYOUT[name]
            form = {4: "<i", 8: "<q"}[dtype.itemsize]
            for element in range(getattr(size, of) + more):
                at = start + places[name].start + element * struct.calcsize(form)
                for value in wrong:
                    print(name, element, value, file=sys.stderr)
                    with_note(path, data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :])
                    with pytest.raises(DamagedIndexError, match=f"{path.name} is damaged: "):
                        use(Index(path))
                    assert not verified.is_noted(path, path.stat())  # it will be verified again
                    seen += 1
        assert seen > 300

    in_a_child(try_all)


def test_altered_bytes_of_a_noted_index_never_crash(shards: list[str]) -> None:
    built = build_index(shards, RECIPE)
    path, data = built.path, built.path.read_bytes()

    def try_all() -> None:
        refused = 0
        for what, damaged in damages(data, 0):
            print(what, file=sys.stderr)
            with_note(path, damaged)
            try:
                use(Index(path))
            except DamagedIndexError:
                refused += 1
        assert refused > 20

    in_a_child(try_all)


def test_one_process_makes_a_damaged_index_again_and_says_so(shards: list[str]) -> None:
    expected = build_index(shards, RECIPE)
    before = whole(expected)
    expected.path.write_bytes(expected.path.read_bytes()[:-8])
    with pytest.warns(RuntimeWarning, match=rf"the index {expected.path} is damaged: it has .*; it is built again"):
        made = ShardDataset(shards, RECIPE).index()
    assert whole(made) == before
    again = open_index(shards, RECIPE)
    assert again is not None and whole(again) == before


def test_an_index_is_verified_once_a_machine(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    full: list[Path] = []
    verify = index_module.verify_body
    monkeypatch.setattr(index_module, "verify_body", lambda fd, head: (full.append(path), verify(fd, head)))
    path = Path()
    path = build_index(shards, RECIPE).path
    assert len(full) == 1  # when it is built
    for _ in range(3):
        open_index(shards, RECIPE)
    build_index(shards, RECIPE)
    assert len(full) == 1

    os.utime(path)
    Index(path)
    assert len(full) == 2  # perhaps another file
    os.chmod(path, 0o600)
    Index(path)
    assert len(full) == 3  # only its ctime shows a change with restored times
    moved = path.with_name("moved.index")
    path.rename(moved)
    Index(moved)
    assert len(full) == 4
    monkeypatch.setattr(verified, "_boot_id", lambda: "another start")
    Index(moved)
    Index(moved)
    assert len(full) == 5
    monkeypatch.setattr(verified, "_boot_id", lambda: "")  # not Linux
    Index(moved)
    Index(moved)
    assert len(full) == 7


@pytest.mark.usefixtures("no_pauses")
def test_an_index_that_cannot_be_read_now_is_no_damage(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_index(shards, RECIPE).path
    verified.forget(path)

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StorageError, match="cannot be read: Input/output error"):
        open_index(shards, RECIPE)


def test_damage_to_the_index_is_never_a_failed_sample() -> None:
    error = DamagedIndexError("x.index", "cut")
    assert isinstance(error, NOT_DATA) and isinstance(error, MissingIndexError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_rows_outside_are_refused(shards: list[str]) -> None:
    index = build_index(shards, RECIPE)
    for row in (-1, len(index)):
        for ask in (index.key, index.members, index.read_spec, index.shard_of, index.part_range):
            with pytest.raises(ValueError, match=f"row {row} of an index of 12 rows"):
                ask(row)
        with pytest.raises(ValueError, match="of an index of 12 rows"):
            index.parts_of(np.array([0, row]), IMAGE)
        with pytest.raises(ValueError, match="of an index of 12 rows"):
            IndexCosts(index).positions("image", np.array([0, row]))
    with pytest.raises(ValueError, match="row 0 is not a bad sample"):
        index.failure(0)


def test_a_file_that_is_longer_than_memory_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file costs nothing to write."""
    path = tmp_path / "x"
    path.write_bytes(seal(b"cost", 1, {"a": "b"}, [bytes(100_000)])[0])

    def no_room(size: int) -> bytearray:
        if size > 50_000:
            raise MemoryError(size)
        return bytearray(size)

    monkeypatch.setattr(verified, "bytearray", no_room, raising=False)
    with pytest.raises(Damaged, match="100000 bytes are to be read together, and there is no memory"):
        read_sealed(path, b"cost", 1)


VALUES = np.arange(100_000)


def only_file(cache: Path) -> Path:
    (path,) = (cache / "arrays").iterdir()
    return path


def test_an_array_arrives_as_it_was_and_read_only(private_cache: Path) -> None:
    mapped = MappedArray(VALUES)
    assert not list(private_cache.iterdir())  # nothing is written before it is pickled
    data = pickle.dumps(mapped)
    assert len(data) < 400
    arrived = pickle.loads(data).array
    assert np.array_equal(arrived, VALUES) and arrived.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        arrived[0] = 1
    assert np.array_equal(pickle.loads(pickle.dumps(pickle.loads(data))).array, VALUES) and only_file(private_cache)


@pytest.mark.parametrize("damage", ["cut", "altered", "gone"])
def test_a_damaged_file_is_refused_and_made_again(private_cache: Path, damage: str) -> None:
    mapped = MappedArray(VALUES.copy())
    data = pickle.dumps(mapped)
    path = only_file(private_cache)
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
        assert np.array_equal(pickle.loads(data).array, VALUES)  # this process has it open
        del mapped
    else:
        path.write_bytes(content[:-8] if damage == "cut" else content[:800] + b"x" + content[801:])
    with pytest.raises(StorageError, match="create the loader again"):
        pickle.loads(data)
    assert np.array_equal(pickle.loads(pickle.dumps(MappedArray(VALUES))).array, VALUES)
