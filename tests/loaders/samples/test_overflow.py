"""Samples above `max_tokens`: what is left of them, what they become, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orchdata as od
from orchdata.loaders.errors import FieldError
from orchdata.loaders.samples.measure import divided, num_tokens
from orchdata.loaders.samples.spans import MediaSlot, Span, TextSpan


def recipe(max_tokens: int | None, overflow: str = "error", **text: Any) -> od.Recipe:
    return od.Recipe(text=od.TextPreprocessor(max_tokens=max_tokens, overflow=overflow, **text))  # type: ignore[arg-type]


def texts(*lengths: int, loss: bool = True) -> list[Span]:
    """Text of these lengths, every second one without loss, whose ids count from 0."""
    ends = np.cumsum(lengths).tolist()
    spans = [np.arange(end - length, end, dtype=np.int32) for end, length in zip(ends, lengths, strict=True)]
    return [TextSpan(ids, loss and index % 2 == 0, leads=index == 0) for index, ids in enumerate(spans)]


def image(tokens: int, member: int = 0) -> MediaSlot:
    return MediaSlot("image", member, 0, tokens)


def sequence(spans: list[Span]) -> tuple[list[int], list[bool]]:
    """Ids and loss of text."""
    texts_only = [span for span in spans if isinstance(span, TextSpan)]
    return [id for span in texts_only for id in span.token_ids.tolist()], [
        x for span in texts_only for x in span.loss_mask()
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 50))
def test_pieces_are_the_sample_in_turn(lengths: list[int], limit: int) -> None:
    spans = texts(*lengths)
    pieces = divided(spans, recipe(limit, "split"))
    ids, loss = sequence(spans)
    sizes = [num_tokens(piece) for piece in pieces]
    assert [id for piece in pieces for id in sequence(piece)[0]] == ids
    assert sizes == [limit] * (len(sizes) - 1) + [len(ids) - limit * (len(sizes) - 1)]
    assert 1 <= sizes[-1] <= limit
    expected = [carries and index % limit != 0 for index, carries in enumerate(loss)]
    assert [carries for piece in pieces for carries in sequence(piece)[1]] == expected
    if len(ids) <= limit:
        assert pieces[0] is spans


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 50))
def test_the_first_tokens_are_left_of_a_truncated_sample(lengths: list[int], limit: int) -> None:
    spans = texts(*lengths)
    ids, loss = sequence(spans)
    if any(loss) and not any(loss[:limit]):
        with pytest.raises(FieldError, match="no token with loss"):
            divided(spans, recipe(limit, "truncate"))
        return
    (left,) = divided(spans, recipe(limit, "truncate"))
    assert sequence(left) == (ids[:limit], loss[:limit])


@pytest.mark.parametrize("overflow", ["error", "truncate", "split"])
def test_samples_within_are_untouched(overflow: str) -> None:
    spans = [*texts(3, 4), image(5)]
    assert divided(spans, recipe(12, overflow)) == [spans]
    with pytest.raises(FieldError, match="12 LLM tokens, above TextPreprocessor.max_tokens=11"):
        divided(spans, recipe(11, overflow))


@pytest.mark.parametrize(
    ("spans", "limit", "fits"),
    [
        ([*texts(3), image(4), *texts(9)], 7, True),
        ([*texts(3), image(4), *texts(9)], 6, False),  # it would be cut
        ([*texts(3), image(4), *texts(9)], 2, False),  # it lies beyond
        ([image(0), *texts(9)], 4, True),
        ([*texts(9), image(0)], 4, True),  # no place among tokens, so none to cut
    ],
)
def test_media_are_never_cut(spans: list[Span], limit: int, fits: bool) -> None:
    if not fits:
        with pytest.raises(FieldError, match="would cut image that ends at token 7: media are never cut"):
            divided(spans, recipe(limit, "truncate"))
        return
    (left,) = divided(spans, recipe(limit, "truncate"))
    assert num_tokens(left) == limit
    assert [span for span in left if isinstance(span, MediaSlot)] == [each for each in spans if type(each) is MediaSlot]


def test_what_closes_media_is_not_cut_off() -> None:
    wrapped = {"image_start_id": 300, "image_end_id": 301}
    closed = [*texts(2), TextSpan(np.array([300], np.int32), False), image(4)]
    spans = [*closed, TextSpan(np.array([301], np.int32), False), *texts(9)]
    assert num_tokens(divided(spans, recipe(8, "truncate", **wrapped))[0]) == 8
    with pytest.raises(FieldError, match="media are never cut"):
        divided(spans, recipe(7, "truncate", **wrapped))


def test_a_sample_with_media_is_not_split() -> None:
    with pytest.raises(FieldError, match="divides text alone, not samples with media: raise max_tokens"):
        divided([image(2), *texts(9)], recipe(4, "split"))


def test_the_fingerprint_tells_it_where_it_is_set() -> None:
    plain = od.Recipe(text=od.TextPreprocessor())
    assert not {"max_tokens", "overflow"} & plain.describe()["text"].keys()
    ways = [recipe(8), recipe(9), recipe(8, "truncate"), recipe(8, "split")]
    assert len({each.fingerprint() for each in [plain, *ways]}) == 5
    assert replace(recipe(8, "split").text, max_tokens=9).overflow == "split"
