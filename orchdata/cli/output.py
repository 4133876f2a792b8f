"""What commands print: JSON or tables on stdout, one line for an error on stderr."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from orchdata.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def one_line_errors(command: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Turn what a user can cause into one line and exit code 1; our own bugs keep their traceback."""

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        from orchdata.loaders.errors import OrchdataError, broken_package

        try:
            return command(*args, **kwargs)
        except (OrchdataError, ValueError, OSError, ImportError, MemoryError, NotImplementedError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            typer.echo(f"orchdata: error: {text}", err=True)
            raise typer.Exit(1) from error
        except Exception as error:
            broken = broken_package(error)
            if broken is None:
                raise
            typer.echo(f"orchdata: error: {broken}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            typer.echo("orchdata: stopped", err=True)
            raise typer.Exit(130) from None

    return run


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON document on stdout and nothing else; NaN would not be JSON, so it raises."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def plain_table(title: str, *columns: str) -> Table:
    """A table without lines; all columns but the first are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def print_table(table: RenderableType) -> None:
    """A table for people; into a pipe or file it is wide enough to keep each row on one line."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 140)
    console.print(table)


@contextmanager
def stage_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield `advance(stage, done, total)`: one bar at a time, for the stage under way."""
    with ExitStack() as bar:
        current: list[tuple[str, Callable[[int, int], None]]] = []

        def advance(stage: str, done: int, total: int) -> None:
            if not current or current[0][0] != stage:
                bar.close()
                current[:] = [(stage, bar.enter_context(progress_bar(stage)))]
            current[0][1](done, total)

        yield advance


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
