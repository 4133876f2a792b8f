"""The memory of a microbatch: the slices of every sample and part in it.

The index gives every size before anything is read, so memory is allocated first. Each sample has its own slice of every
tensor, found by the number of the sample in the microbatch, and threads fill them without locks. A batch is returned
when every slice has been written. A padded microbatch is a packed one with all LLM sequences padded to the same length,
viewed as rows. A microbatch of a fixed length has a last sequence of padding.

Where a loader cuts sequences that ranks share, there is memory for the tokens that this rank has of each:

    sample --written whole, by itself--> ids, positions, labels --shifted by one--> cut --> memory of the microbatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.batch import Batch, SampleId
from orchdata.batch.tensors import IGNORE, LLMBatch, Team, TextBatch, counted_labels
from orchdata.building.assembler import Share
from orchdata.building.media_pages import (
    MediaPages,
    MediaSlots,
    MediaWork,
    PageSource,
    cu_seqlens,
    rope_of,
    row_mask,
    starts_of,
)
from orchdata.building.memory import Reservation
from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.samples.members import KeptValue
from orchdata.loaders.samples.spans import MediaSlot, TextSpan
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER
from orchdata.planning.layout import Layout, Packed, Padded, fixed_length, row_lengths
from orchdata.planning.teams import JoinedSequences, joined_sequences


class Pages:
    """The memory of one microbatch, of the samples with these indices in the global batch. `lay` provides it, and must
    be called first: pieces of `num_bytes` each. `media` are the parts that are encoded here.
    """

    def __init__(
        self, source: PageSource, share: Share, samples: NDArray[np.int64], work: Mapping[str, MediaWork]
    ) -> None:
        index, layout, plan = source.index, source.layout, share.plan
        rows = plan.row[samples]
        self._source, self._share, self._samples = source, share, samples
        self._rows = rows
        self._ids: tuple[SampleId, ...] = tuple((index.shard_of(int(row)).url, index.key(int(row))) for row in rows)
        self._pieces = tuple(index.piece[rows].tolist())

        # Dummies of the modalities that none of the samples has, or of which only slices of samples may have a token.
        is_whole = np.ones(len(rows), np.bool_) if plan.joined_to is None else plan.team_size[samples] == 1
        missing = [name for name, mine in work.items() if layout.empty == "dummy" and not is_whole[mine.owner].any()]
        self._dummies = {name: source.recipe.modalities[name].dummy() for name in missing}

        # Where each sequence starts: those of the samples, then that of the dummies, then padding to a fixed length.
        ranges, length = plan.ranges, fixed_length(layout)
        self._lengths = index.llm_tokens[rows].astype(np.int64) if ranges is None else plan.llm_positions[samples]
        if layout.empty == "dummy" and (self._dummies or (not len(rows) and length is None)):
            last = sum(size.tokens for size in self._dummies.values())
            self._lengths = np.append(self._lengths, max(1, last))
        self._first = np.zeros_like(self._lengths) if ranges is None else ranges.first[samples]
        self._held, self._counts_from = self._lengths, self._first  # of positions, those of the first token
        self._joined: list[JoinedSequences] = []
        if plan.joined_to is not None:
            self._starts = self._cut(plan.team_size[samples], plan.joined_to)
        elif ranges is None:
            self._starts = starts_of(row_lengths(layout, self._lengths))
        else:
            self._starts = starts_of(self._lengths)
            self._counts_from = self._starts[:-1] if _is_one_sequence(layout) else np.zeros_like(self._lengths)
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
        # Of a slice the most that it may have, and when it is written what it has.
        self._text_lengths = np.minimum(text_lengths, self._held[: len(rows)])
        self._text_starts = starts_of(self._text_lengths)

        # Memory of the sequences.
        reserved.add("input_ids", (total,), np.int64)
        reserved.add("labels", (total,), np.int64)
        # The first row restarts at each sample; under "mrope" rows of time, height and width follow.
        reserved.add("position_ids", (4 if mrope else 1, total), np.int64)
        reserved.add("text_ids", (int(self._text_starts[-1]),), np.int64)
        self.num_bytes = reserved.num_bytes
        self._written = np.zeros(len(rows), np.bool_)
        self._valid = np.ones(len(rows), np.bool_)

    def _cut(self, sizes: NDArray[np.int32], multiple_of: int) -> NDArray[np.int64]:
        """Find which tokens of each sequence this rank has, by the sizes of their teams; that of dummies is whole.
        Return where each starts; what pads a slice ends its last.
        """
        sizes = np.append(sizes, np.ones(len(self._lengths) - len(sizes), np.int32))
        self._joined = joined_sequences(sizes, self._lengths, multiple_of)
        self._held, taken = np.empty_like(self._lengths), np.empty_like(self._lengths)
        for team in self._joined:
            self._first[team.at], stop = team.held(self._share.rank % team.size)
            self._held[team.at] = taken[team.at] = stop - self._first[team.at]
            taken[team.at[-1]] += team.tokens - self._held[team.at].sum()
        return starts_of(taken)

    def has_tokens(self, number: int) -> bool:
        """Whether this rank has a token of a sample; members of its team may have all."""
        return not self._joined or self._held[number] > 0

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
        for team in self._joined:
            # What pads a team's slices is one sequence more, which members have in parts as they have the others.
            last, first = team.at[-1], max(0, self._share.rank % team.size * team.tokens - int(team.borders[-1]))
            start, stop = int(self._starts[last] + self._held[last]), int(self._starts[last + 1])
            self._arrays.blank(start, stop, first, first)

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

        if not self.has_tokens(number):
            self._hold_none(number)
            return
        spans = sample.spans(recipe, payloads, size_of)
        start, stop = self._starts[number : number + 2].tolist()
        text_start, text_stop = self._text_starts[number : number + 2].tolist()
        length, arrays = int(self._lengths[number]), self._arrays
        if is_cut := self._held[number] < length:
            start, stop, text_start, text_stop, arrays = 0, length, 0, length, arrays.like(length)
        elif self._joined:
            stop = start + length
        bounds = (start, start + length, stop)
        writer = SequenceWriter(arrays, bounds, (text_start, text_stop), field)
        slot, is_text = -1, np.ones(length if is_cut else 0, np.bool_)
        # Where the whole sequence would begin in the microbatch, and the tokens that this rank has.
        own = int(self._starts[number])
        shift, held = (own - int(self._first[number]) - start, (own, own + int(self._held[number])))
        for span in spans:
            if isinstance(span, MediaSlot):
                media = self._slots[span.modality]
                if span.first == 0:
                    slot = next(slots[span.modality])
                token_id = recipe.slots[span.modality].token_id
                rope = media.rope(slot, span.first, span.tokens)
                first = writer.media(token_id, span.tokens, rope, media.rope_span(slot, span.tokens))
                media.put(slot, first + shift, span.first, span.tokens, held if is_cut else None)
                is_text[first - start : first - start + span.tokens] = False
            else:
                writer.text(span)
        writer.close(int(self._source.index.loss_tokens[sample.row]))
        if self._joined:
            arrays.labels[start : stop - 1], arrays.labels[stop - 1] = arrays.labels[start + 1 : stop], IGNORE
        if is_cut:
            self._put(number, arrays, is_text)
        self._written[number] = True

    def write_piece(self, number: int, token_ids: NDArray[np.int32], *, has_labels: bool) -> None:
        """Write the tokens of a piece of a document. The first has no label: what precedes it is not in the window."""
        (start, stop), arrays = self._starts[number : number + 2].tolist(), self._arrays
        arrays.input_ids[start:stop] = arrays.text_ids[start:stop] = token_ids
        arrays.labels[start:stop] = token_ids if has_labels else IGNORE
        arrays.labels[start] = IGNORE
        arrays.position_ids[:, start:stop] = np.arange(stop - start) + self._counts_from[number]
        self._written[number] = True

    def blank(self, number: int, sample: StoredSample) -> None:
        """Write a sequence without loss, as long as planned, for a sample that failed."""
        start, index = int(self._starts[number]), self._source.index
        first, stop = int(self._counts_from[number]), int(self._starts[number + 1])
        self._arrays.blank(start, start + int(self._held[number]) if self._joined else stop, first, first)
        self._arrays.text_ids[self._text_starts[number] : self._text_starts[number + 1]] = 0
        self._valid[number] = False
        if self._held[number] < self._lengths[number]:
            self._hold_none(number)
            return
        slots = {name: iter(media.of_sample(number)) for name, media in self._slots.items()}
        for part in sample.parts:
            name = index.modality_of(part)
            media, slot = self._slots[name], next(slots[name])
            tokens = media.size(slot).tokens
            media.put(slot, start, 0, tokens)
            start += tokens
        self._written[number] = True

    def _hold_none(self, number: int) -> None:
        """Take no token of the media of a sample: none is here, or it failed."""
        for media in self._slots.values():
            for slot in media.of_sample(number):
                media.put(slot, 0, 0, media.size(slot).tokens, (0, 0))
        self._written[number] = True

    def _put(self, number: int, whole: SequenceArrays, is_text: NDArray[np.bool_]) -> None:
        """Take what this rank has of a sample that was written whole, with labels that were shifted."""
        first, count, start, text = (
            int(each[number]) for each in (self._first, self._held, self._starts, self._text_starts)
        )
        for name in ("input_ids", "labels", "position_ids"):
            array = getattr(self._arrays, name)
            array[..., start : start + count] = getattr(whole, name)[..., first : first + count]
        ids = whole.input_ids[first : first + count][is_text[first : first + count]]
        self._arrays.text_ids[text : text + len(ids)] = ids
        self._text_lengths[number] = len(ids)

    def _text(self) -> TextBatch:
        """Return the text that is here, without what slices were given room for."""
        begins, lengths, ids = self._text_starts[:-1], self._text_lengths, self._arrays.text_ids
        if lengths.sum() < len(ids):
            ids = np.concatenate([ids[at : at + count] for at, count in zip(begins, lengths, strict=True)])
        return TextBatch(input_ids=torch.from_numpy(ids), cu_seqlens=cu_seqlens(starts_of(lengths)))

    def batch(self, fields: Mapping[str, list[KeptValue]] | None = None) -> Batch:
        """Return the batch over this memory, with kept fields of its samples. Raises RuntimeError where one was not
        written.
        """
        media = {name: pages.batch() for name, pages in self.media.items()}
        if not self._written.all():
            raise RuntimeError(f"samples {np.flatnonzero(~self._written).tolist()} of a microbatch were never written")
        routes = {
            name: route if (needed := self._slots[name].needed) is None else replace(route, receive_order=needed)
            for name, pages in self.media.items()
            if (route := pages.route()) is not None
        }
        share, plan, samples = self._share, self._share.plan, self._samples
        llm, teams = self._llm(per_phase=bool(plan.parts)), self._teams()
        ranges = zip(self._first.tolist(), (self._first + self._held).tolist(), strict=True)
        return Batch(
            text=self._text(),
            media=media,
            llm=llm,
            sample_ids=self._ids,
            pieces=self._pieces,
            token_ranges=tuple(ranges)[: len(self._ids)] if self._joined or plan.ranges is not None else (),
            plan=plan,
            step=plan.step,
            microbatch=share.index,
            num_microbatches=plan.num_microbatches,
            dp_size=plan.num_ranks,
            loss_tokens=counted_labels(llm, teams),
            global_loss_tokens=plan.global_loss_tokens,
            routes=routes,
            teams=teams,
            sources=torch.from_numpy(plan.source[samples]) if plan.sources else None,
            fields=fields or {},
            peer=share.peer,
        )

    def _teams(self) -> tuple[Team, ...]:
        """Return the teams of the samples, which come by size."""
        if self._share.plan.teams is None and not self._joined:
            return ()
        share, starts, sizes = self._share, self._starts, self._share.plan.team_size[self._samples]
        # Of each team its size, its first sequence and the one after the last, and borders of whole sequences.
        found = []
        for of in self._joined:
            whole = of.size * of.tokens
            borders = of.borders if of.borders[-1] == whole else np.append(of.borders, whole)
            found.append((of.size, int(of.at[0]), int(of.at[-1]) + 1, borders))
        if share.plan.joined_to is None:
            for size in np.unique(sizes[sizes > 1])[::-1].tolist():
                first, stop = np.searchsorted(-sizes, [-size, 1 - size]).tolist()
                found.append((size, first, stop, starts[first : stop + 1] - starts[first]))
        teams = []
        for size, first, stop, borders in found:
            place, samples = share.rank % size, slice(first, min(stop, len(self._rows)))
            teams.append(
                Team(
                    size=size,
                    place=place,
                    ranks=tuple(range(share.rank - place, share.rank - place + size)),
                    rows=slice(int(starts[first]), int(starts[stop])),
                    cu_seqlens=cu_seqlens(borders),
                    samples=samples,
                    valid=torch.from_numpy(self._valid[samples]),
                )
            )
        return tuple(teams)

    def _llm(self, *, per_phase: bool) -> LLMBatch:
        starts, held, arrays = self._starts, self._held, self._arrays
        if _is_one_sequence(self._source.layout):
            starts, held = starts[[0, -1]], starts[-1:] if len(held) else held
        shape: tuple[int, ...] = (int(starts[-1]),)
        mask = None
        if isinstance(self._source.layout, Padded):
            num_rows = len(starts) - 1
            shape = (num_rows, int(starts[-1]) // max(1, num_rows))
            starts = starts_of(self._lengths)
            mask = torch.from_numpy(row_mask(self._lengths, shape[1]))
        lengths = np.zeros(len(starts) - 1, np.int32)  # the padding of a fixed length is a sequence of 0 tokens
        lengths[: len(held)] = held
        labels, is_joined = torch.from_numpy(arrays.labels.reshape(shape)), self._share.plan.joined_to is not None
        mrope = self._source.layout.positions == "mrope"
        restart, *_ = positions = torch.from_numpy(arrays.position_ids.reshape(len(arrays.position_ids), *shape))
        return LLMBatch(
            input_ids=torch.from_numpy(arrays.input_ids.reshape(shape)),
            position_ids=positions[1:] if mrope else restart,
            labels=None if is_joined else labels,
            shift_labels=labels if is_joined else None,
            cu_seqlens=cu_seqlens(starts),
            lengths=torch.from_numpy(lengths),
            max_seqlen=fixed_length(self._source.layout) or int(np.diff(starts).max(initial=0)),
            attention_mask=mask,
            restart_position_ids=restart if mrope else None,
            media_positions={name: torch.from_numpy(slots.positions) for name, slots in self._slots.items()},
            media_owners={name: torch.from_numpy(slots.owner) for name, slots in self._slots.items() if per_phase},
            dummies={name: size.tokens for name, size in self._dummies.items()},
        )


def _is_one_sequence(layout: Layout) -> bool:
    """Whether the documents of a window are one sequence."""
    return isinstance(layout, Packed) and layout.attention == "window"


class SequenceArrays(NamedTuple):
    """The sequences of a microbatch, one after another, int64 (T,). Positions are (1, T), restarting at each sample;
    under "mrope" (4, T), also time, height, width. `text_ids` are the tokens of text alone.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    text_ids: NDArray[np.int64]

    def like(self, length: int) -> SequenceArrays:
        """Return arrays for a sequence of so many tokens of text."""
        return SequenceArrays(*(np.empty((*array.shape[:-1], length), np.int64) for array in self))

    def blank(self, start: int, stop: int, first: int = 0, first_mrope: int = 0) -> None:
        """Write padding or a dummy sequence: id 0, no loss, positions that count from `first` and `first_mrope`."""
        self.input_ids[start:stop] = 0
        self.labels[start:stop] = IGNORE
        self.position_ids[0, start:stop] = np.arange(first, first + stop - start)
        self.position_ids[1:, start:stop] = np.arange(first_mrope, first_mrope + stop - start)


class SequenceWriter:
    """Writes one sample. `bounds`: start and end of its sequence, and the end of its padding; `text_bounds`: of its
    text in `text_ids`; `text_field`: the field in errors.
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
        """Write the placeholder tokens of one part. Return the position of the first. Raises FieldError. Under "mrope"
        `rope` has positions of its tokens from 0, (3, tokens), None continues to count; `rope_span` those from its
        first token to what follows it, None for one more than the largest.
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
