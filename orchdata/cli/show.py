"""`orchdata show`: samples as the model sees them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from orchdata.cli.command import Data, JsonOption, print_json, takes

FIRST_SAMPLES = 3
MOST_IGNORED = 20
LONGEST: Final = 600
"""Characters of a stretch of text that are shown."""
_COLOURS: Final = {"trained": "green", "masked": None}


@takes(Data, *(field.name for field in fields(Data) if field.name not in ("key", "ignore")))
def show(
    data: Data,
    key: Annotated[
        list[str] | None, typer.Option(help="The sample of this key; last_dot: where keys end, ShardDataset(key=).")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Write media as the model gets them here.")] = None,
    full: Annotated[bool, typer.Option("--full", help="All of long texts.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the model sees: text from the token ids, what of it is trained, media with their sizes.

    Shows the first samples; with --key one sample. Samples are decoded as a loader does; for one that cannot be loaded
    it says why.
    """
    import numpy as np

    from orchdata.cli.dataset import indexed
    from orchdata.dataset.shards import unchosen_rows
    from orchdata.dataset.unread import unread_of
    from orchdata.showing import rows_of_key, save_in, shown_rows

    sample_key = next((each for each in key or () if each != "last_dot"), None)
    with redirect_stdout(sys.stderr):  # what a tokenizer prints
        dataset, index = indexed(replace(data, key="last_dot" if "last_dot" in (key or ()) else None))
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
    for sample in samples:
        _print_sample(sample, full=full)
    if ignored_fields := ignored_words(unread_of(dataset, index)["names"]):
        typer.echo(_visible(f"fields of these shards that the recipe does not read: {ignored_fields}"))
    for file in files:
        typer.echo(_visible(f"saved {file}"))


def _print_sample(sample: dict[str, Any], *, full: bool) -> None:
    """Print a sample, coloured in a terminal."""
    piece = f", piece {sample['piece']}" if sample["piece"] else ""
    source = f" of {sample['source']}" if sample["source"] else ""
    name = typer.style(_visible(f"{sample['key']}{piece}{source}"), bold=True)
    typer.echo(f"{name} in {_visible(sample['shard'])}, row {sample['row']}")
    typer.echo(f"{sample['tokens']:,} tokens, {sample['trained_tokens']:,} trained")
    if sample["error"] is not None:
        typer.secho(_visible(sample["error"]), fg="red")
    for span in sample["spans"]:
        if "modality" in span:
            kind, sizes = span["modality"], span["sizes"].items()
            shown = "".join(f", {size} {_shortened(_number(value), full=full)}" for size, value in sizes)
            content = _visible(f"{span['field']}, {span['positions']:,} positions{shown}")
        else:
            kind = "trained" if span["trained"] else "masked"
            said = "ids " + " ".join(map(str, span["token_ids"])) if span["text"] is None else span["text"]
            content = _visible(_shortened(said, full=full), kept="\n").replace("\n", "\n" + " " * 15)
        typer.echo(f"{kind:<7} {span['tokens']:>6,} " + typer.style(content, fg=_COLOURS.get(kind, "cyan")))


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


def ignored_words(ignored: Mapping[str, int]) -> str:
    """Names of fields that are not read, with how many there are."""
    from orchdata.loaders.records import LEFT_OUT
    from orchdata.loaders.text.conversation import WORDS_SUFFIX

    named = {name: count for name, count in ignored.items() if name != LEFT_OUT}
    shown = [f"{name.removesuffix(WORDS_SUFFIX)} ({count:,})" for name, count in list(named.items())[:MOST_IGNORED]]
    return f"{', '.join(shown)}{', ...' if len(named) > len(shown) else ''}"
