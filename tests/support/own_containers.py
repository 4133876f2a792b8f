"""Containers of a user's: of several designs, good ones and broken ones. Workers import this module."""

from __future__ import annotations

import errno
import json
import sqlite3
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from shard_factory import chat, jpeg

import orchdata as od


class ZipShard(od.Shard):
    """Files called key.field in a zip."""

    parallel = True

    def __init__(self, source: od.ShardSource) -> None:
        self._zip = zipfile.ZipFile(source.file())
        self._names: dict[str, list[str]] = {}
        for name in self._zip.namelist():
            self._names.setdefault(name.partition(".")[0], []).append(name)
        self._keys = list(self._names)

    def keys(self) -> list[str]:
        return self._keys

    def sample(self, number: int) -> dict[str, bytes]:
        names = self._names[self._keys[number]]
        return {name.partition(".")[2]: self._zip.read(name) for name in names}

    def close(self) -> None:
        self._zip.close()


@dataclass(frozen=True)
class Zips(od.Container):
    suffix: str = ".zip"

    def claims(self, path: str) -> bool:
        return path.endswith(self.suffix)

    def open(self, source: od.ShardSource, context: od.OpenContext) -> ZipShard:
        return ZipShard(source)


class ArrayShard(od.Shard):
    """Arrays of a .npz: captions, and images of one size as JPEG bytes."""

    def __init__(self, source: od.ShardSource) -> None:
        with source.file() as file, np.load(file) as arrays:
            self._texts, self._scores = arrays["text"].tolist(), arrays["score"]

    def keys(self) -> Iterator[str]:
        return (f"row{number}" for number in range(len(self._texts)))

    def sample(self, number: int) -> dict[str, Any]:
        return {"text": self._texts[number], "score": self._scores[number], "nothing": None}


@dataclass(frozen=True)
class Arrays(od.Container):
    def claims(self, path: str) -> bool:
        return path.endswith(".npz")

    def open(self, source: od.ShardSource, context: od.OpenContext) -> ArrayShard:
        return ArrayShard(source)


class SqliteShard(od.Shard):
    """Rows of a data base: an image and a chat."""

    def __init__(self, path: str) -> None:
        self._base = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)
        self._keys = [key for (key,) in self._base.execute("SELECT key FROM samples ORDER BY key")]

    def keys(self) -> list[str]:
        return self._keys

    def sample(self, number: int) -> dict[str, Any]:
        row = self._base.execute("SELECT image, chat FROM samples WHERE key = ?", (self._keys[number],)).fetchone()
        return {"image": [row[0]], "messages": json.loads(row[1])}

    def close(self) -> None:
        self._base.close()


@dataclass(frozen=True)
class Sqlites(od.Container):
    def claims(self, path: str) -> bool:
        return path.endswith(".db")

    def open(self, source: od.ShardSource, context: od.OpenContext) -> SqliteShard:
        return SqliteShard(source.url)


class BlobShard(od.Shard):
    """One file: for each sample the sizes of an image and a text, and both. Nothing is read but their places."""

    def __init__(self, source: od.ShardSource) -> None:
        self._source = source
        self._places: list[tuple[od.ByteRange, od.ByteRange]] | None = None

    def keys(self) -> list[str]:
        return [str(number) for number in range(len(self._found()))]

    def sample(self, number: int) -> dict[str, od.ByteRange]:
        image, text = self._found()[number]
        return {"jpg": image, "txt": text}

    def _found(self) -> list[tuple[od.ByteRange, od.ByteRange]]:
        if self._places is None:
            self._places, at = [], 0
            while at < self._source.size:
                image, text = np.frombuffer(self._source.read(at, 16), np.int64).tolist()
                self._places.append((od.ByteRange(at + 16, image), od.ByteRange(at + 16 + image, text)))
                at += 16 + image + text
        return self._places


@dataclass(frozen=True)
class Blobs(od.Container):
    def claims(self, path: str) -> bool:
        return path.endswith(".blob")

    def open(self, source: od.ShardSource, context: od.OpenContext) -> BlobShard:
        return BlobShard(source)


class FolderShard(od.Shard):
    """A folder of images, each with a class named by its folder."""

    def __init__(self, source: od.ShardSource) -> None:
        self._source = source
        self._names = [name for name in source.names() if name.endswith(".jpg")]

    def keys(self) -> list[str]:
        return [name.removesuffix(".jpg") for name in self._names]

    def sample(self, number: int) -> dict[str, Any]:
        name = self._names[number]
        return {"jpg": self._source.read_file(name), "caption": f"a {PurePath(name).parent.name}"}


