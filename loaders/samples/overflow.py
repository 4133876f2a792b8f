"""Samples above `TextPreprocessor.max_tokens`: refused, truncated, or split into pieces.

    spans of a sample --divided--> spans of each of its rows

Counting and decoding both go through here, so that a row's tokens are those that the index counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchdata.loaders.errors import FieldError
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.spans import MediaSlot, Span, TextSpan


def divided(spans: list[Span], recipe: Recipe) -> list[list[Span]]:
    """The spans of each row that a sample is: all of them in one, those left of a truncated sample, or its pieces.

    Every piece but the last has `max_tokens` tokens. The first token of each leads, as that of a sample does.

    Raises:
        FieldError: the sample has more tokens than `max_tokens`, and may not be cut, or not there.
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


def num_tokens(spans: Sequence[Span]) -> int:
    """Length of the sequence that spans are."""
    return sum([span.tokens if isinstance(span, MediaSlot) else len(span.token_ids) for span in spans])


def _pieces(spans: Sequence[Span], limit: int) -> list[list[Span]]:
    """Text in pieces of `limit` tokens, and what is left."""
    pieces: list[list[Span]] = []
    room = 0
    for span in spans:
        assert isinstance(span, TextSpan)
        ids = span.token_ids
        start = 0
        while start < len(ids):
            if room == 0:
                pieces.append([])
                room = limit
            stop = min(start + room, len(ids))
            pieces[-1].append(TextSpan(ids[start:stop], span.loss, leads=not pieces[-1]))
            room -= stop - start
            start = stop
    return pieces


def _truncated(spans: Sequence[Span], limit: int, above: str, recipe: Recipe) -> list[Span]:
    """The first `limit` tokens, and all parts that have no place among tokens."""
    kept: list[Span] = []
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
        elif at < limit:
            kept.append(span._replace(token_ids=span.token_ids[: limit - at]))
            at += len(span.token_ids)
        else:
            at += len(span.token_ids)
    if _has_loss(spans) and not _has_loss(kept):
        raise FieldError(
            "*",
            f"{above}, and overflow='truncate' would leave no token with loss: raise max_tokens, shorten what stands "
            "before the first such token, or leave the sample out",
        )
    return kept


def _closed_by(slot: MediaSlot, spans: Sequence[Span], place: int, recipe: Recipe) -> int:
    """Tokens that close a part behind its last: 1 where its modality has an end token."""
    closing = recipe.slots[slot.modality].end_id
    behind = spans[place + 1] if place + 1 < len(spans) else None
    return int(closing is not None and isinstance(behind, TextSpan) and int(behind.token_ids[0]) == closing)


def _has_loss(spans: Sequence[Span]) -> bool:
    return any(isinstance(span, TextSpan) and span.num_loss_tokens for span in spans)
