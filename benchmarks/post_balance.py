"""What `post_balance` adds to a step, compared to the same loop over the bare loader.

    lists of samples --loop------------------> milliseconds a step
                     --post_balance--> loop--> milliseconds a step, and how many more these are

Once with nothing else in the loop, where all of the work shows; and once with a training step that leaves the cores
alone, where only what is waited for does; there also by phase, with each image as several parts. All loops run in turn
in every rank of one gloo job; a repeat takes as long as its slowest rank.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.command import run_command
from benchmarks.exchange import run_job
from benchmarks.launch import end_with_parent, leave
from orchdata.bench import Result
from orchdata.planning.balance import Balance
from orchdata.post_balancing.loader import post_balance
from orchdata.post_balancing.step import Part

# A loop is timed from here on: while the first step of an epoch is loaded, no training step runs that could hide it.
_UNTIMED_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PostBalanceBench:
    """What to measure.

    Attributes:
        ranks: numbers of gloo ranks, each a job of its own.
        samples_per_rank: that a rank draws in a step.
        image_bytes: median of a sample's pixels; they are lognormal, with a sigma of 1.
        parts: that an image is cut into, by phase.
        words: median length of a text; also lognormal, with a sigma of 1.
        steps: of a loop, after two that are not timed.
        training_milliseconds: what a training step sleeps, in the loops that have one.
        repeats: of each loop, in turn, after one round that does not count.
        seed: of the samples.
    """

    ranks: tuple[int, ...] = (2, 4, 8)
    samples_per_rank: int = 16
    image_bytes: int = 100 * 1024
    parts: int = 4
    words: int = 300
    steps: int = 20
    training_milliseconds: float = 50.0
    repeats: int = 10
    seed: int = 0


def run(config: PostBalanceBench) -> list[Result]:
    """Measure.

    Raises:
        ValueError: a loop without steps or repeats.
        LaunchError: a rank failed.
    """
    if config.steps < 1 or config.repeats < 1:
        raise ValueError(f"steps and repeats must be at least 1, got {config.steps} and {config.repeats}")
    return [
        result
        for num_ranks in config.ranks
        for result in _results(config, num_ranks, run_job("benchmarks.post_balance", config, num_ranks))
    ]


def _results(config: PostBalanceBench, num_ranks: int, found: dict[str, Any]) -> list[Result]:
    seconds, stats = found["seconds"], found["stats"]
    steps = stats["steps"]
    share = 100 * stats["moved_samples"] / stats["samples"]
    mib = stats["moved_bytes"] / steps / 2**20

    def added(what: str, to: str, of: str) -> tuple[float, ...]:
        pairs = zip(seconds[f"{what}, {of}"], seconds[f"{to}, {of}"], strict=True)
        return tuple(1000 * (more - less) for more, less in pairs)

    where = f"{num_ranks} ranks: "
    by_phase = found["stats_by_phase"]
    mib_by_phase = by_phase["moved_bytes"] / by_phase["steps"] / 2**20
    num_parts = f"{config.parts * stats['samples'] // steps} parts a step of all ranks"
    shared = f"{num_ranks} ranks shared {found['cores']} cores"
    hidden = f"a training step sleeps {config.training_milliseconds:g} ms"
    size = f"a step of all ranks, which draw {found['bytes_drawn'] / 2**20:.1f} MiB of pixels"
    return [
        Result(
            name=f"{where}post_balance adds to an empty step",
            unit="ms",
            values=added("balanced", "bare", "empty"),
            note=shared,
        ),
        Result(
            name=f"{where}to a training step",
            unit="ms",
            values=added("balanced", "bare", "training"),
            note=f"{hidden}; {shared}",
        ),
        Result(
            name=f"{where}by phase, adds to that",
            unit="ms",
            values=added("by phase", "balanced", "training"),
            note=num_parts,
        ),
        Result(name=f"{where}bytes moved", unit="MiB", values=(mib,), note=size),
        Result(name=f"{where}samples moved", unit="%", values=(share,), note=f"of {stats['samples'] // steps} a step"),
        Result(
            name=f"{where}largest load / mean",
            unit="x",
            values=(stats["imbalance"],),
            note=f"{stats['imbalance_before']:.4g} as drawn",
        ),
        Result(name=f"{where}by phase, bytes moved", unit="MiB", values=(mib_by_phase,), note=size),
        Result(
            name=f"{where}by phase, largest load / mean",
            unit="x",
            values=(by_phase["imbalance"],),
            note=f"{by_phase['imbalance_before']:.4g} as drawn",
        ),
    ]


class _Lists:
    """A loader without any work: the same lists of samples, in turn."""

    def __init__(self, lists: Sequence[list[dict[str, Any]]], steps: int) -> None:
        self._lists = lists
        self._steps = steps

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for step in range(self._steps):
            yield self._lists[step % len(self._lists)]


def run_rank(settings: str, result: str) -> None:
    """One rank."""
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = PostBalanceBench(**json.loads(settings))
    lists = _drawn(config, dist.get_rank())
    loader = _Lists(lists, _UNTIMED_STEPS + config.steps)
    balanced = post_balance(loader, cost=lambda sample: len(sample["tokens"]) + sample["image"].size // 768)
    by_phase = post_balance(
        loader,
        cost=lambda sample: {"image": sample["image"].size // 768, "llm": len(sample["tokens"])},
        parts=lambda sample: (
            {name: value for name, value in sample.items() if name != "image"},
            {
                "image": [
                    Part(rows, rows.size // 768, len(rows)) for rows in np.array_split(sample["image"], config.parts)
                ]
            },
        ),
        balance=Balance(assignment="per_phase"),
    )
    sleep = config.training_milliseconds / 1000
    loops = {
        "bare, empty": lambda: _step_seconds(loader, 0.0),
        "balanced, empty": lambda: _step_seconds(balanced, 0.0),
        "bare, training": lambda: _step_seconds(loader, sleep),
        "balanced, training": lambda: _step_seconds(balanced, sleep),
        "by phase, training": lambda: _step_seconds(by_phase, sleep),
    }
    seconds = _in_turn(loops, config.repeats)
    drawn = torch.tensor(sum(sample["image"].nbytes for samples in lists for sample in samples) / len(lists))
    dist.all_reduce(drawn)
    if dist.get_rank() == 0:
        found = {"seconds": seconds, "stats": balanced.stats(), "bytes_drawn": drawn.item()}
        found |= {"stats_by_phase": by_phase.stats(), "cores": len(os.sched_getaffinity(0))}
        Path(result).write_text(json.dumps(found))
    balanced.close()
    by_phase.close()
    leave()


def _drawn(config: PostBalanceBench, rank: int) -> list[list[dict[str, Any]]]:
    """Some steps of a rank: text, its tokens, and pixels of shape (height, 256, 3)."""
    random = np.random.default_rng([config.seed, rank])

    def sample(index: int) -> dict[str, Any]:
        height = max(1, round(config.image_bytes * random.lognormal() / 768))
        num_words = max(1, round(config.words * random.lognormal()))
        return {
            "key": f"{rank}-{index}",
            "text": " ".join(["balanced"] * num_words),
            "tokens": random.integers(0, 32_000, 2 * num_words),
            "image": random.integers(0, 256, (height, 256, 3), np.uint8),
        }

    return [[sample(index) for index in range(config.samples_per_rank)] for _ in range(8)]


def _step_seconds(loader: Iterable[Any], training_seconds: float) -> float:
    """Seconds of a step of this rank."""
    started, timed = time.perf_counter(), -_UNTIMED_STEPS
    for _ in loader:
        if timed == 0:
            started = time.perf_counter()
        timed += 1
        if training_seconds:
            time.sleep(training_seconds)
    return (time.perf_counter() - started) / timed


def _in_turn(loops: dict[str, Callable[[], float]], repeats: int) -> dict[str, tuple[float, ...]]:
    """Seconds of each repeat on its slowest rank; every round has another order, so that none gains by it."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    shuffled = np.random.default_rng(0)  # the same on every rank
    gc.collect()
    gc.freeze()
    for turn in range(1 + repeats):
        for name in shuffled.permutation(list(loops)).tolist():
            dist.barrier()
            slowest = torch.tensor(loops[name](), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:
                seconds[name].append(slowest.item())
    return {name: tuple(values) for name, values in seconds.items()}


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        run_rank(*sys.argv[1:])
    else:
        run_command("benchmarks.post_balance", PostBalanceBench, run)
