"""Shards, prepared: open the index, leave out unusable samples.

Shards that an index file lacks: looked for once in a job, in the background, after the first step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from orchdata.balancers.costs.model import CostModel
from orchdata.batch.batch import ModelInputs
from orchdata.building.contents import IndexedShards, SampleContent
from orchdata.building.pages import ShardContent
from orchdata.caching import filler_of
from orchdata.dataset.arguments import Arguments, Quarantine, refuse_parts
from orchdata.dataset.bad_samples import IndexedFailures, lost_samples, unusable_of, warn_of_bad
from orchdata.dataset.index_costs import IndexCosts, IndexTokens
from orchdata.dataset.mixed import fingerprint_of, index_of, order_of
from orchdata.dataset.options import PreparedDataset, TokenBudgets
from orchdata.dataset.unread import warn_of_missing, warn_of_no_loss, warn_of_unread, whole_parts
from orchdata.dataset.usable_rows import rows_of
from orchdata.dataset.windows import check_accumulate, check_labels, check_windows, warn_of_windows, windows_of
from orchdata.delivery.policy import ErrorPolicy, refuse_above_budget
from orchdata.loaders.amounts import counted
from orchdata.loaders.errors import DataError, StorageError, TooManyFailures
from orchdata.loaders.index.index import Index, digest
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import LEFT_OUT
from orchdata.loaders.shards.open import by_identity
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.paths import ARROW_SUFFIXES
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.notices import progress_bar, warn_once
from orchdata.order.mixture import AnyOrder
from orchdata.order.order import ListedOrder, TokenCounts
from orchdata.order.steps import Batches, StepTask, TokenBatches
from orchdata.planning.balance import Balance
from orchdata.planning.layout import (
    Layout,
    Packed,
    Padded,
    layout_of,
)
from orchdata.planning.make_plan import make_plan
from orchdata.planning.sharing.accumulated import better_budget
from orchdata.quarantine import checked_names, read_quarantine
from orchdata.ranks.first_comer import is_first
from orchdata.ranks.parallel import Rank
from orchdata.unended_chats import warn_of_unended

if TYPE_CHECKING:
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset


Ints = NDArray[np.int64]
_OR_CUT: Final = ", or cut long texts by TextPreprocessor(max_tokens=..., overflow=...)"
_OR_SHARE: Final = ", or let ranks share them by Balance(teams=od.Teams(largest=...))"


def prepare_shards(dataset: ShardDataset | Mixture, arguments: Arguments) -> PreparedDataset:
    """Open the index and leave out unusable samples. Raises as DataLoader documents."""
    # The index, and the costs of its samples in this layout.
    named = _read_quarantine(arguments.quarantine)
    balance, accumulate, rank, cost = arguments.balance, arguments.accumulate, arguments.rank, arguments.cost
    assert isinstance(cost, CostModel | None)
    layout = layout_of(arguments.collate_fn) or Packed()
    check_layout(balance, layout)
    sources = [leaf.dataset for leaf in dataset.leaves]
    recipes = [source.recipe for source in sources]
    index = index_of(dataset, partial(_open_index, arguments))
    costs = layout_costs(index, cost, layout, balance)
    length = layout.length if layout.concatenate else None
    check_windows(length, balance, arguments.batches.describe(), cost, recipes, index)
    if length is not None and accumulate > 1:
        check_accumulate(accumulate, arguments.sample_batches.size, rank.size)
        accumulate = 1  # a microbatch is a window
    balance = layout_balance(balance, layout, recipes[0], costs.phases[:-1])
    if isinstance(arguments.collate_fn, ModelInputs):
        for recipe in recipes:
            arguments.collate_fn.check(recipe, costs.phases[:-1], balance)
    _refuse_none_left(index)
    warn_of_unread(dataset, index, rank.rank)
    # Leave out rows that are not selected, quarantined, bad, or too large.
    unchosen = unchosen_rows(dataset, index)
    warn_of_no_loss(dataset, index, unchosen, learns=not callable(arguments.collate_fn))
    without = np.union1d(_quarantined_rows(dataset, index, named), unchosen)
    bad = np.setdiff1d(index.bad_rows(), without)
    names = [leaf.name for leaf in dataset.leaves]
    _refuse(index, bad, unchosen, names, arguments.on_error)
    lost = lost_samples(index, bad)
    refuse_above_budget(unusable_of(index, bad, lost, unchosen, names), arguments.on_error)
    warn_of_bad(index, bad)
    warn_of_missing(dataset, index)
    excluded = np.union1d(without, bad)
    check_caps(balance, index)
    if balance.caps and balance.oversize != "own" and length is None:
        above = oversize_rows(costs, balance, excluded)
        excluded = np.union1d(excluded, np.concatenate(list(above.values())))
    # Padding to the longest sample of a microbatch is not known before planning.
    counts = IndexTokens(index, 1 if isinstance(layout, Padded) or length is not None else layout.multiple_of)
    if isinstance(arguments.batches, TokenBudgets):
        excluded = np.union1d(excluded, above_budget(counts, arguments.batches, balance, excluded))
    _check_ranks(rank.size, fewest_ranks(costs, balance, excluded))
    check_labels(length, index, excluded)
    # The order, and what a state must agree with.
    shuffle, seed, multiple_of = arguments.shuffled, arguments.order_seed, counts.multiple_of
    if isinstance(arguments.shuffle, np.ndarray):
        _check_listed(arguments.shuffle, index)
        order: AnyOrder = ListedOrder(arguments.shuffle, excluded)
    else:
        order = order_of(dataset, index, excluded, shuffle=shuffle, seed=seed, multiple_of=multiple_of)
    identity = fingerprint_of(dataset, index, order)
    if any(modality.draws() for recipe in recipes for modality in recipe.modalities.values()):
        identity["draws"] = {"seed": arguments.order_seed}
    # The steps.
    batches: Batches | TokenBudgets = arguments.batches
    measure = {}
    if isinstance(batches, TokenBudgets):
        batches = batches.over(order.sums(counts))
        measure = {"tokens_multiple_of": counts.multiple_of}
        _warn_better(batches, layout.length, rank.size, has_media=len(costs.phases) > 1)
    elif length is not None:
        batches = windows_of(batches, length, order, counts, index)
        warn_of_windows(batches, recipes, rank.size)
    elif order.by == "tokens":
        measure = {"tokens_multiple_of": counts.multiple_of}
    files = dataset.files.limited(float(arguments.timeout)).cached(arguments.cache)
    _check_arrow(index, files)
    content = _content(recipes, dataset, arguments, index, costs.phases[:-1], layout, files)
    warn_of_unended(content.shards, rank.rank)
    rows = rows_of(dataset, index, order, batches, excluded)
    num_indexed = index.num_samples - int(np.count_nonzero(index.piece[unchosen] == 0))
    spec = arguments.build_spec(costs, order, batches, content, balance=balance, accumulate=accumulate)
    if accumulate > 1 and balance.caps and spec.plan.num_steps:
        make_plan(spec.plan, StepTask(0, 0))  # It raises if caps need more micro-steps.
    _advise_costs(arguments, costs.phases)
    return PreparedDataset(
        spec=spec,
        rows=rows,
        of_processor=tuple(dict.fromkeys(name for recipe in recipes for name in recipe.of_processor)),
        filler=filler_of,
        fingerprint={**identity, **batches.describe(), **measure},
        failures=IndexedFailures(index, bad),
        num_indexed=num_indexed,
        num_lost=int(lost.sum()),
        none_chosen=_choice(sources, num_indexed),
        on_first_step=_new_shards(sources, rank),
    )


def _advise_costs(arguments: Arguments, phases: Sequence[str]) -> None:
    """Say once that phases are balanced by their positions, if that is so and what they cost may differ."""
    is_balanced = arguments.rank.size > 1 and arguments.balance.scope != "none"
    if arguments.cost is None and len(phases) > 1 and is_balanced:
        warn_once(
            "positions as costs",
            f"no cost= is given, so positions cost the same in the phases {', '.join(phases)}: a patch as much as an "
            "LLM token. Plans are better with what your model costs: cost=od.hf.cost(model) for a Hugging Face model, "
            "else an od.CostModel with an od.TransformerCost(hidden=..., layers=..., ffn=...) for each phase",
        )


def _choice(sources: Sequence[ShardDataset], num_chosen: int) -> str:
    """Return the selections of a data set, not of a mixture, that choose no sample; empty if they choose any."""
    if num_chosen or len(sources) > 1:
        return ""
    described = [each.describe() for each in sources[0].selections]
    return ", ".join(f"{name}={value!r}" for each in described for name, value in each.items())


def _refuse_none_left(index: Index) -> None:
    """Raise ValueError if a function of the user's leaves out all samples: an epoch would silently have no step."""
    left_out = index.totals["ignored_fields"].get(LEFT_OUT, 0)
    if left_out and not index.num_rows:
        raise ValueError(f"Recipe.record returned None for all {left_out:,} samples: does it end without a return?")


