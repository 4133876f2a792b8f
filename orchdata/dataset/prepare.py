"""Any data set that a DataLoader takes -> a PreparedDataset."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch.utils.data import IterableDataset, default_collate, default_convert

from orchdata.dataset.arguments import Arguments
from orchdata.dataset.item_costs.measure import Workers
from orchdata.dataset.map_style import check_layout, prepare_map_style
from orchdata.dataset.options import LoaderOptions, PreparedDataset, check_peers, check_teams, refuse_parts
from orchdata.engines.torch_workers import IterableContent
from orchdata.notices import warn_once
from orchdata.order.sampler import SamplerOrder
from orchdata.order.steps import StepTask, StreamSteps
from orchdata.planning.costs import EqualCosts
from orchdata.planning.make_plan import make_plan


def prepare(arguments: Arguments, options: LoaderOptions) -> PreparedDataset:
    """Prepare the data set without unusable samples. Raises as DataLoader documents."""
    dataset, sampler, batch_sampler = arguments.dataset, arguments.sampler, arguments.batch_sampler
    check_peers(options.balance, options.rank)
    check_teams(options.balance, options.collate_fn, arguments.in_shards, arguments.dp, options.accumulate)
    if not arguments.in_shards:
        if arguments.quarantine is not None:
            raise ValueError("quarantine names samples of shards; leave them out of a map-style data set yourself")
        if options.policy.blank:
            raise ValueError("ErrorPolicy.blank names samples of shards; leave them out of other data yourself")
        check_layout(options)
        if isinstance(dataset, IterableDataset):
            return prepare_iterable(dataset, options)
        workers = Workers(
            count=_cost_workers(arguments),
            context=arguments.multiprocessing_context,
            init_fn=arguments.worker_init_fn,
            timeout=arguments.timeout,
        )
        return prepare_map_style(
            dataset,
            options,
            sampler=sampler,
            batch_sampler=batch_sampler,
            workers=workers,
            cost_id=arguments.cost_id,
        )
    if sampler is not None or batch_sampler is not None:
        raise ValueError(f"a {type(dataset).__name__} has its own order: use shuffle= in place of a sampler")
    _check_collate(options.collate_fn)
    prepared: PreparedDataset = dataset.prepare(options, arguments.quarantine)
    plan = prepared.spec.plan
    if plan.accumulate > 1 and plan.balance.caps and plan.num_steps:
        make_plan(plan, StepTask(0, 0))  # It raises if caps need more micro-steps.
    _advise_costs(options, plan.costs.phases)
    return prepared


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
    )


def _check_collate(collate_fn: object) -> None:
    """Raise TypeError for torch's own functions, which stack items of one size."""
    called = collate_fn.func if isinstance(collate_fn, partial) else collate_fn
    if called is default_collate or called is default_convert:
        raise TypeError(
            f"collate_fn={called.__name__} takes tensors, and samples of shards are od.Sample objects of any "
            "length: leave collate_fn out for packed batches, pass od.Padded() for padded ones, or a function of yours "
            "that takes a list of od.Sample"
        )


def _cost_workers(arguments: Arguments) -> int:
    """Return the processes of this machine that compute the costs of items: those of an engine may be on others."""
    if arguments.engine is None:
        return arguments.num_workers
    return min(arguments.num_workers, len(os.sched_getaffinity(0)))


def _advise_costs(options: LoaderOptions, phases: Sequence[str]) -> None:
    """Say once that phases are balanced by their positions, if that is so and what they cost may differ."""
    is_balanced = options.rank.size > 1 and options.balance.scope != "none"
    if options.cost is None and len(phases) > 1 and is_balanced:
        warn_once(
            "positions as costs",
            f"no cost= is given, so positions cost the same in the phases {', '.join(phases)}: a patch as much as an "
            "LLM token. Plans are better with what your model costs: cost=od.hf.cost(model) for a Hugging Face model, "
            "else an od.CostModel with an od.TransformerCost(hidden=..., layers=..., ffn=...) for each phase",
        )
