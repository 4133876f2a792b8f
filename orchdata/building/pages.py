"""The memory of a microbatch: where every sample and part lies in it.

The index gives every size before anything is read, so memory is laid out first; each sample then has its own slice
of every tensor, and threads fill them without meeting. A padded microbatch is a packed one whose LLM sequences are
all padded to the same length: its memory, seen as rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.batch import IGNORE, Batch, Key, LLMBatch, TextBatch
from orchdata.building.media_pages import MediaPages, MediaSlots, PageSource, cu_seqlens, row_mask, starts_of
from orchdata.building.step import Share
from orchdata.building.work import MediaWork
from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.modality import IMAGE, MODALITIES
from orchdata.loaders.samples.sample import MediaSlot, compose, text_members
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER
from orchdata.planning.layout import Padded, row_lengths


class Pages:
    """The memory of one microbatch: where every sample and part lies in it."""

    def __init__(self, source: PageSource, rows: NDArray[np.int64], work: Mapping[str, MediaWork]) -> None:
        index, layout = source.index, source.layout
        self.source = source
        self.rows = rows
        self.keys: tuple[Key, ...] = tuple((index.shard_of(int(row)).url, index.key(int(row))) for row in rows)
        self.lengths = index.llm_tokens[rows].astype(np.int64)
        padded = row_lengths(layout, self.lengths)
        if not len(rows) and layout.empty == "dummy":
            padded = np.array([layout.multiple_of])
        self.starts = starts_of(padded)
        self.media = {name: MediaPages(source, name, mine) for name, mine in work.items()}
        self.slots = {name: MediaSlots(source, name, mine, len(rows)) for name, mine in work.items()}
        text_lengths = self.lengths - sum(slots.sample_tokens() for slots in self.slots.values())
        self.text_starts = starts_of(text_lengths)
        total = int(self.starts[-1])
        self.input_ids = source.pool.empty((total,), np.int64)
        self.labels = source.pool.empty((total,), np.int64)
        # Restarting at each sample; under "mrope" time, height and width follow.
        self.position_ids = source.pool.empty((4 if layout.positions == "mrope" else 1, total), np.int64)
        self.text_ids = source.pool.empty((int(self.text_starts[-1]),), np.int64)
        if not len(rows):
            self._blank(0, total)

    def write(self, place: int, sample: StoredSample, payloads: Mapping[int, bytes | memoryview]) -> None:
        """Write one sample's sequence into its slices. Raises FieldError."""
        recipe = self.source.recipe
        texts = {member: payloads[member] for member in text_members(sample.members, recipe)}
        spans = compose(sample.members, texts, recipe)
        source = sample.members[next(iter(texts))].field if texts else "*"
        writer = SequenceWriter(self, place, source)
        parts = iter(sample.parts)
        for span in spans:
            if isinstance(span, MediaSlot):
                name = "image" if span.modality == IMAGE else "audio"
                token_id = recipe.text.image_token_id if span.modality == IMAGE else recipe.text.audio_token_id
                writer.media(self.slots[name], next(parts), token_id)
            else:
                writer.text(np.asarray(span.token_ids, np.int64), span.loss)
        writer.close(int(self.source.index.loss_tokens[sample.row]))

    def blank(self, place: int, sample: StoredSample) -> None:
        """Write a sequence without loss, as long as planned, for a sample whose own cannot be written."""
        start, index = int(self.starts[place]), self.source.index
        self._blank(start, int(self.starts[place + 1]))
        self.text_ids[self.text_starts[place] : self.text_starts[place + 1]] = 0
        for part in sample.parts:
            slots = self.slots[MODALITIES[index.part_modality[part]]]
            slots.put(part, start)
            start += slots.num_tokens(part)

    def batch(self, share: Share) -> Batch:
        image, audio = self.media.get("image"), self.media.get("audio")
        routes = {name: route for name, media in self.media.items() if (route := media.route()) is not None}
        plan = share.plan
        return Batch(
            text=TextBatch(input_ids=torch.from_numpy(self.text_ids), cu_seqlens=cu_seqlens(self.text_starts)),
            image=None if image is None else image.image(),
            audio=None if audio is None else audio.audio(),
            llm=self._llm(apart=bool(plan.parts)),
            keys=self.keys,
            plan=plan,
            step=plan.step,
            microbatch=share.place,
            num_microbatches=plan.num_microbatches,
            dp_size=plan.num_ranks,
            loss_tokens=int((self.labels != IGNORE).sum()),
            global_loss_tokens=plan.loss_tokens,
            routes=routes,
        )

    def _llm(self, *, apart: bool) -> LLMBatch:
        padded = isinstance(self.source.layout, Padded)
        starts = self.starts
        shape: tuple[int, ...] = (int(starts[-1]),)
        mask = None
        if padded:
            num_rows = len(starts) - 1
            shape = (num_rows, int(starts[-1]) // max(1, num_rows))
            # A dummy's first place is marked: a row masked altogether would turn attention's softmax into NaN.
            lengths = self.lengths if len(self.rows) else np.ones(num_rows, np.int64)
            starts = starts_of(lengths)
            mask = torch.from_numpy(row_mask(lengths, shape[1]))
        mrope = self.source.layout.positions == "mrope"
        restart, *_ = positions = torch.from_numpy(self.position_ids.reshape(len(self.position_ids), *shape))
        return LLMBatch(
            input_ids=torch.from_numpy(self.input_ids.reshape(shape)),
            position_ids=positions[1:] if mrope else restart,
            labels=torch.from_numpy(self.labels.reshape(shape)),
            cu_seqlens=cu_seqlens(starts),
            max_seqlen=int(np.diff(starts).max(initial=0)),
            attention_mask=mask,
            restart_position_ids=restart if mrope else None,
            **{f"{name}_positions": torch.from_numpy(slots.where) for name, slots in self.slots.items()},
            **{f"{name}_owners": torch.from_numpy(slots.owner) for name, slots in self.slots.items() if apart},
        )

    def _blank(self, start: int, stop: int, first: int = 0, first_mrope: int = 0) -> None:
        """Tokens without meaning: padding, or a dummy sequence; positions count on from the first ones."""
        self.input_ids[start:stop] = 0
        self.labels[start:stop] = IGNORE
        self.position_ids[0, start:stop] = np.arange(first, first + stop - start)
        self.position_ids[1:, start:stop] = np.arange(first_mrope, first_mrope + stop - start)


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
        self._position = 0  # under "mrope", of time, height and width
        self._pages.position_ids[0, self._start : self._end] = np.arange(self._end - self._start)

    def text(self, token_ids: NDArray[np.int64], loss: bool) -> None:
        stop = self._advance(len(token_ids))
        pages, span = self._pages, slice(stop - len(token_ids), stop)
        pages.input_ids[span] = token_ids
        pages.labels[span] = token_ids if loss else IGNORE
        pages.position_ids[1:, span] = np.arange(self._position, self._position + len(token_ids))
        self._position += len(token_ids)
        text_stop = self._text_cursor + len(token_ids)
        if text_stop > self._text_end:
            raise FieldError(self._text_field, self._disagreement())
        pages.text_ids[self._text_cursor : text_stop] = token_ids
        self._text_cursor = text_stop

    def media(self, slots: MediaSlots, part: int, token_id: int) -> None:
        tokens = slots.num_tokens(part)
        stop = self._advance(tokens)
        start, pages = stop - tokens, self._pages
        pages.input_ids[start:stop] = token_id
        pages.labels[start:stop] = IGNORE
        slots.put(part, start)
        positions = pages.position_ids[1:, start:stop]
        if len(positions) and slots.name == "image":
            height, width = slots.merged_grid(part)
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
                self._text_field,
                f"the index says {loss_tokens} loss tokens, the text yields {found}: {WHY_COUNTS_DIFFER}",
            )
        self._pages._blank(self._end, self._padded_end, self._end - self._start, self._position)

    def _advance(self, tokens: int) -> int:
        self._cursor += tokens
        if self._cursor > self._end:
            raise FieldError(self._text_field, self._disagreement())
        return self._cursor

    def _disagreement(self) -> str:
        return f"the index says {self._end - self._start} tokens, the text yields another number: {WHY_COUNTS_DIFFER}"
