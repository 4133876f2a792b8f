"""Run by test_memory: memory after each epoch of a loader."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from shard_factory import RECIPE

import orchdata as od


def tree_bytes(root: int) -> int:
    """Proportional set size of a process and all below it: what they share counts once. Without mapped files, of which
    a process has the less the more others of the machine map them.
    """
    return sum(_pss(process) for process in _tree(root))


def _tree(process: int) -> list[int]:
    found = [process]
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _tree(int(child))
    return found


def _pss(process: int) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    sizes = {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines[1:])}
    return 1024 * (sizes["Pss_Anon"] + sizes["Pss_Shmem"])


def main(folder: Path, epochs: int, options: dict[str, object]) -> list[int]:
    dataset = od.ShardDataset(sorted(map(str, folder.glob("*.tar"))), recipe=RECIPE)
    loader = od.DataLoader(dataset, batch_size=8, shuffle=True, persistent_workers=bool(options), **options)
    found = []
    for _ in range(epochs):
        for batch in loader:
            del batch
        gc.collect()
        found.append(tree_bytes(os.getpid()))
    loader.close()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))))
