"""Builds steps of pickled specs in a fresh process: `python spec_job.py FOLDER` prints name -> digests of steps.

Also what such specs may hold, found by name in both processes, and the digest itself.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import orchdata as od
from orchdata.building.step import BuiltStep
from orchdata.planning.plan import Plan


def digest(built: BuiltStep) -> str:
    """Of all that a step delivers, to the bit."""
    found = hashlib.blake2b(built.plan.hash.encode())
    _add(found, [built.batches, [failure.args for failure in built.failures]])
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if value.numel():
            found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        _add(found, torch.from_numpy(np.ascontiguousarray(value)))
    elif isinstance(value, Plan):
        found.update(value.hash.encode())
    elif is_dataclass(value):
        _add(found, {field.name: getattr(value, field.name) for field in fields(value)})
    elif isinstance(value, Mapping):
        _add(found, [part for item in value.items() for part in item])
    elif isinstance(value, list | tuple):
        found.update(f"{type(value).__name__} of {len(value)}".encode())
        for item in value:
            _add(found, item)
    else:
        assert value is None or isinstance(value, str | int | float | bool), type(value)
        found.update(repr(value).encode())


def words(text: str) -> list[int]:
    """A tokenizer that is found by its name."""
    return [len(word) for word in text.split()]


def decoded(samples: list[od.Sample], *, step: od.StepInfo) -> list[Any]:
    """A collate_fn that keeps all it gets."""
    return [step, samples]


def main(folder: Path) -> dict[str, list[str]]:
    found = {}
    for path in sorted(folder.iterdir()):
        spec, tasks = pickle.loads(path.read_bytes())
        builder = pickle.loads(spec).open()
        found[path.name] = [digest(builder.build(task)) for task in tasks]
    return found


if __name__ == "__main__":
    # What the parent knows by the module's name is not to be a second thing here.
    from spec_job import main as named_main

    print(json.dumps(named_main(Path(sys.argv[1]))))
