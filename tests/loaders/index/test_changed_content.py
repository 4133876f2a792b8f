"""Cached files with changed content and fitting checksums: refused, or built again, and never a raw error."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import in_a_child
from own_modalities import Tracks, track
from shard_factory import omni_samples, write_shard

import orchdata as od
from orchdata.loaders.errors import DamagedIndexError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index_file import open_index
from orchdata.loaders.index.table import LAYOUT, TableSize, _positions
from orchdata.loaders.storage import sealed
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import Damaged, read_sealed, seal

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

WRONG = (None, -1, 1 << 70, 1.5, "x", [], {}, True, [[]], {"a": 1}, float("nan"))
DEEP = "nested deeply"
RECIPE = od.Recipe(text=od.TextPreprocessor(max_tokens=60, overflow="split"), tracks=Tracks())


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """A tar with every modality, one with a bad sample, and a file of records; some samples are split."""
    bad = {"__key__": "bad", "txt": b"see <image>"}
    own = [{"__key__": f"own{i}", "track": track(4 + i), "txt": b"<track> heard"} for i in range(3)]
    records = [{"id": f"c{i}", "text": "some words of text " * (1 + i)} for i in range(9)]
    (tmp_path / "c.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, records))))
    return [
        write_shard(tmp_path / "a.tar", [*omni_samples(7, prefix="a"), *own]),
        write_shard(tmp_path / "b.tar", [*omni_samples(4, prefix="b"), bad]),
        str(tmp_path / "c.jsonl"),
    ]


@dataclass(frozen=True)
class Kept:
    """A cached file, parsed."""

    path: Path
    kind: bytes
    format: int
    values: dict[str, Any]
    body: bytes

    @classmethod
    def of(cls, path: Path) -> Kept:
        _, kind, format, *_ = sealed._FIXED.unpack_from(path.read_bytes())
        head, body = read_sealed(path, kind, format)
        return cls(path, kind, format, head.values, bytes(body))

    def sealed(self, values: Any, body: bytes) -> bytes:
        """The file with another content, and checksums that fit it."""
        real = json.dumps
        with pytest.MonkeyPatch.context() as patch:
            deep = "[" * 50_000 + "]" * 50_000
            patch.setattr(
                sealed.json, "dumps", lambda value, **_: real(value, sort_keys=True).replace(f'"{DEEP}"', deep)
            )
            return seal(self.kind, self.format, values, [body])[0]

    def changed(self) -> Iterator[tuple[str, bytes]]:
        """Change or remove each value of the head in turn, and change numbers of the body."""
        wrong = itertools.cycle(WRONG)
        for at in places({name: value for name, value in self.values.items() if name != "recipe"}):
            for value in (next(wrong), next(wrong)):
                yield f"{at} = {value!r}", self.sealed(with_value(self.values, at, value), self.body)
            yield f"without {at}", self.sealed(without(self.values, at), self.body)
        for name in self.values:
            yield f"{name} is deep", self.sealed({**self.values, name: DEEP}, self.body)
        for head in (None, [], 3):
            yield f"the head is {head}", self.sealed(head, self.body)
        for what, body in self.bodies():
            yield what, self.sealed(self.values, body)

    def bodies(self) -> Iterator[tuple[str, bytes]]:
        size = TableSize(**self.values["size"])
        for name, start in _positions(size)[0].items():
            dtype = LAYOUT[name][0]
            limits, count = np.iinfo(dtype), size.items(name)
            for item in {0, count // 2, count - 1} if count else ():
                at, width = start + item * np.dtype(dtype).itemsize, np.dtype(dtype).itemsize
                for number in (limits.min, limits.max):
                    body = self.body[:at] + np.array([number], dtype).tobytes() + self.body[at + width :]
                    if body != self.body:
                        yield f"{name}[{item}] = {number}", body


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of the values of a head; of a list the first and last."""
    if at:
        yield at
    if isinstance(value, dict):
        inner: Any = value
    else:
        inner = {0, len(value) - 1} if isinstance(value, list) and value else ()
    for name in inner:
        yield from places(value[name], (*at, name))


def with_value(values: Any, at: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(values)
    inner_of(changed, at)[at[-1]] = value
    return changed


def without(values: Any, at: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(values)
    del inner_of(changed, at)[at[-1]]
    return changed


def inner_of(values: Any, at: tuple[Any, ...]) -> Any:
    for name in at[:-1]:
        values = values[name]
    return values


def kept_files(suffix: str) -> list[Path]:
    return sorted(CacheFolder().root.rglob(f"*.{suffix}"))


def first_steps(shards: list[str]) -> None:
    """Open, plan with, and read an index."""
    dataset = od.ShardDataset(shards, RECIPE)
    skip = od.ErrorPolicy("skip", max_failures=None)
    for _ in zip(range(2), od.DataLoader(dataset, batch_size=4, on_error=skip), strict=False):
        pass
    index = dataset.index()
    for row in range(index.num_rows):
        index.called(row), index.members(row), index.read_spec(row), index.find(index.shard_of(row).url, index.key(row))
    for row in index.bad_rows().tolist():
        index.failure(row)
    index.lost_samples()


def test_a_changed_index_is_damaged(shards: list[str]) -> None:
    build_index(shards, RECIPE)
    kept = Kept.of(kept_files("index")[0])

    def try_all() -> None:
        outcomes: Counter[str] = Counter()
        for what, data in kept.changed():
            print(what, file=sys.stderr)
            kept.path.write_bytes(data)
            try:
                assert open_index(shards, RECIPE) is not None
            except DamagedIndexError as error:
                assert str(kept.path) in str(error)
                outcomes["refused"] += 1
                continue
            outcomes["opened"] += 1
            if outcomes["opened"] % 2 == 0:  # another header or key may be that of a sample: it is seen at its use
                with contextlib.suppress(DamagedIndexError):
                    first_steps(shards)
        assert outcomes["refused"] > 200 and outcomes["opened"] < 100, outcomes

    in_a_child(try_all)


def test_a_file_that_is_longer_than_memory_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file costs nothing to write."""
    path = tmp_path / "x"
    path.write_bytes(seal(b"cost", 1, {"a": "b"}, [bytes(100_000)])[0])

    def no_room(size: int) -> bytearray:
        if size < 100_000:
            return bytearray(size)
        raise MemoryError(size)

    monkeypatch.setattr(sealed, "bytearray", no_room, raising=False)
    with pytest.raises(Damaged, match="100000 bytes are to be read together, and there is no memory"):
        read_sealed(path, b"cost", 1)
