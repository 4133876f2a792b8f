"""One rank of training a small model, run by torchrun: the same steps unbalanced and balanced, in turn, in one run.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.train.lanes TASK.json RESULT.json

Each *lane* has a loader, a model and an optimizer; the models start equal, and all lanes see the same global batches.
Blocks of steps alternate between them, so that other work of the machine slows all lanes. Every step starts at a
barrier, with its batch at hand. A rank is computing until its last gradient is ready; what it then waits for the
slowest rank is lost. `benchmarks.train.job` runs other lanes in the same way.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import orchdata as od
from benchmarks.launch import end_with_parent, leave
from examples.model import ModelConfig, MultimodalLM, Sizes, fit_to_recipe, make_cost
from orchdata.loaders.modalities.audio import AudioPreprocessor
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.recipe import Recipe
from orchdata.planning.route import Route

Loads: TypeAlias = dict[str, NDArray[np.int64]]  # phase -> cost on each rank, (num_ranks,)


# What each lane asks of the loader. The balanced one takes the default objective, which evens each phase. These ranks
# meet only when gradients are reduced, so "sum" would make the step about one percent shorter, and leave phases uneven.
LANES = {"unbalanced": od.Balance(scope="none"), "balanced": od.Balance(scope="global")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What to train on, and how much: `steps` measured steps of each lane, after `warmup_steps` others.

    `repeats` trainings on each batch, the lanes in turn; batches of `block_steps` steps are in memory at a time.
    """

    shards: tuple[str, ...]
    steps: int
    block_steps: int
    warmup_steps: int
    global_batch_size: int
    seed: int
    repeats: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one rank saw of one step.

    Attributes:
        load_seconds: until its batch was at hand.
        compute_seconds, cpu_seconds: from the barrier until its last gradient was ready, on the clock and of CPU time.
        step_seconds: from the barrier until its weights were updated.
        loss_sum, llm_tokens, samples: of its own batch.
        loss_tokens: planned for all ranks.
        loads: phase -> planned cost on each rank, the same on every rank.
        imbalance: phase -> max/mean of these; `step` is all phases.
    """

    load_seconds: float
    compute_seconds: float
    cpu_seconds: float
    step_seconds: float
    loss_sum: float
    loss_tokens: int
    llm_tokens: int
    samples: int
    loads: dict[str, list[int]]
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


def make_recipe() -> Recipe:
    """Images of 4 to 256 tokens (at most 448 x 448 pixels), audio at 25 tokens a second, text as UTF-8 bytes."""
    return Recipe(
        image=ImagePreprocessor(patch_size=14, merge=2, min_tokens=4, max_tokens=256, dtype="float32"),
        audio=AudioPreprocessor(num_mels=80),
    )


def make_model_config(recipe: Recipe) -> ModelConfig:
    """About a million parameters, fitting the recipe: what one CPU core trains at a few steps a second."""
    config = ModelConfig(
        llm=Sizes(hidden=128, layers=3, ffn=512),
        image=Sizes(hidden=64, layers=3, ffn=256),
        audio=Sizes(hidden=64, layers=3, ffn=256),
    )
    return fit_to_recipe(config, recipe)


def plan_loads(plan: od.Plan) -> Loads:
    """Loads by the cost model that the plan was made with."""
    return {phase: plan.loads(phase) for phase in plan.phases}


@dataclass(slots=True)
class Lane:
    """One way of sharing out the work, with its own model.

    Attributes:
        weigh: plan -> loads to report.
        records: of each step, one a repeat.
        routes: of each step, the ways of its features to other ranks, if any.
    """

    batches: Iterator[od.Batch]
    model: DistributedDataParallel
    clock: GradientClock
    optimizer: torch.optim.Optimizer
    weigh: Callable[[od.Plan], Loads] = plan_loads
    records: list[list[StepRecord]] = field(default_factory=list)
    routes: list[list[Route]] = field(default_factory=list)

    def load(self) -> tuple[od.Batch, float]:
        """The next batch, and the seconds until it was at hand."""
        start = time.perf_counter()
        batch = next(self.batches)
        seconds = time.perf_counter() - start
        self.records.append([])
        self.routes.append([value for value in batch.model_inputs().values() if isinstance(value, Route)])
        return batch, seconds

    def train(self, step: int, batch: od.Batch, load_seconds: float) -> None:
        """Meet the other ranks, train on a batch, and note what that took."""
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        out = self.model(**batch.model_inputs())
        (out.loss_sum * batch.loss_scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        stop = time.perf_counter()

        loads = self.weigh(batch.plan)
        self.records[step].append(
            StepRecord(
                load_seconds=load_seconds,
                compute_seconds=self.clock.ready_at - start,
                cpu_seconds=self.clock.cpu_ready_at - cpu_start,
                step_seconds=stop - start,
                loss_sum=out.loss_sum.item(),
                loss_tokens=batch.plan.loss_tokens,
                llm_tokens=batch.llm.input_ids.shape[-1],
                samples=len(batch.sample_ids),
                loads={phase: values.tolist() for phase, values in loads.items()},
                imbalance=_imbalance(loads),
            )
        )


def _imbalance(loads: Loads) -> dict[str, float]:
    """max/mean over ranks of each phase's cost, and of all phases together."""
    every = loads | {"step": np.sum(list(loads.values()), axis=0)}
    return {name: float(values.max() / values.mean()) if values.any() else 1.0 for name, values in every.items()}


