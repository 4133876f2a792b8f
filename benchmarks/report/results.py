"""Stored reports: `benchmarks/results/NAME.json` -> `orchdata.bench.Report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.bench import Report, Result, WideTable

FOLDER = Path(__file__).resolve().parents[1] / "results"


class ResultsError(ValueError):
    """A stored report is missing, or lacks what a table needs; the message names the file and the way out."""


def read_report(name: str, folder: Path = FOLDER) -> Report:
    """Read one stored report.

    Raises:
        ResultsError: no such file, or it is not what a benchmark prints with `--json`.
    """
    path = folder / f"{name}.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return Report(
            command=content["command"],
            config=content["config"],
            machine=content["machine"],
            results=tuple(
                Result(name=one["name"], unit=one["unit"], values=tuple(one["values"]), note=one["note"])
                for one in content["results"]
            ),
            tables=tuple(
                WideTable(
                    title=one["title"],
                    columns=tuple(one["columns"]),
                    rows=tuple(map(tuple, one["rows"])),
                    unit=one["unit"],
                    note=one["note"],
                )
                for one in content["tables"]
            ),
        )
    except FileNotFoundError as error:
        raise ResultsError(f"{path} is missing: store what its benchmark prints with --json there") from error
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResultsError(f"{path} is not what a benchmark prints with --json ({reason}); run it again") from error


def figure(report: Report, name: str) -> float:
    """The median of a result.

    Raises:
        ResultsError: the report has no such result.
    """
    for result in report.results:
        if result.name == name:
            return result.median
    known = ", ".join(repr(result.name) for result in report.results)
    raise ResultsError(f"the report of `{report.command}` has no result {name!r}; it has {known or 'none'}")


def titled(report: Report, title: str) -> WideTable:
    """The table with a title.

    Raises:
        ResultsError: the report has no such table.
    """
    for table in report.tables:
        if table.title == title:
            return table
    known = ", ".join(repr(table.title) for table in report.tables)
    raise ResultsError(f"the report of `{report.command}` has no table {title!r}; it has {known or 'none'}")


def column(table: WideTable, heading: str) -> list[str | float | None]:
    """The cells of a column, the first one with that heading.

    Raises:
        ResultsError: the table has no such column.
    """
    if heading not in table.columns:
        raise ResultsError(f"table {table.title!r} has no column {heading!r}; it has {', '.join(table.columns)}")
    number = table.columns.index(heading)
    return [row[number] for row in table.rows]


def numbers(table: WideTable, heading: str) -> NDArray[np.float64]:
    """The cells of a column as float64 (num_rows,).

    Raises:
        ResultsError: the table has no such column.
    """
    return np.array(column(table, heading), np.float64)


def ran_on(report: Report) -> str:
    """The machine and the version of torch in a few words."""
    machine = report.machine
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['packages']['torch'].partition('+')[0]}"
