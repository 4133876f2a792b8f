"""A built step as headers and buffers for another process. Our own batches are sent without pickle.

    step  --describe_step--> units: a header and its buffers, not copied --read_step--> step

The first unit is the step itself (`ranks.wire`). Batches from a user's `collate_fn` or data set follow, one unit for
each microbatch: in the same form if that restores them exactly, else pickled, with their arrays outside the pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.balancers.costs.phase import PhaseCost
from orchdata.batch.batch import Batch
from orchdata.batch.tensors import LLMBatch, MediaBatch, Team, TextBatch
from orchdata.building.step import BuiltStep
from orchdata.engines.engine import described, pickles, what_does_not_pickle
from orchdata.loaders.errors import DataError
from orchdata.planning.parts import Parts
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route
from orchdata.planning.sharing.accumulated import FixedCost
from orchdata.planning.sharing.packed import NoPadding, PaddedCost
from orchdata.planning.teams import StepTeams
from orchdata.planning.windows import TokenRanges, WindowCost
from orchdata.ranks.wire import Buffer, WireError, describe, read, rebuild

Bytes = NDArray[np.uint8]

_CLASS = "<class>"  # marks a dict that was a dataclass; no modality has this name
_PLAN = "the step's"
_DICT = "dict"  # a dict that has the mark as a key itself, such as a kept value
_SLICE = "slice"
_BATCHES: dict[str, type[Any]] = {kind.__name__: kind for kind in (Batch, TextBatch, MediaBatch, LLMBatch, Team, Route)}
_STEPS: dict[str, type[Any]] = _BATCHES | {
    kind.__name__: kind
    for kind in (Plan, Parts, StepTeams, TokenRanges, NoPadding, PaddedCost, FixedCost, WindowCost, PhaseCost)
}
_NAMES = {kind: name for name, kind in _STEPS.items()}
_LEAVES = frozenset({type(None), bool, int, float, str, bytes, np.ndarray, torch.Tensor})
_FIELDS = {kind: tuple(field.name for field in fields(kind) if field.init) for kind in _NAMES}
_KNOWN = {kind: frozenset(names) for kind, names in _FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Unit:
    """One value: a header, and its buffers in the header's order."""

    kind: Literal["wire", "pickle"]
    header: bytes
    buffers: Sequence[Buffer]


def packed(value: Any) -> bytes:
    """Pickle a user's value for this process's own workers or its parent."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    """Return the value that `packed` was given."""
    return pickle.loads(data)  # noqa: S301 - of this process's own workers, or its parent


def packed_values(values: Any) -> bytes:
    """Return small values that `wire` can describe as one message."""
    message = describe(values)
    data = np.empty(message.num_bytes, np.uint8)
    message.write_to(data)
    return data.tobytes()


def unpacked_values(data: bytes) -> Any:
    """Return the values that `packed_values` was given."""
    return read(np.frombuffer(data, np.uint8))


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


def describe_step(built: BuiltStep) -> list[Unit]:
    """Return a step as units. Raises what pickling a user's own objects raises."""
    ours = [type(batch) is Batch for batch in built.batches]
    plan = {name: getattr(built.plan, name) for name in _FIELDS[Plan]}
    frame = {
        "plan": plain(plan | {"row": pack_rows(built.plan.row)}),
        "batches": [plain(batch, built.plan) if own else None for batch, own in zip(built.batches, ours, strict=True)],
        "failures": [list(failure.args) for failure in built.failures],
        "seconds": built.seconds,
        "figures": built.figures,
    }
    theirs = [describe_value(batch) for batch, own in zip(built.batches, ours, strict=True) if not own]
    return [_wired(frame), *theirs]


def read_step(units: Iterable[Unit]) -> BuiltStep:
    """Return the step that `describe_step` was given; its arrays are views of the units' buffers."""
    first, *rest = units
    frame, theirs = read_value(first), iter(rest)
    values = revive(frame["plan"])
    plan = Plan(**values | {"row": unpack_rows(values["row"])})
    batches = [read_value(next(theirs)) if batch is None else revive(batch, plan) for batch in frame["batches"]]
    failures = [DataError(*args) for args in frame["failures"]]
    return BuiltStep(plan, batches, failures, frame["seconds"], frame["figures"])


def pack_rows(rows: NDArray[Any] | None) -> Any:
    """Return rows in a form that `wire` can describe: a sampler's own keys are pickled."""
    if rows is None or rows.dtype.kind != "O":
        return rows
    return pickle.dumps(rows.tolist(), protocol=pickle.HIGHEST_PROTOCOL)


