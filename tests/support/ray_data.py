"""What actors of tests load: found by name in their processes, too (the nodes have this folder on their path)."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

import orchdata as od
from orchdata.engines import parcel as node_files
from orchdata.engines.parcel import NodeFile, copied
from orchdata.loaders import watch as waits
from orchdata.loaders.storage.cache import CacheFolder


class Drawn(Dataset[Any]):
    """Items with random numbers of all three generators, and the number of the worker."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> tuple[int, float, float, float, int]:
        info = get_worker_info()
        assert info is not None
        drawn = float(np.random.rand())  # noqa: NPY002 - as users do
        return number, random.random(), drawn, float(torch.rand(())), info.id


class Deadly(Dataset[int]):
    """One item ends its process, `times` times; each time is a file in a folder."""

    def __init__(self, folder: Path, row: int, times: int, *, hangs: bool = False) -> None:
        self.folder, self.row, self.times, self.hangs = folder, row, times, hangs

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> int:
        if number == self.row and len(list(self.folder.iterdir())) < self.times:
            (self.folder / f"{time.monotonic_ns()}").touch()
            if self.hangs:
                time.sleep(1000)
            faulthandler.disable()  # pytest's would write all stacks
            ctypes.string_at(0)  # by this thread, before it returns
        return number


class Slow(Dataset[int]):
    """Items that write who loads them to a folder, then wait until a file is there."""

    def __init__(self, folder: Path, *, wait: bool = True) -> None:
        self.folder, self.wait = folder, wait

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> int:
        (self.folder / f"pid-{os.getpid()}").touch()
        while self.wait and not (self.folder / "go").exists():
            time.sleep(0.01)
        return number


class FromFarStorage(Dataset[int]):
    """Items; one of them waits for storage for some seconds. Each time is a file in a folder."""

    def __init__(self, folder: Path, row: int, seconds: float) -> None:
        self.folder, self.row, self.seconds = folder, row, seconds

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> int:
        if number == self.row:
            (self.folder / f"{time.monotonic_ns()}").touch()
            with waits.for_storage():
                time.sleep(self.seconds)
        return number


class Raising(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        raise ZeroDivisionError(f"item {number}")


class WithState(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        return number

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def copied_on_node(file: NodeFile) -> tuple[str, int]:
    """A task: the path and inode of a node's copy, which it fetches in many pieces."""
    node_files._PIECE_BYTES = 1000  # type: ignore[misc]
    path = copied(file, CacheFolder())
    return str(path), path.stat().st_ino


def numbers_over_ray(batch_size: int = 2) -> list[int]:
    """Iterate a loader over Ray, in a trial of Ray Tune."""
    loader = od.DataLoader(list(range(8)), batch_size=batch_size, num_workers=1, engine=od.RayEngine(num_cpus=1))
    return [number for batch in loader for number in batch.tolist()]
