"""Keyed permutations against their plain-Python twin, and against what a uniform permutation would do."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from orchdata.native.permutation import BLOCK, blocks_in_sequence, derive_key, hash_keys, permute, shuffled_rows

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def twin_derive_key(key: int, value: int) -> int:
    x = ((key ^ (value * GOLDEN & MASK)) + GOLDEN) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def twin_hash32(value: int, key: int) -> int:
    x = (value + key) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 31) * 0x94D049BB133111EB & MASK
    return x >> 32


def twin_permute(value: int, size: int, key: int) -> int:
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        right, left = divmod(value, a)
        round_key = key
        for _ in range((24 if size <= 64 else 6) // 2):
            left = (left + (twin_hash32(right, round_key) * a >> 32)) % a
            round_key = (round_key + GOLDEN) & MASK
            right = (right + (twin_hash32(left, round_key) * b >> 32)) % b
            round_key = (round_key + GOLDEN) & MASK
        value = right * a + left
        if value < size:
            return value ^ 1 if value < 2 <= size and key >> 63 else value


def twin_row(position: int, num_samples: int, window: int, streams: int, key: int) -> int:
    """The definition, one position at a time."""
    stream, index = position % streams, position // streams
    lengths = [len(range(s, num_samples, streams)) for s in range(streams)]
    begin, length = sum(lengths[:stream]), lengths[stream]
    stream_key = twin_derive_key(key, stream)

    sizes = twin_slots(length, stream_key)
    starts = [0, *itertools.accumulate(sizes)]
    windows = -(-len(sizes) // window)
    bounds = [starts[w * len(sizes) // windows] for w in range(windows + 1)]
    this = next(w for w in range(windows) if index < bounds[w + 1])
    low, high = bounds[this], bounds[this + 1]
    place = low + twin_permute(index - low, high - low, twin_derive_key(twin_derive_key(stream_key, 2), this))
    slot = next(j for j in range(len(sizes)) if place < starts[j + 1])
    whole = [j for j, size in enumerate(sizes) if size == BLOCK]
    block = len(whole)
    if sizes[slot] == BLOCK:
        block = twin_permute(whole.index(slot), len(whole), twin_derive_key(stream_key, 1))
    return begin + block * BLOCK + place - starts[slot]


def twin_slots(length: int, stream_key: int) -> list[int]:
    """Sizes of a stream's blocks, in the sequence of the epoch."""
    sizes = [BLOCK] * (length // BLOCK)
    if length % BLOCK:
        sizes.insert(twin_derive_key(stream_key, 3) % (len(sizes) + 1), length % BLOCK)
    return sizes


def permutation(size: int, key: int) -> NDArray[np.int64]:
    values = np.arange(size, dtype=np.uint64)
    permute(np.uint64(size), np.uint64(key), values)
    return values.view(np.int64)


def epoch(
    num_samples: int, window: int, streams: int, key: int, start: int = 0, stop: int | None = None
) -> NDArray[np.int64]:
    out = np.empty((num_samples if stop is None else stop) - start, np.uint64)
    shuffled_rows(*map(np.uint64, (num_samples, window, streams, key, start)), out)
    return out.view(np.int64)


def test_every_size_is_a_bijection() -> None:
    for size in [*range(1, 501), 4096, 65_537, 99_999]:
        assert np.array_equal(np.sort(permutation(size, 77 * size)), np.arange(size)), size


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 100, 1000, 10**9, 1 << 40])
def test_permute_equals_its_twin(size: int) -> None:
    values = np.unique(np.linspace(0, size - 1, 40).astype(np.uint64))
    for key in (0, 1, 1 << 63, MASK):
        got = values.copy()
        permute(np.uint64(size), np.uint64(key), got)
        assert got.tolist() == [twin_permute(value, size, key) for value in values.tolist()]


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("streams", [1, 2, 7, 300])
@pytest.mark.parametrize("num_samples", [1, 2, 255, 256, 257, 1500, 5000])
def test_rows_equal_their_twin_and_cover_every_sample(num_samples: int, window: int, streams: int) -> None:
    got = epoch(num_samples, window, streams, 99)
    assert np.array_equal(np.sort(got), np.arange(num_samples))
    some = range(0, num_samples, max(1, num_samples // 97))
    assert got[some].tolist() == [twin_row(p, num_samples, window, streams, 99) for p in some]


@pytest.mark.parametrize("streams", [1, 2, 7, 300])
@pytest.mark.parametrize("num_samples", [0, 1, 255, 256, 257, 1500, 5000, 20_001])
def test_the_sequence_of_blocks_equals_its_twin(num_samples: int, streams: int) -> None:
    expected: list[int] = []
    for stream in range(streams):
        stream_key, first = twin_derive_key(99, stream), len(expected)
        sizes = twin_slots(len(range(stream, num_samples, streams)), stream_key)
        whole = sizes.count(BLOCK)
        images = iter([twin_permute(block, whole, twin_derive_key(stream_key, 1)) for block in range(whole)])
        expected += [first + (next(images) if size == BLOCK else whole) for size in sizes]
    got = np.empty(len(expected), np.uint64)
    blocks_in_sequence(np.uint64(num_samples), np.uint64(streams), np.uint64(99), got)
    assert got.tolist() == expected


@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_all_permutations_of_a_small_range_are_equally_likely(size: int) -> None:
    from scipy.stats import chisquare  # a second

    counts = dict.fromkeys(itertools.permutations(range(size)), 0)
    draws = max(2000, 8 * len(counts))  # at least 8 expected in each cell
    for trial in range(draws):
        counts[tuple(permutation(size, derive_key(np.uint64(3), np.uint64(trial))).tolist())] += 1
    assert chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.parametrize("size", [9, 33, 64, 65, 257])
def test_places_and_neighbours_are_spread_evenly(size: int) -> None:
    from scipy.stats import chisquare

    trials = 30 * size
    values = np.stack([permutation(size, derive_key(np.uint64(5), np.uint64(t))) for t in range(trials)])

    # Every value in every place: (size - 1)**2 degrees of freedom, far in the normal range. Each draw fills every row
    # and column of the table once, which makes its cells (size - 1) / size as independent as those of a free one.
    flat = (np.arange(size) * size + values).ravel()
    counts = np.bincount(flat, minlength=size * size)
    freedom = (size - 1) ** 2
    statistic = ((counts - trials / size) ** 2 / (trials / size)).sum() * (size - 1) / size
    assert abs(statistic - freedom) < 4.5 * math.sqrt(2 * freedom)

    # Two places, near or far, hold every difference equally often.
    for first, second in ((0, 1), (0, math.isqrt(size)), (2, 3), (1, size - 1)):
        differences = np.bincount((values[:, second] - values[:, first]) % size, minlength=size)
        assert differences[0] == 0
        assert chisquare(differences[1:]).pvalue > 1e-4


# The hash of keys against a plain twin, and how evenly it falls.


def hashes(keys: list[bytes], seed: int) -> list[int]:
    out = np.empty(len(keys), np.uint64)
    offsets = np.cumsum([0, *map(len, keys)]).astype(np.int64)
    hash_keys(offsets, np.frombuffer(b"".join(keys), np.uint8).copy(), np.uint64(seed), out)
    return out.tolist()


def test_counting_keys_fall_evenly_and_seeds_are_independent() -> None:
    keys = [f"{i:08d}".encode() for i in range(20_000)]
    one, other = (np.array(hashes(keys, seed), np.uint64) >> np.uint64(60) for seed in (0, 1))
    counts = np.zeros((16, 16), np.int64)
    np.add.at(counts, (one, other), 1)
    expected = len(keys) / 256  # 78; chi-square over 255 degrees of freedom: 255 +- 23
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * 23
