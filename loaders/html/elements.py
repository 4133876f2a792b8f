"""Pieces of a page: tables that become lists on narrow screens, bars, figures, sections. All take and return HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int = 1) -> str:
    """Return a table.

    Args:
        columns: titles, plain text.
        rows: cells, HTML.
        numbers_from: first column whose cells are set to the right.
    """
    head = "".join(
        f'<th scope="col"{_numeric(place >= numbers_from)}>{escape(column)}</th>'
        for place, column in enumerate(columns)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-of="{escape(column)}"{_numeric(place >= numbers_from)}>{cell}</td>'
            for place, (column, cell) in enumerate(zip(columns, row, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _numeric(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def bar(share: float, text: str, series: int = 0) -> str:
    """Return a bar from 0 to 1 with its text next to it, HTML."""
    width = 100 * min(max(share, 0.0), 1.0)
    style = f"width:{width:.2f}%;background:var(--s{series})"
    return f'<span class="bar"><span style="{style}"></span></span> <span>{text}</span>'


def figure(drawing: str, caption: str, below: str = "") -> str:
    """Return a drawing with its caption, plain text, and what stands below it, HTML."""
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption>{below}</figure>"


def section(title: str, *parts: str) -> str:
    """Return a section with a title, plain text."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(text: str) -> str:
    """Return plain text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def folded(summary: str, content: str) -> str:
    """Return content, HTML, that a click opens; print shows it. The summary is plain text."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
