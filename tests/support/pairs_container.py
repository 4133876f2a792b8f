"""A container of a user's, for tests: lines of a key and a text, separated by a tab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orchdata as od


class PairsShard(od.Shard):
    def __init__(self, source: Any) -> None:
        with source.file() as file:
            lines = file.read().splitlines(keepends=True)
        self.places: list[tuple[str, od.ByteRange]] = []
        offset = 0
        for line in lines:
            key, tab, text = line.rstrip(b"\n").partition(b"\t")
            self.places.append((key.decode(), od.ByteRange(offset + len(key) + len(tab), len(text))))
            offset += len(line)

    def keys(self) -> list[str]:
        return [key for key, _ in self.places]

    def sample(self, number: int) -> dict[str, Any]:
        return {"txt": self.places[number][1]}


@dataclass(frozen=True)
class Pairs(od.Container):
    def claims(self, path: str) -> bool:
        return path.endswith(".pairs")

    def open(self, source: Any, context: Any) -> PairsShard:
        return PairsShard(source)
