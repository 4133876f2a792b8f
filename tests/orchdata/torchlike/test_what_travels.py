"""What worker processes send: what torch's loader passes arrives, and what it refuses, or hangs over, is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

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
    "graph": (
        lambda: 2 * torch.ones(3, requires_grad=True),
        r"batch\[0\]\['made'\].* requires_grad.*call detach\(\)",
    ),
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MADE)
def test_what_torch_passes_arrives(name: str) -> None:
    options: dict[str, Any] = {"num_workers": 1, "collate_fn": list}
    (ours,), (theirs,) = (next(iter(loader(Makes(MADE[name]), **options))) for loader in (od.DataLoader, DataLoader))
    assert described(ours["made"]) == described(theirs["made"])
    if isinstance(theirs["made"], list):
        assert ours["made"][0] is ours["made"][1] and theirs["made"][0] is theirs["made"][1]


@pytest.mark.parametrize("name", UNSENT)
def test_what_cannot_travel_is_an_error_that_names_it(name: str) -> None:
    make, message = UNSENT[name]
    batches = iter(od.DataLoader(Makes(make), num_workers=1, collate_fn=list))
    for _ in range(2):  # where torch's loader waits for ever
        with pytest.raises(RuntimeError, match=message):
            next(batches)
