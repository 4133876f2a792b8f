"""Names of media that no rule reads: the loader warns once, and says nothing about honest data."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from own_containers import Lines
from shard_factory import RECIPE, audio, jpeg, write_shard

import orchdata as od
from orchdata.loaders.index.totals import UNREAD
from orchdata.loaders.media_names import (
    _ENDINGS,
    UnreadNames,
    may_name_media,
    modality_named,
    names_in,
    sum_unread,
)
from orchdata.loaders.samples.sample import TextPart
from orchdata.loaders.shards.jsonl.reading import RecordReader

WORDS = "a cat on a mat"


def new_file(folder: Path, suffix: str) -> Path:
    return folder / f"{len(list(folder.iterdir()))}.{suffix}"


def lines(folder: Path, *records: Mapping[str, Any]) -> Path:
    path = new_file(folder, "jsonl")
    path.write_text("".join(json.dumps({"text": WORDS, **record}) + "\n" for record in records))
    (folder / "a.jpg").write_bytes(jpeg(40, 30))
    (folder / "a.flac").write_bytes(audio(0.5, suffix="flac"))
    return path


def table(folder: Path, **columns: Any) -> Path:
    path = new_file(folder, "parquet")
    rows = len(next(iter(columns.values())))
    pq.write_table(pa.table({"text": [WORDS] * rows, **columns}), path)
    return path


def stream(folder: Path, **columns: Any) -> Path:
    path = new_file(folder, "arrow")
    rows = len(next(iter(columns.values())))
    whole = pa.table({"text": [WORDS] * rows, **columns})
    with pa.ipc.new_stream(path, whole.schema) as writer:
        writer.write_table(whole)
    return path


def warned(dataset: od.ShardDataset) -> list[str]:
    """Return the warnings of loaders over a data set: two loaders, which warn once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "this loop spent")
        for _ in range(2):
            for _ in od.DataLoader(dataset, batch_size=2):
                pass
    return [str(one.message) for one in caught]


UNREAD_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "nested": ({"meta": {"image": "a.jpg"}}, "'meta.image' (1 sample, such as 'a.jpg')"),
    "items": ({"media": [{"type": "image", "path": "a.jpg"}]}, "'media.path' (1 sample, such as 'a.jpg')"),
    "turns": ({"turns": [{"image": "a.jpg", "says": "?"}]}, "'turns.image' (1 sample"),
    "another key": ({"thumb": "photos/a.PNG"}, "'thumb' (1 sample, such as 'photos/a.PNG')"),
    "list": ({"thumbs": ["a.webp", "b.webp"]}, "'thumbs' (1 sample, such as 'a.webp')"),
    "no decoder": ({"photo": "a.heic"}, "'photo' (1 sample, such as 'a.heic')"),
    "no decoder of sound": ({"audio_file": "a.m4a"}, "columns={'audio_file': 'audio'}"),
    "video": ({"clip": "a.mp4"}, "columns={'clip': 'video'}"),
    "video next to an image": ({"image": "a.jpg", "clip": "a.mkv"}, "'clip' (1 sample, such as 'a.mkv')"),
    "address": ({"url": "https://a.org/b.jpg"}, "Nothing is downloaded"),
    "address with a query": ({"image_link": "https://a.org/b.jpg?w=2&key=3"}, "such as 'https://a.org/b.jpg')"),
    "address in a store": ({"link": "s3://me:secret@bucket/b.jpg"}, "such as 's3://bucket/b.jpg')"),
}


@pytest.mark.parametrize("name", UNREAD_RECORDS)
def test_a_name_that_no_rule_reads_is_one_warning(tmp_path: Path, name: str) -> None:
    record, words = UNREAD_RECORDS[name]
    (message,) = warned(od.ShardDataset(lines(tmp_path, record), recipe=RECIPE, media_root=tmp_path))
    assert message.startswith("names of media that are not read, so the model gets the text without them")
    assert words in message


