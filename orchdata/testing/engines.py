"""For tests of your own: whether an engine keeps what the loader relies on.

    engine, data set --check_engine--> its batches are those of this thread, or an error says what differs

It needs no test framework: call it in a test, or in a script.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from orchdata.dataloader import DataLoader
from orchdata.engines.engine import OpensEngine

_EPOCHS: Final = 2


class CheckedEngine(NamedTuple):
    """What `check_engine` has compared.

    Attributes:
        batches: compared to the bit.
        states: states that were resumed.
        failures: samples that failed, alike in both.
    """

    batches: int
    states: int
    failures: int


def check_engine(
    engine: OpensEngine, dataset: Any, *, num_workers: int = 2, num_threads: int = 1, **options: Any
) -> CheckedEngine:
    """Check an engine with a data set, whose epochs it must build as this thread does.

    Batches must be equal to the bit and in order, in two epochs. They must be memory of the caller: what is written
    into one changes no other. A state must resume with the batches that follow it. An epoch that is left early, and one
    in which the caller is slow, must leave nothing to the next. The same samples must fail. The engine's value must
    pickle, and a loader that uses it must close, twice.

    Args:
        engine: as of `DataLoader(engine=)`.
        dataset: as of `DataLoader`, with at least 3 batches an epoch.
        num_workers, num_threads: as of `DataLoader`, for the engine.
        options: of both loaders, such as `batch_size=`, `seed=` and `on_error=`.

    Raises:
        AssertionError: says what differs.
        ValueError: the data set has fewer than 3 batches.
    """
    copy = pickle.loads(pickle.dumps(engine))  # noqa: S301 - made just now
    _expect(type(copy) is type(engine), "the engine does not pickle as a value of its own class")
    here = DataLoader(dataset, **options)
    expected = [[_copied(batch) for batch in here] for _ in range(_EPOCHS)]
    if len(expected[0]) < 3:
        raise ValueError(f"an epoch has {len(expected[0])} batches: check an engine with at least 3")
    there = {"num_workers": num_workers, "num_threads": num_threads, "engine": engine, **options}

    # Epochs, with batches that are overwritten as soon as they were compared.
    with closing(DataLoader(dataset, **there)) as loader:
        for epoch, batches in enumerate(expected):
            _compare(iter(loader), batches, f"epoch {epoch}")
        failed = [failure.key for failure in loader.gather_failures()]
        _expect(failed == [failure.key for failure in here.gather_failures()], f"other samples failed: {failed}")
        loader.close()

    # A state, from the middle of an epoch that is then left.
    with closing(DataLoader(dataset, **there)) as loader:
        iterator = iter(loader)
        _compare(islice(iterator, 2), expected[0][:2], "the beginning of an epoch")
        state = loader.state_dict()
        del iterator
    for where, how in (("the engine", there), ("this thread", options)):
        with closing(DataLoader(dataset, **how)) as loader:
            loader.load_state_dict(state)
            _compare(iter(loader), expected[0][2:], f"the rest of the epoch, resumed in {where}")
    return CheckedEngine(sum(map(len, expected)), 2, len(failed))


def _compare(batches: Iterator[Any], expected: list[Any], what: str) -> None:
    """Compare batches with copies of the expected ones, and overwrite each of them."""
    count = 0
    for number, batch in enumerate(batches):
        _expect(number < len(expected), f"{what} has more than {len(expected)} batches")
        wrong = _difference(_copied(batch), expected[number])
        _expect(wrong is None, f"{what}: batch {number} differs: {wrong}")
        for name, leaf in _leaves(batch):
            _overwrite(leaf, f"{what}: batch {number}: {name}")
        count += 1
    _expect(count == len(expected), f"{what} has {count} batches in place of {len(expected)}")


def _overwrite(leaf: Any, name: str) -> None:
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        _expect(leaf.flags.writeable, f"{name} is read-only: copy it into memory of the caller")
        leaf[...] = np.zeros((), leaf.dtype)
    elif isinstance(leaf, torch.Tensor):
        _expect(leaf.is_leaf or not leaf.requires_grad, f"{name} has a history")
        try:
            leaf.zero_()
        except RuntimeError as error:
            raise AssertionError(f"{name} cannot be written to: {error}") from error


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a batch, in order, with its name."""
    inner: list[tuple[Any, Any]] = []
    if is_dataclass(value) and not isinstance(value, type):
        inner = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    if not inner:
        yield name, value
    for key, each in inner:
        yield from _leaves(each, f"{name}.{key}" if name else str(key))


def _copied(batch: Any) -> list[tuple[str, Any]]:
    """Return copies of all leaves of a batch, in order."""

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return [(name, copy_of(leaf)) for name, leaf in _leaves(batch)]


def _difference(batch: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> str | None:
    """Return how two batches differ; None if they are equal to the bit."""
    names, wanted = [name for name, _ in batch], [name for name, _ in expected]
    if names != wanted:
        return f"it has {sorted(set(names) ^ set(wanted))!r:.200} more or less"
    for (name, one), (_, other) in zip(batch, expected, strict=True):
        if type(one) is not type(other) or not _is_equal(one, other):
            return f"{name} is {one!r:.200} in place of {other!r:.200}"
    return None


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two leaves are equal, arrays and tensors to the bit."""
    if isinstance(one, torch.Tensor) and one.layout == torch.strided and not one.is_quantized:
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and pickle.dumps(one) == pickle.dumps(other)
    return bool(one == other) or repr(one) == repr(other)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
