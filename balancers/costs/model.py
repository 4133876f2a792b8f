"""Cost models: how many positions enter a phase -> what that costs, in integers.

A phase's cost of one sequence of l positions is linear*l + quadratic*l*l + constant. The coefficients are quantised
once, with one scale for all phases of a model, so that costs of different phases can be added; from there on
everything is int64, the same on every rank and machine.

The scale is the largest power of two at which one sequence of 2**20 positions in every phase together costs at most
2**42: 2**20 such samples still sum to 2**62, inside int64. Coefficients carry 20 more fractional bits
(`orchdata.native.costs.COST_SHIFT`). Whole coefficients that fit as they are keep scale 1: their costs can be read as
what they are, for example tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import checked_costs, checked_count
from orchdata.native.costs import COST_SHIFT, MAX_FIXED_POINT, sequence_costs

LONGEST_POSITIONS = 1 << 20
BACKBONE = "llm"
FIRST_PHASES = ("image", "audio")


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Cost of one sequence of l positions: linear*l + quadratic*l*l + constant, in any unit shared by all phases.

    Attributes:
        linear: cost of a position.
        quadratic: cost of a pair of positions, as in attention.
        constant: cost of a sequence, however short.
    """

    linear: float
    quadratic: float = 0.0
    constant: float = 0.0

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "constant"):
            object.__setattr__(self, name, _checked_coefficient(getattr(self, name), f"PhaseCost.{name}"))
        if not self.linear + self.quadratic + self.constant > 0:
            raise ValueError("PhaseCost needs a coefficient above 0: leave the phase out if it costs nothing")

    def phase_cost(self) -> PhaseCost:
        """Itself, so that a model takes a PhaseCost or anything that makes one."""
        return self

    def at(self, positions: int) -> float:
        """Cost of one sequence, before quantisation."""
        return self.linear * positions + self.quadratic * positions * positions + self.constant


@dataclass(frozen=True, slots=True)
class TransformerCost:
    """Floating-point operations of a transformer, forward and backward, from its shape.

    Forward, for each layer and a sequence of l positions, with h = hidden and r = kv_heads / heads:

    - projections: queries and output 4*h*h, keys and values 4*h*h*r, for each position;
    - feed-forward: 4*h*ffn, or 6*h*ffn when gated, for each position;
    - attention: scores and weighted sum 4*h for each pair of positions, half of the pairs when causal.

    Heads together are as wide as the residual stream. Norms, activations and softmax are not counted: they grow with
    h or the number of heads, not with h*h.

    A vocabulary adds 2*h*vocab for each position. A multiply and an add count as two. Backward costs twice the
    forward; recomputing activations adds one more forward. A frozen phase is forward only: as the first phase of a
    model nothing flows back through it.

    Attributes:
        hidden: width of the residual stream.
        layers: number of layers.
        ffn: width of the feed-forward.
        heads: attention heads; needed with kv_heads.
        kv_heads: heads of keys and values (grouped-query attention); all of them by default.
        vocab: size of the output vocabulary; none for an encoder.
        causal: each position attends to those before it only, and kernels skip the rest.
        gated: the feed-forward has a gate (SwiGLU and its like).
        trainable: the phase has a backward pass.
        recompute: activations are recomputed in the backward pass.
    """

    hidden: int
    layers: int
    ffn: int
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    causal: bool = False
    gated: bool = False
    trainable: bool = True
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "ffn", "heads", "kv_heads", "vocab"):
            value = getattr(self, name)
            if value is not None or name not in ("heads", "kv_heads", "vocab"):
                object.__setattr__(self, name, checked_count(value, f"TransformerCost.{name}"))
        for name in ("causal", "gated", "trainable", "recompute"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"TransformerCost.{name} must be True or False, got {getattr(self, name)!r}")
        if self.kv_heads is not None and (self.heads is None or self.heads % self.kv_heads):
            raise ValueError(f"TransformerCost.kv_heads={self.kv_heads} must divide heads, got heads={self.heads}")

    def phase_cost(self) -> PhaseCost:
        """Coefficients in operations a position and a pair of positions.

        Raises:
            ValueError: they are above what a float holds.
        """
        try:
            linear, quadratic = self._operations()
        except OverflowError:
            raise ValueError(f"{self} costs more than a float holds: is a width mistaken?") from None
        return PhaseCost(linear, quadratic)

    def _operations(self) -> tuple[float, float]:
        shared = self.kv_heads / self.heads if self.heads and self.kv_heads else 1.0
        projections = 4 * self.hidden**2 * (1 + shared)
        feed_forward = (6 if self.gated else 4) * self.hidden * self.ffn
        head = 2 * self.hidden * (self.vocab or 0)
        pairs = (2 if self.causal else 4) * self.hidden
        passes = (4 if self.recompute else 3) if self.trainable else 1
        linear = passes * (self.layers * (projections + feed_forward) + head)
        return float(linear), float(passes * self.layers * pairs)