HONEST: dict[str, dict[str, Any]] = {
    "prose": {"text": "Look at a.jpg", "description": "Here you see the picture that I named cat.jpg"},
    "words": {"captions": ["a.jpg", "b.jpg"]},
    "id": {"id": "000123.jpg"},
    "chat": {"messages": [{"role": "user", "content": "a.jpg"}, {"role": "assistant", "content": "b.jpg"}]},
    "COCO": {"image": "a.jpg", "file_name": "a.jpg", "coco_url": "http://a.org/a.jpg", "id": "a.jpg"},
    "copies": {"images": ["a.jpg"], "meta": {"thumb": "b.png"}},
    "sound": {"audio": "a.flac", "source": "a.wav"},
    "a page": {"url": "https://a.org/b.html"},
    "a host": {"url": "https://a.com.au", "domain": "a.net.au", "site": "https://a.mov"},
    "format": {"format": "jpg", "ending": ".jpg"},
    "code": {"module": "src/a.mts", "picture_of": "logo.svg"},
    "lines": {"files": "a.py\nb.jpg"},
    "long": {"code": "x" * 2000 + ".jpg"},
    "base64": {"blob": "abcd" * 9},
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_data_are_no_warning(tmp_path: Path, name: str) -> None:
    record = HONEST[name]
    root = tmp_path if {"image", "images", "audio"} & record.keys() else None  # a root without media is a warning too
    assert warned(od.ShardDataset(lines(tmp_path, record), recipe=RECIPE, media_root=root)) == []


def test_few_addresses_of_pages_are_no_warning_and_a_share_of_them_is(tmp_path: Path) -> None:
    page, picture = {"url": "https://a.org/b"}, {"url": "https://a.org/File:b.jpg"}
    assert warned(od.ShardDataset(lines(tmp_path, picture, *[page] * 100), recipe=RECIPE)) == []
    (message,) = warned(od.ShardDataset(lines(tmp_path, picture, *[page] * 99), recipe=RECIPE))
    assert "'url' (1 sample" in message


@pytest.mark.parametrize("write", [table, stream])
@pytest.mark.parametrize(
    ("column", "field"),
    [
        (["a.jpg", None, "c.jpg"], "img_file"),
        ([["a.jpg"], [], ["b.png", "c.png"]], "img_file"),
        ([{"path": "a.jpg"}, None, {"path": "c.jpg"}], "img_file.path"),
        ([[{"path": "a.jpg"}], None, [{"path": "c.jpg"}]], "img_file.path"),
    ],
)
def test_columns_of_paths_are_one_warning(tmp_path: Path, write: Any, column: list[Any], field: str) -> None:
    (message,) = warned(od.ShardDataset(write(tmp_path, img_file=column), recipe=RECIPE))
    assert f"{field!r} (2 samples, such as 'a.jpg')" in message
    assert "write the bytes into the table, or its rows as JSON Lines" in message


@pytest.mark.parametrize("write", [table, stream])
def test_columns_next_to_the_bytes_of_the_image_are_no_warning(tmp_path: Path, write: Any) -> None:
    bytes_of = [{"bytes": jpeg(40, 30), "path": "a.jpg"}] * 2
    path = write(tmp_path, image=bytes_of, file=["a.jpg"] * 2, meta=[{"thumb": "a.jpg"}] * 2, tags=[[1, 2]] * 2)
    assert warned(od.ShardDataset(path, recipe=RECIPE)) == []


def test_a_file_without_names_in_the_first_rows_of_a_struct_is_not_read_on(tmp_path: Path) -> None:
    rows = [{"thumb": None}] * 64 + [{"thumb": "a.jpg"}]
    assert warned(od.ShardDataset(table(tmp_path, meta=rows), recipe=RECIPE)) == []
    assert len(warned(od.ShardDataset(table(tmp_path, meta=rows[1:]), recipe=RECIPE))) == 1


def without_name(record: dict[str, Any]) -> dict[str, Any]:
    return {"text": record["text"]}


def with_image(record: dict[str, Any]) -> dict[str, Any]:
    return {"text": record["text"], "image": record["meta"]["image"]}


def passing(record: dict[str, Any]) -> dict[str, Any]:
    return record


class Rows(od.Container):
    """A JSON value in each line is a sample."""

    def claims(self, path: str) -> bool:
        return path.endswith(".rows")

    def open(self, source: od.ShardSource, context: od.OpenContext) -> Lines:
        return Lines(source.read(0, source.size).decode().splitlines(), json.loads)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"thumb": "a.jpg"}, ["'thumb' (1 sample"]),
        ({"meta": {"image": "a.jpg"}}, ["'meta.image' (1 sample"]),
        ({"title": "a cat", "meta": {"lang": "en"}, "id": "a.jpg"}, []),
    ],
)
def test_containers_of_the_user_s_are_watched_too(tmp_path: Path, sample: dict[str, Any], words: list[str]) -> None:
    (tmp_path / "a.rows").write_text(json.dumps({"text": WORDS, **sample}))
    messages = warned(od.ShardDataset(tmp_path / "a.rows", recipe=RECIPE, containers=[Rows()]))
    assert len(messages) == len(words) and all(part in message for part, message in zip(words, messages, strict=True))


def modalities(dataset: od.ShardDataset) -> set[str]:
    return {part.modality for part in dataset[0].parts if not isinstance(part, TextPart)}


