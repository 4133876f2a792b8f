"""Profile of a dataset, before any GPU is rented: its content, and what N ranks would lose to imbalance.

    index columns --counts, percentiles--> content, modalities, phases
    order, cost model, Balance --plans, as in training--> scales, one for each number of ranks

Everything is read from the index: no sample is decoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import orchdata
from orchdata.balancers.costs.model import CostModel
from orchdata.dataset.advice import unread_of
from orchdata.dataset.arguments import check_teams
from orchdata.dataset.indexed import (
    IndexTokens,
    above_budget,
    check_layout,
    fewest_ranks,
    index_of,
    layout_costs,
    order_of,
    oversize_rows,
    text_is_bytes,
)
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import unchosen_rows
from orchdata.engines.warm import Warming, kernel_families
from orchdata.loaders.amounts import counted
from orchdata.loaders.errors import ShardError
from orchdata.loaders.index.index import Index
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.columns import ParquetShard
from orchdata.loaders.shards.open import by_identity, open_indexed
from orchdata.loaders.shards.tar import bytes_read_together
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.paths import PARQUET_SUFFIXES, RECORD_SUFFIXES, suffix_of
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.order.mixture import AnyOrder
from orchdata.order.order import Shuffle
from orchdata.planning.balance import Balance, Layout, Packed, Padded, Teams
from orchdata.profiling.content import (
    Figures,
    chosen_totals,
    content_of,
    count_reasons,
    failure_examples,
    measure_phases,
    split_failures,
    totals_of_sources,
)
from orchdata.profiling.planned import StepSize, epoch_spec, make_scale, padding_of_layouts
from orchdata.profiling.summary import call_of, findings

DEFAULT_RANKS: Final = (8, 64, 512, 2560)
_RANGE_SAMPLES = 1000
_FOOTERS, _ROWS_OF_FILE = 4, 1 << 14
_MAIN_RANKS = 64
_COMPARED = ("scope", "assignment", "group_size", "teams")


class Profile(Figures):
    """The content of a dataset, and its cost on N ranks. `to_dict` has the same figures by the same names.

    All numbers are of the usable samples, except `bad` samples, `failed_shards`, of which nothing could be read, and
    `unchosen` samples, which `filter` and `split` leave out. In phases, caps and scales the pieces of a split sample
    count separately, as a loader draws them. Positions are what a phase computes: patches before merging, audio frames,
    LLM tokens. Lengths have `percentiles` ("min" to "max", each the length of a sample) and `bins`: samples with
    lengths from 2^b up to 2^(b+1), for b from 0.

    Attributes:
        shards, failed_shards, samples, bad, unchosen, bytes, loss_tokens, seed: numbers.
        bad_by_reason, failures: reason -> samples; at most three examples for each of the ten most frequent reasons.
        overflow: what `TextPreprocessor.max_tokens` did; None if no sample is above it.
        read_amplification: bytes read for each byte used, estimated: `by_range` of plain tars, `whole_shards` each read
            once, `by_chunk` of Parquet.
        modalities: name -> samples that have it, their share, parts, LLM tokens, lengths.
        phases: name -> samples that enter it, positions, percentiles, bins.
        balanced_phases, has_cost_model, layout, balance, multiple_of, length, objective: of the run; `balance` has the
            arguments other than defaults that all settings share. `teams`: the call that makes them, or None.
        caps: phase -> cap, how many samples are above, what becomes of them; None without `max_tokens`.
        ranks_left_out: default numbers of ranks whose step would have more than the data.
        text_is_bytes, is_of_processor: no recipe has a tokenizer; a recipe is one of `od.hf.recipe`.
        sources, epoch: of a mixture: what each source gives in the first epoch, and what that delivers of each
            modality. All else is of the stored samples, each once.
        unread, unread_others: field that is not read -> samples that have it, and the sum for all other fields.
        content: lengths, combinations of modalities, joint shares of tokens, shards and sources unlike the whole.
        largest: the ten samples that cost the most: `cost` over the mean sample's, and the least that a `step` costs
            over an even one if one rank has it.
        layouts: padding of LLM microbatches in each layout, on the ranks of `main_scale`.
        scales: for each number of ranks, over `steps` steps of an epoch. `settings`: share of the step that ranks wait,
            in all and in each phase, its standard error, settings that it beats by three errors; `tokenized`, the
            tokens that ranks read and tokenize over those of the step (members of teams do whole texts). `scopes`:
            groups of ranks that read from a shard. `less_than_a_step`: all the data were planned as one step.
    """

    def __repr__(self) -> str:
        """Return one line; `to_dict` returns all figures."""
        ranks = ", ".join(f"{scale.ranks:,}" for scale in self.scales)
        what = f"{counted(self.samples, 'sample')} in {counted(self.shards, 'shard')}, planned for {ranks} ranks"
        return f"Profile({what}: {next(iter(self.summary), 'nothing to say')})"

    _repr_html_ = orchdata._html

    @property
    def main_scale(self) -> Figures:
        """The number of ranks that a summary speaks of: the first of at least 64, else the largest."""
        return main_scale(self.scales)

    @property
    def summary(self) -> tuple[str, ...]:
        """What the profile says, in sentences, the most important first."""
        return tuple(finding.text for finding in findings(self))

    @property
    def call(self) -> str:
        """The `od.DataLoader(...)` call that follows, for the ranks of `main_scale`: Python source with comments."""
        return call_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values: plain dicts, lists, strings and finite numbers."""
        plain: dict[str, Any] = json.loads(json.dumps(self, allow_nan=False))
        return {"summary": list(self.summary), **plain, "call": self.call}

    def write_html(self, path: str | Path, dataset: ShardDataset | Mixture | None = None, *, samples: int = 12) -> None:
        """Write a report: one page of HTML that loads nothing and runs no script.

        The page holds keys and reasons of failures, and some samples: mind who gets it.

        Args:
            path: file to write, in a folder that exists; an existing file is replaced whole.
            dataset: the data set of this profile, from which samples are read; None for a page without samples.
            samples: number of samples to show, drawn at random; 0 for a page without any text, picture, key or error
                text of a sample.

        Raises:
            ValueError: a path that is not a file's.
            PackageError: matplotlib, of the extra `plots`, is missing.
            StorageError: the file cannot be written.
        """
        # A shard that changed since it was indexed has samples that cannot be read.
        index = index_of(dataset, lambda each: each.index(check=False)) if dataset is not None and samples else None
        orchdata._views().write_report(self, path, dataset, index, samples)


