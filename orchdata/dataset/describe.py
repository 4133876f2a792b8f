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
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

import orchdata
from orchdata.balancers.costs.model import CostModel
from orchdata.batch.batch import ModelInputs
from orchdata.dataset.arguments import Arguments
from orchdata.dataset.options import PreparedDataset
from orchdata.planning.costs import IndexCosts
from orchdata.planning.layout import layout_of
from orchdata.ranks.agreement import DATA
from orchdata.ranks.parallel import DataParallel

_MAX_DEPTH = 8
_SAMPLED = 64  # about as many items of a list are compared: they may be large


def describe_loader(arguments: Arguments, prepared: PreparedDataset) -> dict[str, Any]:
    """Return what plans and data of the loader depend on, JSON-safe."""
    costs = prepared.spec.plan.costs
    peers = arguments.dp if isinstance(arguments.dp, DataParallel) else DataParallel(None)
    blank = arguments.on_error.blank_names
    described: dict[str, Any] = {
        "orchdata": orchdata.__version__,
        **prepared.fingerprint,
        "num_ranks": arguments.rank.size,
        "ranks_per_node": prepared.spec.plan.ranks_per_node,
        "num_steps": prepared.spec.plan.num_steps,
        "index": costs.index.totals if isinstance(costs, IndexCosts) else None,
        DATA: None if arguments.in_shards else _dataset(arguments.dataset),
        "balance": arguments.balance,
        "accumulate": arguments.accumulate,
        "cost": arguments.cost.describe() if isinstance(arguments.cost, CostModel) else None,
        "drop_last": arguments.batches.drop_last,
        "on_error": arguments.on_error.action,
        "blank": _digest_of(blank, len(blank)),
        "collate_fn": layout_of(arguments.collate_fn) or arguments.collate_fn,
        "inputs": arguments.collate_fn.describe() if isinstance(arguments.collate_fn, ModelInputs) else None,
        **{name: getattr(peers, name) for name in ("replicate", "encoder_dims", "averaged", "gradients")},
        "check_plan_every": arguments.rank.check_plan_every,
    }
    plain: dict[str, Any] = stable(described)
    return plain


def stable(value: Any, depth: int = 0) -> Any:
    """Return JSON of any value, equal in every process: dtype and shape of an array, the name of what is not plain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, np.generic):
        return value.item() if isinstance(value, np.number | np.bool_) else str(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
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
    module = getattr(named, "__module__", None)
    # The name of the program in a rank that multiprocessing has started from another rank.
    return f"{'__main__' if module == '__mp_main__' else module}.{named.__qualname__}"


def _dataset(dataset: Any, depth: int = 0) -> dict[str, Any]:
    """Return the class of map-style data, and what it says of its samples: a fingerprint, or digests of indices and of
    a list's items. The number of samples is in the fingerprint of the loader.
    """
    described: dict[str, Any] = {"type": name_of(dataset)}
    fingerprint, indices = (getattr(dataset, name, None) for name in ("_fingerprint", "indices"))
    if isinstance(fingerprint, str):  # Hugging Face's
        return described | {"fingerprint": fingerprint}
    if isinstance(dataset, list | tuple | range):
        return described | {"items": _digest_of(dataset[:: 1 + len(dataset) // _SAMPLED], len(dataset))}
    if isinstance(indices, list | tuple | range | np.ndarray | torch.Tensor):
        described["indices"] = _digest_of(indices, len(indices))
    if depth < _MAX_DEPTH and isinstance(dataset, Subset):
        described["of"] = _dataset(dataset.dataset, depth + 1)
    elif depth < _MAX_DEPTH and isinstance(dataset, ConcatDataset):
        described["of"] = {str(number): _dataset(part, depth + 1) for number, part in enumerate(dataset.datasets)}
    return described


def _digest_of(items: Any, length: int) -> str:
    plain = items.tolist() if hasattr(items, "tolist") else list(items)
    numbers = plain if all(type(item) is int for item in plain) else stable(plain)
    return f"{length} of them, {_digest(json.dumps(numbers).encode())}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