def unchosen_rows(dataset: ShardDataset | Mixture, index: Index) -> Ints:
    """Return the rows that data sets leave out by `filter` and `split`, ascending. Raises ValueError as they do."""
    return np.concatenate([start + leaf.dataset.left_out(part) for leaf, part, start in dataset.parts(index)])


def _warn_better(batches: TokenBatches, length: int | None, num_ranks: int, *, has_media: bool) -> None:
    """Warn if the last budget leaves microbatches of a fixed length rather empty."""
    budget = batches.budgets[-1][1]
    better = None if length is None else better_budget(budget, length, num_ranks)
    if better is not None:
        warn_once(
            "a budget that fills no microbatches",
            f"steps of global_batch_tokens={budget} fill microbatches of length={length} on {num_ranks} ranks badly: "
            f"global_batch_tokens={better} would fill them"
            + ("" if has_media else f", and Packed(length={length}, concatenate=True) fills all windows of plain text"),
        )


def _check_arrow(index: Index, files: Files) -> None:
    """Raise ValueError for Arrow files in object storage that no node keeps: each sample takes several requests."""
    urls = [
        shard.url
        for shard in index.shards
        if is_remote(shard.url) and shard.url.endswith(ARROW_SUFFIXES) and not shard.container
    ]
    if urls and files.cache is None:
        others = f" and {len(urls) - 1} more" if len(urls) > 1 else ""
        raise ValueError(
            f"{urls[0]}{others}: a loader reads no Arrow files from object storage, where each sample takes several "
            "requests. Write Parquet, as by datasets.load_from_disk(folder).to_parquet('train.parquet', "
            "batch_size=100), or keep whole shards on the node with cache=od.Cache(...)"
        )


