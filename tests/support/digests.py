"""What batches hold, to the bit: all of one, and what the ranks of a step have together, whoever has which part."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

import orchdata as od
from orchdata.planning.plan import Plan

Content = tuple[list[tuple[str, str, str]], list[str]]


def digest(value: Any, without: Collection[str] = ()) -> str:
    """Of all that a value holds, but for some fields of dataclasses."""
    return _digest(b"".join(_parts(value, without)))


def _parts(value: Any, without: Collection[str]) -> Iterator[bytes]:
    if isinstance(value, Plan):
        yield value.hash.encode()
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + (
            repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        )
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _parts(
            {field.name: getattr(value, field.name) for field in fields(value) if field.name not in without}, without
        )
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name).encode()
            yield from _parts(item, without)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__}{len(value)}".encode()
        for item in value:
            yield from _parts(item, without)
    else:
        yield repr(value).encode()


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
