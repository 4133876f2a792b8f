"""The spans of a sample's sequence, and how text and media become spans.

Text is tokenized in stretches of equal loss between media, so the loss mask is exact for every tokenizer. A fast
tokenizer gets all text in one call: `whole_text`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER
from orchdata.loaders.text.template import TextSegment


class TextSpan(NamedTuple):
    """Token ids int32 (num_tokens,), at least one, and whether they carry loss.

    The first token of a sample carries no loss: nothing before it predicts it. `leads`: this span contains it.

    Attributes:
        starts: start of each token in the text that was tokenized in one call, in characters, int64 (num_tokens,); None
            if unknown.
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
    """The slot of a part, or of a piece of it if there is text between its tokens.

    Attributes:
        modality: its name.
        member: its index in the sample's members.
        first: number of its first token here; a part's first piece has 0.
        tokens: number of its tokens here.
    """

    modality: str
    member: int
    first: int
    tokens: int


Span = TextSpan | MediaSlot


class TextRun(NamedTuple):
    """What counting needs of neighbouring text spans of equal loss; see `TextSpan`.

    Attributes:
        first_id: of its first token.
    """

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
    """Sizes of a sample's parts from the index, returned in the order of their slots: a `SizeOf`.

    Attributes:
        by_member: sizes that were returned so far.
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
        """Raise FieldError if the text has fewer parts."""
        if next(self._left, None) is not None:
            raise self._differs("fewer")

    def _differs(self, how: str) -> FieldError:
        reason = f"the index says {self._count} parts of media, the text yields {how}: {WHY_COUNTS_DIFFER}"
        return FieldError("*", reason)


class SpanWriter(Protocol):
    """Takes a sample's text and media in order, and returns its spans."""

    def text(self, segment: TextSegment) -> None: ...
    def media(self, modality: str, member: int) -> None: ...
    def close(self) -> list[Span]: ...


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


class StretchWriter:
    """Joins neighbouring text of equal loss before tokenizing it."""

    def __init__(self, recipe: Recipe, where: str, size_of: SizeOf) -> None:
        self._recipe = recipe
        self._size_of = size_of
        self._pre = recipe.text
        self._where = where
        self._spans = Spans()
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
        pieces = expansion_of(self._recipe, modality, self._size_of(modality, member))
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
        self._spans.end(self._pre.eos_token_id)
        return self._spans.spans

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


class Expansion(NamedTuple):
    """What stands for a part; `bare` if it is only its tokens, between `start_id` and `end_id`."""

    pieces: tuple[str | int, ...]
    bare: bool


def expansion_of(recipe: Recipe, modality: str, size: PartSize) -> Expansion:
    pieces = recipe.modalities[modality].expand(size)
    if pieces is None:
        return Expansion((size.tokens,), True)
    tokens = sum(piece for piece in pieces if isinstance(piece, int))
    if tokens != size.tokens or (0 in pieces and size.tokens):
        raise FieldError(modality, f"expand() of {modality} gives {tokens} tokens, its part has {size.tokens}")
    return Expansion(pieces, False)