@dataclass(frozen=True)
class Folders(od.Container):
    """A folder whose name ends in "photos" has one shard for each folder in it."""

    def claims(self, path: str) -> bool:
        return any(part.endswith("photos") for part in PurePath(path).parts)

    def shards(self, storage: Any, path: str) -> list[str]:
        tops = sorted({name.partition("/")[0] for name in storage.names(path) if "/" in name})
        return [f"{path}/{top}" for top in tops] or [path]

    def open(self, source: od.ShardSource, context: od.OpenContext) -> FolderShard:
        return FolderShard(source)


class ListShard(od.Shard):
    """A JSON list of [key, {field: value}]."""

    parallel = True

    def __init__(self, content: bytes) -> None:
        self._samples: list[tuple[str, dict[str, Any]]] = json.loads(content)

    def keys(self) -> list[str]:
        return [key for key, _ in self._samples]

    def sample(self, number: int) -> dict[str, Any]:
        return self._samples[number][1]


@dataclass(frozen=True)
class Lists(od.Container):
    def claims(self, path: str) -> bool:
        return path.endswith(".list")

    def open(self, source: od.ShardSource, context: od.OpenContext) -> ListShard:
        return ListShard(source.read(0, source.size))


class Lines(od.Shard):
    """A sample for each line of a text, made by a function."""

    def __init__(self, lines: list[str], make: Callable[[str], Any]) -> None:
        self._lines, self._make = lines, make

    def keys(self) -> Iterable[str]:
        return [f"line{number}" for number in range(len(self._lines))]

    def sample(self, number: int) -> Any:
        return self._make(self._lines[number])


@dataclass(frozen=True)
class Broken(od.Container):
    """Lines of a .lines file; `how` says what is wrong with it."""

    how: str = ""

    def claims(self, path: str) -> Any:
        return "yes" if self.how == "claims" else path.endswith(".lines") and self.how != "claims nothing"

    def shards(self, storage: Any, path: str) -> Any:
        return {"shards": None, "other shards": ["/somewhere/else.tar"]}.get(self.how, [path])

    def open(self, source: od.ShardSource, context: od.OpenContext) -> Any:
        if self.how == "open":
            raise RuntimeError("no key for this file")
        if self.how == "open returns":
            return source.read(0, source.size)
        return _broken_lines(self.how)(source.read(0, source.size).decode().split(), lambda line: made(self.how, line))

    def describe(self) -> Any:
        described = super().describe()
        return {"describe": {**described, "tuple": (1, 2)}, "describe raises": None}.get(self.how, described)


def made(how: str, line: str) -> Any:
    """The fields of a line."""
    if line == "bad":
        if how == "disk":
            raise OSError(errno.EIO, "Input/output error")
        if how == "package":
            import a_package_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401
        return {
            "sample": 1 // 0 if how == "sample" else None,
            "type": {"text": object()},
            "range": {"txt": od.ByteRange(10, 1 << 40)},
            "name": {7: "x"},
        }.get(how, {"text": line})
    return {"text": line}


def _broken_lines(how: str) -> type[Lines]:
    class Broken(Lines):
        def keys(self) -> Any:
            keys = list(super().keys())
            return {
                "same keys": [keys[0], *keys[:-1]],
                "keys": "abc",
                "numbers": list(range(len(keys))),
                "no keys": [],
            }.get(how, keys)

    return Broken


def zip_file(path: Path, count: int = 12, *, prefix: str = "k") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(count):
            archive.writestr(f"{prefix}{number}.jpg", jpeg(32 + 8 * number, 32, number))
            archive.writestr(f"{prefix}{number}.json", chat(f"<image> what is {number}?", f"the number {number}"))
            archive.writestr(f"{prefix}{number}.cls", str(number))
    return path


def written(folder: Path) -> dict[od.Container, Path]:
    """Write a path for each container."""
    np.savez(folder / "a.npz", text=np.array([f"words of row {n}" for n in range(9)]), score=np.arange(9) / 2)
    base = sqlite3.connect(folder / "a.db")
    base.execute("CREATE TABLE samples (key TEXT, image BLOB, chat TEXT)")
    for number in range(7):
        turns = chat(f"<image> number {number}?", "yes").decode()
        base.execute("INSERT INTO samples VALUES (?, ?, ?)", (f"k{number}", jpeg(40, 24 + 8 * number, number), turns))
    base.commit()
    base.close()
    with (folder / "a.blob").open("wb") as blob:
        for number in range(8):
            image, text = jpeg(24 + 8 * number, 24, number), f"<image> number {number}".encode()
            blob.write(np.array([len(image), len(text)]).tobytes() + image + text)
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/old/3.jpg"):
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(32, 40, len(name)))
    return {
        Zips(): zip_file(folder / "a.zip"),
        Arrays(): folder / "a.npz",
        Sqlites(): folder / "a.db",
        Blobs(): folder / "a.blob",
        Folders(): folder / "photos",
    }


def values_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A function for `Recipe.record`: the text and the number of a row of `Arrays`."""
    return {"text": f"{record['text']} scores {record['score']:.1f} and {record['nothing']}"}
