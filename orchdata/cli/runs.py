"""`orchdata synth` and `orchdata demo`: make a dataset, and train on one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from orchdata.cli.options import JsonOption
from orchdata.cli.output import human_bytes, one_line_errors, print_json, print_table, stage_progress
from orchdata.progress import progress_bar

_REPORT: Final = Path("orchdata-demo.html")


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

    config = DemoConfig(samples=samples, steps=steps, batch_size=batch_size, seed=seed)
    target, said = _place_of_report(html)
    try:
        with stage_progress() as advance:
            report = run_demo(config, html=target, progress=advance)
    except (ProcessExitedException, ProcessRaisedException) as error:
        typer.echo(f"orchdata: error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        print_json(report.to_dict())
        return
    from orchdata.cli.tables import profile_table

    print_table(profile_table(report.profile))
    typer.echo()
    print_table(render(report))
    typer.echo(said)


def _place_of_report(html: Path | None) -> tuple[Path | None, str]:
    """Return the file of the report, and what to say of it; None where it cannot be written and was not asked for.

    Raises PackageError and ValueError as `check_report` if a file was given.
    """
    from orchdata.loaders.errors import PackageError
    from orchdata.profiling.page import check_report

    target = (_REPORT if html is None else html).absolute()
    try:
        check_report(target)
    except (PackageError, ValueError) as error:
        if html is not None:
            raise
        return None, f"no report of the dataset: {error}"
    return target, f"report of the dataset: {target}"
