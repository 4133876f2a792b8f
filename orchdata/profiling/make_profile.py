"""Profile of a dataset, before any GPU is rented: its content, and what N ranks would lose to imbalance.

    index columns --counts, percentiles--> Modality, Phase
    order, cost model, Balance --plans, as in training--> Scale, per number of ranks

Everything is read from the index: no sample is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import CostModel
from orchdata.dataset.indexed.column_reads import chunks_of
from orchdata.dataset.indexed.unread import unread_of
from orchdata.dataset.mixed import index_of, mixture_order, text_is_bytes
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.options import TokenBudgets
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import (
    above_budget,
    check_caps,
    check_layout,
    layout_costs,
    oversize_rows,
    unchosen_rows,
)
from orchdata.dataset.views.chosen_totals import chosen_totals, totals_of_sources
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.shards.tar import bytes_read_together
from orchdata.loaders.storage.paths import RECORD_SUFFIXES, suffix_of
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order, Shuffle
from orchdata.planning.balance import Balance
from orchdata.planning.costs import IndexTokens
from orchdata.planning.layout import Layout, Packed, Padded, fixed_length, window_length
from orchdata.profiling.content import Content, content_of
from orchdata.profiling.failures import count_reasons, failure_examples, split_failures
from orchdata.profiling.largest import measure_phases
from orchdata.profiling.lengths import Lengths
from orchdata.profiling.profile import (
    Caps,
    EpochModality,
    Modality,
    Overflow,
    Phase,
    Profile,
    ReadAmplification,
    SourceShare,
    main_scale,
)
from orchdata.profiling.ranks.cached import NodeCache
from orchdata.profiling.ranks.layouts import padding_of_layouts
from orchdata.profiling.ranks.planned import AnyOrder, StepSize, epoch_spec
from orchdata.profiling.ranks.scales import MOST_REPEATS, make_scale
from orchdata.profiling.recipes import dummy_tokens, is_of_processor

DEFAULT_RANKS: Final = (8, 64, 512, 2560)
_RANGE_SAMPLES = 1000
_COMPARED = ("scope", "assignment", "group_size")


def profile(
    data: Index | ShardDataset | Mixture,
    *,
    cost: CostModel | None = None,
    balance: Balance = Balance(),  # noqa: B008
    layout: Layout = Packed(),  # noqa: B008
    model_parallel: int = 1,
    ranks: Sequence[int] | None = None,
    batch_size: int = 8,
    batch_tokens: int | None = None,
    group_size: int | None = None,
    streams: int | None = None,
    seed: int = 0,
    steps: int = 8,
    most_steps: int = 64,
    dataset: ShardDataset | Mixture | None = None,
    cache_bytes: int | None = None,
) -> Profile:
    """Return what samples are made of, and what numbers of ranks would lose to imbalance. No sample is decoded.

    Args:
        data: a data set, whose index is built where it is missing, or an index.
        cost: the model's cost; with None every phase costs its positions.
        balance: as in training: caps, treatment of samples above them, objective, counts. All scopes are planned in
            both assignments, independent of those given here, with groups of `group_size`.
        layout: as in training, `collate_fn=`; no room is left for dummies in `Packed(length=...)`.
        model_parallel: GPUs of a data-parallel rank, tensor x pipeline x context: these get the same samples.
        ranks: numbers of data-parallel ranks to plan for; None for those of 8, 64, 512 and 2,560 whose step has at most
            16 times the samples, or tokens, of the data, at least 8.
        batch_size: samples per rank and step.
        batch_tokens: LLM tokens per rank and step, in place of samples; `global_batch_tokens` over the ranks.
        group_size: ranks of a group, such as those of a node; by default `balance.group_size`, else 8.
        streams: streams of the order, as in `Shuffle(streams=...)`; None for one per group in groups and in a grid, so
            that each reads its own, and one stream for all other settings.
        seed: seed of the order.
        steps: steps to plan per number of ranks to begin with, spread over an epoch, or over several if one has fewer.
            Locality is measured over as many in a row.
        most_steps: steps are added up to this, until the standard error of what ranks wait is below 2 points.
        dataset: the data set of an index, if it chooses samples by `filter` or `split`, or is a mixture with its
            sources joined in the index. None for all samples of the index. Not with a data set as `data`.
        cache_bytes: cap of a cache on each node, `od.Cache(max_bytes=)`; None for one that holds all of a node's own
            shards, if the data are in object storage.

    Raises:
        ValueError: for numbers below 1, a dataset without a usable sample, a filter of unknown columns, caps that are
            invalid in training, or a pipeline's order of microbatches.
    """
    # Check the arguments, and find the usable samples.
    if isinstance(data, Index):
        index = data
    elif dataset is not None:
        raise ValueError("data is a data set: leave out dataset=, which goes with an index")
    else:
        dataset, index = data, index_of(data)
    numbers = {
        "model_parallel": model_parallel,
        "batch_size": batch_size,
        "batch_tokens": batch_tokens,
        "steps": steps,
        "most_steps": most_steps,
        "ranks": None if ranks is None else min(ranks, default=0),
        "group_size": group_size,
        "streams": streams,
        "cache_bytes": cache_bytes,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    unchosen = np.zeros(0, np.int64) if dataset is None else unchosen_rows(dataset, index)
    bad = np.setdiff1d(index.bad_rows(), unchosen)
    unused = np.union1d(bad, unchosen)
    num_unchosen = int(np.count_nonzero(index.piece[unchosen] == 0))
    if len(unused) == index.num_rows:
        raise ValueError(
            f"none of the {index.num_samples} samples is usable, so there is nothing to profile; "
            f"the first: {index.failure(int(bad[0])) if len(bad) else 'there is none'}"
            + (f"; {num_unchosen} are left out by filter and split" if len(unchosen) else "")
        )

    if balance.order is not None:
        raise ValueError(
            f"Balance.order={balance.order!r} is not profiled: costs say nothing about a pipeline's stages; leave it "
            'out, and use objective="sum" if ranks wait only at the end of the step'
        )
    if window_length(layout) is not None:
        raise ValueError(
            "Packed(concatenate=True) is not profiled: every window is full, and ranks have the same number of them in "
            "each step; profile Packed(length=...) to compare with whole samples"
        )
    check_layout(balance, layout)
    length = fixed_length(layout)
    if length is not None:
        balance = replace(balance, max_tokens={**balance.caps, "llm": length})
    check_caps(balance, index)
    price = balance.price

    # Leave out samples that are too large.
    source = layout_costs(index, cost, layout)
    counts = IndexTokens(index, 1 if isinstance(layout, Padded) else layout.multiple_of)
    above = oversize_rows(source, balance, unused)
    too_large = np.unique(np.concatenate([np.zeros(0, np.int64), *above.values()]))
    excluded = np.union1d(unused, too_large) if balance.oversize == "drop" else unused
    if len(excluded) == index.num_rows:
        raise ValueError(f"all {len(too_large)} usable samples are above max_tokens and would be dropped: raise it")
    totals = chosen_totals(index, unchosen)
    left_out: tuple[int, ...] = ()
    if ranks is None:
        size_of_data = index.num_rows - len(excluded)
        if batch_tokens is not None:
            size_of_data = sum(counts["tokens"] for counts in totals["modalities"].values())
        ranks, left_out = _default_ranks(size_of_data, batch_tokens or batch_size)
    if batch_tokens is not None:
        budget = TokenBudgets(budgets=((0, batch_tokens * min(ranks)),), drop_last=True)
        excluded = np.union1d(excluded, above_budget(counts, budget, balance, excluded))
    group_size = group_size or balance.group_size or 8
    order_of: Callable[[int], AnyOrder] = partial(_order, index.num_rows, excluded, seed)
    if isinstance(dataset, Mixture):
        order_of = partial(_mixed, dataset, index, excluded, seed, counts.multiple_of)
    # Describe the samples, and plan each number of ranks.
    good = np.delete(np.arange(index.num_rows), unused)
    samples = index.num_samples - num_unchosen - len(bad)
    overflow = totals["overflow"]
    bad_samples, failed_shards = split_failures(index, bad)
    reads = _read_amplification(index, good, totals["bytes"], dataset)
    cache = _node_cache(index, reads, totals["bytes"], cache_bytes)
    content = content_of(
        index, unused, totals, [leaf.name for leaf in dataset.leaves] if isinstance(dataset, Mixture) else []
    )
    scales = tuple(
        make_scale(
            source,
            balance,
            order_of,
            ranks=num_ranks,
            model_parallel=model_parallel,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            counts=counts,
            group_size=group_size,
            streams=streams,
            steps=steps,
            most_steps=most_steps,
            cache=cache,
        )
        for num_ranks in ranks
    )
    main = main_scale(scales)
    phases, largest, longest = measure_phases(source, good, excluded, price, main.samples / main.ranks)
    # Padding of each layout, planned on the ranks that a summary speaks of.
    size = StepSize.of(main.ranks, batch_size, batch_tokens, counts)
    layouts = padding_of_layouts(
        index,
        cost,
        balance,
        lambda costs, its: epoch_spec(
            costs, order_of(main.global_streams), its, size, num_ranks=main.ranks, steps=steps
        ),
        multiple_of=layout.multiple_of,
        dummies=dummy_tokens(index, dataset) if layout.empty == "dummy" else None,
        length=length,
        longest=longest,
        tokens_per_rank=main.settings["joint"].tokens / main.ranks,
    )
    sources = _sources(order_of(1))
    unread = unread_of(dataset, index)
    return Profile(
        shards=len(index.shards),
        failed_shards=len(failed_shards),
        samples=samples,
        bad=len(bad_samples),
        unchosen=num_unchosen,
        bad_by_reason=count_reasons(bad_samples),
        bytes=totals["bytes"],
        loss_tokens=totals["loss_tokens"],
        overflow=Overflow(**overflow) if any(overflow.values()) else None,
        read_amplification=reads,
        modalities={
            name: _modality(counts, samples, content.tokens[name]) for name, counts in totals["modalities"].items()
        },
        phases={
            phase: Phase(
                samples=lengths.samples, positions=lengths.total, percentiles=lengths.percentiles, bins=lengths.bins
            )
            for phase, lengths in phases.items()
        },
        balanced_phases=source.balanced,
        has_cost_model=cost is not None,
        layout="padded" if isinstance(layout, Padded) else "packed",
        balance=_given(balance, length),
        multiple_of=layout.multiple_of,
        length=length,
        objective=balance.objective,
        model_parallel=model_parallel,
        caps=Caps(
            max_tokens=balance.caps,
            oversize=balance.oversize,
            above={phase: len(rows) for phase, rows in above.items()},
            samples=len(too_large),
        )
        if balance.caps
        else None,
        seed=seed,
        ranks_left_out=left_out,
        text_is_bytes=text_is_bytes(dataset),
        is_of_processor=is_of_processor(dataset),
        sources=sources,
        epoch=_epoch(index, unchosen, sources, content),
        unread=unread["names"],
        unread_others=unread["others"],
        failures=failure_examples(bad_samples),
        content=content,
        largest=largest,
        layouts=layouts,
        scales=scales,
    )


def _default_ranks(size_of_data: int, of_a_rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return numbers of ranks to plan for, and those whose step would repeat the data many times."""
    planned = [ranks for ranks in DEFAULT_RANKS if ranks * of_a_rank <= MOST_REPEATS * size_of_data]
    count = max(1, len(planned))
    return DEFAULT_RANKS[:count], DEFAULT_RANKS[count:]


