"""`orchdata show`: samples as the model sees them."""

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
)
from orchdata.cli.output import ignored_words, one_line_errors, print_json

if TYPE_CHECKING:
    from rich.console import Console

FIRST_SAMPLES = 3
LONGEST: Final = 600
"""Characters of a stretch of text that are shown."""
_STYLES: Final = {"trained": "green", "masked": "dim"}


@one_line_errors
def show(
    paths: Annotated[list[str], typer.Argument(metavar="PATHS", help="Shards: files, globs or braces.")],
    key: Annotated[
        list[str] | None, typer.Option(help="The sample of this key; last_dot: where keys end, ShardDataset(key=).")
    ] = None,
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

    Shows the first samples; with --key one sample. Samples are decoded as a loader does; for one that cannot be loaded
    it says why.
    """
    import numpy as np

    from orchdata.dataset.indexed.unread import unread_of
    from orchdata.dataset.shards import unchosen_rows
    from orchdata.showing import rows_of_key, save_in, shown_rows

    sample_key = next((each for each in key or () if each != "last_dot"), None)
    with redirect_stdout(sys.stderr):  # what a tokenizer prints
        rule = "last_dot" if "last_dot" in (key or ()) else ""
        options = DataOptions.parsed(media_root, column, container, index_field, storage_options, index_file, rule)
        dataset, index = indexed(paths, recipe_named(recipe), options, expression, allow_recipes=allow_recipes)
        if sample_key is None:
            rows = np.setdiff1d(np.arange(index.num_rows), unchosen_rows(dataset, index))[:FIRST_SAMPLES].tolist()
        else:
            try:
                rows = rows_of_key(dataset, index, sample_key)
            except KeyError as error:
                raise ValueError(error.args[0]) from None
        samples = shown_rows(dataset, index, rows, None if save is None else save_in(save))
    files = [span["file"] for sample in samples for span in sample["spans"] if span.get("file")]
    if as_json:
        ignored = dict(index.totals["ignored_fields"])
        print_json({"groups": [{"samples": samples}], "ignored_fields": ignored, "files": files})
        return
    _print_samples(samples, ignored_words(unread_of(dataset, index)["names"]), files, full=full)


def _print_samples(samples: Sequence[dict[str, Any]], ignored: str, files: Sequence[str], *, full: bool) -> None:
    """Print samples, coloured in a terminal; then fields of the shards that are not read, and written files."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for sample in samples:
        _print_sample(console, sample, full=full)
    if ignored:
        console.print(Text(_visible(f"fields of these shards that the recipe does not read: {ignored}")))
    for file in files:
        console.print(Text(_visible(f"saved {file}")), soft_wrap=True)


def _print_sample(console: Console, sample: dict[str, Any], *, full: bool) -> None:
    from rich.table import Table
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
    spans = Table.grid(padding=(0, 1))
    spans.add_column(min_width=7, style="dim", no_wrap=True)
    spans.add_column(min_width=6, style="dim", no_wrap=True, justify="right")
    spans.add_column(overflow="fold")
    for span in sample["spans"]:
        kind, content = _content(span, full=full)
        spans.add_row(kind, f"{span['tokens']:,}", Text(content, style=_STYLES.get(kind, "cyan")))
    console.print(spans)


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
