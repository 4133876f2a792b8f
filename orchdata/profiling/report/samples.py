"""The samples of a report: some of a data set's usable samples, drawn at random."""

from __future__ import annotations

import numpy as np

from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import unchosen_rows
from orchdata.loaders.index.index import Index
from orchdata.showing.samples import Shown
from orchdata.showing.views import with_pictures


def drawn_views(dataset: ShardDataset | Mixture, index: Index, samples: int, seed: int) -> list[Shown]:
    """Return some usable samples of a data set, drawn at random, in the order of their rows."""
    unused = np.union1d(unchosen_rows(dataset, index), index.bad_rows())
    usable = index.num_rows - len(unused)
    drawn = np.random.default_rng(seed).choice(usable, size=min(samples, usable), replace=False, shuffle=False)
    # The number of a row among the usable ones is its number less the unused rows before it.
    chosen = sorted((drawn + np.searchsorted(unused - np.arange(len(unused)), drawn, side="right")).tolist())
    return with_pictures(dataset, index, chosen)
