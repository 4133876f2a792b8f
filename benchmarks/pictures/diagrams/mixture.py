"""A mixture in two stages: the share of each source in each step, and the weights that were planned."""

from __future__ import annotations

from typing import Final

import numpy as np

from benchmarks.pictures.diagrams.canvas import Canvas, Fill
from benchmarks.pictures.drawn_plans import MIXTURE, SOURCES, STAGES
from benchmarks.report.results import numbers, titled
from orchdata.bench import Report

_FILLS: Final[dict[str, Fill]] = {"chat": "llm", "images": "image", "speech": "audio"}
_LEFT, _RIGHT, _TOP, _HEIGHT = 68.0, 700.0, 78.0, 240.0


def draw_mixture(stored: Report) -> Canvas:
    """Stacked columns, one a step; lines are the planned weights."""
    table = titled(stored, MIXTURE)
    shares = {name: numbers(table, name) for name in SOURCES}
    steps = len(table.rows)
    stages = [(0, steps // 2), (steps // 2, steps)]
    off = max(
        float(np.abs(shares[name][first:last] - weights[name]).max())
        for (first, last), weights in zip(stages, STAGES, strict=True)
        for name in SOURCES
    )
    canvas = Canvas(
        _TOP + _HEIGHT + 78,
        "A mixture of three sources in two stages",
        f"Stacked columns of {steps} steps with the share of tokens of chat, images and speech. Lines are the planned "
        f"weights, which change in the middle. No share is further than {100 * off:.1f} points from its weight.",
    )
    canvas.text(20, 30, "Share of the tokens of each step", size=14, bold=True)

    def x_of(step: float) -> float:
        return _LEFT + step * (_RIGHT - _LEFT) / steps

    width = x_of(1) - x_of(0)
    for step in range(steps):
        below = 0.0
        for name in SOURCES:
            share = float(shares[name][step])
            canvas.box(x_of(step) + 1, _TOP + below * _HEIGHT, width - 2, share * _HEIGHT, _FILLS[name], radius=0)
            below += share
    for number, ((first, last), weights) in enumerate(zip(stages, STAGES, strict=True)):
        canvas.text(x_of(first) + 6, _TOP - 14, f"stage {number + 1}: steps {first} to {last - 1}")
        below = 0.0
        for name in SOURCES:
            middle = _TOP + (below + weights[name] / 2) * _HEIGHT
            drawn = float(shares[name][first:last].mean())
            words = f"{name}: planned {weights[name]:.0%}, drawn {drawn:.1%}"
            canvas.plate((x_of(first) + x_of(last)) / 2, middle, words)
            below += weights[name]
            if below < 0.999:
                canvas.line(
                    x_of(first), _TOP + below * _HEIGHT, x_of(last), _TOP + below * _HEIGHT, colour="label", width=2
                )
    canvas.line(x_of(steps // 2), _TOP - 28, x_of(steps // 2), _TOP + _HEIGHT, colour="ink", width=1.5)
    for share in (0, 0.5, 1):
        canvas.text(_LEFT - 8, _TOP + (1 - share) * _HEIGHT + 4, f"{share:.0%}", anchor="end")
    for step in range(0, steps, 10):
        canvas.text(x_of(step + 0.5), _TOP + _HEIGHT + 18, str(step), anchor="middle")
    canvas.text((_LEFT + _RIGHT) / 2, _TOP + _HEIGHT + 36, "step", anchor="middle")
    y = _TOP + _HEIGHT + 60
    canvas.box(_LEFT, y - 13, 24, 9, "llm", radius=0)
    canvas.box(_LEFT, y - 4, 24, 9, "image", radius=0)
    canvas.line(_LEFT, y - 4, _LEFT + 24, y - 4, colour="label", width=2)
    canvas.text(_LEFT + 32, y, f"planned weights; no step differs from them by more than {100 * off:.1f} points")
    return canvas
