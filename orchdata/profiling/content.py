"""What samples are made of: lengths, combinations of modalities, shares of tokens, unlike shards, the largest samples;
and failures. Named figures, in the shape of `orchdata profile --json`.

    columns of the index, a stretch of rows at a time --sums--> Figures

Memory does not grow with the samples, but for one number for each different length and each shard and modality. It
imports little: `orchdata index` starts without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.indexed import IndexCosts
from orchdata.dataset.selection import columns_of, stretches
from orchdata.loaders.errors import DataError, reason_kind
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.table import Totals, overflow_of, sum_totals
from orchdata.planning.balance import StepPrice

Ints = NDArray[np.int64]

_BINS: Final = 10
_MOST_SHARDS: Final = 10
_MOST_COMBINATIONS: Final = 12
_LEAST_SAMPLES: Final = 20
"""Shards with fewer samples are not called different: their shares are chance."""
_LEAST_DIFFERENCE: Final = 0.1
MOST_LARGEST: Final = 10
_CHUNK_ROWS: Final = 1 << 20
PERCENTILES = {"min": 0, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "p99": 99, "max": 100}


def content_of(index: Index, unused: Ints, totals: Totals, sources: Sequence[str]) -> Figures:
    """Return the content of an index without its `unused` rows, ascending; `sources` are those joined in it."""
    names = index.modalities
    lengths = {name: LengthCounts() for name in names}
    samples_of: Counter[int] = Counter()
    tokens_of: Counter[int] = Counter()
    of_shards = np.zeros((len(index.shards), 1 + len(names)), np.int64)  # samples, then tokens of each modality
    of_sources = np.zeros((max(1, len(sources)), 1 + len(names)), np.int64)
    # One or two axes: the modalities with the most LLM tokens, media before text.
    whole_of = [totals["modalities"].get(name, {"tokens": 0})["tokens"] for name in names]
    media = sorted((place for place in range(1, len(names)) if whole_of[place]), key=lambda place: -whole_of[place])
    axes = media[:2] or [0]
    grid = np.zeros((_BINS, _BINS), np.int64)
    for part in _stretches(index, unused):
        for name, tokens in zip(names, part.tokens, strict=True):
            lengths[name].add(tokens)
        total = part.tokens.sum(axis=0)
        code = ((part.tokens > 0) << np.arange(len(names))[:, None]).sum(axis=0)
        codes, places = np.unique(code, return_inverse=True)
        samples_of.update(dict(zip(codes.tolist(), np.bincount(places).tolist(), strict=True)))
        token_sums = np.bincount(places, weights=total).astype(np.int64)
        tokens_of.update(dict(zip(codes.tolist(), token_sums.tolist(), strict=True)))
        columns = [np.ones(len(total), np.int64), *part.tokens]
        for number, column in enumerate(columns):
            sums = np.bincount(part.shard - part.first_shard, weights=column).astype(np.int64)
            of_shards[part.first_shard : part.first_shard + len(sums), number] += sums
            of_sources[part.source if sources else 0, number] += int(column.sum())
        shares = part.tokens / np.maximum(total, 1)
        bins = np.minimum((shares * _BINS).astype(np.int64), _BINS - 1)
        np.add.at(grid, (bins[axes[0]], bins[axes[1]] if len(axes) > 1 else 0), 1)
    # The shards whose shares differ most from the whole's, if they differ much.
    whole = of_sources.sum(axis=0)
    shares = of_shards[:, 1:] / np.maximum(of_shards[:, 1:].sum(axis=1, keepdims=True), 1)
    difference = np.abs(shares - whole[1:] / max(1, int(whole[1:].sum()))).sum(axis=1) / 2
    difference[of_shards[:, 0] < _LEAST_SAMPLES] = 0
    order = np.argsort(-difference, kind="stable")[:_MOST_SHARDS]
    unlike = [number for number in order.tolist() if difference[number] >= _LEAST_DIFFERENCE]
    return Figures(
        tokens={name: counts.lengths() for name, counts in lengths.items()},
        combinations=tuple(
            Figures(
                modalities=tuple(name for bit, name in enumerate(names) if code >> bit & 1),
                samples=samples,
                tokens=tokens_of[code],
            )
            for code, samples in sorted(samples_of.items(), key=lambda each: (-each[1], each[0]))[:_MOST_COMBINATIONS]
        ),
        joint=Figures(
            modalities=tuple(names[place] for place in axes),
            samples=tuple(tuple(row if len(axes) > 1 else row[:1]) for row in grid.tolist()),
        ),
        shards=tuple(_unlike(index.shards[number].url, of_shards[number], whole, names) for number in unlike),
        sources=tuple(_unlike(name, of_sources[number], whole, names) for number, name in enumerate(sources)),
    )


class _Stretch(NamedTuple):
    """Whole usable samples: LLM tokens of each modality, int64 (num_modalities, n), and their shards."""

    tokens: Ints
    shard: Ints
    first_shard: int
    source: int


def _stretches(index: Index, unused: Ints) -> Iterator[_Stretch]:
    first_shard = 0
    for source, (part, first_row) in enumerate(zip(index.indexes, index.first_rows.tolist(), strict=False)):
        columns = columns_of(part)
        for start, stop in stretches(part):
            low, high = np.searchsorted(unused, [first_row + start, first_row + stop])
            kept = part.piece[start:stop] == 0
            kept[unused[low:high] - first_row - start] = False
            if kept.any():
                tokens = [columns[f"{name}_tokens"](start, stop)[kept] for name in part.modalities]
                shard = part.shard[start:stop][kept].astype(np.int64) + first_shard
                yield _Stretch(np.stack(tokens).astype(np.int64), shard, int(shard.min()), source)
        first_shard += len(part.shards)


def _unlike(name: str, part: Ints, whole: Ints, modalities: Sequence[str]) -> Figures:
    tokens, all_tokens = int(part[1:].sum()), int(whole[1:].sum())
    shares = part[1:] / max(1, tokens)
    return Figures(
        name=name,
        samples=int(part[0]),
        shares=dict(zip(modalities, shares.tolist(), strict=True)),
        tokens_per_sample=tokens / max(1, int(part[0])),
        difference=float(np.abs(shares - whole[1:] / max(1, all_tokens)).sum() / 2),
    )


class LengthCounts:
    """Counts lengths that are added in chunks; it keeps one number for each different length."""

    def __init__(self) -> None:
        self._lengths: Ints = np.zeros(0, np.int64)
        self._counts: Ints = np.zeros(0, np.int64)

    def add(self, lengths: Ints) -> None:
        """Add lengths, int64 (n,); those of 0 are left out."""
        new, counts = np.unique(lengths[lengths > 0], return_counts=True)
        merged, places = np.unique(np.concatenate([self._lengths, new]), return_inverse=True)
        both = np.concatenate([self._counts, counts])
        self._lengths, self._counts = merged, np.bincount(places, weights=both, minlength=len(merged)).astype(np.int64)

    def lengths(self) -> Figures:
        ends = np.cumsum(self._counts)
        samples = int(ends[-1]) if len(ends) else 0
        percentiles: dict[str, int] = {}
        bins: tuple[int, ...] = ()
        if samples:
            # The length of the sample at that place in ascending order, as np.percentile(..., method="lower").
            places = {name: (samples - 1) * percent // 100 for name, percent in PERCENTILES.items()}
            found = {name: np.searchsorted(ends, place, side="right") for name, place in places.items()}
            percentiles = {name: int(self._lengths[place]) for name, place in found.items()}
            powers = np.frexp(self._lengths.astype(np.float64))[1] - 1
            bins = tuple(np.bincount(powers, weights=self._counts).astype(np.int64).tolist())
        return Figures(
            samples=samples, total=int((self._lengths * self._counts).sum()), percentiles=percentiles, bins=bins
        )


def measure_phases(
    source: IndexCosts, rows: Ints, excluded: Ints, price: StepPrice, samples_per_rank: float, num_peers: int
) -> tuple[dict[str, Figures], tuple[Figures, ...], int]:
    """Return positions of each phase, the samples that cost the most, and the most positions of `llm`.

    Rows are ascending. Of those that are `excluded` from steps only the positions of each phase are counted.
    Each of `num_peers` encodes all media of its rank.
    """
    counts = {phase: LengthCounts() for phase in source.phases}
    sums = dict.fromkeys(source.balanced, 0)
    largest: list[tuple[int, int]] = []  # cost and row
    trained = longest = 0
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        positions = {phase: source.positions(phase, chunk) for phase in counts}
        for phase, counted in counts.items():
            counted.add(positions[phase])
        kept = ~np.isin(chunk, excluded[slice(*np.searchsorted(excluded, [chunk[0], chunk[-1] + 1]))])
        longest = max(longest, int(positions["llm"][kept].max(initial=0)))
        chunk = chunk[kept]
        trained += len(chunk)
        total = np.zeros(len(chunk), np.int64)
        for phase in source.balanced:
            costs = source.costs(phase, chunk)
            sums[phase] += int(costs.sum())
            total += costs
        top = np.argsort(-total, kind="stable")[:MOST_LARGEST]
        largest += zip(total[top].tolist(), chunk[top].tolist(), strict=True)
        largest = sorted(largest, key=lambda each: (-each[0], each[1]))[:MOST_LARGEST]
    mean = {phase: total / max(1, trained) for phase, total in sums.items()}
    loads = {phase: max(samples_per_rank * cost, 1.0) for phase, cost in mean.items()}
    return (
        {phase: counted.lengths() for phase, counted in counts.items()},
        tuple(_largest(source, row, price, sum(mean.values()), loads, num_peers) for _, row in largest),
        longest,
    )


def _largest(
    source: IndexCosts, row: int, price: StepPrice, mean: float, loads: Mapping[str, float], num_peers: int
) -> Figures:
    """Describe a sample. `mean` is the cost of the mean sample, `loads` the mean load of a rank in each phase."""
    index, one = source.index, np.array([row], np.int64)
    costs = {phase: int(source.costs(phase, one)[0]) for phase in loads}
    # Some rank has the whole sample: in each phase where ranks meet, it takes at least as long as the sample.
    times = {phase: 1 if phase == "llm" else num_peers for phase in loads}
    alone = sum(times[phase] * max(load, costs[phase]) for phase, load in loads.items())
    if not price.meets_in_micro_steps:
        alone = max(sum(times[phase] * each[phase] for phase in times) for each in (loads, costs))
    return Figures(
        shard=index.shard_of(row).url,
        key=index.key(row),
        row=row,
        positions={phase: int(source.positions(phase, one)[0]) for phase in source.phases},
        cost=sum(costs.values()) / mean if mean else 1.0,
        step=alone / sum(loads.values()),
    )


def chosen_totals(index: Index, left_out: NDArray[np.int64], *, until: float | None = None) -> Totals:
    """Return totals of the samples but those of `left_out`, ascending rows of whole samples: samples (bad ones
    included), bad, bytes, llm_tokens, loss_tokens, overflow, and for each modality samples, parts and tokens. `until`
    is as for `stretches`.
    """
    return sum_totals(totals_of_sources(index, left_out, until=until)) if len(left_out) else index.totals


def totals_of_sources(index: Index, left_out: NDArray[np.int64], *, until: float | None = None) -> list[Totals]:
    """Return the same of each source whose index is joined."""
    totals, bounds = [], np.searchsorted(left_out, index.first_rows)
    for part, first, (low, high) in zip(index.indexes, index.first_rows.tolist(), pairwise(bounds), strict=False):
        own, columns = left_out[low:high] - first, columns_of(part) if low < high else {}
        found = (_stretch_totals(part, columns, *each, own) for each in stretches(part, until=until))
        totals.append(sum_totals([*found]) if low < high else part.totals)
    return totals


def _stretch_totals(
    index: Index, columns: dict[str, Callable[[int, int], Any]], start: int, stop: int, left_out: NDArray[np.int64]
) -> Totals:
    kept = np.ones(stop - start, bool)
    kept[left_out[np.searchsorted(left_out, start) : np.searchsorted(left_out, stop)] - start] = False
    pieces, cut_tokens = index.piece[start:stop], index.cut_tokens[start:stop]
    chosen = kept & (pieces == 0)  # columns have the values of whole samples

    def of(column: str) -> NDArray[np.int64]:
        values: NDArray[np.int64] = np.asarray(columns[column](start, stop))[chosen].astype(np.int64)
        return values

    modalities = {"text": {"samples": int(np.count_nonzero(of("text_tokens"))), "tokens": int(of("text_tokens").sum())}}
    for name in index.modalities[1:]:
        parts = of(f"{name}_parts")
        modalities[name] = {
            "samples": int(np.count_nonzero(parts)),
            "parts": int(parts.sum()),
            "tokens": int(of(f"{name}_tokens").sum()),
        }
    return {
        "samples": int(np.count_nonzero(chosen)),
        "bad": int(np.count_nonzero(of("bad"))),
        "bytes": int(of("bytes").sum()),
        "llm_tokens": int(of("tokens").sum()),
        "loss_tokens": int(of("loss_tokens").sum()),
        "overflow": overflow_of(pieces[kept], cut_tokens[kept]),
        "modalities": modalities,
    }


MOST_KINDS: Final = 10
MOST_EXAMPLES: Final = 3


class Figures(dict[str, Any]):
    """Figures by name: `figures["samples"]` is `figures.samples`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no figure {name!r}") from None


