"""Memory that samples take, computed from the index, and the error where there is not enough memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.measure import MeasuredPart, decoded_bytes

TOKEN_BYTES = 48
"""A token of text: its id twice, its label, and three positions, int64 each."""

_NAMED = 3


def sample_bytes(index: Index, recipe: Recipe, row: int) -> int:
    """Return the bytes that one sample takes in a batch and while it is decoded."""
    numbers = index.part_range(row)
    members = index.members(row)
    parts = [
        MeasuredPart(index.modality_of(part), index.member_of(part, len(members)), size)
        for part, size in zip(numbers, index.sizes(numbers, recipe), strict=True)
    ]
    return decoded_bytes(parts, members, recipe) + TOKEN_BYTES * int(index.llm_tokens[row])


def out_of_memory(
    error: MemoryError, index: Index, recipe: Recipe, rows: NDArray[np.int64], row: int | None = None
) -> MemoryError:
    """Return an error with the largest samples of a microbatch, and the one that was being decoded."""
    sizes = {int(each): sample_bytes(index, recipe, int(each)) for each in rows}
    largest = sorted(sizes, key=lambda each: (-sizes[each], each))[:_NAMED]
    named = "; ".join(f"{index.shard_of(each).url}: {index.called(each)}, {sizes[each]} bytes" for each in largest)
    where = "" if row is None else f" at {index.called(row)} of {index.shard_of(row).url}"
    return MemoryError(
        f"not enough memory{where} for a microbatch of {len(sizes)} samples, {sum(sizes.values())} bytes by the index "
        f"({error}); the largest: {named}. Lower batch_size, cap Balance(max_tokens=...), or leave such samples out "
        "with Limits.sample_decoded_bytes or quarantine="
    )
