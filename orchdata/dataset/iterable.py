"""A torch IterableDataset, prepared: one rank iterates it, by torch's own loader."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, cast

from torch.utils.data import default_collate, default_convert

from orchdata.dataset.options import LoaderOptions, PreparedDataset, refuse_parts
from orchdata.engines.iterables import IterableContent
from orchdata.order.sampler import SamplerOrder
from orchdata.order.steps import StreamSteps
from orchdata.planning.costs import EqualCosts


def prepare_iterable(dataset: Any, options: LoaderOptions) -> PreparedDataset:
    """Prepare an IterableDataset, on one rank. Raises as DataLoader documents."""
    name = type(dataset).__name__
    if options.rank.size > 1:
        raise ValueError(
            f"{name} is an IterableDataset, and this loader's samples are shared by {options.rank.size} ranks: an "
            "IterableDataset cannot be split over ranks automatically. For shards, use od.ShardDataset, which is "
            "balanced and resumable. For another data set that splits itself by rank, create a loader for this rank "
            "only, with dp=(0, 1); od.post_balance(loader) balances what each rank's own loader yields"
        )
    if options.cost is not None:
        raise ValueError("cost balances samples over ranks; an IterableDataset is read by one: leave it out")
    if options.policy.action == "skip":
        raise ValueError(
            "on_error='skip' continues with the next sample, and an IterableDataset that raised has none: skip in its "
            "__iter__"
        )
    refuse_parts(options.balance, "the items of an IterableDataset are whole")
    batches = options.sample_batches
    content = IterableContent(
        dataset=dataset,
        batch_size=batches.size if options.batched else None,
        drop_last=batches.drop_last,
        collate_fn=cast("Any", options.collate_fn),
    )
    order = SamplerOrder(sampler=name, num_samples=sys.maxsize)
    return PreparedDataset(
        collate_fn=default_collate if options.batched else default_convert,
        spec=options.build_spec(EqualCosts(), order, batches, content),
        fingerprint={"dataset": {"type": name}, **batches.describe()},
        failures=[],
        num_indexed=0,
        torch_steps=StreamSteps(length=partial(len, dataset), batches=batches),
        is_torchs=True,
    )
