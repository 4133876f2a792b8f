"""Samples of shards, by their rows: decoded, with errors that name them, and their sizes in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DataError, FieldError, as_field_error
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.measure import MeasuredPart, decoded_bytes
from orchdata.loaders.samples.sample import Sample
from orchdata.loaders.shards.open import OpenShards

TOKEN_BYTES = 48
"""A token of text: its id twice, its label, and three positions, int64 each."""

_NAMED = 3


def shard_loader(index: Index, shards: OpenShards, recipe_of: Callable[[int], Recipe]) -> Callable[..., Sample]:
    """Return (row, of: Pass) -> decoded `Sample` of an index; `recipe_of` returns the recipe for a row."""

    def load(row: int, of: Pass = Pass()) -> Sample:  # noqa: B008 - a frozen value
        stored, recipe = StoredSample(index, shards, row), recipe_of(row)
        try:
            return stored.decode(recipe, of)
        except FieldError as error:
            stored.refuse_moved(error)
            raise error.at(stored.shard, stored.key) from error.__cause__
        except MemoryError as error:
            raise out_of_memory(error, index, recipe, np.array([row]), row) from error
        except DataError:
            raise
        except Exception as error:  # any exception of a decoder fails the sample
            raise as_field_error(error, "decoded").at(stored.shard, stored.key) from error

    return load


def shard_refusal(index: Index) -> Callable[[int, str], Exception]:
    """Return (row of an index, reason) -> the failure of that sample."""
    return lambda row, reason: DataError(index.shard_of(row).url, index.key(row), "*", f"its worker {reason}")


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