@dataclass(frozen=True, slots=True, init=False)
class CostModel:
    """What each phase of a model costs; it also names the phases.

    `CostModel(image=TransformerCost(...), llm=PhaseCost(1.0))`: any phase by name, a PhaseCost or TransformerCost each.
    The backbone, `llm`, must be there. A value of None leaves a phase out.

    Attributes:
        phases: names in the order they run: image, audio, others by name, llm.
        costs: PhaseCost of each, before quantisation.
        exponent: costs are the given units times 2**exponent.
    """

    phases: tuple[str, ...]
    costs: tuple[PhaseCost, ...]
    exponent: int

    def __init__(self, **phases: PhaseCost | TransformerCost | None) -> None:
        given: dict[str, PhaseCost] = {}
        for name, cost in phases.items():
            if cost is None:
                continue
            if not isinstance(cost, PhaseCost | TransformerCost):
                raise ValueError(f"CostModel({name}=...) must be a PhaseCost or a TransformerCost, got {cost!r}")
            given[name] = cost.phase_cost()
        if BACKBONE not in given:
            raise ValueError(f"CostModel needs {BACKBONE}=..., the backbone all samples pass, got {sorted(given)}")
        others = sorted(set(given) - {*FIRST_PHASES, BACKBONE})
        names = tuple(name for name in (*FIRST_PHASES, *others, BACKBONE) if name in given)
        object.__setattr__(self, "phases", names)
        object.__setattr__(self, "costs", tuple(given[name] for name in names))
        object.__setattr__(self, "exponent", _exponent(self.costs))

    @classmethod
    def tokens(cls) -> CostModel:
        """A position of the backbone costs 1: balances tokens."""
        return cls(llm=PhaseCost(1.0))

    def coefficients(self, phase: str) -> tuple[int, int, int]:
        """Quantised (linear, quadratic, constant) of a phase, for the kernels of `orchdata.native.costs`.

        Raises:
            ValueError: the model has no such phase.
        """
        return _quantised(self._cost(phase), self.exponent)

    def sequence_costs(self, phase: str, lengths: ArrayLike) -> NDArray[np.int64]:
        """Cost of each sequence of `lengths` positions in a phase: 0 without positions, else at least 1.

        Raises:
            ValueError: an unknown phase, lengths that are not non-negative integers, or too long for int64.
        """
        checked: NDArray[np.int64] = sequence_costs(checked_costs(lengths, "lengths"), *self.coefficients(phase))
        return checked

    def describe(self) -> dict[str, Any]:
        """JSON-safe: part of a plan's identity; two models with equal descriptions give equal costs."""
        return {
            "exponent": self.exponent,
            "shift": COST_SHIFT,
            "phases": {name: list(self.coefficients(name)) for name in self.phases},
        }

    def __repr__(self) -> str:
        return f"CostModel({', '.join(f'{n}={c!r}' for n, c in zip(self.phases, self.costs, strict=True))})"

    def _cost(self, phase: str) -> PhaseCost:
        try:
            return self.costs[self.phases.index(phase)]
        except ValueError:
            raise ValueError(f"the cost model has no phase {phase!r}, it has {', '.join(self.phases)}") from None


def _exponent(costs: tuple[PhaseCost, ...]) -> int:
    """Power of two of the scale: 0 where whole coefficients fit, else as large as fits."""
    longest = sum(cost.at(LONGEST_POSITIONS) for cost in costs)
    if not math.isfinite(longest):
        raise ValueError("the cost model's coefficients are too large: give them in a larger unit, as GFLOPs")
    largest = math.frexp(MAX_FIXED_POINT / 2)[1] - math.frexp(longest)[1] - COST_SHIFT
    # Rounding each coefficient up may pass the limit where the sum is just below it.
    if sum(_fixed_point(cost, largest, LONGEST_POSITIONS) for cost in costs) > MAX_FIXED_POINT:
        largest -= 1
    whole = all(value.is_integer() for cost in costs for value in (cost.linear, cost.quadratic, cost.constant))
    return 0 if whole and largest >= 0 else largest


def _quantised(cost: PhaseCost, exponent: int) -> tuple[int, int, int]:
    """(linear, quadratic, constant), each rounded to nearest: ldexp is exact, and so is round on a float."""
    shift = exponent + COST_SHIFT
    linear, quadratic, constant = (
        round(math.ldexp(value, shift)) for value in (cost.linear, cost.quadratic, cost.constant)
    )
    return linear, quadratic, constant


def _fixed_point(cost: PhaseCost, exponent: int, positions: int) -> int:
    """Cost of one sequence before the shift, without int64's limit."""
    linear, quadratic, constant = _quantised(cost, exponent)
    return linear * positions + quadratic * positions**2 + constant


def _checked_coefficient(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return number
