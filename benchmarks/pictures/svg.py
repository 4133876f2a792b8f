"""The style of every picture, and how it becomes an SVG file: the same versions write the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Grey for what is not balanced; distinct also without colour vision (Okabe and Ito).
COLOURS: Final = ("#767676", "#e69f00", "#009e73", "#0072b2")
# Text stays text, and ids do not depend on the run. A white ground is readable on a dark page too.
STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "orchdata",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def svg_of(draw: Callable[[Figure], None], width: float, height: float, title: str | None = None) -> bytes:
    """The SVG file of what `draw` puts on a white figure of this many inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
        draw(figure)
        stream = io.BytesIO()
        titled = {} if title is None else {"Title": title}
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, **titled})
    return stream.getvalue()