def _open_index(arguments: Arguments, dataset: ShardDataset) -> Index:
    rank, together = arguments.rank, arguments.index == "build" and dist.is_available() and dist.is_initialized()
    with progress_bar("indexing") as bar:
        progress = bar if rank.rank == 0 else None
        check, number = arguments.index == "build", rank.rank if together else None
        index = dataset.index(num_ranks=rank.size, rank=number, check=check, progress=progress)
        raises = rank.size == 1 and arguments.on_error.action == "raise"
        if raises and index.totals["bad"] and dataset.index_file is None:
            # It will raise, unless shards were repaired since: check them again.
            index = dataset.index(rebuild=True, progress=progress)
    return index


def _check_listed(rows: Ints, index: Index) -> None:
    if isinstance(index, JoinedIndex):
        raise ValueError("shuffle= takes an array of rows for one od.ShardDataset: the sources of a mixture are merged")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < index.num_rows:
        raise ValueError(
            f"shuffle= names rows {int(rows.min())} to {int(rows.max())}, and the index has {index.num_rows}"
        )


def _content(
    recipes: Sequence[Recipe],
    dataset: ShardDataset | Mixture,
    arguments: Arguments,
    index: Index,
    encoders: tuple[str, ...],
    layout: Layout,
    files: Files,
) -> ShardContent | SampleContent:
    if arguments.balance.assignment == "per_phase":
        _check_llm_tokens(recipes[0], encoders)
    shards = IndexedShards(
        index=index,
        build_id=index.build_id,
        recipes=tuple(recipes),
        seed=arguments.order_seed,
        containers=by_identity(dataset.containers),
        files=files,
        blank=_blank_rows(dataset, index, arguments.on_error),
    )
    if not callable(arguments.collate_fn):
        return ShardContent(shards=shards, layout=layout, encoders=encoders)
    refuse_parts(arguments.balance, "a collate_fn gets whole samples")
    return SampleContent(shards=shards, collate_fn=arguments.collate_fn)


