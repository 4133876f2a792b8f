"""What processes say to each other: values as a pickle and its buffers, which are not copied.

A worker's batches may be any objects of a user's, and come to the process that started it. A peer of another machine
gets plain values of `ranks.wire`, in which nothing is executed: `plain` makes them of our own batches.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import LLMBatch, MediaBatch, Team, TextBatch
from orchdata.building.step import BuiltStep
from orchdata.engines.engine import described, pickles, what_does_not_pickle
from orchdata.planning.balance import StepTeams
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route
from orchdata.ranks.wire import WireError

Bytes = NDArray[np.uint8]

_CLASS = "<class>"  # marks a dict that was a dataclass; no modality has this name
_PLAN = "the step's"
_DICT = "dict"  # a dict that has the mark as a key itself, such as a kept value
_SLICE = "slice"
_BATCHES: dict[str, type[Any]] = {kind.__name__: kind for kind in (Batch, TextBatch, MediaBatch, LLMBatch, Team, Route)}
_NAMES = {kind: name for name, kind in _BATCHES.items()}
_LEAVES = frozenset({type(None), bool, int, float, str, bytes, np.ndarray, torch.Tensor})
_FIELDS = {kind: tuple(field.name for field in fields(kind) if field.init) for kind in (*_NAMES, Plan, StepTeams)}
_KNOWN = {kind: frozenset(names) for kind, names in _FIELDS.items()}


class Unit(NamedTuple):
    """One value: a pickle, and its buffers in the pickle's order."""

    header: Bytes
    buffers: Sequence[Bytes]


def packed(value: Any) -> bytes:
    """Pickle a value for this process's own workers or its parent."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    """Return the value that `packed` was given."""
    return pickle.loads(data)  # noqa: S301 - of this process's own workers, or its parent


class Failed:
    """An error in place of a batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Sent:
    """A batch, or an error, on its way from a worker. It is pickled here, and unpickled by a function of ours: torch's
    queue loses what does not pickle, and waits for it.

    Raises RuntimeError for what cannot be sent, as `describe_value`.
    """

    def __init__(self, value: Any) -> None:
        try:
            self._pickled = bytes(ForkingPickler.dumps(value))
        except Exception as error:
            raise _unsent(value, ForkingPickler.dumps, error) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._pickled,)


def _received(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)  # noqa: S301 - of a worker of this process
    except Exception as error:  # noqa: BLE001 - unpickling a user's object may raise anything
        return Failed(error)


def describe_step(built: BuiltStep) -> Unit:
    """Return a step as a unit. Raises as `describe_value`, for one of its batches."""
    try:
        is_own = all(isinstance(batch, Batch) for batch in built.batches)
        return _pickled(built if is_own else replace(built, batches=[_Apart(batch) for batch in built.batches]))
    except MemoryError:
        raise
    except Exception:
        for batch in built.batches:
            describe_value(batch)
        raise


def describe_value(value: Any) -> Unit:
    """Return any value of a user's as a unit.

    Raises:
        RuntimeError: names the member that does not pickle, or is a tensor with an autograd graph, as in "batch['rows']
            is an object of type generator".
    """
    try:
        return _pickled(value)
    except Exception as error:
        raise _unsent(value, _pickled, error) from error


class _Apart:
    """A batch of a user's in its step: what two batches share, as a constant of the program, comes as two objects."""

    def __init__(self, batch: Any) -> None:
        self._unit = describe_value(batch)

    def __reduce__(self) -> tuple[Any, ...]:
        return read_value, (self._unit,)


def read_value(unit: Unit) -> Any:
    """Return the value that a unit was made of; its arrays are views of the buffers. Only for units from this process's
    own workers.
    """
    return pickle.loads(unit.header.data, buffers=unit.buffers)  # noqa: S301


def _pickled(value: Any) -> Unit:
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
    header = np.frombuffer(out.getbuffer(), np.uint8)  # large `bytes` are in it: no copy
    return Unit(header, [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])


