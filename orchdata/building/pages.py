"""Batches of shards in a layout: threads write samples, or pieces of documents, straight into a microbatch's memory.

    plan --indices of samples--> Pages: a table of samples, sequences and parts, each with its range of every tensor
    Pages.fill --a task for each stored sample: read, write its sequence, decode its parts--> Pages.finish --> Batch

The index gives every size before anything is read, so memory is allocated first. Each sample has its own slice of every
tensor, found by its number in the microbatch, and threads fill them without locks. A padded microbatch is a packed one
with all sequences padded to the same length, viewed as rows; one of a fixed length has a last sequence of padding.
Where a loader cuts sequences that ranks share, a sample is written whole, by itself, its labels are shifted by one, and
what this rank has of it is copied into the memory of the microbatch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.batch import Batch, SampleId
from orchdata.batch.tensors import IGNORE, LLMBatch, Team, TextBatch, counted_labels
from orchdata.building.arrays import (
    Arrays,
    Media,
    SequenceArrays,
    SequenceWriter,
    check_written,
    cu_seqlens,
    rope_of,
    row_mask,
    starts_of,
)
from orchdata.building.collate import SampleAssembler
from orchdata.building.step import Assembled, Assembler, Memory, Share, Task, kept
from orchdata.loaders.errors import DataError, FieldError, StaleIndexError, as_field_error
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample, Wanted, read_ahead
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe, load_required
from orchdata.loaders.samples.measure import MeasuredPart, decoded_bytes
from orchdata.loaders.samples.members import KeptValue
from orchdata.loaders.samples.sample import Sample
from orchdata.loaders.samples.spans import MediaSlot
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER
from orchdata.loaders.watch import Watch
from orchdata.planning.balance import JoinedSequences, Layout, Padded, joined_sequences, row_lengths

Ints = NDArray[np.int64]
Payloads = Mapping[int, bytes | memoryview]


@dataclass(frozen=True, kw_only=True)
class IndexedShards:
    """Shards as an index describes them."""

    index: Index  # pickles as its path
    build_id: str  # of the index when the spec was created: a rebuilt one would result in other batches
    recipes: tuple[Recipe, ...]  # of each source; the first defines the tensors
    seed: int = 0  # of the generators that decoding draws from
    containers: Mapping[str, Container] = field(default_factory=dict)  # of the user's, by identity, of all sources
    files: Files = PLAIN_FILES  # where the shards are
    blank: frozenset[int] = frozenset()  # rows that are delivered as failed, and never read

    @cached_property
    def any_remote(self) -> bool:
        """Whether any shard, or its media, is in object storage."""
        return any(is_remote(shard.url) or is_remote(shard.media_root) for shard in self.index.shards)

    @property
    def recipe(self) -> Recipe:
        return self.recipes[0]

    def recipe_of(self, row: int) -> Recipe:
        """Return the recipe of a sample."""
        return self.recipes[self.index.source_of(row)]

    def open(self) -> OpenShards:
        """Return the shards; each one is opened later. Raises StaleIndexError, and as `load_required`."""
        if self.index.build_id != self.build_id:
            raise StaleIndexError(
                str(self.index.path), "the index was rebuilt after this loader was created: create the loader again"
            )
        for recipe in self.recipes:
            load_required(recipe)
        return OpenShards(
            limits=self.recipe.limits,
            cache=CacheFolder(),
            containers=self.containers,
            files=self.files,
            any_remote=self.any_remote,
            blank=self.blank,
        )

    def name_of(self, row: int) -> str:
        return f"{self.index.called(row)} of {self.index.shard_of(row).url}"


@dataclass(frozen=True, kw_only=True)
class SampleContent:
    """Batches of a user's `collate_fn` from decoded samples of shards."""

    shards: IndexedShards
    collate_fn: Callable[..., Any]
    preloads: ClassVar = ("orchdata.dataset.preload",)

    def open(self, watch: Watch) -> Assembler:
        shards = self.shards.open()
        load = shard_loader(self.shards.index, shards, self.shards.recipe_of)

        def ahead(rows: Iterable[int]) -> object:
            wanted = (Wanted(row, kept=True) for row in rows)
            return read_ahead(self.shards.index, shards, self.shards.recipe_of, wanted)

        return SampleAssembler(
            loader=load,
            watch=watch,
            refuse=shard_refusal(self.shards.index),
            collate_fn=self.collate_fn,
            reads=shards.reads,
            seed=self.shards.seed,
            ahead=ahead,
        )

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)


