"""The memory of a microbatch: the slices of every sample and part in it.

The index gives every size before anything is read, so memory is allocated first. Each sample has its own slice of every
tensor, found by the number of the sample in the microbatch, and threads fill them without locks. A batch is returned
when every slice has been written. A padded microbatch is a packed one with all LLM sequences padded to the same length,
viewed as rows. A microbatch of a fixed length has a last sequence of padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.batch import Batch, SampleId
from orchdata.batch.tensors import IGNORE, LLMBatch, TextBatch
from orchdata.building.assembler import Share
from orchdata.building.media_pages import MediaPages, MediaSlots, PageSource, cu_seqlens, rope_of, row_mask, starts_of
from orchdata.building.memory import Reservation
from orchdata.building.sequence import SequenceArrays, SequenceWriter
from orchdata.building.work import MediaWork
from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.samples.compose import MediaSlot
from orchdata.loaders.samples.kept import KeptValue
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER
from orchdata.planning.layout import Padded, fixed_length, row_lengths


class Pages:
    """The memory of one microbatch. `lay` provides it, and must be called first.

    Attributes:
        num_bytes: of each piece of memory that it needs.
        media: modality -> the parts that are encoded here.
    """

    def __init__(self, source: PageSource, rows: NDArray[np.int64], work: Mapping[str, MediaWork]) -> None:
        index, layout = source.index, source.layout
        self._source = source
        self._rows = rows
        self._ids: tuple[SampleId, ...] = tuple((index.shard_of(int(row)).url, index.key(int(row))) for row in rows)
        self._pieces = tuple(index.piece[rows].tolist())

        # Where each sequence starts: those of the samples, then that of the dummies, then padding to a fixed length.
        self._dummies = _dummies(source, work)
        self._lengths = index.llm_tokens[rows].astype(np.int64)
        length = fixed_length(layout)
        if layout.empty == "dummy" and (self._dummies or (not len(rows) and length is None)):
            last = sum(size.tokens for size in self._dummies.values())
            self._lengths = np.append(self._lengths, max(1, last))
        self._starts = starts_of(row_lengths(layout, self._lengths))
        if length is not None and length > self._starts[-1]:
            self._starts = np.append(self._starts, length)

        # Memory of the modalities; the tokens of a sample that are not of a modality are text.
        reserved = self._reserved = Reservation()
        total, mrope = int(self._starts[-1]), layout.positions == "mrope"
        self.media = {name: MediaPages(source, name, mine, reserved) for name, mine in work.items()}
        self._slots = {name: MediaSlots(source, name, mine, len(rows), reserved) for name, mine in work.items()}
        text_lengths = self._lengths[: len(rows)] - sum(slots.sample_tokens() for slots in self._slots.values())
        if len(rows) and text_lengths.min() < 0:
            raise index.damaged(f"{index.called(int(rows[text_lengths.argmin()]))} has fewer tokens than its parts")
        self._text_starts = starts_of(text_lengths)

        # Memory of the sequences.
        reserved.add("input_ids", (total,), np.int64)
        reserved.add("labels", (total,), np.int64)
        # The first row restarts at each sample; under "mrope" rows of time, height and width follow.
        reserved.add("position_ids", (4 if mrope else 1, total), np.int64)
        reserved.add("text_ids", (int(self._text_starts[-1]),), np.int64)
        self.num_bytes = reserved.num_bytes
        self._written = np.zeros(len(rows), np.bool_)

    def lay(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Take pieces of memory of `num_bytes`, with any contents."""
        arrays = self._reserved.lay(memory)
        self._arrays = SequenceArrays(*(arrays[name] for name in SequenceArrays._fields))
        for name in self.media:
            self.media[name].lay(arrays)
            self._slots[name].lay(arrays)
        if len(self._lengths) > len(self._rows):
            self._write_dummies(*self._starts[len(self._rows) : len(self._rows) + 2].tolist())
        for start, stop in pairwise(self._starts[len(self._lengths) :].tolist()):  # the padding of a fixed length
            self._arrays.blank(start, stop)

    def _write_dummies(self, start: int, stop: int) -> None:
        """Write a sequence without loss after the samples, with the tokens of the dummies of all modalities."""
        self._arrays.blank(start, stop)
        writer = SequenceWriter(self._arrays, (start, stop, stop), (0, 0), "*")
        for name, size in self._dummies.items():
            token_id = self._source.recipe.slots[name].token_id
            rope = rope_of(self._source, name, size)
            first = writer.media(token_id, size.tokens, rope)
            if self.media[name].route() is None:  # per phase, features of dummies do not travel
                self._slots[name].append(first, size.tokens)

    def write(self, number: int, sample: StoredSample, payloads: Mapping[int, bytes | memoryview]) -> None:
        """Write one sample's sequence into its slices. Raises FieldError."""
        recipe = self._source.recipe_of(sample.row)
        field = sample.text_field(recipe)
        sized, slots = ({name: iter(media.of_sample(number)) for name, media in self._slots.items()} for _ in range(2))

        def size_of(modality: str, _member: int) -> PartSize:
            slot = next(sized[modality], None)
            if slot is None:
                raise FieldError(field, f"the text yields more {modality} parts than indexed: {WHY_COUNTS_DIFFER}")
            return self._slots[modality].size(slot)

        spans = sample.spans(recipe, payloads, size_of)
        start, stop = self._starts[number : number + 2].tolist()
        text_start, text_stop = self._text_starts[number : number + 2].tolist()
        bounds = (start, start + int(self._lengths[number]), stop)
        writer = SequenceWriter(self._arrays, bounds, (text_start, text_stop), field)
        slot = -1
        for span in spans:
            if isinstance(span, MediaSlot):
                media = self._slots[span.modality]
                if span.first == 0:
                    slot = next(slots[span.modality])
                token_id = recipe.slots[span.modality].token_id
                rope = media.rope(slot, span.first, span.tokens)
                first = writer.media(token_id, span.tokens, rope, media.rope_span(slot, span.tokens))
                media.put(slot, first, span.first, span.tokens)
            else:
                writer.text(span)
        writer.close(int(self._source.index.loss_tokens[sample.row]))
        self._written[number] = True

    def blank(self, number: int, sample: StoredSample) -> None:
        """Write a sequence without loss, as long as planned, for a sample that failed."""
        start, index = int(self._starts[number]), self._source.index
        self._arrays.blank(start, int(self._starts[number + 1]))
        self._arrays.text_ids[self._text_starts[number] : self._text_starts[number + 1]] = 0
        slots = {name: iter(media.of_sample(number)) for name, media in self._slots.items()}
        for part in sample.parts:
            name = index.modality_of(part)
            media, slot = self._slots[name], next(slots[name])
            tokens = media.size(slot).tokens
            media.put(slot, start, 0, tokens)
            start += tokens
        self._written[number] = True

    def batch(
        self, share: Share, samples: NDArray[np.int64], fields: Mapping[str, list[KeptValue]] | None = None
    ) -> Batch:
        """Return the batch over this memory, of the samples with these indices in the global batch, with their kept
        fields. Raises RuntimeError where a slice was not written.
        """
        media = {name: pages.batch() for name, pages in self.media.items()}
        if not self._written.all():
            raise RuntimeError(f"samples {np.flatnonzero(~self._written).tolist()} of a microbatch were never written")
        routes = {name: route for name, pages in self.media.items() if (route := pages.route()) is not None}
        plan = share.plan
        return Batch(
            text=TextBatch(input_ids=torch.from_numpy(self._arrays.text_ids), cu_seqlens=cu_seqlens(self._text_starts)),
            media=media,
            llm=self._llm(per_phase=bool(plan.parts)),
            sample_ids=self._ids,
            pieces=self._pieces,
            plan=plan,
            step=plan.step,
            microbatch=share.index,
            num_microbatches=plan.num_microbatches,
            dp_size=plan.num_ranks,
            loss_tokens=int((self._arrays.labels != IGNORE).sum()),
            global_loss_tokens=plan.global_loss_tokens,
            routes=routes,
            sources=torch.from_numpy(plan.source[samples]) if plan.sources else None,
            fields=fields or {},
        )

    def _llm(self, *, per_phase: bool) -> LLMBatch:
        starts, arrays = self._starts, self._arrays
        shape: tuple[int, ...] = (int(starts[-1]),)
        mask = None
        if isinstance(self._source.layout, Padded):
            num_rows = len(starts) - 1
            shape = (num_rows, int(starts[-1]) // max(1, num_rows))
            starts = starts_of(self._lengths)
            mask = torch.from_numpy(row_mask(self._lengths, shape[1]))
        mrope = self._source.layout.positions == "mrope"
        restart, *_ = positions = torch.from_numpy(arrays.position_ids.reshape(len(arrays.position_ids), *shape))
        return LLMBatch(
            input_ids=torch.from_numpy(arrays.input_ids.reshape(shape)),
            position_ids=positions[1:] if mrope else restart,
            labels=torch.from_numpy(arrays.labels.reshape(shape)),
            cu_seqlens=cu_seqlens(starts),
            lengths=self._own_lengths(len(starts) - 1),
            max_seqlen=fixed_length(self._source.layout) or int(np.diff(starts).max(initial=0)),
            attention_mask=mask,
            restart_position_ids=restart if mrope else None,
            media_positions={name: torch.from_numpy(slots.positions) for name, slots in self._slots.items()},
            media_owners={name: torch.from_numpy(slots.owner) for name, slots in self._slots.items() if per_phase},
            dummies={name: size.tokens for name, size in self._dummies.items()},
        )

    def _own_lengths(self, num_sequences: int) -> torch.Tensor:
        """Tokens of each sequence; the padding of a fixed length counts as a sequence of 0 tokens."""
        lengths = np.zeros(num_sequences, np.int32)
        lengths[: len(self._lengths)] = self._lengths
        return torch.from_numpy(lengths)


def _dummies(source: PageSource, work: Mapping[str, MediaWork]) -> dict[str, PartSize]:
    """Return the sizes of the dummies of modalities that none of the samples has."""
    if source.layout.empty != "dummy":
        return {}
    missing = [name for name, mine in work.items() if not len(mine.arriving)]
    return {name: source.recipe.modalities[name].dummy() for name in missing}