def _check_llm_tokens(recipe: Recipe, encoders: tuple[str, ...]) -> None:
    """Raise ValueError if a modality has no tokens in the LLM's sequence: features are sent to their tokens there."""
    for name in encoders:
        if name in recipe.modalities and not recipe.modalities[name].places:
            raise ValueError(
                f"Balance.assignment='per_phase' sends features to their tokens in the sequence, and {name} has none "
                "there (places=False), as with an encoder-decoder: use assignment='joint'"
            )


def _refuse(index: Index, bad: Ints, unchosen: Ints, names: Sequence[str], policy: ErrorPolicy) -> None:
    """Under "raise", raise DataError if the data set has bad samples; it offers "skip" where that allows as many."""
    if not len(bad) or policy.action == "skip":
        return
    first, skips = index.failure(int(bad[0])), "on_error='skip' allows as many, too; "
    try:
        refuse_above_budget(unusable_of(index, bad, index.lost_samples(), unchosen, names), ErrorPolicy("skip"))
    except TooManyFailures:
        skips = ""
    raise DataError(
        first.shard,
        first.key,
        first.field,
        f"{first.reason} (the first of {len(bad)} bad samples; `orchdata verify PATHS --out bad.jsonl` lists them all, "
        f'and quarantine="bad.jsonl" leaves them out; {skips}after repairing shards, run `orchdata index` again)',
    )


def layout_costs(
    index: Index,
    model: CostModel | None,
    layout: Layout,
    balance: Balance = Balance(),  # noqa: B008
) -> IndexCosts:
    """Return the costs of samples in batches of this layout; `balance` has the teams."""
    return IndexCosts(
        index,
        model,
        1 if layout.concatenate else layout.multiple_of,
        rectangular=isinstance(layout, Padded),
        length=layout.length,
        attention=layout.attention if layout.concatenate else None,
        joins=balance.teams is not None and balance.teams.cut == "loader",
    )


