"""`python -m benchmarks.resume.job TASK`: one rank of a run under torchrun, for each kind of data in turn.

samples of this rank --TinyLM under DDP--> loss over all trained tokens of the global batch, keys of its samples
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.launch import leave
from benchmarks.resume.model import TinyLM, trained_tokens
from benchmarks.resume.rank import Outcome, RankJob, Task
from benchmarks.throughput.records import PeersJob
from orchdata.loaders.samples.sample import Sample

LIMIT_SECONDS: Final = 300


class RunError(Exception):
    """A rank failed; says why. Raised on all ranks at once, so that none waits for another."""


def main(task: Task) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # no worker may keep the pipe open that torchrun's parent reads
    watchdog = threading.Timer(LIMIT_SECONDS, _give_up)
    watchdog.daemon = True
    watchdog.start()
    dist.init_process_group("gloo")
    outcomes = {}
    for kind, data in task.data.items():
        os.environ["ORCHDATA_CACHE"] = str(data.cache)
        try:
            outcomes[kind] = train(task, kind, data)
        except RunError as error:
            outcomes[kind] = Outcome(error=str(error))
    if dist.get_rank() == 0:
        task.out.write_bytes(pickle.dumps(outcomes))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error for a worker that was killed
    _end_workers()
    leave()


def _end_workers() -> None:
    """Kill the workers of loaders: one that waits for room in a pipe which no process reads would stay for ever."""
    for worker in multiprocessing.active_children():
        worker.kill()


def _give_up() -> None:
    """End this rank, and so the run: a worker may hang that was forked off a process with threads."""
    sys.stderr.write(f"not done after {LIMIT_SECONDS} s\n")
    _end_workers()
    os._exit(1)


def train(task: Task, kind: str, data: PeersJob) -> Outcome:
    """Train the steps of a run on one kind of data. The process group is that of the ranks.

    Raises:
        RunError: a loader failed on some rank.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    states: list[Any] = []
    if task.saved is not None:
        weights = torch.load(task.saved / kind / "weights.pt")
        model.load_state_dict(weights["model"])
        optimizer.load_state_dict(weights["optimizer"])
        paths = sorted((task.saved / kind).glob("loader-*.pt"))
        states = [torch.load(path, weights_only=False) for path in paths]
    net = DistributedDataParallel(model)

    job = RankJob(data=data, rank=rank, num_ranks=dist.get_world_size(), done=task.first, states=states)
    loader = _agreed(lambda: task.open(job))
    steps = _agreed(lambda: iter(loader.steps()))
    losses, keys = [], []
    for _ in range(task.first, task.last):
        samples = _agreed(lambda: next(steps))
        losses.append(_step(net, optimizer, samples))
        keys.append(_gathered_keys(samples))

    if task.save is not None:
        folder = task.save / kind
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(_agreed(loader.state), folder / f"loader-{rank}.pt")
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "weights.pt")
    return Outcome(losses=tuple(losses), keys=tuple(keys))


def _step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: Sequence[Sample]) -> float:
    """Train on the mean over all trained tokens of the global batch, and return it."""
    tokens = torch.tensor(float(trained_tokens(samples)))
    dist.all_reduce(tokens)
    loss_sum = net(samples)
    # DDP takes the mean over ranks of the gradients.
    (loss_sum * dist.get_world_size() / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_sum.detach().double()
    dist.all_reduce(loss)
    return float(loss / tokens)


def _gathered_keys(samples: Sequence[Sample]) -> tuple[str, ...]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [sample.key for sample in samples])
    return tuple(sorted(key for keys in everyone for key in keys))


def _agreed(call: Callable[[], Any]) -> Any:
    """Call it. If that fails on a rank, raise `RunError` on all of them."""
    result, reason = None, ""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - a loader that refuses is a cell of the table, with any error
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, reason)
    if reason := next(filter(None, everyone), ""):
        raise RunError(reason)
    return result


if __name__ == "__main__":
    main(pickle.loads(Path(sys.argv[1]).read_bytes()))  # noqa: S301 - written by run.py
