"""Any data set that a DataLoader takes -> a PreparedDataset."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from orchdata.dataset.iterable import prepare_iterable
from orchdata.dataset.map_style import check_layout, prepare_map_style
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.options import LoaderOptions, PreparedDataset
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import Quarantine, prepare_shards


def prepare(
    dataset: Any, options: LoaderOptions, *, sampler: Any, batch_sampler: Any, quarantine: Quarantine | None
) -> PreparedDataset:
    """Look at the data set, and leave out what cannot be used. Raises as DataLoader says."""
    if not isinstance(dataset, ShardDataset | Mixture):
        if quarantine is not None:
            raise ValueError("quarantine names samples of shards; leave them out of a map-style data set yourself")
        check_layout(options)
        if isinstance(dataset, IterableDataset):
            return prepare_iterable(dataset, options)
        return prepare_map_style(dataset, options, sampler=sampler, batch_sampler=batch_sampler)
    if sampler is not None or batch_sampler is not None:
        raise ValueError(f"a {type(dataset).__name__} has an order of its own: use shuffle= in place of a sampler")
    return prepare_shards(dataset, options, quarantine)
