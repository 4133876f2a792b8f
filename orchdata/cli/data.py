"""`orchdata index`, `orchdata profile` and `orchdata verify`: what a dataset holds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchdata.cli.command import (
    AllowRecipesOption,
    ColumnsOption,
    ContainersOption,
    CostOption,
    FilterOption,
    IgnoreOption,
    IndexFieldsOption,
    IndexFileOption,
    JsonOption,
    KeyOption,
    MaxFailuresOption,
    MediaRootOption,
    Paths,
    RayOption,
    RecipeOption,
    StorageOptionsOption,
    caps_of,
    data_options,
    human_bytes,
    load_object,
    one_line_errors,
    overflow_words,
    print_json,
    print_table,
    ranks_list,
    recipe_named,
    unread_lines,
)
from orchdata.loaders.amounts import counted
from orchdata.notices import progress_bar

if TYPE_CHECKING:
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.errors import DataError
    from orchdata.loaders.index.index import Index
    from orchdata.verifying import Verification

FIRST_FAILURES = 10


@one_line_errors
def index(
    paths: Paths,
    recipe: RecipeOption = None,
    media_root: MediaRootOption = None,
    column: ColumnsOption = None,
    key: KeyOption = None,
    container: ContainersOption = None,
    index_field: IndexFieldsOption = None,
    ignore: IgnoreOption = None,
    storage_options: StorageOptionsOption = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE|URL", help="Write the index there, for ShardDataset(index_file=)."),
    ] = None,
    share: Annotated[
        str | None, typer.Option(metavar="I/N", help="Index the I-th of N parts of the shards, from 1, for --merge.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Write one index of the index files that PATHS name.")] = False,
    force: Annotated[bool, typer.Option("--again", help="Scan every shard again, fresh or not.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes that measure shards; default: threads of this one."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="Index only the shards from the first on that have N good samples."),
    ] = None,
    max_failures: MaxFailuresOption = "1%",  # type: ignore[assignment]
    as_json: JsonOption = False,
) -> None:
    """Index shards: where samples lie and what each costs. Fast to repeat: only new or changed shards are scanned.

    Samples that cannot be used are listed. The exit code is 3 if they are more than --max-failures allows, a shard that
    cannot be read counting as its samples, and 1 if no sample can be used.
    """
    from orchdata.cli.dataset import build, with_fields
    from orchdata.dataset.shard_arguments import checked_target
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.index.own_columns import fields_of

    start = time.perf_counter()
    given = data_options(media_root, column, container, storage_options, key, index_field, None, ignore)
    if merge:
        _merge(paths, out, given, others=(recipe, media_root, column, key, container, index_field, share, limit, jobs))
        return
    dataset = ShardDataset(paths, recipe_named(recipe), **given)
    if limit is not None:
        if jobs is not None:
            raise ValueError("--limit measures in this process: leave --jobs out")
        if out is not None or share is not None or dataset.index_fields or force:
            raise ValueError(
                "--limit indexes the first samples alone: leave --out, --share, --index-field, --again out"
            )
        dataset = dataset.take(limit)
    named = None if out is None else dataset.named_file(checked_target(out))
    where: dict[str, Any] = {}
    if limit is not None:
        with progress_bar("indexing shards") as advance, redirect_stdout(sys.stderr):  # what a tokenizer prints
            built = dataset.index(progress=advance)
        scanned, where = len(built.shards), {"of_shards": len(dataset.urls)}
    else:
        urls = dataset.urls if share is None else _share(dataset.urls, share)
        built, scanned = build(urls, dataset.recipe, dataset.reading, force=force, jobs=jobs or 1)
    built = with_fields(dataset, built, force=force)
    own = {} if built.own is None else fields_of(built.own)
    if named is not None:
        named.write(built, share or "")
        where["out"] = named.url
    if not dataset.recipe.text.learns_end:
        _warn_of_unended(dataset, built)
    report = (
        index_report(dataset, built, scanned, time.perf_counter() - start)
        | ({"index_fields": own} if own else {})
        | where
    )
    if as_json:
        print_json(report)
    else:
        print_index(report)
        print_unit(dataset)
    print_unread(dataset, built)
    if code := _exit_code(report, max_failures):
        raise typer.Exit(code)


def _merge(paths: Sequence[str], out: str | None, given: Mapping[str, Any], others: Sequence[object]) -> None:
    from orchdata.dataset.indexed import merged
    from orchdata.dataset.shard_arguments import checked_file, checked_target, reading_of

    if out is None or any(others):
        raise ValueError(
            "--merge joins the index files that PATHS name: give --out and, for URLs, --storage-options alone"
        )
    files = [str(checked_file(path, (), None)) for path in paths]
    target = checked_target(out)
    count = merged(files, target, reading_of(None, None, storage_options=given["storage_options"]))
    typer.echo(f"written: {target}, the index of {count:,} shards")


def _share(urls: Sequence[str], share: str) -> Sequence[str]:
    """Return the shards of a part, `I/N`: parts follow each other."""
    number, _, parts = share.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts) <= len(urls)):
        raise ValueError(f"--share is I/N, with I from 1 to N, and N at most the {len(urls)} shards; got {share!r}")
    bounds = [len(urls) * each // int(parts) for each in (int(number) - 1, int(number))]
    return urls[bounds[0] : bounds[1]]


@one_line_errors
def profile(
    paths: Paths,
    recipe: RecipeOption = None,
    media_root: MediaRootOption = None,
    column: ColumnsOption = None,
    key: KeyOption = None,
    container: ContainersOption = None,
    index_field: IndexFieldsOption = None,
    ignore: IgnoreOption = None,
    storage_options: StorageOptionsOption = None,
    index_file: IndexFileOption = None,
    expression: FilterOption = None,
    cost: CostOption = None,
    allow_recipes: AllowRecipesOption = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Numbers of data-parallel ranks to plan for; default: of 8,64,512,2560 those that the data fill.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 8,
    batch_tokens: Annotated[
        int | None, typer.Option(help="LLM tokens per rank and step, in place of samples: global_batch_tokens.")
    ] = None,
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
    teams: Annotated[
        int | None, typer.Option(help="Plan teams of up to so many ranks, too: 2, 4, 8, ... ranks share a sequence.")
    ] = None,
    model_parallel: Annotated[
        int, typer.Option(help="With --encoder-peers: GPUs of each data-parallel rank, all with its samples.")
    ] = 1,
    encoder_peers: Annotated[
        bool, typer.Option("--encoder-peers", help="Plan encoders shared among these GPUs, too: encoder_dims.")
    ] = False,
    encode: Annotated[
        str, typer.Option(help="Encoders balanced apart run once a micro_step, step, or NUMBER of micro-steps.")
    ] = "micro_step",
    padded: Annotated[bool, typer.Option("--padded", help="LLM rows padded to the longest: od.Padded().")] = False,
    multiple_of: Annotated[int, typer.Option(help="LLM sequences are padded to a multiple of this.")] = 1,
    length: Annotated[int | None, typer.Option(help="Tokens of every microbatch: od.Packed(length=...).")] = None,
    group_size: Annotated[int, typer.Option(help="Ranks of a group, as those of a node.")] = 8,
    streams: Annotated[
        int | None, typer.Option(help="Streams of the order; default: one a group in groups, else one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a report to look at: one page without a script."),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="With --html: samples to show; 0 leaves out every text, picture and key of a sample.")
    ] = 12,
    as_json: JsonOption = False,
) -> None:
    """Profile shards: sizes, modalities, what N ranks would lose to imbalance in each scope, and what each reads.

    A mixture of them is a YAML file: sources by name, each with paths, weight and recipe.
    """
    rank_counts, caps = None if ranks is None else ranks_list(ranks), caps_of(max_tokens or ())
    from orchdata.balancers import CostModel
    from orchdata.cli.dataset import indexed
    from orchdata.planning.balance import Balance
    from orchdata.planning.layout import Packed, Padded
    from orchdata.planning.teams import Teams
    from orchdata.profiling.profile import profile as make_profile

    if html is not None:
        from orchdata.profiling.page import check_report

        check_report(html)
        if samples < 0:
            raise ValueError(f"--samples must be at least 0, got {samples}")
    model = load_object(cost, CostModel, "--cost") if cost is not None else None
    shared = None if teams is None else Teams(largest=teams)
    if (model_parallel > 1) != encoder_peers:
        raise ValueError(
            f"--encoder-peers and --model-parallel above 1 go together, got --model-parallel {model_parallel}"
        )
    balance = Balance(
        assignment="joint" if encode == "micro_step" else "per_phase",
        encode=int(encode) if encode.isdecimal() else encode,  # type: ignore[arg-type]
        max_tokens=caps,
        objective=objective,  # type: ignore[arg-type]
        oversize=oversize,  # type: ignore[arg-type]
        teams=shared,
    )
    if padded and length is not None:
        raise ValueError("--length is of packed microbatches: leave out --padded, or the length")
    layout = Padded(multiple_of=multiple_of) if padded else Packed(multiple_of=multiple_of, length=length)
    given = data_options(media_root, column, container, storage_options, key, index_field, index_file, ignore)
    dataset, built = indexed(paths, recipe_named(recipe), given, expression, allow_recipes=allow_recipes)
    result = make_profile(
        built,
        dataset=dataset,
        cost=model,
        balance=balance,
        layout=layout,
        ranks=rank_counts,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        group_size=group_size,
        streams=streams,
        seed=seed,
        encoder_peers=model_parallel,
    )
    print_unread(dataset, built)
    if html is not None:
        result.write_html(html, dataset, samples=samples)
    if as_json:
        print_json(result.to_dict())
        return
    from orchdata.cli.tables import profile_table

    print_table(profile_table(result))
    print_unit(dataset)
    if html is not None:
        typer.echo(f"report: {html}")


@one_line_errors
def verify(
    paths: Paths,
    recipe: RecipeOption = None,
    media_root: MediaRootOption = None,
    column: ColumnsOption = None,
    key: KeyOption = None,
    container: ContainersOption = None,
    storage_options: StorageOptionsOption = None,
    index_file: IndexFileOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Write what is bad here, as JSON Lines for DataLoader(quarantine=...).")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes that decode; default: one per CPU.")] = None,
    ray: RayOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one sample may take.")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Decode every sample as a loader does, and list those that it would refuse.

    Processes of limited memory decode the samples, so samples that crash, hang or fill a process are listed too. The
    command fails if any sample is bad.
    """
    from orchdata.cli.dataset import build_of
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.quarantine import check_target, write_quarantine
    from orchdata.verifying import verify as verify_index

    start = time.perf_counter()
    if out is not None:
        check_target(out)
    chosen = recipe_named(recipe)
    given = data_options(media_root, column, container, storage_options, key, None, index_file)
    dataset = ShardDataset(paths, chosen, **given)
    if out is not None and any(os.path.realpath(out) == os.path.realpath(url) for url in dataset.urls):
        raise ValueError(f"--out {out} is one of the shards, and would be replaced by the list: give another file")
    built = build_of(dataset)
    how: dict[str, Any] = {"jobs": jobs, "timeout": timeout, "containers": dataset.containers, "files": dataset.files}
    if ray is not None:
        from orchdata.engines.on_ray.cluster import connect, num_cpus
        from orchdata.engines.on_ray.value import RayEngine

        connect(None if ray == "auto" else ray, num_ranks=1)
        how |= {"engine": RayEngine(num_cpus=1), "jobs": num_cpus() if jobs is None else jobs}
    try:
        with progress_bar("decoding samples") as advance:
            verification = verify_index(built, chosen, **how, progress=advance)
    except TypeError as error:  # what does not pickle, named
        raise ValueError(str(error)) from error
    if out is not None:
        write_quarantine(out, verification.failures)
    report = verify_report(built, verification, out, time.perf_counter() - start)
    if as_json:
        print_json(report)
    else:
        print_verified(report)
    if verification.failures:
        raise typer.Exit(1)


