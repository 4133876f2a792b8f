"""`orchdata index`, `profile`, `verify` and `show`: what a dataset holds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import fields, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchdata.cli.command import (
    Data,
    JsonOption,
    human_bytes,
    load_object,
    overflow_words,
    print_json,
    print_table,
    profile_table,
    takes,
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
FIRST_SAMPLES = 3
MOST_IGNORED = 20
LONGEST: Final = 600
"""Characters of a stretch of text that are shown."""
_COLOURS: Final = {"trained": "green", "masked": None}


def _share_or_count(text: str) -> Fraction | int:
    """`1%` -> Fraction(1, 100); `25` -> 25. Raises typer.BadParameter for anything else."""
    number = text.strip().removesuffix("%").rstrip()
    if number.isascii() and number.isdigit() and number == text.strip():
        return int(number)
    with suppress(ValueError, ZeroDivisionError):
        if number != text.strip() and 0 <= (share := Fraction(number) / 100) <= 1:
            return share
    raise typer.BadParameter(f"{text!r} is neither a share such as 1% or 0.5%, nor a number of samples")


@takes(Data, "paths", "recipe", "media_root", "column", "key", "container", "index_field", "ignore", "storage_options")
def index(
    data: Data,
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
    max_failures: Annotated[
        Fraction,
        typer.Option(
            "--max-failures",
            metavar="SHARE|COUNT",
            parser=_share_or_count,
            help="Samples that may be unusable, as 1%, or a number: with more of them the exit code is 3.",
        ),
    ] = "1%",  # type: ignore[assignment]
    as_json: JsonOption = False,
) -> None:
    """Index shards: where samples lie and what each costs. Fast to repeat: only new or changed shards are scanned.

    Samples that cannot be used are listed. The exit code is 3 if they are more than --max-failures allows, a shard that
    cannot be read counting as its samples, and 1 if no sample can be used.
    """
    from orchdata.cli.dataset import build, with_fields
    from orchdata.dataset.shard_arguments import checked_target
    from orchdata.loaders.index.fields import fields_of

    start = time.perf_counter()
    if merge:
        _merge(data, out, others=(share, limit, jobs))
        return
    dataset = data.dataset()
    if limit is not None:
        if any(each is not None for each in (jobs, out, share)) or dataset.index_fields or force:
            others = "--jobs, --out, --share, --index-field, --again"
            raise ValueError(f"--limit indexes the first samples alone, in this process: leave {others} out")
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
        from orchdata.building.pages import IndexedShards
        from orchdata.dataset.advice import warn_of_unended
        from orchdata.loaders.shards.open import by_identity

        given = {"recipe": dataset.recipe, "containers": by_identity(dataset.containers), "files": dataset.files}
        warn_of_unended(IndexedShards(index=built, build_id=built.build_id, **given))  # type: ignore[arg-type]
    report = index_report(dataset, built, scanned, time.perf_counter() - start) | where
    report |= {"index_fields": own} if own else {}
    if as_json:
        print_json(report)
    else:
        print_index(report)
        print_unit(dataset)
    print_unread(dataset, built)
    if code := _exit_code(report, max_failures):
        raise typer.Exit(code)


def _merge(data: Data, out: str | None, others: Sequence[object]) -> None:
    from orchdata.dataset.shard_arguments import checked_file, checked_target, merged, reading_of

    given = replace(data, storage_options=None, ignore=None).options().values()
    if out is None or data.recipe or any(others) or any(given):
        raise ValueError(
            "--merge joins the index files that PATHS name: give --out and, for URLs, --storage-options alone"
        )
    files = [str(checked_file(path, (), None)) for path in data.paths]
    target = checked_target(out)
    count = merged(files, target, reading_of(None, None, storage_options=data.options()["storage_options"]))
    typer.echo(f"written: {target}, the index of {count:,} shards")


def _share(urls: Sequence[str], share: str) -> Sequence[str]:
    """Return the shards of a part, `I/N`: parts follow each other."""
    number, _, parts = share.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts) <= len(urls)):
        raise ValueError(f"--share is I/N, with I from 1 to N, and N at most the {len(urls)} shards; got {share!r}")
    bounds = [len(urls) * each // int(parts) for each in (int(number) - 1, int(number))]
    return urls[bounds[0] : bounds[1]]


@takes(Data)
def profile(
    data: Data,
    cost: Annotated[
        str | None,
        typer.Option("--cost", metavar="MODULE:NAME", help="An od.CostModel; default: positions of every phase."),
    ] = None,
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
    rank_counts, caps = None if ranks is None else _ranks_list(ranks), _caps_of(max_tokens or ())
    from orchdata.balancers import CostModel
    from orchdata.cli.dataset import indexed
    from orchdata.planning.balance import Balance, Packed, Padded, Teams
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
    dataset, built = indexed(data)
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
    print_table(profile_table(result))
    print_unit(dataset)
    if html is not None:
        typer.echo(f"report: {html}")


@takes(Data, "paths", "recipe", "media_root", "column", "key", "container", "storage_options", "index_file")
def verify(
    data: Data,
    out: Annotated[
        Path | None, typer.Option(help="Write what is bad here, as JSON Lines for DataLoader(quarantine=...).")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes that decode; default: one per CPU.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="ADDRESS", help="Use actors of this Ray cluster; auto: of RAY_ADDRESS, or of this machine."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one sample may take.")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Decode every sample as a loader does, and list those that it would refuse.

    Processes of limited memory decode the samples, so samples that crash, hang or fill a process are listed too. The
    command fails if any sample is bad.
    """
    from orchdata.cli.dataset import build_of
    from orchdata.quarantine import check_target, write_quarantine
    from orchdata.verifying import verify as verify_index

    start = time.perf_counter()
    if out is not None:
        check_target(out)
    dataset = data.dataset()
    if out is not None and any(os.path.realpath(out) == os.path.realpath(url) for url in dataset.urls):
        raise ValueError(f"--out {out} is one of the shards, and would be replaced by the list: give another file")
    built = build_of(dataset)
    how: dict[str, Any] = {"jobs": jobs, "timeout": timeout, "containers": dataset.containers, "files": dataset.files}
    if ray is not None:
        from orchdata.engines.on_ray import RayEngine, connect, num_cpus

        connect(None if ray == "auto" else ray, num_ranks=1)
        how |= {"engine": RayEngine(num_cpus=1), "jobs": num_cpus() if jobs is None else jobs}
    try:
        with progress_bar("decoding samples") as advance:
            verification = verify_index(built, dataset.recipe, **how, progress=advance)
    except TypeError as error:  # what does not pickle, named
        raise ValueError(str(error)) from error
    if out is not None:
        write_quarantine(out, verification.failures)
    report = verify_report(built, verification, out, time.perf_counter() - start)
    if as_json:
        print_json(report)
    else:
        samples, shards = counted(report["samples"], "good sample"), counted(report["shards"], "shard")
        typer.echo(f"{samples} in {shards}, in {report['seconds']:.1f} s")
        _print_bad(report)
        if out is not None:
            typer.echo(f"quarantine: {out}")
    if verification.failures:
        raise typer.Exit(1)