def unpack_rows(packed: Any) -> Any:
    """Return the rows that `pack_rows` was given, as a copy."""
    if not isinstance(packed, bytes):
        return None if packed is None else packed.copy()
    listed = pickle.loads(packed)  # noqa: S301 - of this process's own workers, or its parent
    rows = np.empty(len(listed), object)
    rows[:] = listed
    return rows


def describe_value(value: Any) -> Unit:
    """Return any value of a user's as a unit.

    Raises:
        RuntimeError: names the member that does not pickle, or is a tensor with an autograd graph, as in "batch['rows']
            is an object of type generator".
    """
    try:
        return _wired(value, exact=True)
    except Exception:  # noqa: BLE001 - some kinds of tensors cannot be inspected
        return _pickled(value)


def read_value(unit: Unit) -> Any:
    """Return the value that `describe_value` was given. Only for units from this process's own workers."""
    if unit.kind == "wire":
        return rebuild(unit.header, [_as_bytes(buffer) for buffer in unit.buffers])
    return pickle.loads(unit.header, buffers=unit.buffers)  # noqa: S301 - of this process's own workers


def plain(value: Any, plan: Plan | None = None) -> Any:
    """Return parts of a step as values that `wire` can describe: dataclasses become dicts, `plan` becomes a mark."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if plan is not None and value is plan:
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


def _mapped(convert: Callable[..., Any], values: Mapping[Any, Any], plan: Plan | None) -> dict[Any, Any]:
    return {name: item if type(item) in _LEAVES else convert(item, plan) for name, item in values.items()}


def revive(value: Any, plan: Plan | None = None) -> Any:
    """Return the value that `plain` was given. Raises WireError for anything that is not part of a step."""
    if isinstance(value, (list, tuple)):
        return (
            value if all(type(item) in _LEAVES for item in value) else type(value)(revive(item, plan) for item in value)
        )
    if not isinstance(value, dict):
        return value
    if _CLASS not in value:
        return _mapped(revive, value, plan)
    name = value[_CLASS]
    if plan is not None and name == _PLAN:
        return plan
    if name == _DICT:
        return {key: revive(item, plan) for key, item in value["items"]}
    if name == _SLICE:
        return slice(*value["items"])
    known = _STEPS if plan is None else _BATCHES
    kind, values = known.get(name) if isinstance(name, str) else None, value.get("fields")
    if kind is None or not isinstance(values, dict):
        raise WireError(f"a step consists of {', '.join(known)}, and a peer sent {name!r}")
    unknown = values.keys() ^ _KNOWN[kind]
    if unknown:
        raise WireError(
            f"{name} has other fields than what a peer sent for it: {', '.join(map(repr, sorted(map(str, unknown))))}"
        )
    return kind(**_mapped(revive, values, plan))


def _wired(value: Any, *, exact: bool = False) -> Unit:
    message = describe(value, exact=exact)
    return Unit("wire", message.header, message.buffers)


def _pickled(value: Any) -> Unit:
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    try:
        _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:
        raise _unsent(value, _pickled_here, error) from error
    return Unit("pickle", out.getvalue(), [buffer.raw() for buffer in buffers])


def _pickled_here(value: Any) -> None:
    _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(value)


def _unsent(batch: Any, dump: Callable[[Any], Any], error: Exception) -> RuntimeError:
    """Return the error for a batch that cannot be sent: it names the member."""
    name, member = what_does_not_pickle(batch, partial(pickles, dump=dump))
    return RuntimeError(
        f"batch{name} is {described(member)}, which a worker process cannot send ({error}): have the data set or "
        "collate_fn return values that pickle, or load with num_workers=0"
    )


def _as_bytes(buffer: Any) -> Bytes:
    return np.frombuffer(buffer, np.uint8) if not isinstance(buffer, np.ndarray) else buffer


class _Pickler(pickle.Pickler):
    """Keeps the elements of tensors out of the pickle, as pickle itself does for numpy arrays."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise RuntimeError("it requires grad, and its autograd graph cannot be sent: call detach() on it")
        if type(value) is torch.UntypedStorage and value.device.type == "cpu":
            return torch.Tensor.untyped_storage, (torch.empty(0, dtype=torch.uint8).set_(value),)
        if type(value) is not torch.Tensor or not _is_simple(value):
            return NotImplemented
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
        dense = value.permute(order)
        if not value.numel() or not dense.is_contiguous():
            return NotImplemented
        flat = dense.reshape(-1).view(torch.uint8).numpy()
        return _tensor_of, (pickle.PickleBuffer(flat.data), value.dtype, tuple(dense.shape), order)


def _is_simple(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not vars(tensor)
    )


def _tensor_of(flat: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
    dense = torch.frombuffer(flat, dtype=dtype).view(shape)
    return dense.permute([order.index(dim) for dim in range(len(order))])