def _forever(loader: od.DataLoader) -> Iterator[od.Batch]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def make_lane(
    task: Task,
    balance: od.Balance,
    *,
    cost: od.CostModel | None = None,
    weigh: Callable[[od.Plan], Loads] = plan_loads,
) -> Lane:
    """A loader that reads when asked (its threads would take time from the ranks), and a model of seeded weights.

    `cost` is by default what follows from the model's sizes.
    """
    recipe = make_recipe()
    config = make_model_config(recipe)
    loader = od.DataLoader(
        od.ShardDataset(task.shards, recipe=recipe),
        global_batch_size=task.global_batch_size,
        shuffle=True,
        seed=task.seed,
        drop_last=True,
        cost=make_cost(config) if cost is None else cost,
        balance=balance,
        num_threads=0,
    )
    torch.manual_seed(task.seed)
    model = DistributedDataParallel(MultimodalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Lane(_forever(loader), model, GradientClock(model), optimizer, weigh)


def run_in_turn(task: Task, lanes: Mapping[str, Lane]) -> dict[str, Any]:
    """Train all lanes; returns each one's records by rank, step and repeat, on rank 0 (an empty dict elsewhere)."""
    total = task.warmup_steps + task.steps
    done = turn = 0
    while done < total:
        block = min(task.warmup_steps - done if done < task.warmup_steps else task.block_steps, total - done)
        batches = {name: [lane.load() for _ in range(block)] for name, lane in lanes.items()}
        for _ in range(task.repeats):
            # Every second round runs backwards, so that no lane always follows the same other.
            for name, lane in list(lanes.items())[:: -1 if turn % 2 else 1]:
                for step, (batch, load_seconds) in enumerate(batches[name], start=done):
                    lane.train(step, batch, load_seconds)
            turn += 1
        done += block
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"done": done, "total": total}) + "\n")
            sys.stdout.flush()

    gathered: dict[str, Any] = {}
    for name, lane in lanes.items():
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, [[asdict(record) for record in repeats] for repeats in lane.records])
        gathered[name] = by_rank
    return gathered if dist.get_rank() == 0 else {}


def train(task: Task) -> dict[str, Any]:
    """Run both lanes; returns the model's size and each lane's records on rank 0 (an empty dict elsewhere)."""
    lanes = {name: make_lane(task, balance) for name, balance in LANES.items()}
    gathered = run_in_turn(task, lanes)
    parameters = sum(parameter.numel() for parameter in next(iter(lanes.values())).model.parameters())
    return {"parameters": parameters, "lanes": gathered} if gathered else {}


def _take_one_core() -> None:
    """One thread, and where there are enough cores one core, for each rank."""
    torch.set_num_threads(1)
    ranks, local_rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= ranks:
            os.sched_setaffinity(0, {cores[local_rank]})


def run_rank(result_path: str, work: Callable[[], dict[str, Any]]) -> None:
    """What each rank does: take its core, meet the others, work; who gets a result back writes it."""
    end_with_parent()
    _take_one_core()
    dist.init_process_group("gloo")
    result = work()
    if result:
        Path(result_path).write_text(json.dumps(result))
    leave()


def read_task(content: Mapping[str, Any]) -> Task:
    """A task, back from JSON."""
    return Task(**{**content, "shards": tuple(content["shards"])})


def main(task_path: str, result_path: str) -> None:
    """Entry point of each rank."""
    run_rank(result_path, lambda: train(read_task(json.loads(Path(task_path).read_text()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