def _warn_of_unended(dataset: ShardDataset, index: Index) -> None:
    from orchdata.building.contents import IndexedShards
    from orchdata.loaders.shards.open import by_identity
    from orchdata.unended_chats import warn_of_unended

    warn_of_unended(
        IndexedShards(
            index=index,
            build_id=index.build_id,
            recipes=(dataset.recipe,),
            containers=by_identity(dataset.containers),
            files=dataset.files,
        )
    )


def index_report(dataset: ShardDataset, index: Index, scanned: int, seconds: float) -> dict[str, Any]:
    """Return the result of indexing, JSON-safe."""
    from orchdata.dataset.unread import unread_of
    from orchdata.profiling.content import count_reasons, split_failures

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
        "totals": {**index.totals, "unread": unread_of(dataset, index)},
        "seconds": round(seconds, 3),
    }


def _exit_code(report: dict[str, Any], max_failures: Fraction | int) -> int:
    """Return 1 if no sample can be used, 3 if more cannot be used than allowed, else 0. Says how to allow more."""
    if not report["samples"]:
        typer.echo("orchdata: no sample can be used", err=True)
        return 1
    unusable = report["bad"] + len(report["failed_shards"]) + report["lost"]
    count = report["samples"] + unusable
    is_share = isinstance(max_failures, Fraction)
    allowed = int(max_failures * count) if is_share else max_failures
    if unusable <= allowed:
        return 0
    share = f" ({float(100 * max_failures):.4g} %)" if is_share else ""
    enough = f"{ceil(100 * unusable / count)}%" if is_share else f"{unusable}"
    typer.echo(
        f"orchdata: {unusable:,} of {count:,} samples cannot be used, and --max-failures allows {allowed:,}{share}: "
        "repair them, or leave them out: `orchdata verify PATHS --out bad.jsonl` lists them for quarantine=; or allow "
        f"more by --max-failures {enough}, and in training by "
        'od.ErrorPolicy("skip", max_failures=...)',
        err=True,
    )
    return 3


