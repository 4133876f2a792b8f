"""What a notebook shows of an object: a small view with a style of its own, in the colours of the notebook.

parts of HTML --framed--> a string of at most 300 kB; an object that has no view now is shown as its repr
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from html import escape
from typing import Any, Final

from orchdata.loaders.html.words import shown

MOST_BYTES: Final = 300_000
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
    """Return a view.

    Args:
        title: plain text.
        parts: HTML.
    """
    return f'<div class="orchdata-view"><style>{_STYLE}</style><strong>{escape(title)}</strong>{"".join(parts)}</div>'


def pairs(named: Iterable[tuple[str, Any]]) -> str:
    """Return names with values, shown as text, as a table without a head."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{shown(str(value))}</td></tr>" for name, value in named)
    return f"<table>{rows}</table>" if rows else ""


def never_raises(make: Callable[[Any], str]) -> Callable[[Any], str]:
    """Decorate a `_repr_html_`: an object that cannot be shown now, or only in too many bytes, is shown as its repr."""

    @wraps(make)
    def made(self: Any) -> str:
        html = ""
        with suppress(Exception):
            html = make(self)
        if html and len(html.encode("utf-8", "replace")) <= MOST_BYTES:
            return html
        try:
            text = repr(self)
        except Exception:  # noqa: BLE001
            text = object.__repr__(self)
        return f"<pre>{shown(text, 2000)}</pre>"

    return made
