"""What the index of a data set says: its rows, what they cost, their order, and what a state must agree with.

    take(N), [:N] --> the first N good samples --> rows before the one after the N-th
    rows --cost model, layout--> costs and tokens; rows above the caps and budgets of a loader
    the index of each source --joined--> one index, one order, one fingerprint

What is said of first samples is the same for the full index and for one of these samples alone, so a state loads with
either. An encoder phase costs the sum over a sample's parts, each a separate sequence; `llm` is one sequence a sample.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeIs

from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import PhaseCost
from orchdata.dataset.selection import Selection, Taken
from orchdata.loaders.index.index import Index, shards_fingerprint, shards_in_words
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.storage import basename
from orchdata.native.costs import COST_SHIFT, Coefficients, part_costs, sequence_costs
from orchdata.order.mixture import AnyOrder, MixtureOrder
from orchdata.order.order import MixedSource, Order, Shuffle, TokenCounts
from orchdata.planning.balance import Attention, Balance, Layout, Padded
from orchdata.planning.parts import Parts
from orchdata.planning.sharing.accumulated import FixedCost
from orchdata.planning.sharing.packed import NO_PADDING, NoPadding, PaddedCost
from orchdata.planning.sharing.shares import Padding
from orchdata.planning.windows import WindowCost

if TYPE_CHECKING:
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset

Ints = NDArray[np.int64]
_CHUNK_ROWS: Final = 1 << 20
_OR_CUT: Final = ", or cut long texts by TextPreprocessor(max_tokens=..., overflow=...)"
_OR_SHARE: Final = ", or let ranks share them by Balance(teams=od.Teams(largest=...))"
_ALONE: Final = Balance()
_ONE_A_POSITION: Coefficients = (1 << COST_SHIFT, 0, 0, np.empty((0, 2), np.int64))


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of an index of `num_rows`, ascending: all but those in `without`, ascending."""

    num_rows: int
    without: Ints

    def __len__(self) -> int:
        return self.num_rows - len(self.without)

    def __getitem__(self, number: int) -> int:
        """Return the row with this number; negative numbers count from the end. Raises IndexError."""
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        # As many are left out before it as have at most `number` rows before them: of rows 0 1 (2) 3, number 2 is 3.
        return number + bisect_right(range(len(self.without)), number, key=lambda at: int(self.without[at]) - at)

    def number_of(self, row: int) -> int | None:
        """Return the number of a row; None if the row is not among them."""
        at = int(np.searchsorted(self.without, row))
        return None if row in self.without[at : at + 1] else row - at

    def listed(self) -> Ints:
        """Return the rows."""
        return np.delete(np.arange(self.num_rows), self.without)


class Chosen(NamedTuple):
    """Rows of samples, and the first row of each sample."""

    rows: Rows
    first_rows: Rows


class Opened:
    """The open files of a data set in this process: the index, once it was requested, its samples' rows, and shards."""

    def __init__(self, index: Index | None = None) -> None:
        self.lock = threading.RLock()
        self.index = index
        self.chosen: Chosen | None = None
        self.shards: OpenShards | None = None

    def note(self, index: Index) -> None:
        """Use this index from now on."""
        with self.lock:
            if self.index is None or self.index.build_id != index.build_id:
                self.index, self.chosen, self.shards = index, None, None


def num_first_samples(selections: Sequence[Selection | Taken]) -> int | None:
    """Return the number of the first good samples that selections choose from; None: they may choose any."""
    first = selections[0] if selections else None
    if not isinstance(first, Taken) or not isinstance(first.numbers, range):
        return None
    return max(1, first.numbers[-1] + 1 if first.numbers else 1)


def first_rows(index: Index, without: Ints) -> Rows:
    """Return the first row of each sample of an index, without some rows."""
    return Rows(index.num_rows, np.union1d(without, np.flatnonzero(index.piece)) if index.is_split else without)


def num_first_rows(index: Index, selections: Sequence[Selection | Taken]) -> int:
    """Return the number of the first rows of an index that selections choose from."""
    count = num_first_samples(selections)
    if count is None:
        return index.num_rows
    good = first_rows(index, index.bad_rows())
    return index.rows_of_sample(good[count - 1]).stop if count <= len(good) else index.num_rows


