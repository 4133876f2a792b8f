"""A program: profile what is given in this process, write its page if one is asked for, print what it took as JSON.

    python -P one.py RANKS PAGE INDEX             # of an index; PAGE is a file to write, or - for none
    python -P one.py RANKS PAGE INDEX INDEX ...   # of a mixture of them

It runs with the package of an older commit too: of this checkout it imports one neighbouring file.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(ranks: Sequence[int], page: Path | None, paths: Sequence[Path]) -> dict[str, float]:
    """CPU seconds, user and system, of profile and page; those of imports and of opening indexes do not count."""
    import orchdata as od
    from orchdata.profiling.profile import profile

    media = od.PhaseCost(1.0, 0.0001)
    cost = od.CostModel(image=media, audio=media, llm=od.PhaseCost(8.0, 0.001))
    data = _opened(paths)
    began = time.process_time()
    made = profile(data, cost=cost, ranks=ranks)
    profiled = time.process_time()
    if page is not None:
        made.write_html(page)
    written = time.process_time()
    return {"profile_seconds": profiled - began, "page_seconds": written - profiled, "imports_seconds": began}


def _opened(paths: Sequence[Path]) -> Any:
    """The index, or a mixture of indexes with weights that differ."""
    import orchdata as od
    from orchdata.loaders.index.index import Index

    if len(paths) == 1:
        return Index(paths[0])
    sys.path.append(str(Path(__file__).parents[1]))
    of_index = import_module("indexed_shards").IndexedShards
    weights = np.random.default_rng(0).uniform(0.2, 1, len(paths)).tolist()
    return od.Mixture(
        {path.stem: od.Source(of_index(path), weight=weight) for path, weight in zip(paths, weights, strict=True)}
    )


if __name__ == "__main__":
    given_ranks, given_page, *given_paths = sys.argv[1:]
    report = main(
        [int(number) for number in given_ranks.split(",")],
        None if given_page == "-" else Path(given_page),
        [Path(path) for path in given_paths],
    )
    sys.stdout.write(json.dumps(report))
