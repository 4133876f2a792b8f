"""How a benchmark is run by hand: its configuration's numbers and words are options, its results a report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from orchdata.bench import Result, WideTable, make_report
from orchdata.cli.command import print_json, print_table

Config = TypeVar("Config")


def run_command(name: str, config: type[Config], run: Callable[[Config], Sequence[Result | WideTable]]) -> None:
    """Measure what the command line asks for and print it, as a table or with `--json`.

    Args:
        name: of the module, as `python -m` takes it.
        config: a dataclass; its fields that are numbers, words or flags become options.
        run: measures.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    options = [field for field in fields(config) if isinstance(field.default, int | float | str)]  # type: ignore[arg-type]
    for field in options:
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default)
    parser.add_argument("--json", action="store_true")
    given: dict[str, Any] = vars(parser.parse_args())
    as_json = given.pop("json")
    try:
        asked = config(**given)
        report = make_report(f"python -m {name}", asked, run(asked))
    except ValueError as error:
        parser.error(str(error))
    if as_json:
        print_json(report.to_dict())
    else:
        print_table(report.render())
