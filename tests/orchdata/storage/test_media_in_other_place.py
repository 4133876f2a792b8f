"""Records and the files that they name in another place: sizes and headers are compared, nothing is indexed again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from other_places import Place, epoch, loader_of
from shard_factory import RECIPE, audio, png

import orchdata as od
from orchdata.loaders.storage.remote.objects import PIECE_BYTES

RECORDS = 8


def made(folder: Path) -> Path:
    """Records that name pictures and sounds in folders of their own."""
    media = folder / "media"
    (media / "a").mkdir(parents=True)
    records = []
    for number in range(RECORDS):
        (media / "a" / f"{number}.png").write_bytes(png(40 + 10 * number, 50, seed=number))
        (media / f"{number}.wav").write_bytes(audio(0.2 + 0.1 * number, seed=number))
        records.append({"image": f"a/{number}.png", "audio": f"{number}.wav", "text": f"<image> and <audio> {number}"})
    (folder / "0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return made(tmp_path / "here")


def put_media(place: Place, folder: Path) -> str:
    media = folder / "media"
    for path in media.rglob("*.*"):
        place.server.put(place.bucket, f"media/{path.relative_to(media)}", path.read_bytes())
    return f"s3://{place.bucket}/media"


def of_files(folder: Path) -> od.ShardDataset:
    return od.ShardDataset(folder / "0.jsonl", RECIPE, media_root=folder / "media")


def test_records_and_media_move_to_a_bucket(here: Path, place: Place, measured: list[str]) -> None:
    expected = epoch(loader_of(of_files(here)))
    place.put([str(here / "0.jsonl")])
    root = put_media(place, here)
    there = place.dataset(media_root=root)
    assert epoch(loader_of(there)) == expected
    assert not place.proxy.requests("HEAD"), "no media file was looked at"
    assert [request.kind for request in place.proxy.requests() if "media" in request.path].count("LIST") == 0
    assert epoch(loader_of(place.dataset(media_root=root), num_workers=1)) == expected
    assert len(measured) == 1


def test_records_and_media_move_from_a_bucket(here: Path, place: Place, measured: list[str]) -> None:
    place.put([str(here / "0.jsonl")])
    expected = epoch(loader_of(place.dataset(media_root=put_media(place, here))))
    for _ in range(2):  # a later start looks for changed media
        assert epoch(loader_of(of_files(here))) == expected
    assert of_files(here).index().shards[0].moved_media and len(measured) == 1


def test_media_move_and_records_stay(here: Path, place: Place, measured: list[str]) -> None:
    expected = epoch(loader_of(of_files(here)))
    dataset = od.ShardDataset(
        here / "0.jsonl", RECIPE, media_root=put_media(place, here), storage_options=place.options
    )
    loader = loader_of(dataset)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert len(measured) == 1 and not dataset.index().shards[0].unproven
    resumed = loader_of(of_files(here))
    resumed.load_state_dict(state)
    assert epoch(resumed) == expected[1:]


def test_copies_of_media_in_another_folder_are_indexed_again(here: Path, measured: list[str], tmp_path: Path) -> None:
    of_files(here).index()
    copied = shutil.copytree(here / "media", tmp_path / "copied", copy_function=shutil.copy)
    od.ShardDataset(here / "0.jsonl", RECIPE, media_root=copied).index()
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a/3.png", png(50, 70, seed=3), r"field 'image.0'.*its header says \(50, 70\), \(70, 50\) when"),
        ("a/3.png", b"no picture", "changed since it was indexed"),
        ("3.wav", None, "no such file"),
    ],
    ids=["header", "size", "missing"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_another_file_comes_into_no_batch(
    here: Path, place: Place, name: str, data: bytes | None, reason: str, workers: int
) -> None:
    path = here / "media" / name
    if data is not None and data.startswith(b"\x89PNG"):  # of one size
        size = max(len(data), path.stat().st_size)
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))
        data = data.ljust(size, b"\0")
    of_files(here).index()
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    place.put([str(here / "0.jsonl")])
    loader = loader_of(place.dataset(media_root=put_media(place, here)), num_workers=workers, on_error="skip")
    with pytest.raises(od.StaleIndexError, match=rf"(?s){reason}.*orchdata index"):
        epoch(loader)


def test_a_place_without_any_of_the_files_is_indexed(here: Path, place: Place, measured: list[str]) -> None:
    of_files(here).index()
    place.put([str(here / "0.jsonl")])
    with pytest.raises(od.StorageError, match="media_root"):
        place.dataset(media_root=f"s3://{place.bucket}/elsewhere").index()
    other = made(here.parent / "other" / "here")
    for path in (other / "media").rglob("*.png"):
        path.write_bytes(png(33, 44, seed=9))
    there = epoch(loader_of(place.dataset(media_root=put_media(place, other))))
    assert len(measured) == 2
    assert epoch(loader_of(of_files(other))) == there


def test_a_large_file_is_read_in_pieces_of_one_version(here: Path, place: Place) -> None:
    path = here / "media" / "a" / "0.png"
    path.write_bytes(path.read_bytes() + bytes(2 * PIECE_BYTES))
    expected = epoch(loader_of(of_files(here)))
    place.put([str(here / "0.jsonl")])
    root = put_media(place, here)
    place.proxy.clear()
    assert epoch(loader_of(place.dataset(media_root=root))) == expected
    pieces = [request for request in place.proxy.requests("RANGE") if request.path.endswith("a/0.png")]
    assert len(pieces) >= 3 and all(request.if_match for request in pieces)
