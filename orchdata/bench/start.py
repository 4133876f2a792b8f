"""`python -m orchdata.bench.start INDEX RANKS BATCH_SIZE`: start one loader in this process, print what it took."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from orchdata.bench.harness import anonymous_bytes


def main(path: Path, num_ranks: int, batch_size: int) -> dict[str, float]:
    """Seconds from calling DataLoader to its first plan, and anonymous memory then, in bytes."""
    from orchdata.bench.distributions import OMNI_COST
    from orchdata.dataloader import DataLoader
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.index.index import Index
    from orchdata.loaders.recipe import Recipe
    from orchdata.order.steps import StepTask
    from orchdata.planning.make_plan import make_plan

    class IndexedShards(ShardDataset):
        """Shards of which only the index exists."""

        def __init__(self) -> None:
            self.urls, self.recipe = (), Recipe()

        def index(
            self, *, num_ranks: int = 1, rebuild: bool = False, progress: Callable[[int, int], None] | None = None
        ) -> Index:
            return Index(path)

    started, cpu_started, before = time.perf_counter(), time.process_time(), anonymous_bytes()
    loader = DataLoader(
        IndexedShards(), batch_size=batch_size, shuffle=True, drop_last=True, cost=OMNI_COST, dp=(0, num_ranks)
    )
    make_plan(loader._prepared.spec.plan, StepTask(0, 0))
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "before_bytes": before,
        "anonymous_bytes": anonymous_bytes(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
