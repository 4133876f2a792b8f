"""The samples of a report: some of a data set's usable samples, drawn at random."""

from __future__ import annotations

import numpy as np

from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import unchosen_rows
from orchdata.loaders.index.index import Index
from orchdata.showing.pictures import SampleView, views_of
from orchdata.showing.runs import shards_of, source_names


def drawn_views(dataset: ShardDataset | Mixture, index: Index, samples: int, seed: int) -> list[SampleView]:
    """Return some usable samples of a data set, drawn at random, in the order of their rows."""
    unused = np.union1d(unchosen_rows(dataset, index), index.bad_rows())
    generator = np.random.default_rng(seed)
    rows: set[int] = set()
    left = min(samples, index.num_rows - len(unused))
    while len(rows) < left:
        # Draw more than are needed, and leave out those that cannot be used: no array of all rows is made.
        drawn = generator.integers(index.num_rows, size=4 * samples)
        usable = drawn[~np.isin(drawn, unused)].tolist()
        rows.update(usable[: left - len(rows)])
    chosen = sorted(rows)
    return views_of(shards_of(dataset, index), chosen, source_names(dataset, index, chosen))
