"""Costs and tokens of the rows of an index, under a cost model; rows above the caps and budgets of a loader.

An encoder phase costs the sum over a sample's parts, each a separate sequence; `llm` is one sequence a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import PhaseCost
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.native.costs import COST_SHIFT, Coefficients, part_costs, sequence_costs
from orchdata.order.order import TokenCounts
from orchdata.planning.balance import Attention, Balance, Layout, Padded
from orchdata.planning.parts import Parts
from orchdata.planning.plan import Ints
from orchdata.planning.sharing.accumulated import FixedCost
from orchdata.planning.sharing.packed import NO_PADDING, NoPadding, PaddedCost
from orchdata.planning.sharing.shares import Padding
from orchdata.planning.windows import WindowCost

_OR_CUT: Final = ", or cut long texts by TextPreprocessor(max_tokens=..., overflow=...)"
_OR_SHARE: Final = ", or let ranks share them by Balance(teams=od.Teams(largest=...))"
_ONE_A_POSITION: Coefficients = (1 << COST_SHIFT, 0, 0, np.empty((0, 2), np.int64))


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
        known = (*self.index.modalities[1:], "llm")
        for phase in self.balanced:
            if phase not in known:
                raise ValueError(
                    f"the cost model names phase {phase!r}, and the recipe has no modality of that name; the phases "
                    f"are {', '.join(known)}"
                )
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


def layout_costs(
    index: Index,
    model: CostModel | None,
    layout: Layout,
    balance: Balance = Balance(),  # noqa: B008
) -> IndexCosts:
    """Return the costs of samples in batches of this layout; `balance` has the teams. Raises ValueError for a cap on a
    phase that the recipe does not have.
    """
    known = (*index.modalities[1:], "llm")
    for phase in balance.caps:
        if phase not in known:
            raise ValueError(f"Balance.max_tokens names phase {phase!r}; the phases are {', '.join(known)}")
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
    """Raise ValueError for caps that the layout would exceed: a plan has no size of padded items."""
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
