"""Run by test_per_phase_job: encoders balanced apart; what each rank's batches held and lost."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from digests import digest
from mesh_job import Found
from padded_model import PaddedLM
from rank_jobs import run_rank
from shard_factory import RECIPE
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import orchdata as od
from examples.model import ModelConfig, MultimodalLM, Sizes, fit_to_recipe, make_cost
from orchdata.ranks.parallel import DataParallel

PATIENCE = timedelta(seconds=30)
GLOBAL_BATCH_SIZE = 6
SMALL = Sizes(hidden=16, layers=1, ffn=32, num_heads=2)
CONFIG = fit_to_recipe(ModelConfig(llm=SMALL, image=SMALL, audio=SMALL), RECIPE)
POSITION_ROWS = {"image": 1, "audio": CONFIG.conv_stride}  # patches or frames for each position of an encoder
LAYOUTS = {
    "packed": od.Packed(),
    "mrope": od.Packed(positions="mrope", multiple_of=8),
    "padded": od.Padded(),
    "padded encoders": od.Padded(encoders="padded"),
    "zero": od.Packed(empty="zero"),
}
CAP = 190  # LLM positions of a microbatch
IMAGE_CAP = 250  # below the patches of the largest sample, above half of them

Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One way of balancing, and what it is balanced on."""

    data: str = "good"
    layout: str = "packed"
    balance: Options = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    by_hand: bool = False  # dp=(rank, size), labels of failed parts not yet masked

    @property
    def caps(self) -> Options:
        return od.Balance(**self.balance).caps


WORKERS: Options = {"num_workers": 2, "num_threads": 2, "multiprocessing_context": "fork"}
CASES = {
    "global": Case(),
    "sum": Case(balance={"objective": "sum", "max_tokens": CAP}),
    "llm cap": Case(balance={"max_tokens": CAP}),
    "image cap": Case(balance={"max_tokens": {"llm": CAP, "image": IMAGE_CAP}, "oversize": "own"}),
    "own": Case(balance={"max_tokens": 70, "oversize": "own"}),
    "own, both caps": Case(balance={"max_tokens": {"image": 80, "audio": 100}, "oversize": "own"}),
    "none": Case(balance={"scope": "none"}),
    "none, image cap": Case(balance={"scope": "none", "max_tokens": {"image": IMAGE_CAP}, "oversize": "own"}),
    "grouped": Case(balance={"scope": "grouped", "group_size": 2}),
    "grouped, caps": Case(
        balance={"scope": "grouped", "group_size": 2, "max_tokens": {"llm": CAP, "image": 150}, "oversize": "own"}
    ),
    "grid": Case(balance={"scope": "grid", "group_size": 2}),
    "1f1b": Case(balance={"max_tokens": CAP, "order": "1f1b", "num_stages": 2}),
    "tokens": Case(options={"cost": None}),
    "shuffled": Case(options={"shuffle": True, "seed": 5}),
    "padded": Case(layout="padded"),
    "padded, llm cap": Case(layout="padded", balance={"max_tokens": 2 * CAP}),
    "padded encoders": Case(layout="padded encoders"),
    "mrope": Case(layout="mrope", balance={"max_tokens": CAP}),
    "zero": Case(layout="zero"),
    "intact": Case("intact"),
    "broken": Case("broken"),
    "intact, llm cap": Case("intact", balance={"max_tokens": 120}),
    "broken, llm cap": Case("broken", balance={"max_tokens": 120}),
    "broken, none": Case("broken", balance={"scope": "none"}),
    "broken, mrope": Case("broken", layout="mrope"),
    "broken, padded": Case("broken", layout="padded"),
    "broken, padded encoders": Case("broken", layout="padded encoders"),
    "broken, by hand": Case("broken", by_hand=True),
    "broken, workers": Case("broken", options=WORKERS),
    "llm cap, workers": Case(balance={"max_tokens": CAP}, options=WORKERS),
    "broken, grouped": Case("broken", balance={"scope": "grouped", "group_size": 2}),
}