def _given(balance: Balance, length: int | None) -> dict[str, Any]:
    """Return the arguments that all settings share, if they are not defaults; a fixed length is the layout's matter."""
    given = {field.name: getattr(balance, field.name) for field in fields(Balance) if field.name not in _COMPARED}
    caps = {phase: cap for phase, cap in balance.caps.items() if not (length is not None and phase == "llm")}
    given["max_tokens"] = (caps["llm"] if tuple(caps) == ("llm",) else caps) or None
    default = Balance()
    return {name: value for name, value in given.items() if value != getattr(default, name)}


def _order(num_rows: int, excluded: NDArray[np.int64], seed: int, streams: int) -> Order:
    return Order(num_rows, shuffle=Shuffle(streams=streams), seed=seed, excluded=excluded)


def _mixed(
    mixture: Mixture, index: Index, excluded: NDArray[np.int64], seed: int, multiple_of: int, streams: int
) -> MixtureOrder:
    assert isinstance(index, JoinedIndex)
    return mixture_order(mixture, index, excluded, shuffle=Shuffle(streams=streams), seed=seed, multiple_of=multiple_of)


def _sources(order: AnyOrder) -> dict[str, SourceShare]:
    if not isinstance(order, MixtureOrder):
        return {}
    total = order.of_epoch(0)
    return {
        source.name: SourceShare(
            samples=samples,
            tokens=tokens,
            share=tokens / total,
            usable=source.order.num_samples,
            passes=samples / source.order.num_samples,
        )
        for source, (samples, tokens) in zip(order.sources, order.given(0), strict=True)
    }


