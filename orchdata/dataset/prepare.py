"""Any data set that a DataLoader takes -> a PreparedDataset."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from orchdata.dataset.arguments import Arguments
from orchdata.dataset.iterable import prepare_iterable
from orchdata.dataset.map_style import check_layout, prepare_map_style
from orchdata.dataset.options import LoaderOptions, PreparedDataset
from orchdata.dataset.shards import prepare_shards
from orchdata.repeatable import warn_unless_repeatable


def prepare(arguments: Arguments, options: LoaderOptions) -> PreparedDataset:
    """Prepare the data set without unusable samples. Raises as DataLoader documents."""
    dataset, sampler, batch_sampler = arguments.dataset, arguments.sampler, arguments.batch_sampler
    if not arguments.in_shards:
        if arguments.quarantine is not None:
            raise ValueError("quarantine names samples of shards; leave them out of a map-style data set yourself")
        check_layout(options)
        if isinstance(dataset, IterableDataset):
            return prepare_iterable(dataset, options)
        return prepare_map_style(dataset, options, sampler=sampler, batch_sampler=batch_sampler)
    if sampler is not None or batch_sampler is not None:
        raise ValueError(f"a {type(dataset).__name__} has its own order: use shuffle= in place of a sampler")
    prepared = prepare_shards(dataset, options, arguments.quarantine)
    if options.rank.rank == 0:
        warn_unless_repeatable(prepared.spec)
    return prepared
