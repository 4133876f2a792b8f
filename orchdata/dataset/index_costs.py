"""Costs and tokens of the rows of an index, under a cost model.

An encoder phase costs the sum over a sample's parts, each a separate sequence; `llm` is one sequence a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import PhaseCost
from orchdata.loaders.index.index import Index
from orchdata.native.costs import COST_SHIFT, Coefficients, part_costs, sequence_costs
from orchdata.planning.costs import Ints
from orchdata.planning.layout import Attention
from orchdata.planning.parts import Parts
from orchdata.planning.sharing.accumulated import FixedCost
from orchdata.planning.sharing.packed import NO_PADDING, NoPadding, PaddedCost
from orchdata.planning.sharing.shares import Padding
from orchdata.planning.windows import WindowCost

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
        return self._evaluate(phase, row, _ONE_A_POSITION)

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
            self.index.check_unchanged()
            if self.multiple_of > 1 and not self.joins:
                lengths = -(-lengths // self.multiple_of) * self.multiple_of
            return sequence_costs(lengths, *coefficients)
        code, costs = self.index.modalities.index(phase), np.empty(len(row), np.int64)
        for index, positions, own in self.index.split(row):
            try:
                costs[positions] = part_costs(
                    own, index.part_offsets, index.part_modality, index.part_positions, code, *coefficients
                )
            except IndexError:
                index.check_parts(own)  # This error names the row.
                raise
        return costs


@dataclass(frozen=True)
class IndexTokens:
    """Tokens of each row of an index, for steps measured in tokens: its LLM tokens, aligned up, and at least 1."""

    index: Index
    multiple_of: int = 1

    def __call__(self, row: Ints) -> Ints:
        self.index.check_unchanged()
        tokens = np.maximum(self.index.tokens_of(row), 1)
        return tokens if self.multiple_of == 1 else -(-tokens // self.multiple_of) * self.multiple_of
