"""Figures of all lanes -> a table, ratios with their demands, and a line for each lane that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import numpy as np

from orchdata.bench.harness import Result, WideTable
from orchdata.bench.throughput.lanes import BARE, LANES
from orchdata.bench.throughput.measure import Figures
from orchdata.bench.throughput.processes import Memory

_MIB: Final = 1 << 20


def make_results(
    figures: Mapping[str, Sequence[Figures]],
    peaks: Mapping[str, Memory],
    reasons: Mapping[str, str],
    sample_bytes: float,
    work_seconds: float,
) -> list[Result | WideTable]:
    """What the report shows.

    Args:
        figures: of each lane that has any, one for each repeat.
        peaks: of its memory.
        reasons: why other lanes have none.
        sample_bytes: mean of the data set.
        work_seconds: of the consumer's work for a batch where nothing else runs; 0 without work.
    """
    found: list[Result | WideTable] = [_table(figures, peaks, sample_bytes, work_seconds)]
    if reasons:
        rows = tuple((name, reason) for name, reason in reasons.items())
        found.append(WideTable(title="not measured", columns=("loader", "why"), rows=rows))
    for name in figures:
        if LANES[name].kind == "ours":
            found += _ratios(name, figures, peaks)
    found += [Result(name=name, unit="samples/s", values=_rates(runs), better="high") for name, runs in figures.items()]
    return found


def _table(
    figures: Mapping[str, Sequence[Figures]], peaks: Mapping[str, Memory], sample_bytes: float, work_seconds: float
) -> WideTable:
    columns = ["loader", "samples/s", "MB/s", "of bare", "first batch s", "wait p50 ms", "wait p99 ms", "peak PSS MiB"]
    columns += ["without files", "CPU ms/sample", *(["work ms"] if work_seconds else [])]
    rows: list[tuple[str | float | None, ...]] = []
    for name, runs in figures.items():
        rate, limit = median(_rates(runs)), LANES[name].kind == "limit"
        waits = np.concatenate([run.waits for run in runs]) * 1e3
        row: list[str | float | None] = [
            name,
            rate,
            rate * sample_bytes / 1e6,
            rate / median(_rates(figures[BARE])) if BARE in figures else None,
            None if limit else median(run.first_batch_seconds for run in runs),
            float(np.quantile(waits, 0.5)),
            float(np.quantile(waits, 0.99)),
            *(None if limit else peak / _MIB for peak in peaks[name]),
            median(run.cpu_seconds for run in runs) * 1e3,
        ]
        if work_seconds:
            row.append(median(np.concatenate([run.works for run in runs]).tolist()) * 1e3)
        rows.append(tuple(row))
    note = f"the consumer's work for a batch takes {work_seconds * 1e3:.0f} ms alone" if work_seconds else ""
    return WideTable(title="one epoch", columns=tuple(columns), rows=tuple(rows), note=note)


def _ratios(name: str, figures: Mapping[str, Sequence[Figures]], peaks: Mapping[str, Memory]) -> list[Result]:
    """Of one of our lanes, repeat by repeat, to the limit, the fastest peer, the fastest on torch's DataLoader."""
    mine = _rates(figures[name])
    found = []
    for label, names, demand in (
        ("bare threads", [BARE], 0.97),
        ("fastest peer", _of_kinds(figures, "torch", "other"), 1.0),
        ("fastest in torch's DataLoader", _of_kinds(figures, "torch"), 1.5),
    ):
        there = [other for other in names if other in figures]
        if not there:
            continue
        best = max(there, key=lambda other: median(_rates(figures[other])))
        ratios = tuple(own / other for own, other in zip(mine, _rates(figures[best]), strict=True))
        note = "" if best == BARE else best
        found.append(Result(name=f"{name} / {label}", unit="x", values=ratios, demand=demand, better="high", note=note))
    if others := _of_kinds(figures, "torch", "other"):
        for label, at in (("peak PSS", 0), ("memory without files", 1)):
            leanest = min(others, key=lambda other: peaks[other][at])
            ratio = (peaks[name][at] / peaks[leanest][at],)
            what = f"{name}: {label} / leanest peer's"
            found.append(Result(name=what, unit="x", values=ratio, demand=1.15, note=leanest))
    return found


def _of_kinds(figures: Mapping[str, Sequence[Figures]], *kinds: str) -> list[str]:
    return [name for name in figures if LANES[name].kind in kinds]


def _rates(runs: Sequence[Figures]) -> tuple[float, ...]:
    return tuple(run.samples_per_second for run in runs)
