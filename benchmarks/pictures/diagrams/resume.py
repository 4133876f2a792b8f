"""A run on 2 ranks that is stopped and resumed on 4: the same global batches in the same order."""

from __future__ import annotations

import numpy as np

from benchmarks.pictures.diagrams.canvas import Canvas
from benchmarks.pictures.drawn_plans import RESUME_RANKS, RESUMED
from benchmarks.report.results import numbers, titled
from orchdata.bench import Report

_LEFT, _STEP, _CELL, _ROW = 74.0, 94.0, 21.5, 22.0
_ORDER_TOP, _RANKS_TOP = 68.0, 162.0


def draw_resume(stored: Report) -> Canvas:
    """A column a step: its global batch above, its samples on their ranks below."""
    table = titled(stored, RESUMED)
    step, sample = numbers(table, "step").astype(np.int64), numbers(table, "sample").astype(np.int64)
    ranks = {size: numbers(table, f"on {size} ranks").astype(np.int64) for size in RESUME_RANKS}
    steps = int(step.max()) + 1
    stopped = steps // 2
    before, after = RESUME_RANKS
    bottom = _RANKS_TOP + max(RESUME_RANKS) * (_ROW + 4)
    resumed_left = _LEFT + stopped * _STEP + 60
    canvas = Canvas(
        bottom + 14,
        f"A run on {before} ranks, stopped after {stopped} steps and resumed on {after} ranks",
        f"{steps} steps with a global batch of 8 samples each, the same with any number of ranks. Steps 0 to "
        f"{stopped - 1} share them out over {before} ranks, steps {stopped} to {steps - 1} over {after}. Each of the "
        f"{len(sample)} samples comes once.",
    )
    canvas.text(20, 30, "The order", size=14, bold=True)
    canvas.text(124, 30, "batches of 8 numbered samples, the same on any number of ranks; each sample comes once")
    canvas.text(20, _RANKS_TOP - 24, f"Begun on {before} ranks", size=14, bold=True)
    canvas.text(resumed_left - 46, _RANKS_TOP - 24, f"Resumed on {after} ranks", size=14, bold=True)

    def samples(numbers: list[int], x: float, y: float) -> None:
        for index, number in enumerate(numbers):
            left, top = x + index % 4 * _CELL, y + index // 4 * _ROW
            canvas.box(left, top, _CELL - 2, _ROW - 3, "llm" if step[number] < stopped else "image")
            canvas.text(left + (_CELL - 2) / 2, top + 14, str(sample[number]), anchor="middle", colour="label")

    for number in range(steps):
        is_resumed = number >= stopped
        x = resumed_left + (number - stopped) * _STEP if is_resumed else _LEFT + number * _STEP
        mine, size = np.flatnonzero(step == number), after if is_resumed else before
        canvas.text(x, _ORDER_TOP - 8, f"step {number}")
        samples(mine.tolist(), x, _ORDER_TOP)
        for rank in range(size):
            y = _RANKS_TOP + rank * (_ROW + 4)
            samples(mine[ranks[size][mine] == rank].tolist(), x, y)
            if number in (0, stopped):
                canvas.text(x - 8, y + 14, f"rank {rank}", anchor="end")
    x = resumed_left - 58
    canvas.line(x, _RANKS_TOP - 36, x, bottom, colour="ink", width=1.5, dash="5 4")
    canvas.text(x - 10, bottom - 6, f"stopped; the state says: step {stopped}", anchor="end")
    return canvas