def main_scale(scales: Sequence[Figures]) -> Figures:
    large = (scale for scale in scales if scale.ranks >= _MAIN_RANKS)
    return next(large, max(scales, key=lambda scale: scale.ranks))


def profile(
    data: Index | ShardDataset | Mixture,
    *,
    cost: CostModel | None = None,
    balance: Balance = Balance(),  # noqa: B008
    layout: Layout = Packed(),  # noqa: B008
    ranks: Sequence[int] | None = None,
    batch_size: int = 8,
    batch_tokens: int | None = None,
    group_size: int | None = None,
    streams: int | None = None,
    seed: int = 0,
    steps: int = 8,
    most_steps: int = 64,
    dataset: ShardDataset | Mixture | None = None,
    encoder_peers: int = 1,
) -> Profile:
    """Return what samples are made of, and what numbers of ranks would lose to imbalance. No sample is decoded.

    Args:
        data: a data set, whose index is built where it is missing, or an index.
        cost: the model's cost; with None every phase costs its positions.
        balance: as in training: caps, treatment of samples above them, objective, counts. All scopes are planned,
            with groups of `group_size`, and each phase by itself over all ranks; with `teams` they are one more
            setting, on numbers of ranks that hold every sample within its cap. The others ignore caps for such samples.
        layout: as in training, `collate_fn=`; no room is left for dummies in `Packed(length=...)`.
        ranks: numbers of data-parallel ranks to plan for; None for those of 8, 64, 512 and 2,560 whose step has at most
            the samples, or tokens, of the data, at least 8.
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
        encoder_peers: model-parallel peers of each data-parallel rank. Above 1, setting "peers" plans each phase by
            itself, with encoders shared among peers, as `DataParallel.encoder_dims` does; in the others each peer
            encodes all media of its rank, and what it repeats counts as waiting.

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
        "batch_size": batch_size,
        "batch_tokens": batch_tokens,
        "steps": steps,
        "most_steps": most_steps,
        "ranks": None if ranks is None else min(ranks, default=0),
        "group_size": group_size,
        "streams": streams,
        "encoder_peers": encoder_peers,
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

    if not isinstance(cost, CostModel | None):
        raise ValueError(f"cost is an od.CostModel, as of od.hf.cost(model), got {type(cost).__name__}")
    if encoder_peers > 1 and balance.teams is not None:
        raise ValueError("peers share the features of whole samples, which teams cut: leave one out")
    if balance.order is not None:
        raise ValueError(
            f"Balance.order={balance.order!r} is not profiled: costs say nothing about a pipeline's stages; leave it "
            'out, and use objective="sum" if ranks wait only at the end of the step'
        )
    if layout.concatenate:
        raise ValueError(
            "Packed(concatenate=True) is not profiled: every window is full, and ranks have the same number of them in "
            "each step; profile Packed(length=...) to compare with whole samples"
        )
    check_layout(balance, layout)
    check_teams(balance, layout)
    length = layout.length
    if length is not None:
        balance = replace(balance, max_tokens={**balance.caps, "llm": length})
    price = balance.price

    # Leave out samples that are too large.
    source = layout_costs(index, cost, layout, balance)
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
        of_a_rank = batch_tokens or batch_size
        few = [each for each in DEFAULT_RANKS if each * of_a_rank <= size_of_data]
        ranks, left_out = DEFAULT_RANKS[: max(1, len(few))], DEFAULT_RANKS[max(1, len(few)) :]
    if batch_tokens is not None:
        excluded = np.union1d(excluded, above_budget(counts, batch_tokens * min(ranks), balance, excluded))
    group_size = group_size or balance.group_size or 8
    # Without teams a sample that only a team holds gets a microbatch of its own.
    whole = balance if balance.teams is None else replace(balance, teams=None, oversize="own")
    fewest = fewest_ranks(source, balance, excluded)

    def order_in(streams: int) -> AnyOrder:
        shuffle, multiple_of = Shuffle(streams=streams), counts.multiple_of
        return order_of(dataset, index, excluded, shuffle=shuffle, seed=seed, multiple_of=multiple_of)

    # Describe the samples, and plan each number of ranks.
    good = np.delete(np.arange(index.num_rows), unused)
    samples = index.num_samples - num_unchosen - len(bad)
    overflow = totals["overflow"]
    bad_samples, failed_shards = split_failures(index, bad)
    reads = _read_amplification(index, good, totals["bytes"], dataset)
    sources = _sources(order_in(1))
    content = content_of(index, unused, totals, list(sources))
    most = Balance(assignment="per_phase")
    Warming(
        kernel_families(most, max(ranks) * encoder_peers, phases=source.phases, padded=True, decodes=False, fixed=True)
    ).wait()
    scales = tuple(
        make_scale(
            source,
            whole,
            order_in,
            ranks=num_ranks,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            counts=counts,
            group_size=group_size,
            streams=streams,
            steps=steps,
            most_steps=most_steps,
            shared=None if balance.teams is None or num_ranks < fewest else balance,
            num_peers=encoder_peers,
        )
        for num_ranks in ranks
    )
    main = main_scale(scales)
    phases, largest, longest = measure_phases(source, good, excluded, price, main.samples / main.ranks, encoder_peers)
    # Padding of each layout, planned on the ranks that a summary speaks of.
    size = StepSize.of(main.ranks, batch_size, batch_tokens, counts)
    recipes = [] if dataset is None else [leaf.dataset.recipe for leaf in dataset.leaves]
    known = recipes[0].modalities if recipes else {}  # as batches of a mixture have them
    dummies = {name: known[name].dummy().tokens if name in known else 1 for name in index.modalities[1:]}
    layouts = padding_of_layouts(
        index,
        cost,
        whole,
        lambda costs, its: epoch_spec(costs, order_in(main.global_streams), its, size, num_ranks=main.ranks),
        multiple_of=layout.multiple_of,
        dummies=dummies if layout.empty == "dummy" else None,
        length=length,
        longest=longest,
        tokens_per_rank=main.settings["joint"].tokens / main.ranks,
    )
    unread = unread_of(dataset, index)
    # The call that makes teams, with the arguments that are not defaults.
    if (teams := balance.teams) is not None:
        own = {each.name: getattr(teams, each.name) for each in fields(Teams)}
        said = ", ".join(f"{each.name}={own[each.name]!r}" for each in fields(Teams) if own[each.name] != each.default)
    # Of a processor is a modality, or the template of a recipe for text alone.
    of_processor = (
        each.of_processor or (not each.modalities and isinstance(each.text.template, JinjaTemplate)) for each in recipes
    )
    return Profile(
        shards=len(index.shards),
        failed_shards=len(failed_shards),
        samples=samples,
        bad=len(bad_samples),
        unchosen=num_unchosen,
        bad_by_reason=count_reasons(bad_samples),
        bytes=totals["bytes"],
        loss_tokens=totals["loss_tokens"],
        overflow=Figures(**overflow) if any(overflow.values()) else None,
        read_amplification=reads,
        modalities={
            name: Figures(
                samples=its["samples"],
                share=its["samples"] / samples,
                parts=its.get("parts", its["samples"]),
                tokens=its["tokens"],
                lengths=content.tokens[name],
            )
            for name, its in totals["modalities"].items()
        },
        phases={
            phase: Figures(samples=its.samples, positions=its.total, percentiles=its.percentiles, bins=its.bins)
            for phase, its in phases.items()
        },
        balanced_phases=source.balanced,
        has_cost_model=cost is not None,
        layout="padded" if isinstance(layout, Padded) else "packed",
        balance=_given(balance, length),
        multiple_of=layout.multiple_of,
        length=length,
        objective=balance.objective,
        teams=None if teams is None else f"od.Teams({said})".replace("PhaseCost(", "od.PhaseCost("),
        caps=Figures(
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
        is_of_processor=any(of_processor),
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


def _given(balance: Balance, length: int | None) -> dict[str, Any]:
    """Return the arguments that all settings share, if they are not defaults; a fixed length is the layout's matter."""
    given = {field.name: getattr(balance, field.name) for field in fields(Balance) if field.name not in _COMPARED}
    caps = {phase: cap for phase, cap in balance.caps.items() if not (length is not None and phase == "llm")}
    given["max_tokens"] = (caps["llm"] if tuple(caps) == ("llm",) else caps) or None
    default = Balance()
    return {name: value for name, value in given.items() if value != getattr(default, name)}


