"""What data sets, their iterators and samplers hold of their own is in a loader's state, as in torchdata's."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, get_worker_info

import orchdata as od
from orchdata.loaders.errors import StateError


def share() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class Drawn(Dataset[Any]):
    """Items of torch's random state, which is what it holds."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> tuple[int, int]:
        return number, int(torch.randint(1 << 30, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"random": torch.get_rng_state().numpy().tobytes().hex()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["random"]), dtype=torch.uint8))


class Shares(IterableDataset[Any]):
    """A share of 1, 8 or 5 items a worker, in passes that it counts; without a state."""

    sizes = (1, 8, 5)

    def __init__(self) -> None:
        self.place = 0
        self.passes = 0
        self.resumed: int | None = None

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        self.place, self.resumed = self.resumed or 0, None
        for place in range(self.place, self.sizes[share()]):
            self.place = place + 1
            yield share(), self.passes, place
        self.place, self.passes = 0, self.passes + 1


class Counted(Shares):
    """It holds its state itself, and at its end that of the next pass."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed, self.passes = state["place"], state["passes"]


class Walk:
    """An iterator that holds its state."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen: list[int] = []

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> tuple[int, int]:
        if len(self.seen) == self.size:
            raise StopIteration
        self.seen.append(int(torch.randint(1 << 30, ())))
        return share(), self.seen[-1]

    def state_dict(self) -> dict[str, Any]:
        random = torch.get_rng_state().numpy().tobytes().hex()
        return {"seen": self.seen, "random": random}  # its own list, which goes on

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["random"]), dtype=torch.uint8))


class Walks(IterableDataset[Any]):
    def __iter__(self) -> Walk:
        return Walk(Shares.sizes[share()] + 4)


def saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.slow_cases("options1-2", "options3-2")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(Drawn, {"shuffle": True}), (Shares, {"batch_size": None}), (Counted, {"batch_size": 2}), (Walks, {})],
)
def test_every_state_goes_on_as_the_iteration_did(kind: Any, options: dict[str, Any], workers: int) -> None:
    def loader() -> Any:
        return od.DataLoader(kind(), **{"collate_fn": list, "num_workers": workers} | options)

    one = loader()
    steps, states, given = iter(one), [saved(one)], []
    for batch in steps:
        given.append(batch)
        states.append(saved(one))
    assert len(given) > 0 and len({str(batch) for batch in given}) == len(given)  # nothing of a share twice
    for place in (1, len(given) - 1) if workers else range(len(given)):
        again = loader()
        again.load_state_dict(states[place])
        assert saved(again) == states[place]
        steps = iter(again)
        assert [next(steps) for _ in given[place:][:1]] == given[place:][:1]
        between = saved(again)  # of workers that gave nothing since, it holds what they held before
        assert list(steps) == given[place + 1 :]
        again.load_state_dict(between)
        assert list(again) == given[place + 1 :]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", [Counted, Drawn])
def test_a_state_between_epochs_tells_the_next_one(kind: Any, workers: int, persistent: bool) -> None:
    def loader() -> Any:
        options = {"shuffle": True} if kind is Drawn else {}
        return od.DataLoader(
            kind(), collate_fn=list, num_workers=workers, persistent_workers=persistent, prefetch_factor=None, **options
        )

    one = loader()
    first = list(one)
    state = saved(one)
    if workers:
        torch.rand(5)  # anything may be drawn in between, as an evaluation does
    second = list(one)
    again = loader()
    again.load_state_dict(state)
    assert list(again) == second
    assert first != second or (kind is Counted and workers and not persistent)


def test_states_of_workers_are_for_as_many() -> None:
    one = od.DataLoader(Counted(), num_workers=3, collate_fn=list)
    next(iter(one))
    state = one.state_dict()
    with pytest.raises(StateError, match=r"state in each of 3 workers.*this loader has 0.*pass num_workers=3"):
        od.DataLoader(Counted(), collate_fn=list).load_state_dict(state)


class Upwards(Sampler[int]):
    """Its second epoch begins where the first has ended."""

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 6:
            self.place += 1
            yield self.epoch * 6 + self.place - 1
        self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class Pairs(Sampler[int]):
    """Its iterator holds a state, and itself none."""

    def __iter__(self) -> Any:
        return PairsIterator()


