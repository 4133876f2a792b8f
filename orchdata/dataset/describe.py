"""Describing a loader: what all its ranks must share, as JSON that equal loaders have equal on every rank.

Plans are integer arithmetic with stable sorts, so versions of numpy or numba are not in it; ours is. Nothing is
described by a default repr, whose memory address differs between equal ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

import orchdata
from orchdata.balancers import CostModel
from orchdata.batch.batch import ModelInputs
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.options import LoaderOptions, PreparedDataset
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.planning.costs import IndexCosts
from orchdata.planning.layout import layout_of
from orchdata.ranks.agreement import DATA
from orchdata.ranks.parallel import DataParallel

_MAX_DEPTH = 8
_SAMPLED = 64  # items of a list or an array that are looked at, evenly spread: all of it may be large, or on a disk
_WHOLE = 1_000_000  # names or numbers of a list that are all looked at: files in another order differ in any place


def describe_loader(dataset: Any, prepared: PreparedDataset, options: LoaderOptions, dp: Any) -> dict[str, Any]:
    """What plans and data of the loader depend on, JSON-safe."""
    costs = prepared.spec.plan.costs
    described: dict[str, Any] = {
        "orchdata": orchdata.__version__,
        **prepared.fingerprint,
        "num_ranks": options.rank.size,
        "ranks_per_node": prepared.spec.plan.ranks_per_node,
        "num_steps": prepared.spec.plan.num_steps,
        "index": costs.index.totals if isinstance(costs, IndexCosts) else None,
        DATA: None if isinstance(dataset, ShardDataset | Mixture) else _dataset(dataset),
        "balance": options.balance,
        "cost": options.cost.describe() if isinstance(options.cost, CostModel) else None,
        "drop_last": options.batches.drop_last,
        "on_error": options.policy.action,
        "collate_fn": layout_of(options.collate_fn) or options.collate_fn,
        "inputs": _inputs(options.collate_fn),
        "replicate": dp.replicate if isinstance(dp, DataParallel) else "broadcast",
        "check_plan_every": options.rank.check_plan_every,
    }
    plain: dict[str, Any] = stable(described)
    return plain


def _inputs(collate_fn: Any) -> Any:
    """What inputs of a model say of themselves, such as what was found out on each rank."""
    return collate_fn.describe() if isinstance(collate_fn, ModelInputs) else None


def stable(value: Any, depth: int = 0) -> Any:
    """JSON of any value, the same in every process: a digest of what is large, a name of what is no plain value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, np.generic):
        return value.item() if isinstance(value, np.number | np.bool_) else str(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        return _array(value)
    if isinstance(value, bytes | bytearray):
        return _digest(bytes(value))
    if depth >= _MAX_DEPTH:
        return name_of(value)
    if isinstance(value, Mapping):
        return {str(key): stable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((stable(item, depth + 1) for item in value), key=json.dumps)
    if isinstance(value, list | tuple | range):
        return [stable(item, depth + 1) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": name_of(value)} | {
            field.name: stable(getattr(value, field.name), depth + 1) for field in fields(value)
        }
    return name_of(value)


def name_of(value: Any) -> str:
    """Of a function or class, its own; of anything else its type's."""
    if isinstance(value, Enum):
        return f"{name_of(type(value))}.{value.name}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    while not hasattr(value, "__qualname__") and hasattr(value, "func"):  # functools.partial
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    code = getattr(named, "__code__", None)
    where = f" in line {code.co_firstlineno}" if code is not None and "<lambda>" in named.__qualname__ else ""
    module = getattr(named, "__module__", None)
    # A rank that is a child of another by multiprocessing calls the program so.
    module = "__main__" if module == "__mp_main__" else module
    return f"{module}.{named.__qualname__}{where}"


def _dataset(dataset: Any, depth: int = 0, seen: dict[int, Any] | None = None) -> Any:
    """Which samples a map-style data set has, as far as can be told without loading one.

    Of a class of the user's: the data sets it holds in attributes, `indices`, and lists of a name or number a sample.

    Args:
        seen: data sets by id, described once each: they may refer to each other.
    """
    told: dict[str, Any] = {"type": name_of(dataset)}
    seen = {} if seen is None else seen
    if depth >= _MAX_DEPTH:
        return told
    if id(dataset) in seen:
        return told | {"seen": "above"}
    seen[id(dataset)] = dataset
    fingerprint = getattr(dataset, "_fingerprint", None)
    if isinstance(fingerprint, str):  # Hugging Face's
        return told | {"fingerprint": fingerprint}
    if isinstance(dataset, list | tuple | range | np.ndarray | torch.Tensor):
        return told | {"items": _items(dataset)}
    if isinstance(dataset, TensorDataset):
        return told | {"tensors": {str(place): _array(tensor) for place, tensor in enumerate(dataset.tensors)}}
    if isinstance(dataset, ConcatDataset | StackDataset):
        parts = dataset.datasets
        named = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
        return told | {"of": {str(name): _dataset(part, depth + 1, seen) for name, part in named}}
    indices = getattr(dataset, "indices", None)
    if isinstance(indices, list | tuple | range | np.ndarray | torch.Tensor):
        told["indices"] = _indices(indices)
    if isinstance(dataset, Subset):
        return told | {"of": _dataset(dataset.dataset, depth + 1, seen)}
    held = vars(dataset) if hasattr(dataset, "__dict__") else {}
    lists = {name: _items(part) for name, part in held.items() if name != "indices" and _is_of_samples(part, dataset)}
    inner = {name: _dataset(part, depth + 1, seen) for name, part in held.items() if _is_dataset(part)}
    return told | ({"lists": lists} if lists else {}) | ({"of": inner} if inner else {})


def _is_of_samples(value: Any, dataset: Any) -> bool:
    """Whether it is a list of one name or number for each sample."""
    if not isinstance(value, list | tuple) or not value or not _is_plain(value[:1]):
        return False
    try:
        return len(value) == len(dataset) and _is_plain(value)
    except Exception:  # noqa: BLE001 - its length is the user's code, which says so itself when it is asked for it
        return False


def _is_plain(items: Any) -> bool:
    return all(isinstance(item, str | int | PurePath) for item in items)


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset) or isinstance(getattr(value, "_fingerprint", None), str)


def _indices(indices: Any) -> str:
    """All of them: two shares of one data set may differ in the middle only."""
    try:
        found = np.asarray(indices)
    except (ValueError, TypeError, RuntimeError):
        found = np.zeros(0, object)
    if found.dtype.kind not in "iub":
        return _digest(json.dumps(stable(list(indices))).encode())
    return f"{len(indices)} of them, {_digest(found.astype(np.int64).tobytes())}"


def _items(items: Any) -> Any:
    if isinstance(items, np.ndarray | torch.Tensor):
        return _array(items)
    if isinstance(items, range):
        return f"{len(items)} of them, {_digest(str(items).encode())}"
    whole = len(items) <= _WHOLE and _is_plain(items)
    places = range(len(items)) if whole else map(int, _spread(len(items)))
    found = [str(item) if isinstance(item, PurePath) else stable(item) for item in map(items.__getitem__, places)]
    return f"{len(items)} of them, {_digest(json.dumps(found).encode())}"


def _array(array: Any) -> Any:
    """Dtype, shape, and a digest of some elements."""
    tensor = isinstance(array, torch.Tensor)
    told = f"{array.dtype} {tuple(array.shape)}"
    size = int(array.numel() if tensor else array.size)
    if not size or (tensor and array.layout != torch.strided) or (not tensor and array.dtype.hasobject):
        return told
    places = np.unravel_index(_spread(size), tuple(array.shape)) if array.ndim else ()
    if tensor:
        found = array.detach()[tuple(map(torch.as_tensor, places))].reshape(-1).cpu().contiguous()
        return f"{told}, {_digest(found.view(torch.uint8).numpy().tobytes())}"
    return f"{told}, {_digest(np.ascontiguousarray(array[places]).tobytes())}"


def _spread(count: int) -> Any:
    return np.unique(np.linspace(0, max(0, count - 1), min(count, _SAMPLED)).astype(np.int64))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
