"""The same data in another place: no indexing again, equal batches, and nothing that differs comes into a batch."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from index_file_job import __file__ as JOB
from other_places import Place, contents, epoch, loader_of
from pairs_container import Pairs
from rank_jobs import run_ranks
from servers.http_server import HttpServer
from shard_factory import RECIPE, omni_shards, write_shard

import orchdata as od
from orchdata.loaders.index import build

SHARDS, SAMPLES = 3, 6


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    folder = tmp_path / "here"
    folder.mkdir()
    return omni_shards(folder, shards=SHARDS, samples=SAMPLES)


def kinds(place: Place) -> set[str]:
    return {request.kind for request in place.proxy.requests()}


def test_from_files_to_a_bucket_to_a_server_without_etags(
    paths: list[str], place: Place, http_server: HttpServer, measured: list[str], tmp_path: Path
) -> None:
    expected = epoch(loader_of(od.ShardDataset(paths, RECIPE)))
    assert len(measured) == SHARDS
    place.put(paths)
    loader = loader_of(place.dataset())
    assert kinds(place) == {"LIST", "RANGE"}
    assert len(place.proxy.requests("LIST")) == 1, "one listing before the first step"
    compared = place.proxy.requests("RANGE")
    assert 0 < len(compared) <= 16, "and some samples, to know whether the data are others of the same names and sizes"
    place.proxy.clear()
    assert epoch(loader) == expected
    assert kinds(place) == {"RANGE"}
    ranges = place.proxy.requests("RANGE")
    assert len(ranges) <= SHARDS * SAMPLES, "no request for a header alone"
    assert all(request.if_match for request in ranges)

    urls = [http_server.put(f"{tmp_path.name}/{Path(path).name}", Path(path).read_bytes()) for path in paths]
    assert epoch(loader_of(od.ShardDataset(urls, RECIPE, storage_options=http_server.options))) == expected
    assert len(measured) == SHARDS


def test_a_later_start_lists_nothing_but_the_pattern(paths: list[str], place: Place, measured: list[str]) -> None:
    od.ShardDataset(paths, RECIPE).index()
    place.put(paths)
    first = place.dataset().index()
    place.proxy.clear()
    assert place.dataset().index().path == first.path
    assert [request.kind for request in place.proxy.requests()] == ["LIST"]
    assert len(measured) == SHARDS
    assert all(shard.unproven for shard in first.shards)


def test_from_a_bucket_to_files(paths: list[str], place: Place, measured: list[str]) -> None:
    place.put(paths)
    expected = epoch(loader_of(place.dataset()))
    assert len(measured) == SHARDS
    assert epoch(loader_of(od.ShardDataset(paths, RECIPE))) == expected
    assert len(measured) == SHARDS


def test_copies_of_files_are_indexed_again(paths: list[str], measured: list[str], tmp_path: Path) -> None:
    od.ShardDataset(paths, RECIPE).index()
    copies = [shutil.copy(path, tmp_path) for path in paths]
    index = od.ShardDataset(copies, RECIPE).index()
    assert len(measured) == 2 * SHARDS
    assert not any(shard.unproven for shard in index.shards)


def test_state_and_quarantine_go_on(paths: list[str], place: Place, measured: list[str]) -> None:
    left_out = [(os.path.basename(paths[0]), od.ShardDataset(paths, RECIPE).index().key(1))]
    whole = epoch(loader_of(od.ShardDataset(paths, RECIPE), quarantine=left_out))
    assert sum(len(names) for names, _ in whole) == SHARDS * SAMPLES - 1
    loader = loader_of(od.ShardDataset(paths, RECIPE), quarantine=left_out)
    batches = iter(loader)
    begun = [contents(next(batches)) for _ in range(2)]
    state = loader.state_dict()
    place.put(paths)
    resumed = loader_of(place.dataset(), quarantine=left_out)
    resumed.load_state_dict(state)
    assert begun + epoch(resumed) == whole
    assert len(measured) == SHARDS


def rewritten(path: str, change: Callable[[tarfile.TarInfo, bytes], bytes]) -> bytes:
    """A tar with the same members, after a change of each."""
    out = io.BytesIO()
    with tarfile.open(path) as source, tarfile.open(fileobj=out, mode="w", format=tarfile.DEFAULT_FORMAT) as target:
        for info in source:
            data = source.extractfile(info).read()  # type: ignore[union-attr]
            target.addfile(info, io.BytesIO(change(info, data)))
    data = out.getvalue()
    return data + bytes(os.path.getsize(path) - len(data))


def first_of(path: str) -> str:
    with tarfile.open(path) as archive:
        return archive.getnames()[0]


def test_the_same_tar_written_again_is_taken(paths: list[str], place: Place, measured: list[str]) -> None:
    """The control of the tests below: only the change makes the difference."""
    expected = epoch(loader_of(od.ShardDataset(paths, RECIPE)))
    for path in paths:
        place.server.put(place.bucket, f"data/{Path(path).name}", rewritten(path, lambda info, data: data))
    assert epoch(loader_of(place.dataset())) == expected
    assert len(measured) == SHARDS


def another_time(info: tarfile.TarInfo, data: bytes) -> bytes:
    info.mtime = 1
    return data


def another_byte(info: tarfile.TarInfo, data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:] if len(data) > 200 else bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", [another_time, another_byte])
def test_another_tar_of_the_same_name_and_size_comes_into_no_batch(
    paths: list[str], place: Place, measured: list[str], change: Callable[..., bytes], workers: int
) -> None:
    od.ShardDataset(paths, RECIPE).index()
    place.put(paths)
    name = first_of(paths[1])
    key = name.split(".")[0]
    data = rewritten(paths[1], lambda info, data: change(info, data) if info.name == name else data)
    assert len(data) == os.path.getsize(paths[1])
    place.server.put(place.bucket, f"data/{Path(paths[1]).name}", data)

    loader = loader_of(place.dataset(), num_workers=workers, on_error="skip")
    seen: list[Any] = []
    with pytest.raises(od.StaleIndexError, match=r"(?s)omni-000001\.tar.*sample.*orchdata index"):
        for batch in loader:
            seen += [(os.path.basename(shard), each) for shard, each in batch.sample_ids]
    assert (Path(paths[1]).name, key) not in seen
    assert len(seen) < SHARDS * SAMPLES
    assert len(measured) == SHARDS
    # What the error says helps.
    build.build_index(place.dataset().urls, RECIPE, reading=place.dataset().reading)
    assert len(measured) == 2 * SHARDS


def another_member(path: str, key: str) -> bytes:
    """A tar of the same size in which a member after the first of a sample has another name and content."""
    out, number = io.BytesIO(), 0
    with tarfile.open(path) as source, tarfile.open(fileobj=out, mode="w", format=tarfile.DEFAULT_FORMAT) as target:
        for info in source:
            data = source.extractfile(info).read()  # type: ignore[union-attr]
            if info.name.split(".")[0] == key and (number := number + 1) > 1:
                data = bytes(reversed(data))
            target.addfile(info, io.BytesIO(data))
    data = out.getvalue()
    return data + bytes(os.path.getsize(path) - len(data))


def test_members_after_the_first_are_compared(paths: list[str], place: Place, measured: list[str]) -> None:
    od.ShardDataset(paths, RECIPE).index()
    place.put(paths)
    with tarfile.open(paths[1]) as archive:
        keys = [name.split(".")[0] for name in archive.getnames()]
    key = next(each for each in keys if keys.count(each) > 1)
    place.server.put(place.bucket, f"data/{Path(paths[1]).name}", another_member(paths[1], key))
    with pytest.raises(od.StaleIndexError, match=rf"sample '{key}' is not the one"):
        epoch(loader_of(place.dataset()))


def test_other_data_of_the_same_names_and_sizes_are_indexed(place: Place, measured: list[str], tmp_path: Path) -> None:
    """Two data sets with equal names of shards, as train and validation have: neither is taken for the other."""
    for name, word in (("train", "a training sample"), ("validation", "b")):
        folder = tmp_path / name
        folder.mkdir()
        with tarfile.open(folder / "0.tar", "w") as archive:
            for number in range(4):
                data = f"{word} {number}".encode()
                info = tarfile.TarInfo(f"{number:06d}.txt")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    train, validation = (str(tmp_path / name / "0.tar") for name in ("train", "validation"))
    assert os.path.getsize(train) == os.path.getsize(validation)
    od.ShardDataset(train, RECIPE).index()
    place.put([validation])
    assert epoch(loader_of(place.dataset())) == epoch(loader_of(od.ShardDataset(validation, RECIPE)))
    assert len(measured) == 2


def test_a_line_of_another_file_blames_no_sample(place: Place, measured: list[str], tmp_path: Path) -> None:
    """Lines that changed places under one size are no bad JSON, whether or not the whole file was compared before."""
    lines = [f'{{"text": "sample {number} {"x" * number}"}}\n' for number in range(6)]
    (tmp_path / "0.jsonl").write_text("".join(lines))
    od.ShardDataset(tmp_path / "0.jsonl", RECIPE).index()
    lines[1], lines[4] = lines[4], lines[1]
    place.server.put(place.bucket, "data/0.jsonl", "".join(lines).encode())
    with pytest.raises(od.StaleIndexError, match="orchdata index"):
        epoch(loader_of(place.dataset(), on_error="skip"))


def test_another_size_or_order_is_indexed_again(paths: list[str], place: Place, measured: list[str]) -> None:
    od.ShardDataset(paths, RECIPE).index()
    place.put(paths)
    urls = [f"s3://{place.bucket}/data/{Path(path).name}" for path in reversed(paths)]
    od.ShardDataset(urls, RECIPE, storage_options=place.options).index()
    assert len(measured) == 2 * SHARDS
    place.server.put(place.bucket, f"data/{Path(paths[0]).name}", Path(paths[0]).read_bytes() + bytes(10240))
    place.dataset().index()
    assert len(measured) == 2 * SHARDS + 1, "the others are in the same place"


def tables(folder: Path, suffix: str) -> list[str]:
    """Parquet or JSON Lines with texts of 100 letters."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(2):
        path = folder / f"texts-{number}.{suffix}"
        texts = [f"{number} {row} ".ljust(100, "x") for row in range(40)]
        if suffix == "parquet":
            pq.write_table(pa.table({"text": texts}), path, compression="none")
        else:
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        paths.append(str(path))
    return paths


