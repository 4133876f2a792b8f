"""Declared counts of tokens are compared with the tokenizer's when a loader is made: a wrong tokenizer is one error."""

from __future__ import annotations

from typing import Final

import numpy as np

from orchdata.building.spec import BuildSpec, IndexedShards
from orchdata.loaders.errors import DataError, FieldError
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.shards.open import OpenShards

_SAMPLES: Final = 100
_MOST_WRONG: Final = 0.1


def check_declared_counts(spec: BuildSpec) -> None:
    """Tokenize up to 100 samples, spread over the data, of recipes with `TextPreprocessor.count_field`.

    Raises:
        ValueError: more than a tenth of them declare other counts. A single wrong count is left to the loader.
    """
    shards = getattr(spec.content, "shards", None)
    if not isinstance(shards, IndexedShards):
        return
    if all(recipe.text.count_field is None for recipe in shards.of_sources or (shards.recipe,)):
        return
    opened = shards.open()
    try:
        tried, wrong = _compared(shards, opened)
    finally:
        opened.close()
    if len(wrong) > _MOST_WRONG * tried:
        raise ValueError(
            f"{len(wrong)} of {tried} samples declare other counts than the tokenizer of the recipe gives: {wrong[0]}. "
            "Use the tokenizer that the counts were made with, with its special tokens, or leave out "
            "TextPreprocessor(count_field=...)"
        )


def _compared(shards: IndexedShards, opened: OpenShards) -> tuple[int, list[str]]:
    """Return how many samples were tokenized, and what is wrong with those that declare other counts."""
    index = shards.index
    good = np.setdiff1d(np.arange(index.num_rows), index.bad_rows())
    rows = (
        good[np.unique(np.linspace(0, len(good) - 1, min(len(good), _SAMPLES)).astype(np.int64))] if len(good) else good
    )
    tried, wrong = 0, []
    for row in rows.tolist():
        recipe = shards.recipe_of(row)
        if recipe.text.count_field is None:
            continue
        tried += 1
        stored = StoredSample(index, opened, row)
        try:
            stored.look(recipe)
        except FieldError as error:
            wrong.append(str(error.at(stored.shard, stored.key)))
        except DataError:
            continue  # it cannot be read: the loader reports it when it loads the sample
    return tried, wrong
