"""Run by test_hanging: a loader whose threads all hang, each in its own way, and a process that ends as ENDING says."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
from typing import Any

if __name__ == "__main__":
    atexit.register(print, "exit handlers ran", flush=True)  # before the library's: called after

import torch

import orchdata as od

CALLS = 5


class Hanging(torch.utils.data.Dataset[int]):
    def __init__(self, fifo: str) -> None:
        self.fifo = fifo
        self.all_hang = threading.Barrier(CALLS, action=lambda: print("hanging", flush=True))

    def __len__(self) -> int:
        return CALLS

    def __getitem__(self, row: int) -> int:
        self.all_hang.wait()
        return [self.lock, self.read, self.sleep, self.loop, self.compute][row]()

    def lock(self) -> int:
        taken = threading.Lock()
        taken.acquire()
        taken.acquire()
        return 0

    def read(self) -> int:
        with open(self.fifo) as file:  # no one ever writes
            return len(file.read())

    def sleep(self) -> int:
        ctypes.CDLL(None).sleep(3600)
        return 0

    def loop(self) -> int:
        while True:
            with contextlib.suppress(Exception):
                threading.Event().wait(0.001)

    def compute(self) -> int:
        matrix: Any = torch.eye(300)
        while True:
            matrix = matrix @ matrix


def main(ending: str, fifo: str) -> None:
    timeout = 0 if ending == "interrupt" else 1
    loader = od.DataLoader(Hanging(fifo), CALLS, num_threads=CALLS, timeout=timeout, cost=[1] * CALLS)
    try:
        list(loader)
    except RuntimeError:
        if ending == "raise":
            raise
        if ending == "exit":
            sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
