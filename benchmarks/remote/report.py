"""Figures of all lanes -> tables, ratios with their demands, and a line for each lane that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from benchmarks.loading.lanes import Lane
from benchmarks.remote.job import EPOCHS, RemoteJob
from benchmarks.remote.lanes import ALONE, NEAR
from benchmarks.remote.turns import Turn, Turns
from orchdata.bench import Result, WideTable

MOST_REQUESTS: Final = 1.2
MOST_BYTES: Final = 1.1
MOST_MORE_CPU_MS: Final = 0.5
_ORDINALS: Final = ("first", "second")


def make_results(turns: Turns, index_seconds: float) -> list[Result | WideTable]:
    """What the report shows.

    Args:
        turns: the figures.
        index_seconds: for the index of the shards, from the bucket.
    """
    lanes, figures, job = turns.lanes, turns.figures, turns.job
    prepared = turns.prepared | {name: index_seconds for name in figures if lanes[name].kind == "ours"}
    results: list[Result | WideTable] = [_speeds(figures, prepared, len(job.samples)), _reads(figures, job)]
    if turns.reasons:
        rows = tuple(turns.reasons.items())
        results.append(WideTable(title="not measured", columns=("loader", "why"), rows=rows))
    mine = [name for name in figures if lanes[name].kind == "ours"]
    for name in mine:
        results += _ratios(name, lanes, figures)
    for name in mine:
        results += _costs(name, figures, job)
    results += [_share(figures)]
    results += [
        Result(name=f"{name}, {ordinal} epoch", unit="samples/s", values=_rates(each, number), better="high")
        for name, each in figures.items()
        for number, ordinal in enumerate(_ORDINALS)
    ]
    return results


def _speeds(figures: Mapping[str, Sequence[Turn]], prepared: Mapping[str, float], num_samples: int) -> WideTable:
    columns = ["loader", *(f"samples/s, {ordinal}" for ordinal in _ORDINALS), "first batch s"]
    columns += [*(f"whole epoch s, {ordinal}" for ordinal in _ORDINALS)]
    columns += [*(f"CPU ms/sample, {ordinal}" for ordinal in _ORDINALS), "before: minutes for a million"]
    rows: list[tuple[str | float | None, ...]] = []
    for name, turns in figures.items():
        seconds = prepared.get(name)
        rows.append(
            (
                name,
                *(median(_rates(turns, number)) for number in range(EPOCHS)),
                median(turn.epochs[0].first_batch_seconds for turn in turns),
                *(median(turn.epochs[number].seconds for turn in turns) for number in range(EPOCHS)),
                *(1e3 * median(turn.epochs[number].cpu_seconds for turn in turns) for number in range(EPOCHS)),
                None if seconds is None else seconds / num_samples * 1e6 / 60,
            )
        )
    return WideTable(
        title="two epochs from S3",
        columns=tuple(columns),
        rows=tuple(rows),
        note="before: conversion of a million samples from local tars to what the loader reads, and storing it, or the "
        "index; CPU of the loader's processes",
    )


def _reads(figures: Mapping[str, Sequence[Turn]], job: RemoteJob) -> WideTable:
    asked = [f"{what}, {ordinal} epoch" for what in ("requests a sample", "bytes a used byte") for ordinal in _ORDINALS]
    loaded = EPOCHS * len(job.samples)
    rows: tuple[tuple[str | float | None, ...], ...] = tuple(
        (
            name,
            *(median(_requests(turns, number, job)) for number in range(EPOCHS)),
            *(median(_bytes(turns, number, job)) for number in range(EPOCHS)),
            100 * median(turn.proxy_share for turn in turns),
            1e3 * median(turn.servers.proxy for turn in turns) / loaded,
            1e3 * median(turn.servers.server for turn in turns) / loaded,
        )
        for name, turns in figures.items()
        if NEAR not in name
    )
    servers = ("proxy, % of a core", "proxy, CPU ms/sample", "server, CPU ms/sample")
    return WideTable(title="what the server was asked for", columns=("loader", *asked, *servers), rows=rows)


def _ratios(name: str, lanes: Mapping[str, Lane], figures: Mapping[str, Sequence[Turn]]) -> list[Result]:
    """Of one of our lanes, turn by turn, to the fastest other loader in each epoch."""
    peers = [other for other in figures if lanes[other].kind == "torch"]
    results = []
    for number, ordinal in enumerate(_ORDINALS):
        if not peers:
            continue
        best = max(peers, key=lambda other: median(_rates(figures[other], number)))
        pairs = zip(_rates(figures[name], number), _rates(figures[best], number), strict=True)
        ratios = tuple(own / other for own, other in pairs)
        results.append(
            Result(
                name=f"{name} / fastest peer, {ordinal} epoch",
                unit="x",
                values=ratios,
                demand=1.0,
                better="high",
                note=best,
            )
        )
    return results


def _costs(name: str, figures: Mapping[str, Sequence[Turn]], job: RemoteJob) -> list[Result]:
    """Of one of our lanes: requests, bytes, and CPU next to the same lane's from local files."""
    turns = figures[name]
    results = [
        Result(name=f"{name}: requests a sample, first epoch", unit="", values=_requests(turns, 0, job)),
        Result(name=f"{name}: bytes a used byte, first epoch", unit="", values=_bytes(turns, 0, job)),
    ]
    if (near := figures.get(f"{name}{NEAR}")) is None:
        return results  # a cache fetches whole shards besides
    results = [
        Result(name=each.name, unit=each.unit, values=each.values, demand=demand)
        for each, demand in zip(results, (MOST_REQUESTS, MOST_BYTES), strict=True)
    ]
    more = tuple(1e3 * (_cpu(far) - _cpu(local)) for far, local in zip(turns, near, strict=True))
    results.append(
        Result(
            name=f"{name}: CPU of a sample, more than from local files",
            unit="ms",
            values=more,
            demand=MOST_MORE_CPU_MS,
            note="both epochs",
        )
    )
    return results


def _share(figures: Mapping[str, Sequence[Turn]]) -> Result:
    shares = {name: median(turn.proxy_share for turn in turns) for name, turns in figures.items() if name != ALONE}
    most = max(shares, key=lambda name: shares[name])
    return Result(
        name="the proxy's share of a core, where it is largest",
        unit="%",
        values=tuple(100 * turn.proxy_share for turn in figures[most]),
        note=most,
    )


def _rates(turns: Sequence[Turn], number: int) -> tuple[float, ...]:
    return tuple(turn.epochs[number].samples_per_second for turn in turns)


def _requests(turns: Sequence[Turn], number: int, job: RemoteJob) -> tuple[float, ...]:
    return tuple(turn.seen[number].requests / len(job.samples) for turn in turns)


def _bytes(turns: Sequence[Turn], number: int, job: RemoteJob) -> tuple[float, ...]:
    return tuple(turn.seen[number].body_bytes / job.samples.num_bytes for turn in turns)


def _cpu(turn: Turn) -> float:
    return sum(epoch.cpu_seconds for epoch in turn.epochs) / len(turn.epochs)
