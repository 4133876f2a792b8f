"""Random walks of operations on a loader: iterations begun, left and continued, states taken and loaded, epochs set.

    PYTHONPATH=tests/support python tests/support/walks.py    writes what this code does as the golden file

The golden file was written by the code before its loop was rewritten, but for what holds a state by itself.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from golden_data import Counted, Held, Numbers, Upwards
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

import orchdata as od
from orchdata.order.sampler import generator_state

PATH = Path(__file__).parents[1] / "orchdata" / "golden" / "walks.json"
NUM_WALKS = 12
_NUM_OPERATIONS = 30
_OPERATIONS = {
    "iter": 4.0,
    "steps": 1.0,
    "next": 12.0,
    "rest": 2.0,
    "break": 2.0,
    "state": 5.0,
    "load": 3.0,
    "epoch": 1.0,
    "length": 1.0,
    "draw": 1.0,
    "copy": 0.7,
}


class Items(Numbers):
    """Numbers, each with a random one; some cannot be read."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        super().__init__(11)
        self.bad = bad

    def __getitem__(self, number: int) -> Any:
        if number in self.bad:
            raise OSError(f"item {number}")
        return [number, float(torch.rand(()))]


class Stream(IterableDataset[Any]):
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.items = Items(bad)

    def __iter__(self) -> Iterator[Any]:
        for number in range(13):
            yield self.items[number]


class Sized(Upwards):
    def __len__(self) -> int:
        return 10


def _same(item: Any) -> Any:
    return item


KINDS: dict[str, Callable[[], od.DataLoader]] = {
    "in order": lambda: od.DataLoader(Items(), batch_size=3, collate_fn=list),
    "shuffled": lambda: od.DataLoader(Items(), batch_size=3, shuffle=True, collate_fn=list),
    "seeded": lambda: od.DataLoader(Items(), batch_size=3, shuffle=True, seed=4, collate_fn=list),
    "one by one": lambda: od.DataLoader(Items(), batch_size=None, shuffle=True, collate_fn=_same),
    "drop_last": lambda: od.DataLoader(Items(), batch_size=4, shuffle=True, drop_last=True, collate_fn=list),
    "generator": lambda: od.DataLoader(
        Items(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3), collate_fn=list
    ),
    "failing": lambda: od.DataLoader(Items((4,)), batch_size=3, collate_fn=list),
    "skipping": lambda: od.DataLoader(
        Items((4,)), batch_size=3, on_error=od.ErrorPolicy("skip", max_failures=None), collate_fn=list
    ),
    "stateful": lambda: od.DataLoader(Counted(11), batch_size=3, shuffle=True, collate_fn=list),
    "stateful sampler": lambda: od.DataLoader(Numbers(99), batch_size=2, sampler=Sized(), collate_fn=list),
    "stateful batches": lambda: od.DataLoader(
        Numbers(99), batch_sampler=BatchSampler(Sized(), 4, drop_last=True), collate_fn=list
    ),
    "batch sampler": lambda: od.DataLoader(
        Items(), batch_sampler=BatchSampler(RandomSampler(range(11)), 4, drop_last=False), collate_fn=list
    ),
    "costs": lambda: od.DataLoader(Items(), batch_size=3, cost=list(range(11)), shuffle=True, collate_fn=list),
    "two ranks": lambda: od.DataLoader(list(range(11)), batch_size=2, shuffle=True, seed=1, dp=(1, 2), collate_fn=list),
    "stream": lambda: od.DataLoader(Stream(), batch_size=3, collate_fn=list),
    "stream, one by one": lambda: od.DataLoader(Stream(), batch_size=None, collate_fn=_same),
    "failing stream": lambda: od.DataLoader(Stream((5,)), batch_size=2, collate_fn=list),
    "stateful stream": lambda: od.DataLoader(Held(), batch_size=2, collate_fn=list),
}


class Walk:
    """One loader, the iterations that exist, the states that were taken, and a record of all that came of it."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.loader = KINDS[kind]()
        self.random = random.Random(f"{kind}, {seed}")
        self.iterators: list[Iterator[Any]] = []
        self.states: list[dict[str, Any]] = []
        self.record: list[Any] = []

    def run(self) -> list[Any]:
        names, weights = list(_OPERATIONS), list(_OPERATIONS.values())
        for name in self.random.choices(names, weights, k=_NUM_OPERATIONS):
            try:
                result = getattr(self, name)()
            except (Exception, StopIteration) as error:
                result = type(error).__name__
            self.record.append([name, result])
        self.iterators.clear()
        self.loader.close()
        return [*self.record, hashlib.md5(torch.get_rng_state().numpy().tobytes()).hexdigest()]

    def iter(self) -> None:
        self.iterators.append(iter(self.loader))

    def steps(self) -> None:
        self.iterators.append(iter(self.loader.steps()))

    def next(self) -> Any:
        return next(self.random.choice(self.iterators)) if self.iterators else None

    def rest(self) -> Any:
        return list(self.random.choice(self.iterators)) if self.iterators else None

    def break_(self) -> None:
        if self.iterators:
            self.iterators.pop(self.random.randrange(len(self.iterators)))

    def state(self) -> Any:
        state = json.loads(json.dumps(self.loader.state_dict()))
        self.states.append(state)
        if "state" not in state.get("drawn", {}):
            return state
        return {**state, "drawn": generator_state(state["drawn"]["state"]).tolist()}  # zlib's text may differ

    def load(self) -> None:
        if self.states:
            self.loader.load_state_dict(self.random.choice(self.states))

    def epoch(self) -> None:
        self.loader.set_epoch(self.random.randrange(4))

    def length(self) -> int:
        return len(self.loader)

    def draw(self) -> float:
        return float(torch.rand(()))

    def copy(self) -> None:
        self.loader = copy.deepcopy(self.loader)


setattr(Walk, "break", Walk.break_)


def digest(kind: str, seed: int) -> str:
    """Of all that a walk has come by."""
    return hashlib.md5(json.dumps(Walk(kind, seed).run(), sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    made = {kind: [digest(kind, seed) for seed in range(NUM_WALKS)] for kind in KINDS}
    PATH.write_text(json.dumps(made, indent=1) + "\n")