def verify_report(index: Index, verification: Verification, out: Path | None, seconds: float) -> dict[str, Any]:
    """Return the result of verifying with every failure, JSON-safe."""
    from orchdata.profiling.content import count_reasons

    return {
        "shards": len(index.shards),
        "samples": verification.num_samples,
        "bad": len(verification.failures),
        "bad_when_decoded": len(verification.failures) - verification.num_indexed_bad,
        "lost": int(index.lost_samples().sum()),
        "bad_by_reason": count_reasons(list(verification.failures)),
        "failures": [_as_dict(failure) for failure in verification.failures],
        "quarantine": None if out is None else str(out),
        "seconds": round(seconds, 3),
    }


def _as_dict(failure: DataError) -> dict[str, str]:
    return {"shard": failure.shard, "key": failure.key, "field": failure.field, "reason": failure.reason}


def print_index(report: dict[str, Any]) -> None:
    """Print what `index` found."""
    size = human_bytes(report["totals"]["bytes"])
    of_all = f" (the first of {report['of_shards']:,})" if "of_shards" in report else ""
    typer.echo(
        f"{counted(report['samples'], 'sample')} in {counted(report['shards'], 'shard')}{of_all}, {size}; "
        f"{counted(report['scanned'], 'shard')} scanned in {report['seconds']:.1f} s"
    )
    for name, modality in report["totals"]["modalities"].items():
        typer.echo(f"  {name}: {modality['samples']:,} samples, {modality['tokens']:,} LLM tokens")
    from orchdata.loaders.records import LEFT_OUT

    for line in overflow_words(report["totals"]["overflow"]):
        typer.echo(f"  above max_tokens: {line}")
    without_loss = report["totals"]["without_loss"]
    if without_loss:
        typer.echo(f"  without a token to learn: {without_loss:,} samples")
    if left_out := report["totals"]["ignored_fields"].get(LEFT_OUT, 0):
        typer.echo(f"  left out by Recipe.record: {left_out:,} samples")
    for line in unread_lines(report["totals"]["unread"]):
        typer.echo(f"  {line}")
    for name, field in report.get("index_fields", {}).items():
        typer.echo(f"  index field {name}: {field['type']}, {field['nulls']:,} without a value")
    _print_bad(report)
    for failure in report["failed_shards"]:
        typer.echo(f"shard failed: {failure['shard']}: {failure['reason']}", err=True)
    typer.echo(f"index: {report['path']}")
    if (out := report.get("out")) is not None:
        typer.echo(f"written: {out}")


