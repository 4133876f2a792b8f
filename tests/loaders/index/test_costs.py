"""Costs of a shard: the members that are read, the rows, and the errors."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from orchdata.loaders import recipe as recipes
from orchdata.loaders.errors import FieldError, StaleIndexError, StorageError
from orchdata.loaders.index.costs import CostTable, ShardCosts, cost_shard
from orchdata.loaders.index.facts import KIND, Probes, facts_path, load_facts
from orchdata.loaders.index.index import views
from orchdata.loaders.index.kept import KEPT_FORMAT
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.fields import GZIP, RAW
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.shard import SCHEMA, Facts, FactsMeta, FactsTable, Shard, ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import read_sealed, seal

IMAGE, AUDIO = 1, 2

ROW = {"sample": 0, "key": "k", "field": "txt", "kind": TEXT, "offset": 0, "size": 0, "encoding": RAW, "error": None}
HEADERS = {"header0": 0, "header1": 0}


class FakeShard:
    """Bytes in memory that record how they are read."""

    url, version = "fake.tar", "1"

    def __init__(self, content: bytes, unreadable: range = range(0)) -> None:
        self.content = content
        self.size = len(content)
        self.unreadable = unreadable
        self.reads: list[tuple[int, int]] = []
        self.opened = self.closed = 0

    def open(self) -> FakeShard:
        self.opened += 1
        return self

    def facts(self) -> Facts:
        raise NotImplementedError

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        self.reads.append((offset, size))
        if max(offset, self.unreadable.start) < min(offset + size, self.unreadable.stop):
            raise FieldError(field, "cut")
        data = self.content[offset : offset + size]
        return gzip.decompress(data) if encoding == GZIP else data

    def read_many(self, members: Any) -> list[bytes | memoryview]:
        return [self.read(*member) for member in members]

    def close(self) -> None:
        self.closed += 1


def facts(*rows: dict[str, Any]) -> Facts:
    table = pa.Table.from_pylist([{**ROW, **HEADERS, **row} for row in rows], schema=SCHEMA)
    return Facts(FactsTable.of_arrow(table), FactsMeta(url="fake.tar", size=3, version="1", checksum=""))


def measured_under(facts: Facts, opened: Callable[[], Any], recipe: Recipe) -> ShardCosts:
    return cost_shard(facts, opened, recipe, Probes(recipe, CacheFolder()))


def text_of(columns: Any, name: str, number: int) -> str:
    start, stop = getattr(columns, f"{name}_offsets")[number : number + 2]
    return bytes(getattr(columns, f"{name}_bytes")[start:stop]).decode()


def errors(costs: ShardCosts) -> dict[str, tuple[str, ...]]:
    columns = costs.columns
    return {
        text_of(columns, "key", row): tuple(text_of(columns, f"error_{name}", number) for name in ("field", "reason"))
        for number, row in enumerate(columns.bad_row.tolist())
    }


def test_neighbouring_texts_are_read_in_one_go() -> None:
    step, gap = 1024, 64 << 10
    rows = [
        {"sample": i, "key": f"k{i}", "offset": i * step + (gap if i >= 300 else 0), "size": 100} for i in range(600)
    ]
    shard = FakeShard(b"x" * (600 * step + gap))
    costs = measured_under(facts(*rows), shard.open, Recipe())
    assert costs.columns.llm_tokens.tolist() == [100] * 600
    assert shard.reads == [(0, 299 * step + 100), (300 * step + gap, 299 * step + 100)]


def test_a_read_ahead_that_fails_blames_the_right_sample() -> None:
    rows = [{"sample": i, "key": f"k{i}", "offset": 100 * i, "size": 50} for i in range(5)]
    costs = measured_under(facts(*rows), FakeShard(b"x" * 500, unreadable=range(210, 220)).open, Recipe())
    assert errors(costs) == {"k2": ("txt", "cut")}
    assert costs.columns.llm_tokens.tolist() == [50, 50, 0, 50, 50]


META = FactsMeta(url="fake.tar", size=3, version="1", checksum="sum", ignored={"pth": 2})


def three_samples(bad: int) -> ShardCosts:
    rows = [{"sample": i, "key": f"kü{i}", "offset": i, "size": 0 if i < bad else 1} for i in range(3)]
    return measured_under(facts(*rows), FakeShard(b"abc").open, Recipe())


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_costs_come_back_from_their_file(tmp_path: Path, bad: int) -> None:
    costs = three_samples(bad)
    path = str(tmp_path / "a.costs")
    written = costs.write(path, "fake.tar", META)

    table = CostTable.open(path, "fake.tar")
    assert table == written and table.shard == ShardInfo("fake.tar", 3, "sum", "1") and table.meta == META
    assert (table.size, list(table.fields), table.totals) == (costs.columns.size, costs.fields, costs.totals)
    assert table.size.bad == bad
    for body in (table.body(), replace(table, packed=None).body(), written.body()):
        kept = views(body, table.size)
        for name in type(kept).__slots__:
            assert np.array_equal(getattr(kept, name), getattr(costs.columns, name)), name
        assert kept.bad_row.tolist() == list(range(bad))
        assert [text_of(kept, "key", row) for row in range(3)] == ["kü0", "kü1", "kü2"]


def test_a_table_of_the_same_size_is_not_the_one_that_was_measured(tmp_path: Path) -> None:
    path = str(tmp_path / "a.costs")
    costs = three_samples(0)
    table = replace(costs.write(path, "fake.tar", META), packed=None)
    assert costs.write(path, "fake.tar", replace(META, version="2")).size == table.size
    with pytest.raises(StaleIndexError, match="measured by another build, during this one: build again"):
        table.body()


def test_a_table_that_is_not_held_says_when_its_file_went(tmp_path: Path) -> None:
    path = tmp_path / "a.costs"
    table = replace(three_samples(0).write(str(path), "fake.tar", META), packed=None)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="was removed or damaged"):
        table.body()


def test_costs_of_another_shard_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.costs")
    three_samples(0).write(path, "fake.tar", META)
    with pytest.raises(ValueError, match=r"it belongs to fake\.tar"):
        CostTable.open(path, "other.tar")


# Facts in the cache: fresh ones are used, stale or damaged ones are not.


@pytest.fixture
def cache(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "cache")


class Loads:
    """Loads facts, and counts the shards that were scanned for them."""

    def __init__(self) -> None:
        self.scans = 0

    def __call__(self, url: str, *, cache: CacheFolder, limits: Limits | None = None, force: bool = False) -> Facts:
        limits = limits or Limits()
        with ExitStack() as opened:

            def shard() -> Shard:
                self.scans += 1
                return opened.enter_context(closing(open_shard(url, limits=limits, cache=cache)))

            return load_facts(url, shard, limits=limits, cache=cache, force=force)


@pytest.fixture
def load() -> Loads:
    return Loads()


NAMES = tuple(f"{key}.{field}" for key in "abcde" for field in ("txt", "pth"))  # enough rows for facts to be stored


def shard(path: Path, *names: str) -> str:
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    return str(path)


def test_facts_are_scanned_once(tmp_path: Path, cache: CacheFolder, load: Loads) -> None:
    url = shard(tmp_path / "a.tar", *NAMES)
    first = load(url, cache=cache)
    assert first.table.arrow().schema == SCHEMA
    assert load(url, cache=cache) == first
    assert load.scans == 1
    load(url, cache=cache, force=True)
    assert load.scans == 2
    meta = first.meta
    assert (meta.url, meta.size, meta.ignored) == (url, Path(url).stat().st_size, {"pth": 5})
    assert [path.name for path in (tmp_path / "cache" / "facts").iterdir()] == [Path(facts_path(url, cache=cache)).name]


@pytest.mark.parametrize("change", ["content", "time", "limits", "damage", "other table", "rules"])
def test_stale_facts_are_scanned_again(
    tmp_path: Path, cache: CacheFolder, load: Loads, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = shard(tmp_path / "a.tar", *NAMES)
    load(url, cache=cache)
    limits = Limits()
    kept = Path(facts_path(url, cache=cache))
    if change == "content":
        shard(tmp_path / "a.tar", *(f"{i}.txt" for i in range(30)))
    elif change == "time":
        os.utime(url, ns=(1, 1))
    elif change == "limits":
        limits = Limits(text_bytes=2)
    elif change == "damage":
        kept.write_bytes(kept.read_bytes()[:-50])
    elif change == "rules":
        monkeypatch.setattr(recipes, "VERDICTS", 9)
    else:
        head, body = read_sealed(kept, KIND, KEPT_FORMAT)
        kept.write_bytes(seal(KIND, KEPT_FORMAT + 1, head.values, [body])[0])
    table = load(url, limits=limits, cache=cache).table
    assert load.scans == 2
    assert len(table) == (30 if change == "content" else 10)
    assert (0 in table.errors) == (change == "limits")


def test_large_facts_come_back(tmp_path: Path, cache: CacheFolder, load: Loads) -> None:
    url = shard(tmp_path / "a.tar", *(f"{i}.txt" for i in range(3_000)))
    first = load(url, cache=cache)
    kept = Path(facts_path(url, cache=cache)).stat().st_size
    assert first.table.arrow().nbytes > 3 * kept  # compressed
    assert load(url, cache=cache) == first
    assert load.scans == 1


def test_facts_that_do_not_fit_in_one_batch_are_not_kept_in_part(
    tmp_path: Path, cache: CacheFolder, load: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow splits a column of more than 2 GiB of strings."""
    url = shard(tmp_path / "a.tar", *NAMES)
    whole = FactsTable.arrow
    monkeypatch.setattr(FactsTable, "arrow", lambda self: pa.concat_tables([whole(self)[:3], whole(self)[3:]]))
    assert [len(load(url, cache=cache).table) for _ in range(2)] == [10, 10]
    assert load.scans == 2
