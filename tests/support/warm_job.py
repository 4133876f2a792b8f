"""Run by test_warm: in fresh processes, which kernels a step loads after `warm`, and which have several signatures."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from numba.core.registry import CPUDispatcher

from orchdata.balancers import CostModel, PhaseCost
from orchdata.bench import synthetic_index
from orchdata.building.collate import MapContent
from orchdata.building.step import BuildSpec
from orchdata.dataset.indexed import IndexCosts
from orchdata.engines.warm import warm
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance, Teams
from orchdata.planning.plan import PlanSpec, make_plan

BALANCES = {
    "joint": Balance(),
    "microbatches": Balance(max_tokens=8192, oversize="own"),
    "per phase": Balance(assignment="per_phase"),
    "per phase, caps": Balance(assignment="per_phase", max_tokens={"llm": 8192, "image": 16384}, oversize="own"),
    "grid": Balance(scope="grid", group_size=8),
    "grid per phase": Balance(scope="grid", group_size=8, assignment="per_phase", max_tokens=8192, oversize="own"),
    "grouped": Balance(scope="grouped", group_size=8, max_tokens=8192, oversize="own"),
    "sum": Balance(objective="sum", max_tokens=8192, oversize="own"),
    "pipeline": Balance(order="1f1b", num_stages=4, max_tokens=8192, oversize="own"),
    "equal count": Balance(equal_count=True, max_tokens=8192, oversize="own"),
    "limited count": Balance(max_samples=20, assignment="per_phase"),
    "padded": Balance(max_tokens=8192, oversize="own"),
    "accumulated": Balance(),
    "teams": Balance(teams=Teams(largest=8, cut="trainer", gain=0.0)),
    "teams, caps": Balance(max_tokens=2048, oversize="own", teams=Teams(largest=8, cut="trainer")),
    "teams, sum": Balance(max_tokens=2048, oversize="own", objective="sum", teams=Teams(largest=8, cut="trainer")),
}


def loaded() -> dict[str, int]:
    """Signatures of each kernel that this process has loaded."""
    kernels = [held for held in gc.get_objects() if type(held) is CPUDispatcher]
    return {
        f"{kernel.py_func.__module__}.{kernel.py_func.__name__}": len(kernel.overloads)
        for kernel in kernels
        if kernel.py_func.__module__.startswith("orchdata.") and kernel.overloads
    }


def found(path: Path, name: str) -> dict[str, object]:
    model = CostModel(image=PhaseCost(2.0), audio=PhaseCost(1.0), llm=PhaseCost(1.0, 1e-4))
    costs = IndexCosts(index := synthetic_index(path, 4_000, 0), model, rectangular=name == "padded")
    plan = PlanSpec(
        costs=costs,
        order=Order(index.num_samples, shuffle=Shuffle(), seed=0, excluded=index.bad_rows()),
        batches=GlobalBatches(size=1_024, drop_last=True),
        balance=BALANCES[name],
        num_ranks=64,
        ranks_per_node=8 if BALANCES[name].assignment == "per_phase" else None,
        accumulate=4 if name == "accumulated" else 1,
    )
    content = MapContent(dataset=None, num_rows=0, collate_fn=None, batched=True, skip_errors=False)
    warm(BuildSpec(plan=plan, rank=0, content=content))
    before = loaded()
    shared = 0
    for step in range(plan.num_steps):
        made = make_plan(plan, StepTask(0, step))
        for phase in made.phases:
            made.loads(phase)
            made.lower_bound(phase)
        shared += int((made.team_size > 1).sum())
    after = loaded()
    return {
        "loaded": sorted(kernel for kernel in after if after[kernel] != before.get(kernel)),
        # With teams some steps have pinned slices, and others none.
        "several": sorted(kernel for kernel in after if after[kernel] > 1 + name.startswith("teams")),
        "shared": shared,
        "kernels": len(after),
    }


def main(folder: Path, names: list[str]) -> None:
    """Each in a fork of its own, whose parent has imported all and loaded no kernel but one."""
    for number, name in enumerate(names):
        child = os.fork()
        if not child:
            report = found(folder / f"{number}.index", name)
            sys.stdout.write(json.dumps({"balance": name} | report) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
