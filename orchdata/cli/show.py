"""`orchdata show`: samples as the model sees them, by key or as a rank has them in a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchdata.cli.data import indexed, recipe_named
from orchdata.cli.options import (
    AllowRecipesOption,
    ColumnsOption,
    ContainersOption,
    DataOptions,
    FilterOption,
    IndexFieldsOption,
    IndexFileOption,
    JsonOption,
    MediaRootOption,
    RecipeOption,
    StorageOptionsOption,
    load_object,
)
from orchdata.cli.output import ignored_words, one_line_errors, print_json

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    from orchdata.dataloader import DataLoader
    from orchdata.loaders.index.index import Index

FIRST_SAMPLES = 3
LONGEST: Final = 600
"""Characters of a stretch of text that are shown."""
_STYLES: Final = {"trained": "green", "masked": "dim", "media": "cyan"}
_KIND_WIDTH: Final = 9
_COUNT_WIDTH: Final = 7


@one_line_errors
def show(
    context: typer.Context,
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATHS", help="Shards: files, globs or braces; left out with --loader."),
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="In place of PATHS and options of the data: a function that makes the run's DataLoader, called with "
            "dp=(rank, ranks).",
        ),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="The sample of this key; last_dot: where keys end, ShardDataset(key=).")
    ] = None,
    step: Annotated[int | None, typer.Option(help="With --loader: what a rank gets in this step of the run.")] = None,
    epoch: Annotated[int, typer.Option(help="With --step: of this epoch.")] = 0,
    rank: Annotated[int, typer.Option(help="With --step: this data-parallel rank.")] = 0,
    ranks: Annotated[int, typer.Option(help="With --step: of so many.")] = 1,
    recipe: RecipeOption = None,
    allow_recipes: AllowRecipesOption = False,
    media_root: MediaRootOption = None,
    column: ColumnsOption = None,
    container: ContainersOption = None,
    index_field: IndexFieldsOption = None,
    storage_options: StorageOptionsOption = None,
    index_file: IndexFileOption = None,
    expression: FilterOption = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Write media as the model gets them here.")] = None,
    full: Annotated[bool, typer.Option("--full", help="All of long texts.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the model sees: text from the token ids, what of it is trained, media with their sizes.

    Shows the first samples; with --key one sample; with --loader and --step what a rank gets in a step, planned again.
    Samples are decoded as a loader does; for one that cannot be loaded it says why.
    """
    # What means nothing together.
    sample_key = next((each for each in key or () if each != "last_dot"), None)
    given = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    if sample_key is not None and step is not None:
        raise ValueError("give --key, or --step, not both")
    if loader is None and step is not None:
        raise ValueError("--step goes with --loader MODULE:NAME, a function that makes the DataLoader of the run")
    if step is None and (of_a_step := sorted(given & {"epoch", "rank", "ranks"})):
        raise ValueError(f"--{of_a_step[0]} goes with --step: it says what run the step is of")
    of_the_run = {"loader", "key", "step", "epoch", "rank", "ranks", "save", "full", "as_json"}
    if loader is not None and (surplus := sorted(given - of_the_run)):
        flag = {"expression": "--filter", "paths": "PATHS"}.get(surplus[0], f"--{surplus[0].replace('_', '-')}")
        raise ValueError(f"leave out {flag}: the DataLoader of --loader says it")
    if loader is None and not paths:
        raise ValueError("give PATHS, or --loader MODULE:NAME, which makes the run's DataLoader")

    from orchdata.dataset.shards import unchosen_rows
    from orchdata.showing import save_in, shards_of, shards_of_loader, shown_rows, shown_step, source_names

    use_file = None if save is None else save_in(save)
    with redirect_stdout(sys.stderr):  # what a tokenizer prints
        run = None if loader is None else _made(loader, rank, ranks)
        if run is None:
            rule = "last_dot" if "last_dot" in (key or ()) else ""
            options = DataOptions.parsed(media_root, column, container, index_field, storage_options, index_file, rule)
            named = recipe_named(recipe)
            dataset, index = indexed(paths or [], named, options, expression, allow_recipes=allow_recipes)
            shards = shards_of(dataset, index)
        else:
            shards = shards_of_loader(run._runtime.prepared.spec)
            dataset, index = run.dataset, shards.index
        if run is None or step is None:
            rows = _rows(index, unchosen_rows(dataset, index), sample_key)
            sources = source_names(dataset, index, rows)
            groups = [{"samples": shown_rows(shards, rows, sources, use_file=use_file)}]
        else:
            try:
                plan = run.plan_at(epoch, step)
            except IndexError as error:
                raise ValueError(str(error)) from None
            groups = shown_step(shards, plan, rank, use_file)
    spans = [span for group in groups for sample in group["samples"] for span in sample["spans"]]
    files = [span["file"] for span in spans if span.get("file")]
    if as_json:
        print_json({"groups": groups, "ignored_fields": dict(index.totals["ignored_fields"]), "files": files})
        return
    from orchdata.dataset.indexed.unread import unread_of

    _print_groups(groups, ignored_words(unread_of(dataset, index)["names"]), files, full=full)


