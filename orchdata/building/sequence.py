"""One sample's merged LLM sequence, written left to right into its slices of a microbatch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.batch.tensors import IGNORE
from orchdata.loaders.errors import FieldError
from orchdata.loaders.samples.compose import TextSpan
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER


class SequenceArrays(NamedTuple):
    """The sequences of a microbatch, one after another.

    Attributes:
        input_ids, labels: int64 (T,).
        position_ids: int64 (1, T), restarting at each sample; under "mrope" (4, T), also time, height, width.
        text_ids: int64 (num_text_tokens,), tokens of text alone.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    text_ids: NDArray[np.int64]

    def blank(self, start: int, stop: int, first: int = 0, first_mrope: int = 0) -> None:
        """Write padding or a dummy sequence: id 0, no loss, positions that count from `first` and `first_mrope`."""
        self.input_ids[start:stop] = 0
        self.labels[start:stop] = IGNORE
        self.position_ids[0, start:stop] = np.arange(first, first + stop - start)
        self.position_ids[1:, start:stop] = np.arange(first_mrope, first_mrope + stop - start)


class SequenceWriter:
    """Writes one sample.

    Args:
        arrays: of the microbatch.
        bounds: start and end of its sequence, and the end of its padding.
        text_bounds: start and end of its text in `text_ids`.
        text_field: the field in errors.
    """

    def __init__(
        self, arrays: SequenceArrays, bounds: tuple[int, int, int], text_bounds: tuple[int, int], text_field: str
    ) -> None:
        self._arrays = arrays
        self._text_field = text_field
        self._start, self._end, self._padded_end = bounds
        self._cursor = self._start
        self._text_cursor, self._text_end = text_bounds
        self._position = 0  # under "mrope", of time, height and width
        arrays.position_ids[0, self._start : self._end] = np.arange(self._end - self._start)

    def text(self, span: TextSpan) -> None:
        """Write a text span. Raises FieldError if the index has another number of tokens."""
        ids, arrays = span.token_ids, self._arrays
        start, stop = self._advance(len(ids))
        arrays.input_ids[start:stop] = ids
        arrays.labels[start:stop] = ids if span.loss else IGNORE
        if span.leads:
            arrays.labels[start] = IGNORE
        self._count_on(start, stop)
        text_stop = self._text_cursor + len(ids)
        if text_stop > self._text_end:
            raise FieldError(self._text_field, self._disagreement())
        arrays.text_ids[self._text_cursor : text_stop] = ids
        self._text_cursor = text_stop

    def media(self, token_id: int, tokens: int, rope: NDArray[np.int64] | None, rope_span: int | None = None) -> int:
        """Write the placeholder tokens of one part. Return the position of the first. Raises FieldError.

        Args:
            rope: under "mrope", positions of its tokens from 0, (3, tokens); None continues to count.
            rope_span: positions from its first token to what follows it; None for one more than the largest.
        """
        start, stop = self._advance(tokens)
        arrays = self._arrays
        arrays.input_ids[start:stop] = token_id
        arrays.labels[start:stop] = IGNORE
        if rope is None:
            self._count_on(start, stop)
        else:
            arrays.position_ids[1:, start:stop] = self._position + rope
            self._position += int(rope.max()) + 1 if rope_span is None else rope_span
        return start

    def close(self, loss_tokens: int) -> None:
        """Write the padding. Raises FieldError if the index has another number of tokens or loss tokens."""
        if self._cursor != self._end:
            raise FieldError(self._text_field, self._disagreement())
        written = int(np.count_nonzero(self._arrays.labels[self._start : self._end] != IGNORE))
        if written != loss_tokens:
            raise FieldError(
                self._text_field,
                f"the index says {loss_tokens} loss tokens, the text yields {written}: {WHY_COUNTS_DIFFER}",
            )
        if self._padded_end > self._end:
            self._arrays.blank(self._end, self._padded_end, self._end - self._start, self._position)

    def _count_on(self, start: int, stop: int) -> None:
        positions, first = self._arrays.position_ids, self._position
        if len(positions) > 1:
            positions[1:, start:stop] = np.arange(first, first + stop - start)
        self._position += stop - start

    def _advance(self, tokens: int) -> tuple[int, int]:
        start = self._cursor
        self._cursor += tokens
        if self._cursor > self._end:
            raise FieldError(self._text_field, self._disagreement())
        return start, self._cursor

    def _disagreement(self) -> str:
        return f"the index says {self._end - self._start} tokens, the text yields another number: {WHY_COUNTS_DIFFER}"
