"""What worker processes send: what torch's loader passes arrives, and what it refuses, or hangs over, is an error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import shared_draws_job
import torch
from rank_jobs import run_ranks
from shared_draws_job import DATA, OPTIONS
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

import orchdata as od


class Tagged(torch.Tensor):
    """A class of one's own, with an attribute."""

    tag: str


def tagged() -> Tagged:
    found = torch.ones(3).as_subclass(Tagged)
    found.tag = "a tag"
    return found


def backward() -> torch.Tensor:
    leaf = torch.ones(3, requires_grad=True)
    (2 * leaf).sum().backward()
    return leaf


MADE: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "has a gradient": backward,
    "transposed": lambda: torch.arange(12).view(3, 4).t(),
    "expanded": lambda: torch.ones(1).expand(5),
    "nothing": lambda: torch.empty(3, 0, 2),
    "subclass": tagged,
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "module": lambda: nn.Embedding.from_pretrained(torch.ones(2, 2)),
    "storage": lambda: torch.arange(3).untyped_storage(),
    "objects": lambda: np.array([1, "a", None], object),
    "generator": lambda: torch.Generator().manual_seed(3),
    "twice": lambda: [torch.ones(3)] * 2,
    "array twice": lambda: [np.ones(3)] * 2,
}
UNSENT: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (lambda: (number for number in [1]), r"batch\[0\]\['made'\] is an object of type generator, which"),
    "lambda": (lambda: [1, lambda: 1], r"batch\[0\]\['made'\]\[1\] is a lambda in line"),
    "graph": (lambda: 2 * torch.ones(3, requires_grad=True), r"batch\[0\]\['made'\].* requires_grad.*call detach\(\)"),
}


class Makes(Dataset[Any]):
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return {"made": self.make()}


def described(value: Any) -> Any:
    """What of it can be compared: kind, layout and values."""
    if isinstance(value, list | tuple):
        return type(value), [described(each) for each in value]
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, nn.Module):
        return str(value), {name: described(each) for name, each in value.state_dict().items()}
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, torch.UntypedStorage):
        return type(value), list(value)
    if value is None:
        return None
    grad = value.grad if value.is_leaf else None
    traits = (type(value), value.dtype, value.layout, value.device, value.requires_grad, grad if grad is None else 1)
    if value.is_nested:
        return traits, [each.tolist() for each in value.unbind()]
    if value.device.type == "meta":
        return traits, value.shape, value.stride()
    strides = value.stride() if value.layout == torch.strided else None
    plain = value.to_dense() if strides is None else value
    return traits, strides, value.shape, plain.tolist(), getattr(value, "tag", None)


@pytest.fixture(scope="module")
def arrived() -> list[dict[str, Any]]:
    """Values by their names, from a process of our loader and from one of torch's."""
    data = ConcatDataset([Makes(make) for make in MADE.values()])
    options: dict[str, Any] = {"num_workers": 1, "collate_fn": list}
    each = ([item["made"] for (item,) in loader(data, **options)][::2] for loader in (od.DataLoader, DataLoader))
    return [dict(zip(MADE, values, strict=True)) for values in each]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MADE)
def test_what_torch_passes_arrives(arrived: list[dict[str, Any]], name: str) -> None:
    ours, theirs = (values[name] for values in arrived)
    assert described(ours) == described(theirs)
    if isinstance(theirs, list):
        assert ours[0] is ours[1] and theirs[0] is theirs[1]


@pytest.mark.parametrize("name", UNSENT)
def test_what_cannot_travel_is_an_error_that_names_it(name: str) -> None:
    make, message = UNSENT[name]
    batches = iter(od.DataLoader(Makes(make), num_workers=1, collate_fn=list))
    for _ in range(2):  # where torch's loader waits for ever
        with pytest.raises(RuntimeError, match=message):
            next(batches)


# Map-style data on two ranks: one draw for all, and DistributedSamplers taken over (shared_draws_job.py).


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(shared_draws_job.__file__, num_ranks=2, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["default", "group", "generator", "costs"])
def test_rank_0_draws_for_all_and_a_state_holds_what_it_drew(ranks: Ranks, name: str) -> None:
    left, right = (rank[name] for rank in ranks)
    assert left["state"] == right["state"] and left["state"]["step"] == 2
    orders = []
    for one, other in zip(left["epochs"], right["epochs"], strict=True):
        batches = [sorted(mine + theirs) for mine, theirs in zip(one, other, strict=True)]
        assert sorted(chain(*batches)) == list(DATA) and [len(batch) for batch in batches] == [6, 6, 6, 3]
        orders.append(batches)
    assert orders[0] != orders[1]
    for rank in (left, right):
        assert rank["resumed"] == rank["epochs"][1]


def test_global_batches_are_those_of_one_rank_with_rank_0s_generator(ranks: Ranks) -> None:
    torch.manual_seed(5)
    alone = [sorted(batch.tolist()) for batch in od.DataLoader(DATA, batch_size=6, shuffle=True)]
    left, right = (rank["default"]["epochs"][0] for rank in ranks)
    assert [sorted(mine + theirs) for mine, theirs in zip(left, right, strict=True)] == alone


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_a_matching_distributed_sampler_gives_what_it_gives_with_torchs_loader(ranks: Ranks, number: int) -> None:
    for rank, found in enumerate(ranks):
        ours, theirs = found["taken over"][number]
        length = ours.pop(1)
        assert length == theirs.pop(1)
        for mine, torchs in zip(ours, theirs, strict=True):
            assert mine[:-1] == torchs[:-1]
            # torch repeats a sample to make the shares of 21 equal; here a share is one smaller, which is counted.
            kept = torchs[-1] if OPTIONS[number][2] or rank == 0 else torchs[-1][:-1]
            assert mine[-1] == kept


def test_a_sampler_of_other_ranks_or_data_is_refused_with_the_difference(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks):
        replicas, other_rank, data, random, listed = found["refused"]
        assert "DistributedSampler has num_replicas=4, and this loader's is 2" in replicas
        assert f"DistributedSampler has rank={1 - rank}, and this loader's is {rank}" in other_rank
        assert "DistributedSampler has another data set" in data
        assert "sharded twice" in random and "sharded twice" in listed
