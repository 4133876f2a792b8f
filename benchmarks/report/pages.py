"""Pages with markers -> the same pages with their tables as the stored reports have them.

A table stands between two lines, which Markdown does not show:

    <!-- table: claims -->
    ...
    <!-- end of table -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.report.results import ResultsError

_BEGIN: Final = re.compile(r"^<!-- table: (.*) -->$")
_END: Final = "<!-- end of table -->"


def rewrite(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with all of its tables as they are now.

    Raises:
        ResultsError: a marker names no table, or does not end.
    """
    lines, name = [], None
    for line in text.splitlines():
        begins = _BEGIN.match(line)
        if name is None:
            if line == _END:
                raise ResultsError(f"{_END!r} ends no table: write <!-- table: NAME --> above it")
            lines.append(line)
            if begins:
                name = begins[1]
                if name not in tables:
                    raise ResultsError(f"no table is called {name!r}; there are {', '.join(tables)}")
                lines += ["", tables[name](), ""]
        elif begins:
            break
        elif line == _END:
            lines.append(line)
            name = None
    if name is not None:
        raise ResultsError(f"table {name!r} does not end: write {_END!r} below it")
    return "\n".join(lines) + "\n"


def named(text: str) -> list[str]:
    """Names of the tables that a page has."""
    return [found[1] for line in text.splitlines() if (found := _BEGIN.match(line))]