@dataclass(frozen=True)
class Suite:
    """What one job runs: cases, and methods of `Job`."""

    num_ranks: int
    cases: tuple[str, ...]
    scenarios: tuple[str, ...] = ()
    slow: bool = False


TWO = (
    "global",
    "llm cap",
    "image cap",
    "own",
    "none",
    "padded",
    "mrope",
    "intact",
    "broken",
    "broken, padded",
    "broken, workers",
)
THREE = ("global", "image cap", "intact", "broken", "intact, llm cap", "broken, llm cap")
FOUR = ("global", "grouped", "grid", "intact", "broken")
SUITES = {
    "2 ranks": Suite(2, (*TWO, "broken, by hand"), ("trained", "refused", "resumed")),
    "3 ranks": Suite(3, THREE, ("trained", "refused", "budget", "subgroup"), slow=True),
    "4 ranks": Suite(4, FOUR, ("mesh",)),
}
SUITES |= {
    f"{size} ranks, more": Suite(
        size,
        tuple(name for name, case in CASES.items() if size % case.balance.get("group_size", 1) == 0),
        ("trained", "refused", "resumed"),
        slow=True,
    )
    for size in (2, 3, 4)
}


class Job:
    """The loaders and models of one rank."""

    def __init__(self, shards: Path) -> None:
        self.shards = shards
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def loader(self, case: Case, dp: Any = None, **options: Any) -> od.DataLoader:
        balance = od.Balance(assignment="per_phase", **case.balance)
        return self.raw_loader(case, **{"balance": balance, "dp": dp} | case.options | options)

    def raw_loader(self, case: Case, **options: Any) -> od.DataLoader:
        return od.DataLoader(
            od.ShardDataset(self.shards / f"{case.data}.tar", recipe=RECIPE),
            **{
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "collate_fn": LAYOUTS[case.layout],
                "cost": make_cost(CONFIG),
                "num_threads": 0,
                "on_error": od.ErrorPolicy("skip", max_failures=None),
            }
            | options,
        )

    def reference_loader(self, case: Case) -> od.DataLoader:
        order = {name: value for name, value in case.options.items() if name in ("shuffle", "seed")}
        return self.raw_loader(case, balance="none", dp=(0, 1), **order)

    def references(self, cases: Iterable[Case]) -> dict[str, list[float]]:
        """By `reference_name`: the summed loss of each step, of one process that has all samples."""
        wanted = {reference_name(case): case for case in cases if case.layout != "zero"}
        mine = list(wanted.items())[self.rank :: self.num_ranks]
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, {name: self.losses_alone(case) for name, case in mine})
        return {name: losses for each in found for name, losses in each.items()}

    def losses_alone(self, case: Case) -> list[float]:
        model = make_model(case)
        with torch.no_grad():
            return [model(**batch.model_inputs()).loss_sum.item() for batch in self.reference_loader(case)]

    def case(self, case: Case, dp: Any = None, group: Any = None) -> Found:
        """An epoch without training: what each batch held, the failures listed here, and those gathered."""
        model = make_model(case, group)
        loader = self.loader(case, (self.rank, self.num_ranks) if case.by_hand else dp)
        batches = []
        for batch in loader:
            before = labels_by_key(batch)
            if case.by_hand:
                batch = batch.mask_failed(group)
            seen = describe(batch, group) | {"labels_before": before}
            if case.layout != "zero":
                with torch.no_grad():
                    seen["loss"] = model(**batch.model_inputs()).loss_sum.item()
            batches.append(seen)
        return {
            "batches": batches,
            "num_steps": len(loader),
            "count": loader.stats()["failures"]["count"],
            "failures": [[row["key"], row["field"]] for row in loader.stats()["failures"]["samples"]],
            "gathered": [[failure.key, failure.field] for failure in loader.gather_failures(group)],
        }

    def trained(self) -> Found:
        """SGD under DDP, and by one process: how far the losses of steps and the weights are apart."""
        case = Case("broken", balance={"max_tokens": CAP})
        model = make_model(case)
        losses = train(DistributedDataParallel(model), self.loader(case))
        alone = make_model(case)
        losses_alone = train(alone, self.reference_loader(case))
        every: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(every, losses)
        return {
            "losses": np.sum(every, axis=0).tolist(),
            "losses_alone": losses_alone,
            "weights": digest(list(model.parameters())),
            "distance": max(
                float((mine - other).norm() / other.norm())
                for mine, other in zip(model.parameters(), alone.parameters(), strict=True)
            ),
        }

    def refused(self) -> Found:
        """on_error="raise": each rank's error, None where it encoded nothing broken; no rank exchanges anything."""
        loader = self.loader(Case("broken"), on_error="raise")
        delivered = 0
        try:
            for _ in loader:
                delivered += 1
        except od.DataError as error:
            return {"delivered": delivered, "error": [error.shard, error.key, error.field], "message": str(error)}
        return {"delivered": delivered, "error": None, "message": ""}

    def budget(self) -> Found:
        """One rank bears no failure: each rank's error, and its descriptors before and after other loaders."""
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            list(self.loader(Case("broken")))
        gc.collect()
        found: Found = {"left": len(os.listdir("/proc/self/fd")) - before}
        allowed = 0 if self.rank == self.num_ranks - 1 else None
        try:
            list(self.loader(Case("broken"), on_error=od.ErrorPolicy("skip", max_failures=allowed)))
        except (RuntimeError, od.TooManyFailures) as error:
            return found | {"error": type(error).__name__, "message": str(error)}
        return found

    def resumed(self) -> Found:
        """Left in the middle of the epoch and continued by another loader."""
        case = Case("broken", balance={"max_tokens": 120}, options={"shuffle": True, "seed": 4})
        whole = [[digest(batch) for batch in step] for step in self.loader(case, num_threads=2).steps()]
        begun = self.loader(case, num_threads=2)
        steps = [[digest(batch) for batch in step] for step in islice(begun.steps(), 2)]
        state = json.loads(json.dumps(begun.state_dict()))
        rest = self.loader(case, num_threads=2)
        rest.load_state_dict(state)
        return {
            "whole": whole,
            "resumed": steps + [[digest(batch) for batch in step] for step in rest.steps()],
            "state": state,
        }

    def subgroup(self) -> Found:
        """Ranks 0 and 2 of three: the other one takes no part, and is in more groups."""
        dist.new_group([0, 1], timeout=PATIENCE)
        group = dist.new_group([0, 2], timeout=PATIENCE)
        return {} if self.rank == 1 else self.case(Case("broken"), dp=group, group=group)

    def mesh(self) -> Found:
        """2 x 2: data-parallel ranks exchange features among themselves, peers have the same batches; then all four."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found: Found = {"place": mesh.get_coordinate()}
        for replicate in ("broadcast", "read"):
            dp = DataParallel(mesh, dims=("dp",), replicate=replicate, check_plan_every=2)
            found[replicate] = self.case(Case("broken"), dp=dp, group=mesh.get_group("dp"))
            found[replicate]["digests"] = [digest(batch) for batch in self.loader(Case("broken"), dp)]
        sharded = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        return found | {"hsdp": self.case(Case("broken"), dp=DataParallel(sharded))}


def reference_name(case: Case) -> str:
    return json.dumps([case.data, case.layout, case.options.get("shuffle", False)])


def make_model(case: Case, group: Any = None) -> MultimodalLM:
    """In float64; the same parameters for every case."""
    torch.manual_seed(0)
    padded = isinstance(LAYOUTS[case.layout], od.Padded)
    return (PaddedLM if padded else MultimodalLM)(CONFIG, group).double()


def train(model: torch.nn.Module, loader: od.DataLoader) -> list[float]:
    """An epoch of SGD; this rank's summed loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [0.0] * len(loader)
    for batch in loader:
        loss = model(**batch.model_inputs()).loss_sum
        (loss * batch.loss_scale).backward()
        losses[batch.step] += loss.item()
        if batch.is_last_microbatch:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def describe(batch: od.Batch, group: Any) -> Found:
    """What a batch holds; a collective, for each part's number is carried to its sample."""
    return {
        "step": batch.step,
        "microbatch": batch.microbatch,
        "num_microbatches": batch.num_microbatches,
        "global_loss_tokens": batch.global_loss_tokens,
        "loss_tokens": batch.loss_tokens,
        "keys": [key for _, key in batch.sample_ids],
        "labels": labels_by_key(batch),
        "llm_positions": batch.llm.input_ids.numel() if batch.sample_ids else 0,
        **{name: carried(batch, name, group) for name in POSITION_ROWS},
    }


