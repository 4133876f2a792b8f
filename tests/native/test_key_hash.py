"""The hash of keys against a plain twin, and how evenly it falls."""

from __future__ import annotations

import numpy as np

from orchdata.native.permutation import hash_keys


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
