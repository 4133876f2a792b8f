"""What ranks compare: equal loaders are described equally in every process, and different data differently."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from map_dataset import Numbers
from torch.utils.data import ConcatDataset, Subset

import orchdata as od
from orchdata.runtime import _dataset, stable


class Chosen(torch.utils.data.Dataset[Any]):
    def __init__(self, indices: Any) -> None:
        self.indices = indices


def hugging_face(text: str) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"text": [text, "b"]})


DATA: list[tuple[str, Callable[[int], Any]]] = [
    ("Subset", lambda rank: Subset(Numbers(20), list(range(rank, 20, 2)))),
    ("nested Subset", lambda rank: Subset(Subset(Numbers(20), range(rank, 20, 2)), [1, 2, 3])),
    ("ConcatDataset", lambda rank: ConcatDataset([Numbers(3), Subset(Numbers(20), [rank, 5])])),
    ("indices", lambda rank: Chosen(np.array([rank, 5]))),
    ("list", lambda rank: list(range(rank, 20, 2))),
    ("list of samples", lambda rank: [{"text": f"of rank {rank}"}] * 200),
    ("Hugging Face", lambda rank: hugging_face("ab"[rank])),
]


@pytest.mark.parametrize(("name", "make"), DATA, ids=[name for name, _ in DATA])
def test_data_split_by_rank_is_described_differently(name: str, make: Callable[[int], Any]) -> None:
    first, again, second = (json.dumps(_dataset(make(rank))) for rank in (0, 0, 1))
    assert first == again
    assert first != second


@dataclass
class Settings:
    limit: int
    inner: Any


def test_nothing_in_a_description_depends_on_the_process() -> None:
    def local(samples: list[Any]) -> int:
        return len(samples)

    class Collator:
        def __call__(self, samples: list[Any]) -> int:
            return len(samples)

    value = {
        "functions": [local, lambda samples: 0, len, functools.partial(local, device="cuda:1"), Collator().__call__],
        "objects": [object(), Collator(), Settings(1, object()), od.Packed(), od.Balance(max_tokens={"llm": 8})],
        "values": [np.int64(1), np.float32(0.5), torch.bfloat16, {3, 1, 2}, b"abc", (1, "a"), None],
    }
    text = json.dumps(stable(value))
    assert "0x" not in text
    assert "local" in text
    assert "Collator" in text
    assert '"limit": 1' in text
    assert text == json.dumps(stable(value))