def is_partial(index: Index, urls: Sequence[str]) -> bool:
    """Return whether an index has the first samples of shards alone."""
    return len(index.shards) < len(urls) or any(shard.reach for shard in index.shards[-1:])


def content_of(index: Index, selections: Sequence[Selection | Taken]) -> tuple[str, Sequence[ShardInfo]]:
    """Return the identity of the content that selections choose from, for states, and its shards: all shards, or the
    rows and the shards of the first samples.
    """
    if num_first_samples(selections) is None:
        return shards_fingerprint(index.shards), index.shards
    rows = num_first_rows(index, selections)
    shards = index.shards[: int(index.shard[rows - 1]) + 1] if rows else ()
    digest = hashlib.blake2b(repr([(basename(shard.url), shard.size) for shard in shards]).encode(), digest_size=16)
    offsets, keys = index.keys(0, rows)
    for column in (np.diff(offsets), keys):
        digest.update(np.ascontiguousarray(column).data)
    return f"first {rows} rows {digest.hexdigest()}", shards


@dataclass(frozen=True)
class IndexCosts:
    """Costs of an index's rows."""

    index: Index
    model: CostModel | None = None  # without one, every phase that the samples have costs its positions
    multiple_of: int = 1  # LLM sequences are padded to it, and costs and positions count the padding
    rectangular: bool = False  # LLM batches are padded to their longest sample: a cost is of a whole row
    length: int | None = None  # of every LLM microbatch; None where lengths vary
    attention: Attention | None = None  # of windows of concatenated documents
    joins: bool = False  # sequences of a microbatch are joined before they are padded: costs count no padding

    def __post_init__(self) -> None:
        _check_phases(self.index, self.balanced, "the cost model")
        if "llm" not in self.balanced:
            raise ValueError(f"the cost model must name the phase llm, it names {', '.join(self.balanced)}")

    @property
    def balanced(self) -> tuple[str, ...]:
        if self.attention is not None:
            return self.phases
        return self.model.phases if self.model is not None else self.phases

    @property
    def exponent(self) -> int:
        return 0 if self.model is None else self.model.exponent

    @property
    def padded(self) -> Padding:
        """How `llm` microbatches are padded, and what that costs."""
        if self.length is not None and self.attention is not None:
            return WindowCost(self.length, self._coefficients("llm"), self.attention)
        if self.length is not None:
            return FixedCost(self.length, self._coefficients("llm"))
        if not self.rectangular:
            return NoPadding(self.multiple_of) if self.joins else NO_PADDING
        cost = PhaseCost(1.0) if self.model is None else self.model.costs[self.model.phases.index("llm")]
        return PaddedCost(cost, self.multiple_of)

    @property
    def phases(self) -> tuple[str, ...]:
        if self.attention is not None:  # windows are of text alone
            return ("llm",)
        totals = self.index.totals["modalities"]
        named = () if self.model is None else self.model.phases
        encoders = [name for name in self.index.modalities[1:] if name in named or totals[name]["parts"]]
        return (*encoders, "llm")

    def costs(self, phase: str, row: Ints) -> Ints:
        return self._evaluate(phase, row, self._coefficients(phase))

    def positions(self, phase: str, row: Ints) -> Ints:
        positions = self._evaluate(phase, row, _ONE_A_POSITION)
        self.index.check_unchanged(row)  # they are what a plan reads last
        return positions

    def loss_tokens(self, row: Ints) -> Ints:
        return self.index.loss_tokens[row].astype(np.int64)

    def parts(self, phase: str, row: Ints) -> Parts:
        part, sample = self.index.parts_of(row, phase)
        positions = self.index.part_positions[part].astype(np.int64)
        return Parts(
            sample=sample,
            part=part,
            positions=positions,
            tokens=self.index.part_tokens[part].astype(np.int64),
            costs=sequence_costs(positions, *self._coefficients(phase)),
            rank=np.full(len(part), -1, np.int32),
        )

    def _coefficients(self, phase: str) -> Coefficients:
        if self.model is None or phase not in self.model.phases:
            return _ONE_A_POSITION
        return self.model.coefficients(phase)

    def _evaluate(self, phase: str, row: Ints, coefficients: Coefficients) -> Ints:
        if phase == "llm":
            lengths = self.index.tokens_of(row)
            if self.multiple_of > 1 and not self.joins:
                lengths = -(-lengths // self.multiple_of) * self.multiple_of
            return sequence_costs(lengths, *coefficients)
        try:
            return part_costs(*self.index.part_table(row), self.index.modalities.index(phase), *coefficients)
        except IndexError:
            self.index.check_parts(row)  # This error names the row.
            raise


@dataclass(frozen=True)
class IndexTokens:
    """Tokens of each row of an index, for steps measured in tokens: its LLM tokens, aligned up, and at least 1."""

    index: Index
    multiple_of: int = 1

    def __call__(self, row: Ints) -> Ints:
        tokens = np.maximum(self.index.tokens_of(row), 1)
        self.index.check_unchanged(row)
        return tokens if self.multiple_of == 1 else -(-tokens // self.multiple_of) * self.multiple_of


def layout_costs(index: Index, model: CostModel | None, layout: Layout, balance: Balance = _ALONE) -> IndexCosts:
    """Return the costs of samples in batches of this layout; `balance` has the teams. Raises ValueError for a cap on a
    phase that the recipe does not have.
    """
    _check_phases(index, balance.caps, "Balance.max_tokens")
    return IndexCosts(
        index,
        model,
        1 if layout.concatenate else layout.multiple_of,
        rectangular=isinstance(layout, Padded),
        length=layout.length,
        attention=layout.attention if layout.concatenate else None,
        joins=balance.teams is not None and balance.teams.cut == "loader",
    )


def _check_phases(index: Index, named: Iterable[str], what: str) -> None:
    known = (*index.modalities[1:], "llm")
    if unknown := [phase for phase in named if phase not in known]:
        raise ValueError(f"{what} names phase {unknown[0]!r}; the phases of the recipe are {', '.join(known)}")


def layout_balance(balance: Balance, layout: Layout, recipe: Recipe, encoders: Sequence[str]) -> Balance:
    """Return the balance with fixed lengths as caps: that of `llm` has room for the dummies of all modalities.

    Raises:
        ValueError: a length for a modality that does not define its padding, or without room for the dummies.
    """
    caps = dict(balance.caps)
    for name in encoders:
        if not (lengths := layout.encoder_lengths.get(name)):
            continue
        modality, unit = recipe.modalities[name], recipe.modalities[name].dummy().positions
        if modality.padding(unit) is None or any(length % unit for length in lengths):
            raise ValueError(
                f"Packed.encoder_lengths of {name} are multiples of {unit} positions, got {lengths}; and {name} must "
                "define its padding(positions)"
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
    """Raise ValueError for caps that the layout would exceed: a plan has no size of padded items."""
    length, caps, why = layout.length, balance.caps, ""
    capped = ", ".join(phase for phase in caps if phase != "llm")
    if length is not None and caps.get("llm", length) != length:
        long = f"Packed(length={length}) makes every microbatch that long: leave the cap of llm out"
        why = f"max_tokens caps llm at {caps['llm']}, and {long}"
    elif (length is not None or layout.encoder_lengths) and balance.oversize == "own":
        why = (
            "oversize='own' gives a sample above the caps a separate microbatch, which Packed(length=..., "
            "encoder_lengths=...) does not make longer: use oversize='drop', a larger length, or shorter samples"
        )
    elif capped and layout.encoders == "padded":
        why = f"max_tokens caps {capped}, which od.Padded(encoders='padded') would exceed: use encoders='packed'"
    if why:
        raise ValueError(f"Balance.{why}")


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
        rows, largest, worst = _rows_above(costs.index, positions, cap, excluded)
        by_phase[phase] = rows
        if len(rows) and balance.oversize == "error":
            out = "raise it, or use Balance(oversize='own') or 'drop'"
            if costs.length is not None:
                out = "raise Packed.length or the cap, or use Balance(oversize='drop')"
                if phase == "llm" and cap < costs.length:
                    out = f"length={costs.length}, minus the positions of dummies; {out}"
            if phase == "llm":
                out += _OR_CUT + ("" if balance.teams is not None or costs.length is not None else _OR_SHARE)
            raise ValueError(
                f"{worst} has {largest} {phase} positions{even}, max_tokens allows {cap} (the largest of "
                f"{len(rows)} samples above it); {out}"
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
    longest = _rows_above(costs.index, partial(costs.positions, "llm"), cap, excluded)[1]
    return int(next(size for size in teams.sizes(teams.largest) if -(-longest // size) <= cap))


def above_budget(counts: IndexTokens, smallest: int, balance: Balance, excluded: Ints) -> Ints:
    """Return the rows that do not fit a step measured in tokens, ascending, without those that are already excluded.
    Raises ValueError if there is one, and `balance.oversize` is not "drop".
    """
    rows, largest, worst = _rows_above(counts.index, counts, smallest, excluded)
    if len(rows) and balance.oversize != "drop":
        raise ValueError(
            f"{worst} has {largest} tokens, and a step of global_batch_tokens has {smallest} (the "
            f"largest of {len(rows)} samples above it); raise it, or leave them out by Balance(oversize='drop')"
            + _OR_CUT
        )
    return rows


def _rows_above(index: Index, size_of: TokenCounts, limit: int, excluded: Ints) -> tuple[Ints, int, str]:
    """Return the rows above a limit, ascending, and the size and name of the largest."""
    above, largest, worst = [np.zeros(0, np.int64)], 0, -1
    for start in range(0, index.num_rows, 1 << 20):
        row = np.arange(start, min(start + (1 << 20), index.num_rows))
        row = row[~np.isin(row, excluded)]
        sizes = size_of(row)
        above.append(row[sizes > limit])
        if len(row) and int(sizes.max()) > largest:
            largest, worst = int(sizes.max()), int(row[sizes.argmax()])
    name = "" if worst < 0 else f"{index.shard_of(worst).url}: {index.called(worst)}"
    return np.concatenate(above), largest, name


def is_mixture(data: ShardDataset | Mixture | None) -> TypeIs[Mixture]:
    """Return whether a data set is a mixture of others: they have names."""
    return data is not None and bool(data.leaves[0].name)


def index_of(
    dataset: ShardDataset | Mixture, opened: Callable[[ShardDataset], Index] = lambda each: each.index()
) -> Index:
    """Return the index of a data set as `opened` gives it; that of a mixture joins its sources, and one file is mapped
    once. Raises as `check_alike`.
    """
    indexes = [opened(leaf.dataset) for leaf in dataset.leaves]
    if not is_mixture(dataset):
        return indexes[0]
    check_alike([(leaf.name, leaf.dataset.recipe) for leaf in dataset.leaves])
    by_path: dict[Path, Index] = {}
    return JoinedIndex([by_path.setdefault(index.path, index) for index in indexes])


def text_is_bytes(dataset: ShardDataset | Mixture | None) -> bool:
    """Return whether LLM tokens of text are UTF-8 bytes, because a recipe has no tokenizer."""
    return dataset is not None and any(leaf.dataset.recipe.text.tokenizer is None for leaf in dataset.leaves)


def check_alike(recipes: Sequence[tuple[str, Recipe]]) -> None:
    """Raise ValueError if samples of two sources could not be in one batch."""
    (first, one), *others = recipes
    wanted = _tensor_fields(one)
    for name, other in others:
        fields = _tensor_fields(other)
        for field, value in fields.items():
            if value != wanted.get(field) or wanted.keys() != fields.keys():
                raise ValueError(
                    f"sources {first!r} and {name!r} differ in {field}, {wanted.get(field)!r} and {value!r}: their "
                    "samples are in one batch, so it must be the same in both recipes; templates, placeholders, text "
                    "fields and limits on the tokens of a part may differ"
                )


def _tensor_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the parts of a recipe on which its samples' tensors depend, by name."""
    fields: dict[str, Any] = {
        "modalities": list(recipe.modalities),
        "text.id": recipe.text.id,
        "limits": recipe.describe()["limits"],
    }
    for name, modality in recipe.modalities.items():
        parameters = modality.describe()
        fields |= {
            f"{name}.{field}": value
            for field, value in _flat(parameters).items()
            if field not in modality.may_differ_in_mixture
        }
        fields[f"{name}.arrays"] = {array: str(spec) for array, spec in modality.arrays().items()}
        fields[f"ids of {name}"] = list(recipe.slots[name]._replace(mark=None))
    return fields


def _flat(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a description at all levels as one dict."""
    fields: dict[str, Any] = {}
    for field, value in described.items():
        fields |= _flat(value) if isinstance(value, Mapping) else {field: value}
    return fields


def order_of(
    dataset: ShardDataset | Mixture | None,
    index: Index,
    excluded: Ints,
    *,
    shuffle: Shuffle | None,
    seed: int,
    multiple_of: int = 1,
) -> AnyOrder:
    """Build the order of a data set's samples, or of an index alone.

    Args:
        excluded: rows to leave out, of all sources, ascending. Those that no selection can choose are no part of the
            order, whether the index has them or not.
        seed: the seed of each source of a mixture is derived from it and the source's name.
        multiple_of: tokens are counted up to it.

    Raises:
        ValueError: a source without a usable sample, or weights too far apart.
    """
    if not is_mixture(dataset):
        num_rows = num_first_rows(index, () if dataset is None else dataset.selections)
        return Order(num_rows, shuffle=shuffle, seed=seed, excluded=excluded[excluded < num_rows])
    # Each source has its own order, without its excluded rows.
    sources, largest = [], 1
    for number, (leaf, own, first) in enumerate(dataset.parts(index)):
        num_rows = num_first_rows(own, leaf.dataset.selections)
        left_out = excluded[slice(*np.searchsorted(excluded, (first, first + num_rows)))] - first
        own_seed = _seed_of(seed, leaf.name)
        order = Order(num_rows, shuffle=shuffle, seed=own_seed, excluded=left_out, source=number)
        if not order.num_samples:
            raise ValueError(f"source {leaf.name!r} has no usable sample: leave it out of the mixture")
        counts = IndexTokens(own, multiple_of)
        sources.append(MixedSource(leaf.name, order, counts, order.sums(counts), first, float(leaf.loss_weight)))
        most = max(1, int(own.totals["max_llm_tokens"]))
        largest = max(largest, -(-most // multiple_of) * multiple_of)
    # An epoch must have room for every sample that is not excluded.
    size = dataset.epoch_size
    if size is not None and size[0] == "tokens" and size[1] < largest:
        largest = max(_longest(source) for source in sources)
        if size[1] < largest:
            raise ValueError(f"epoch_tokens={size[1]} is less than one sample has, {largest}: raise it")
    return MixtureOrder(sources, dataset.quantised(), by=dataset.by, stop=dataset.stop, epoch_size=size)


def _longest(source: MixedSource) -> int:
    """Return the tokens of the longest sample that is not excluded."""
    size, most = source.order.num_samples, 0
    for start in range(0, size, _CHUNK_ROWS):
        _, rows = source.order.located(np.arange(start, min(start + _CHUNK_ROWS, size)))
        most = max(most, int(source.counts(rows).max()))
    return most


def _seed_of(seed: int, name: str) -> int:
    """Return a seed for a source, independent of the other sources; it differs by name, as two may share shards."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def fingerprint_of(dataset: ShardDataset | Mixture, index: Index, order: AnyOrder) -> dict[str, Any]:
    """Return what a state must agree with; `allow` may let "weights" differ."""
    if not is_mixture(dataset):
        return _identity_of(dataset, index, order=order.describe())
    assert isinstance(order, MixtureOrder)
    sources = {
        leaf.name: _identity_of(leaf.dataset, own, loss_weight=float(leaf.loss_weight))
        for leaf, own, _ in dataset.parts(index)
    }
    return {"mixture": order.describe(), "sources": sources, "weights": order.describe_weights()}


def _identity_of(dataset: ShardDataset, index: Index, **more: Any) -> dict[str, Any]:
    chosen = dataset.selections
    content, shards = content_of(index, chosen)
    return {
        "dataset": content,
        "shards": shards_in_words(shards),
        "recipe": dataset.recipe.describe(),
        **more,
        **({"selection": [each.describe() for each in chosen]} if chosen else {}),
    }
