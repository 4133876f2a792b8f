"""The cost of one sequence in a phase: a position, a pair of positions, a pair inside a window, and a constant.

Floating-point operations of a transformer, from its shape and how it is trained -> PhaseCost.

Matrix products are counted, with a multiply and an add as two operations:

    stem --> layers: projections, attention, feed-forward or experts --> connector or vocabulary
    each a position; attention a pair of positions                      each times its passes

Conventions, the same for every model: causal attention counts half of the pairs of positions, a window the pairs in it;
a vocabulary counts all positions. Norms, activations, softmax, rotary embeddings and class tokens are not
counted: they grow with the width, not its square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import checked_count, checked_flag
from orchdata.balancers.costs.families import MoE, transformer_sizes

MAX_WIDTH = (1 << 31) - 1
Positions = TypeVar("Positions", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Cost of one sequence of l positions, in any unit shared by all phases.

    linear*l + quadratic*l*l + constant, and coefficient*l*min(l, width) for each attention window.

    Attributes:
        linear: cost of a position.
        quadratic: cost of a pair of positions, as in attention.
        constant: cost of a sequence of any length.
        windows: (width, coefficient) of each window: a position pairs with at most `width` positions, and a pair costs
            `coefficient`. One entry for each width, ascending.
    """

    linear: float
    quadratic: float = 0.0
    constant: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "constant"):
            object.__setattr__(self, name, checked_coefficient(getattr(self, name), f"PhaseCost.{name}"))
        object.__setattr__(self, "windows", _checked_windows(self.windows))
        if not self.linear + self.quadratic + self.constant > 0 and not self.windows:
            raise ValueError("PhaseCost needs a coefficient above 0: leave the phase out if it costs nothing")

    def phase_cost(self) -> PhaseCost:
        """Return itself: a model takes a PhaseCost or an object that returns one."""
        return self

    def __add__(self, other: PhaseCost) -> PhaseCost:
        """Return the cost of both, for a phase in which sequences pass both."""
        return PhaseCost(
            self.linear + other.linear,
            self.quadratic + other.quadratic,
            self.constant + other.constant,
            self.windows + other.windows,
        )

    def at(self, positions: Positions) -> Positions:
        """Return the cost of one sequence, or of each, before quantisation."""
        cost = self.linear * positions + self.quadratic * positions * positions + self.constant
        for width, coefficient in self.windows:  # One by one: sum() adds floats differently in each version of Python.
            cost += coefficient * positions * np.minimum(positions, width)
        return cost


def _checked_windows(windows: Any) -> tuple[tuple[int, float], ...]:
    """Return one entry for each width, ascending; those that cost nothing are left out."""
    by_width: dict[int, float] = {}
    try:
        pairs = [(width, coefficient) for width, coefficient in windows]
    except (TypeError, ValueError):
        raise ValueError(f"PhaseCost.windows must be pairs (width, coefficient), got {windows!r}") from None
    for width, coefficient in pairs:
        width = checked_count(width, "PhaseCost.windows: a width")
        if width > MAX_WIDTH:
            raise ValueError(f"PhaseCost.windows: a width must be at most {MAX_WIDTH:,}, got {width:,}")
        value = checked_coefficient(coefficient, "PhaseCost.windows: a coefficient")
        by_width[width] = by_width.get(width, 0.0) + value
    return tuple((width, by_width[width]) for width in sorted(by_width) if by_width[width] > 0)


