"""`orchdata index` and `orchdata profile`: what a dataset holds."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchdata.cli.options import CostOption, JsonOption, Paths, RecipeOption, caps_of, load_object, ranks_list
from orchdata.cli.output import human_bytes, one_line_errors, print_json, print_table
from orchdata.progress import progress_bar

if TYPE_CHECKING:
    from orchdata.loaders.errors import DataError
    from orchdata.loaders.index.index import Index

FIRST_FAILURES = 10
MOST_IGNORED = 20


@one_line_errors
def index(
    paths: Paths,
    recipe: RecipeOption = None,
    force: Annotated[bool, typer.Option("--force", help="Scan every shard again, fresh or not.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Index shards: where samples lie and what each costs. Fast to repeat: only new or changed shards are scanned.

    Bad samples are listed and do not fail the command; a shard that cannot be read at all does.
    """
    start = time.perf_counter()
    built, scanned = _build(paths, recipe, force=force)
    report = index_report(built, scanned, time.perf_counter() - start)
    if as_json:
        print_json(report)
    else:
        _print_index(report)
    if report["failed_shards"]:
        raise typer.Exit(1)


@one_line_errors
def profile(
    paths: Paths,
    recipe: RecipeOption = None,
    cost: CostOption = None,
    ranks: Annotated[str, typer.Option(help="Numbers of data-parallel ranks to plan for.")] = "8,64,512,2560",
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 8,
    model_parallel: Annotated[
        int, typer.Option(help="GPUs of a data-parallel rank: tensor x pipeline x context parallel.")
    ] = 1,
    max_tokens: Annotated[
        list[str] | None,
        typer.Option(metavar="[PHASE=]NUMBER", help="Positions per microbatch and rank; of llm, or PHASE. Repeatable."),
    ] = None,
    oversize: Annotated[
        str, typer.Option(help="Samples above --max-tokens: error, own (microbatch) or drop.")
    ] = "error",
    objective: Annotated[
        str, typer.Option(help="Ranks wait after each phase of each micro-step (barrier), or at the end (sum).")
    ] = "barrier",
    padded: Annotated[bool, typer.Option("--padded", help="LLM rows padded to the longest: od.Padded().")] = False,
    multiple_of: Annotated[int, typer.Option(help="LLM sequences are padded to a multiple of this.")] = 1,
    group_size: Annotated[int, typer.Option(help="Ranks of a group, as those of a node.")] = 8,
    streams: Annotated[int | None, typer.Option(help="Streams of the order; default: one a group.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Profile shards: sizes, modalities, what N ranks would lose to imbalance in each scope, and what each reads."""
    rank_counts, caps = ranks_list(ranks), caps_of(max_tokens or ())
    from orchdata.balancers import CostModel
    from orchdata.planning.balance import Balance
    from orchdata.planning.layout import Packed, Padded
    from orchdata.profile.profile import profile as make_profile

    model = load_object(cost, CostModel, "--cost") if cost is not None else None
    balance = Balance(max_tokens=caps, objective=objective, oversize=oversize)  # type: ignore[arg-type]
    layout = Padded(multiple_of=multiple_of) if padded else Packed(multiple_of=multiple_of)
    built, _ = _build(paths, recipe, force=False)
    result = make_profile(
        built,
        cost=model,
        balance=balance,
        layout=layout,
        model_parallel=model_parallel,
        ranks=rank_counts,
        batch_size=batch_size,
        group_size=group_size,
        streams=streams,
        seed=seed,
    )
    if as_json:
        print_json(result.to_dict())
        return
    from orchdata.cli.tables import profile_table

    print_table(profile_table(result))


def _build(paths: list[str], recipe_name: str | None, *, force: bool) -> tuple[Index, int]:
    """The index, and how many of its shards were scanned now; the others were known."""
    from orchdata.loaders.index.build import BuildProgress, build_index
    from orchdata.loaders.recipe import Recipe
    from orchdata.loaders.storage.paths import expand_paths

    recipe = load_object(recipe_name, Recipe, "--recipe") if recipe_name is not None else Recipe()
    try:
        recipe.fingerprint()
    except TypeError as error:  # a parameter of a modality, named
        raise ValueError(str(error)) from error
    urls = expand_paths(paths)
    scanned = 0
    with progress_bar("indexing shards") as advance, redirect_stdout(sys.stderr):  # whatever a tokenizer prints

        def shard_done(shard: BuildProgress) -> None:
            nonlocal scanned
            scanned += shard.measured
            advance(shard.done, shard.total)

        return build_index(urls, recipe, force=force, progress=shard_done), scanned


def index_report(index: Index, scanned: int, seconds: float) -> dict[str, Any]:
    """What indexing found, JSON-safe."""
    from orchdata.profile.profile import count_reasons, split_failures

    bad_samples, failed_shards = split_failures(index)
    return {
        "path": str(index.path),
        "fingerprint": index.fingerprint,
        "shards": len(index.shards),
        "scanned": scanned,
        "samples": index.num_samples - len(bad_samples) - len(failed_shards),
        "bad": len(bad_samples),
        "lost": int(index.lost_samples().sum()),
        "bad_by_reason": count_reasons(bad_samples),
        "failures": [_as_dict(failure) for failure in bad_samples[:FIRST_FAILURES]],
        "failed_shards": [_as_dict(failure) for failure in failed_shards],
        "totals": dict(index.totals),
        "seconds": round(seconds, 3),
    }


def _as_dict(failure: DataError) -> dict[str, str]:
    return {"shard": failure.shard, "key": failure.key, "field": failure.field, "reason": failure.reason}


def _print_index(report: dict[str, Any]) -> None:
    size = human_bytes(report["totals"]["bytes"])
    typer.echo(
        f"{report['samples']:,} samples in {report['shards']:,} shards, {size}; "
        f"{report['scanned']:,} shards scanned in {report['seconds']:.1f} s"
    )
    for name, modality in report["totals"]["modalities"].items():
        typer.echo(f"  {name}: {modality['samples']:,} samples, {modality['tokens']:,} LLM tokens")
    without_loss = report["totals"]["without_loss"]
    if without_loss:
        typer.echo(f"  without a token to learn: {without_loss:,} samples")
    ignored = report["totals"]["ignored_fields"]
    if ignored:
        shown = [f"{name} ({count:,})" for name, count in list(ignored.items())[:MOST_IGNORED]]
        typer.echo(f"  not read: {', '.join(shown)}{', ...' if len(ignored) > len(shown) else ''}")
    if report["bad"]:
        typer.echo(f"{report['bad']:,} bad samples, by reason:", err=True)
        for reason, count in report["bad_by_reason"].items():
            typer.echo(f"  {count:,} x {reason}", err=True)
        typer.echo("the first of them:", err=True)
        for failure in report["failures"]:
            typer.echo(f"  {failure['shard']}: {failure['key']} {failure['field']}: {failure['reason']}", err=True)
    if report["lost"]:
        typer.echo(f"about {report['lost']:,} more samples lost in damaged shards", err=True)
    for failure in report["failed_shards"]:
        typer.echo(f"shard failed: {failure['shard']}: {failure['reason']}", err=True)
    typer.echo(f"index: {report['path']}")
