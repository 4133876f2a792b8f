"""The spans of a sample's sequence: how text and media become spans, and how those of a sample become its rows.

Text is tokenized in stretches of equal loss between media, so the loss mask is exact for every tokenizer. A fast
tokenizer gets all text in one call, as in Hugging Face's processors: each run of a part's tokens is written as one
mark, and a token carries loss if its characters overlap text that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER, Encoded
from orchdata.loaders.text.template import TextSegment, holds_mark


class TextSpan(NamedTuple):
    """Token ids int32 (num_tokens,), at least one, and whether they carry loss. The first token of a sample carries no
    loss: nothing before it predicts it. `leads`: this span contains it. `starts`: of each token in the text that was
    tokenized in one call, in characters, int64; None if unknown.
    """

    token_ids: NDArray[np.int32]
    loss: bool
    leads: bool = False
    starts: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.token_ids) - self.leads if self.loss else 0

    @property
    def first_id(self) -> int:
        return int(self.token_ids[0])

    def cut(self, start: int, stop: int, *, leads: bool) -> TextSpan:
        """Return the tokens from `start` to `stop` as a span of their own."""
        starts = None if self.starts is None else self.starts[start:stop]
        return TextSpan(self.token_ids[start:stop], self.loss, leads, starts)

    def loss_mask(self) -> NDArray[np.bool_]:
        """Whether each token carries loss, bool (num_tokens,)."""
        mask = np.full(len(self.token_ids), self.loss)
        mask[: self.leads] = False
        return mask


class MediaSlot(NamedTuple):
    """The slot of a part, or of a piece of it if text is between its tokens: `tokens` of it, from the `first` on."""

    modality: str
    member: int
    first: int
    tokens: int


Span = TextSpan | MediaSlot
Placed = TextSegment | tuple[str, int]
"""A text, or a part: its modality and its index in the sample's members."""


class TextRun(NamedTuple):
    """What counting needs of neighbouring text spans of equal loss; see `TextSpan`."""

    num_tokens: int
    loss: bool
    leads: bool
    first_id: int

    @property
    def num_loss_tokens(self) -> int:
        return self.num_tokens - self.leads if self.loss else 0

    def cut(self, start: int, stop: int, *, leads: bool) -> TextRun:
        """Return the tokens from `start` to `stop` as a run of their own; its first token is only known at 0."""
        return TextRun(min(stop, self.num_tokens) - start, self.loss, leads, self.first_id if start == 0 else -1)


SizeOf = Callable[[str, int], PartSize]
"""Returns the size of a part, by its modality and its index in the sample's members."""


class SizesInTurn:
    """Sizes of a sample's parts from the index, returned in the order of their slots: a `SizeOf`."""

    def __init__(self, sizes: Sequence[PartSize]) -> None:
        self._count = len(sizes)
        self._left = iter(sizes)
        self.by_member: dict[int, PartSize] = {}

    def __call__(self, _modality: str, member: int) -> PartSize:
        size = next(self._left, None)
        if size is None:
            raise self._differs("more")
        self.by_member[member] = size
        return size

    def check_none_left(self) -> None:
        """Raise FieldError if the text has fewer parts."""
        if next(self._left, None) is not None:
            raise self._differs("fewer")

    def _differs(self, how: str) -> FieldError:
        reason = f"the index says {self._count} parts of media, the text yields {how}: {WHY_COUNTS_DIFFER}"
        return FieldError("*", reason)


