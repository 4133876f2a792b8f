"""What a sample's sequence is made of, and how text and places become it.

Text is tokenized in stretches of equal loss between media, so that the loss mask is exact whatever the tokenizer
merges. A fast tokenizer gets all of it at once, as Hugging Face's processors do it: each run of a part's tokens is
written as one mark, and a token carries loss where its characters meet text that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.text.fast_tokenizer import Encoded
from orchdata.loaders.text.media_words import holds_mark
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER
from orchdata.loaders.text.template import TextSegment


class TextSpan(NamedTuple):
    """Token ids int32 (num_tokens,), at least one, and whether they carry loss.

    The first token of a sample never does: nothing before it predicts it. `leads` says that this span has it.

    Attributes:
        starts: where each token begins in the text that was tokenized at once, in characters, int64 (num_tokens,); None
            where that is not known.
    """

    token_ids: NDArray[np.int32]
    loss: bool
    leads: bool = False
    starts: NDArray[np.int64] | None = None

    @property
    def num_loss_tokens(self) -> int:
        return len(self.token_ids) - self.leads if self.loss else 0

    def loss_mask(self) -> NDArray[np.bool_]:
        """Which tokens carry loss, bool (num_tokens,)."""
        mask = np.full(len(self.token_ids), self.loss)
        mask[: self.leads] = False
        return mask


class MediaSlot(NamedTuple):
    """The place of a part, or of a piece of it where text goes between its tokens.

    Attributes:
        modality: its name.
        member: its index in the sample's members.
        first: of its tokens, the first that stands here; a part's first piece has 0.
        tokens: how many stand here.
    """

    modality: str
    member: int
    first: int
    tokens: int


Span = TextSpan | MediaSlot

SizeOf = Callable[[str, int], PartSize]
"""The size of a part, by its modality and its index in the sample's members."""


class SizesInTurn:
    """Sizes of a sample's parts as the index has them, given out in the order of their slots: a `SizeOf`.

    Attributes:
        by_member: those given out so far.
    """

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
        """Raise FieldError where the text asked for fewer parts."""
        if next(self._left, None) is not None:
            raise self._differs("fewer")

    def _differs(self, how: str) -> FieldError:
        reason = f"the index says {self._count} parts of media, the text yields {how}: {WHY_COUNTS_DIFFER}"
        return FieldError("*", reason)


class SpanWriter(Protocol):
    """Takes a sample's text and media in order, and gives its spans."""

    def text(self, segment: TextSegment) -> None: ...
    def media(self, modality: str, member: int) -> None: ...
    def close(self) -> list[Span]: ...


class _Spans:
    """Spans so far; the first token among them is marked."""

    def __init__(self) -> None:
        self.found: list[Span] = []
        self._leads = True

    def ids(self, token_ids: NDArray[np.int32], loss: bool, starts: NDArray[np.int64] | None = None) -> None:
        if len(token_ids):
            self.found.append(TextSpan(token_ids, loss, self._leads, starts))
            self._leads = False

    def special(self, token_id: int | None, loss: bool = False) -> None:
        if token_id is not None:
            self.ids(np.array([token_id], np.int32), loss)

    def slot(self, slot: MediaSlot) -> None:
        self.found.append(slot)
        self._leads = self._leads and slot.tokens == 0

    def ends_with_loss(self) -> bool:
        last = self.found[-1] if self.found else None
        return isinstance(last, TextSpan) and last.loss


class StretchWriter:
    """Joins neighbouring text of equal loss before tokenizing it."""

    def __init__(self, recipe: Recipe, where: str, size_of: SizeOf) -> None:
        self._recipe = recipe
        self._size_of = size_of
        self._pre = recipe.text
        self._where = where
        self._spans = _Spans()
        self._pending: list[str] = []
        self._loss = False
        self._spans.special(self._pre.bos_token_id)

    def text(self, segment: TextSegment) -> None:
        if not segment.text:
            return
        if segment.loss != self._loss:
            self._flush()
            self._loss = segment.loss
        self._pending.append(segment.text)

    def media(self, modality: str, member: int) -> None:
        self._flush()
        slot = self._recipe.slots[modality]
        pieces = _expansion(self._recipe, modality, self._size_of(modality, member))
        self._spans.special(slot.start_id if pieces.bare else None)
        first = 0
        for piece in pieces.pieces:
            if isinstance(piece, str):
                self.text(TextSegment(piece, False))
            else:
                self._flush()
                self._spans.slot(MediaSlot(modality, member, first, piece))
                first += piece
        self._flush()
        self._spans.special(slot.end_id if pieces.bare else None)

    def close(self) -> list[Span]:
        self._flush()
        self._spans.special(self._pre.eos_token_id, self._spans.ends_with_loss())
        return self._spans.found

    def _flush(self) -> None:
        if not self._pending:
            return
        text = "".join(self._pending)
        self._pending.clear()
        try:
            token_ids = self._pre.encode(text)
        except DecodeError as error:
            raise error.at(self._where) from error.__cause__
        self._spans.ids(token_ids, self._loss)


