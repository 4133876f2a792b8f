"""`orchdata doctor`, `warm`, `cache`, `bench`, `synth` and `demo`: what this machine has, lacks, keeps and does."""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchdata.cli.command import (
    JsonOption,
    StorageOptionsOption,
    human_bytes,
    one_line_errors,
    plain_table,
    print_json,
    print_table,
    profile_table,
    recipe_named,
    stage_progress,
    storage_options_of,
    takes,
)
from orchdata.loaders.amounts import counted
from orchdata.loaders.environment import requirements, way_out
from orchdata.notices import progress_bar

if TYPE_CHECKING:
    from orchdata.bench import Result, WideTable
    from orchdata.loaders.storage.cache import Amount

cache_app = typer.Typer(
    invoke_without_command=True, help="List what the cache folder keeps; `prune` removes what is old."
)
bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True, rich_markup_mode=None)

_FEATURES: Final = {
    "av": "video",
    "transformers": "Hugging Face models: od.hf",
    "jinja2": "chat templates of models: ChatTemplate.from_jinja",
    "obstore": "shards in object storage: s3://, gs://, az://, http(s)://",
    "fsspec": "shards in other storage, such as hf://",
    "boto3": "AWS profiles",
    "matplotlib": "plots and reports",
    "ray": "steps from other machines: od.RayEngine",
    "torchaudio": "not needed; transformers imports it if it is installed: leave out one that does not fit torch",
    "torchvision": "processors of some models of transformers, such as Qwen's",
}
"""Package -> what it is for."""
_MODULES: Final = {"pillow": "PIL", "pyyaml": "yaml"}
_CacheOption = Annotated[
    str | None,
    typer.Option(
        "--folder", help="The folder, such as that of an od.Cache; default: ORCHDATA_CACHE, ~/.cache/orchdata."
    ),
]
_UNITS = ((2 * 24 * 3600, 24 * 3600, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"))
_REPORT: Final = Path("orchdata-demo.html")


@one_line_errors
def doctor(as_json: JsonOption = False) -> None:
    """Look at this machine: versions, what is missing and for what, accelerators, the cache folder.

    Fails where something is broken that loading needs.
    """
    findings = []
    packages = [name for name in requirements() if name not in _FEATURES] + list(_FEATURES)
    for name in ("orchdata", "Python", *packages, "accelerators", "cache folder"):
        module, use = _MODULES.get(name, name), f" ({_FEATURES[name]})" if name in _FEATURES else ""
        verdict, hint = "good", ""
        try:
            if name in packages:
                importlib.import_module(module)
            if name == "accelerators":
                import torch

                found = f"{torch.cuda.device_count()} that torch sees; {len(os.sched_getaffinity(0))} CPUs"
            elif name == "cache folder":
                from orchdata.loaders.storage.cache import CacheFolder

                root = CacheFolder().make_root()
                with tempfile.NamedTemporaryFile(dir=root):
                    found = f"{root}: can be written to"
            else:
                found = platform.python_version() if name == "Python" else version(name)
        except Exception as error:  # noqa: BLE001 - anything that is wrong with an installation is a finding
            found, verdict = " ".join(f"{type(error).__name__}: {error}".split()), "missing" if use else "broken"
            hint = way_out(module, error) if name in packages else ""
        findings.append({"name": name, "found": found + use, "verdict": verdict, "hint": hint})
    broken = sum(finding["verdict"] == "broken" for finding in findings)
    if as_json:
        print_json({"findings": findings})
    else:
        for finding in findings:
            typer.echo(f"{finding['verdict']:<8}{finding['name']}: {finding['found']}")
            if finding["hint"]:
                typer.echo(f"        {finding['hint']}")
        typer.echo(f"{broken} broken" if broken else "all that loading needs is here")
    if broken:
        raise typer.Exit(1)


@one_line_errors
def warm(as_json: JsonOption = False) -> None:
    """Compile the kernels of indexing, loading and planning, for the image of a container or a new machine.

    They are stored in NUMBA_CACHE_DIR if it is set, as it must be when they are used; else next to the package.
    """
    from orchdata import DataLoader, ShardDataset
    from orchdata.engines.warm import FAMILIES, Warming, stored_in
    from orchdata.synth import synthesize

    started = time.monotonic()
    Warming(list(FAMILIES)).wait()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        os.environ["ORCHDATA_CACHE"] = folder + "/cache"  # of this process, which then ends
        paths = synthesize("omni", Path(folder), samples=32).paths
        dataset = ShardDataset([str(path) for path in paths])
        dataset.index()
        next(iter(DataLoader(dataset.split("train", 0.5), batch_size=2, shuffle=True, dp=(0, 2), num_threads=1)))
    result = {"folders": stored_in(), "seconds": round(time.monotonic() - started, 1)}
    if as_json:
        print_json(result)
    else:
        typer.echo(f"kernels are compiled, in {result['seconds']} s: {', '.join(stored_in())}")


@cache_app.callback()
@one_line_errors
def cache(context: typer.Context, folder: _CacheOption = None, as_json: JsonOption = False) -> None:
    """List what the cache folder keeps: how much of each kind, and when it was last used.

    All that it has can be made again. `orchdata cache prune` removes what was not used for 30 days.
    """
    if context.invoked_subcommand is not None:
        return
    from orchdata.loaders.storage.cache import KINDS, Amount, CacheFolder, kept_files

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
            seconds, size = time.time() - last_used[name], human_bytes(amount.bytes)
            passed = (f"{seconds // unit:,.0f} {units} ago" for least, unit, units in _UNITS if seconds >= least)
            table.add_row(name, KINDS[name].content, f"{amount.files:,}", size, next(passed, "just now"))
        print_table(table)
    else:
        typer.echo(f"nothing is kept in {root.root}")


@cache_app.command()
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
    folder: _CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what the cache folder keeps of this user's and was not used for a time. It is made again when needed.

    A run that has a file open goes on with it.
    """
    from orchdata.loaders.amounts import bytes_of, seconds_of
    from orchdata.loaders.storage.cache import CacheFolder
    from orchdata.loaders.storage.cache import prune as prune_folder

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
    typer.echo(f"{did} {counted(files, 'file')}, {human_bytes(size)}, from {cache.root}; {_amount(pruned.left)} left")
    for kind, amount in pruned.removed.items():
        typer.echo(f"  {kind}: {_amount(amount)}")


def _amount(amount: Amount) -> str:
    return f"{counted(amount.files, 'file')}, {human_bytes(amount.bytes)}"


_Repeats = Annotated[int, typer.Option(help="Times to measure each thing.")]
_Seed = Annotated[int, typer.Option(help="Seed of the data.")]
_Folder = Annotated[str | None, typer.Option(help="Where to write the data; default: a temporary folder.")]


@dataclass(frozen=True, kw_only=True)
class PlanBench:
    """What `orchdata bench plan` measures: `repeats` steps, all different. Its index takes about 170 bytes a sample."""

    ranks: Annotated[int, typer.Option(help="Simulated data-parallel ranks.")] = 2_560
    samples_per_rank: Annotated[int, typer.Option(help="Samples per rank and step.")] = 16
    samples: Annotated[int, typer.Option(help="Samples of the index.")] = 10_000_000
    repeats: _Repeats = 30
    seed: _Seed = 0
    folder: _Folder = None


@dataclass(frozen=True, kw_only=True)
class ThroughputBench:
    """What `orchdata bench throughput` measures."""

    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATHS]...", help="Your shards: files, globs or braces; default: a made-up data set."),
    ] = None
    recipe: Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="An od.Recipe; default: od.Recipe().")] = (
        None
    )
    media_root: Annotated[
        str | None, typer.Option(help="Folder below which the files lie that records of JSON name.")
    ] = None
    samples: Annotated[int, typer.Option(help="Of the made-up data set; of yours, at most, at random.")] = 800
    consumer_ms: Annotated[float, typer.Option(help="CPU time of pure Python that is run for each batch.")] = 0.0
    batch_size: Annotated[int, typer.Option(help="Samples of a batch.")] = 16
    workers: Annotated[int, typer.Option(help="Threads, or worker processes.")] = 2
    repeats: _Repeats = 3
    seed: _Seed = 0
    folder: _Folder = None

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "workers", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.paths and (self.recipe or self.media_root):
            raise ValueError("recipe and media_root are of a data set of yours: give its paths too")


@bench_app.command()
@takes(PlanBench)
def plan(config: PlanBench, as_json: JsonOption = False) -> None:
    """Plan steps at scale, over a made-up index."""
    from orchdata.bench import run_plan

    _measure("plan", config, run_plan, as_json)


@bench_app.command()
@takes(ThroughputBench)
def throughput(
    config: ThroughputBench, storage_options: StorageOptionsOption = None, as_json: JsonOption = False
) -> None:
    """Load a made-up data set or yours, in threads and in worker processes, compared with what the decoder allows."""
    from orchdata.bench import run_throughput

    # Options are secret, and the report shows its config.
    how: dict[str, Any] = {
        "recipe": recipe_named(config.recipe),
        "storage_options": storage_options_of(storage_options),
    }
    _measure("throughput", config, partial(run_throughput, **how), as_json)


def _measure(name: str, config: Any, run: Callable[[Any], Sequence[Result | WideTable]], as_json: bool) -> None:
    from rich.console import Console

    from orchdata.bench import make_report

    console = Console(stderr=True)
    with console.status(f"measuring: {name}") if console.is_terminal else nullcontext():
        results = run(config)
        report = make_report(f"orchdata bench {name}", config, results)
    if as_json:
        print_json(report.to_dict())
    else:
        print_table(report.render())


@one_line_errors
def synth(
    description: Annotated[Path, typer.Argument(help="A dataset description: a YAML file, or demo or omni.")],
    out: Annotated[Path, typer.Argument(help="The folder to write shards into.")],
    samples: Annotated[int | None, typer.Option(help="Write this many samples, not the described number.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a seeded multimodal dataset: procedural images, synthesised audio, text."""
    from orchdata.synth import synthesize

    with progress_bar("writing samples") as advance:
        report = synthesize(description, out, samples=samples, progress=advance)
    if as_json:
        print_json(report.to_dict())
        return
    typer.echo(
        f"{report.samples:,} samples in {len(report.paths)} shards, {human_bytes(report.payload_bytes)}: "
        f"{report.images:,} images, {report.audio_clips:,} audio clips ({report.audio_seconds:,.0f} s), "
        f"{report.words:,} words"
    )
    typer.echo(f"shards: {out}/shard-*.tar")


@one_line_errors
def demo(
    samples: Annotated[int, typer.Option(help="Samples of the dataset.")] = 1536,
    steps: Annotated[int, typer.Option(help="Measured steps, unbalanced and balanced each.")] = 48,
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of dataset, order and weights.")] = 0,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help=f"Write the report of the dataset here; default: {_REPORT}."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a dataset, profile it, and train a small multimodal LLM on 2 ranks, unbalanced and balanced."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    from orchdata.demo import DemoConfig, render, run_demo
    from orchdata.loaders.errors import PackageError
    from orchdata.profiling.page import check_report

    config = DemoConfig(samples=samples, steps=steps, batch_size=batch_size, seed=seed)
    target: Path | None = (_REPORT if html is None else html).absolute()
    said = f"report of the dataset: {target}"
    try:
        check_report(str(target))
    except (PackageError, ValueError) as error:
        if html is not None:
            raise
        target, said = None, f"no report of the dataset: {error}"
    try:
        with stage_progress() as advance:
            report = run_demo(config, html=target, progress=advance)
    except (ProcessExitedException, ProcessRaisedException) as error:
        typer.echo(f"orchdata: error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        print_json(report.to_dict())
        return
    print_table(profile_table(report.profile))
    typer.echo()
    print_table(render(report))
    typer.echo(said)
