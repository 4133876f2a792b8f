"""The memory of a packed microbatch: where every sample and part lies in it.

The index gives every size before anything is read, so memory is laid out first; each sample then has its own slice
of every tensor, and threads fill them without meeting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch import AudioBatch, Batch, ImageBatch, Key, LLMBatch, TextBatch
from orchdata.buffers import BufferPool
from orchdata.layout import Packed
from orchdata.loaders.audio import decode_audio
from orchdata.loaders.decode_error import DecodeError
from orchdata.loaders.errors import FieldError
from orchdata.loaders.images import decode_image
from orchdata.loaders.index import Index
from orchdata.loaders.modality import AUDIO, IMAGE
from orchdata.loaders.preprocessors import STORED
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples import MediaSlot, as_tensor, compose, text_members
from orchdata.plan import Plan
from orchdata.stored import StoredSample

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class PageSource:
    """What pages are laid out from.

    Attributes:
        encoders: modalities every batch has, if need be as a dummy.
    """

    index: Index
    recipe: Recipe
    layout: Packed
    encoders: tuple[str, ...]
    pool: BufferPool


class Pages:
    """The memory of one microbatch: where every sample and part lies in it."""

    def __init__(self, source: PageSource, rows: NDArray[np.int64]) -> None:
        index, layout = source.index, source.layout
        self.source = source
        self.rows = rows
        self.keys: tuple[Key, ...] = tuple((index.shards[index.shard[row]].url, index.key(int(row))) for row in rows)
        self.lengths = index.llm_tokens[rows].astype(np.int64)
        padded = -(-self.lengths // layout.multiple_of) * layout.multiple_of
        if not len(rows) and layout.empty == "dummy":
            padded = np.array([layout.multiple_of])
        self.starts = _starts(padded)
        self.media = {
            name: MediaPages(source, rows, name, code)
            for name, code in (("image", IMAGE), ("audio", AUDIO))
            if name in source.encoders
        }
        text_lengths = self.lengths - sum(media.sample_tokens() for media in self.media.values())
        self.text_starts = _starts(text_lengths)
        total = int(self.starts[-1])
        self.input_ids = source.pool.empty((total,), np.int64)
        self.labels = source.pool.empty((total,), np.int64)
        self.position_ids = source.pool.empty((3, total), np.int64)
        self.text_ids = source.pool.empty((int(self.text_starts[-1]),), np.int64)
        if not len(rows):
            self._blank(0, total)

    def fill(self, place: int, sample: StoredSample, payloads: Mapping[int, bytes | memoryview]) -> None:
        """Write one sample into its slices. Raises FieldError."""
        recipe = self.source.recipe
        texts = {member: payloads[member] for member in text_members(sample.members, recipe)}
        spans = compose(sample.members, texts, recipe)
        source = sample.members[next(iter(texts))].field if texts else "*"
        writer = SequenceWriter(self, place, source)
        slot = 0
        for span in spans:
            if isinstance(span, MediaSlot):
                name = "image" if span.modality == IMAGE else "audio"
                token_id = recipe.text.image_token_id if span.modality == IMAGE else recipe.text.audio_token_id
                media = self.media[name]
                part = sample.parts[slot]
                slot += 1
                writer.media(media, part, token_id)
                media.decode(part, payloads[span.member], sample.members[span.member].field)
            else:
                writer.text(np.asarray(span.token_ids, np.int64), span.loss)
        writer.close(int(self.source.index.loss_tokens[sample.row]))

    def batch(self, plan: Plan, microbatch: int) -> Batch:
        mrope = self.source.layout.positions == "mrope"
        image, audio = self.media.get("image"), self.media.get("audio")
        where = {f"{name}_positions": torch.from_numpy(media.where) for name, media in self.media.items()}
        return Batch(
            text=TextBatch(input_ids=torch.from_numpy(self.text_ids), cu_seqlens=_cu_seqlens(self.text_starts)),
            image=None if image is None else image.image(),
            audio=None if audio is None else audio.audio(),
            llm=LLMBatch(
                input_ids=torch.from_numpy(self.input_ids),
                position_ids=torch.from_numpy(self.position_ids if mrope else self.position_ids[0]),
                labels=torch.from_numpy(self.labels),
                cu_seqlens=_cu_seqlens(self.starts),
                max_seqlen=int(np.diff(self.starts).max(initial=0)),
                **where,
            ),
            keys=self.keys,
            plan=plan,
            step=plan.step,
            microbatch=microbatch,
            num_microbatches=plan.num_microbatches,
            dp_size=plan.num_ranks,
            loss_tokens=int((self.labels != IGNORE).sum()),
            global_loss_tokens=plan.loss_tokens,
        )

    def _blank(self, start: int, stop: int, first_position: int = 0) -> None:
        """Tokens without meaning: padding, or a dummy sequence."""
        self.input_ids[start:stop] = 0
        self.labels[start:stop] = IGNORE
        self.position_ids[:, start:stop] = np.arange(first_position, first_position + stop - start)


class SequenceWriter:
    """Writes one sample's merged LLM sequence, left to right."""

    def __init__(self, pages: Pages, place: int, text_field: str) -> None:
        self._pages = pages
        self._text_field = text_field
        self._start = self._cursor = int(pages.starts[place])
        self._end = self._start + int(pages.lengths[place])
        self._padded_end = int(pages.starts[place + 1])
        self._text_cursor = int(pages.text_starts[place])
        self._text_end = int(pages.text_starts[place + 1])
        self._position = 0

    def text(self, token_ids: NDArray[np.int64], loss: bool) -> None:
        stop = self._advance(len(token_ids))
        pages, span = self._pages, slice(stop - len(token_ids), stop)
        pages.input_ids[span] = token_ids
        pages.labels[span] = token_ids if loss else IGNORE
        pages.position_ids[:, span] = np.arange(self._position, self._position + len(token_ids))
        self._position += len(token_ids)
        text_stop = self._text_cursor + len(token_ids)
        if text_stop > self._text_end:
            raise FieldError(self._text_field, self._disagreement())
        pages.text_ids[self._text_cursor : text_stop] = token_ids
        self._text_cursor = text_stop

    def media(self, media: MediaPages, part: int, token_id: int) -> None:
        tokens = media.num_tokens(part)
        stop = self._advance(tokens)
        start, pages = stop - tokens, self._pages
        pages.input_ids[start:stop] = token_id
        pages.labels[start:stop] = IGNORE
        media.where[media.token_slice(part)] = np.arange(start, stop)
        positions = pages.position_ids[:, start:stop]
        if pages.source.layout.positions == "mrope" and media.name == "image":
            height, width = media.merged_grid(part)
            positions[0] = self._position
            positions[1] = self._position + np.repeat(np.arange(height), width)
            positions[2] = self._position + np.tile(np.arange(width), height)
            self._position += max(height, width)
        else:
            positions[:] = np.arange(self._position, self._position + tokens)
            self._position += tokens

    def close(self, loss_tokens: int) -> None:
        if self._cursor != self._end:
            raise FieldError(self._text_field, self._disagreement())
        if self._end > self._start:
            self._pages.labels[self._start] = IGNORE
        found = int((self._pages.labels[self._start : self._end] != IGNORE).sum())
        if found != loss_tokens:
            raise FieldError(
                self._text_field, f"the index says {loss_tokens} loss tokens, the text yields {found}; index again"
            )
        self._pages._blank(self._end, self._padded_end, self._position)

    def _advance(self, tokens: int) -> int:
        self._cursor += tokens
        if self._cursor > self._end:
            raise FieldError(self._text_field, self._disagreement())
        return self._cursor

    def _disagreement(self) -> str:
        return (
            f"the index says {self._end - self._start} tokens, the text yields another number: "
            "its bytes or the tokenizer behind the recipe's id changed; index again"
        )


