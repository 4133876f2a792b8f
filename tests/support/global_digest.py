"""What the ranks of a step have together, to the bit, whoever has which part of it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence

import orchdata as od

Content = tuple[list[tuple[str, str, str]], list[str]]


def content(share: Sequence[od.Batch]) -> Content:
    """What one rank has of a global batch: (shard, key, digest of its sequence), and digests of media it encodes."""
    sequences: list[tuple[str, str, str]] = []
    media: list[str] = []
    for batch in share:
        bounds = batch.llm.cu_seqlens.tolist()
        for key, (start, stop) in zip(batch.sample_ids, itertools.pairwise(bounds), strict=False):  # a dummy has no key
            held = (batch.llm.input_ids, batch.llm.labels, batch.llm.position_ids)
            sequences.append((*key, _digest(b"".join(each[start:stop].numpy().tobytes() for each in held))))
        for name, parts in batch.media.items():
            for start, stop in itertools.pairwise(parts.cu_seqlens.tolist()):
                rows = next(iter(parts.arrays.values()))[start:stop]
                if rows.any():  # or it is a dummy, which every rank without one has
                    media.append(f"{name} {_digest(rows.contiguous().numpy().tobytes())}")
    return sequences, media


def joined(found: Sequence[Content]) -> str:
    """The digest of a global batch, from what each rank has of it. AssertionError where a sample is on two of them."""
    sequences = sorted(tuple(each) for sequences, _ in found for each in sequences)
    keys = [each[:2] for each in sequences]
    assert len(keys) == len(set(keys)), "a sample comes twice in a global batch"
    return _digest(json.dumps([sequences, sorted(part for _, media in found for part in media)]).encode())


def global_batch(shares: Sequence[Sequence[od.Batch]]) -> str:
    return joined([content(share) for share in shares])


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
