"""A warning where chats never learn to stop: nothing after their last answer carries loss."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Final

from orchdata.building.contents import IndexedShards
from orchdata.loaders.errors import DataError, FieldError
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import Composition
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
    starts = index.first_rows if isinstance(index, JoinedIndex) else [0, index.num_rows]
    opened = shards.open()
    try:
        for start, stop in pairwise(starts):
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
    bad = shards.index.bad_rows()
    row, stride = start, max(1, 2 * (stop - start) // _OTHERS)
    while row < stop and chats < _CHATS and others < _OTHERS:
        recipe = shards.recipe_of(row)
        if recipe.text.learns_end:
            break
        is_bad = row in bad[bad.searchsorted(row) :][:1]
        composition = None if is_bad else _composition(StoredSample(shards.index, opened, row), recipe)
        answer = None if composition is None else _last_answer(composition)
        if answer is None or composition is None:
            others += 1
            row += 1 if others % 2 else stride
            continue
        last = composition.segments[-1]
        is_last = isinstance(last, TextSegment) and last.loss
        if recipe.text.is_ended(answer) or (is_last and recipe.text.eos_token_id is not None):
            return 0
        chats += 1
        row += 1
    return chats


def _composition(sample: StoredSample, recipe: Recipe) -> Composition | None:
    """Return the composition of a sample that may be a chat; None for another, or a bad one."""
    uses = uses_of(sample.members, recipe)
    try:
        return sample.composition(recipe) if uses.json or uses.other_text or recipe.record is not None else None
    except (DataError, FieldError):
        return None  # it is reported when it is loaded


def _last_answer(composition: Composition) -> str | None:
    """Return the text with loss at the end of a chat; None for other samples, and chats without loss."""
    if not composition.is_chat:
        return None
    runs = groupby(composition.segments, lambda each: isinstance(each, TextSegment) and each.loss)
    trained = ["".join(each.text for each in run if isinstance(each, TextSegment)) for loss, run in runs if loss]
    return trained[-1] if trained else None