def _unsent(batch: Any, dump: Callable[[Any], Any], error: Exception) -> RuntimeError:
    """Return the error for a batch that cannot be sent: it names the member."""
    name, member = what_does_not_pickle(batch, partial(pickles, dump=dump))
    return RuntimeError(
        f"batch{name} is {described(member)}, which a worker process cannot send ({error}): have the data set or "
        "collate_fn return values that pickle, or load with num_workers=0"
    )


class _Pickler(pickle.Pickler):
    """Keeps the elements of tensors out of the pickle, as pickle itself does for numpy arrays."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in _FIELDS:  # as it was made, without what it has computed since
            return _made, (kind, [getattr(value, name) for name in _FIELDS[kind]])
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise RuntimeError("it requires grad, and its autograd graph cannot be sent: call detach() on it")
        if kind is torch.UntypedStorage and value.device.type == "cpu":
            return torch.Tensor.untyped_storage, (torch.empty(0, dtype=torch.uint8).set_(value),)
        if kind is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided or vars(value):
            return NotImplemented
        if value.requires_grad or value.is_nested or value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
        dense = value.permute(order)
        if not value.numel():
            return partial(torch.empty, dtype=value.dtype), (tuple(value.shape),)
        if not dense.is_contiguous():
            return NotImplemented
        flat = dense.reshape(-1).view(torch.uint8).numpy()
        return _tensor_of, (pickle.PickleBuffer(flat.data), value.dtype, tuple(dense.shape), order)


def _made(kind: type[Any], values: Sequence[Any]) -> Any:
    return kind(**dict(zip(_FIELDS[kind], values, strict=True)))


def _tensor_of(flat: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
    dense = torch.frombuffer(flat, dtype=dtype).view(shape)
    return dense.permute([order.index(dim) for dim in range(len(order))])


def plain(value: Any, plan: Plan) -> Any:
    """Return batches of a step as values that `wire` can describe: dataclasses become dicts, `plan` becomes a mark."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if value is plan:
        return {_CLASS: _PLAN}
    if kind in (list, tuple):
        return kind(plain(item, plan) for item in value)
    if kind in _NAMES:
        value = {name: getattr(value, name) for name in _FIELDS[kind]}
        return {_CLASS: _NAMES[kind], "fields": _mapped(plain, value, plan)}
    if kind is slice:
        return {_CLASS: _SLICE, "items": [value.start, value.stop]}
    if isinstance(value, Mapping):
        mapped = _mapped(plain, value, plan)
        return {_CLASS: _DICT, "items": list(map(list, mapped.items()))} if _CLASS in mapped else mapped
    return value


def _mapped(convert: Callable[..., Any], values: Mapping[Any, Any], plan: Plan) -> dict[Any, Any]:
    return {name: item if type(item) in _LEAVES else convert(item, plan) for name, item in values.items()}


def revive(value: Any, plan: Plan) -> Any:
    """Return the value that `plain` was given. Raises WireError for anything that is not part of a batch."""
    if isinstance(value, (list, tuple)):
        return (
            value if all(type(item) in _LEAVES for item in value) else type(value)(revive(item, plan) for item in value)
        )
    if not isinstance(value, dict):
        return value
    if _CLASS not in value:
        return _mapped(revive, value, plan)
    name = value[_CLASS]
    if name == _PLAN:
        return plan
    if name == _DICT:
        return {key: revive(item, plan) for key, item in value["items"]}
    if name == _SLICE:
        return slice(*value["items"])
    kind, values = _BATCHES.get(name) if isinstance(name, str) else None, value.get("fields")
    if kind is None or not isinstance(values, dict):
        raise WireError(f"a step consists of {', '.join(_BATCHES)}, and a peer sent {name!r}")
    unknown = values.keys() ^ _KNOWN[kind]
    if unknown:
        raise WireError(
            f"{name} has other fields than what a peer sent for it: {', '.join(map(repr, sorted(map(str, unknown))))}"
        )
    return kind(**_mapped(revive, values, plan))
