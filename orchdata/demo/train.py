"""One rank of the demo's training, run by torchrun: the same steps unbalanced and balanced, in turn, in one run.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m orchdata.demo.train TASK.json RESULT.json

Two *lanes* hold a loader, a model and an optimizer each; the models start equal, and both lanes see the same global
batches. Blocks of steps alternate between them, so that whatever else the machine does falls on both. Every step starts
at a barrier, with its batch at hand. A rank is computing until its last gradient is ready; what it then waits for the
slowest rank is lost.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import orchdata as od
from orchdata.demo.launch import end_with_parent, leave
from orchdata.demo.model import MultimodalLM
from orchdata.demo.setup import make_cost, make_model_config, make_recipe

# What each lane asks of the loader. Ranks meet only when gradients are reduced, at the end of the step: "sum".
LANES = {"unbalanced": od.Balance(scope="none"), "balanced": od.Balance(scope="global", objective="sum")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What to train on, and how much: `steps` measured steps of each lane, after `warmup_steps` others."""

    shards: tuple[str, ...]
    steps: int
    block_steps: int
    warmup_steps: int
    global_batch_size: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one rank saw of one step.

    Attributes:
        load_seconds: until its batch was at hand.
        compute_seconds, cpu_seconds: from the barrier until its last gradient was ready, on the clock and of CPU time.
        step_seconds: from the barrier until its weights were updated.
        loss_sum, llm_tokens, samples: of its own batch.
        loss_tokens: planned for all ranks.
        imbalance: phase -> max/mean of the planned cost over ranks, the same on every rank; `step` is all phases.
    """

    load_seconds: float
    compute_seconds: float
    cpu_seconds: float
    step_seconds: float
    loss_sum: float
    loss_tokens: int
    llm_tokens: int
    samples: int
    imbalance: dict[str, float]


class GradientClock:
    """Knows when this rank's last gradient was ready: from then on it only waits and communicates."""

    def __init__(self, model: nn.Module) -> None:
        self.ready_at = self.cpu_ready_at = 0.0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._tick)

    def _tick(self, parameter: Tensor) -> None:
        self.ready_at, self.cpu_ready_at = time.perf_counter(), time.process_time()


@dataclass(slots=True)
class Lane:
    """One way of sharing out the work, with its own model."""

    batches: Iterator[od.Batch]
    model: DistributedDataParallel
    clock: GradientClock
    optimizer: torch.optim.Optimizer
    records: list[StepRecord] = field(default_factory=list)

    def step(self) -> None:
        """Load a batch, meet the other ranks, train on it, and note what that took."""
        start = time.perf_counter()
        batch = next(self.batches)
        load_seconds = time.perf_counter() - start

        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        out = self.model(**batch.model_inputs())
        (out.loss_sum * batch.loss_scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        stop = time.perf_counter()

        self.records.append(
            StepRecord(
                load_seconds=load_seconds,
                compute_seconds=self.clock.ready_at - start,
                cpu_seconds=self.clock.cpu_ready_at - cpu_start,
                step_seconds=stop - start,
                loss_sum=out.loss_sum.item(),
                loss_tokens=batch.global_loss_tokens,
                llm_tokens=batch.llm.input_ids.shape[-1],
                samples=len(batch.keys),
                imbalance=_imbalance(batch.plan),
            )
        )


def _imbalance(plan: od.Plan) -> dict[str, float]:
    """max/mean over ranks of each phase's cost, and of all phases together."""
    loads = np.sum([plan.loads(phase) for phase in plan.phases], axis=0)
    return {phase: plan.imbalance(phase) for phase in plan.phases} | {"step": float(loads.max() / loads.mean())}


def _forever(loader: od.DataLoader) -> Iterator[od.Batch]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def make_lane(task: Task, balance: od.Balance) -> Lane:
    """A loader that reads when asked (its threads would take time from the ranks), and a model of seeded weights."""
    recipe = make_recipe()
    config = make_model_config(recipe)
    loader = od.DataLoader(
        od.ShardDataset(task.shards, recipe=recipe),
        global_batch_size=task.global_batch_size,
        shuffle=True,
        seed=task.seed,
        drop_last=True,
        cost=make_cost(config),
        balance=balance,
        num_threads=0,
    )
    torch.manual_seed(task.seed)
    model = DistributedDataParallel(MultimodalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Lane(_forever(loader), model, GradientClock(model), optimizer)


def train(task: Task) -> dict[str, Any]:
    """Run all lanes; returns each lane's records by rank, on rank 0 (an empty dict elsewhere)."""
    lanes = {name: make_lane(task, balance) for name, balance in LANES.items()}
    total = task.warmup_steps + task.steps
    done = 0
    while done < total:
        block = min(task.warmup_steps if done < task.warmup_steps else task.block_steps, total - done)
        for lane in lanes.values():
            for _ in range(block):
                lane.step()
        done += block
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"done": done, "total": total}) + "\n")
            sys.stdout.flush()

    gathered: dict[str, Any] = {}
    for name, lane in lanes.items():
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, [asdict(record) for record in lane.records])
        gathered[name] = by_rank
    parameters = sum(parameter.numel() for parameter in next(iter(lanes.values())).model.parameters())
    return {"parameters": parameters, "lanes": gathered} if dist.get_rank() == 0 else {}


def _take_one_core() -> None:
    """One thread, and where there are enough cores one core, for each rank."""
    torch.set_num_threads(1)
    ranks, local_rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= ranks:
            os.sched_setaffinity(0, {cores[local_rank]})


def main(task_path: str, result_path: str) -> None:
    """Entry point of each rank."""
    end_with_parent()
    _take_one_core()
    content = json.loads(Path(task_path).read_text())
    task = Task(**content | {"shards": tuple(content["shards"])})
    dist.init_process_group("gloo")
    result = train(task)
    if result:
        Path(result_path).write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
