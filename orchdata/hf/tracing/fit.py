"""Products at several lengths -> operations of a sequence: a position, a pair of positions, pairs inside of windows.

All in integers and fractions of them, so that a model costs the same to the bit on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from orchdata.hf.tracing.mode import Product

# How far what was found may be from what was counted.
WITHIN: Final = Fraction(1, 20)
# How far pairs may be from those of a window, which some take a position wider.
ALIKE: Final = Fraction(3, 100)
# Products of attention stand this near to their softmax.
NEAR: Final = 8


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of a sequence of l positions: linear*l + quadratic*l*l + constant, and in windows as a PhaseCost.

    Attributes:
        windows: (width, coefficient of l*min(l, width)).
    """

    linear: Fraction = Fraction(0)
    quadratic: Fraction = Fraction(0)
    constant: Fraction = Fraction(0)
    windows: tuple[tuple[int, Fraction], ...] = ()

    def __add__(self, other: Operations) -> Operations:
        return Operations(
            self.linear + other.linear,
            self.quadratic + other.quadratic,
            self.constant + other.constant,
            self.windows + other.windows,
        )

    def at(self, length: int) -> Fraction:
        inside = sum((each * length * min(length, width) for width, each in self.windows), Fraction(0))
        return self.linear * length + self.quadratic * length * length + self.constant + inside


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a module at some length: operations on the pairs that attend, and on all pairs."""

    seen: Fraction = Fraction(0)
    all: int = 0
    has_softmax: bool = False

    def __add__(self, other: Attention) -> Attention:
        return Attention(self.seen + other.seen, self.all + other.all, self.has_softmax or other.has_softmax)


@dataclass(frozen=True, slots=True)
class Run:
    """The products of one length: those with weights, and attention by module."""

    length: int
    weights: Sequence[Product]
    attention: Mapping[str, Attention] = field(default_factory=dict)


def run_of(length: int, products: Sequence[Product]) -> Run:
    """Return products at a length, with those of attention separated."""
    _find_attention(products)
    attention: dict[str, Attention] = {}
    for each in products:
        if each.weight or not each.flops:
            continue
        seen, total = each.pairs or (1, 1)
        added = Attention(Fraction(each.flops * seen, total), each.flops, each.pairs is not None)
        attention[each.module] = attention.get(each.module, Attention()) + added
    return Run(length, [each for each in products if each.weight], attention)


def _find_attention(products: Sequence[Product]) -> None:
    """Tell each product of attention which pairs attend: scores come before a softmax, weighted sums after it."""
    for number, softmax in enumerate(products):
        if softmax.flops or softmax.pairs is None:
            continue
        before = products[max(0, number - NEAR) : number][::-1]
        scores = next((each for each in before if _fits(each, each.shape, softmax.shape)), None)
        after = products[number + 1 : number + 1 + NEAR]
        sums = next((each for each in after if _fits(each, each.factor, softmax.shape)), None)
        for each in (scores, sums):
            if each is not None:
                each.pairs = softmax.pairs


def _fits(product: Product, pairs: tuple[int, ...], softmax: tuple[int, ...]) -> bool:
    """Return whether a product has the pairs of a softmax, which may have one more column (a sink)."""
    if product.weight or not product.flops or len(pairs) < 2:
        return False
    return pairs[-2] == softmax[-2] and pairs[-1] in (softmax[-1], softmax[-1] - 1)


def fit(lengths: Sequence[int], counts: Sequence[int | Fraction], what: str) -> Operations:
    """Operations that are counts at lengths; of two lengths without a constant.

    Raises ValueError where no coefficients of at least 0 come within `WITHIN` of all counts.
    """
    last = Fraction(counts[-1])
    if not last:
        return Operations()
    for fitted in (_quadratic(lengths, counts), _linear(lengths, counts), Operations(last / lengths[-1])):
        if fitted is None:
            continue
        pairs = zip(lengths, counts, strict=True)
        if all(abs(fitted.at(length) - count) <= WITHIN * count for length, count in pairs):
            return fitted
    shown = ", ".join(f"{count} at {length}" for length, count in zip(lengths, counts, strict=True))
    raise ValueError(f"operations of {what} follow no line or parabola of the length: {shown}")


def _quadratic(lengths: Sequence[int], counts: Sequence[int | Fraction]) -> Operations | None:
    if len(lengths) == 2:  # and nothing at length 0
        lengths, counts = (0, *lengths), (0, *counts)
    (x, y, z), (a, b, c) = ([each[0], each[len(each) // 2], each[-1]] for each in (lengths, counts))
    slope, second = Fraction(b - a) / (y - x), Fraction(c - b) / (z - y)
    curve = (second - slope) / (z - x)
    linear = slope - curve * (x + y)
    constant = a - linear * x - curve * x * x
    return Operations(linear, curve, constant) if min(linear, curve, constant) >= 0 else None


def _linear(lengths: Sequence[int], counts: Sequence[int | Fraction]) -> Operations | None:
    slope = Fraction(counts[-1] - counts[0]) / (lengths[-1] - lengths[0])
    constant = counts[0] - slope * lengths[0]
    return Operations(slope, Fraction(0), Fraction(constant)) if min(slope, constant) >= 0 else None


def fit_encoder(lengths: Sequence[int], counts: Sequence[Fraction], what: str) -> Operations:
    """Attention of a module of an encoder: of all pairs, or in windows that cut the sequence."""
    if not counts[-1]:
        return Operations()
    pair, inside = counts[0] / lengths[0] ** 2, counts[-1] / lengths[-1]
    is_window = counts[-2] / lengths[-2] == inside and counts[1] / lengths[1] ** 2 == pair
    if is_window and pair:
        return Operations(windows=((max(1, round(inside / pair)), pair),))
    return fit(lengths, counts, what)


def fit_decoder(
    lengths: Sequence[int], attention: Sequence[Attention], windows: Mapping[int, int], what: str
) -> tuple[Operations, Operations]:
    """Attention of a module of a decoder: (pairs that attend, all pairs, of which a window is of those inside of it).

    Args:
        windows: width of a window as it was run -> as the config has it. The last length is longer than any.
    """
    length, last = lengths[-1], attention[-1]
    if not last.all:
        return Operations(), Operations()
    if not last.has_softmax:  # products of the model's own: states, and attention without a softmax
        fitted = fit(lengths[1:], [each.all for each in attention[1:]], what)
        return fitted, fitted
    pair = Fraction(last.all, length * length)
    for width, real in windows.items():
        if _alike(last, length, _sliding(length, width)):
            near, far = -(-3 * real // 2), 6 * real
            return Operations(windows=((near, pair * 4 / 9), (far, pair / 18))), Operations(windows=((real, pair),))
        if _alike(last, length, _chunked(length, width)):
            return Operations(windows=((real, pair / 2),)), Operations(windows=((real, pair),))
    if _alike(last, length, length * (length + 1) // 2):
        return Operations(quadratic=pair / 2), Operations(quadratic=pair)
    fitted = fit(lengths[1:], [each.seen for each in attention[1:]], what)
    return fitted, fit(lengths[1:], [each.all for each in attention[1:]], what)


def _alike(attention: Attention, length: int, pairs: int) -> bool:
    return abs(attention.seen / attention.all - Fraction(pairs, length * length)) <= ALIKE * pairs / length**2


def _sliding(length: int, width: int) -> int:
    return width * (width + 1) // 2 + (length - width) * width


def _chunked(length: int, width: int) -> int:
    whole, rest = divmod(length, width)
    return (whole * width * (width + 1) + rest * (rest + 1)) // 2


def total(parts: Sequence[Operations]) -> Operations:
    """Return the sum of parts. Equal parts are counted first, and each is multiplied by its count."""
    counts: dict[Any, int] = {}
    for each in parts:
        counts[each] = counts.get(each, 0) + 1
    summed = Operations()
    for each, count in counts.items():
        windows = tuple((width, coefficient * count) for width, coefficient in each.windows)
        summed += Operations(each.linear * count, each.quadratic * count, each.constant * count, windows)
    merged: dict[int, Fraction] = {}
    for width, coefficient in summed.windows:
        merged[width] = merged.get(width, Fraction(0)) + coefficient
    return Operations(summed.linear, summed.quadratic, summed.constant, tuple(sorted(merged.items())))