def failure_examples(failures: Iterable[DataError]) -> tuple[Figures, ...]:
    """Return at most three failures of each of the ten most frequent kinds, the most frequent first."""
    by_kind: dict[str, list[DataError]] = {}
    for failure in failures:
        by_kind.setdefault(reason_kind(failure.reason), []).append(failure)
    frequent = sorted(by_kind.items(), key=lambda kind: -len(kind[1]))[:MOST_KINDS]
    return tuple(
        Figures(kind=kind, shard=each.shard, key=each.key, field=each.field, reason=each.reason)
        for kind, examples in frequent
        for each in examples[:MOST_EXAMPLES]
    )


def count_reasons(failures: Iterable[DataError]) -> dict[str, int]:
    """Count failures by kind of reason, the most frequent first; kinds do not differ by quoted names and numbers."""
    return dict(Counter(reason_kind(failure.reason) for failure in failures).most_common())


def split_failures(index: Index, bad: NDArray[np.int64] | None = None) -> tuple[list[DataError], list[DataError]]:
    """Return the failures of samples, and those of whole shards (with an empty key), of `bad` rows or of all."""
    failures = [index.failure(int(row)) for row in (index.bad_rows() if bad is None else bad)]
    return [failure for failure in failures if failure.key], [failure for failure in failures if not failure.key]
