"""What commands are made of: options and what they name, errors in one line, printing; the profile in a terminal."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import typer

from orchdata.loaders.amounts import counted
from orchdata.notices import progress_bar

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.recipe import Recipe
    from orchdata.profiling.profile import Profile

_MOST_REASONS = 5
StorageOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-options",
        metavar="NAME=VALUE",
        help="How objects of storage are read, as of ShardDataset(storage_options=); repeatable. Never shown.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for machines.")]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a command, by options that several commands share: `takes` says which of them one has."""

    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATHS...", help="Shards: files, URLs, globs or braces, e.g. 'train-{000..127}.tar'."),
    ]
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="MODULE:NAME", help="An od.Recipe; default: od.Recipe().")
    ] = None
    allow_recipes: Annotated[
        bool,
        typer.Option(
            "--allow-recipes", help="Import the modules that a mixture's file names as `recipe:`; they run code."
        ),
    ] = False
    media_root: Annotated[
        str | None, typer.Option("--media-root", help="Folder below which the files lie that records of JSON name.")
    ] = None
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column", metavar="OLD=NEW", help="A field to rename, as of ShardDataset(columns=); repeatable."
        ),
    ] = None
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="last_dot", help="Where keys of tars end, as of ShardDataset(key=)."),
    ] = None
    container: Annotated[
        list[str] | None,
        typer.Option(
            "--container", metavar="MODULE:NAME", help="An od.Container, as of ShardDataset(containers=); repeatable."
        ),
    ] = None
    index_field: Annotated[
        list[str] | None,
        typer.Option("--index-field", metavar="NAME", help="A field that the index keeps for filters; repeatable."),
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="NAME", help="A field, not read, to say no more of; repeatable."),
    ] = None
    storage_options: StorageOptionsOption = None
    index_file: Annotated[
        str | None,
        typer.Option("--index-file", metavar="FILE|URL", help="The index, as of ShardDataset(index_file=)."),
    ] = None
    expression: Annotated[
        str | None,
        typer.Option("--filter", metavar="EXPR", help="Samples to take, as of dataset.filter: 'tokens < 4096'."),
    ] = None

    def options(self) -> dict[str, Any]:
        """Return keywords of ShardDataset. Raises ValueError for what they cannot be."""
        from orchdata.loaders.shards.container import Container

        kind: Any = Container  # abstract
        return {
            "media_root": self.media_root,
            "columns": named_values(self.column, "--column", "OLD=NEW, the old and the new name of a field"),
            "containers": tuple(load_object(name, kind, "--container") for name in self.container or ()),
            "index_fields": tuple(self.index_field or ()),
            "storage_options": storage_options_of(self.storage_options),
            "index_file": self.index_file,
            "key": self.key or "",
            "ignore": tuple(self.ignore or ()),
        }

    def dataset(self) -> ShardDataset:
        """Return the data set of the paths. Raises as `options` and `recipe_named`."""
        from orchdata.dataset.shard_dataset import ShardDataset

        options = self.options()
        return ShardDataset(self.paths, recipe_named(self.recipe), **options)


Kind = TypeVar("Kind")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_CLOSED_PIPE = 128 + signal.SIGPIPE
"""As of a program that the signal ends: no verdict."""


def takes(
    kind: type[Kind], *names: str
) -> Callable[[Callable[Concatenate[Kind, Arguments], Result]], Callable[..., Result]]:
    """Make a command of a function whose first argument is a frozen value: its fields of these `names`, or all, are the
    first options.
    """
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(kind).parameters.items()
        if not names or name in names
    ]

    def decorated(command: Callable[Concatenate[Kind, Arguments], Result]) -> Callable[..., Result]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def run(**given: Any) -> Result:
            value = kind(**{each.name: given.pop(each.name) for each in shared})
            return command(value, **given)  # type: ignore[call-arg]

        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*shared, *own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return one_line_errors(run)

    return decorated


def named_values(given: Sequence[str] | None, option: str, form: str, *, empty: bool = False) -> dict[str, str]:
    """`("a=b",)` -> {"a": "b"}. Raises ValueError for text of another form, without the text: it may be secret."""
    pairs = [text.partition("=") for text in given or ()]
    if not all(name and equals and (value or empty) for name, equals, value in pairs):
        raise ValueError(f"{option} takes {form}")
    if len(values := {name: value for name, _, value in pairs}) < len(pairs):
        raise ValueError(f"{option} gives one name twice")
    return values


def storage_options_of(given: Sequence[str] | None) -> dict[str, str] | None:
    """Return name -> value; None for nothing. Raises as `named_values`."""
    return named_values(given, "--storage-options", "NAME=VALUE, such as region=eu-1", empty=True) or None


