"""A small torch map-style data set."""

from __future__ import annotations

import torch


class Numbers(torch.utils.data.Dataset[dict[str, int]]):
    def __init__(self, count: int, bad: tuple[int, ...] = ()) -> None:
        self.count = count
        self.bad = bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, int]:
        if number in self.bad:
            raise OSError("disk on fire")
        return {"number": number, "length": 1 + number % 9}
