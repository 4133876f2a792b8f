"""Loads of ranks before and after balancing: of one step in its phases, and of micro-steps as a time line."""

from __future__ import annotations

from typing import Final

from benchmarks.pictures.diagrams.canvas import Canvas, Fill
from benchmarks.pictures.drawn_plans import MICRO_STEPS, STEP
from benchmarks.report.results import figure, numbers, titled
from orchdata.bench import Report

_PHASES: Final[dict[Fill, str]] = {"image": "image encoder", "audio": "audio encoder", "llm": "LLM"}
_WAYS: Final = {"unbalanced": "Before: samples dealt out in turn", "balanced": "After: the same samples, balanced"}
_LEFT: Final = 74.0  # of the bars
_WAITING: Final = "waits for the slowest rank"


def draw_step(stored: Report) -> Canvas:
    """One step: a column a phase, a row a rank; a phase ends with its slowest rank."""
    table = titled(stored, STEP)
    ranks, row, gap, top = len(table.rows), 16.0, 34.0, 82.0
    panel = ranks * row + 92
    widest = {phase: max(float(numbers(table, f"{phase}, {way}").max()) for way in _WAYS) for phase in _PHASES}
    scale = (700 - _LEFT - 2 * gap) / sum(widest.values())
    waits = {way: figure(stored, f"share of the step that ranks wait, {way}") for way in _WAYS}
    canvas = Canvas(
        2 * panel + 44,
        "One step on 8 ranks, before and after balancing",
        "Bars of the load of 8 ranks in the image encoder, the audio encoder and the LLM. Before balancing bars "
        f"differ, and ranks wait {waits['unbalanced']:.0%} of the step. After it they are equal, and ranks wait "
        f"{waits['balanced']:.1%}.",
    )
    for number, (way, words) in enumerate(_WAYS.items()):
        y = number * panel + top
        _head(canvas, y - 54, words, waits[way])
        for rank in range(ranks):
            canvas.text(_LEFT - 8, y + rank * row + 11, f"rank {rank}", anchor="end")
        x = _LEFT
        for phase, name in _PHASES.items():
            loads = numbers(table, f"{phase}, {way}")
            canvas.text(x, y - 24, name)
            canvas.text(x, y - 8, f"slowest: {loads.max():.2f} x mean")
            for rank, load in enumerate(loads.tolist()):
                _bar(canvas, x, y + rank * row, load * scale, (float(loads.max()) - load) * scale, phase, row - 3)
            x += widest[phase] * scale + gap
    _legend(canvas, 2 * panel + 22, tuple(_PHASES))
    return canvas


def draw_micro_steps(stored: Report) -> Canvas:
    """Gradient accumulation: a time line of three micro-steps, each an encoder and the LLM."""
    table = titled(stored, MICRO_STEPS)
    ranks, row, top = len(table.rows), 20.0, 76.0
    panel = ranks * row + 88
    # A section is a phase of a micro-step, such as "image 0".
    sections = [name.removesuffix(", balanced") for name in table.columns if name.endswith(", balanced")]
    waits = {way: figure(stored, f"share of the micro-steps that ranks wait, {way}") for way in _WAYS}
    lengths = {way: sum(float(numbers(table, f"{section}, {way}").max()) for section in sections) for way in _WAYS}
    sooner = 1 - lengths["balanced"] / lengths["unbalanced"]
    scale = (700 - _LEFT) / max(lengths.values())
    canvas = Canvas(
        2 * panel + 42,
        "Gradient accumulation: three micro-steps on 4 ranks, before and after balancing",
        "Time lines of 4 ranks in three micro-steps, each with an image encoder and the LLM. Before balancing ranks "
        f"wait {waits['unbalanced']:.0%} of the step. After it they wait {waits['balanced']:.0%}, and the step ends "
        f"{sooner:.0%} sooner.",
    )
    for number, (way, words) in enumerate(_WAYS.items()):
        y, x = number * panel + top, _LEFT
        _head(canvas, y - 44, words, waits[way])
        for rank in range(ranks):
            canvas.text(_LEFT - 8, y + rank * row + 13, f"rank {rank}", anchor="end")
        for section in sections:
            phase, micro_step = section.split()
            loads = numbers(table, f"{section}, {way}")
            slowest = float(loads.max())
            if phase == "image":  # the first of a micro-step
                canvas.line(x, y - 22, x, y + ranks * row + 2, colour="ink")
                canvas.text(x + 5, y - 10, f"micro-step {int(micro_step) + 1}")
            for rank, load in enumerate(loads.tolist()):
                fill: Fill = "image" if phase == "image" else "llm"
                _bar(canvas, x, y + rank * row, load * scale, (slowest - load) * scale, fill, row - 4)
            x += slowest * scale
        canvas.line(x, y - 22, x, y + ranks * row + 2, colour="ink")
        if way == "balanced":
            canvas.text(x + 12, y + 2 * row, f"ends {sooner:.0%} sooner", size=14, bold=True)
    _legend(canvas, 2 * panel + 22, ("image", "llm"))
    return canvas


def _bar(canvas: Canvas, x: float, y: float, width: float, wait: float, fill: Fill, height: float) -> None:
    """What a rank does, then what it waits; none of them where it is less than half a pixel."""
    if width >= 0.5:
        canvas.box(x, y, width, height, fill)
    if wait >= 0.5:
        canvas.box(x + width, y, wait, height, "hatch")


def _head(canvas: Canvas, y: float, words: str, wait: float) -> None:
    share = f"{wait:.0%}" if wait >= 0.01 else f"{wait:.1%}"
    canvas.text(20, y, words, size=14, bold=True)
    canvas.text(700, y, f"ranks wait {share} of the step", size=14, bold=True, anchor="end")


def _legend(canvas: Canvas, y: float, phases: tuple[Fill, ...]) -> None:
    entries: list[tuple[Fill, str, float]] = [(phase, _PHASES[phase], 56 + 7 * len(_PHASES[phase])) for phase in phases]
    canvas.legend(_LEFT, y, (*entries, ("hatch", _WAITING, 0)))