def load_object(name: str, kind: type[Kind], option: str) -> Kind:
    """The object that `MODULE:NAME` names; modules of the working directory count, as under `python -m`."""
    module_name, attribute = check_name(name, option), name.partition(":")[2]
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):  # what it prints is not our output
            value = attrgetter(attribute)(importlib.import_module(module_name))
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ValueError(f"{option} {name}: {type(error).__name__}: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(f"{option} {name} must be an od.{kind.__name__}, got {type(value).__name__}")
    return value


def check_name(name: object, option: str) -> str:
    """The module of `MODULE:NAME`. Raises ValueError for what is no such name."""
    module, _, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not (module and attribute):
        raise ValueError(f"{option} must be MODULE:NAME, such as my_project.data:recipe, got {name!r:.80}")
    return module


def recipe_named(name: str | None) -> Recipe:
    """What `--recipe` names."""
    from orchdata.loaders.recipe import Recipe

    recipe = load_object(name, Recipe, "--recipe") if name is not None else Recipe()
    try:
        recipe.fingerprint()
    except TypeError as error:  # a parameter of a modality, named
        raise ValueError(str(error)) from error
    return recipe


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
        except Exception as error:
            known = (OrchdataError, ValueError, OSError, ImportError, MemoryError, NotImplementedError)
            said = error if isinstance(error, known) else broken_package(error)
            if said is None:
                raise
            text = " ".join(str(said).split()) or type(said).__name__
            typer.echo(f"orchdata: error: {text}", err=True)
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


def unread_lines(unread: Mapping[str, Any]) -> list[str]:
    """Fields that are not read, each with the samples that have it, as lines of a table."""
    names, others = unread["names"], unread["others"]
    lines = ["not read, by field, with the samples that have it:"] if names else []
    lines += [f"  {count:>13,}  {name}" for name, count in names.items()]
    return [*lines, f"  {others:>13,}  values of more fields"] if others else lines


def overflow_words(overflow: Mapping[str, int]) -> list[str]:
    """Say what became of samples above `TextPreprocessor.max_tokens`, from the totals of an index."""
    parts = []
    if overflow["truncated"]:
        parts.append(f"{overflow['truncated']:,} samples truncated, {overflow['cut_tokens']:,} tokens cut away")
    if overflow["split"]:
        parts.append(f"{overflow['split']:,} samples split into {overflow['pieces']:,} pieces")
    return parts


def profile_table(profile: Profile) -> RenderableType:
    """Render the sentences and tables of a profile, as the page has them."""
    from rich.console import Group
    from rich.text import Text

    from orchdata.profiling import summary
    from orchdata.profiling.summary import DATA, SHARE, TEXT

    # What the data set holds, in lines.
    bad = f"; left out: {counted(profile.bad, 'bad sample')}" if profile.bad else ""
    bad += f"; {profile.unchosen:,} samples that are not chosen" if profile.unchosen else ""
    bad += f"; {counted(profile.failed_shards, 'shard')} cannot be read at all" if profile.failed_shards else ""
    about = f"{counted(profile.samples, 'sample')} in {counted(profile.shards, 'shard')}, {human_bytes(profile.bytes)}"
    lines = [f"{about}, {profile.loss_tokens:,} loss tokens{bad}"]
    lines += [f"  {count:,} x {reason}" for reason, count in list(profile.bad_by_reason.items())[:_MOST_REASONS]]
    if profile.overflow is not None and (cut := overflow_words(profile.overflow)):
        lines.append(f"above TextPreprocessor.max_tokens: {'; '.join(cut)}")
    if (caps := profile.caps) is not None:
        of_each = (f"{phase} {cap:,} ({caps.above[phase]:,} samples above)" for phase, cap in caps.max_tokens.items())
        become = {"own": "get a microbatch each", "drop": "are left out", "error": "would be refused"}[caps.oversize]
        above = "above it" if profile.teams is None else "above it in the largest team"
        lines.append(f"max_tokens: {', '.join(of_each)}; {caps.samples:,} samples {above} {become}")
    for finding in summary.findings(profile):
        of = f" It is {finding.key!r} of {finding.shard.rsplit('/', 1)[-1]}." if finding.shard else ""
        lines.append(f"- {finding.text}{of}")
    lines += unread_lines({"names": profile.unread, "others": profile.unread_others})

    # The tables.
    stored, size = summary.stored_words(profile), summary.step_words(profile.main_scale)
    waiting = "How uneven ranks are, in positions, not time"
    if profile.has_cost_model:
        waiting = "How long ranks wait, as a share of the step by your cost model"
    shown = [("What sources give in an epoch", summary.sources(profile, profile.sources))] if profile.sources else []
    shown += [
        (f"What samples are made of{stored}", summary.modalities(profile, "samples", "parts")),
        (f"Positions per sample, of those in the phase{stored}", summary.phases(profile)),
        (waiting, summary.settings(profile)),
    ]
    if (in_phases := summary.waiting_in_phases(profile.main_scale)) is not None:
        shown.append((f"In which phases, at {size}", in_phases))
    if any(scale.groups > 1 for scale in profile.scales):
        shown.append(("How many groups of ranks read from a shard", summary.groups(profile.scales)))
    shown.append((f"How much of a batch is padding, at {size}", summary.layouts(profile)))

    notes = [summary.left_out_words(profile)] if profile.ranks_left_out else []
    if any(scale.less_than_a_step for scale in profile.scales):
        notes.append("all: the data set has less than this global batch, so all of it was planned as one")
    reads = profile.read_amplification
    read = {
        "by range": reads.by_range,
        "where every shard is read whole, once": reads.whole_shards,
        "for Parquet, if each sample reads the column chunks of its row group": reads.by_chunk,
    }
    if said := [f"{ratio:.2f} {how}" for how, ratio in read.items() if ratio is not None]:
        notes.append(f"bytes read for each byte used: {'; '.join(said)}")
    printed = []
    for title, table in shown:
        printed.append(plain_table(f"\n{title}", *table.columns))
        forms = ["{:.1%}" if form == SHARE else form for form in table.columns.values()]
        for column, form in zip(printed[-1].columns, forms, strict=True):
            column.justify = "left" if form in (TEXT, DATA) else column.justify
        for row in table.rows:
            printed[-1].add_row(*(Text(summary.written(cell, form)) for cell, form in zip(row, forms, strict=True)))
    return Group(*map(Text, lines), *printed, *(Text(f"- {note}") for note in notes))
