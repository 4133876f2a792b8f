"""What commands print: JSON or tables on stdout, one line for an error on stderr."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from orchdata.loaders.amounts import counted
from orchdata.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.index.index import Index

FIRST_FAILURES = 10
MOST_IGNORED = 20
_CLOSED_PIPE = 128 + signal.SIGPIPE
"""As of a program that the signal ends: no verdict."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def one_line_errors(command: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Turn what a user can cause into one line and exit code 1; our own bugs keep their traceback."""

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        from orchdata.loaders.errors import OrchdataError, broken_package

        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            # The reader of the output has ended, as `head` does. What is left to write goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_CLOSED_PIPE) from None
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


def print_index(report: dict[str, Any]) -> None:
    """Print what `index` found."""
    size = human_bytes(report["totals"]["bytes"])
    of_all = f" (the first of {report['of_shards']:,})" if "of_shards" in report else ""
    typer.echo(
        f"{counted(report['samples'], 'sample')} in {counted(report['shards'], 'shard')}{of_all}, {size}; "
        f"{counted(report['scanned'], 'shard')} scanned in {report['seconds']:.1f} s"
    )
    for name, modality in report["totals"]["modalities"].items():
        typer.echo(f"  {name}: {modality['samples']:,} samples, {modality['tokens']:,} LLM tokens")
    from orchdata.loaders.records import LEFT_OUT

    for line in overflow_words(report["totals"]["overflow"]):
        typer.echo(f"  above max_tokens: {line}")
    without_loss = report["totals"]["without_loss"]
    if without_loss:
        typer.echo(f"  without a token to learn: {without_loss:,} samples")
    if left_out := report["totals"]["ignored_fields"].get(LEFT_OUT, 0):
        typer.echo(f"  left out by Recipe.record: {left_out:,} samples")
    for line in unread_lines(report["totals"]["unread"]):
        typer.echo(f"  {line}")
    for name, field in report.get("index_fields", {}).items():
        typer.echo(f"  index field {name}: {field['type']}, {field['nulls']:,} without a value")
    _print_bad(report)
    for failure in report["failed_shards"]:
        typer.echo(f"shard failed: {failure['shard']}: {failure['reason']}", err=True)
    typer.echo(f"index: {report['path']}")
    if (out := report.get("out")) is not None:
        typer.echo(f"written: {out}")


def print_unit(dataset: ShardDataset | Mixture) -> None:
    """Say what LLM tokens are where a recipe has no tokenizer."""
    from orchdata.dataset.mixed import text_is_bytes

    if text_is_bytes(dataset):
        typer.echo("LLM tokens of text are UTF-8 bytes: the recipe has no tokenizer (--recipe MODULE:NAME)")


def print_unread(dataset: ShardDataset | Mixture, index: Index) -> None:
    """Say as a loader does which fields are not read."""
    from orchdata.dataset.indexed.unread import unread_in_words

    if message := unread_in_words(dataset, index):
        typer.echo(f"orchdata: {message}", err=True)


def unread_lines(unread: Mapping[str, Any]) -> list[str]:
    """Fields that are not read, each with the samples that have it, as lines of a table."""
    names, others = unread["names"], unread["others"]
    lines = ["not read, by field, with the samples that have it:"] if names else []
    lines += [f"  {count:>13,}  {name}" for name, count in names.items()]
    return [*lines, f"  {others:>13,}  values of more fields"] if others else lines


def ignored_words(ignored: Mapping[str, int]) -> str:
    """Names of fields that are not read, with how many there are."""
    from orchdata.loaders.records import LEFT_OUT
    from orchdata.loaders.text.words import WORDS_SUFFIX

    named = {name: count for name, count in ignored.items() if name != LEFT_OUT}
    shown = [f"{name.removesuffix(WORDS_SUFFIX)} ({count:,})" for name, count in list(named.items())[:MOST_IGNORED]]
    return f"{', '.join(shown)}{', ...' if len(named) > len(shown) else ''}"


def print_verified(report: dict[str, Any]) -> None:
    """Print what `verify` found."""
    samples, shards = counted(report["samples"], "good sample"), counted(report["shards"], "shard")
    typer.echo(f"{samples} in {shards}, in {report['seconds']:.1f} s")
    _print_bad(report)
    if report["quarantine"] is not None:
        typer.echo(f"quarantine: {report['quarantine']}")


def _print_bad(report: dict[str, Any]) -> None:
    if report["bad"]:
        typer.echo(f"{report['bad']:,} bad samples, by reason:", err=True)
        for reason, count in report["bad_by_reason"].items():
            typer.echo(f"  {count:,} x {reason}", err=True)
        typer.echo("the first of them:", err=True)
        for failure in report["failures"][:FIRST_FAILURES]:
            typer.echo(f"  {failure['shard']}: {failure['key']} {failure['field']}: {failure['reason']}", err=True)
    if report["lost"]:
        typer.echo(f"about {report['lost']:,} more samples lost in damaged shards", err=True)


def overflow_words(overflow: Mapping[str, int]) -> list[str]:
    """Say what became of samples above `TextPreprocessor.max_tokens`, from the totals of an index."""
    parts = []
    if overflow["truncated"]:
        parts.append(f"{overflow['truncated']:,} samples truncated, {overflow['cut_tokens']:,} tokens cut away")
    if overflow["split"]:
        parts.append(f"{overflow['split']:,} samples split into {overflow['pieces']:,} pieces")
    return parts
