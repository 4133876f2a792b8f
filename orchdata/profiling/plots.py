"""Drawings of a report, as SVG without a script: text stays text, and colours come from the page's style.

Every drawing is 340 wide, which fits a phone, so nothing is scaled down. Labels are ours: no string of the data is
drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Final

from orchdata.profiling.figures import Figures
from orchdata.profiling.scales import SettingName
from orchdata.profiling.tables import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH: Final = 340
_MARKS: Final = "oXsD^vP*"
# Colours that stand for those of the style sheet until the drawing is text.
_STANDS_FOR: Final = {"#010101": "--ink", "#010102": "--muted", "#010103": "--line", "#010104": "--paper"} | {
    f"#01020{number}": f"--s{number}" for number in range(8)
}
_OF: Final = {name: colour for colour, name in _STANDS_FOR.items()}


@contextmanager
def _drawing(name: str, height: int) -> Iterator[tuple[Axes, _Drawn]]:
    """Draw in the axes that are given; the SVG is complete afterwards."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 11.5,
        **dict.fromkeys(inked, _OF["--ink"]),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), _OF["--muted"]),
        "grid.color": _OF["--line"],
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.unicode_minus"), False),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    }
    drawn = _Drawn(name)
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure.add_subplot(), drawn
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawn.finish(file.getvalue())


class _Drawn:
    """An SVG, and the tooltips of its elements."""

    def __init__(self, name: str) -> None:
        self.svg = ""
        self._name = name
        self._titles: dict[str, str] = {}

    def titled(self, artist: Any, title: str) -> None:
        """Give an element a tooltip, plain text."""
        gid = f"t{len(self._titles)}"
        artist.set_gid(gid)
        self._titles[gid] = title

    def finish(self, svg: str) -> None:
        """Make the SVG part of a page: sizes in pixels, ids of its own, colours and tooltips."""
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt"', r'\1 width="\2"', svg, count=1)
        svg = re.sub(r'(<svg[^>]*?) height="([\d.]+)pt"', r'\1 height="\2"', svg, count=1)
        for gid, title in self._titles.items():
            svg = svg.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{escape(title)}</title>', 1)
        svg = re.sub(r'\bid="', f'id="{self._name}-', svg)
        svg = re.sub(r'(href="|url\()#', rf"\1#{self._name}-", svg)
        for colour, name in _STANDS_FOR.items():
            svg = svg.replace(colour, f"var({name})")
        self.svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "", 1).replace("xlink:href", "href")


def draw_lengths(
    name: str, bins: Sequence[int], percentiles: Mapping[str, int], cap: int | None, unit: str, series: int
) -> str:
    """Draw how many samples have which length, in bins from 2^b for b from 0, with median, 99th percentile and cap."""
    with _drawing(name, 190) as (axes, drawn):
        first = next((bit for bit, count in enumerate(bins) if count), 0)
        for bit, count in enumerate(bins[first:], first):
            (patch,) = axes.bar(2**bit * 1.5, count, width=2**bit * 0.9, color=_OF[f"--s{series}"])
            drawn.titled(patch, f"{2**bit:,} to {2 ** (bit + 1) - 1:,} {unit}: {count:,} samples")
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(_short)
        top = max(bins, default=1)
        marks = [("median", percentiles.get("p50"), "--"), ("99 %", percentiles.get("p99"), ":")]
        marks += [("cap", cap, "-")]
        for label, value, dashes in marks:
            if value:
                line = axes.axvline(value, color=_OF["--ink"], linestyle=dashes, linewidth=1.2, label=label)
                drawn.titled(line, f"{label}: {value:,} {unit}")
        axes.set_ylim(0, top * 1.05)
        _count_axis(axes)
        axes.set_xlabel(unit)
        axes.set_ylabel("samples")
        _legend(axes, 3)
    return drawn.svg


def draw_shares(name: str, joint: Figures) -> str:
    """Draw how many samples have which shares of their tokens in one or two modalities."""
    with _drawing(name, 300 if len(joint.modalities) == 2 else 190) as (axes, drawn):
        bins = len(joint.samples)
        if len(joint.modalities) == 1:
            for place, (count,) in enumerate(joint.samples):
                (patch,) = axes.bar((place + 0.5) / bins, count, width=0.09, color=_OF["--s0"])
                drawn.titled(patch, f"{100 * place // bins} to {100 * (place + 1) // bins} %: {count:,} samples")
            _count_axis(axes)
            axes.set_ylabel("samples")
        else:
            from matplotlib.patches import Rectangle

            most = max(max(row) for row in joint.samples) or 1
            for i, row in enumerate(joint.samples):
                for j, count in enumerate(row):
                    if count:
                        # The area says how many samples there are, so no colour scale is needed.
                        side = max(0.12, (count / most) ** 0.5) / bins
                        x, y = (i + 0.5) / bins - side / 2, (j + 0.5) / bins - side / 2
                        patch = axes.add_patch(Rectangle((x, y), side, side, color=_OF["--s0"]))
                        drawn.titled(
                            patch,
                            f"{10 * i} to {10 * i + 10} % and {10 * j} to {10 * j + 10} %: {count:,} samples",
                        )
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
            axes.set_ylabel("share in the second")
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        axes.set_xlabel("share in the first" if len(joint.modalities) == 2 else "share of the sample's tokens")
    return drawn.svg


def draw_waiting(name: str, scales: Sequence[Figures], settings: Sequence[SettingName]) -> str:
    """Draw the cost of a step over a perfectly even one, against the number of ranks: a line for each setting, hollow
    where the data set has less than a step.
    """
    with _drawing(name, 330) as (axes, drawn):
        for number, setting in enumerate(settings):
            points = [(scale, scale.settings[setting]) for scale in scales if setting in scale.settings]
            colour = _OF[f"--s{number}"]
            costs = [1 / (1 - its.waiting) for _, its in points]
            axes.plot([scale.ranks for scale, _ in points], costs, color=colour, linewidth=1.2)
            for (scale, its), cost in zip(points, costs, strict=True):
                spread = 0.0 if its.waiting_error is None else its.waiting_error * cost**2
                axes.errorbar(scale.ranks, cost, yerr=spread, color=colour, linewidth=1, capsize=2)
                look: dict[str, Any] = {
                    "color": colour,
                    "markerfacecolor": "none" if scale.less_than_a_step else colour,
                }
                (mark,) = axes.plot(scale.ranks, cost, _MARKS[number], markersize=6, **look)
                drawn.titled(mark, f"{LABELS[setting]}, {scale.ranks:,} ranks: {cost:.2f}, ± {spread:.2f} (one error)")
            axes.plot([], [], _MARKS[number], linestyle="-", color=colour, label=LABELS[setting])
        axes.set_xscale("log", base=2)
        axes.set_xticks([scale.ranks for scale in scales])
        axes.xaxis.set_major_formatter(lambda ranks, _: f"{ranks:,.0f}")
        axes.minorticks_off()
        axes.grid(visible=True, axis="y")
        axes.set_xlabel("ranks")
        axes.set_ylabel("cost of a step, 1 is even")
        _legend(axes, 2)
    return drawn.svg


def _legend(axes: Axes, columns: int) -> None:
    look = {"frameon": False, "borderpad": 0, "handlelength": 1.6, "fontsize": 11}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, **look)


def _count_axis(axes: Axes) -> None:
    """Label whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.yaxis.set_major_formatter(_short)


def _short(value: float, _: object = None) -> str:
    """Return a number for an axis: 800, 1,024, 64k, 1.3M."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / size * (10 if name == 'k' else 1):.3g}{name}"
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"
