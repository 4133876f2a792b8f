"""`python -m benchmarks.start_one INDEX RANKS BATCH_SIZE`: start one loader in this process, print what it took."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

_TURNS = 7


def anonymous_bytes() -> int:
    """Anonymous memory of this process (RssAnon): what it has allocated, mapped files left out."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon: this is measured on Linux only")


def main(path: Path, num_ranks: int, batch_size: int) -> dict[str, float]:
    """Seconds to open the index, which is verified if it is new to this machine; seconds from calling DataLoader to its
    first plan, and anonymous memory then, in bytes; CPU seconds of a plan; and CPU seconds to load a state and plan the
    step it points at, at the start of an epoch and after nine tenths of it. Of CPU seconds, the least of some.
    """
    from benchmarks.indexed_shards import IndexedShards
    from orchdata.bench import OMNI_COST
    from orchdata.dataloader import DataLoader
    from orchdata.loaders.index.index import Index
    from orchdata.loop.loop import Position
    from orchdata.loop.state import State
    from orchdata.order.steps import StepTask
    from orchdata.planning.plan import make_plan

    opened = time.perf_counter()
    Index(path)
    opened = time.perf_counter() - opened
    started, cpu_started, before = time.perf_counter(), time.process_time(), anonymous_bytes()
    loader = DataLoader(
        IndexedShards(path), batch_size=batch_size, shuffle=True, drop_last=True, cost=OMNI_COST, dp=(0, num_ranks)
    )
    spec = loader._runtime.prepared.spec.plan
    make_plan(spec, StepTask(0, 0))
    started_in = {
        "opened_seconds": opened,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "before_bytes": before,
        "anonymous_bytes": anonymous_bytes(),
    }
    state = State.from_json(loader.state_dict())

    def plan(step: int, *, resume: bool = False) -> float:
        began = time.thread_time()
        if resume:
            location = loader._runtime.prepared.steps.location(0, step, None)
            loader.load_state_dict(replace(state, position=Position(0, step), location=location).to_json())
        make_plan(spec, StepTask(0, step))
        return time.thread_time() - began

    started_in["plan_seconds"] = min(plan(step % spec.num_steps) for step in range(1, _TURNS + 1))
    places = {"first_seconds": 0, "late_seconds": spec.num_steps * 9 // 10}
    turns = [{name: plan(step, resume=True) for name, step in places.items()} for _ in range(_TURNS)]
    return started_in | {name: min(turn[name] for turn in turns) for name in places}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
