"""`orchdata cache` and `orchdata cache prune`: what the cache folder keeps, and less of it."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from orchdata.cli.options import JsonOption
from orchdata.cli.output import human_bytes, one_line_errors, plain_table, print_json, print_table

if TYPE_CHECKING:
    from orchdata.loaders.kept import Amount

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
    """List what the cache folder keeps: how much of each kind, and when it was last used.

    All that it has can be made again. `orchdata cache prune` removes what was not used for 30 days.
    """
    if context.invoked_subcommand is not None:
        return
    from orchdata.loaders.kept import KINDS, Amount, kept_files
    from orchdata.loaders.storage.cache import CacheFolder

    amounts: dict[str, Amount] = {}
    last_used: dict[str, float] = {}
    root = CacheFolder(folder)
    for file in kept_files(root):  # the last used one last
        amounts.setdefault(file.kind, Amount()).add(file)
        last_used[file.kind] = file.last_used
    if as_json:
        times = {
            name: datetime.fromtimestamp(then, UTC).isoformat(timespec="seconds") for name, then in last_used.items()
        }
        kinds = {name: {**asdict(amount), "last_used": times[name]} for name, amount in amounts.items()}
        print_json({"folder": str(root.root), "kinds": kinds})
    elif amounts:
        table = plain_table(str(root.root), "folder", "content", "files", "size", "last used")
        table.columns[1].justify = "left"
        for name, amount in amounts.items():
            size = human_bytes(amount.bytes)
            table.add_row(name, KINDS[name].content, f"{amount.files:,}", size, _ago(last_used[name]))
        print_table(table)
    else:
        typer.echo(f"nothing is kept in {root.root}")


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, and say what would be removed.")] = False,
    folder: _FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what the cache folder keeps of this user's and was not used for a time. It is made again when needed.

    A run that has a file open goes on with it.
    """
    from orchdata.loaders.amounts import bytes_of, seconds_of
    from orchdata.loaders.kept import prune as prune_folder
    from orchdata.loaders.storage.cache import CacheFolder

    cache = CacheFolder(folder)
    pruned = prune_folder(
        cache,
        older_than_seconds=seconds_of(older_than, "--older-than"),
        most_bytes=None if max_bytes is None else bytes_of(max_bytes, "--max-bytes"),
        dry_run=dry_run,
    )
    if as_json:
        print_json({"folder": str(cache.root), "dry_run": dry_run, **asdict(pruned)})
        return
    removed = pruned.removed.values()
    files, size = sum(each.files for each in removed), sum(each.bytes for each in removed)
    did = "would remove" if dry_run else "removed"
    typer.echo(f"{did} {_files(files)}, {human_bytes(size)}, from {cache.root}; {_amount(pruned.left)} left")
    for kind, amount in pruned.removed.items():
        typer.echo(f"  {kind}: {_amount(amount)}")


def _amount(amount: Amount) -> str:
    return f"{_files(amount.files)}, {human_bytes(amount.bytes)}"


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _ago(then: float) -> str:
    seconds = time.time() - then
    for least, unit, name in _UNITS:
        if seconds >= least:
            return f"{seconds // unit:,.0f} {name} ago"
    return "just now"
