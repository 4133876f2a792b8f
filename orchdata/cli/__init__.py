"""The command line: each command parses, calls and prints. Heavy imports wait until a command machine."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from orchdata import __version__
from orchdata.cli import data, machine, plan_run

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
app.command()(data.show)
app.command()(machine.doctor)
app.command()(machine.warm)
app.command()(machine.synth)
app.command()(machine.demo)
app.add_typer(machine.cache_app, name="cache")
app.add_typer(machine.bench_app, name="bench")


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack what data say
    app()