def _made(name: str, rank: int, ranks: int) -> DataLoader:
    """Return the DataLoader that the user's function makes for rank `rank` of `ranks`."""
    from orchdata.dataloader import DataLoader

    make: Any = load_object(name, object, "--loader")
    if not callable(make):
        raise ValueError(f"--loader {name} must be a function that makes the DataLoader, got {type(make).__name__}")
    called = f"--loader {name}, called with dp=({rank}, {ranks})"
    try:
        loader = make(dp=(rank, ranks))
    except Exception as error:  # a user's function may raise anything
        raise ValueError(f"{called}: {type(error).__name__}: {error}") from error
    if not isinstance(loader, DataLoader):
        raise ValueError(f"{called}, must give an od.DataLoader, got {type(loader).__name__}")
    if loader.steps().num_ranks != ranks:
        raise ValueError(f"{called}, gave a DataLoader of {loader.steps().num_ranks} ranks: hand it what it is given")
    return loader


def _rows(index: Index, unchosen: NDArray[Any], key: str | None) -> list[int]:
    import numpy as np

    from orchdata.showing import rows_of_key

    if key is None:
        chosen: list[int] = np.setdiff1d(np.arange(index.num_rows), unchosen)[:FIRST_SAMPLES].tolist()
        return chosen
    try:
        return rows_of_key(index, unchosen, key)
    except KeyError as error:
        raise ValueError(error.args[0]) from None


def _print_groups(groups: Sequence[dict[str, Any]], ignored: str, files: Sequence[str], *, full: bool) -> None:
    """Print samples, coloured in a terminal; then fields of the shards that are not read, and written files."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for group in groups:
        if "step" in group:
            console.print(Text(_heading(group), style="bold"))
        for sample in group["samples"]:
            _print_sample(console, sample, full=full)
    if ignored:
        console.print(Text(_visible(f"fields of these shards that the recipe does not read: {ignored}")))
    for file in files:
        console.print(Text(_visible(f"saved {file}")), soft_wrap=True)


def _heading(group: dict[str, Any]) -> str:
    samples = [sample for sample in group["samples"] if sample["error"] is None]
    failed = len(group["samples"]) - len(samples)
    return (
        f"epoch {group['epoch']}, step {group['step']}, rank {group['rank']} of {group['ranks']}, microbatch "
        f"{group['microbatch']} of {group['microbatches']}: {len(samples):,} samples, "
        f"{sum(sample['tokens'] for sample in samples):,} tokens, "
        f"{sum(sample['trained_tokens'] for sample in samples):,} trained"
        f"{f', {failed:,} that cannot be loaded' if failed else ''}\n"
    )


def _print_sample(console: Console, sample: dict[str, Any], *, full: bool) -> None:
    from rich.text import Text

    piece = f", piece {sample['piece']}" if sample["piece"] else ""
    source = f" of {sample['source']}" if sample["source"] else ""
    console.print(
        Text(_visible(f"{sample['key']}{piece}{source}"), style="bold"),
        Text(_visible(f"in {sample['shard']}, row {sample['row']}")),
    )
    console.print(Text(f"{sample['tokens']:,} tokens, {sample['trained_tokens']:,} trained"))
    if sample["error"] is not None:
        console.print(Text(_visible(sample["error"]), style="red"))
    for span in sample["spans"]:
        kind, content = _content(span, full=full)
        style = _STYLES.get(kind, _STYLES["media"])
        margin = f"{kind:<{_KIND_WIDTH - 1}} {span['tokens']:>{_COUNT_WIDTH - 1},} "
        for number, line in enumerate(Text(content).wrap(console, max(20, console.width - len(margin)))):
            line.rstrip()
            console.print(Text(margin if not number else " " * len(margin), style="dim"), line, sep="", style=style)
    console.print()


def _content(span: dict[str, Any], *, full: bool) -> tuple[str, str]:
    if "modality" in span:
        sizes = "".join(f", {name} {_shortened(_number(value), full=full)}" for name, value in span["sizes"].items())
        return span["modality"], _visible(f"{span['field']}, {span['positions']:,} positions{sizes}")
    said = "ids " + " ".join(map(str, span["token_ids"])) if span["text"] is None else span["text"]
    return "trained" if span["trained"] else "masked", _visible(_shortened(said, full=full), kept="\n")


def _number(value: Any) -> str:
    """A number, or a list of them: what is measured to four digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(_number, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _visible(text: str, *, kept: str = "") -> str:
    """Escape characters that would move the cursor, turn its direction or end a line, except `kept`."""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )


def _shortened(text: str, *, full: bool) -> str:
    if full or len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
