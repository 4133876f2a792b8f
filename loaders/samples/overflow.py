"""Samples above `TextPreprocessor.max_tokens`: they fail, are truncated, or are split into pieces.

    spans of a sample --divided--> spans of each of its rows

Counting and decoding both use this module, so a row has the tokens that the index counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from orchdata.loaders.errors import FieldError
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.spans import MediaSlot, Span, TextRun, TextSpan
from orchdata.loaders.samples.whole_text import Window

_MOST_SHARED: Final = 16
"""A piece that begins inside a character with this number of tokens is not tokenized alone."""


AnySpan = TypeVar("AnySpan", TextSpan | MediaSlot, TextRun | MediaSlot)


def divided(spans: list[AnySpan], recipe: Recipe) -> list[list[AnySpan]]:
    """Return the spans of each row of a sample: all spans in one row, the rest of a truncated sample, or its pieces.

    Every piece but the last has `max_tokens` tokens. The first token of each leads, like that of a sample.

    Raises:
        FieldError: the sample has more tokens than `max_tokens`, and may not be cut, or not at this token.
    """
    limit = recipe.text.max_tokens
    if limit is None or (tokens := num_tokens(spans)) <= limit:
        return [spans]
    above = f"the sample has {tokens} LLM tokens, above TextPreprocessor.max_tokens={limit}"
    if recipe.text.overflow == "truncate":
        return [_truncated(spans, limit, above, recipe)]
    if recipe.text.overflow == "error":
        raise FieldError(
            "*",
            f"{above}: raise it, or cut such samples by overflow='truncate' (their first tokens are kept) or "
            "overflow='split' (text in pieces)",
        )
    if any(isinstance(span, MediaSlot) for span in spans):
        raise FieldError(
            "*",
            f"{above}, and overflow='split' divides text alone, not samples with media: raise max_tokens, give their "
            "media fewer tokens, or cut their text in the data",
        )
    return _pieces(spans, limit)


def windows(pieces: Sequence[Sequence[Span]]) -> list[Window]:
    """Return the range of each piece in the text; nothing if the tokens have no offsets."""
    begins = [(0, 0)]
    for before, piece in pairwise(pieces):
        first, last = piece[0], before[-1]
        if not isinstance(first, TextSpan) or first.starts is None:
            return []
        start = int(first.starts[0])
        shared = last.starts if isinstance(last, TextSpan) and last.starts is not None else np.zeros(0, np.int64)
        begins.append((start, int(np.count_nonzero(shared == start))))
    stops = [*(start for start, _ in begins[1:]), None]
    return [
        Window(start, stop, skipped, num_tokens(piece))
        for (start, skipped), stop, piece in zip(begins, stops, pieces, strict=True)
    ]


def packed(window: Window, *, alone: bool) -> int:
    """Encode the start of a window as one number, negative if its piece cannot be tokenized alone; see `unpacked`."""
    begin = window.start * _MOST_SHARED + window.skipped
    return begin if alone and window.skipped < _MOST_SHARED else -1 - begin


def unpacked(number: int) -> tuple[int, int]:
    """Return `Window.start` and `Window.skipped`."""
    return divmod(number if number >= 0 else -1 - number, _MOST_SHARED)


def is_same(one: Sequence[Span], other: Sequence[Span]) -> bool:
    """Whether two pieces of text have the same ids and loss."""
    mine, theirs = ([span for span in spans if isinstance(span, TextSpan)] for spans in (one, other))
    return all(
        np.array_equal(np.concatenate(left), np.concatenate(right))
        for left, right in (
            ([span.token_ids for span in mine], [span.token_ids for span in theirs]),
            ([span.loss_mask() for span in mine], [span.loss_mask() for span in theirs]),
        )
    )


def num_tokens(spans: Sequence[TextSpan | TextRun | MediaSlot]) -> int:
    """Length of the sequence of these spans."""
    return sum([span.tokens if isinstance(span, MediaSlot) else span.num_tokens for span in spans])


def _pieces(spans: Sequence[AnySpan], limit: int) -> list[list[AnySpan]]:
    """Cut text into pieces of `limit` tokens; the last has the rest."""
    pieces: list[list[AnySpan]] = []
    room = 0
    for span in spans:
        assert not isinstance(span, MediaSlot)
        start = 0
        while start < span.num_tokens:
            if room == 0:
                pieces.append([])
                room = limit
            stop = min(start + room, span.num_tokens)
            pieces[-1].append(span.cut(start, stop, leads=not pieces[-1]))
            room -= stop - start
            start = stop
    return pieces


def _truncated(spans: Sequence[AnySpan], limit: int, above: str, recipe: Recipe) -> list[AnySpan]:
    """Return the first `limit` tokens, and all parts without tokens."""
    kept: list[AnySpan] = []
    at = 0
    for number, span in enumerate(spans):
        if isinstance(span, MediaSlot):
            at += span.tokens
            if span.tokens and at + _closed_by(span, spans, number, recipe) > limit:
                raise FieldError(
                    span.modality,
                    f"{above}, and overflow='truncate' would cut {span.modality} that ends at token {at}: media are "
                    "never cut; raise max_tokens, or give media fewer tokens",
                )
            kept.append(span)
        else:
            if at < limit:
                kept.append(span.cut(0, limit - at, leads=span.leads))
            at += span.num_tokens
    if _has_loss(spans) and not _has_loss(kept):
        raise FieldError(
            "*",
            f"{above}, and overflow='truncate' would leave no token with loss: raise max_tokens, shorten the text "
            "before the first such token, or leave the sample out",
        )
    return kept


def _closed_by(slot: MediaSlot, spans: Sequence[AnySpan], number: int, recipe: Recipe) -> int:
    """Number of tokens that close a part after its last: 1 if its modality has an end token."""
    closing = recipe.slots[slot.modality].end_id
    after = spans[number + 1] if number + 1 < len(spans) else None
    if closing is None or after is None or isinstance(after, MediaSlot):
        return 0
    return int(after.first_id == closing)


def _has_loss(spans: Sequence[AnySpan]) -> bool:
    return any(not isinstance(span, MediaSlot) and span.num_loss_tokens for span in spans)
