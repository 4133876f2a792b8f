"""What is on each picture: a stored report -> marks on a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.pictures.diagrams import diagrams
from benchmarks.pictures.loss_curves import LARGEST_DIFFERENCE, RANKS, curve_name
from benchmarks.pictures.svg import COLOURS, svg_of
from benchmarks.report.results import numbers, read_report
from orchdata.bench import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# phase -> name, colour and hatching: distinct without colours too.
_PHASES: Final = {
    "image": ("image encoder", COLOURS[1], ""),
    "audio": ("audio encoder", COLOURS[2], "xxxx"),
    "llm": ("LLM", COLOURS[3], "////"),
}
_MARKS: Final = ("o", "s", "^", "D")
_SMALLEST: Final = 1e-9
"""Differences are drawn as this where they are less, or none."""


def pictures() -> Mapping[str, Callable[[], bytes]]:
    """File name -> what makes its bytes."""
    return {
        "loads.svg": lambda: svg_of(
            lambda figure: draw_loads(figure, read_report("loads")), 9.6, 3.8, "Loads of 16 ranks in one step"
        ),
        "loss_curves.svg": lambda: svg_of(
            lambda figure: draw_curves(figure, read_report("loss_curves")),
            9.6,
            3.4,
            "Loss curves on 1, 2, 4 and 8 ranks",
        ),
        **diagrams(),
    }


def draw_loads(figure: Figure, stored: Report) -> None:
    """Time lines of ranks: phases follow each other, and each ends with its slowest rank."""
    (table,) = stored.tables
    both = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, way in zip(both, ("unbalanced", "balanced"), strict=True):
        loads = {phase: numbers(table, f"{phase}, {way}") for phase in _PHASES}
        step = _draw_step(axes, loads)
        waits = 1 - 1 / step
        axes.set_title(f"{way}: ranks wait {waits:.0%} of this step", loc="left", fontsize=11)
        axes.set_xlabel("time of the step by the cost model (1: all ranks even)")
        axes.axvline(step, color="black", lw=1, ls="--")
    both[0].set_ylabel("rank")
    ranks = len(table.rows)
    both[0].set_yticks(range(ranks))
    both[0].set_ylim(ranks - 0.4, -0.6)  # the first rank is on top
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)


def _draw_step(axes: Axes, loads: Mapping[str, NDArray[np.float64]]) -> float:
    """Draw bars of all phases, and of waiting; returns when the last phase ends."""
    start = 0.0
    for phase, load in loads.items():
        name, colour, hatch = _PHASES[phase]
        ranks, end = np.arange(len(load)), start + float(load.max())
        axes.barh(ranks, load, left=start, height=0.8, color=colour, hatch=hatch, edgecolor="white", lw=0, label=name)
        axes.barh(ranks, end - start - load, left=start + load, height=0.8, color="#dddddd", lw=0)
        start = end
    axes.barh(0, 0, color="#dddddd", label="waiting for the slowest rank")  # for the legend, once
    return start


def draw_curves(figure: Figure, stored: Report) -> None:
    """All loss curves, one over another, and how far each is from that of one rank."""
    (table,) = stored.tables
    curves, distances = figure.subplots(1, 2)
    first = numbers(table, curve_name(1, "unbalanced"))
    steps = np.arange(len(first))
    series = [(ranks, way) for ranks in RANKS for way in ("unbalanced", "balanced")]
    for number, (ranks, way) in enumerate(series):
        colour, mark = COLOURS[number // 2], _MARKS[number // 2]
        fill = colour if way == "balanced" else "white"
        losses = numbers(table, curve_name(ranks, way))
        # Curves lie on one another, so each has its marks at other steps.
        shown = {"color": colour, "lw": 0.8, "marker": mark, "markersize": 5, "markerfacecolor": fill}
        curves.plot(steps, losses, label=curve_name(ranks, way), markevery=(number, len(series)), **shown)
        if ranks > 1:
            apart = np.maximum(np.abs(losses / first - 1), _SMALLEST)
            distances.plot(steps, apart, **shown | {"ls": "", "markersize": 3})
    curves.set_title("loss", loc="left", fontsize=11)
    distances.set_title("relative difference from the curve of 1 rank", loc="left", fontsize=11)
    distances.set_yscale("log")
    distances.set_ylim(_SMALLEST / 2, LARGEST_DIFFERENCE)
    distances.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-"))  # no small superscripts
    for axes in (curves, distances):
        axes.set_xlabel("step")
    figure.legend(*curves.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