@takes(Data, *(field.name for field in fields(Data) if field.name not in ("key", "ignore")))
def show(
    data: Data,
    key: Annotated[
        list[str] | None, typer.Option(help="The sample of this key; last_dot: where keys end, ShardDataset(key=).")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Write media as the model gets them here.")] = None,
    full: Annotated[bool, typer.Option("--full", help="All of long texts.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the model sees: text from the token ids, what of it is trained, media with their sizes.

    Shows the first samples; with --key one sample. Samples are decoded as a loader does; for one that cannot be loaded
    it says why.
    """
    import numpy as np

    from orchdata.cli.dataset import indexed
    from orchdata.dataset.advice import unread_of
    from orchdata.dataset.shards import unchosen_rows
    from orchdata.loaders.records import LEFT_OUT
    from orchdata.loaders.text.conversation import WORDS_SUFFIX
    from orchdata.showing import rows_of_key, save_in, shown_rows

    sample_key = next((each for each in key or () if each != "last_dot"), None)
    with redirect_stdout(sys.stderr):  # what a tokenizer prints
        dataset, index = indexed(replace(data, key="last_dot" if "last_dot" in (key or ()) else None))
        if sample_key is None:
            rows = np.setdiff1d(np.arange(index.num_rows), unchosen_rows(dataset, index))[:FIRST_SAMPLES].tolist()
        else:
            try:
                rows = rows_of_key(dataset, index, sample_key)
            except KeyError as error:
                raise ValueError(error.args[0]) from None
        samples = shown_rows(dataset, index, rows, None if save is None else save_in(save))
    files = [span["file"] for sample in samples for span in sample["spans"] if span.get("file")]
    if as_json:
        ignored = dict(index.totals["ignored_fields"])
        print_json({"groups": [{"samples": samples}], "ignored_fields": ignored, "files": files})
        return
    for sample in samples:
        _print_sample(sample, full=full)
    unread = {name: count for name, count in unread_of(dataset, index)["names"].items() if name != LEFT_OUT}
    shown = [f"{name.removesuffix(WORDS_SUFFIX)} ({count:,})" for name, count in [*unread.items()][:MOST_IGNORED]]
    if shown:
        words = ", ".join(shown) + (", ..." if len(unread) > len(shown) else "")
        typer.echo(_visible(f"fields of these shards that the recipe does not read: {words}"))
    for file in files:
        typer.echo(_visible(f"saved {file}"))


def _caps_of(given: Sequence[str]) -> dict[str, int] | None:
    """`("8192", "image=32768")` -> {"llm": 8192, "image": 32768}; None for nothing."""
    caps: dict[str, int] = {}
    for text in given:
        phase, equals, number = text.rpartition("=")
        if bool(phase) != bool(equals) or not number.isascii() or not number.isdigit():
            raise ValueError(f"--max-tokens must be a number, or PHASE=NUMBER such as image=32768, got {text!r}")
        if (phase := phase or "llm") in caps:
            raise ValueError(f"--max-tokens caps {phase} twice: {caps[phase]} and {number}")
        caps[phase] = int(number)
    return caps or None


def _ranks_list(text: str) -> tuple[int, ...]:
    """`8,64,512` -> (8, 64, 512)."""
    try:
        ranks = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--ranks must be numbers separated by commas, such as 8,64, got {text!r}") from None
    if min(ranks) < 1:
        raise ValueError(f"--ranks must be at least 1, got {min(ranks)}")
    return ranks


def index_report(dataset: ShardDataset, index: Index, scanned: int, seconds: float) -> dict[str, Any]:
    """Return the result of indexing, JSON-safe."""
    from orchdata.dataset.advice import unread_of
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
    from orchdata.dataset.indexed import text_is_bytes

    if text_is_bytes(dataset):
        typer.echo("LLM tokens of text are UTF-8 bytes: the recipe has no tokenizer (--recipe MODULE:NAME)")


def print_unread(dataset: ShardDataset | Mixture, index: Index) -> None:
    """Say as a loader does which fields are not read."""
    from orchdata.dataset.advice import unread_in_words

    if message := unread_in_words(dataset, index):
        typer.echo(f"orchdata: {message}", err=True)


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


def _print_sample(sample: dict[str, Any], *, full: bool) -> None:
    """Print a sample, coloured in a terminal."""
    piece = f", piece {sample['piece']}" if sample["piece"] else ""
    source = f" of {sample['source']}" if sample["source"] else ""
    name = typer.style(_visible(f"{sample['key']}{piece}{source}"), bold=True)
    typer.echo(f"{name} in {_visible(sample['shard'])}, row {sample['row']}")
    typer.echo(f"{sample['tokens']:,} tokens, {sample['trained_tokens']:,} trained")
    if sample["error"] is not None:
        typer.secho(_visible(sample["error"]), fg="red")
    for span in sample["spans"]:
        if "modality" in span:
            kind, sizes = span["modality"], span["sizes"].items()
            shown = "".join(f", {size} {_shortened(_number(value), full=full)}" for size, value in sizes)
            content = _visible(f"{span['field']}, {span['positions']:,} positions{shown}")
        else:
            kind = "trained" if span["trained"] else "masked"
            said = "ids " + " ".join(map(str, span["token_ids"])) if span["text"] is None else span["text"]
            content = _visible(_shortened(said, full=full), kept="\n").replace("\n", "\n" + " " * 15)
        typer.echo(f"{kind:<7} {span['tokens']:>6,} " + typer.style(content, fg=_COLOURS.get(kind, "cyan")))


def _number(value: Any) -> str:
    """A number, or a list of them: what is measured to four digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(_number, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _visible(text: str, *, kept: str = "") -> str:
    """Escape characters that would move the cursor, turn its direction or end a line, except `kept`."""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )


def _shortened(text: str, *, full: bool) -> str:
    if full or len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
