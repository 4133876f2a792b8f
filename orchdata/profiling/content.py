"""What samples are made of, from the index: lengths, combinations of modalities, shares of tokens, unlike shards.

    columns of the index, a stretch of rows at a time --sums--> Content

Memory does not grow with the samples, but for one number for each different length and each shard and modality.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.selection import columns_of, stretches
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.index.totals import Totals
from orchdata.profiling.lengths import LengthCounts, Lengths

Ints = NDArray[np.int64]

_BINS: Final = 10
_MOST_SHARDS: Final = 10
_MOST_COMBINATIONS: Final = 12
_LEAST_SAMPLES: Final = 20
"""Shards with fewer samples are not called different: their shares are chance."""
_LEAST_DIFFERENCE: Final = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Samples that have exactly these modalities, text among them."""

    modalities: tuple[str, ...]
    samples: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JointShares:
    """How many samples have which shares of their LLM tokens in two modalities.

    Attributes:
        modalities: those with the most LLM tokens, media before text; two, or one if there is no other.
        samples: [i][j] samples with a share from i/10 to (i+1)/10 in the first modality, and from j/10 in the second.
            [i][0] if there is one.
    """

    modalities: tuple[str, ...]
    samples: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnlikePart:
    """A shard, or a source of a mixture, and what its tokens are.

    Attributes:
        name: url of the shard, or name of the source.
        shares: modality -> share of its LLM tokens.
        tokens_per_sample: LLM tokens of a sample, mean.
        difference: half the sum of absolute differences between its shares and those of all samples, from 0 to 1.
    """

    name: str
    samples: int
    shares: Mapping[str, float]
    tokens_per_sample: float
    difference: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What samples are made of.

    Attributes:
        tokens: modality -> LLM tokens that it gives a sample, over whole samples that have it.
        combinations: by which modalities samples have, the most frequent first, at most 12.
        joint: shares of tokens in two modalities.
        shards: shards of other shares than all samples, most different first, at most 10; none if all are alike.
        sources: sources of a mixture, in their order; empty without a mixture.
    """

    tokens: Mapping[str, Lengths]
    combinations: tuple[Combination, ...]
    joint: JointShares
    shards: tuple[UnlikePart, ...]
    sources: tuple[UnlikePart, ...]


def content_of(index: Index, unused: Ints, totals: Totals, sources: Sequence[str]) -> Content:
    """Return the content of an index.

    Args:
        unused: rows of samples that are left out, ascending.
        totals: of the samples that are not left out by a filter or a split.
        sources: names of the sources that are joined in the index, if they are.
    """
    names = index.modalities
    lengths = {name: LengthCounts() for name in names}
    samples_of: Counter[int] = Counter()
    tokens_of: Counter[int] = Counter()
    of_shards = np.zeros((len(index.shards), 1 + len(names)), np.int64)  # samples, then tokens of each modality
    of_sources = np.zeros((max(1, len(sources)), 1 + len(names)), np.int64)
    first, second = _two_largest(names, totals)
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
        np.add.at(grid, (bins[first], bins[second] if second is not None else np.zeros_like(bins[first])), 1)
    whole = of_sources.sum(axis=0)
    shards = [
        _unlike(index.shards[number].url, of_shards[number], whole, names) for number in _most_unlike(of_shards, whole)
    ]
    return Content(
        tokens={name: counts.lengths() for name, counts in lengths.items()},
        combinations=tuple(
            Combination(
                modalities=tuple(name for bit, name in enumerate(names) if code >> bit & 1),
                samples=samples,
                tokens=tokens_of[code],
            )
            for code, samples in sorted(samples_of.items(), key=lambda each: (-each[1], each[0]))[:_MOST_COMBINATIONS]
        ),
        joint=JointShares(
            modalities=(names[first],) if second is None else (names[first], names[second]),
            samples=tuple(tuple(row if second is not None else row[:1]) for row in grid.tolist()),
        ),
        shards=tuple(shards),
        sources=tuple(_unlike(name, of_sources[number], whole, names) for number, name in enumerate(sources)),
    )


class _Stretch(NamedTuple):
    """Whole usable samples: LLM tokens of each modality, int64 (num_modalities, n), and their shards."""

    tokens: Ints
    shard: Ints
    first_shard: int
    source: int


def _stretches(
    index: Index, unused: Ints, first_row: int = 0, first_shard: int = 0, source: int = 0
) -> Iterator[_Stretch]:
    if isinstance(index, JoinedIndex):
        shard = first_shard
        for number, (part, row) in enumerate(zip(index.indexes, index.first_rows[:-1].tolist(), strict=True)):
            yield from _stretches(part, unused, row, shard, number)
            shard += len(part.shards)
        return
    columns = columns_of(index)
    for start, stop in stretches(index):
        low, high = np.searchsorted(unused, [first_row + start, first_row + stop])
        kept = index.piece[start:stop] == 0
        kept[unused[low:high] - first_row - start] = False
        if kept.any():
            tokens = [columns[f"{name}_tokens"](start, stop)[kept] for name in index.modalities]
            shard = index.shard[start:stop][kept].astype(np.int64) + first_shard
            yield _Stretch(np.stack(tokens).astype(np.int64), shard, int(shard.min()), source)


def _two_largest(names: Sequence[str], totals: Totals) -> tuple[int, int | None]:
    """Return the two modalities with the most LLM tokens, by their place in `names`: media before text."""
    tokens = {name: counts["tokens"] for name, counts in totals["modalities"].items()}
    media = [number for number, name in enumerate(names) if number and tokens.get(name, 0) > 0]
    media.sort(key=lambda number: -tokens[names[number]])
    if len(media) >= 2:
        return media[0], media[1]
    return (media[0], None) if media else (0, None)


def _most_unlike(parts: Ints, whole: Ints) -> list[int]:
    """Return the numbers of the parts whose shares differ most from the whole's, if they differ much."""
    shares = parts[:, 1:] / np.maximum(parts[:, 1:].sum(axis=1, keepdims=True), 1)
    difference = np.abs(shares - whole[1:] / max(1, int(whole[1:].sum()))).sum(axis=1) / 2
    difference[parts[:, 0] < _LEAST_SAMPLES] = 0
    order = np.argsort(-difference, kind="stable")[:_MOST_SHARDS]
    return [number for number in order.tolist() if difference[number] >= _LEAST_DIFFERENCE]


def _unlike(name: str, part: Ints, whole: Ints, modalities: Sequence[str]) -> UnlikePart:
    tokens, all_tokens = int(part[1:].sum()), int(whole[1:].sum())
    shares = part[1:] / max(1, tokens)
    return UnlikePart(
        name=name,
        samples=int(part[0]),
        shares=dict(zip(modalities, shares.tolist(), strict=True)),
        tokens_per_sample=tokens / max(1, int(part[0])),
        difference=float(np.abs(shares - whole[1:] / max(1, all_tokens)).sum() / 2),
    )