def _epoch(
    index: Index, unchosen: NDArray[np.int64], sources: Mapping[str, SourceShare], content: Content
) -> dict[str, EpochModality]:
    """Return what an epoch of a mixture delivers of each modality, if each source gives what its samples are made of.

    Args:
        unchosen: rows that filters and splits leave out.
        content: of the stored samples.
    """
    if not isinstance(index, JoinedIndex) or not sources:
        return {}
    given, parts = list(sources.values()), content.sources
    totals = [source["modalities"] for source in totals_of_sources(index, unchosen)]
    samples, tokens = sum(source.samples for source in given), sum(source.tokens for source in given)
    return {
        name: EpochModality(
            share=sum(
                source.samples * of_source[name]["samples"] / max(1, part.samples)
                for source, part, of_source in zip(given, parts, totals, strict=True)
            )
            / max(1, samples),
            token_share=sum(source.tokens * part.shares[name] for source, part in zip(given, parts, strict=True))
            / max(1, tokens),
        )
        for name in index.modalities
    }


def _read_amplification(
    index: Index, good: NDArray[np.int64], num_bytes: int, dataset: ShardDataset | Mixture | None
) -> ReadAmplification:
    chosen = good[np.linspace(0, len(good) - 1, min(len(good), _RANGE_SAMPLES)).astype(np.int64)]
    read = used = 0
    for row in chosen.tolist():
        shard = index.shard_of(int(row))
        if not shard.container and suffix_of(shard.url) == ".tar":
            members = index.read_spec(row)
            read += bytes_read_together(members)
            used += sum(size for _, size, _, _ in members)
    chunks = None if dataset is None else chunks_of(index, dataset)
    names_files = any(shard.container or suffix_of(shard.url) in RECORD_SUFFIXES for shard in index.shards)
    return ReadAmplification(
        by_range=read / used if used else None,
        whole_shards=None if names_files else sum(shard.size for shard in index.shards) / max(1, num_bytes),
        by_chunk=None if chunks is None else chunks.alone,
    )


def _node_cache(index: Index, reads: ReadAmplification, num_bytes: int, cache_bytes: int | None) -> NodeCache | None:
    """Return the cache of each node; None if none was given and no shard is in object storage."""
    if cache_bytes is None and not any(is_remote(shard.url) for shard in index.shards):
        return None
    stored = sum(shard.size for shard in index.shards)
    return NodeCache(
        max_bytes=stored if cache_bytes is None else cache_bytes,
        stored_bytes=stored,
        read_bytes=round(num_bytes * (reads.by_range or 1.0)),
    )


def _modality(counts: Mapping[str, int], num_samples: int, lengths: Lengths) -> Modality:
    samples = counts["samples"]
    parts = counts.get("parts", samples)
    return Modality(samples=samples, share=samples / num_samples, parts=parts, tokens=counts["tokens"], lengths=lengths)
