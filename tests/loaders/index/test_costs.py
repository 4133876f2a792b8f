"""Costs of a shard: the members that are read, the rows, and the errors."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from orchdata.loaders.errors import FieldError, StaleIndexError
from orchdata.loaders.index.costs import ShardCosts, cost_shard
from orchdata.loaders.index.facts import Probes
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.fields import GZIP, RAW
from orchdata.loaders.shards.shard import SCHEMA, Facts, FactsMeta, FactsTable
from orchdata.loaders.storage.cache import CacheFolder

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


def test_a_table_of_the_same_size_is_not_the_one_that_was_measured(tmp_path: Path) -> None:
    path = str(tmp_path / "a.costs")
    costs = three_samples(0)
    table = replace(costs.write(path, "fake.tar", META), packed=None)
    assert costs.write(path, "fake.tar", replace(META, version="2")).size == table.size
    with pytest.raises(StaleIndexError, match="measured by another build, during this one: build again"):
        table.body()
