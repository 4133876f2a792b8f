"""`orchdata bench`: what the library does on this machine. Each benchmark is a module with `run(config) -> results`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
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
    """Planning one step at scale, and starting a loader over a large index."""
    from orchdata.bench.plan import PlanBench, run

    config = PlanBench(
        ranks=ranks, samples_per_rank=samples_per_rank, samples=samples, repeats=repeats, seed=seed, folder=folder
    )
    _measure("plan", config, run, as_json)


@app.command()
@one_line_errors
def index(
    samples: Annotated[int, typer.Option(help="Samples of the dataset, about 100 KiB each.")] = 6_000,
    words: Annotated[int, typer.Option(help="Mean length of a text.")] = 300,
    small_shards: Annotated[int, typer.Option(help="Shards of one small sample each.")] = 2_000,
    repeats: RepeatsOption = 5,
    seed: SeedOption = 0,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Indexing: walking shards, media headers, and what tokenizing adds, on one core; many small shards, on all."""
    from orchdata.bench.index import IndexBench, run

    config = IndexBench(
        samples=samples, words=words, small_shards=small_shards, repeats=repeats, seed=seed, folder=folder
    )
    _measure("index", config, run, as_json)


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
    samples: Annotated[
        int, typer.Option(help="Of the made-up data set, about 140 KiB each; of yours, at most, at random.")
    ] = 800,
    consumer: Annotated[str, typer.Option(help="What is done with each batch: none, torch or python.")] = "none",
    consumer_ms: Annotated[float, typer.Option(help="How long that takes where nothing else runs.")] = 50.0,
    batch_size: Annotated[int, typer.Option(help="Samples of a batch.")] = 16,
    workers: Annotated[int, typer.Option(help="Threads, or worker processes, of each loader.")] = 2,
    remote: Annotated[bool, typer.Option("--remote", help="From a server of HTTP, compared with files.")] = False,
    latency_ms: Annotated[float, typer.Option(help="With --remote: delay before each answer of the server.")] = 20.0,
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a made-up data set or yours, in threads and in worker processes, compared with what the decoder allows."""
    if remote:
        if paths or recipe or media_root or consumer != "none":
            raise ValueError("--remote serves a made-up data set: leave out paths, recipe, media root and consumer")
        from orchdata.bench.remote import RemoteBench
        from orchdata.bench.remote import run as run_remote

        sizes = {"samples": samples, "batch_size": batch_size, "workers": workers, "repeats": repeats, "seed": seed}
        _measure("throughput", RemoteBench(latency_ms=latency_ms, folder=folder, **sizes), run_remote, as_json)
        return
    from orchdata.bench.throughput import ThroughputBench, run

    config = ThroughputBench(
        paths=tuple(paths) if paths else None,
        recipe=recipe,
        media_root=media_root,
        samples=samples,
        consumer=consumer,
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


@app.command()
@one_line_errors
def exchange(
    parts_per_rank: Annotated[int, typer.Option(help="Images that a rank encodes, on average.")] = 32,
    tokens: Annotated[int, typer.Option(help="Median of an image's merged tokens.")] = 128,
    hidden: Annotated[int, typer.Option(help="Width of a row, in bfloat16.")] = 1_280,
    repeats: RepeatsOption = 30,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Features between ranks against a plain all-to-all and all-gather-and-drop."""
    from orchdata.bench.exchange import ExchangeBench, run

    config = ExchangeBench(parts_per_rank=parts_per_rank, tokens=tokens, hidden=hidden, repeats=repeats, seed=seed)
    _measure("exchange", config, run, as_json)


@app.command()
@one_line_errors
def train(
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks, a core each.")] = 2,
    steps: Annotated[int, typer.Option(help="Measured steps of each way to balance.")] = 24,
    repeats: Annotated[int, typer.Option(help="Times to train on each batch.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 8,
    dataset: Annotated[Path | None, typer.Option(help="A dataset description; default: datasets/skewed.yaml.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of dataset, order and weights.")] = 0,
    quick: Annotated[bool, typer.Option(help="A short calibration and no demands: does it run?")] = False,
    as_json: JsonOption = False,
) -> None:
    """Training a small model unbalanced and balanced in turn, against the gain that plans and fitted costs predict."""
    from orchdata.bench.train import TrainBench, run
    from orchdata.reference.launch import LaunchError

    config = TrainBench(
        ranks=ranks,
        steps=steps,
        repeats=repeats,
        batch_size=batch_size,
        dataset=dataset,
        seed=seed,
        quick=quick,
    )
    try:
        _measure("train", config, run, as_json)
    except LaunchError as error:
        typer.echo(f"orchdata: error: {error}", err=True)  # with the end of the training's log
        raise typer.Exit(1) from error


def _measure(name: str, config: Any, run: Callable[[Any], Sequence[Result | WideTable]], as_json: bool) -> None:
    from rich.console import Console

    from orchdata.bench.harness import Result, make_report

    console = Console(stderr=True)
    with console.status(f"measuring: {name}") if console.is_terminal else nullcontext():
        results = run(config)
        if name == "throughput":  # what this repository's own data and machine must reach measures no other
            results = [replace(each, demand=None) if isinstance(each, Result) else each for each in results]
        report = make_report(f"orchdata bench {name}", config, results)
    if as_json:
        print_json(report.to_dict())
    else:
        print_table(report.render())
