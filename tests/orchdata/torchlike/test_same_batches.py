"""The same batches as torch's own loader, from the same generators: order, number, and what is random in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import orchdata as od

pytestmark = pytest.mark.filterwarnings("ignore:the loader has no steps")


class Augmented(Dataset[torch.Tensor]):
    """A row together with what an augmentation draws for it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(row)]), torch.rand(1)])


class Lengthless:
    """Gives random rows for as long as a coin says."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(int(torch.randint(100, ())))
        while torch.rand((), generator=generator) < 0.9:
            yield int(torch.randint(self.count, (), generator=generator))


SAMPLERS: dict[str, Callable[[Dataset[Any], int, Any], Any]] = {
    "random": lambda data, count, generator: RandomSampler(data, generator=generator),
    "replaced": lambda data, count, generator: RandomSampler(data, True, 3 * count + 40, generator),
    "weighted": lambda data, count, generator: WeightedRandomSampler([1.0] * count, 5, generator=generator),
    "subset": lambda data, count, generator: SubsetRandomSampler(range(count // 2, count), generator),
    "sequential": lambda data, count, generator: SequentialSampler(data),
    "list": lambda data, count, generator: list(range(count - 1, -1, -2)),
    "lengthless": lambda data, count, generator: Lengthless(count),
}


@st.composite
def arguments(draw: Callable[..., Any]) -> tuple[int, dict[str, Any], str, bool]:
    """Rows of the data set, arguments of the loader, its sampler ("" for none), and whether it has a generator."""
    count = draw(st.integers(1, 23))
    options: dict[str, Any] = {"batch_size": draw(st.none() | st.integers(1, 7))}
    if options["batch_size"] is not None:
        options["drop_last"] = draw(st.booleans())
    sampler = draw(st.sampled_from(["", "batches", *SAMPLERS]))
    if not sampler:
        options["shuffle"] = draw(st.sampled_from([None, False, True]))
    return count, options, sampler, draw(st.booleans())


def batches_of(loader: type[Any], count: int, options: dict[str, Any], sampler: str, own: bool) -> list[Any]:
    """Two epochs with one broken off between them, and what the generators give after."""
    torch.manual_seed(count)
    data = Augmented(count)
    generator = torch.Generator().manual_seed(7) if own else None
    if sampler == "batches":
        options = {"batch_sampler": BatchSampler(RandomSampler(data, generator=generator), 3, False)}
    elif sampler:
        options = options | {"sampler": SAMPLERS[sampler](data, count, generator)}
    one = loader(data, generator=generator, **options)
    found = [batch.tolist() for batch in iter(one)]
    found += [batch.tolist() for batch, _ in zip(iter(one), range(2), strict=False)]
    found += [batch.tolist() for batch in iter(one)]
    return [found, torch.rand(1).item(), None if generator is None else torch.rand(1, generator=generator).item()]


@given(arguments())
@settings(max_examples=40, deadline=None)
def test_batches_are_torchs(given_: tuple[int, dict[str, Any], str, bool]) -> None:
    assert batches_of(od.DataLoader, *given_) == batches_of(DataLoader, *given_)


@pytest.mark.parametrize("own", [False, True])
def test_workers_that_are_kept_are_seeded_once_and_finish_what_break_leaves(own: bool) -> None:
    def batches(loader: type[Any]) -> list[Any]:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(7) if own else None
        kept = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
        one = loader(Augmented(23), batch_size=3, shuffle=True, generator=generator, **kept)
        found = [[batch.tolist() for batch, _ in zip(iter(one), range(count), strict=False)] for count in (9, 2, 1, 9)]
        return [found, torch.rand(1).item(), None if generator is None else torch.rand(1, generator=generator).item()]

    assert batches(od.DataLoader) == batches(DataLoader)


def test_a_state_of_kept_workers_leads_to_the_same_epochs_and_to_other_draws() -> None:
    def make() -> od.DataLoader:
        kept = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        return od.DataLoader(Augmented(8), batch_size=4, shuffle=True, **kept)

    def rows(batches: Any) -> tuple[list[float], list[float]]:
        found = torch.cat(list(batches))
        return found[:, 0].tolist(), found[:, 1].tolist()

    torch.manual_seed(3)
    one = make()
    _, first_draws = rows(one)
    state, generator = one.state_dict(), torch.get_rng_state()
    following = [rows(one)[0] for _ in range(2)]
    again = make()
    torch.set_rng_state(generator)
    again.load_state_dict(state)
    resumed = [rows(again) for _ in range(2)]
    assert [order for order, _ in resumed] == following
    assert not {*first_draws} & {*resumed[0][1]}  # new workers do not draw as those of the first epoch


@given(arguments(), st.integers(1, 8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_state_goes_on_where_the_epoch_was(
    given_: tuple[int, dict[str, Any], str, bool], delivered: int, in_second_epoch: bool
) -> None:
    count, options, sampler, own = given_
    if sampler == "batches":
        sampler = "random"

    def make() -> Any:
        data, generator = range(count), torch.Generator().manual_seed(3) if own else None
        chosen = {"sampler": SAMPLERS[sampler](data, count, generator)} if sampler else {}  # type: ignore[arg-type]
        return od.DataLoader(data, generator=generator, **options, **chosen)

    torch.manual_seed(5)
    one = make()
    if in_second_epoch:
        next(iter(one), None)
    steps = iter(one)
    for _ in range(delivered):
        next(steps, None)
    state = one.state_dict()
    rest = [np.asarray(batch).tolist() for batch in steps]
    torch.manual_seed(6)  # another process
    again = make()
    again.load_state_dict(state)
    resumed = [np.asarray(batch).tolist() for batch in iter(again)]
    assert resumed == rest or not rest  # after the last step of an epoch the next one begins


def test_a_sampler_of_ten_billion_is_drawn_as_it_is_asked_for() -> None:
    one = od.DataLoader(range(100), batch_size=4, sampler=RandomSampler(range(100), True, 10**10))
    assert len(one) == 10**10 // 4
    torch.manual_seed(1)
    ours = [batch.tolist() for batch, _ in zip(iter(one), range(5), strict=False)]
    torch.manual_seed(1)
    theirs = DataLoader(range(100), batch_size=4, sampler=RandomSampler(range(100), True, 10**10))  # type: ignore[arg-type]
    assert ours == [batch.tolist() for batch, _ in zip(iter(theirs), range(5), strict=False)]


# IterableDataset on one rank, as torch's loader iterates it.


class Counting(IterableDataset[torch.Tensor]):
    def __init__(self, count: int, bad: int | None = None) -> None:
        self.count = count
        self.bad = bad

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            if number == self.bad:
                raise OSError("disk on fire")
            yield torch.cat([torch.tensor([float(number)]), torch.rand(1)])


class Sized(Counting):
    def __len__(self) -> int:
        return self.count - 2


@given(st.integers(0, 20), st.none() | st.integers(1, 6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_batches_of_an_iterable_are_torchs(count: int, batch_size: int | None, drop_last: bool) -> None:
    def batches(loader: type[Any]) -> list[Any]:
        torch.manual_seed(3)
        one = loader(Counting(count), batch_size=batch_size, drop_last=drop_last and batch_size is not None)
        return [[batch.tolist() for _ in range(2) for batch in one], torch.rand(1).item()]

    assert batches(od.DataLoader) == batches(DataLoader)


def range_dataset(count: int) -> Any:
    class Range(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(count))

    return Range()


def test_its_length_is_counted_in_batches_and_more_is_said() -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(od.DataLoader(Counting(4)))
    one, theirs = (loader(Sized(8), batch_size=2) for loader in (od.DataLoader, DataLoader))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(iter(one))
    assert len(one) == len(theirs) == 3
    with pytest.warns(UserWarning, match="was reported to be 3.*but 4 samples have been fetched"):
        list(iter(one))


def test_an_error_is_raised_and_the_next_iteration_begins_from_scratch() -> None:
    numbers = Counting(6, bad=3)
    one = od.DataLoader(numbers, batch_size=2)
    steps = iter(one)
    next(steps)
    with pytest.raises(OSError, match="disk on fire"):
        next(steps)
    assert list(steps) == []  # the generator is over, as with torch's
    numbers.bad = None
    assert [batch[:, 0].tolist() for batch in one] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"dp": (0, 2)}, ValueError, "shared by 2 ranks.*od.ShardDataset.*dp=.0, 1.*od.post_balance"),
        ({"shuffle": True}, ValueError, "expected unspecified shuffle option"),
        ({"sampler": [1]}, ValueError, "expected unspecified sampler option"),
        ({"batch_sampler": [[1]]}, ValueError, "expected unspecified batch_sampler option"),
        ({"cost": [1]}, ValueError, "unspecified cost option"),
        ({"on_error": "skip"}, ValueError, "skip in its __iter__"),
        ({"num_threads": 2}, ValueError, "num_threads is for steps that this library builds"),
        ({"collate_fn": od.Packed()}, TypeError, "for a ShardDataset"),
    ],
)
def test_what_an_iterable_cannot_have_is_refused(options: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        od.DataLoader(Counting(4), **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_fn_is_given_the_step_of_each_batch(workers: int) -> None:
    def with_step(samples: list[int], step: od.StepInfo) -> Any:
        return step.epoch, step.step, samples, step.loss_scale, step.num_step_samples

    one = od.DataLoader(range_dataset(5), batch_size=2, collate_fn=with_step, num_workers=workers)
    for epoch in range(2):
        batches = list(one)
        assert [batch[:2] for batch in batches] == [(epoch, step) for step in range(len(batches))]
        assert batches[0][2:] == ([0, 1], 0.5, 2) and len(batches) == 3 * max(1, workers)
    assert one.stats()["samples"] == 2 * 5 * max(1, workers)


class RaisesOnce(IterableDataset[int]):
    """And continues."""

    number = 0

    def __iter__(self) -> Iterator[int]:
        self.number = 0
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == 4:
            raise OSError("disk on fire")
        if self.number > 10:
            raise StopIteration
        return self.number


def test_a_state_after_an_error_that_the_data_set_continued_from_repeats_no_batch() -> None:
    def loader() -> od.DataLoader:
        return od.DataLoader(RaisesOnce(), batch_size=2, collate_fn=list)

    one = loader()
    steps = iter(one)
    assert next(steps) == [1, 2]
    with pytest.raises(OSError, match="disk on fire"):
        next(steps)
    assert next(steps) == [5, 6]
    again = loader()
    again.load_state_dict(one.state_dict())
    resumed = iter(again)
    with pytest.raises(OSError, match="disk on fire"):
        next(resumed)
    assert list(resumed) == list(steps) == [[7, 8], [9, 10]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("takes_step", [False, True])
def test_a_batch_that_collate_fn_refused_comes_after_a_resume(workers: int, takes_step: bool) -> None:
    def loader(refused: int) -> od.DataLoader:
        def collated(samples: list[int]) -> list[int]:
            if samples[0] == refused:
                raise ValueError(f"refused {samples}")
            return samples

        def with_the_step(samples: list[int], step: od.StepInfo) -> tuple[int, list[int]]:
            return step.step, collated(samples)

        collate_fn = with_the_step if takes_step else collated
        return od.DataLoader(range_dataset(8), batch_size=2, collate_fn=collate_fn, num_workers=workers)

    given = list(loader(-1))
    one = loader(4)
    steps = iter(one)
    assert [next(steps), next(steps)] == given[:2]
    with pytest.raises(ValueError, match="refused"):
        next(steps)
    again = loader(-1)
    again.load_state_dict(one.state_dict())
    assert list(again) == given[2:]
    with pytest.raises(ValueError, match="refused"):
        next(iter(one))
    assert next(steps) == given[3]


class OfEpochs(IterableDataset[int]):
    """As a stream of Hugging Face's: an order for each epoch, and a state that holds until the epoch changes."""

    def __init__(self) -> None:
        self.epoch = self._at = 0
        self._loaded: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._loaded = state

    def __iter__(self) -> Iterator[int]:
        loaded = self._loaded
        start = loaded["at"] if loaded is not None and loaded["epoch"] == self.epoch else 0
        for self._at in range(start + 1, 9):
            yield self.epoch * 100 + self._at


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_data_set_has_the_loaders_epoch_and_later_epochs_have_all_of_it(options: dict[str, Any]) -> None:
    def epoch(loader: od.DataLoader) -> list[int]:
        return [item for batch in loader for item in batch.tolist()]

    whole = range(1, 9)
    loader = od.DataLoader(OfEpochs(), batch_size=2, **options)
    for number in (0, 0, 3):
        loader.set_epoch(number)
        assert epoch(loader) == [number * 100 + at for at in whole]
    loader.set_epoch(5)
    iterator = iter(loader)
    first = next(iterator).tolist()
    middle = loader.state_dict()
    rest = [item for batch in iterator for item in batch.tolist()]
    assert first + rest == [500 + at for at in whole]
    for state, left in ((middle, 6), (loader.state_dict(), 8)):
        resumed = od.DataLoader(OfEpochs(), batch_size=2, **options)
        resumed.load_state_dict(state)
        following = epoch(resumed)
        assert len(following) == left and (state is not middle or following == rest)
        assert [len(epoch(resumed)) for _ in range(2)] == [8, 8]