class Window(NamedTuple):
    """A piece of a sample without media, to be tokenized without the rest of the text.

    Attributes:
        start, stop: characters where its tokens begin, and where those of the next piece do; None for the last.
        skipped: tokens of its first character that the piece before has: a character may be several.
        tokens: how many it has.
    """

    start: int
    stop: int | None
    skipped: int
    tokens: int


_BESIDE_WINDOW: Final = 256
"""Characters that are tokenized on both sides of a piece, so that its own fall out as in the whole text."""


class _Run(NamedTuple):
    """A run of a part's tokens: where its mark stands in the text, and what goes around it."""

    start: int
    end: int
    slot: MediaSlot
    opens: int | None
    closes: int | None


class WholeWriter:
    """Tokenizes all text at once.

    Args:
        adds_special_tokens: whether the tokenizer's special tokens go around a text.
        plain: whether it is no chat: then special tokens carry loss as what stands beside them does.
        closed: whether it begins and ends by itself, without the recipe's `bos_token_id` and `eos_token_id`.
    """

    def __init__(
        self,
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
        self._size_of = size_of
        self._adds_special_tokens = adds_special_tokens
        self._plain = plain
        self._closed = closed
        self._pieces: list[str] = []  # of the text, which are joined when it is first asked for
        self._length = 0
        self._trained: list[list[int]] = []  # stretches of characters, ascending and apart
        self._runs: list[_Run] = []
        self._beside: list[MediaSlot] = []  # parts that have no tokens

    def text(self, segment: TextSegment) -> None:
        start = self._write(segment.text)
        if segment.loss and segment.text:
            if self._trained and self._trained[-1][1] == start:
                self._trained[-1][1] = self._length
            else:
                self._trained.append([start, self._length])

    def media(self, modality: str, member: int) -> None:
        slot = self._recipe.slots[modality]
        pieces = _expansion(self._recipe, modality, self._size_of(modality, member))
        opens, closes = (slot.start_id, slot.end_id) if pieces.bare else (None, None)
        first = 0
        for piece in pieces.pieces:
            if isinstance(piece, str):
                self._write(piece)
            elif piece == 0:
                self._beside.append(MediaSlot(modality, member, 0, 0))
            elif modality not in self._recipe.mark_tokens:
                raise FieldError(
                    self._where,
                    f"the mark of {modality}, {slot.mark!r}, is not the one token {slot.token_id} of the tokenizer: "
                    "give its slot the text and the id of an added token",
                )
            else:
                start = self._write(slot.mark or "")
                self._runs.append(_Run(start, self._length, MediaSlot(modality, member, first, piece), opens, closes))
                first += piece

    def close(self) -> list[Span]:
        pre, spans = self._recipe.text, _Spans()
        for slot in self._beside:
            spans.slot(slot)
        spans.special(None if self._closed else pre.bos_token_id)
        text = self._text()
        if text or self._beside:
            added = self._adds_special_tokens(text)
            try:
                encoded = pre.encode_whole(text, add_special_tokens=added)
            except DecodeError as error:
                raise error.at(self._where) from error.__cause__
            self._fill(spans, encoded, self._loss(encoded))
        spans.special(None if self._closed else pre.eos_token_id, spans.ends_with_loss())
        return spans.found

    def window(self, window: Window) -> list[Span]:
        """The spans of a piece, by its own text and a little beside it: those of `close`, unless the tokenizer looks
        further, which is for the caller to find out.
        """
        pre, spans, text = self._recipe.text, _Spans(), self._text()
        first, last = window.start == 0, window.stop is None
        around = (
            0 if self._closed else (first and pre.bos_token_id is not None) + (last and pre.eos_token_id is not None)
        )
        begin = max(0, window.start - _BESIDE_WINDOW)
        near = text[begin : None if window.stop is None else window.stop + _BESIDE_WINDOW]
        try:
            encoded = pre.encode_whole(near, add_special_tokens=self._adds_special_tokens(text))
        except DecodeError as error:
            raise error.at(self._where) from error.__cause__
        encoded = Encoded(encoded.ids, encoded.starts + begin, encoded.ends + begin)
        loss = self._loss(encoded)
        low = 0 if first else int(np.argmax(np.append(encoded.starts >= window.start, True))) + window.skipped
        mine = slice(low, low + window.tokens - around)
        spans.special(None if self._closed or not first else pre.bos_token_id)
        self._fill(spans, Encoded(encoded.ids[mine], encoded.starts[mine], encoded.ends[mine]), loss[mine])
        spans.special(None if self._closed or not last else pre.eos_token_id, spans.ends_with_loss())
        return spans.found

    def _text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _write(self, text: str) -> int:
        start = self._length
        self._pieces.append(text)
        self._length += len(text)
        return start

    def _fill(self, spans: _Spans, encoded: Encoded, loss: NDArray[np.bool_]) -> None:
        ids = encoded.ids
        places = self._places(encoded)
        for number, cut in enumerate([*places, len(ids)]):
            start = places[number - 1] + 1 if number else 0
            changes = np.flatnonzero(loss[start + 1 : cut] != loss[start : cut - 1]) + start + 1 if cut > start else ()
            for begin, end in zip([start, *changes], [*changes, cut], strict=True):
                spans.ids(ids[begin:end], bool(begin < len(loss) and loss[begin]), encoded.starts[begin:end])
            if number < len(self._runs):
                run = self._runs[number]
                spans.special(run.opens)
                spans.slot(run.slot)
                spans.special(run.closes)

    def _loss(self, encoded: Encoded) -> NDArray[np.bool_]:
        """Which tokens carry loss."""
        starts, ends = encoded.starts, encoded.ends
        if not self._trained:
            return np.zeros(len(starts), np.bool_)
        begins, stops = self._stretches
        span = np.searchsorted(stops, starts, side="right")  # the first that ends behind the token's start
        found: NDArray[np.bool_] = begins[span] < ends
        if self._plain:
            said = np.flatnonzero(ends > starts)
            for token in np.flatnonzero(starts == ends).tolist():
                beside = said[:1] if token == 0 else np.array([token - 1])
                found[token] = bool(beside.size and found[beside[0]])
        return found

    @cached_property
    def _stretches(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where those that carry loss begin, and a place behind the text; where they stop. Once all text is there."""
        trained = np.array(self._trained, np.int64)
        return np.append(trained[:, 0], self._length + 1), trained[:, 1].copy()

    def _places(self, encoded: Encoded) -> list[int]:
        """The token of each run. Raises FieldError where the text holds such a token too."""
        tokens = self._recipe.mark_tokens
        places: list[int] = np.flatnonzero(np.isin(encoded.ids, list(tokens.values()))).tolist()
        runs = iter(self._runs)
        for place in places:
            run = next(runs, None)
            if run is None or not (encoded.starts[place] < run.end and run.start < encoded.ends[place]):
                name = next(name for name, token in tokens.items() if token == encoded.ids[place])
                raise FieldError(self._where, holds_mark(name, self._recipe.slots[name].mark))
        if len(places) != len(self._runs):
            raise FieldError(self._where, f"{len(self._runs)} marks of media became {len(places)} tokens")
        return places


class _Expansion(NamedTuple):
    """What stands for a part; `bare` where it is its tokens alone, between `start_id` and `end_id`."""

    pieces: tuple[str | int, ...]
    bare: bool


def _expansion(recipe: Recipe, modality: str, size: PartSize) -> _Expansion:
    pieces = recipe.modalities[modality].expand(size)
    if pieces is None:
        return _Expansion((size.tokens,), True)
    found = sum(piece for piece in pieces if isinstance(piece, int))
    if found != size.tokens or (0 in pieces and size.tokens):
        raise FieldError(modality, f"expand() of {modality} gives {found} tokens, its part has {size.tokens}")
    return _Expansion(pieces, False)
