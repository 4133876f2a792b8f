"""`orchdata bench`: what the library does on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchdata.cli.data import recipe_named
from orchdata.cli.options import JsonOption, MediaRootOption, RecipeOption, StorageOptionsOption, storage_options_of
from orchdata.cli.output import one_line_errors, print_json, print_table

if TYPE_CHECKING:
    from orchdata.bench.harness import Result, WideTable

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True, rich_markup_mode=None)

RepeatsOption = Annotated[int, typer.Option(help="Times to measure each thing.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the data.")]
FolderOption = Annotated[str | None, typer.Option(help="Where to write the data; default: a temporary folder.")]


@app.command()
@one_line_errors
def plan(
    ranks: Annotated[int, typer.Option(help="Simulated data-parallel ranks.")] = 2_560,
    samples_per_rank: Annotated[int, typer.Option(help="Samples per rank and step.")] = 16,
    samples: Annotated[int, typer.Option(help="Samples of the index.")] = 10_000_000,
    repeats: RepeatsOption = 30,
    seed: SeedOption = 0,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan steps at scale, over a made-up index."""
    from orchdata.bench.plan import PlanBench, run

    config = PlanBench(
        ranks=ranks, samples_per_rank=samples_per_rank, samples=samples, repeats=repeats, seed=seed, folder=folder
    )
    _measure("plan", config, run, as_json)


@app.command()
@one_line_errors
def throughput(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATHS]...", help="Your shards: files, globs or braces; default: a made-up data set."),
    ] = None,
    recipe: RecipeOption = None,
    media_root: MediaRootOption = None,
    storage_options: StorageOptionsOption = None,
    samples: Annotated[int, typer.Option(help="Of the made-up data set; of yours, at most, at random.")] = 800,
    consumer_ms: Annotated[float, typer.Option(help="CPU time of pure Python that is run for each batch.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Samples of a batch.")] = 16,
    workers: Annotated[int, typer.Option(help="Threads, or worker processes.")] = 2,
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a made-up data set or yours, in threads and in worker processes, compared with what the decoder allows."""
    from orchdata.bench.throughput import ThroughputBench, run

    config = ThroughputBench(
        paths=tuple(paths) if paths else None,
        recipe=recipe,
        media_root=media_root,
        samples=samples,
        consumer_ms=consumer_ms,
        batch_size=batch_size,
        workers=workers,
        repeats=repeats,
        seed=seed,
        folder=folder,
    )
    # Options are secret, and the report shows its config.
    how: dict[str, Any] = {"recipe": recipe_named(recipe), "storage_options": storage_options_of(storage_options)}
    _measure("throughput", config, partial(run, **how), as_json)


def _measure(name: str, config: Any, run: Callable[[Any], Sequence[Result | WideTable]], as_json: bool) -> None:
    from rich.console import Console

    from orchdata.bench.harness import make_report

    console = Console(stderr=True)
    with console.status(f"measuring: {name}") if console.is_terminal else nullcontext():
        results = run(config)
        report = make_report(f"orchdata bench {name}", config, results)
    if as_json:
        print_json(report.to_dict())
    else:
        print_table(report.render())
