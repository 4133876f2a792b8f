"""`python -m benchmarks.pictures.balancing [FOLDER]`: the plots of benchmarks/balancing.md, one SVG for each regime.

Needs matplotlib (the extra `plots`). The same versions write the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.balance.regimes import REGIMES, Regime, Row, rows
from benchmarks.pictures.svg import COLOURS, svg_of

LABEL_GAP = 0.075  # Least distance of two labels, as a share of the height.


def draw(figure: Figure, regime: Regime, found: Sequence[Row]) -> None:
    """Draw one plot: a line for each series with its name at the end, and a band over the seeds."""
    axes = figure.add_subplot(facecolor="white")
    names = list(dict.fromkeys(row.series for row in found))
    colours = (COLOURS[0], *COLOURS[-len(names) + 1 :])
    for name, colour in zip(names, colours, strict=True):
        line = [row for row in found if row.series == name]
        steps = [row.step for row in line]
        axes.fill_between(steps, [row.low for row in line], [row.high for row in line], color=colour, alpha=0.18, lw=0)
        axes.plot(steps, [row.mean for row in line], color=colour, marker="o", markersize=3.5, clip_on=False)
    steps = sorted({row.step for row in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [f"{step:,}" for step in steps])
    axes.minorticks_off()
    # A share starts at 0, a ratio at 1.
    axes.set_ylim(bottom=0.0 if "%" in regime.value else 1.0)
    axes.set_xlabel(regime.axis)
    axes.set_ylabel(regime.value)
    axes.set_title(regime.title, loc="left", fontsize=11)
    _label(axes, names, colours, found)


def _label(axes: Axes, names: Sequence[str], colours: Sequence[str], found: Sequence[Row]) -> None:
    """Write name and last value of each series next to its end, pushed apart where they would overlap."""
    last = max(row.step for row in found)
    ends = {row.series: row.mean for row in found if row.step == last}
    low, high = axes.get_ylim()
    place = low - high
    for name in sorted(names, key=lambda name: ends[name]):
        place = max((ends[name] - low) / (high - low), place + LABEL_GAP)
        axes.annotate(
            f"{name} {ends[name]:.4g}",
            (1.0, place),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colours[names.index(name)],
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures.balancing", description="Plots of balancers.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/plots"), help="where to write (docs/plots)")
    parser.add_argument("--seeds", type=int, default=5, help="batches at each point")
    parser.add_argument("--steps", help="ranks (microbatches) to measure at, as 8,32; default: up to 2,560")
    options = parser.parse_args()
    steps = [int(step) for step in options.steps.split(",")] if options.steps else None
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, regime in REGIMES.items():
        path = options.folder / f"{name}.svg"
        found = list(rows(regime, seeds=options.seeds, steps=steps))
        path.write_bytes(svg_of(partial(draw, regime=regime, found=found), 6.4, 3.6))
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
