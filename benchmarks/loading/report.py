"""Figures of all lanes -> a table, ratios with their demands, and a line for each lane that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import numpy as np

from benchmarks.loading.lanes import BARE, Lane
from benchmarks.loading.measure import Figures
from benchmarks.loading.processes import Memory
from orchdata.bench import Result, WideTable

_MIB: Final = 1 << 20
_SHOWN_MS: Final = 0.01  # of a process, for a sample


def make_results(
    lanes: Mapping[str, Lane],
    figures: Mapping[str, Sequence[Figures]],
    peaks: Mapping[str, Memory],
    reasons: Mapping[str, str],
    sample_bytes: float,
    work_seconds: float,
) -> list[Result | WideTable]:
    """What the report shows.

    Args:
        lanes: by name, those without figures too.
        figures: of each lane that has any, one for each repeat.
        peaks: of its memory.
        reasons: why other lanes have none.
        sample_bytes: mean of the data set.
        work_seconds: of the consumer's work for a batch where nothing else runs; 0 without work.
    """
    tables: list[Result | WideTable] = [_table(lanes, figures, peaks, sample_bytes, work_seconds), _by_process(figures)]
    if reasons:
        rows = tuple((name, reason) for name, reason in reasons.items())
        tables.append(WideTable(title="not measured", columns=("loader", "why"), rows=rows))
    for name in figures:
        if lanes[name].kind == "ours":
            tables += _ratios(name, lanes, figures, peaks)
    tables += [
        Result(name=name, unit="samples/s", values=_rates(runs), better="high") for name, runs in figures.items()
    ]
    return tables


def _table(
    lanes: Mapping[str, Lane],
    figures: Mapping[str, Sequence[Figures]],
    peaks: Mapping[str, Memory],
    sample_bytes: float,
    work_seconds: float,
) -> WideTable:
    columns = ["loader", "samples/s", "MB/s", "of bare", "first batch s", "wait p50 ms", "wait p99 ms", "peak PSS MiB"]
    columns += ["without files", "CPU ms/sample", *(["work ms"] if work_seconds else [])]
    rows: list[tuple[str | float | None, ...]] = []
    for name, runs in figures.items():
        rate, limit = median(_rates(runs)), lanes[name].kind == "limit"
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


def _by_process(figures: Mapping[str, Sequence[Figures]]) -> WideTable:
    """Where a sample's CPU time is spent: medians of the epochs, process by process."""
    rows = []
    for name, runs in figures.items():
        both = [[1e3 * (each.user + each.system) for each in run.spent] for run in runs]
        mine, others = median(spent[0] for spent in both), [spent[1:] for spent in both]
        middle = sorted(others, key=sum)[len(others) // 2]  # of the epoch whose processes took the median of time
        rows.append(
            (
                name,
                mine,
                " + ".join(f"{spent:.2f}" for spent in middle if spent >= _SHOWN_MS) or None,
                median(1e3 * sum(each.user for each in run.spent) for run in runs),
                median(1e3 * sum(each.system for each in run.spent) for run in runs),
                median(sum(each.faults for each in run.spent) for run in runs),
            )
        )
    return WideTable(
        title="CPU ms/sample by process",
        columns=("loader", "iterating", "others", "user", "system", "page faults"),
        rows=tuple(rows),
        note="without the consumer's work; page faults of a sample",
    )


def _ratios(
    name: str, lanes: Mapping[str, Lane], figures: Mapping[str, Sequence[Figures]], peaks: Mapping[str, Memory]
) -> list[Result]:
    """Of one of our lanes, repeat by repeat, to the limit, the fastest peer, the fastest on torch's DataLoader."""
    mine = _rates(figures[name])
    kinds = {other: lanes[other].kind for other in figures}
    peers = [other for other, kind in kinds.items() if kind in ("torch", "other")]
    results = []
    for label, names, demand in (
        ("bare threads", [BARE], 0.97),
        ("fastest peer", peers, 1.0),
        ("fastest in torch's DataLoader", [other for other in peers if kinds[other] == "torch"], None),
    ):
        there = [other for other in names if other in figures]
        if not there:
            continue
        best = max(there, key=lambda other: median(_rates(figures[other])))
        ratios = tuple(own / other for own, other in zip(mine, _rates(figures[best]), strict=True))
        note = "" if best == BARE else best
        results.append(
            Result(name=f"{name} / {label}", unit="x", values=ratios, demand=demand, better="high", note=note)
        )
    alike = [other for other in peers if lanes[other].in_processes == lanes[name].in_processes]
    kind, demand = ("with processes", 0.85) if lanes[name].in_processes else ("with threads", 1.15)
    for label, at in (("peak PSS", 0), ("memory without files", 1)):
        if alike:
            leanest = min(alike, key=lambda other: peaks[other][at])
            ratio = (peaks[name][at] / peaks[leanest][at],)
            what = f"{name}: {label} / leanest peer's {kind}"
            results.append(Result(name=what, unit="x", values=ratio, demand=demand, note=leanest))
    return results


def _rates(runs: Sequence[Figures]) -> tuple[float, ...]:
    return tuple(run.samples_per_second for run in runs)