def labels_by_key(batch: od.Batch) -> dict[str, int]:
    """Labels with loss, of each sample."""
    llm = batch.llm
    starts = llm.cu_seqlens.tolist()
    rows = llm.labels if llm.labels.dim() == 2 else [llm.labels[a:b] for a, b in pairwise(starts)]
    return {key: int((row != -100).sum()) for (_, key), row in zip(batch.sample_ids, rows, strict=False)}


def carried(batch: od.Batch, name: str, group: Any) -> Found:
    """One modality: what this rank encodes, for whom, and the parts that arrive: [key, number, 0 where it failed]."""
    held, route = getattr(batch, name), batch.route(name)
    parts = batch.plan.parts[name]
    mine = batch.plan.encoded(name, route.rank, number_of(batch))
    numbers = torch.from_numpy(np.repeat(parts.part[mine] + 1, parts.tokens[mine]))
    features = torch.stack([numbers, torch.arange(len(numbers)) + 1], dim=1).double()
    arrived = od.exchange(features, route, group=group, requires_grad=False)
    lengths = od.exchange(torch.from_numpy(parts.tokens[mine]), route.parts, group=group, requires_grad=False).tolist()
    owners = getattr(batch.llm, f"{name}_owners").tolist()
    assert len(arrived) == len(getattr(batch.llm, f"{name}_positions")) == sum(lengths)
    return {
        "valid": held.valid.tolist(),
        "positions": int(held.cu_seqlens.diff()[: len(held.valid)].sum()) // POSITION_ROWS[name],
        "samples": len(set(parts.sample[mine].tolist())),
        "rows_away": route.num_rows_in - int(route.send_rows[route.rank]),
        "peers": np.flatnonzero(route.send_rows).tolist(),
        "arrived": [
            [batch.sample_ids[owner][1], part_of(rows)]
            for owner, rows in zip(owners, arrived.split(lengths), strict=True)
        ],
    }