def epochs_until(loader: od.DataLoader, thread: str) -> None:
    """Iterate until the comparison has ended, and once more."""
    for batch in loader:
        del batch
    for each in threading.enumerate():
        if each.name == thread:
            each.join()
    for batch in loader:
        del batch


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_tables_are_compared_whole(place: Place, measured: list[str], tmp_path: Path, suffix: str) -> None:
    paths = tables(tmp_path / "here", suffix)
    od.ShardDataset(paths).index()
    place.put(paths)
    epochs_until(loader_of(place.dataset(od.Recipe())), "orchdata-compare")
    assert len(measured) == 2


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_table_with_another_byte_is_an_error(place: Place, measured: list[str], tmp_path: Path, suffix: str) -> None:
    paths = tables(tmp_path / "here", suffix)
    od.ShardDataset(paths).index()
    place.put(paths)
    data = Path(paths[1]).read_bytes().replace(b"1 7 xxx", b"1 7 xyx", 1)
    place.server.put(place.bucket, f"data/{Path(paths[1]).name}", data)
    with pytest.raises(od.StaleIndexError, match=r"texts-1.*orchdata index"):
        epochs_until(loader_of(place.dataset(od.Recipe())), "orchdata-compare")
    assert len(measured) == 2


def test_sound_inside_of_clips_has_the_mark_of_its_clip(place: Place, measured: list[str], tmp_path: Path) -> None:
    pytest.importorskip("av")
    from video_clips import clip

    samples = [
        {"__key__": f"{number:02d}", "mp4": clip("h264", audio="aac" if number % 3 else None), "txt": b"of %d" % number}
        for number in range(24)
    ]
    paths = [write_shard(tmp_path / name, some) for name, some in (("a.tar", samples[:3]), ("b.tar", samples[3:]))]
    video = od.VideoPreprocessor(patch_size=8, fps=4, min_tokens=1, max_tokens=24, dtype="float32")
    recipe = od.Recipe(image=None, audio=od.AudioPreprocessor(num_mels=16, tracks=True), video=video)
    here = od.ShardDataset(paths, recipe)
    assert here.index().marks is not None and here.index().marks.all() and not here.index().bad_rows().size
    expected = epoch(loader_of(here))
    place.put(paths)
    assert epoch(loader_of(place.dataset(recipe))) == expected
    assert len(measured) == len(paths)


