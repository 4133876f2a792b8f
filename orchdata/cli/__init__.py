"""The command line: each command parses, calls and prints. Heavy imports wait until a command runs."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from orchdata import __version__
from orchdata.cli import bench, cache, data, doctor, plan_run, runs, show

app = typer.Typer(
    name="orchdata",
    help="Balance multimodal LLM training: index, profile and load shards of images, audio and text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"orchdata {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Balance multimodal LLM training: index, profile and load shards of images, audio and text."""


app.command()(data.index)
app.command()(data.profile)
app.command()(data.verify)
app.command()(plan_run.plan_run)
app.command()(show.show)
app.command()(doctor.doctor)
app.command()(doctor.warm)
app.command()(runs.synth)
app.command()(runs.demo)
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack what data say
    app()