def number_of(batch: od.Batch) -> int:
    """The microbatch's number in the plan, which a pipeline's order puts elsewhere."""
    return int(batch.route("image").label.rpartition(" ")[2])


def part_of(rows: Tensor) -> int:
    """The number of a part whose rows have arrived, one after another, 0 where all are zeros; -1 for anything else."""
    number = int(rows[0, 0])
    steps = rows[:, 1].diff() == (1 if number else 0)
    whole = bool((rows[:, 0] == number).all() and steps.all() and (number or not rows.any()))
    return number if whole else -1


def main(suite: str, shards: str) -> Found:
    job, chosen = Job(Path(shards)), SUITES[suite]
    tasks: dict[str, Callable[[], Any]] = {
        "references": lambda: job.references(CASES[name] for name in chosen.cases),
        **{name: lambda name=name: job.case(CASES[name]) for name in chosen.cases},  # type: ignore[misc]
        **{name: getattr(job, name.replace(" ", "_")) for name in chosen.scenarios},
    }
    return {name: attempt(task) for name, task in tasks.items()}


def attempt(task: Callable[[], Any]) -> Any:
    """What it gives, or how it failed; where only this rank fails, the others run into the group's timeout."""
    try:
        return task()
    except Exception:
        return {"failed": traceback.format_exc()}


if __name__ == "__main__":
    run_rank(main, timeout=PATIENCE)
