"""A built step as headers and buffers, for another process: what our own batches hold without pickle.

    step  --describe_step--> units: a header, and the buffers it speaks of, not copied --read_step--> step

The first unit is the step itself (`ranks.wire`). What a user's `collate_fn` or data set made follows, a unit a
microbatch: in the same form where that brings it back as it was, else pickled, with its arrays beside the pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.balancers.costs.phase import PhaseCost
from orchdata.batch.batch import Batch
from orchdata.batch.tensors import LLMBatch, MediaBatch, TextBatch
from orchdata.building.step import BuiltStep
from orchdata.engines.pickling import described, what_does_not_pickle
from orchdata.loaders.errors import DataError
from orchdata.planning.parts import Parts
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route
from orchdata.planning.sharing.fixed import FixedCost
from orchdata.planning.sharing.packed import NoPadding
from orchdata.planning.sharing.padded import PaddedCost
from orchdata.ranks.wire import Buffer, WireError, describe, rebuild

Bytes = NDArray[np.uint8]

_CLASS = "<class>"  # marks a dict that was a dataclass; no modality is called so
_PLAN = "the step's"
_BATCHES: dict[str, type[Any]] = {kind.__name__: kind for kind in (Batch, TextBatch, MediaBatch, LLMBatch, Route)}
_STEPS: dict[str, type[Any]] = _BATCHES | {
    kind.__name__: kind for kind in (Plan, Parts, NoPadding, PaddedCost, FixedCost, PhaseCost)
}
_NAMES = {kind: name for name, kind in _STEPS.items()}
_LEAVES = frozenset({type(None), bool, int, float, str, np.ndarray, torch.Tensor})
_FIELDS = {kind: tuple(field.name for field in fields(kind) if field.init) for kind in _NAMES}
_KNOWN = {kind: frozenset(names) for kind, names in _FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Unit:
    """One value: a header, and the buffers it speaks of, in its order."""

    kind: Literal["wire", "pickle"]
    header: bytes
    buffers: Sequence[Buffer]


def describe_step(built: BuiltStep) -> list[Unit]:
    """A step as units. Raises what pickling a user's own objects does."""
    ours = [type(batch) is Batch for batch in built.batches]
    held = {name: getattr(built.plan, name) for name in _FIELDS[Plan]}
    frame = {
        "plan": plain(held | {"row": pack_rows(built.plan.row)}),
        "batches": [plain(batch, built.plan) if own else None for batch, own in zip(built.batches, ours, strict=True)],
        "failures": [list(failure.args) for failure in built.failures],
        "seconds": built.seconds,
        "figures": built.figures,
    }
    theirs = [describe_value(batch) for batch, own in zip(built.batches, ours, strict=True) if not own]
    return [_wired(frame), *theirs]


def read_step(units: Iterable[Unit]) -> BuiltStep:
    """The step of `describe_step`; its arrays are views of the units' buffers."""
    first, *rest = units
    frame, theirs = read_value(first), iter(rest)
    held = revive(frame["plan"])
    plan = Plan(**held | {"row": unpack_rows(held["row"])})
    batches = [read_value(next(theirs)) if held is None else revive(held, plan) for held in frame["batches"]]
    failures = [DataError(*args) for args in frame["failures"]]
    return BuiltStep(plan, batches, failures, frame["seconds"], frame["figures"])


def pack_rows(rows: NDArray[Any] | None) -> Any:
    """Rows as `wire` carries them: what a sampler gave in place of integers is pickled."""
    if rows is None or rows.dtype.kind != "O":
        return rows
    return pickle.dumps(rows.tolist(), protocol=pickle.HIGHEST_PROTOCOL)


def unpack_rows(packed: Any) -> Any:
    """What `pack_rows` was given, of memory of its own."""
    if not isinstance(packed, bytes):
        return None if packed is None else packed.copy()
    listed = pickle.loads(packed)  # noqa: S301 - of this process's own workers, or its parent
    rows = np.empty(len(listed), object)
    rows[:] = listed
    return rows


def describe_value(value: Any) -> Unit:
    """Anything of a user's.

    Raises:
        RuntimeError: names the member that does not pickle, or is a tensor with a graph behind it, as in "batch['rows']
            is an object of type generator".
    """
    try:
        return _wired(value, exact=True)
    except Exception:  # noqa: BLE001 - some kinds of tensors refuse to say what they are
        return _pickled(value)


def read_value(unit: Unit) -> Any:
    """The value of `describe_value`. For what this process's own workers have sent, and nobody else."""
    if unit.kind == "wire":
        return rebuild(unit.header, [_as_bytes(buffer) for buffer in unit.buffers])
    return pickle.loads(unit.header, buffers=unit.buffers)  # noqa: S301 - of this process's own workers


def plain(value: Any, plan: Plan | None = None) -> Any:
    """Batches, and what else a step consists of, as what `wire` carries: dataclasses become dicts, `plan` a mark."""
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
    if isinstance(value, Mapping):
        return _mapped(plain, value, plan)
    return value


def _mapped(convert: Callable[..., Any], values: Mapping[Any, Any], plan: Plan | None) -> dict[Any, Any]:
    return {name: item if type(item) in _LEAVES else convert(item, plan) for name, item in values.items()}


def revive(value: Any, plan: Plan | None = None) -> Any:
    """What `plain` was given. Raises WireError for what no step consists of."""
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
    known = _STEPS if plan is None else _BATCHES
    kind, held = known.get(name) if isinstance(name, str) else None, value.get("fields")
    if kind is None or not isinstance(held, dict):
        raise WireError(f"a step consists of {', '.join(known)}, and a peer sent {name!r}")
    unknown = held.keys() ^ _KNOWN[kind]
    if unknown:
        raise WireError(
            f"{name} and what a peer sent for it differ in {', '.join(map(repr, sorted(map(str, unknown))))}"
        )
    return kind(**_mapped(revive, held, plan))


def _wired(value: Any, *, exact: bool = False) -> Unit:
    message = describe(value, exact=exact)
    return Unit("wire", message.header, message.buffers)


def _pickled(value: Any) -> Unit:
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    try:
        _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:
        name, found = what_does_not_pickle(value, _pickles)
        raise RuntimeError(
            f"batch{name} is {described(found)}, which a worker process cannot send ({error}): have the data set or "
            "collate_fn give what pickles, or load with num_workers=0"
        ) from error
    return Unit("pickle", out.getvalue(), [buffer.raw() for buffer in buffers])


def _pickles(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(value)
    except Exception:  # noqa: BLE001 - whatever a user's object raises when it is asked for its state
        return False
    return True


def _as_bytes(buffer: Any) -> Bytes:
    return np.frombuffer(buffer, np.uint8) if not isinstance(buffer, np.ndarray) else buffer


class _Pickler(pickle.Pickler):
    """Keeps the elements of tensors out of the pickle, as pickle itself does those of numpy arrays."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise RuntimeError("it requires grad, and the graph behind it does not travel: call detach() on it")
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
