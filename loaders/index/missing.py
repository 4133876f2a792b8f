"""Names of `Recipe.keep` that no sample has: fields are known from the index, keys of records from some records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from orchdata.loaders.errors import DataError, FieldError, ShardError
from orchdata.loaders.field_names import bare_name, is_kept_as
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import RECORD_FIELD
from orchdata.loaders.samples.members import has_keys, key_of
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import NO_CONTAINERS, OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files

_LOOKED_AT: Final = 32
"""Records of a data set that are read to see their keys."""


class Missing(NamedTuple):
    """Names that no sample has, the names that there are, and the number of records that were read for it."""

    names: tuple[str, ...]
    others: tuple[str, ...]
    num_records: int


def missing_names(
    index: Index,
    recipe: Recipe,
    containers: Mapping[str, Container] = NO_CONTAINERS,
    files: Files = PLAIN_FILES,
) -> Missing:
    """Return the names of `recipe.keep` that are no field of the index, and no key of some records spread over it.

    Args:
        containers: of the user's, by identity.
        files: where the shards are.
    """
    others = dict.fromkeys(map(bare_name, (*index.fields, *index.totals["ignored_fields"])))
    others.pop(RECORD_FIELD, None)
    missing = [name for name in recipe.keep if not any(is_kept_as(field, name) for field in index.fields)]
    count = 0
    if missing and (recipe.record is not None or any(map(has_keys, index.fields))):
        for record in _some_records(index, recipe, containers, files):
            count += 1
            others |= dict.fromkeys(record)
            missing = [name for name in missing if key_of(name, record) is None]
            if not missing:
                break
    return Missing(tuple(missing), tuple(others), count)


def _some_records(
    index: Index, recipe: Recipe, containers: Mapping[str, Container], files: Files
) -> Iterator[dict[str, Any]]:
    rows = np.unique(np.linspace(0, index.num_rows - 1, min(_LOOKED_AT, index.num_rows)).astype(np.int64))
    good: Sequence[int] = rows[~np.isin(rows, index.bad_rows())].tolist()
    shards = OpenShards(limits=recipe.limits, cache=CacheFolder(), containers=containers, files=files)
    try:
        for row in good:
            sample = StoredSample(index, shards, row)
            try:
                payloads = sample.read(recipe, text=False, parts=(), kept=True)
                yield {
                    **dict(pair for each in sample.records(recipe, payloads) for pair in each.items()),
                    **sample.made_fields(recipe, payloads),
                }
            except (DataError, FieldError, ShardError):
                continue  # the loader reports it
    finally:
        shards.close()
