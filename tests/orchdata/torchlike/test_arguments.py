"""Arguments, attributes and errors as torch's loader has them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import orchdata as od

DATA = list(range(10))


def test_every_argument_of_torchs_is_ours_in_its_place() -> None:
    theirs = inspect.signature(DataLoader.__init__).parameters
    ours = inspect.signature(od.DataLoader.__init__).parameters
    positional = [name for name, one in theirs.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert set(theirs) <= set(ours)


ATTRIBUTES = (
    "dataset batch_size num_workers collate_fn pin_memory drop_last timeout worker_init_fn generator prefetch_factor "
    "persistent_workers multiprocessing_context in_order pin_memory_device"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 3, "shuffle": True, "drop_last": True, "in_order": False, "pin_memory_device": "cpu"},
        {"batch_size": None, "generator": torch.Generator()},
        {"batch_size": 1, "batch_sampler": [[1, 2], [3]]},
        {"sampler": [1, 2, 3], "collate_fn": list, "batch_size": 2},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_attributes_are_torchs(options: dict[str, Any]) -> None:
    ours, theirs = od.DataLoader(DATA, **options), DataLoader(DATA, **options)  # type: ignore[arg-type]
    for name in ATTRIBUTES.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert type(ours.sampler) is type(theirs.sampler) and type(ours.batch_sampler) is type(theirs.batch_sampler)
    assert list(ours.sampler) == list(theirs.sampler) or isinstance(theirs.sampler, RandomSampler)
    assert len(ours) == len(theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"multiprocessing_context": "spawn"},
        {"num_workers": 1, "multiprocessing_context": "bad"},
        {"num_workers": 1, "multiprocessing_context": object()},
        {"batch_size": None, "drop_last": True},
        {"sampler": SequentialSampler(DATA), "shuffle": True},
        {"batch_sampler": [[1]], "sampler": [1], "shuffle": 3},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 1.5},
        {"sampler": 3},
        {"generator": torch.Generator(), "batch_size": "2"},
    ],
    ids=lambda options: re.sub(r" at 0x\w+", "", str(options)),
)
def test_what_torch_refuses_is_refused_with_its_error(options: dict[str, Any]) -> None:
    def error_of(loader: type[Any]) -> Exception | None:
        try:
            list(iter(loader(DATA, **options)))
        except Exception as error:
            return error
        return None

    ours, theirs = error_of(od.DataLoader), error_of(DataLoader)
    assert type(ours) is type(theirs), (ours, theirs)


@pytest.mark.parametrize("name", ["batch_size", "sampler", "batch_sampler", "drop_last", "dataset"])
def test_assigning_later_raises_as_torchs(name: str) -> None:
    for loader in (od.DataLoader(DATA), DataLoader(DATA)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
            setattr(loader, name, None)


def test_it_is_no_instance_of_torchs_class() -> None:
    # Accelerate, Lightning and others take such an instance apart, and shard its data again.
    assert not isinstance(od.DataLoader(DATA), DataLoader)


@pytest.mark.filterwarnings("ignore:num_workers=1000")
def test_workers_beyond_the_cores_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="excessive worker creation might get DataLoader running slow or even freeze"):
        od.DataLoader(DATA, num_workers=1000)