def test_the_ways_out_that_the_warning_names_work(tmp_path: Path) -> None:
    path = lines(tmp_path, {"thumb": "a.jpg"})
    renamed = od.ShardDataset(path, recipe=RECIPE, media_root=tmp_path, columns={"thumb": "image"})
    assert warned(renamed) == [] and modalities(renamed) == {"image"}
    assert warned(od.ShardDataset(path, recipe=replace(RECIPE, record=without_name))) == []
    assert len(warned(od.ShardDataset(path, recipe=replace(RECIPE, record=passing)))) == 1
    assert (
        warned(od.ShardDataset(lines(tmp_path, {"thumbs": ["a.jpg"]}), recipe=replace(RECIPE, keep=("thumbs",)))) == []
    )
    nested = lines(tmp_path, {"meta": {"image": "a.jpg"}})
    made = od.ShardDataset(nested, recipe=replace(RECIPE, record=with_image), media_root=tmp_path)
    assert warned(made) == [] and modalities(made) == {"image"}
    assert (
        warned(od.ShardDataset(table(tmp_path, img_file=["a.jpg"]), recipe=replace(RECIPE, record=without_name))) == []
    )


def test_members_of_tars_in_formats_that_no_class_decodes_are_one_warning(tmp_path: Path) -> None:
    samples = [{"__key__": f"{at}", "heic": b"...", "1.m4a": b"...", "txt": WORDS.encode()} for at in range(3)]
    (message,) = warned(od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=RECIPE))
    assert message.startswith("media in formats that are not read") and ".heic (3)" in message and ".m4a (3)" in message
    copies = [{"__key__": "0", "jpg": jpeg(40, 30), "raw.heic": b"...", "txt": WORDS.encode()}]
    assert warned(od.ShardDataset(write_shard(tmp_path / "b.tar", copies), recipe=RECIPE)) == []


def test_clips_in_tars_under_a_recipe_without_video_are_one_warning(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [{"__key__": "0", "mp4": b"...", "txt": WORDS.encode()}])
    with pytest.warns(UserWarning, match=r"the model gets the text without them: video \(1\)"):
        od.DataLoader(od.ShardDataset(shard, recipe=RECIPE), batch_size=1)


def test_an_index_of_before_opens_and_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path, {"thumb": "a.jpg"})
    with monkeypatch.context() as before:
        before.setattr(RecordReader, "unread_names", lambda reader, data, made: {})
        built = od.ShardDataset(path, recipe=RECIPE).index()
    assert UNREAD not in built.totals
    assert warned(od.ShardDataset(path, recipe=RECIPE)) == []
    assert od.ShardDataset(path, recipe=RECIPE).index().build_id == built.build_id
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "another cache"))
    assert od.ShardDataset(path, recipe=RECIPE).index().totals[UNREAD] == {
        "image": {"thumb": {"samples": 1, "example": "a.jpg"}}
    }


def test_hostile_names_are_counted_in_bounded_memory() -> None:
    unread = UnreadNames()
    for number in range(100):
        unread.add(names_in({f"{number}\ud800": {"\udcff" * 200: "\ud800" * 99 + ".jpg"}}), ())
    (fields,) = unread.counts.values()
    assert len(fields) == 16 and json.dumps(fields).isascii()
    assert all(len(field) < 999 and field.encode() and each["example"].encode() for field, each in fields.items())
    deep: Any = "a.jpg"
    for _ in range(5000):
        deep = {"a": [deep]}
    assert names_in(deep) == {}
    assert names_in({"a": [{"b": [{"c": "d.jpg"}]}]}) == {"a.b.c": ("image", "d.jpg")}


@pytest.mark.parametrize("ending", [*_ENDINGS, "txt", "html", "au"])
def test_the_quick_look_at_a_record_finds_all_that_the_record_names(ending: str) -> None:
    for value in (
        f"a.{ending}",
        f"b.c/a.{ending.upper()}",
        f"https://a.org/b.{ending}?c=d",
        f"https://a.org/b.{ending}#c",
    ):
        stored = [json.dumps({"thumb": value}), f"1,{value},2\r\n", f"1\t{value}\n", f"1,{value}", f'"{value}"']
        is_name = bool(names_in({"thumb": value}))
        assert is_name == (ending in _ENDINGS)
        assert [may_name_media(data.encode()) for data in stored] == [is_name] * len(stored)


def test_counts_of_shards_are_added_with_the_first_example() -> None:
    one = {"image": {"a": {"samples": 2, "example": "b.jpg"}}}
    other = {"image": {"a": {"samples": 3, "example": "c.jpg"}}, "video": {"d": {"samples": 1, "example": "e.mp4"}}}
    assert sum_unread([one, other]) == {
        "image": {"a": {"samples": 5, "example": "b.jpg"}},
        "video": {"d": {"samples": 1, "example": "e.mp4"}},
    }
    assert one["image"]["a"]["samples"] == 2  # the counts of the shard stay


@pytest.mark.parametrize(
    ("value", "modality"),
    [
        ("my cat.jpeg", "image"),
        ("C:\\a\\b.JPG", "image"),
        ("https://a.org/b?url=c.jpg", "image"),
        ("https://a.org/b.mp3#t=3", "audio"),
        ("a.b/c.webm", "video"),
        ("a.jpg.txt", None),
        ("https://b.mov", None),
        ("images/.jpg", None),
        ("", None),
    ],
)
def test_values_that_name_media(value: str, modality: str | None) -> None:
    assert modality_named(value) == modality