@dataclass(frozen=True, kw_only=True)
class ShardContent:
    """Batches of shards in a layout. `encoders` are modalities that every batch has, if necessary as a dummy."""

    shards: IndexedShards
    layout: Layout
    encoders: tuple[str, ...]
    preloads: ClassVar = ("orchdata.dataset.preload",)

    def open(self, watch: Watch) -> PackedAssembler:
        return PackedAssembler(self, self.shards.open(), watch)

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)


class PackedAssembler:
    """Builds batches from an index's samples, or from windows of its documents."""

    def __init__(self, content: ShardContent, opened: OpenShards, watch: Watch) -> None:
        self.content, self.opened, self.watch = content, opened, watch
        self.reads: ReadBytes = opened.reads
        # The names of the fields that batches have, in a mixture those of all sources.
        self.kept = sorted({name for recipe in content.shards.recipes for name in recipe.keep})

    def begin(self, share: Share) -> Pages:
        return Pages(self, share, share.plan.places(share.rank, share.microbatch))

    def read_ahead(self, wanted: Iterable[Wanted]) -> object:
        shards = self.content.shards
        return read_ahead(shards.index, self.opened, shards.recipe_of, wanted)

    def load_alone(self, row: int) -> None:
        shards = self.content.shards
        self.watch.load(row, shard_loader(shards.index, self.opened, shards.recipe_of), shard_refusal(shards.index))


@dataclass
class _Stored:
    """What one stored sample gives a microbatch: its sequence, the `number`-th of the pages, and parts to encode.
    `sample` reads it, if it was read ahead.
    """

    row: int
    number: int | None = None
    parts: list[tuple[Media, int, int]] = field(default_factory=list)  # media, number in it, part of the index
    sample: StoredSample | None = None


