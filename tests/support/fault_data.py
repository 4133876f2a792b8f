"""Small data sets that are built and loaded under faults.

A mixture of shards with a bad one among them, in two folders, `good` and `bad`; and one of each container, in a folder
of its name: shards, files of records, or a folder that is given as a whole. `media`, where it is there, is what names
in the records are relative to.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import shard_factory
import zstandard
from own_modalities import Points, cloud
from shard_factory import audio, chat, jpeg, omni_samples, png, write_shard

import orchdata as od

MEDIA = "media"
HAS_VIDEO = importlib.util.find_spec("av") is not None

_VIDEO = od.VideoPreprocessor(patch_size=8, merge=2, fps=2, min_tokens=1, max_tokens=12, dtype="float32")
RECIPE = od.Recipe(
    image=shard_factory.RECIPE.modalities["image"],
    audio=shard_factory.RECIPE.modalities["audio"],
    points=Points(),
    **({"video": _VIDEO} if HAS_VIDEO else {}),
)


def given(folder: Path) -> tuple[list[Path], Path | None]:
    """The paths and the media_root of a container, as a data set is given them."""
    media = folder / MEDIA
    return sorted(path for path in folder.iterdir() if path != media), media if media.exists() else None


def write_mixture(folder: Path) -> None:
    """Each kind of shard with images and audio; one shard with bad samples apart, since on_error="raise" refuses it."""
    good, bad = folder / "good", folder / "bad"
    good.mkdir()
    bad.mkdir()
    write_shard(good / "a.tar", omni_samples(5, prefix="a", seed=1))
    for name, compress in (("b.tar.gz", gzip.compress), ("c.tar.zst", zstandard.ZstdCompressor().compress)):
        _write_compressed(good / name, omni_samples(5, prefix=name[0], seed=2), compress)
    pq.write_table(_table()[0], good / "d.parquet", row_group_size=2)
    cut = jpeg(300, 200, 9)[:3000]
    samples = [
        {"__key__": "sound", "jpg": jpeg(50, 50), "json": chat("<image>", "an image")},
        {"__key__": "cut", "jpg": cut, "txt": b"the picture ends early"},
        {"__key__": "missing", "txt": b"an <image> that is not there"},
    ]
    write_shard(bad / "e.tar", samples)


def write_containers(folder: Path) -> dict[str, list[str]]:
    """Each container in a folder of its name; the keys of its samples, in order."""
    keys = {}
    for name, write in CONTAINERS.items():
        (folder / name).mkdir(parents=True)
        keys[name] = write(folder / name)
    return keys


def _clip() -> bytes:
    from video_clips import clip  # needs PyAV

    return clip("mpeg4", frames=12, size=(48, 32))


def _samples(prefix: str) -> list[dict[str, Any]]:
    samples = omni_samples(5, prefix=prefix, seed=1)
    if HAS_VIDEO:
        samples.append({"__key__": f"{prefix}clip", "mp4": _clip(), "txt": b"a clip"})
    return samples


def _write_compressed(path: Path, samples: list[dict[str, Any]], compress: Callable[[bytes], bytes]) -> None:
    plain = path.with_name("plain")
    write_shard(plain, samples)
    path.write_bytes(compress(plain.read_bytes()))
    plain.unlink()


def _tar(name: str, compress: Callable[[bytes], bytes] = bytes) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        samples = _samples(name.rpartition(".")[2])
        _write_compressed(folder / name, samples, compress)
        return [sample["__key__"] for sample in samples]

    return write


def _points(folder: Path) -> list[str]:
    """Parts of a modality that counts from bytes."""
    samples = [
        {"__key__": "q0", "npy": cloud(5), "txt": b"<points> words"},
        {"__key__": "q1", "0.npy": cloud(9), "1.npy": cloud(4), "jpg": jpeg(60, 80, 1), "txt": b"points and a picture"},
        {"__key__": "q2", "txt": b"only words"},
    ]
    write_shard(folder / "points.tar", samples)
    return [str(sample["__key__"]) for sample in samples]


def _table() -> tuple[pa.Table, list[str]]:
    rows: dict[str, list[Any]] = {
        "__key__": ["r0", "r1", "r2", "r3"],
        "image": [{"bytes": jpeg(60, 80, 1), "path": None}, {"bytes": png(90, 40, 2), "path": None}, None, None],
        "audio": [None, None, {"bytes": audio(0.5), "path": None}, None],
        "text": ["first", "second", "third", "fourth"],
    }
    return pa.table(rows), rows["__key__"]


def _parquet(folder: Path) -> list[str]:
    table, keys = _table()
    pq.write_table(table, folder / "rows.parquet", row_group_size=2)
    return keys


def _feather(folder: Path) -> list[str]:
    table, keys = _table()
    pyarrow.feather.write_feather(table, str(folder / "rows.arrow"), compression="uncompressed", chunksize=2)
    return keys


def _saved(folder: Path) -> list[str]:
    """As `save_to_disk` of `datasets` leaves it: a folder with a description, and streams."""
    table, keys = _table()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    (folder / "saved").mkdir()
    for number, name in enumerate(names):
        with pa.OSFile(str(folder / "saved" / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table.slice(2 * number, 2), max_chunksize=1)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "saved" / "state.json").write_text(json.dumps(state))
    return keys


def _media(folder: Path) -> None:
    """Files that records name: one in a folder, and one by a link."""
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jpg").write_bytes(jpeg(60, 80, 1))
    (folder / "deep" / "b.png").write_bytes(png(90, 40, 2))
    (folder / "linked.jpg").symlink_to("a.jpg")
    (folder / "c.wav").write_bytes(audio(0.5))
    if HAS_VIDEO:
        (folder / "d.mp4").write_bytes(_clip())
        for number in range(3):
            (folder / "deep" / f"{number}.jpg").write_bytes(jpeg(48, 32, number))


def _records() -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [
        {"text": "no media"},
        {"text": "<image> and <image>", "images": ["a.jpg", "deep/b.png"]},
        {"messages": json.loads(chat("<image> by a link", "an answer")), "image": "linked.jpg"},
        {"text": "a sound", "audio": "c.wav"},
    ]
    if HAS_VIDEO:
        records.append({"text": "a clip", "video": "d.mp4"})
        frames = {"frames": [f"deep/{number}.jpg" for number in range(3)], "fps": 2.0}
        records.append({"text": "pictures of a clip", "videos": [frames]})
    return [{"id": f"j{number}", **record} for number, record in enumerate(records)]


def _lines(folder: Path) -> list[str]:
    _media(folder / MEDIA)
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in _records()))
    return [record["id"] for record in _records()]


def _array(folder: Path) -> list[str]:
    _media(folder / MEDIA)
    (folder / "records.json").write_text(json.dumps(_records(), indent=1))
    return [record["id"] for record in _records()]


def _comma_separated(folder: Path) -> list[str]:
    _media(folder / MEDIA)
    rows = [("v0", "a.jpg", "first"), ("v1", "deep/b.png", "second"), ("v2", "linked.jpg", "third")]
    _write_rows(folder / "table.csv", [("id", "image", "text"), *rows])
    return [key for key, _, _ in rows]


def _folder_with_csv(folder: Path) -> list[str]:
    _media(folder / "photos")
    names = ["a.jpg", "deep/b.png", "linked.jpg", "c.wav"]
    rows = [(name, f"what {name} shows") for name in names]
    _write_rows(folder / "photos" / "metadata.csv", [("file_name", "text"), *rows])
    return names


def _folder_with_lines(folder: Path) -> list[str]:
    _media(folder / "photos")
    names = ["a.jpg", "c.wav"]
    lines = [json.dumps({"file_name": name, "text": f"what {name} holds"}) for name in names]
    (folder / "photos" / "metadata.jsonl").write_text("\n".join(lines))
    return names


def _write_rows(path: Path, rows: Iterable[Iterable[str]]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


CONTAINERS: dict[str, Callable[[Path], list[str]]] = {
    "tar": _tar("shard.tar"),
    "tar.gz": _tar("shard.tar.gz", gzip.compress),
    "tar.zst": _tar("shard.tar.zst", zstandard.ZstdCompressor().compress),
    "parquet": _parquet,
    "arrow": _saved,
    "feather": _feather,
    "jsonl": _lines,
    "json": _array,
    "csv": _comma_separated,
    "metadata.csv": _folder_with_csv,
    "metadata.jsonl": _folder_with_lines,
    "points": _points,
}
