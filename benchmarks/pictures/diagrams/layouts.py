"""The same samples in three layouts: padded rows, one packed sequence, microbatches of one length."""

from __future__ import annotations

from string import ascii_uppercase

import numpy as np

from benchmarks.pictures.diagrams.canvas import Canvas
from benchmarks.pictures.drawn_plans import LAYOUTS, LENGTH
from benchmarks.report.results import figure, numbers, titled
from orchdata.bench import Report

_LEFT, _ROOM = 20.0, 680.0


def draw_layouts(stored: Report) -> Canvas:
    """Lengths are to one scale in all three."""
    table = titled(stored, LAYOUTS)
    tokens: list[int] = numbers(table, "tokens").astype(np.int64).tolist()
    microbatch: list[int] = numbers(table, "microbatch of one length").astype(np.int64).tolist()
    padding = {name: figure(stored, f"share of padding, {name}") for name in ("padded", "packed", "one length")}
    scale, row = _ROOM / sum(tokens), 19.0
    bins = max(microbatch) + 1
    second = 48 + len(tokens) * row + 32
    third = second + 14 + row + 32
    canvas = Canvas(
        third + 14 + bins * row + 18,
        "Eight samples in three layouts: padded, packed, and microbatches of one length",
        f"Eight samples of {min(tokens):,} to {max(tokens):,} tokens. In padded rows {padding['padded']:.0%} of the "
        f"area is padding, in one packed sequence nothing, in {bins} microbatches of {LENGTH:,} tokens "
        f"{padding['one length']:.0%}.",
    )

    def sample(x: float, y: float, number: int) -> float:
        """Draw a sample; returns where it ends."""
        width = tokens[number] * scale
        canvas.box(x, y, width, row - 3, "llm")
        canvas.text(x + width / 2, y + 12.5, ascii_uppercase[number], anchor="middle", colour="label")
        return x + width

    def heading(y: float, name: str, words: str, share: str) -> None:
        canvas.text(_LEFT, y, name, size=14, bold=True)
        canvas.text(_LEFT + 108, y, words)
        canvas.text(_LEFT + _ROOM, y, f"padding: {share}", size=14, bold=True, anchor="end")

    heading(34, "Padded", "one row a sample, each as long as the longest", f"{padding['padded']:.0%}")
    longest = _LEFT + max(tokens) * scale
    for number in range(len(tokens)):
        y = 48 + number * row
        end = sample(_LEFT, y, number)
        if longest - end >= 0.5:
            canvas.box(end, y, longest - end, row - 3, "hatch")

    heading(second, "Packed", "one sample after another, no rows", "none")
    x = _LEFT
    for number in range(len(tokens)):
        x = sample(x, second + 14, number)

    heading(third, "One length", f"each microbatch has {LENGTH:,} tokens", f"{padding['one length']:.0%}")
    for index in range(bins):
        x, y = _LEFT, third + 14 + index * row
        for number in [number for number, of in enumerate(microbatch) if of == index]:
            x = sample(x, y, number)
        canvas.box(x, y, _LEFT + LENGTH * scale - x, row - 3, "hatch")
    canvas.legend(_LEFT + 340, 48 + 4 * row, (("llm", "tokens of a sample", 160), ("hatch", "padding", 0)))
    return canvas