class PairsIterator:
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> PairsIterator:
        return self

    def __next__(self) -> int:
        if self.place == 6:
            raise StopIteration
        self.place += 1
        return self.place

    def state_dict(self) -> list[int]:
        return [0] * self.place  # anything at all, and empty at the start

    def load_state_dict(self, state: list[int]) -> None:
        self.place = len(state)


@pytest.mark.slow_cases("-4-2")
@pytest.mark.parametrize(("size", "workers"), [(2, 0), (4, 0), (4, 2)])  # the last batch of six is whole, or short
@pytest.mark.parametrize(
    "options",
    [
        lambda size: {"sampler": Upwards(), "batch_size": size},
        lambda size: {"sampler": Upwards(), "batch_size": size, "drop_last": True},
        lambda size: {"batch_sampler": BatchSampler(Upwards(), size, drop_last=False)},
        lambda size: {"batch_sampler": BatchSampler(Upwards(), size, drop_last=True)},
        lambda size: {"sampler": Pairs(), "batch_size": size},
    ],
)
def test_a_sampler_goes_on_where_it_held(options: Any, size: int, workers: int) -> None:
    numbers = list(range(12))
    one = od.DataLoader(numbers, collate_fn=list, num_workers=workers, **options(size))
    steps, states, given = iter(one), [], []
    for batch in steps:
        given.append(batch)
        states.append(saved(one))
    states.append(saved(one))
    following = list(one)
    for place, state in enumerate(states):
        again = od.DataLoader(numbers, collate_fn=list, num_workers=workers, **options(size))
        again.load_state_dict(state)
        assert list(again) == (given[place + 1 :] if place < len(given) else following)


class Held(Dataset[int]):
    """Item 0 is there when it is let go."""

    def __init__(self) -> None:
        self.free = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> int:
        if number == 0:
            assert self.free.wait(60)
        return number


@pytest.mark.parametrize("shuffle", [False, True])
def test_steps_come_as_they_are_ready_and_each_once(shuffle: bool) -> None:
    numbers = Held()
    options: dict[str, Any] = {"num_workers": 2, "in_order": False, "shuffle": shuffle, "collate_fn": list}
    one = od.DataLoader(numbers, multiprocessing_context="fork", **options)
    steps = iter(one)
    given = [next(steps) for _ in range(6)]
    assert [0] not in given
    state = saved(one)
    assert len(state.get("left", [])) <= 4  # steps under way at most, however far others have come
    numbers.free.set()
    rest = list(steps)
    assert sorted(given + rest) == [[number] for number in range(12)]
    for workers in (2, 0):
        again = od.DataLoader(numbers, **options | {"num_workers": workers})
        again.load_state_dict(state)
        steps = iter(again)
        after = [next(steps) for _ in range(2)]
        second = saved(again)
        assert sorted(given + after + list(steps)) == [[number] for number in range(12)]
        again.load_state_dict(second)
        assert sorted(given + after + list(again)) == [[number] for number in range(12)]


@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}], ids=["torch's", "ours"])
def test_steps_that_were_left_stay_left_until_they_come(options: dict[str, Any]) -> None:
    def loader() -> Any:
        return od.DataLoader(list(range(8)), collate_fn=list, batch_size=1, **options)

    one = loader()
    steps = iter(one)
    assert [next(steps) for _ in range(5)] == [[0], [1], [2], [3], [4]]
    state = saved(one) | {"left": [0, 2, 3]}  # as if these had been overtaken
    again = loader()
    again.load_state_dict(state)
    assert next(iter(again)) == [0]
    second = saved(again)
    assert second["left"] == [2, 3]
    again.load_state_dict(second)
    assert list(again) == [[2], [3], [5], [6], [7]]


def test_where_order_is_kept_a_word_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchdata.notices._warned", set())
    numbers = list(range(12))
    with pytest.warns(UserWarning, match=r"in_order=False has no effect: the sampler has its own state"):
        given = list(
            od.DataLoader(numbers, sampler=Upwards(), num_workers=2, in_order=False, collate_fn=list, batch_size=2)
        )
    assert given == [[0, 1], [2, 3], [4, 5]]
    with pytest.warns(UserWarning, match=r"in_order=False has no effect: .* planned over ranks"):
        od.DataLoader(numbers, num_workers=2, in_order=False, dp=(0, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        od.DataLoader(numbers, in_order=False)  # as with torch's: without workers no batch could overtake another
