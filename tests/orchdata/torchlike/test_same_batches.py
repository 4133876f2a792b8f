"""The same batches as torch's own loader, from the same generators: order, number, and what is random in them."""

from __future__ import annotations

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