class MediaPages:
    """The memory of one modality: parts of all samples, then a dummy where there is none."""

    def __init__(self, source: PageSource, rows: NDArray[np.int64], name: str, code: int) -> None:
        index = source.index
        self.name = name
        self._source = source
        self._index = index
        spans = [np.arange(index.part_offsets[row], index.part_offsets[row + 1]) for row in rows]
        parts = np.concatenate([np.zeros(0, np.int64), *spans])
        owner = np.repeat(np.arange(len(rows)), [len(span) for span in spans])
        mine = index.part_modality[parts] == code
        self._parts = parts[mine]
        self._owner = owner[mine]
        self._num_samples = len(rows)
        self._place = {int(part): place for place, part in enumerate(self._parts)}
        self._extent = np.stack(
            [index.part_extent0[self._parts], index.part_extent1[self._parts]], axis=1, dtype=np.int64
        ).reshape(-1, 2)
        self._tokens = index.part_tokens[self._parts].astype(np.int64)
        self._token_starts = _starts(self._tokens)
        self.where = source.pool.empty((int(self._token_starts[-1]),), np.int64)
        self._dummy = not len(self._parts) and source.layout.empty == "dummy"
        if self._dummy:
            self._extent = np.array([self._dummy_extent()])
        self._row_starts = _starts(self._num_rows(self._extent))
        pre = self._preprocessor
        width = pre.patch_dim if name == "image" else pre.num_mels
        self._data = source.pool.empty((int(self._row_starts[-1]), width), STORED[pre.dtype])
        if self._dummy:
            self._data[:] = 0

    @property
    def _preprocessor(self) -> Any:
        return getattr(self._source.recipe, self.name)

    def num_tokens(self, part: int) -> int:
        return int(self._tokens[self._place[part]])

    def sample_tokens(self) -> NDArray[np.int64]:
        """Tokens of this modality in each sample, int64 (num_samples,)."""
        totals = np.zeros(self._num_samples, np.int64)
        np.add.at(totals, self._owner, self._tokens)
        return totals

    def token_slice(self, part: int) -> slice:
        place = self._place[part]
        return slice(int(self._token_starts[place]), int(self._token_starts[place + 1]))

    def merged_grid(self, part: int) -> tuple[int, int]:
        height, width = self._extent[self._place[part]]
        return int(height) // self._preprocessor.merge, int(width) // self._preprocessor.merge

    def decode(self, part: int, data: bytes | memoryview, field: str) -> None:
        """Decode one part into its rows. Raises FieldError."""
        place = self._place[part]
        out = self._data[int(self._row_starts[place]) : int(self._row_starts[place + 1])]
        first, second = (int(value) for value in self._extent[place])
        limits = self._source.recipe.limits
        try:
            if self.name == "image":
                decode_image(data, self._preprocessor, limits, out, (first, second))
            else:
                decode_audio(data, self._preprocessor, limits, out, first)
        except DecodeError as error:
            raise error.at(field) from error.__cause__

    def image(self) -> ImageBatch:
        return ImageBatch(
            patches=self._rows_tensor(),
            grid_hw=torch.from_numpy(self._extent.astype(np.int32)),
            cu_seqlens=_cu_seqlens(self._row_starts),
            max_seqlen=int(np.diff(self._row_starts).max(initial=0)),
            num_tokens=int(self._token_starts[-1]),
        )

    def audio(self) -> AudioBatch:
        return AudioBatch(
            features=self._rows_tensor(),
            cu_seqlens=_cu_seqlens(self._row_starts),
            max_seqlen=int(np.diff(self._row_starts).max(initial=0)),
            num_tokens=int(self._token_starts[-1]),
        )

    def _rows_tensor(self) -> torch.Tensor:
        return as_tensor(self._data, self._preprocessor.dtype)

    def _num_rows(self, extent: NDArray[np.int64]) -> NDArray[np.int64]:
        return extent[:, 0] * extent[:, 1] if self.name == "image" else extent[:, 1]

    def _dummy_extent(self) -> tuple[int, int]:
        pre = self._preprocessor
        return (pre.merge, pre.merge) if self.name == "image" else (0, pre.mel_frames(1))


def _starts(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Running sums from 0: int64 (len(lengths) + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _cu_seqlens(starts: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(starts.astype(np.int32))
