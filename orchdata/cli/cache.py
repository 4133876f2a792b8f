"""`orchdata cache` and `orchdata cache prune`: what the cache folder keeps, and less of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchdata.cli.options import JsonOption
from orchdata.cli.output import human_bytes, one_line_errors, plain_table, print_json, print_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from orchdata.loaders.kept.listing import KindListed, Listing
    from orchdata.loaders.kept.prune import Amount, Pruned

app = typer.Typer(invoke_without_command=True, help="List what the cache folder keeps; `prune` removes what is old.")
_FolderOption = Annotated[
    str | None,
    typer.Option(
        "--folder", help="The folder, such as that of an od.Cache; default: ORCHDATA_CACHE, ~/.cache/orchdata."
    ),
]
_UNITS = ((2 * 24 * 3600, 24 * 3600, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"))


@app.callback()
@one_line_errors
def cache(context: typer.Context, folder: _FolderOption = None, as_json: JsonOption = False) -> None:
    """List what the cache folder keeps: how much, of which data, when it was last used, and whether it is in use now.

    All that it has can be made again. `orchdata cache prune` removes what was not used for 30 days.
    """
    if context.invoked_subcommand is not None:
        return
    from orchdata.loaders.kept.listing import listing
    from orchdata.loaders.storage.cache import CacheFolder

    found = listing(CacheFolder(folder))
    if as_json:
        print_json(_as_json(asdict(found)))
    elif found.files or found.foreign or any(kind.foreign for kind in found.kinds.values()):
        print_table(_listing_table(found))
    else:
        typer.echo(f"nothing is kept in {found.folder}")


@app.command()
@one_line_errors
def prune(
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Remove what was not used for so long: 30d, 12h, 45m, 0s.")
    ] = "30d",
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Then remove the least recently used, down to this size: 50GB, 50GiB."),
    ] = None,
    all_versions: Annotated[
        bool, typer.Option("--all-versions", help="Also remove what a newer orchdata has made.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, and say what would be removed.")] = False,
    folder: _FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what the cache folder keeps and no process has used for a time. It is made again when it is needed.

    What a running process uses stays, and so do files of other users and of a newer orchdata.
    """
    from orchdata.loaders.amounts import bytes_of, seconds_of
    from orchdata.loaders.kept.prune import prune as prune_folder
    from orchdata.loaders.storage.cache import CacheFolder

    cache = CacheFolder(folder)
    pruned = prune_folder(
        cache,
        older_than_seconds=seconds_of(older_than, "--older-than"),
        most_bytes=None if max_bytes is None else bytes_of(max_bytes, "--max-bytes"),
        all_versions=all_versions,
        dry_run=dry_run,
    )
    if as_json:
        print_json({"folder": str(cache.root), "dry_run": dry_run, **asdict(pruned)})
    else:
        _print_pruned(pruned, str(cache.root), dry_run)


def _print_pruned(pruned: Pruned, folder: str, dry_run: bool) -> None:
    removed, left = pruned.removed.values(), pruned.left
    files, size = sum(each.files for each in removed), sum(each.bytes for each in removed)
    did = "would remove" if dry_run else "removed"
    typer.echo(f"{did} {_files(files)}, {human_bytes(size)}, from {folder}; {_amount(left)} left")
    for kind, amount in pruned.removed.items():
        typer.echo(f"  {kind}: {_amount(amount)}")
    for reason, amount in pruned.stays.items():
        typer.echo(f"not removed, {reason}: {_amount(amount)}")


def _amount(amount: Amount) -> str:
    return f"{_files(amount.files)}, {human_bytes(amount.bytes)}"


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _listing_table(found: Listing) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    building = f"; {found.builds:,} builds of indexes are under way" if found.builds else ""
    notes = [f"{found.foreign:,} files in the folder itself are not of orchdata"] if found.foreign else []
    return Group(
        Text(f"{found.folder}: {_files(found.files)}, {human_bytes(found.bytes)}{building}"),
        _kinds_table(found),
        *([_data_table(found)] if found.data else []),
        *([_index_table(found)] if found.indexes else []),
        *(Text(f"- {note}") for note in notes),
    )


def _kinds_table(found: Listing) -> Table:
    table = plain_table("\nWhat is kept", "folder", "content", "files", "size", "last used", "in use", "")
    table.columns[1].justify = table.columns[6].justify = "left"
    for name, kind in found.kinds.items():
        in_use = "unknown" if kind.in_use is None else f"{kind.in_use:,}" if kind.in_use else "-"
        last = "-" if kind.last_used is None else _ago(kind.last_used)
        table.add_row(name, kind.content, f"{kind.files:,}", human_bytes(kind.bytes), last, in_use, _remarks(kind))
    return table


def _remarks(kind: KindListed) -> str:
    counts = {
        "damaged": kind.damaged,
        "made by a newer orchdata": kind.newer,
        "of other users": kind.of_other_users,
        "not made by orchdata": kind.foreign,
    }
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _data_table(found: Listing) -> Table:
    kinds = [name for name in found.kinds if any(name in data.bytes for data in found.data.values())]
    table = plain_table("\nOf which data", "folder of the shards", "shards", *kinds, "last used", "in use")
    for name, data in found.data.items():
        sizes = [human_bytes(data.bytes[kind]) if kind in data.bytes else "-" for kind in kinds]
        table.add_row(name, f"{data.shards:,}", *sizes, _ago(data.last_used), "yes" if data.in_use else "-")
    return table


def _index_table(found: Listing) -> Table:
    table = plain_table("\nIndexes", "file", "data", "modalities", "shards", "samples", "size", "last used", "in use")
    table.columns[1].justify = table.columns[2].justify = "left"
    for index in found.indexes:
        table.add_row(
            index.path.rsplit("/", 1)[-1],
            index.data,
            ", ".join(index.modalities),
            f"{index.shards:,}",
            f"{index.samples:,}",
            human_bytes(index.bytes),
            _ago(index.last_used),
            {True: "yes", False: "-", None: "unknown"}[index.in_use],
        )
    return table


def _ago(then: float) -> str:
    seconds = time.time() - then
    for least, unit, name in _UNITS:
        if seconds >= least:
            return f"{seconds // unit:,.0f} {name} ago"
    return "just now"


def _as_json(value: Any) -> Any:
    """Return the value with times in place of seconds since 1970."""
    if isinstance(value, Mapping):
        return {name: _time(each) if name == "last_used" else _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
