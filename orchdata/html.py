"""Pieces of pages and of notebooks' views: strings from data as text, tables, bars, small views, axes of matplotlib.

A view has a style of its own, in the colours of the notebook. Nothing in a string of the data is markup, moves other
text, or is endless.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from orchdata.loaders.errors import package_error
from orchdata.loaders.storage.remote.urls import without_secrets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CHARACTERS: Final = 300
# Control characters, lone surrogates, and characters that change the direction or the look of what follows them.
_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff0-\ufffb]"
)


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text with an ellipsis after `most` characters, unseen characters as their escapes, and without queries
    and user names of URLs.
    """
    text = without_secrets(text)
    cut = text if len(text) <= most else text[:most] + "…"
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", cut)


def shown(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return HTML that shows the text of data, isolated from the text around it."""
    return f"<bdi>{escape(plain(text, most))}</bdi>"


def percent(share: float) -> str:
    """Return a share as a percentage, with as many digits as people need."""
    points = 100 * share
    return f"{points:.0f} %" if points >= 10 or points == 0 else f"{points:.1f} %" if points >= 0.1 else "below 0.1 %"


def number(value: float) -> str:
    """Return a count in words that people read: 812, 12,400, 1.3 million."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,.0f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int = 1) -> str:
    """Return a table of titles, plain text, and cells, HTML; those from the column `numbers_from` on are set to the
    right.
    """
    titles = [(escape(title), ' class="n"' * (place >= numbers_from)) for place, title in enumerate(columns)]
    head = "".join(f'<th scope="col"{number}>{title}</th>' for title, number in titles)
    body = ""
    for row in rows:
        cells = zip(titles, row, strict=True)
        filled = (f'<td data-of="{title}"{number}>{cell}</td>' for (title, number), cell in cells)
        body += f"<tr>{''.join(filled)}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bar(share: float, text: str, series: int = 0) -> str:
    """Return a bar from 0 to 1 with its text next to it, HTML."""
    width = 100 * min(max(share, 0.0), 1.0)
    style = f"width:{width:.2f}%;background:var(--s{series})"
    return f'<span class="bar"><span style="{style}"></span></span> <span>{text}</span>'


def paragraph(text: str) -> str:
    """Return plain text as a paragraph."""
    return f"<p>{escape(text)}</p>"


# Every rule is of this class alone. Text and background are the notebook's; lines and bars are of its text's colour.
_STYLE: Final = """
.orchdata-view{color:inherit;font-size:13px;line-height:1.5;max-width:900px;overflow-wrap:anywhere}
.orchdata-view table{border-collapse:collapse;margin:6px 0;color:inherit;background:transparent}
.orchdata-view th{overflow-wrap:normal}
.orchdata-view tr{background:transparent}
.orchdata-view th,.orchdata-view td{text-align:left;vertical-align:top;padding:2px 10px 2px 0;color:inherit;
border-bottom:1px solid rgba(128,128,128,.4)}
.orchdata-view .n{text-align:right}
.orchdata-view .bar{display:inline-block;width:90px;height:9px;border:1px solid rgba(128,128,128,.6);
vertical-align:middle}
.orchdata-view .bar>span{display:block;height:100%;background:currentColor!important;opacity:.6}
.orchdata-view .trained{border-bottom:2px solid currentColor}
.orchdata-view .picture img{max-width:300px;height:auto}
.orchdata-view .sample{border:1px solid rgba(128,128,128,.4);padding:8px;margin:6px 0}
.orchdata-view p{white-space:pre-wrap;margin:4px 0}
"""


def view(title: str, *parts: str) -> str:
    """Return a view of a title, plain text, and parts, HTML."""
    return f'<div class="orchdata-view"><style>{_STYLE}</style><strong>{escape(title)}</strong>{"".join(parts)}</div>'


def pairs(named: Iterable[tuple[str, Any]]) -> str:
    """Return names with values, shown as text, as a table without a head."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{shown(str(value))}</td></tr>" for name, value in named)
    return f"<table>{rows}</table>" if rows else ""


def check_plots() -> None:
    """Raise PackageError if matplotlib is missing or cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except Exception as error:  # a broken package may raise anything
        raise package_error(error, "a drawing", "matplotlib") from error


def axes_of(axes: Axes | None) -> Axes:
    """Return the axes, or those of a new figure for None. Raises as `check_plots`."""
    check_plots()
    if axes is not None:
        return axes
    from matplotlib.figure import Figure

    return Figure(layout="constrained").add_subplot()
