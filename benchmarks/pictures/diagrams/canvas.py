"""Shapes and text -> an SVG file: one palette, readable in light and dark, without a script.

The card has a ground of its own in both schemes, so that it is readable on a page of either. Sizes are pixels, and a
picture is as wide as the text of a page, so that it is shown at that size.
"""

from __future__ import annotations

from typing import Final, Literal
from xml.sax.saxutils import escape

WIDTH: Final = 720

Colour = Literal["card", "ground", "ink", "muted", "edge", "label", "image", "audio", "llm"]
Fill = Literal["ground", "image", "audio", "llm", "hatch"]

# Colour -> in the light scheme, in the dark one. Fills have one lightness each, and the text on them is dark in both
# schemes, as on paper. Distinct also without colour vision (after Okabe and Ito).
PALETTE: Final[dict[Colour, tuple[str, str]]] = {
    "card": ("#ffffff", "#161b22"),
    "ground": ("#f0f2f5", "#262c36"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#a5afba"),
    "edge": ("#59636e", "#a5afba"),
    "label": ("#111418", "#111418"),
    "image": ("#f0a830", "#f0a830"),
    "audio": ("#3cb48c", "#3cb48c"),
    "llm": ("#6aaee8", "#6aaee8"),
}
_STROKED: Final[tuple[Colour, ...]] = ("ink", "muted", "edge", "label")
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"

_HATCH: Final = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="f-card"/><line x1="1" y1="0" x2="1" y2="6" stroke-width="1.4" class="s-edge"/>'
    "</pattern></defs>"
)


class Canvas:
    """What is drawn so far.

    Args:
        height: pixels; the width is `WIDTH`.
        title: what the picture shows.
        description: what is to be seen, for people who do not see it.
    """

    def __init__(self, height: float, title: str, description: str) -> None:
        self._height = height
        self._title = title
        self._description = description
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: Fill, radius: float = 1.5) -> None:
        """Draw a rectangle with an edge; hatched is what is waited for, or padded."""
        area = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}" rx="{_px(radius)}"'
        self._shapes.append(f'<rect {area} class="f-{fill} edged"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        anchor: Literal["start", "middle", "end"] = "start",
        bold: bool = False,
        colour: Colour = "ink",
    ) -> None:
        """Write one line; y is its base line."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{_px(x)}" y="{_px(y)}" font-size="{_px(size)}" text-anchor="{anchor}"{weight} '
            f'class="f-{colour}">{escape(words)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: Colour = "muted", width: float = 1, dash: str = ""
    ) -> None:
        """Draw a straight line."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._shapes.append(
            f'<line x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}" stroke-width="{_px(width)}"{dashed} '
            f'class="s-{colour}"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, width: float = 1.5, dash: str = "") -> None:
        """Draw a line in ink with a head at its end."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        along, across = ((x2 - x1) / length, (y2 - y1) / length), ((y1 - y2) / length, (x2 - x1) / length)
        back = (x2 - 9 * along[0], y2 - 9 * along[1])
        corners = [(back[0] + side * 4 * across[0], back[1] + side * 4 * across[1]) for side in (1, -1)]
        points = " ".join(f"{_px(x)},{_px(y)}" for x, y in [(x2, y2), *corners])
        self.line(x1, y1, *back, colour="ink", width=width, dash=dash)
        self._shapes.append(f'<polygon points="{points}" class="f-ink"/>')

    def plate(self, x: float, y: float, words: str) -> None:
        """Write one line on a ground of its own, both centred, where it would be hard to read on what is below."""
        width = 7 * len(words) + 16
        self.box(x - width / 2, y - 10, width, 20, "ground", radius=4)
        self.text(x, y + 4, words, anchor="middle")

    def legend(self, x: float, y: float, entries: tuple[tuple[Fill, str, float], ...]) -> None:
        """Draw a row of fills with their names, each with the pixels that it takes."""
        for fill, name, width in entries:
            self.box(x, y - 10, 18, 12, fill)
            self.text(x + 24, y, name)
            x += width

    def to_svg(self) -> bytes:
        """The file."""
        height = _px(self._height)
        head = (
            '<?xml version="1.0" encoding="utf-8"?>\n'
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            'role="img" aria-labelledby="title description">\n'
            f'<title id="title">{escape(self._title)}</title>\n'
            f'<desc id="description">{escape(self._description)}</desc>\n'
            f"<style>{_style()}</style>"
        )
        card = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{_px(self._height - 1)}" rx="8" class="f-card edged"/>'
        return "\n".join([head, _HATCH, card, *self._shapes, "</svg>\n"]).encode()


def _style() -> str:
    """Rules of the light scheme, then those of the dark one."""
    rules = [f"text{{font-family:{_FONT}}}", ".edged{stroke-width:.7}", ".f-hatch{fill:url(#hatch)}"]
    schemes = [
        "".join(
            [
                *(f".f-{name}{{fill:{both[scheme]}}}" for name, both in PALETTE.items()),
                *(f".s-{name}{{stroke:{PALETTE[name][scheme]}}}" for name in _STROKED),
                f".edged{{stroke:{PALETTE['edge'][scheme]}}}",
            ]
        )
        for scheme in (0, 1)
    ]
    return "".join([*rules, schemes[0], f"@media (prefers-color-scheme:dark){{{schemes[1]}}}"])


def _px(value: float) -> str:
    """Pixels with a tenth at most: the same text on any machine."""
    return f"{value:.1f}".removesuffix(".0")