class Spans:
    """The spans so far. The first token is marked."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._leads = True

    def ids(self, token_ids: NDArray[np.int32], loss: bool, starts: NDArray[np.int64] | None = None) -> None:
        if len(token_ids):
            self.spans.append(TextSpan(token_ids, loss, self._leads, starts))
            self._leads = False

    def special(self, token_id: int | None, loss: bool = False) -> None:
        if token_id is not None:
            self.ids(np.array([token_id], np.int32), loss)

    def slot(self, slot: MediaSlot) -> None:
        self.spans.append(slot)
        self._leads = self._leads and slot.tokens == 0

    def end(self, token_id: int | None) -> None:
        """Add an end token, unless the text or the tokenizer ends with it. Of both, one stays."""
        if token_id is None:
            return
        last = self.spans[-1] if self.spans else None
        if not isinstance(last, TextSpan) or last.token_ids[-1] != token_id:
            self.special(token_id, isinstance(last, TextSpan) and last.loss)
        elif np.array_equal(last.token_ids[-2:], (token_id, token_id)):
            self.spans[-1] = last.cut(0, last.num_tokens - 1, leads=last.leads)

    def end_answer(self, token_id: int) -> None:
        """Put the end token after the last token with loss; one that is there without loss gets it."""
        at = max(at for at, span in enumerate(self.spans) if isinstance(span, TextSpan) and span.loss) + 1
        after = self.spans[at] if at < len(self.spans) else None
        rest: list[Span] = []
        if isinstance(after, TextSpan) and after.first_id == token_id:
            rest = [after.cut(1, after.num_tokens, leads=False)] if after.num_tokens > 1 else []
            del self.spans[at]
        self.spans[at:at] = [TextSpan(np.array([token_id], np.int32), True), *rest]


def expansion_of(recipe: Recipe, modality: str, size: PartSize) -> tuple[tuple[str | int, ...], bool]:
    """Return what stands for a part, and whether it is only its tokens, between `start_id` and `end_id`."""
    pieces = recipe.modalities[modality].expand(size)
    if pieces is None:
        return (size.tokens,), True
    tokens = sum(piece for piece in pieces if isinstance(piece, int))
    if tokens != size.tokens or (0 in pieces and size.tokens):
        raise FieldError(modality, f"expand() of {modality} gives {tokens} tokens, its part has {size.tokens}")
    return pieces, False


def spans_in_stretches(segments: Iterable[Placed], recipe: Recipe, where: str, size_of: SizeOf) -> list[Span]:
    """Return the spans of text and media in order: neighbouring text of equal loss is joined before it is tokenized."""
    pre, spans, carries_loss = recipe.text, Spans(), False
    texts: list[str] = []

    def write(text: str, loss: bool) -> None:
        nonlocal carries_loss
        if text and loss != carries_loss:
            tokenize()
            carries_loss = loss
        texts.append(text)

    def tokenize() -> None:
        text = "".join(texts)
        texts.clear()
        try:
            spans.ids(pre.encode(text), carries_loss) if text else None
        except DecodeError as error:
            raise error.at(where) from error.__cause__

    spans.special(pre.bos_token_id)
    for segment in segments:
        if isinstance(segment, TextSegment):
            write(*segment)
            continue
        modality, member = segment
        slot, first = recipe.slots[modality], 0
        pieces, is_bare = expansion_of(recipe, modality, size_of(modality, member))
        if is_bare:
            tokenize()
            spans.special(slot.start_id)
        for piece in pieces:
            if isinstance(piece, int):
                tokenize()
                spans.slot(MediaSlot(modality, member, first, piece))
                first += piece
            else:
                write(piece, False)
        if is_bare:
            tokenize()
            spans.special(slot.end_id)
    tokenize()
    spans.end(pre.eos_token_id)
    return spans.spans


class Window(NamedTuple):
    """A piece of a sample without media, to be tokenized without the rest of the text. `start`, `stop`: characters
    where its tokens and those of the next piece begin; None for the last piece. `skipped` tokens of its first character
    belong to the previous piece: a character may be several tokens.
    """

    start: int
    stop: int | None
    skipped: int
    tokens: int


_CONTEXT: Final = 256
"""Characters that are tokenized on both sides of a piece, so that its own tokens come out as in the whole text."""


class _Run(NamedTuple):
    """A run of a part's tokens."""

    start: int  # of its mark in the text
    end: int
    slot: MediaSlot
    opens: int | None  # tokens around it
    closes: int | None


