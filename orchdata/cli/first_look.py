"""`orchdata index --limit N`: about what an index would say, from some samples of some shards."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from orchdata.cli.output import human_bytes
from orchdata.progress import in_words, progress_bar

if TYPE_CHECKING:
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.index.first.look import Estimate
    from orchdata.loaders.index.index import Index


def complete_index(dataset: ShardDataset) -> Index | None:
    """Return the full index of a data set if there is one, and no shard has changed since: nor the first of the files
    that its records name.
    """
    from orchdata.loaders.errors import DamagedIndexError
    from orchdata.loaders.index.locations import open_index
    from orchdata.loaders.shards.changes import are_as_indexed
    from orchdata.loaders.shards.jsonl.media_changes import changed_media

    try:
        index = open_index(dataset.urls, dataset.recipe, reading=dataset.reading)
    except DamagedIndexError:
        return None
    if index is None:
        return None
    recipe = dataset.recipe
    is_fresh = are_as_indexed(index.shards, dataset.files.listed) and not changed_media(
        index, recipe.limits, recipe.record
    )
    return index if is_fresh else None


def estimate_report(dataset: ShardDataset, limit: int) -> dict[str, Any]:
    """Look at about `limit` samples, and return the result, JSON-safe."""
    from orchdata.loaders.index.first.look import first_look

    start = time.perf_counter()
    with progress_bar("looking at shards") as advance, redirect_stdout(sys.stderr):  # what a tokenizer prints
        looked = first_look(dataset.urls, dataset.recipe, limit, reading=dataset.reading, progress=advance)
    return _report(looked) | {"seconds": round(time.perf_counter() - start, 3)}


def _report(looked: Estimate) -> dict[str, Any]:
    from orchdata.profiling.failures import count_reasons

    samples, bad = (looked.totals.get(name, 0) for name in ("samples", "bad"))
    return {
        "estimate": True,
        "shards": looked.num_shards,
        "bytes": looked.num_bytes,
        "looked_at": looked.looked_at,
        "measured": looked.measured,
        "samples": samples - bad,
        "samples_per_shard": round(samples / looked.num_shards, 1),
        "bad": bad,
        "bad_share": round(bad / max(1, samples), 6),
        "lost": 0,
        "bad_by_reason": count_reasons(looked.failures),
        "failures": [_as_dict(failure) for failure in looked.failures[:10]],
        "failed_shards": [_as_dict(failure) for failure in looked.failed_shards],
        "totals": looked.totals,
        "index_seconds": round(looked.index_seconds, 3),
    }


def _as_dict(failure: Any) -> dict[str, str]:
    return {"shard": failure.shard, "key": failure.key, "field": failure.field, "reason": failure.reason}


def print_estimate(report: dict[str, Any]) -> None:
    """Print what `estimate_report` returned."""
    typer.echo(
        f"an estimate: {report['measured']:,} samples of {report['looked_at']:,} of {report['shards']:,} shards "
        f"measured in {report['seconds']:.1f} s, from the beginning of each"
    )
    if report["samples"]:
        typer.echo(
            f"about {report['samples']:,} samples, {report['samples_per_shard']:,} per shard, in "
            f"{human_bytes(report['bytes'])}"
        )
    for name, modality in report["totals"].get("modalities", {}).items():
        typer.echo(f"  {name}: about {modality['samples']:,} samples, {modality['tokens']:,} LLM tokens")
    if report["bad"]:
        typer.echo(f"about {report['bad_share']:.2%} of the samples are bad, measured ones by reason:", err=True)
        for reason, count in report["bad_by_reason"].items():
            typer.echo(f"  {count:,} x {reason}", err=True)
        for failure in report["failures"]:
            typer.echo(f"  {failure['shard']}: {failure['key']} {failure['field']}: {failure['reason']}", err=True)
    for failure in report["failed_shards"]:
        typer.echo(f"shard failed: {failure['shard']}: {failure['reason']}", err=True)
    typer.echo(
        f"the full index takes about {in_words(report['index_seconds'])}: the same command without --limit. Nothing of "
        "this look is kept"
    )