def checked_coefficient(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return number


Recompute = Literal["full", "selective"]


@dataclass(frozen=True, slots=True)
class TransformerCost:
    """Floating-point operations of a transformer in training, from its shape.

    Forward, for each layer and a sequence of l positions, with h = hidden, q = heads*head_dim, r = kv_heads/heads:

    - projections: queries and output 4*h*q, keys and values 4*h*q*r, for each position;
    - feed-forward: 4*h*ffn, or 6*h*ffn when gated, for each position; with `moe` as wide as the experts that a position
      passes, and a router of 2*h*num_experts;
    - attention: scores and weighted sum 4*q for each pair of positions: l*l of them, half of that when causal. In a
      window: l*min(l, window) pairs where the sequence is cut into windows (not causal); where the window slides
      (causal), each position with those up to window - 1 before it. Two terms approximate the latter: exact up to
      `window` positions, at three times as many and far above, at most 1/8 too many in between.

    - cross-attention, with `cross_positions` of an encoder: queries and output 4*h*q and 4*q*cross_positions for each
      position, and for each sequence the encoder's keys and values, 4*h*q*cross_positions.

    A vocabulary adds 2*h*vocab for each position, stem and connector 2 for each multiply-accumulate.

    Times the passes of training:

    | | weights | attention |
    | --- | --- | --- |
    | forward | 1 | 1 |
    | gradients of inputs (`trainable` or `input_gradients`) | 1 | 2, or 2.5 with `flash` |
    | gradients of weights (`trainable`) | 1 | |
    | `recompute="full"`, layers only | 1 | 1 |
    | `recompute="selective"` | | 1 |

    Without gradients nothing is recomputed. The stem has no gradients of inputs; the connector's first products have
    them if the phase has any, the encoder's keys and values with `cross_gradients`.

    Attributes:
        hidden: width of the residual stream.
        layers: number of layers.
        ffn: width of the feed-forward.
        heads: attention heads; needed with kv_heads and head_dim.
        kv_heads: heads of keys and values (grouped-query attention); all of them by default.
        vocab: size of the output vocabulary; none for an encoder.
        causal: each position attends only to those before it, and kernels skip the rest.
        gated: the feed-forward and experts have a gate (SwiGLU and similar).
        trainable: weights are trained, or this share of them. A frozen phase is forward only, unless input_gradients.
        recompute: activations are recomputed in the backward pass: of whole layers ("full" or True), or of the
            attention alone ("selective").
        head_dim: width of one head; by default heads together are as wide as the residual stream.
        window: positions of an attention window; by default attention is full.
        window_layers: layers with the window, the others have full attention; all of them by default.
        moe: experts in place of the feed-forward.
        stem_macs: multiply-accumulates a position on its way in: patch embedding, convolutions.
        connector_macs: multiply-accumulates a position on its way out: merger, projector.
        connector_first_macs: those of them in products directly after the phase.
        cross_positions: positions of an encoder that each layer also attends to, the same for every sequence.
        cross_gradients: gradients continue into that encoder, if this phase has any.
        input_gradients: gradients flow through a frozen phase, because its inputs are trained (or it has adapters).
        connector_trainable: the connector is trained, or this share of it, also if the phase is frozen.
        flash: the backward pass recomputes attention scores, as fused kernels do (FlashAttention, torch's sdpa).
    """

    hidden: int
    layers: int
    ffn: int
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    causal: bool = False
    gated: bool = False
    trainable: bool | float = True
    recompute: bool | Recompute = False
    head_dim: int | None = None
    window: int | None = None
    window_layers: int | None = None
    moe: MoE | None = None
    stem_macs: float = 0.0
    connector_macs: float = 0.0
    connector_first_macs: float = 0.0
    cross_positions: int | None = None
    cross_gradients: bool = True
    input_gradients: bool = False
    connector_trainable: bool | float = True
    flash: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "ffn"):
            self._set(name, checked_count(getattr(self, name), f"TransformerCost.{name}"))
        for name in ("heads", "kv_heads", "vocab", "head_dim", "window", "cross_positions"):
            if getattr(self, name) is not None:
                self._set(name, checked_count(getattr(self, name), f"TransformerCost.{name}"))
        if self.window_layers is not None:
            self._set("window_layers", checked_count(self.window_layers, "TransformerCost.window_layers", least=0))
        for name in ("causal", "gated", "input_gradients", "flash", "cross_gradients"):
            self._set(name, checked_flag(getattr(self, name), f"TransformerCost.{name}"))
        for name in ("trainable", "connector_trainable"):
            self._set(name, _checked_share(getattr(self, name), f"TransformerCost.{name}"))
        for name in ("stem_macs", "connector_macs", "connector_first_macs"):
            self._set(name, checked_coefficient(getattr(self, name), f"TransformerCost.{name}"))
        if self.recompute not in (False, True, "full", "selective"):
            raise ValueError(
                f"TransformerCost.recompute must be True, False, 'full' or 'selective', got {self.recompute!r}"
            )
        self._check_together()

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | Any, phase: str | None = None, **sizes: Any) -> TransformerCost:
        """Return the cost of one phase of a model, from its Hugging Face config; transformers itself is not needed.

        `TransformerCost.from_config(AutoConfig.from_pretrained(name), "image", trainable=False)`. The config may
        be of the whole model or of the tower alone; a known merger or projector that only the whole config describes is
        counted with the phase before it. Known families have their own rules, other models are read by the usual keys.

        Args:
            config: a dict, such as a config.json, or an object with `to_dict`. A config.json may leave out defaults of
                its class: then give the object.
            phase: "llm", "image" or "audio"; may be left out if the config describes only one.
            sizes: attributes of TransformerCost that the config does not have (trainable, recompute, ...), or that
                replace those of the config.

        Raises:
            ValueError: the config has no such phase, lacks a size, or describes layers that this formula lacks.
        """
        return cls(**transformer_sizes(config, phase, sizes))

    def phase_cost(self) -> PhaseCost:
        """Return coefficients in operations for each position and each pair of positions.

        Raises:
            ValueError: they exceed a float.
        """
        try:
            return PhaseCost(self._linear(), *self._attention())
        except OverflowError:
            raise ValueError(f"{self} costs more than a float can represent: check its widths") from None

    def _linear(self) -> float:
        """Operations for each position."""
        passes, again = 1 + self._differentiated + self.trainable, self._again
        layers = self._layers()
        head = 2 * self.hidden * (self.vocab or 0)
        stem = 2 * self.stem_macs * (1 + self.trainable)
        return float(passes * (layers + head) + again * layers + stem + self._connector() + self._cross_attention())

    def _connector(self) -> float:
        """Operations for each position after the layers."""
        others = 1 + self.connector_trainable + max(self._differentiated, bool(self.connector_trainable))
        first = 1 + self.connector_trainable + self._differentiated
        macs = self.connector_macs - self.connector_first_macs
        return 2 * (macs * others + self.connector_first_macs * first)

    def _cross_attention(self) -> float:
        """Operations for each position in attention to an encoder: its projections, and pairs of positions."""
        if not self.cross_positions:
            return 0.0
        projections = 4 * self.hidden * self._width * (1 + self._differentiated + self.trainable + self._again)
        return self.layers * (projections + 4 * self._width * self.cross_positions * self._attention_passes)

    def _keys_and_values(self) -> float:
        """Operations for each sequence in the keys and values of an encoder's positions."""
        passes = 1 + self._differentiated * self.cross_gradients + self.trainable + self._again
        return float(passes * self.layers * 4 * self.hidden * self._width * (self.cross_positions or 0))

    def _layers(self) -> float:
        """Operations for each position in all layers, forward, without attention."""
        shared = self.kv_heads / self.heads if self.heads and self.kv_heads else 1.0
        projections = 4 * self.hidden * self._width * (1 + shared)
        ffn = (6 if self.gated else 4) * self.hidden
        if self.moe is None:
            return self.layers * (projections + ffn * self.ffn)
        dense, experts = self.moe.dense_layers, self.moe.top_k * self.moe.ffn + self.moe.shared_ffn
        router = 2 * self.hidden * self.moe.num_experts
        return dense * (projections + ffn * self.ffn) + (self.layers - dense) * (projections + ffn * experts + router)

    def _attention(self) -> tuple[float, float, tuple[tuple[int, float], ...]]:
        """Operations for each pair of positions: (quadratic, constant, windows)."""
        passes = self._attention_passes
        pair = (2 if self.causal else 4) * self._width
        windowed = self._window_layers
        quadratic = float(passes * (self.layers - windowed) * pair)
        in_windows = float(passes * windowed * pair)
        sequence = self._keys_and_values()
        if not self.window or not windowed:
            return quadratic, sequence, ()
        if not self.causal:
            return quadratic, sequence, ((self.window, in_windows),)
        # A sliding window is approximated by two windows: l*l - (l - w)**2 pairs above w, within 1/8 (see the class).
        near, far = -(-3 * self.window // 2), 6 * self.window
        return quadratic, sequence, ((near, in_windows * 8 / 9), (far, in_windows / 9))

    @property
    def _differentiated(self) -> int:
        """Whether gradients of inputs are computed."""
        return int(bool(self.trainable) or self.input_gradients)

    @property
    def _again(self) -> int:
        """How often the layers are recomputed."""
        return self._differentiated if self.recompute in (True, "full") else 0

    @property
    def _attention_passes(self) -> float:
        return 1.0 + self._differentiated * ((2.5 if self.flash else 2.0) + bool(self.recompute))

    @property
    def _width(self) -> int:
        return self.heads * self.head_dim if self.heads and self.head_dim else self.hidden

    @property
    def _window_layers(self) -> int:
        if self.window is None:
            return 0
        return self.layers if self.window_layers is None else self.window_layers

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.connector_first_macs > self.connector_macs:
            raise ValueError(
                f"TransformerCost.connector_first_macs={self.connector_first_macs} must be at most"
                f" connector_macs={self.connector_macs}"
            )
        if self.kv_heads is not None and (self.heads is None or self.heads % self.kv_heads):
            raise ValueError(f"TransformerCost.kv_heads={self.kv_heads} must divide heads, got heads={self.heads}")
        if self.head_dim is not None and self.heads is None:
            raise ValueError(f"TransformerCost.head_dim={self.head_dim} needs heads, got heads=None")
        if self.window_layers is not None and (self.window is None or self.window_layers > self.layers):
            raise ValueError(
                f"TransformerCost.window_layers={self.window_layers} needs a window and at most layers={self.layers},"
                f" got window={self.window}"
            )
        if self.moe is not None and self.moe.dense_layers > self.layers:
            raise ValueError(f"MoE.dense_layers={self.moe.dense_layers} must be at most layers={self.layers}")


def _checked_share(value: Any, name: str) -> bool | float:
    """Return a flag, or a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return checked_flag(value, name)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be True, False or a share from 0 to 1, got {value!r}")
    return float(value)