def _sources(order: AnyOrder) -> dict[str, Figures]:
    given = order.given(0)
    total, found = sum(tokens for _, tokens in given), {}
    for source, (samples, tokens) in zip(order.sources, given, strict=True):
        usable = source.order.num_samples
        its = {"samples": samples, "tokens": tokens, "share": tokens / total}
        found[source.name] = Figures(its, usable=usable, passes=samples / usable)
    return found


def _epoch(
    index: Index, unchosen: NDArray[np.int64], sources: Mapping[str, Figures], content: Figures
) -> dict[str, Figures]:
    """Return what an epoch of a mixture delivers of each modality, if sources give what their samples are made of."""
    if not sources:
        return {}
    given, parts = list(sources.values()), content.sources
    totals = [source["modalities"] for source in totals_of_sources(index, unchosen)]
    samples, tokens = sum(source.samples for source in given), sum(source.tokens for source in given)
    return {
        name: Figures(
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
) -> Figures:
    chosen = good[np.linspace(0, len(good) - 1, min(len(good), _RANGE_SAMPLES)).astype(np.int64)]
    read = used = 0
    for row in chosen.tolist():
        shard = index.shard_of(int(row))
        if not shard.container and suffix_of(shard.url) == ".tar":
            members = index.read_spec(row)
            read += bytes_read_together(members)
            used += sum(size for _, size, _, _ in members)
    names_files = any(shard.container or suffix_of(shard.url) in RECORD_SUFFIXES for shard in index.shards)
    return Figures(
        by_range=read / used if used else None,
        whole_shards=None if names_files else sum(shard.size for shard in index.shards) / max(1, num_bytes),
        by_chunk=None if dataset is None else _read_by_chunk(index, dataset),
    )


def _read_by_chunk(index: Index, dataset: ShardDataset | Mixture) -> float | None:
    """Return the bytes of a row group's column chunks over those that a sample uses, from the footers of some files."""
    numbers = [
        number
        for number, shard in enumerate(index.shards)
        if shard.url.endswith(PARQUET_SUFFIXES) and not shard.container
    ]
    chosen = {numbers[at] for at in np.linspace(0, len(numbers) - 1, min(_FOOTERS, len(numbers))).astype(int).tolist()}
    groups = stored = used = samples = 0
    for number in sorted(chosen):
        info = index.shards[number]
        good = np.setdiff1d(index.rows_of(number), index.bad_rows(), assume_unique=True)[:_ROWS_OF_FILE].tolist()
        given: dict[str, Any] = {"files": dataset.files, "containers": by_identity(dataset.containers)}
        try:
            shard = open_indexed(info.url, info, limits=Limits(), cache=CacheFolder(), **given)
        except ShardError:
            continue  # a loader reports it
        with closing(shard):
            if not isinstance(shard, ParquetShard) or not good:
                continue
            fields = {spec[3] for row in good[:32] for spec in index.read_spec(row)}
            of_groups = shard.chunk_bytes(sorted(fields))
        groups, stored = groups + len(of_groups), stored + sum(num_bytes for _, num_bytes in of_groups)
        used += sum(size for row in good for _, size, _, _ in index.read_spec(row))
        samples += len(good)
    return stored / groups / max(1.0, used / samples) if groups and samples else None