def test_another_recipe_is_indexed(paths: list[str], place: Place, measured: list[str]) -> None:
    od.ShardDataset(paths, RECIPE).index()
    place.put(paths)
    place.dataset(od.Recipe()).index()
    assert len(measured) == 2 * SHARDS


def test_tars_without_marks_are_indexed_again(
    paths: list[str], place: Place, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:  # as an earlier release left them
        before.setattr("orchdata.loaders.index.shard_costs.row_marks", lambda facts, columns: b"")
        assert od.ShardDataset(paths, RECIPE).index().marks is None
    place.put(paths)
    with pytest.warns(UserWarning, match="samples without a mark"):
        place.dataset().index()
    assert len(measured) == 2 * SHARDS


def test_a_write_that_fails_leaves_nothing(
    paths: list[str], place: Place, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = od.ShardDataset(paths, RECIPE).index().path.parent
    before = sorted(os.listdir(kept))
    place.put(paths)
    real = os.pwrite
    written = 0
    for failing in range(1, 100):
        count = 0

        def pwrite(*given: Any, failing: int = failing) -> int:
            nonlocal count
            count += 1
            if count == failing:
                raise OSError(28, "No space left on device")
            return real(*given)

        with monkeypatch.context() as faults:
            faults.setattr(os, "pwrite", pwrite)
            try:
                place.dataset().index()
            except od.StorageError:
                assert [name for name in sorted(os.listdir(kept)) if not name.endswith(".verified")] == [
                    name for name in before if not name.endswith(".verified")
                ]
                written += 1
                continue
        break
    assert written >= 2, "head and body"
    assert len(measured) == SHARDS
    assert len(epoch(loader_of(place.dataset()))) == SHARDS * SAMPLES // 3


def test_compressed_tars_are_compared_when_they_are_decompressed(
    paths: list[str], place: Place, measured: list[str]
) -> None:
    for path in paths:
        data = Path(path).read_bytes()
        Path(f"{path}.gz").write_bytes(gzip.compress(data, mtime=0))
    packed = [f"{path}.gz" for path in paths]
    expected = epoch(loader_of(od.ShardDataset(packed, RECIPE)))
    place.put(packed)
    assert epoch(loader_of(place.dataset())) == expected
    assert len(measured) == SHARDS
    assert all(shard.packed for shard in place.dataset().index().shards)


def test_unusual_tars_have_marks_too(place: Place, measured: list[str], tmp_path: Path) -> None:
    """With numbers in base 256 and hard links: the whole archive is read by tarfile."""
    path = tmp_path / "unusual.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for number in range(4):
            info = tarfile.TarInfo(f"{number}.txt")
            data = f"text {number} ".encode() * 80
            info.size, info.uid = len(data), 1 << 40
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("4.txt")
        link.type, link.linkname = tarfile.LNKTYPE, "0.txt"
        archive.addfile(link)
    index = od.ShardDataset(path).index()
    assert index.marks is not None
    assert index.marks[0] == index.marks[4] != 0
    assert len(set(index.marks.tolist())) == 4
    expected = epoch(loader_of(od.ShardDataset(path)))
    place.put([str(path)])
    assert epoch(loader_of(place.dataset(od.Recipe()))) == expected
    assert len(measured) == 1


def test_sources_of_a_mixture_move(paths: list[str], place: Place, measured: list[str]) -> None:
    def mixed(first: od.ShardDataset, second: od.ShardDataset) -> list[Any]:
        sources = {"one": od.Source(first, weight=1), "two": od.Source(second, weight=2)}
        return list(itertools.islice(epoch(loader_of(od.Mixture(sources))), 4))

    here = od.ShardDataset(paths[:2], RECIPE), od.ShardDataset(paths[2:], RECIPE)
    expected = mixed(*here)
    place.put(paths)
    urls = [f"s3://{place.bucket}/data/{Path(path).name}" for path in paths]
    there = [od.ShardDataset(part, RECIPE, storage_options=place.options) for part in (urls[:2], urls[2:])]
    assert mixed(*there) == expected
    assert len(measured) == SHARDS


def test_ranks_list_the_place_once(
    paths: list[str], place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "node-0"))
    od.ShardDataset(paths, RECIPE).index()
    place.put(paths)
    given = {"paths": place.pattern, "options": place.options, "ranks_per_node": 3, "folder": str(tmp_path)}
    ranks = run_ranks(JOB, json.dumps(given | {"common": True}), num_ranks=3, folder=tmp_path)
    assert [rank["measured"] for rank in ranks] == [[]] * 3
    assert len({json.dumps(rank["state"]) for rank in ranks}) == 1
    keys = [key for rank in ranks for key in rank["keys"]]
    assert len(keys) == len(set(keys)) == SHARDS * SAMPLES
    listed = [request for request in place.proxy.requests("LIST") if "prefix=data" in request.query]
    assert len(listed) == 1


def test_shards_of_a_container_of_the_users_move(place: Place, measured: list[str], tmp_path: Path) -> None:
    path = tmp_path / "0.pairs"
    path.write_text("".join(f"{number}\tsample {number}\n" for number in range(9)))
    expected = epoch(loader_of(od.ShardDataset(path, RECIPE, containers=[Pairs()])))
    place.put([str(path)])
    there = place.dataset(containers=[Pairs()])
    assert epoch(loader_of(there)) == expected
    assert len(measured) == 1 and there.index().shards[0].unproven


def test_another_shard_of_a_container_of_the_users_is_an_error(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "0.pairs"
    path.write_text("".join(f"{number}\tsample {number}\n" for number in range(9)))
    od.ShardDataset(path, RECIPE, containers=[Pairs()]).index()
    place.server.put(place.bucket, "data/0.pairs", path.read_bytes().replace(b"sample 7", b"another7"))
    with pytest.raises(od.StaleIndexError, match=r"0\.pairs.*orchdata index"):
        epochs_until(loader_of(place.dataset(containers=[Pairs()])), "orchdata-compare")