class WholeWriter:
    """Tokenizes all text of a sample in one call. `plain` text is no chat: then special tokens carry loss as their
    neighbours do. `closed` text has its own start and end, without the recipe's `bos_token_id` and `eos_token_id`.
    """

    def __init__(
        self,
        segments: Iterable[Placed],
        recipe: Recipe,
        where: str,
        size_of: SizeOf,
        adds_special_tokens: Callable[[str], bool],
        *,
        plain: bool,
        closed: bool = False,
    ) -> None:
        self._recipe = recipe
        self._where = where
        self._adds_special_tokens = adds_special_tokens
        self._plain = plain
        self._closed = closed
        self._trained: list[list[int]] = []  # ranges of characters, ascending and disjoint
        self._runs: list[_Run] = []
        self._without_tokens: list[MediaSlot] = []  # parts that have no tokens
        written: list[str] = []
        at = 0
        for segment in segments:
            if isinstance(segment, TextSegment):
                written.append(segment.text)
                start, at = at, at + len(segment.text)
                if segment.loss and segment.text:
                    if self._trained and self._trained[-1][1] == start:
                        self._trained[-1][1] = at
                    else:
                        self._trained.append([start, at])
                continue
            # Each run of a part's tokens is one mark in the text.
            modality, member = segment
            slot, first = recipe.slots[modality], 0
            pieces, is_bare = expansion_of(recipe, modality, size_of(modality, member))
            around = (slot.start_id, slot.end_id) if is_bare else (None, None)
            for piece in pieces:
                if piece == 0:
                    self._without_tokens.append(MediaSlot(modality, member, 0, 0))
                    continue
                if isinstance(piece, int) and modality not in recipe.mark_tokens:
                    raise FieldError(
                        where,
                        f"the mark of {modality}, {slot.mark!r}, is not the one token {slot.token_id} of the "
                        "tokenizer: give its slot the text and the id of an added token",
                    )
                text = piece if isinstance(piece, str) else slot.mark or ""
                written.append(text)
                start, at = at, at + len(text)
                if isinstance(piece, int):
                    self._runs.append(_Run(start, at, MediaSlot(modality, member, first, piece), *around))
                    first += piece
        self._text = "".join(written)

    def close(self) -> list[Span]:
        wanted = self.wanted()
        return self.close_with(None if wanted is None else self._recipe.text.encode_all([wanted])[0])

    @property
    def is_trained_text(self) -> bool:
        """Whether this is text alone of which each token carries loss: then counting needs no offsets."""
        has_parts = self._runs or self._without_tokens
        return self._plain and not has_parts and self._trained == [[0, len(self._text)]]

    def close_counted(self, num_tokens: int) -> list[TextRun]:
        """Return the runs of a trained text with so many tokens."""
        pre = self._recipe.text
        runs: list[TextRun] = []
        if pre.bos_token_id is not None:
            runs.append(TextRun(1, False, True, pre.bos_token_id))
        if num_tokens:
            runs.append(TextRun(num_tokens, True, not runs, -1))
        if pre.eos_token_id is not None:
            runs.append(TextRun(1, num_tokens > 0, not runs, pre.eos_token_id))
        return runs

    def wanted(self) -> tuple[str, bool] | None:
        """Return the text to tokenize, and whether it gets special tokens; None if there is nothing to tokenize."""
        has_any = self._text or self._without_tokens
        return (self._text, self._adds_special_tokens(self._text)) if has_any else None

    def close_with(self, encoded: Encoded | DecodeError | None) -> list[Span]:
        """Return the spans, with the tokens of `wanted`. Raises FieldError."""
        if isinstance(encoded, DecodeError):
            raise encoded.at(self._where) from encoded.__cause__
        pre, spans = self._recipe.text, Spans()
        for slot in self._without_tokens:
            spans.slot(slot)
        spans.special(None if self._closed else pre.bos_token_id)
        if encoded is not None:
            self._fill(spans, encoded, self._loss(encoded))
        if not self._closed:
            spans.end(pre.eos_token_id)
        elif pre.eos_token_id is not None and self._trained:
            start, stop = self._trained[-1]
            if not pre.is_ended(self._text[start:stop]):
                spans.end_answer(pre.eos_token_id)  # no token after it carries loss
        return spans.spans

    def window(self, window: Window) -> list[Span]:
        """Return the spans of a piece, tokenized from its own text with some context. They are those of `close`, unless
        the tokenizer depends on more context, which the caller must check.
        """
        pre, spans, text = self._recipe.text, Spans(), self._text
        first, last = window.start == 0, window.stop is None
        around = (
            0 if self._closed else (first and pre.bos_token_id is not None) + (last and pre.eos_token_id is not None)
        )
        begin = max(0, window.start - _CONTEXT)
        near = text[begin : None if window.stop is None else window.stop + _CONTEXT]
        (encoded,) = pre.encode_all([(near, self._adds_special_tokens(text))])
        if isinstance(encoded, DecodeError):
            raise encoded.at(self._where) from encoded.__cause__
        encoded = Encoded(encoded.ids, encoded.starts + begin, encoded.ends + begin)
        loss = self._loss(encoded)
        low = 0 if first else int(np.argmax(np.append(encoded.starts >= window.start, True))) + window.skipped
        mine = slice(low, low + window.tokens - around)
        spans.special(None if self._closed or not first else pre.bos_token_id)
        self._fill(spans, Encoded(encoded.ids[mine], encoded.starts[mine], encoded.ends[mine]), loss[mine])
        spans.end(None if self._closed or not last else pre.eos_token_id)
        return spans.spans

    def _fill(self, spans: Spans, encoded: Encoded, loss: NDArray[np.bool_]) -> None:
        ids = encoded.ids
        at_runs = self._tokens_of_runs(encoded)
        for number, cut in enumerate([*at_runs, len(ids)]):
            start = at_runs[number - 1] + 1 if number else 0
            changes = np.flatnonzero(loss[start + 1 : cut] != loss[start : cut - 1]) + start + 1 if cut > start else ()
            for begin, end in zip([start, *changes], [*changes, cut], strict=True):
                spans.ids(ids[begin:end], bool(begin < len(loss) and loss[begin]), encoded.starts[begin:end])
            if number < len(self._runs):
                run = self._runs[number]
                spans.special(run.opens)
                spans.slot(run.slot)
                spans.special(run.closes)

    def _loss(self, encoded: Encoded) -> NDArray[np.bool_]:
        """Return whether each token carries loss."""
        starts, ends = encoded.starts, encoded.ends
        if not self._trained:
            return np.zeros(len(starts), np.bool_)
        begins, stops = self._stretches
        span = np.searchsorted(stops, starts, side="right")  # the first that ends after the token's start
        mask: NDArray[np.bool_] = begins[span] < ends
        if self._plain:
            said = np.flatnonzero(ends > starts)
            for token in np.flatnonzero(starts == ends).tolist():
                neighbour = said[:1] if token == 0 else np.array([token - 1])
                mask[token] = bool(neighbour.size and mask[neighbour[0]])
        return mask

    @cached_property
    def _stretches(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts of the ranges with loss, and a position after the text; stops of these ranges."""
        trained = np.array(self._trained, np.int64)
        return np.append(trained[:, 0], len(self._text) + 1), trained[:, 1].copy()

    def _tokens_of_runs(self, encoded: Encoded) -> list[int]:
        """Return the index of the token of each run. Raises FieldError if the text contains such a token itself."""
        tokens = self._recipe.mark_tokens
        indices: list[int] = np.flatnonzero(np.isin(encoded.ids, list(tokens.values()))).tolist()
        runs = iter(self._runs)
        for index in indices:
            run = next(runs, None)
            if run is None or not (encoded.starts[index] < run.end and run.start < encoded.ends[index]):
                name = next(name for name, token in tokens.items() if token == encoded.ids[index])
                raise FieldError(self._where, holds_mark(name, self._recipe.slots[name].mark))
        if len(indices) != len(self._runs):
            raise FieldError(self._where, f"{len(self._runs)} marks of media became {len(indices)} tokens")
        return indices


_MOST_SHARED: Final = 16
"""A piece that begins inside a character with this number of tokens is not tokenized alone."""


AnySpan = TypeVar("AnySpan", TextSpan | MediaSlot, TextRun | MediaSlot)


def divided(spans: list[AnySpan], recipe: Recipe) -> list[list[AnySpan]]:
    """Return the spans of each row of a sample: all spans in one row, the rest of a truncated sample, or its pieces.
    Every piece but the last has `max_tokens` tokens. The first token of each leads, like that of a sample. Raises
    FieldError if the sample has more tokens than `max_tokens`, and may not be cut, or not at this token.
    """
    limit, overflow = recipe.text.max_tokens, recipe.text.overflow
    if limit is None or (tokens := num_tokens(spans)) <= limit:
        return [spans]
    above = f"the sample has {tokens} LLM tokens, above TextPreprocessor.max_tokens={limit}"
    if overflow == "truncate":
        return [_truncated(spans, limit, above, recipe)]
    if overflow == "split" and not any(isinstance(span, MediaSlot) for span in spans):
        return _pieces(spans, limit)
    raise FieldError(
        "*",
        f"{above}: raise it, or cut such samples by overflow='truncate' (their first tokens are kept) or "
        "overflow='split' (text in pieces; it divides text alone, not samples with media)",
    )


def packed(window: Window, *, alone: bool) -> int:
    """Encode the start of a window as one number, negative if its piece cannot be tokenized alone; see `unpacked`."""
    begin = window.start * _MOST_SHARED + window.skipped
    return begin if alone and window.skipped < _MOST_SHARED else -1 - begin


def unpacked(number: int) -> tuple[int, int]:
    """Return `Window.start` and `Window.skipped`."""
    return divmod(number if number >= 0 else -1 - number, _MOST_SHARED)


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
            after = spans[number + 1] if number + 1 < len(spans) else None
            closing = recipe.slots[span.modality].end_id
            is_closed = closing is not None and isinstance(after, TextSpan | TextRun) and after.first_id == closing
            if span.tokens and at + is_closed > limit:
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


def _has_loss(spans: Sequence[AnySpan]) -> bool:
    return any(not isinstance(span, MediaSlot) and span.num_loss_tokens for span in spans)
