"""Shards, prepared: open the index, leave out samples that a loader cannot use, order the rest, and cut it into steps.

Windows of concatenated documents are steps of another kind: their checks are here too, and what a state stores of rows.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from orchdata.balancers.costs.model import CostModel
from orchdata.batch.batch import ModelInputs
from orchdata.building.pages import IndexedShards, SampleContent, ShardContent
from orchdata.caching import filler_of
from orchdata.dataset.advice import (
    warn_of_costs,
    warn_of_damage,
    warn_of_missing,
    warn_of_no_loss,
    warn_of_steps,
    warn_of_unended,
    warn_of_unread,
)
from orchdata.dataset.arguments import Arguments, PreparedDataset, refuse_parts
from orchdata.dataset.indexed import (
    IndexTokens,
    Rows,
    above_budget,
    check_layout,
    fewest_ranks,
    fingerprint_of,
    index_of,
    is_partial,
    layout_balance,
    layout_costs,
    num_first_rows,
    order_of,
    oversize_rows,
)
from orchdata.delivery.policy import ErrorPolicy, Unusable, reasons_of, refuse_above_budget
from orchdata.loaders.amounts import counted
from orchdata.loaders.errors import DataError, StorageError, TooManyFailures
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.recipe import Recipe, digest
from orchdata.loaders.records import LEFT_OUT
from orchdata.loaders.shards.open import by_identity
from orchdata.loaders.storage.paths import ARROW_SUFFIXES
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import basename
from orchdata.loop.state import RowsDigest
from orchdata.notices import progress_bar, warn_once
from orchdata.order.mixture import AnyOrder
from orchdata.order.order import ListedOrder, TokenCounts
from orchdata.order.steps import Batches, StepTask, TokenBatches
from orchdata.planning.balance import Packed, Padded, layout_of
from orchdata.planning.plan import make_plan
from orchdata.planning.windows import WindowBatches
from orchdata.quarantine import sample_names
from orchdata.ranks.first_comer import is_first

if TYPE_CHECKING:
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset

Ints = NDArray[np.int64]
_CHUNK_ROWS: Final = 1 << 20
_WHOLE: Final = "or keep samples whole, by od.Packed(length=...) without concatenate"
_log = logging.getLogger("orchdata")


def prepare_shards(dataset: ShardDataset | Mixture, arguments: Arguments) -> PreparedDataset:
    """Open the index and leave out unusable samples. Raises as DataLoader documents."""
    # The index, and the costs of its samples in this layout.
    named = [] if arguments.quarantine is None else sample_names(arguments.quarantine, "quarantine")
    balance, accumulate, rank, cost = arguments.balance, arguments.accumulate, arguments.rank, arguments.cost
    assert isinstance(cost, CostModel | None)
    layout = layout_of(arguments.collate_fn) or Packed()
    check_layout(balance, layout)
    sources = [leaf.dataset for leaf in dataset.leaves]
    recipes = [source.recipe for source in sources]
    index = index_of(dataset, partial(_open_index, arguments))
    costs = layout_costs(index, cost, layout, balance)
    encoders = costs.phases[:-1]
    length = layout.length if layout.concatenate else None
    if length is not None:
        _check_windows(length, arguments, recipes, index)
        accumulate = 1  # a microbatch is a window
    balance = layout_balance(balance, layout, recipes[0], encoders)
    if isinstance(arguments.collate_fn, ModelInputs):
        for recipe in recipes:
            arguments.collate_fn.check(recipe, encoders, balance)
    left_out = index.totals["ignored_fields"].get(LEFT_OUT, 0)
    if left_out and not index.num_rows:  # an epoch would silently have no step
        raise ValueError(f"Recipe.record returned None for all {left_out:,} samples: does it end without a return?")
    warn_of_unread(dataset, index, rank.rank)

    # Leave out rows that are not selected, quarantined, bad, or too large.
    unchosen = unchosen_rows(dataset, index)
    if not callable(arguments.collate_fn):  # a function of the user's may give the model other tokens to learn
        warn_of_no_loss(dataset, index, unchosen)
    without = np.union1d(_quarantined_rows(dataset, index, named), unchosen) if named else unchosen
    bad, num_lost = np.setdiff1d(index.bad_rows(), without), 0
    if len(bad):
        num_lost = _check_bad(index, bad, unchosen, [leaf.name for leaf in dataset.leaves], arguments.on_error)
    warn_of_missing(dataset, index)
    excluded = np.union1d(without, bad)
    if balance.caps and balance.oversize != "own" and length is None:
        above = oversize_rows(costs, balance, excluded)
        excluded = np.union1d(excluded, np.concatenate(list(above.values())))
    # Padding to the longest sample of a microbatch is not known before planning.
    counts = IndexTokens(index, 1 if isinstance(layout, Padded) or length is not None else layout.multiple_of)
    budgets = arguments.global_batch_tokens
    if budgets is not None:
        smallest = min(tokens for _, tokens in budgets)
        excluded = np.union1d(excluded, above_budget(counts, smallest, balance, excluded))
    if rank.size < (needed := fewest_ranks(costs, balance, excluded)):
        raise ValueError(
            f"a usable sample takes a team of {needed} ranks under Balance.max_tokens, and there are {rank.size}: use "
            f"at least {needed} ranks, raise max_tokens, or use Balance(oversize='own')"
        )
    if length is not None:
        _check_labels(index, excluded)

    # The order, and what a state must agree with.
    shuffle, seed, multiple_of = arguments.shuffled, arguments.order_seed, counts.multiple_of
    if isinstance(arguments.shuffle, np.ndarray):
        _check_listed(arguments.shuffle, index)
        order: AnyOrder = ListedOrder(arguments.shuffle, excluded)
    else:
        order = order_of(dataset, index, excluded, shuffle=shuffle, seed=seed, multiple_of=multiple_of)
    identity = fingerprint_of(dataset, index, order)
    if any(modality.draws() for recipe in recipes for modality in recipe.modalities.values()):
        identity["draws"] = {"seed": seed}

    # The steps.
    if budgets is not None:
        batches: Batches = TokenBatches(sums=order.sums(counts), budgets=budgets, drop_last=arguments.drop_last)
    elif length is not None:
        batches = _windows_of(arguments, length, order, counts, index)
    else:
        batches = arguments.batches
    warn_of_steps(batches, layout, rank.size, has_media=bool(encoders))
    measure = {}
    if budgets is not None or (length is None and order.by == "tokens"):
        measure["tokens_multiple_of"] = multiple_of

    # What is built.
    shards = _shards_of(dataset, arguments, index, encoders)
    content: ShardContent | SampleContent = ShardContent(shards=shards, layout=layout, encoders=encoders)
    if callable(arguments.collate_fn):
        refuse_parts(balance, "a collate_fn gets whole samples")
        content = SampleContent(shards=shards, collate_fn=arguments.collate_fn)
    warn_of_unended(shards, rank.rank)
    num_indexed = index.num_samples - int(np.count_nonzero(index.piece[unchosen] == 0))
    spec = arguments.build_spec(costs, order, batches, content, balance=balance, accumulate=accumulate)
    if accumulate > 1 and balance.caps and spec.plan.num_steps:
        make_plan(spec.plan, StepTask(0, 0))  # It raises if caps need more micro-steps.
    if cost is None:
        warn_of_costs(costs.phases, rank, balance)
    named_files = [source for source in sources if source.index_file is not None and rank.rank == 0]
    chosen_by = [each.describe() for each in sources[0].selections] if len(sources) == 1 and not num_indexed else []
    return PreparedDataset(
        spec=spec,
        rows=rows_of(dataset, index, order, batches, excluded),
        of_processor=tuple(dict.fromkeys(name for recipe in recipes for name in recipe.of_processor)),
        filler=None if arguments.cache is None else filler_of,
        fingerprint={**identity, **batches.describe(), **measure},
        failures=IndexedFailures(index, bad),
        num_indexed=num_indexed,
        num_lost=num_lost,
        none_chosen=", ".join(f"{name}={value!r}" for each in chosen_by for name, value in each.items()),
        on_first_step=partial(_look_once, named_files) if named_files else None,
    )


def _open_index(arguments: Arguments, dataset: ShardDataset) -> Index:
    rank, builds = arguments.rank, arguments.index == "build"
    together = builds and dist.is_available() and dist.is_initialized()
    with progress_bar("indexing") as bar:
        number, progress = rank.rank if together else None, bar if rank.rank == 0 else None
        return dataset.index(num_ranks=rank.size, rank=number, check=builds, progress=progress)


def unchosen_rows(dataset: ShardDataset | Mixture, index: Index) -> Ints:
    """Return the rows that data sets leave out by `filter` and `split`, ascending. Raises ValueError as they do."""
    return np.concatenate([start + leaf.dataset.left_out(part) for leaf, part, start in dataset.parts(index)])


def _quarantined_rows(dataset: ShardDataset | Mixture, index: Index, quarantine: Sequence[tuple[str, ...]]) -> Ints:
    """Return all rows with these names; if some rows of a name are bad, only these. Raises ValueError for a name that
    no sample has; where the index has first samples alone, it may be that of another one.
    """
    is_whole = not any(is_partial(own, leaf.dataset.urls) for leaf, own, _ in dataset.parts(index))
    rows: list[int] = []
    bad = set(index.bad_rows().tolist())
    for shard, key in quarantine:
        matches = index.find_all(shard, key)
        if not matches and is_whole:
            raise ValueError(f"quarantine names sample {key!r} of shard {shard!r}, which the data set does not have")
        rows.extend([row for row in matches if row in bad] or matches)
    return np.unique(np.array(rows, np.int64))


class IndexedFailures(Sequence[DataError]):
    """The failures of bad rows, created one at a time."""

    def __init__(self, index: Index, rows: Ints) -> None:
        self._index = index
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return IndexedFailures(self._index, self._rows[number])
        return self._index.failure(int(self._rows[number]))


def _check_bad(index: Index, bad: Ints, unchosen: Ints, names: Sequence[str], policy: ErrorPolicy) -> int:
    """Return the samples that damage hides in shards of which rows are in `bad`: the user left out the others. Warns
    about bad samples. `names` are those of the sources.

    Raises DataError under "raise" if the data set has bad samples; it offers "skip" where that allows as many.
    TooManyFailures under "skip".
    """
    failures = IndexedFailures(index, bad)
    if policy.action != "skip":
        first, skips = failures[0], "on_error='skip' allows as many, too; "
        try:
            unusable = _unusable(index, failures, bad, index.lost_samples(), unchosen, names)
            refuse_above_budget(unusable, ErrorPolicy("skip"))
        except TooManyFailures:
            skips = ""
        raise DataError(
            first.shard,
            first.key,
            first.field,
            f"{first.reason} (the first of {len(bad)} bad samples; `orchdata verify PATHS --out bad.jsonl` lists them "
            f'all, and quarantine="bad.jsonl" leaves them out; {skips}after repairing shards, run `orchdata index` '
            "again)",
        )
    is_counted = np.zeros(len(index.shards), bool)
    is_counted[np.searchsorted(index.shard_rows, bad, side="right") - 1] = True
    lost: Ints = np.where(is_counted, index.lost_samples(), 0)
    num_lost = int(lost.sum())
    warn_of_damage(index, num_lost)
    refuse_above_budget(_unusable(index, failures, bad, lost, unchosen, names), policy)
    warn_once(
        f"bad samples of {index.fingerprint}",
        f"{len(bad):,} of {index.num_samples:,} samples are left out under on_error='skip': {reasons_of(failures)}. "
        "`orchdata index` lists them",
    )
    return num_lost


def _unusable(
    index: Index, failures: IndexedFailures, bad: Ints, lost: Ints, unchosen: Ints, names: Sequence[str]
) -> list[Unusable]:
    """Return what cannot be used of each source, or of the one data set."""
    shards = [0, *accumulate(len(each.shards) for each in index.indexes)]
    found = []
    for number, (name, each) in enumerate(zip(names, index.indexes, strict=True)):
        rows = index.first_rows[number : number + 2]
        start, end = np.searchsorted(bad, rows).tolist()
        out = unchosen[slice(*np.searchsorted(unchosen, rows))] - rows[0]
        num_lost = int(lost[shards[number] : shards[number + 1]].sum())
        left = each.num_samples - int(np.count_nonzero(each.piece[out] == 0))
        found.append(Unusable(failures[start:end], num_lost, left + num_lost, name))
    return found


def _check_listed(rows: Ints, index: Index) -> None:
    if isinstance(index, JoinedIndex):
        raise ValueError("shuffle= takes an array of rows for one od.ShardDataset: the sources of a mixture are merged")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < index.num_rows:
        raise ValueError(
            f"shuffle= names rows {int(rows.min())} to {int(rows.max())}, and the index has {index.num_rows}"
        )


def _shards_of(
    dataset: ShardDataset | Mixture, arguments: Arguments, index: Index, encoders: Sequence[str]
) -> IndexedShards:
    """Return how the shards are read. Raises ValueError for Arrow files in object storage that no node keeps, for a
    modality without tokens in the LLM's sequence, where features are sent to, and for blank names without a sample.
    """
    files = dataset.files.read_by(**vars(arguments))
    urls = (each.url for each in index.shards if not each.container and each.url.endswith(ARROW_SUFFIXES))
    if files.cache is None and (arrow := next(filter(is_remote, urls), None)):
        raise ValueError(
            f"{arrow}: a loader reads no Arrow files from object storage, where each sample takes several requests. "
            "Write Parquet, as by datasets.load_from_disk(folder).to_parquet('train.parquet', batch_size=100), or keep "
            "whole shards on the node with cache=od.Cache(...)"
        )
    recipes = tuple(leaf.dataset.recipe for leaf in dataset.leaves)
    for name in encoders if arguments.balance.assignment == "per_phase" else ():
        if name in recipes[0].modalities and not recipes[0].modalities[name].places:
            raise ValueError(
                f"Balance.assignment='per_phase' sends features to their tokens in the sequence, and {name} has none "
                "there (places=False), as with an encoder-decoder: use assignment='joint'"
            )
    blank = arguments.on_error.blank_names
    return IndexedShards(
        index=index,
        build_id=index.build_id,
        recipes=recipes,
        seed=arguments.order_seed,
        containers=by_identity(dataset.containers),
        files=files,
        blank=_blank_rows(dataset, index, blank) if blank else frozenset(),
    )


def _blank_rows(dataset: ShardDataset | Mixture, index: Index, blank: Sequence[tuple[str, ...]]) -> frozenset[int]:
    """Return the rows of the samples in `ErrorPolicy.blank`: all of a name. Raises ValueError for a name that no sample
    has.
    """
    parts = {leaf.name: (own, start) for leaf, own, start in dataset.parts(index)}
    what = "(shard, key) pairs of a data set"
    if "" not in parts:
        what = f"(source, shard, key) of a mixture of {', '.join(list(parts)[:8])}"
    rows: list[int] = []
    for *source, shard, key in blank:
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


def _check_windows(length: int, arguments: Arguments, recipes: Sequence[Recipe], index: Index) -> None:
    """Raise ValueError if a loader's arguments and data do not fit windows of `length` tokens."""
    balance, cost, accumulate = arguments.balance, arguments.cost, arguments.accumulate
    if arguments.global_batch_tokens is not None:
        near = max(1, round(arguments.global_batch_tokens[0][1] / length))
        raise ValueError(
            f"global_batch_tokens: the steps of Packed(concatenate=True) are counted in windows of {length} tokens; "
            f"pass global_batch_size={near}, which is {near * length} tokens"
        )
    phases = cost.phases if isinstance(cost, CostModel) else ("llm",)
    for name, is_given in (
        ("Balance.assignment='per_phase' spreads media over ranks", balance.assignment == "per_phase"),
        (f"Balance.max_samples={balance.max_samples} caps samples", balance.max_samples is not None),
        (f"Balance.max_tokens caps {', '.join(balance.caps)}", any(phase != "llm" for phase in balance.caps)),
        (f"cost= names the phases {', '.join(phases)}", phases != ("llm",)),
    ):
        if is_given:
            raise ValueError(
                f"{name}, and a microbatch of Packed(concatenate=True) is one window of text: leave it out"
            )
    # Nothing but text, in the data and in what the recipes say.
    usual = Recipe().modalities
    out = f"leave media out, by od.Recipe({', '.join(f'{name}=None' for name in usual)}, text=...), {_WHOLE}"
    for name in index.modalities[1:]:
        if count := index.totals["modalities"][name]["parts"]:
            raise ValueError(
                f"Packed(concatenate=True): the data set has {count:,} parts of {name}, which cannot be cut: {out}"
            )
    for name, modality in (each for recipe in recipes for each in recipe.modalities.items()):
        if name not in usual or modality != usual[name]:
            raise ValueError(f"Packed(concatenate=True) cuts text, and the recipe says how {name} is prepared: {out}")
    windows, num_ranks = arguments.batches.size, arguments.rank.size
    if accumulate > 1 and accumulate != (each := -(-windows // num_ranks)):
        raise ValueError(
            f"a microbatch of Packed(concatenate=True) is one window, so a step of {windows} windows on {num_ranks} "
            f"ranks has {each} microbatches, not accumulate={accumulate}: leave accumulate out"
        )


def _check_labels(index: Index, excluded: Ints) -> None:
    """Raise ValueError if some tokens of a document have no label: a cut document's labels are then not known."""
    count, first = 0, -1
    for start in range(0, index.num_rows, _CHUNK_ROWS):
        row = np.arange(start, min(start + _CHUNK_ROWS, index.num_rows))
        tokens, loss = index.llm_tokens[row].astype(np.int64), index.loss_tokens[row]
        partial = row[(loss > 0) & (loss < tokens - 1)]
        partial = partial[~np.isin(partial, excluded)]
        first = int(partial[0]) if first < 0 and len(partial) else first
        count += len(partial)
    if count:
        raise ValueError(
            f"{count:,} of {index.num_rows:,} documents have tokens without a label, such as the prompts of a chat; "
            f"the first is {index.called(first)} of {index.shard_of(first).url}. Packed(concatenate=True) cuts "
            "documents, and which side of a cut has how many labels is not in the index. Give the model all of it as "
            f"plain text, by Recipe(record=...), a function of yours that returns a string, {_WHOLE}"
        )


def _windows_of(arguments: Arguments, length: int, order: AnyOrder, counts: TokenCounts, index: Index) -> WindowBatches:
    """Return the steps of windows of an order. Raises ValueError if an epoch has not enough tokens for a step."""
    windows = WindowBatches(
        size=arguments.batches.size,
        length=length,
        drop_last=arguments.drop_last,
        order=order,
        sums=order.sums(counts),
        counts=counts,
        index=index,
    )
    tokens = windows.sums.of_epoch(0)
    if not tokens:
        raise ValueError("the data set has no usable document, and Packed(concatenate=True) fills every window")
    if tokens < windows.step_tokens:
        most = tokens // length
        raise ValueError(
            f"the documents of an epoch have {tokens:,} tokens, and a step of {windows.size:,} windows of "
            f"length={length} has {windows.step_tokens:,}: use {f'at most {most:,} windows a step, ' if most else ''}"
            "a smaller length, or more data"
        )
    return windows


def _look_once(datasets: list[ShardDataset]) -> None:
    """Look in the background whether the paths of data sets name shards that their index files lack, and empty the
    list.
    """
    if datasets:
        todo, datasets[:] = datasets[:], []
        threading.Thread(target=_look, args=(todo,), name="orchdata-new-shards", daemon=True).start()


def _look(datasets: Sequence[ShardDataset]) -> None:
    for dataset in datasets:
        try:
            if not is_first(f"new shards/{digest([dataset.index_file, *dataset.urls[:1]])}"):
                continue
            known = set(dataset.urls)
            new = [url for url in dataset.listed() if url not in known]
        except (StorageError, FileNotFoundError, RuntimeError, ValueError) as error:
            _log.info("shards that the index lacks cannot be looked for: %s", error)
            continue
        if new:
            what = f"{counted(len(new), 'shard')} (the first: {new[0]}) are not in the index {dataset.index_file}"
            how = f"and are not read; write it again: {dataset.index_command}"
            warn_once(f"new shards of {dataset.index_file}", f"{what}, {how}")


# The usable rows that a state belongs to, hashed once, when a state is first needed: digests of 64 equal runs of them,
# one of all runs, and one of their tokens. They are of content, names of samples in their shards. Where they differ,
# the runs say in which shards.
_RUNS: Final = 64
_DIGEST_BYTES: Final = 8
_RUN_BYTES: Final = 4  # stored of each run's digest: they only name shards
_NAMED: Final = 3


@dataclass(frozen=True, eq=False)
class SourceRows:
    """The usable rows of a data set, or of a source of a mixture."""

    name: str  # of the source; "" without a mixture
    index: Index
    num_rows: int  # of the index, that the data set may choose from
    excluded: Ints  # those that do not come, ascending
    excluded_digest: str
    by_tokens: bool  # whether steps or shares go by tokens, as pieces always do

    @property
    def same(self) -> tuple[str, int, str]:
        """Equal for equal rows of one index."""
        return str(self.index.path), self.num_rows, self.excluded_digest

    @property
    def num_usable(self) -> int:
        return self.num_rows - len(self.excluded)

    @cached_property
    def is_split(self) -> bool:
        """Whether any sample has several rows, its pieces."""
        return self.index.is_split and bool(np.any(self.index.piece[: self.num_rows]))

    @cached_property
    def digest(self) -> RowsDigest:
        """What a state stores of the rows."""
        runs = self._runs(self.num_usable)
        whole = _hasher()
        for run in runs:
            whole.update(run)
        starts = b"".join(run[:_RUN_BYTES] for run in runs)
        tokens = self._tokens() if self.by_tokens or self.is_split else None
        return RowsDigest(self.num_usable, whole.hexdigest(), starts, tokens)

    def change_since(self, then: RowsDigest) -> str:
        """Return how the rows differ from those of a state, in words; "" for equal ones."""
        called = f"source {self.name!r}" if self.name else "the data set"
        now, count = self.digest, then.num_usable
        if then[:2] == now[:2]:
            is_same = then.tokens == now.tokens or None in (then.tokens, now.tokens)
            return "" if is_same else f"usable samples of {called} have other numbers of tokens than in the state"
        what = "pieces of samples" if self.is_split else "samples"
        words = f"usable {what} of {called} are others: {count:,} in the state and {self.num_usable:,} here"
        starts = [then.runs[_RUN_BYTES * k : _RUN_BYTES * (k + 1)] for k in range(_RUNS)]
        differing = [k for k, run in enumerate(self._runs(count)) if run[:_RUN_BYTES] != starts[k]]
        return f"{words}, first in {self._shards_of(differing[0], count)}" if differing else words

    def _shards_of(self, run: int, count: int) -> str:
        """Return the shards of a run, with the rows that are left out before, among and after its usable ones."""
        first, last = _bounds(count)[run : run + 2].tolist()
        start = min(self._row(first - 1) + 1 if first else 0, max(0, self.num_rows - 1))
        stop = self.num_rows if run == _RUNS - 1 else self._row(last)
        number, end = np.searchsorted(self.index.shard_rows, [start, max(start, stop - 1)], side="right").tolist()
        shards = self.index.shards[number - 1 : end]
        names = ", ".join(basename(shard.url) for shard in shards[:_NAMED])
        return names + (f" and {len(shards) - _NAMED:,} more shards" if len(shards) > _NAMED else "")

    def _row(self, number: int) -> int:
        """Return the row of a usable sample, by number; of one that is not there, the number of rows."""
        return Rows(self.num_rows, self.excluded)[number] if number < self.num_usable else self.num_rows

    def _runs(self, count: int) -> list[bytes]:
        """Return a digest of each run of usable rows: how many each shard has, their keys and numbers of pieces.

        Args:
            count: number of usable rows that bound the runs; rows beyond belong to the last one.
        """
        index, bounds = self.index, np.minimum(_bounds(count), self.num_usable)
        bounds[-1] = self.num_usable
        hashers = [[_hasher() for _ in range(3)] for _ in range(_RUNS)]
        before = 0
        for start, stop in _chunks(self.num_rows):
            usable = self._is_usable(start, stop)
            offsets, keys = index.keys(start, stop)
            lengths, pieces = np.diff(offsets), index.piece[start:stop]
            if not usable.all():
                keys, lengths, pieces = keys[np.repeat(usable, lengths)], lengths[usable], pieces[usable]
            ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
            columns = lengths.astype("<i4"), np.ascontiguousarray(keys), pieces.astype("<i4")
            cuts = np.clip(bounds - before, 0, len(lengths))
            for number in np.flatnonzero(np.diff(cuts)).tolist():
                low, high = cuts[number : number + 2].tolist()
                of_keys = slice(int(ends[low]), int(ends[high]))
                slices = slice(low, high), of_keys, slice(low, high if self.is_split else low)
                for hasher, column, part in zip(hashers[number], columns, slices, strict=True):
                    hasher.update(column[part])
            before += len(lengths)

        # Rows are in the order of their shards.
        shard_rows = np.minimum(index.shard_rows, self.num_rows)
        shard_ends = shard_rows - np.searchsorted(self.excluded, shard_rows)
        runs = []
        for number, of_rows in enumerate(hashers):
            low, high = bounds[number : number + 2].tolist()
            first, last = np.searchsorted(shard_ends, low, side="right"), np.searchsorted(shard_ends, high)
            whole = _hasher()
            if low < high:
                whole.update(np.append(first, np.minimum(shard_ends[first : last + 1], high) - low).astype("<i8"))
            for hasher in of_rows:
                whole.update(hasher.digest())
            runs.append(whole.digest())
        return runs

    def _tokens(self) -> str:
        """Return a digest of the tokens of the usable rows."""
        digest = _hasher()
        for start, stop in _chunks(self.num_rows):
            digest.update(self.index.llm_tokens[start:stop][self._is_usable(start, stop)].astype("<i4"))
        return str(digest.hexdigest())

    def _is_usable(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the rows [start, stop) are usable."""
        usable = np.ones(stop - start, bool)
        low, high = np.searchsorted(self.excluded, [start, stop])
        usable[self.excluded[low:high] - start] = False
        return usable


def rows_of(
    dataset: ShardDataset | Mixture, index: Index, order: AnyOrder, batches: Batches, excluded: Ints
) -> tuple[SourceRows, ...]:
    """Return the usable rows of the data set, or of each source, for states.

    Args:
        excluded: rows that do not come, of all sources, ascending.
    """
    by_tokens = isinstance(batches, TokenBatches | WindowBatches) or order.by == "tokens"
    found = []
    for (leaf, own, first), own_order in zip(dataset.parts(index), order.orders, strict=True):
        num_rows = num_first_rows(own, leaf.dataset.selections)
        rows = excluded[slice(*np.searchsorted(excluded, (first, first + num_rows)))] - first
        digest = own_order.excluded_digest
        found.append(SourceRows(leaf.name, own, num_rows, rows, digest, by_tokens))
    return tuple(found)


def _bounds(count: int) -> Ints:
    """Return where the runs of so many rows begin, and the end: int64 (_RUNS + 1,)."""
    return np.array([count * number // _RUNS for number in range(_RUNS + 1)], np.int64)


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK_ROWS, count)) for start in range(0, count, _CHUNK_ROWS))
