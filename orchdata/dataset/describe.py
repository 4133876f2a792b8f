"""The description of a loader: what all its ranks must share, as JSON that is equal on every rank.

Plans are integer arithmetic with stable sorts, so it has our version but not those of numpy or numba. It contains no
default repr, because its memory address differs between equal ranks.
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
_SAMPLED = 64  # evenly spread items of a list or array that are compared: all of it may be large, or on a disk
_WHOLE = 1_000_000  # up to this length, all names or numbers are compared: another order of files may differ anywhere


def describe_loader(dataset: Any, prepared: PreparedDataset, options: LoaderOptions, dp: Any) -> dict[str, Any]:
    """Return what plans and data of the loader depend on, JSON-safe."""
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
        "accumulate": options.accumulate,
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
    """Return the description of a model's inputs, such as what each rank has detected."""
    return collate_fn.describe() if isinstance(collate_fn, ModelInputs) else None


def stable(value: Any, depth: int = 0) -> Any:
    """Return JSON of any value, equal in every process: a digest if it is large, its name if it is not plain."""
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
    """Return the name of a function or class; of any other value that of its type."""
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
    # The name of the program in a rank that multiprocessing has started from another rank.
    module = "__main__" if module == "__mp_main__" else module
    return f"{module}.{named.__qualname__}{where}"


def _dataset(dataset: Any, depth: int = 0, seen: dict[int, Any] | None = None) -> Any:
    """Return what identifies the samples of a map-style data set, without loading one.

    Of a user's class: the data sets in its attributes, `indices`, and lists with one name or number per sample.

    Args:
        seen: data sets by id. Each is described once: they may refer to each other.
    """
    described: dict[str, Any] = {"type": name_of(dataset)}
    seen = {} if seen is None else seen
    if depth >= _MAX_DEPTH:
        return described
    if id(dataset) in seen:
        return described | {"seen": "above"}
    seen[id(dataset)] = dataset
    # Known classes: Hugging Face's, which have a fingerprint, lists and arrays, and torch's containers.
    fingerprint = getattr(dataset, "_fingerprint", None)
    if isinstance(fingerprint, str):
        return described | {"fingerprint": fingerprint}
    if isinstance(dataset, list | tuple | range | np.ndarray | torch.Tensor):
        return described | {"items": _items(dataset)}
    if isinstance(dataset, TensorDataset):
        return described | {"tensors": {str(number): _array(tensor) for number, tensor in enumerate(dataset.tensors)}}
    if isinstance(dataset, ConcatDataset | StackDataset):
        parts = dataset.datasets
        named = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
        return described | {"of": {str(name): _dataset(part, depth + 1, seen) for name, part in named}}
    indices = getattr(dataset, "indices", None)
    if isinstance(indices, list | tuple | range | np.ndarray | torch.Tensor):
        described["indices"] = _indices(indices)
    if isinstance(dataset, Subset):
        return described | {"of": _dataset(dataset.dataset, depth + 1, seen)}
    # Any other class: its attributes.
    own = vars(dataset) if hasattr(dataset, "__dict__") else {}
    lists = {name: _items(part) for name, part in own.items() if name != "indices" and _is_per_sample(part, dataset)}
    inner = {name: _dataset(part, depth + 1, seen) for name, part in own.items() if _is_dataset(part)}
    return described | ({"lists": lists} if lists else {}) | ({"of": inner} if inner else {})


def _is_per_sample(value: Any, dataset: Any) -> bool:
    """Return whether it is a list with one name or number per sample."""
    if not isinstance(value, list | tuple) or not value or not _is_plain(value[:1]):
        return False
    try:
        return len(value) == len(dataset) and _is_plain(value)
    except Exception:  # noqa: BLE001 - the user's __len__: it raises again when the loader calls it
        return False


def _is_plain(items: Any) -> bool:
    return all(isinstance(item, str | int | PurePath) for item in items)


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset) or isinstance(getattr(value, "_fingerprint", None), str)


def _indices(indices: Any) -> str:
    """Return a digest of all of them: two subsets of a data set may differ only in the middle."""
    try:
        array = np.asarray(indices)
    except (ValueError, TypeError, RuntimeError):
        array = np.zeros(0, object)
    if array.dtype.kind not in "iub":
        return _digest(json.dumps(stable(list(indices))).encode())
    return f"{len(indices)} of them, {_digest(array.astype(np.int64).tobytes())}"


def _items(items: Any) -> Any:
    if isinstance(items, np.ndarray | torch.Tensor):
        return _array(items)
    if isinstance(items, range):
        return f"{len(items)} of them, {_digest(str(items).encode())}"
    whole = len(items) <= _WHOLE and _is_plain(items)
    indices = range(len(items)) if whole else map(int, _spread(len(items)))
    chosen = [str(item) if isinstance(item, PurePath) else stable(item) for item in map(items.__getitem__, indices)]
    return f"{len(items)} of them, {_digest(json.dumps(chosen).encode())}"


def _array(array: Any) -> Any:
    """Return dtype, shape, and a digest of some elements."""
    tensor = isinstance(array, torch.Tensor)
    described = f"{array.dtype} {tuple(array.shape)}"
    size = int(array.numel() if tensor else array.size)
    if not size or (tensor and array.layout != torch.strided) or (not tensor and array.dtype.hasobject):
        return described
    indices = np.unravel_index(_spread(size), tuple(array.shape)) if array.ndim else ()
    if tensor:
        chosen = array.detach()[tuple(map(torch.as_tensor, indices))].reshape(-1).cpu().contiguous()
        return f"{described}, {_digest(chosen.view(torch.uint8).numpy().tobytes())}"
    return f"{described}, {_digest(np.ascontiguousarray(array[indices]).tobytes())}"


def _spread(count: int) -> Any:
    return np.unique(np.linspace(0, max(0, count - 1), min(count, _SAMPLED)).astype(np.int64))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
