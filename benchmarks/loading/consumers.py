"""What the process that iterates does with a batch: nothing, or a fixed amount of work that needs its thread.

Loaders that decode in threads of the same process compete for its interpreter: hardly with large operations, with
small ones at every step between two, and with pure Python always.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

Work = Callable[[int], None]


def _small_operations(rounds: int) -> None:
    """Operations of some ten microseconds each, as a small model has them."""
    weights, values = torch.full((96, 96), 0.01), torch.ones(16, 96)
    for _ in range(rounds):
        values = torch.relu(values @ weights + 0.1)


def _pure_python(rounds: int) -> None:
    """Bytecode that never lets go of the interpreter by itself."""
    total = 0
    for number in range(rounds * 100):
        total ^= number


CONSUMERS: Final[dict[str, Work | None]] = {"none": None, "torch": _small_operations, "python": _pure_python}


def rounds_for(consumer: str, seconds: float) -> int:
    """Rounds of its work that take so long where nothing else runs; by the fastest of five tries."""
    work, rounds = CONSUMERS[consumer], 64
    if work is None:
        return 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that are measured
    try:
        while (taken := min(_timed(work, rounds) for _ in range(5))) < 0.01:
            rounds *= 2
    finally:
        torch.set_num_threads(threads)
    return max(1, round(rounds * seconds / taken))


def _timed(work: Work, rounds: int) -> float:
    started = time.perf_counter()
    work(rounds)
    return time.perf_counter() - started
