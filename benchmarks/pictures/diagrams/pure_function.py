"""A step as a pure function: the same few inputs give the same plan on every rank, and each does its own part."""

from __future__ import annotations

from typing import Final

from benchmarks.pictures.diagrams.canvas import Canvas

_INPUTS: Final = ("index of the data", "recipe, cost model", "seed", "epoch, step", "number of ranks")
# Letters stand for samples: the only picture without figures.
_PLAN: Final = ("BE", "ADF", "CG")
_WORK: Final = ("read", "decode", "pack")
_TOP, _LANE = 70.0, 56.0


def draw_pure_function() -> Canvas:
    """Inputs on the left, the plan in the middle, what each rank does on the right."""
    height = len(_PLAN) * _LANE
    canvas = Canvas(
        _TOP + height + 62,
        "A step is a pure function",
        "Index, recipe and cost model, seed, epoch and step, and the number of ranks give a plan: which rank has which "
        "samples. Every rank computes the same plan, then reads, decodes and packs only its own samples into a batch.",
    )
    canvas.text(20, 32, "The inputs of a step", size=14, bold=True)
    canvas.text(20, 50, "equal on all ranks")
    for number, words in enumerate(_INPUTS):
        y = _TOP + number * height / len(_INPUTS)
        canvas.box(20, y, 146, height / len(_INPUTS) - 6, "ground", radius=4)
        canvas.text(30, y + 18, words)
    canvas.arrow(174, _TOP + height / 2 - 3, 208, _TOP + height / 2 - 3)

    canvas.text(216, 32, "The plan", size=14, bold=True)
    canvas.text(216, 50, "who gets which sample")
    canvas.box(216, _TOP, 174, height - 6, "ground", radius=4)
    canvas.text(414, 32, "Each rank builds its own part", size=14, bold=True)
    canvas.text(414, 50, "its own samples only")
    for rank, samples in enumerate(_PLAN):
        y = _TOP + rank * _LANE
        middle = y + (_LANE - 6) / 2
        canvas.text(228, middle + 4, f"rank {rank}")
        for number, letter in enumerate(samples):
            canvas.box(276 + number * 34, middle - 13, 28, 26, "image", radius=3)
            canvas.text(290 + number * 34, middle + 4.5, letter, anchor="middle", colour="label", bold=True)
        canvas.arrow(394, middle, 420, middle)
        for number, words in enumerate(_WORK):
            canvas.box(424 + number * 70, middle - 15, 56, 30, "ground", radius=4)
            canvas.text(452 + number * 70, middle + 4, words, anchor="middle")
            canvas.arrow(480 + number * 70, middle, 494 + number * 70, middle, width=1.2)
        canvas.box(634, middle - 15, 66, 30, "llm", radius=4)
        canvas.text(667, middle + 4.5, "batch", anchor="middle", colour="label", bold=True)
    y = _TOP + height + 20
    canvas.text(20, y, "Every rank computes the same plan alone, from the same inputs: no coordinator, no messages.")
    canvas.text(20, y + 20, "So resuming is a lookup, and any process can build any step again.")
    return canvas