class Held(OfEpochs):
    set_epoch = None  # type: ignore[assignment]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_data_set_that_begins_each_pass_where_a_state_put_it_is_said(
    options: dict[str, Any], recwarn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, lengths in ((OfEpochs, [3, 4]), (Held, [3, 3])):
        monkeypatch.setattr("orchdata.notices._warned", set())
        loader = od.DataLoader(kind(), batch_size=2, **options)
        next(iter(loader))
        resumed = od.DataLoader(kind(), batch_size=2, **options)
        resumed.load_state_dict(loader.state_dict())
        assert [len(list(resumed)) for _ in range(2)] == lengths
        assert ["Held yielded only 3 batches" in str(each.message) for each in recwarn] == [True] * (kind is Held)


class MapOfEpochs(list[int]):
    def set_epoch(self, epoch: int) -> None:
        self[:] = range(epoch, epoch + 4)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "persistent_workers": True}, {"num_threads": 1, "on_error": "skip"}]
)
def test_a_map_style_data_set_has_the_loaders_epoch(options: dict[str, Any]) -> None:
    loader = od.DataLoader(MapOfEpochs([0] * 4), batch_size=4, **options)
    for epoch in (0, 2, 7):
        loader.set_epoch(epoch)
        assert next(iter(loader)).tolist() == list(range(epoch, epoch + 4))