def print_unit(dataset: ShardDataset | Mixture) -> None:
    """Say what LLM tokens are where a recipe has no tokenizer."""
    from orchdata.dataset.mixed import text_is_bytes

    if text_is_bytes(dataset):
        typer.echo("LLM tokens of text are UTF-8 bytes: the recipe has no tokenizer (--recipe MODULE:NAME)")


def print_unread(dataset: ShardDataset | Mixture, index: Index) -> None:
    """Say as a loader does which fields are not read."""
    from orchdata.dataset.unread import unread_in_words

    if message := unread_in_words(dataset, index):
        typer.echo(f"orchdata: {message}", err=True)


def print_verified(report: dict[str, Any]) -> None:
    """Print what `verify` found."""
    samples, shards = counted(report["samples"], "good sample"), counted(report["shards"], "shard")
    typer.echo(f"{samples} in {shards}, in {report['seconds']:.1f} s")
    _print_bad(report)
    if report["quarantine"] is not None:
        typer.echo(f"quarantine: {report['quarantine']}")


def _print_bad(report: dict[str, Any]) -> None:
    if report["bad"]:
        typer.echo(f"{report['bad']:,} bad samples, by reason:", err=True)
        for reason, count in report["bad_by_reason"].items():
            typer.echo(f"  {count:,} x {reason}", err=True)
        typer.echo("the first of them:", err=True)
        for failure in report["failures"][:FIRST_FAILURES]:
            typer.echo(f"  {failure['shard']}: {failure['key']} {failure['field']}: {failure['reason']}", err=True)
    if report["lost"]:
        typer.echo(f"about {report['lost']:,} more samples lost in damaged shards", err=True)
