"""A warning where chats never learn to stop: nothing after their last answer carries loss."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Final

from orchdata.building.contents import IndexedShards
from orchdata.loaders.errors import DataError, FieldError
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.members import uses_of
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.text.template import TextSegment
from orchdata.notices import warn_once

_CHATS: Final = 100
_OTHERS: Final = 20
"""Samples that are no chats, after which no more are read. They are spread over the data."""


def warn_of_unended(shards: IndexedShards, rank: int = 0) -> None:
    """Render the first chats, of each source of a mixture, and warn if none of them learns an end token or end mark; on
    the first rank.
    """
    if rank:
        return
    index = shards.index
    opened = shards.open()
    try:
        for start, stop in pairwise(index.first_rows):
            if chats := _unended(shards, opened, int(start), int(stop)):
                warn_once(
                    f"unended chats of {index.fingerprint} from {start}",
                    f"chats never learn to stop: of the first {chats} none has an end token or a text of its template "
                    "with loss after its last answer. TextPreprocessor(eos_token_id=...), or append_eos=True of "
                    "od.hf.recipe, appends the end token; or take a template that writes one, inside of its "
                    "{% generation %} where it has that: docs/text.md",
                )
    finally:
        opened.close()


def _unended(shards: IndexedShards, opened: OpenShards, start: int, stop: int) -> int:
    """Return the number of chats that were rendered; 0 if one of them learns to stop."""
    chats = others = 0
    row, stride = start, max(1, 2 * (stop - start) // _OTHERS)
    while row < stop and chats < _CHATS and others < _OTHERS:
        recipe = shards.recipe_of(row)
        if recipe.text.learns_end:
            break
        trained = _last_trained(StoredSample(shards.index, opened, row), recipe)
        if trained is None:
            others += 1
            row += 1 if others % 2 else stride
            continue
        answer, is_last = trained
        if recipe.text.is_ended(answer) or (is_last and recipe.text.eos_token_id is not None):
            return 0
        chats += 1
        row += 1
    return chats


def _last_trained(sample: StoredSample, recipe: Recipe) -> tuple[str, bool] | None:
    """Return the last text of a chat with loss, and whether the chat ends there; None for samples without."""
    uses = uses_of(sample.members, recipe)
    if not (uses.json or uses.other_text or recipe.record is not None):
        return None
    try:
        composition = sample.composition(recipe)
    except (DataError, FieldError):
        return None  # it is reported when it is loaded
    runs = groupby(composition.segments, lambda each: isinstance(each, TextSegment) and each.loss)
    texts = ["".join(each.text for each in run if isinstance(each, TextSegment)) if loss else "" for loss, run in runs]
    answer = next(filter(None, reversed(texts)), None)
    return (answer, answer == texts[-1]) if composition.is_chat and answer is not None else None