class Pages:
    """One microbatch under construction, of the samples with these indices in the global batch. A piece of memory is
    taken for each of its arrays.
    """

    def __init__(self, assembler: PackedAssembler, share: Share, samples: Ints) -> None:
        self._assembler, self._share, self._samples = assembler, share, samples
        shards, layout, plan = assembler.content.shards, assembler.content.layout, share.plan
        self._shards, self._layout = shards, layout
        index, arrays = shards.index, Arrays()
        rows = self._rows = plan.row[samples]
        self._failures: dict[int, list[DataError]] = {}
        self._kept: dict[int, dict[str, KeptValue]] = {}
        self._seconds = {"reading": 0.0, "decoding": 0.0}
        self._lock = threading.Lock()
        # A failure must leave its memory as planned where other ranks wait for it, or it is in a full window.
        self._is_awaited = plan.keeps_shapes or plan.ranges is not None

        # The parts that are encoded here, and dummies of the modalities that none of the samples has, or of which only
        # slices of samples may have a token.
        self._media = {name: Media(shards, layout, name, share, samples, arrays) for name in assembler.content.encoders}
        is_whole = np.ones(len(rows), np.bool_) if plan.joined_to is None else plan.team_size[samples] == 1
        missing = [name for name, of in self._media.items() if layout.empty == "dummy" and not is_whole[of.owner].any()]
        self._dummies = {name: shards.recipe.modalities[name].dummy() for name in missing}

        # Where each sequence starts: those of the samples, then that of the dummies, then padding to a fixed length.
        ranges, length = plan.ranges, layout.length
        self._lengths = index.llm_tokens[rows].astype(np.int64) if ranges is None else plan.llm_positions[samples]
        if layout.empty == "dummy" and (self._dummies or (not len(rows) and length is None)):
            self._lengths = np.append(self._lengths, max(1, sum(size.tokens for size in self._dummies.values())))
        self._first = np.zeros_like(self._lengths) if ranges is None else ranges.first[samples]
        self._held, self._counts_from = self._lengths, self._first  # of positions, those of the first token
        taken = row_lengths(layout, self._lengths) if ranges is None else self._lengths
        self._joined: list[JoinedSequences] = []
        if plan.joined_to is not None:
            # Which tokens of each sequence this rank has; that of dummies is whole. What pads a slice ends its last.
            sizes = np.append(plan.team_size[samples], np.ones(len(self._lengths) - len(rows), np.int32))
            self._joined = joined_sequences(sizes, self._lengths, plan.joined_to)
            self._held, taken = np.empty_like(self._lengths), np.empty_like(self._lengths)
            for team in self._joined:
                self._first[team.at], stops = team.held(share.rank % team.size)
                self._held[team.at] = taken[team.at] = stops - self._first[team.at]
                taken[team.at[-1]] += team.tokens - self._held[team.at].sum()
        self._starts = starts_of(taken)
        if ranges is not None:
            self._counts_from = self._starts[:-1] if layout.attention == "window" else np.zeros_like(self._lengths)
        if length is not None and length > self._starts[-1]:
            self._starts = np.append(self._starts, length)

        # The tokens of a sample that are not of a modality are text; of a slice the most that it may have, and when it
        # is written what it has.
        text_lengths = self._lengths[: len(rows)].copy()
        for media in self._media.values():
            np.subtract.at(text_lengths, media.owner, media.slot_tokens)
        if (text_lengths < 0).any():
            raise index.damaged("a sample has fewer tokens than its parts")
        self._text_lengths = np.minimum(text_lengths, self._held[: len(rows)])
        self._text_starts = starts_of(self._text_lengths)

        # Memory of the sequences. The first row of positions restarts at each sample; under "mrope" rows of time,
        # height and width follow.
        total, num_positions = int(self._starts[-1]), 4 if layout.positions == "mrope" else 1
        shapes = (total,), (total,), (num_positions, total), (int(self._text_starts[-1]),)
        arrays |= dict(zip(SequenceArrays._fields, [(shape, np.dtype(np.int64)) for shape in shapes], strict=True))
        self._arrays_of = arrays
        self.num_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in arrays.values())
        self._written, self._valid = np.zeros(len(rows), np.bool_), np.ones(len(rows), np.bool_)

        # What each stored sample gives, by its index in the global batch: parts may be of samples of other ranks.
        self._stored = {at: _Stored(int(plan.row[at]), number) for number, at in enumerate(samples.tolist())}
        for media in self._media.values():
            encoded = zip(media.encoded.tolist(), media.encoded_sample.tolist(), strict=True)
            for number, (part, at) in enumerate(encoded):
                self._stored.setdefault(at, _Stored(int(plan.row[at]))).parts.append((media, number, part))

    def _has_tokens(self, number: int) -> bool:
        """Whether this rank has a token of a sample; members of its team may have all."""
        return not self._joined or self._held[number] > 0

    def _needs(self, stored: _Stored, recipe: Recipe) -> tuple[dict[str, Any], Any, NDArray[np.int32] | None]:
        """Return what is read of a sample; and of a document that a window cuts, so that the next need not tokenize it,
        the name of its ids, and its ids if they are known.
        """
        number, row, plan, index = stored.number, stored.row, self._share.plan, self._shards.index
        needs: dict[str, Any] = {"text": False, "parts": [part for _, _, part in stored.parts], "kept": False}
        name = ids = None
        if number is not None:
            if plan.ranges is not None and plan.llm_positions[self._samples[number]] < index.llm_tokens[row]:
                name = "token ids", index.fingerprint, index.build_id, row
                ids = self._assembler.opened.texts.get(name)
            needs["text"] = self._has_tokens(number) and ids is None
            needs["kept"] = bool(recipe.keep)
        return needs, name, ids

    def wanted(self) -> Iterator[Wanted]:
        for each in self._stored.values():
            needs, _, _ = self._needs(each, self._shards.recipe_of(each.row))
            if any(needs.values()):
                each.sample = StoredSample(self._shards.index, self._assembler.opened, each.row)
                yield Wanted(each.row, **needs, sample=each.sample)

    def fill(self, memory: Memory) -> list[Task]:
        """Lay the batch out in memory, with any contents; a task for each stored sample. Raises MemoryError, naming the
        largest.
        """
        self._memory = memory
        try:
            arrays = {
                name: memory.take(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
                for name, (shape, dtype) in self._arrays_of.items()
            }
        except MemoryError as error:
            raise out_of_memory(error, self._shards.index, self._shards.recipe, self._rows) from error
        self._arrays = SequenceArrays(*(arrays[name] for name in SequenceArrays._fields))
        for media in self._media.values():
            media.lay(arrays)
        # A sequence without loss after the samples has the tokens of the dummies of all modalities.
        if len(self._lengths) > len(self._rows):
            start, stop = self._starts[len(self._rows) : len(self._rows) + 2].tolist()
            self._arrays.blank(start, stop)
            writer = SequenceWriter(self._arrays, start, stop, "*")
            for name, size in self._dummies.items():
                token_id = self._shards.recipe.slots[name].token_id
                rope = rope_of(self._shards, self._layout, name, size)
                first = writer.put(token_id, size.tokens, IGNORE, rope)
                if not self._media[name].travels:  # per phase, features of dummies do not
                    self._media[name].dummy_positions = np.arange(first, first + size.tokens)
        for start, stop in pairwise(self._starts[len(self._lengths) :].tolist()):  # the padding of a fixed length
            self._arrays.blank(start, stop)
        for team in self._joined:
            # What pads a team's slices is one sequence more, which members have in parts as they have the others.
            last, first = team.at[-1], max(0, self._share.rank % team.size * team.tokens - int(team.borders[-1]))
            start, stop = int(self._starts[last] + self._held[last]), int(self._starts[last + 1])
            self._arrays.blank(start, stop, first, first)
        return [partial(self._fill, at, stored) for at, stored in self._stored.items()]

    def _fill(self, at: int, stored: _Stored) -> None:
        """Read a stored sample, write its sequence, and decode its parts. The memory of what fails is blank."""
        of, plan, number, started = self._assembler, self._share.plan, stored.number, time.perf_counter()
        known_crash, recipe = of.watch.begin(stored.row), self._shards.recipe_of(stored.row)
        failures: list[DataError] = []
        try:
            sample = stored.sample or StoredSample(self._shards.index, of.opened, stored.row)
            stored.sample = None
            blanks = [] if number is None else [partial(self.blank, number, sample)]
            blanks += [partial(media.blank, item) for media, item, _ in stored.parts]
            try:
                if known_crash is not None:
                    raise DataError(sample.shard, sample.key, "*", f"its worker {known_crash}")
                needs, name, ids = self._needs(stored, recipe)
                payloads = {} if ids is not None and not needs["kept"] else sample.read(recipe, **needs)
            except DataError as failure:
                failures.append(kept(failure))
                for blank in blanks:
                    blank()
            else:
                read = time.perf_counter()
                works = [] if number is None else [partial(self._sequence, at, number, sample, payloads, name, ids)]
                in_pass = plan.pass_of(at, self._shards.seed) if stored.parts else Pass()
                for media, item, part in stored.parts:
                    member = sample.member_of(part)
                    generator = partial(sample.generator, in_pass, part - sample.parts.start)
                    member_field = sample.members[member].field
                    works.append(partial(media.decode, item, payloads[member], member_field, recipe, generator))
                for work, blank in zip(works, blanks, strict=True):
                    if failures and not self._is_awaited:
                        break  # The whole sample is left out.
                    try:
                        work()
                    except Exception as error:  # noqa: BLE001 - decoders raise anything, and it fails the sample
                        failures.append(kept(located(error, sample)))
                        blank()
                if failures and number is not None and not plan.parts:
                    self.blank(number, sample)  # It may stay, with a failed part, in a step that shares samples.
        except MemoryError as error:
            raise out_of_memory(error, self._shards.index, self._shards.recipe, self._rows, stored.row) from error
        with self._lock:
            if failures:
                self._failures[at] = failures
            else:
                self._seconds["reading"] += read - started
                self._seconds["decoding"] += time.perf_counter() - read
        of.watch.end()

    def _sequence(
        self, at: int, number: int, sample: StoredSample, payloads: Payloads, name: Any, ids: NDArray[np.int32] | None
    ) -> None:
        """Write the sequence of a sample, or of a piece of a document, and keep fields. `name`, `ids`: as `_needs`."""
        plan, recipe = self._share.plan, self._shards.recipe_of(sample.row)
        if plan.ranges is None:
            self.write(number, sample, payloads)
        else:

            def tokenized() -> tuple[NDArray[np.int32], int]:
                made = sample.token_ids(recipe, payloads)
                return made, made.nbytes

            if ids is None:
                ids = tokenized()[0] if name is None else self._assembler.opened.texts.made(name, tokenized)
            first, count = int(plan.ranges.first[at]), int(plan.llm_positions[at])
            has_labels = int(self._shards.index.loss_tokens[sample.row]) > 0
            self._write_piece(number, ids[first : first + count], has_labels=has_labels)
        if recipe.keep:
            self._kept[at] = sample.kept_values(recipe, payloads)

    def write(self, number: int, sample: StoredSample, payloads: Payloads) -> None:
        """Write one sample's sequence into its slices. Raises FieldError if the index has another number of tokens."""
        recipe = self._shards.recipe_of(sample.row)
        field = sample.text_field(recipe)
        sized, slots = ({name: media.slots_of(number) for name, media in self._media.items()} for _ in range(2))

        def size_of(modality: str, _member: int) -> PartSize:
            for slot in sized[modality]:
                return self._media[modality].sizes[slot]
            raise FieldError(field, f"the text yields more {modality} parts than indexed: {WHY_COUNTS_DIFFER}")

        if not self._has_tokens(number):
            self._hold_none(number)
            return
        spans = sample.spans(recipe, payloads, size_of)
        start, stop = self._starts[number : number + 2].tolist()
        text, text_stop = self._text_starts[number : number + 2].tolist()
        # Where the whole sequence would begin in the microbatch, and the tokens that this rank has.
        length, own, count, arrays = int(self._lengths[number]), start, int(self._held[number]), self._arrays
        if is_cut := count < length:
            start, stop, text, text_stop, arrays = 0, length, 0, length, arrays.like(length)
        elif self._joined:
            stop = start + length
        shift, held = own - int(self._first[number]) - start, (own, own + count) if is_cut else None
        writer = SequenceWriter(arrays, start, start + length, field)
        slot, is_text = -1, np.ones(length if is_cut else 0, np.bool_)
        for span in spans:
            if isinstance(span, MediaSlot):
                media = self._media[span.modality]
                if span.first == 0:
                    slot = next(slots[span.modality])
                rope = media.ropes[slot]
                rope = None if rope is None else rope[:, span.first : span.first + span.tokens]
                is_whole = span.tokens == media.slot_tokens[slot]
                rope_span = media.modality.rope_span(media.sizes[slot]) if is_whole else None
                token_id = recipe.slots[span.modality].token_id
                first = writer.put(token_id, span.tokens, IGNORE, rope, rope_span)
                media.put(slot, first + shift, span.first, span.tokens, held)
                is_text[first - start : first - start + span.tokens] = False
            else:
                ids = span.token_ids
                first = writer.put(ids, len(ids), ids if span.loss else IGNORE)
                if span.leads:
                    arrays.labels[first] = IGNORE
                if text + len(ids) > text_stop:
                    raise writer.disagreement()
                arrays.text_ids[text : text + len(ids)] = ids
                text += len(ids)
        if writer.cursor != writer.end:
            raise writer.disagreement()
        found = int(np.count_nonzero(arrays.labels[start : writer.end] != IGNORE))
        if found != (planned := int(self._shards.index.loss_tokens[sample.row])):
            reason = f"the index says {planned} loss tokens, the text yields {found}: {WHY_COUNTS_DIFFER}"
            raise FieldError(field, reason)
        if stop > writer.end:
            arrays.blank(writer.end, stop, length, writer.position)
        if self._joined:
            arrays.labels[start : stop - 1], arrays.labels[stop - 1] = arrays.labels[start + 1 : stop], IGNORE
        if is_cut:  # Take what this rank has.
            first, here = int(self._first[number]), slice(int(self._first[number]), int(self._first[number]) + count)
            for name in ("input_ids", "labels", "position_ids"):
                getattr(self._arrays, name)[..., own : own + count] = getattr(arrays, name)[..., here]
            of_text, text = arrays.input_ids[here][is_text[here]], int(self._text_starts[number])
            self._arrays.text_ids[text : text + len(of_text)] = of_text
            self._text_lengths[number] = len(of_text)
        self._written[number] = True

    def _write_piece(self, number: int, token_ids: NDArray[np.int32], *, has_labels: bool) -> None:
        """Write the tokens of a piece of a document. The first has no label: what precedes it is not in the window."""
        (start, stop), arrays = self._starts[number : number + 2].tolist(), self._arrays
        arrays.input_ids[start:stop] = arrays.text_ids[start:stop] = token_ids
        arrays.labels[start:stop] = token_ids if has_labels else IGNORE
        arrays.labels[start] = IGNORE
        arrays.position_ids[:, start:stop] = np.arange(stop - start) + self._counts_from[number]
        self._written[number] = True

    def blank(self, number: int, sample: StoredSample) -> None:
        """Write a sequence without loss, as long as planned, for a sample that failed."""
        start = int(self._starts[number])
        first, stop = int(self._counts_from[number]), int(self._starts[number + 1])
        self._arrays.blank(start, start + int(self._held[number]) if self._joined else stop, first, first)
        self._arrays.text_ids[self._text_starts[number] : self._text_starts[number + 1]] = 0
        self._valid[number] = False
        if self._held[number] < self._lengths[number]:
            self._hold_none(number)
            return
        slots = {name: media.slots_of(number) for name, media in self._media.items()}
        for part in sample.parts:
            name = self._shards.index.modality_of(part)
            media, slot = self._media[name], next(slots[name])
            tokens = media.sizes[slot].tokens
            media.put(slot, start, 0, tokens)
            start += tokens
        self._written[number] = True

    def _hold_none(self, number: int) -> None:
        """Take no token of the media of a sample: none is here, or it failed."""
        for media in self._media.values():
            for slot in media.slots_of(number):
                media.put(slot, 0, 0, media.sizes[slot].tokens, (0, 0))
        self._written[number] = True

    def finish(self) -> Assembled:
        """Return the batch over this memory. Raises RuntimeError where a sample or part was not written."""
        failures = [failure for at in self._stored for failure in self._failures.get(at, ())]
        if failures and not self._is_awaited:
            # Build it again from the samples without failures: memory is laid out for all, and few fail.
            again = Pages(self._assembler, self._share, self._samples[~np.isin(self._samples, list(self._failures))])
            for task in again.fill(self._memory):
                task()
            rest = again.finish()
            return Assembled(rest.batch, [*failures, *rest.failures], rest.seconds)
        started = time.perf_counter()
        media = {name: of.batch() for name, of in self._media.items()}
        check_written(self._written, "samples")
        share, plan, samples, arrays = self._share, self._share.plan, self._samples, self._arrays
        placed = {name: of.positions() for name, of in self._media.items()}
        llm = self._llm({name: positions for name, (positions, _) in placed.items()})
        teams, index = self._teams(), self._shards.index
        # The text that is here, without what slices were given room for.
        lengths, ids = self._text_lengths, arrays.text_ids
        if lengths.sum() < len(ids):
            begins = self._text_starts[:-1]
            ids = np.concatenate([ids[at : at + count] for at, count in zip(begins, lengths, strict=True)])
        # The kept fields: for each name a value of each sample, None for a sample that failed.
        of_samples = [self._kept.get(at, {}) if at not in self._failures else {} for at in samples.tolist()]
        ranges = zip(self._first.tolist(), (self._first + self._held).tolist(), strict=True)
        rows: list[int] = self._rows.tolist()
        sample_ids: tuple[SampleId, ...] = tuple((index.shard_of(row).url, index.key(row)) for row in rows)
        batch = Batch(
            text=TextBatch(input_ids=torch.from_numpy(ids), cu_seqlens=cu_seqlens(starts_of(lengths))),
            media=media,
            llm=llm,
            sample_ids=sample_ids,
            pieces=tuple(index.piece[self._rows].tolist()),
            token_ranges=tuple(ranges)[: len(rows)] if self._joined or plan.ranges is not None else (),
            plan=plan,
            step=plan.step,
            microbatch=share.index,
            num_microbatches=plan.num_microbatches,
            dp_size=plan.num_ranks,
            loss_tokens=counted_labels(llm, teams),
            global_loss_tokens=plan.global_loss_tokens,
            routes={name: route for name, (_, route) in placed.items() if route is not None},
            teams=teams,
            sources=torch.from_numpy(plan.source[samples]) if plan.sources else None,
            fields={name: [kept.get(name) for kept in of_samples] for name in self._assembler.kept},
            peer=share.peer,
        )
        return Assembled(batch, failures, {**self._seconds, "packing": time.perf_counter() - started})

    def _teams(self) -> tuple[Team, ...]:
        """Return the teams of the samples, which come by size."""
        share, starts, sizes = self._share, self._starts, self._share.plan.team_size[self._samples]
        # Of each team its size, its sequences, which are consecutive, and borders of whole sequences.
        found = [(of.size, of.at, np.append(of.borders, of.size * of.tokens)) for of in self._joined]
        for size in () if self._joined else np.unique(sizes[sizes > 1])[::-1].tolist():
            at = np.flatnonzero(sizes == size)
            found.append((size, at, starts[at[0] : at[-1] + 2] - starts[at[0]]))
        teams: list[Team] = []
        for size, at, borders in found:
            place, samples = share.rank % size, slice(int(at[0]), min(int(at[-1]) + 1, len(self._rows)))
            is_full = self._joined and borders[-1] == borders[-2]  # no sequence of padding
            teams.append(
                Team(
                    size=size,
                    place=place,
                    ranks=tuple(range(share.rank - place, share.rank - place + size)),
                    rows=slice(int(starts[at[0]]), int(starts[at[-1] + 1])),
                    cu_seqlens=cu_seqlens(borders[:-1] if is_full else borders),
                    samples=samples,
                    valid=torch.from_numpy(self._valid[samples]),
                )
            )
        return tuple(teams)

    def _llm(self, media_positions: Mapping[str, Ints]) -> LLMBatch:
        starts, held, arrays = self._starts, self._held, self._arrays
        if self._layout.attention == "window":
            starts, held = starts[[0, -1]], starts[-1:] if len(held) else held
        shape: tuple[int, ...] = (int(starts[-1]),)
        mask = None
        if isinstance(self._layout, Padded):
            num_rows = len(starts) - 1
            shape = (num_rows, int(starts[-1]) // max(1, num_rows))
            starts = starts_of(self._lengths)
            mask = torch.from_numpy(row_mask(self._lengths, shape[1]))
        lengths = np.zeros(len(starts) - 1, np.int32)  # the padding of a fixed length is a sequence of 0 tokens
        lengths[: len(held)] = held
        labels, is_joined = torch.from_numpy(arrays.labels.reshape(shape)), self._share.plan.joined_to is not None
        mrope = self._layout.positions == "mrope"
        restart, *_ = positions = torch.from_numpy(arrays.position_ids.reshape(len(arrays.position_ids), *shape))
        return LLMBatch(
            input_ids=torch.from_numpy(arrays.input_ids.reshape(shape)),
            position_ids=positions[1:] if mrope else restart,
            labels=None if is_joined else labels,
            shift_labels=labels if is_joined else None,
            cu_seqlens=cu_seqlens(starts),
            lengths=torch.from_numpy(lengths),
            max_seqlen=self._layout.length or int(np.diff(starts).max(initial=0)),
            attention_mask=mask,
            restart_position_ids=restart if mrope else None,
            media_positions={name: torch.from_numpy(of) for name, of in media_positions.items()},
            media_owners={name: torch.from_numpy(of.owner) for name, of in self._media.items() if of.travels},
            dummies={name: size.tokens for name, size in self._dummies.items()},
        )


def located(error: Exception, sample: StoredSample) -> DataError:
    """Return the failure of a sample that an exception is, its cause. Raises as `StoredSample.refuse_moved`."""
    known = isinstance(error, FieldError)
    if isinstance(error, FieldError):
        sample.refuse_moved(error)
    failure = as_field_error(error, "decoded").at(sample.shard, sample.key)
    failure.__cause__ = error.__cause__ if known else error
    return failure


TOKEN_BYTES = 48
"""A token of text: its id twice, its label, and three positions, int64 each."""

_NAMED = 3


def shard_loader(index: Index, shards: OpenShards, recipe_of: Callable[[int], Recipe]) -> Callable[..., Sample]:
    """Return (row, of: Pass) -> decoded `Sample` of an index; `recipe_of` returns the recipe for a row."""

    def load(row: int, of: Pass = Pass()) -> Sample:  # noqa: B008 - a frozen value
        stored, recipe = StoredSample(index, shards, row), recipe_of(row)
        try:
            return stored.decode(recipe, of)
        except FieldError as error:
            stored.refuse_moved(error)
            raise error.at(stored.shard, stored.key) from error.__cause__
        except MemoryError as error:
            raise out_of_memory(error, index, recipe, np.array([row]), row) from error
        except DataError:
            raise
        except Exception as error:  # any exception of a decoder fails the sample
            raise as_field_error(error, "decoded").at(stored.shard, stored.key) from error

    return load


def shard_refusal(index: Index) -> Callable[[int, str], Exception]:
    """Return (row of an index, reason) -> the failure of that sample."""
    return lambda row, reason: DataError(index.shard_of(row).url, index.key(row), "*", f"its worker {reason}")


def sample_bytes(index: Index, recipe: Recipe, row: int) -> int:
    """Return the bytes that one sample takes in a batch and while it is decoded."""
    numbers = index.part_range(row)
    members = index.members(row)
    parts = [
        MeasuredPart(index.modality_of(part), index.member_of(part, len(members)), size)
        for part, size in zip(numbers, index.sizes(numbers, recipe), strict=True)
    ]
    return decoded_bytes(parts, members, recipe) + TOKEN_BYTES * int(index.llm_tokens[row])


def out_of_memory(
    error: MemoryError, index: Index, recipe: Recipe, rows: NDArray[np.int64], row: int | None = None
) -> MemoryError:
    """Return an error with the largest samples of a microbatch, and the one that was being decoded."""
    sizes = {int(each): sample_bytes(index, recipe, int(each)) for each in rows}
    largest = sorted(sizes, key=lambda each: (-sizes[each], each))[:_NAMED]
    named = "; ".join(f"{index.shard_of(each).url}: {index.called(each)}, {sizes[each]} bytes" for each in largest)
    where = "" if row is None else f" at {index.called(row)} of {index.shard_of(row).url}"
    return MemoryError(
        f"not enough memory{where} for a microbatch of {len(sizes)} samples, {sum(sizes.values())} bytes by the index "
        f"({error}); the largest: {named}. Lower batch_size, cap Balance(max_tokens=...), or leave such samples out "
        "with Limits.sample_decoded_bytes or quarantine="
    )