def layout_balance(balance: Balance, layout: Layout, recipe: Recipe, encoders: Sequence[str]) -> Balance:
    """Return the balance with fixed lengths as caps: that of `llm` has room for the dummies of all modalities.

    Raises:
        ValueError: a length for a modality that does not define its padding, or without room for the dummies.
    """
    caps = dict(balance.caps)
    for name in encoders:
        if not (lengths := layout.encoder_lengths.get(name)):
            continue
        modality = recipe.modalities[name]
        if modality.padding(modality.dummy().positions) is None:
            raise ValueError(
                f"Packed.encoder_lengths names {name}, and {type(modality).__name__} does not define its padding: "
                "define its padding(positions), or leave it out"
            )
        unit = modality.dummy().positions
        if wrong := [length for length in lengths if length % unit]:
            raise ValueError(
                f"Packed.encoder_lengths of {name} has {wrong[0]}, and parts have multiples of {unit} positions: use "
                f"{max(1, wrong[0] // unit) * unit}"
            )
        caps[name] = min(lengths[-1], caps.get(name, lengths[-1]))
    length = layout.length
    if length is not None:
        dummies = sum(recipe.modalities[name].dummy().tokens for name in encoders) if layout.empty == "dummy" else 0
        room = length - -(-dummies // layout.multiple_of) * layout.multiple_of
        if room < 1:
            raise ValueError(
                f"Packed.length={length} has no room for samples next to {dummies} tokens of dummies: raise it"
            )
        caps["llm"] = room
    return replace(balance, max_tokens=caps) if caps else balance


def check_layout(balance: Balance, layout: Layout) -> None:
    """Raise ValueError for caps that the layout would exceed: a plan has the positions of an encoder, but not the size
    of the rectangle around its items. A fixed length is a cap, which no sample may exceed.
    """
    length = layout.length
    if length is not None and balance.caps.get("llm", length) != length:
        raise ValueError(
            f"Balance.max_tokens caps llm at {balance.caps['llm']}, and Packed(length={length}) makes every microbatch "
            "that long: leave the cap of llm out"
        )
    if (length is not None or layout.encoder_lengths) and balance.oversize == "own":
        raise ValueError(
            "Balance.oversize='own' gives a sample above the caps a separate microbatch, which Packed(length=..., "
            "encoder_lengths=...) does not make longer: use oversize='drop', a larger length, or shorter samples"
        )
    capped = [phase for phase in balance.caps if phase != "llm"]
    if capped and layout.encoders == "padded":
        raise ValueError(
            f"Balance.max_tokens caps {', '.join(capped)}, which od.Padded(encoders='padded') would exceed: its "
            "padding is not planned; use encoders='packed', or cap only llm"
        )


def _read_quarantine(quarantine: Quarantine | None) -> list[tuple[str, str]]:
    if quarantine is None:
        return []
    if isinstance(quarantine, (str, PathLike)):
        return read_quarantine(quarantine)
    return [(shard, key) for shard, key in checked_names(quarantine, "quarantine")]


def _blank_rows(dataset: ShardDataset | Mixture, index: Index, policy: ErrorPolicy) -> frozenset[int]:
    """Return the rows of the samples in `ErrorPolicy.blank`: all of a name. Raises ValueError for a name that no sample
    has.
    """
    parts = {leaf.name: (own, start) for leaf, own, start in dataset.parts(index)}
    what = "(shard, key) pairs of a data set"
    if "" not in parts:
        what = f"(source, shard, key) of a mixture of {', '.join(list(parts)[:8])}"
    rows: list[int] = []
    for *source, shard, key in policy.blank_names:
        if (name := source[0] if source else "") not in parts:
            raise ValueError(f"ErrorPolicy.blank is {what}, got {(*source, shard, key)!r}")
        own, start = parts[name]
        found = own.find_all(shard, key)
        if not found:
            raise ValueError(
                f"ErrorPolicy.blank names sample {key!r} of shard {shard!r}, which "
                f"{f'source {name!r}' if name else 'the data set'} does not have"
            )
        rows += [start + row for row in found]
    return frozenset(rows)


def _quarantined_rows(dataset: ShardDataset | Mixture, index: Index, quarantine: Sequence[tuple[str, str]]) -> Ints:
    """Return all rows with these names; if some rows of a name are bad, only these. Raises ValueError for a name that
    no sample has; where the index has first samples alone, it may be that of another one.
    """
    is_whole = bool(quarantine) and len(whole_parts(dataset, index)) == len(index.indexes)
    rows: list[int] = []
    bad = set(index.bad_rows().tolist()) if quarantine else set()
    for shard, key in quarantine:
        matches = index.find_all(shard, key)
        if not matches and is_whole:
            raise ValueError(f"quarantine names sample {key!r} of shard {shard!r}, which the data set does not have")
        rows.extend([row for row in matches if row in bad] or matches)
    return np.unique(np.array(rows, np.int64))


def check_caps(balance: Balance, index: Index) -> None:
    """Raise ValueError for a cap on a phase that the recipe does not have."""
    known = (*index.modalities[1:], "llm")
    for phase in balance.caps:
        if phase not in known:
            raise ValueError(f"Balance.max_tokens names phase {phase!r}; the phases are {', '.join(known)}")


def oversize_rows(costs: IndexCosts, balance: Balance, excluded: Ints) -> dict[str, Ints]:
    """Return the rows above each cap, by phase, ascending, without those that are already excluded. With teams a row is
    above that of `llm` if its slices in the largest team are. Raises ValueError if there is one under oversize="error".
    """
    by_phase = {}
    for phase, cap in balance.caps.items():
        positions, even = partial(costs.positions, phase), ""
        if phase == "llm" and balance.teams is not None:
            is_joint = balance.assignment == "joint"
            positions = partial(_slices, costs, balance.teams.largest, is_joint)
            cap = cap // costs.multiple_of * costs.multiple_of
            whole = " (samples with media are not shared under assignment='joint')" if is_joint else ""
            even = f" a rank, even in the largest team of {balance.teams.largest}{whole}"
        above = _rows_above(costs.index, positions, cap, excluded)
        by_phase[phase] = above.rows
        if len(above.rows) and balance.oversize == "error":
            out = "raise it, or use Balance(oversize='own') or 'drop'"
            if costs.length is not None:
                out = "raise Packed.length or the cap, or use Balance(oversize='drop')"
                if phase == "llm" and cap < costs.length:
                    out = f"length={costs.length}, minus the positions of dummies; {out}"
            if phase == "llm":
                out += _OR_CUT + ("" if balance.teams is not None or costs.length is not None else _OR_SHARE)
            raise ValueError(
                f"{above.worst} has {above.largest} {phase} positions{even}, max_tokens allows {cap} (the largest of "
                f"{len(above.rows)} samples above it); {out}"
            )
    return by_phase


def _slices(costs: IndexCosts, size: int, is_joint: bool, row: Ints) -> Ints:
    """Return the `llm` positions of each sample that a member of a team has; if joint, samples with media are whole."""
    lengths, encoders = costs.positions("llm", row), costs.phases[:-1] if is_joint else ()
    has_media = np.sum([costs.positions(phase, row) for phase in encoders], axis=0) > 0
    return np.where(has_media, lengths, -(-lengths // size))


def fewest_ranks(costs: IndexCosts, balance: Balance, excluded: Ints) -> int:
    """Return the ranks that the longest sample takes to keep its cap, of those that are not excluded."""
    teams, cap = balance.teams, balance.caps.get("llm")
    if teams is None or cap is None or balance.oversize == "own":
        return 1
    cap -= cap % costs.multiple_of if costs.joins else 0
    longest = _rows_above(costs.index, partial(costs.positions, "llm"), cap, excluded).largest
    return int(next(size for size in teams.sizes(teams.largest) if -(-longest // size) <= cap))


def _check_ranks(num_ranks: int, needed: int) -> None:
    if needed > num_ranks:
        raise ValueError(
            f"a usable sample takes a team of {needed} ranks under Balance.max_tokens, and there are {num_ranks}: use "
            f"at least {needed} ranks, raise max_tokens, or use Balance(oversize='own')"
        )


def above_budget(counts: IndexTokens, budgets: TokenBudgets, balance: Balance, excluded: Ints) -> Ints:
    """Return the rows that do not fit a step measured in tokens, ascending, without those that are already excluded.
    Raises ValueError if there is one, and `balance.oversize` is not "drop".
    """
    above = _rows_above(counts.index, counts, budgets.smallest, excluded)
    if len(above.rows) and balance.oversize != "drop":
        raise ValueError(
            f"{above.worst} has {above.largest} tokens, and a step of global_batch_tokens has {budgets.smallest} (the "
            f"largest of {len(above.rows)} samples above it); raise it, or leave them out by Balance(oversize='drop')"
            + _OR_CUT
        )
    return above.rows


class _Above(NamedTuple):
    """Rows above a limit, ascending, and the size and name of the largest."""

    rows: Ints
    largest: int
    worst: str


def _rows_above(index: Index, size_of: TokenCounts, limit: int, excluded: Ints) -> _Above:
    above, largest, worst = [np.zeros(0, np.int64)], 0, -1
    for start in range(0, index.num_rows, 1 << 20):
        row = np.arange(start, min(start + (1 << 20), index.num_rows))
        row = row[~np.isin(row, excluded)]
        sizes = size_of(row)
        above.append(row[sizes > limit])
        if len(row) and int(sizes.max()) > largest:
            largest, worst = int(sizes.max()), int(row[sizes.argmax()])
    name = "" if worst < 0 else f"{index.shard_of(worst).url}: {index.called(worst)}"
    return _Above(np.concatenate(above), largest, name)


_log = logging.getLogger("orchdata")


def _new_shards(datasets: Sequence[ShardDataset], rank: Rank) -> Callable[[], None] | None:
    """Return what looks, once and in the background, whether the paths of data sets name shards that their index files
    lack; None on other ranks than the first, and without such files.
    """
    named = [each for each in datasets if each.index_file is not None and rank.rank == 0]

    def begin() -> None:
        if named:
            todo, named[:] = named[:], []
            threading.Thread(target=_look, args=(todo,), name="orchdata-new-shards", daemon=True).start()

    return begin if named else None


def _look(datasets: Sequence[ShardDataset]) -> None:
    for dataset in datasets:
        try:
            _compare(dataset)
        except (StorageError, FileNotFoundError, RuntimeError, ValueError) as error:
            _log.info("shards that the index lacks cannot be looked for: %s", error)


def _compare(dataset: ShardDataset) -> None:
    if not is_first(f"new shards/{digest([dataset.index_file, *dataset.urls[:1]])}"):
        return
    known = set(dataset.urls)
    new = [url for url in dataset.listed() if url not in known]
    if new:
        what = f"{counted(len(new), 'shard')} (the first: {new[0]}) are not in the index {dataset.index_file}"
        how = f"and are not read; write it again: {dataset.index_command}"
        warn_once(f"new shards of {dataset.index_file}", f"{what}, {how}")
