"""What ranks compare: equal loaders are described equally in every process, and different data differently."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from map_dataset import Numbers
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

import orchdata as od
from orchdata.dataset.describe import _dataset, stable


class Wrapped(torch.utils.data.Dataset[Any]):
    """As people write them."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Files(torch.utils.data.Dataset[Any]):
    """A name for each sample, of which the two in the middle may change places."""

    def __init__(self, swapped: int, kind: Callable[[str], Any] = str) -> None:
        names = [f"{number}.jpg" for number in range(1000)]
        if swapped:
            names[500:502] = reversed(names[500:502])
        self.files = [kind(name) for name in names]
        self.cached = [swapped] * 3  # not a list with a number per sample

    def __len__(self) -> int:
        return len(self.files)


class Chosen(torch.utils.data.Dataset[Any]):
    def __init__(self, indices: Any) -> None:
        self.indices = indices


def hugging_face(text: str) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"text": [text, "b"]})


DATA: list[tuple[str, Callable[[int], Any]]] = [
    ("Subset", lambda rank: Subset(Numbers(20), list(range(rank, 20, 2)))),
    ("Subset by a tensor", lambda rank: Subset(Numbers(20), torch.arange(rank, 20, 2))),
    ("Subset of keys", lambda rank: Subset({"a": 0, "b": 1, "c": 2}, ["a", "b" if rank else "c"])),
    ("nested Subset", lambda rank: Subset(Subset(Numbers(20), range(rank, 20, 2)), [1, 2, 3])),
    ("ConcatDataset", lambda rank: ConcatDataset([Numbers(3), Subset(Numbers(20), [rank, 5])])),
    ("StackDataset", lambda rank: StackDataset(a=Numbers(2), b=Subset(Numbers(20), [rank, 5]))),
    ("wrapped", lambda rank: Wrapped(Subset(Numbers(20), [rank, 5]))),
    ("indices", lambda rank: Chosen(np.array([rank, 5]))),
    ("files in another order", Files),
    ("paths in another order", lambda rank: Files(rank, Path)),
    ("list in another order", lambda rank: Files(rank).files),
    ("list", lambda rank: list(range(rank, 20, 2))),
    ("list of samples", lambda rank: [{"x": torch.full((3,), rank), "text": "a"}] * 4),
    ("array", lambda rank: np.arange(20)[rank::2]),
    ("tensors", lambda rank: TensorDataset(torch.arange(20, dtype=torch.bfloat16)[rank::2].view(2, 5))),
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


def test_a_list_that_holds_itself_is_described() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "list" in json.dumps(stable(endless))


def test_lists_that_are_not_of_samples_are_not_compared() -> None:
    one, other = Files(0), Files(0)
    other.cached = [1] * 3
    assert _dataset(one) == _dataset(other)


def test_data_sets_that_refer_to_each_other_are_described_once_each() -> None:
    """Ten that each know all ten would be 10^8 without."""
    known = [Wrapped(None) for _ in range(10)]
    for one in known:
        vars(one).update({f"other{position}": other for position, other in enumerate(known)})
    assert len(json.dumps(_dataset(known[0]))) < 100 * 10 * 10
