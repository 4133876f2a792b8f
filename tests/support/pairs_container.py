"""A container of a user's, for tests: lines of a key and a text, separated by a tab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

import orchdata as od


class PairsShard:
    def __init__(self, source: od.ShardSource) -> None:
        with source.file() as file:
            self.pairs = [line.partition(b"\t") for line in file.read().splitlines()]

    def facts(self) -> pa.Table:
        return pa.table({"key": [key.decode() for key, _, _ in self.pairs], "field": ["txt"] * len(self.pairs)})

    def read(self, rows: Sequence[int]) -> list[bytes]:
        return [self.pairs[row][2] for row in rows]


@dataclass(frozen=True)
class Pairs(od.Container):
    def claims(self, path: str) -> bool:
        return path.endswith(".pairs")

    def open(self, source: od.ShardSource) -> PairsShard:
        return PairsShard(source)
