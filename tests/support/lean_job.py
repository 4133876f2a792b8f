"""Run by test_starting: whether the process that iterates has numba, with worker processes and then with threads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shard_factory import RECIPE

import orchdata as od


def main(folder: Path) -> None:
    found = {}
    for name, options in (("processes", {"num_workers": 1}), ("threads", {"num_threads": 1})):
        dataset = od.ShardDataset([str(path) for path in sorted(folder.glob("*.tar"))], recipe=RECIPE)
        num_samples = sum(len(batch.sample_ids) for batch in od.DataLoader(dataset, 2, dp=(0, 1), **options))
        found[name] = {"samples": num_samples, "numba": "numba" in sys.modules}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
