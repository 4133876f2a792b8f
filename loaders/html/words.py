"""Strings from data as text of a page: nothing in them is markup, moves other text, or is endless."""

from __future__ import annotations

import re
from html import escape
from typing import Final

from orchdata.loaders.storage.remote.urls import without_secrets

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
