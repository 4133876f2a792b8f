"""Containers of a user's: of several designs, good ones and broken ones. Workers import this module."""

from __future__ import annotations

import errno
import json
import sqlite3
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from shard_factory import chat, jpeg

import orchdata as od


class Ending(od.Container):
    """Paths of one ending, opened as `kind`."""

    end = ""
    kind: ClassVar[Any] = None

    def claims(self, path: str) -> bool:
        return path.endswith(self.end)

    def open(self, source: od.ShardSource) -> Any:
        return self.kind(source)


class ZipShard:
    """Files called key.field in a zip."""

    def __init__(self, source: od.ShardSource) -> None:
        self._zip = zipfile.ZipFile(source.file())
        self._names = self._zip.namelist()

    def facts(self) -> pa.Table:
        parts = [name.partition(".") for name in self._names]
        return pa.table({"key": [key for key, _, _ in parts], "field": [field for _, _, field in parts]})

    def read(self, rows: Sequence[int]) -> list[bytes]:
        return [self._zip.read(self._names[row]) for row in rows]

    def close(self) -> None:
        self._zip.close()


@dataclass(frozen=True)
class Zips(Ending):
    end, kind = ".zip", ZipShard


class ArrayShard(od.Shard):
    """Arrays of a .npz: captions and scores."""

    def __init__(self, source: od.ShardSource) -> None:
        with source.file() as file, np.load(file) as arrays:
            self._texts, self._scores = arrays["text"].tolist(), arrays["score"].tolist()

    def facts(self) -> pa.Table:
        keys = [f"row{number}" for number in range(len(self._texts)) for _ in range(2)]
        return pa.table({"key": keys, "field": ["text", "score"] * len(self._texts)})

    def read(self, rows: Sequence[int]) -> list[str]:
        return [json.dumps(self._scores[row // 2]) if row % 2 else self._texts[row // 2] for row in rows]


@dataclass(frozen=True)
class Arrays(Ending):
    end, kind = ".npz", ArrayShard


class SqliteShard:
    """Rows of a data base: an image and a chat."""

    def __init__(self, source: od.ShardSource) -> None:
        self._base = sqlite3.connect(f"file:{source.url}?mode=ro", uri=True, check_same_thread=False)
        self._keys = [key for (key,) in self._base.execute("SELECT key FROM samples ORDER BY key")]

    def facts(self) -> pa.Table:
        keys = [key for key in self._keys for _ in range(2)]
        return pa.table({"key": keys, "field": ["image", "json"] * len(self._keys)})

    def read(self, rows: Sequence[int]) -> list[Any]:
        select = ("SELECT image FROM samples WHERE key = ?", "SELECT chat FROM samples WHERE key = ?")
        return [self._base.execute(select[row % 2], (self._keys[row // 2],)).fetchone()[0] for row in rows]

    def close(self) -> None:
        self._base.close()


@dataclass(frozen=True)
class Sqlites(Ending):
    end, kind = ".db", SqliteShard


class FolderShard:
    """A folder of images, each with a class named by its folder."""

    def __init__(self, source: od.ShardSource) -> None:
        self._folder = Path(source.url)
        self._names = sorted(str(path.relative_to(self._folder)) for path in self._folder.rglob("*.jpg"))

    def facts(self) -> pa.Table:
        keys = [name.removesuffix(".jpg") for name in self._names for _ in range(2)]
        return pa.table({"key": keys, "field": ["jpg", "caption"] * len(self._names)})

    def read(self, rows: Sequence[int]) -> list[bytes | str]:
        names = [self._names[row // 2] for row in rows]
        return [
            f"a {PurePath(name).parent.name}" if row % 2 else (self._folder / name).read_bytes()
            for name, row in zip(names, rows, strict=True)
        ]


@dataclass(frozen=True)
class Folders(Ending):
    end, kind = "photos", FolderShard


class ListShard:
    """A JSON list of [key, {field: text}]."""

    def __init__(self, source: od.ShardSource) -> None:
        content = source.read(0, source.size)
        self._rows = [(key, field, text) for key, fields in json.loads(content) for field, text in fields.items()]

    def facts(self) -> pa.Table:
        return pa.table({"key": [key for key, _, _ in self._rows], "field": [field for _, field, _ in self._rows]})

    def read(self, rows: Sequence[int]) -> list[str]:
        return [self._rows[row][2] for row in rows]


@dataclass(frozen=True)
class Lists(Ending):
    end, kind = ".list", ListShard


class Lines:
    """A sample for each line of a text, made by a function."""

    def __init__(self, how: str, lines: list[str], make: Callable[[str], Any]) -> None:
        self._how, self._lines, self._make = how, lines, make

    def facts(self) -> Any:
        keys = [f"line{number}" for number in range(len(self._lines))]
        others = {"same keys": [*keys[:-1], keys[0]], "numbers": list(range(len(keys))), "no keys": []}
        if self._how == "same fields":
            keys = [keys[0], *keys[:-1]]
        keys = others.get(self._how, keys)
        return "abc" if self._how == "keys" else pa.table({"key": keys, "field": ["text"] * len(keys)})

    def read(self, rows: Sequence[int]) -> Any:
        return [self._make(self._lines[row]) for row in rows if self._how != "few"]


@dataclass(frozen=True)
class Broken(od.Container):
    """Lines of a .lines file; `how` says what is wrong with it."""

    how: str = ""

    def claims(self, path: str) -> Any:
        return path.endswith(".lines") and self.how != "claims nothing"

    def open(self, source: od.ShardSource) -> Any:
        if self.how == "open":
            raise RuntimeError("no key for this file")
        if self.how == "open returns":
            return source.read(0, source.size)
        return Lines(self.how, source.read(0, source.size).decode().split(), lambda line: made(self.how, line))

    def describe(self) -> Any:
        described = super().describe()
        return {**described, "value": object()} if self.how == "describe" else described


def made(how: str, line: str) -> Any:
    """The text of a line."""
    if line == "bad":
        if how == "disk":
            raise OSError(errno.EIO, "Input/output error")
        if how == "package":
            import a_package_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401
        return {"sample": 1 // 0 if how == "sample" else None, "type": {1: 2}}.get(how, line)
    return line


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
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/old/3.jpg"):
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(32, 40, len(name)))
    return {
        Zips(): zip_file(folder / "a.zip"),
        Arrays(): folder / "a.npz",
        Sqlites(): folder / "a.db",
        Folders(): folder / "photos",
    }


def values_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A function for `Recipe.record`: the text of a row of `Arrays`."""
    return {"text": f"{record['text']}, once more"}
