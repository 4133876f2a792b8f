"""What batches of shards are made of, as values: the shards of an index, and a layout or a collate_fn; and batches of a
layout: threads write samples, or pieces of documents, straight into the memory of a microbatch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from orchdata.building.assembler import Assembled, Assembler, Share, Task, kept
from orchdata.building.collate import SampleAssembler
from orchdata.building.media_pages import (
    MediaPages,
    MediaWork,
    PageSource,
    own_work,
    planned_work,
)
from orchdata.building.memory import Memory
from orchdata.building.pages import Pages
from orchdata.loaders.errors import DataError, FieldError, StaleIndexError, as_field_error
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample, Wanted, read_ahead
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_required
from orchdata.loaders.samples.measure import MeasuredPart, decoded_bytes
from orchdata.loaders.samples.members import KeptValue
from orchdata.loaders.samples.sample import Sample
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.loaders.watch import Watch
from orchdata.planning.layout import Layout

Ids = NDArray[np.int32]


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
class ShardContent:
    """Batches of shards in a layout. `encoders` are modalities that every batch has, if necessary as a dummy."""

    shards: IndexedShards
    layout: Layout
    encoders: tuple[str, ...]
    preloads: ClassVar = ("orchdata.dataset.preload",)

    def open(self, watch: Watch) -> Assembler:
        shards = self.shards.open()
        pages = PageSource(
            index=self.shards.index,
            recipes=self.shards.recipes,
            layout=self.layout,
            encoders=self.encoders,
        )
        return PackedAssembler(source=pages, shards=shards, watch=watch, seed=self.shards.seed)

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)


@dataclass(frozen=True, kw_only=True)
class SampleContent:
    """Batches of a user's `collate_fn` from decoded samples of shards."""

    shards: IndexedShards
    collate_fn: Callable[..., Any]
    preloads: ClassVar = ShardContent.preloads

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
class PackedAssembler:
    """Builds batches from an index's samples, or from windows of its documents: `source` has the layout."""

    source: PageSource
    shards: OpenShards
    watch: Watch
    seed: int = 0

    @property
    def reads(self) -> ReadBytes:
        return self.shards.reads

    def begin(self, share: Share) -> PackedAssembly:
        indices = share.plan.places(share.rank, share.microbatch)
        if share.plan.parts:
            work = {name: planned_work(share, name) for name in self.source.encoders}
            return PackedAssembly(self, share, indices, work)
        return self.begin_with(share, indices)

    def read_ahead(self, wanted: Iterable[Wanted]) -> object:
        return read_ahead(self.source.index, self.shards, self.source.recipe_of, wanted)

    def load_alone(self, row: int) -> None:
        index = self.source.index
        self.watch.load(row, shard_loader(index, self.shards, self.source.recipe_of), shard_refusal(index))

    def begin_with(self, share: Share, indices: NDArray[np.int64]) -> PackedAssembly:
        """Begin with some of the rank's samples, by their index in the global batch. This rank encodes their parts."""
        rows = share.plan.row[indices]
        work = {name: own_work(self.source.index, rows, indices, name) for name in self.source.encoders}
        return PackedAssembly(self, share, indices, work)


@dataclass
class _Wanted:
    """What one stored sample gives a microbatch: its sequence, the `number`-th of the pages, and parts to encode.
    `sample` reads it, if it was read ahead.
    """

    row: int
    number: int | None = None
    parts: list[tuple[MediaPages, int, int]] = field(default_factory=list)  # pages, number in them, part of the index
    sample: StoredSample | None = None


class PackedAssembly:
    """One microbatch under construction. Samples are identified by their index in the global batch."""

    def __init__(
        self, assembler: PackedAssembler, share: Share, indices: NDArray[np.int64], work: Mapping[str, MediaWork]
    ) -> None:
        self._assembler = assembler
        self._share = share
        self._indices = indices
        rows = share.plan.row
        self._pages = Pages(assembler.source, share, indices, work)
        self.num_bytes = sum(self._pages.num_bytes)
        self._failures: dict[int, list[DataError]] = {}
        self._kept: dict[int, dict[str, KeptValue]] = {}
        self._seconds = {"reading": 0.0, "decoding": 0.0}
        self._lock = threading.Lock()
        self._wanted = {at: _Wanted(int(rows[at]), number) for number, at in enumerate(indices.tolist())}
        for name, media in self._pages.media.items():
            encoded = zip(work[name].encoded.tolist(), work[name].encoded_sample.tolist(), strict=True)
            for number, (part, at) in enumerate(encoded):
                self._wanted.setdefault(at, _Wanted(int(rows[at]))).parts.append((media, number, part))

    def wanted(self) -> Iterator[Wanted]:
        source = self._assembler.source
        for each in self._wanted.values():
            text, parts, kept = self._needs(each, source.recipe_of(each.row), self._kept_ids(each))
            if not (text or parts or kept):
                continue
            each.sample = StoredSample(source.index, self._assembler.shards, each.row)
            yield Wanted(each.row, text, parts, kept, each.sample)

    def _needs(self, wanted: _Wanted, recipe: Recipe, ids: Ids | None) -> tuple[bool, list[int], bool]:
        """Return what is read of a sample: whether its text, which parts, and whether what is kept."""
        is_here = wanted.number is not None
        has_text = wanted.number is not None and self._pages.has_tokens(wanted.number) and ids is None
        return has_text, [part for _, _, part in wanted.parts], is_here and bool(recipe.keep)

    def _ids_name(self, wanted: _Wanted) -> tuple[str, str, str, int] | None:
        """Return the name of the ids of a document that a window cuts, so that the next need not tokenize it; else
        None.
        """
        plan, index = self._share.plan, self._assembler.source.index
        if plan.ranges is None or wanted.number is None:
            return None
        is_cut = plan.llm_positions[self._indices[wanted.number]] < index.llm_tokens[wanted.row]
        return ("token ids", index.fingerprint, index.build_id, wanted.row) if is_cut else None

    def _kept_ids(self, wanted: _Wanted) -> Ids | None:
        name = self._ids_name(wanted)
        ids: Ids | None = None if name is None else self._assembler.shards.texts.get(name)
        return ids

    def fill(self, memory: Memory) -> list[Task]:
        """Lay the batch out in memory; a task for each stored sample. Raises MemoryError, naming the largest."""
        self._memory, source = memory, self._assembler.source
        try:
            self._pages.lay([memory.take(num_bytes) for num_bytes in self._pages.num_bytes])
        except MemoryError as error:
            raise out_of_memory(error, source.index, source.recipe, self._share.plan.row[self._indices]) from error
        return [partial(self._fill, at, wanted) for at, wanted in self._wanted.items()]

    @property
    def _is_awaited(self) -> bool:
        """Whether a failure must leave its memory as planned: other ranks wait for it, or it is in a full window."""
        return self._share.plan.keeps_shapes or self._share.plan.ranges is not None

    def finish(self) -> Assembled:
        failures = [failure for at in self._wanted for failure in self._failures.get(at, ())]
        if failures and not self._is_awaited:
            return self._without_failures(failures)
        started = time.perf_counter()
        batch = self._pages.batch(self._fields())
        return Assembled(batch, failures, {**self._seconds, "packing": time.perf_counter() - started})

    def _fields(self) -> dict[str, list[KeptValue]]:
        """Return the kept fields: for each name a value of each sample, None for a sample that failed."""
        names = self._assembler.source.kept
        if not names:
            return {}
        samples = [self._kept.get(at, {}) if at not in self._failures else {} for at in self._indices.tolist()]
        return {name: [sample.get(name) for sample in samples] for name in names}

    def _fill(self, at: int, wanted: _Wanted) -> None:
        watch = self._assembler.watch
        known_crash = watch.begin(wanted.row)
        try:
            self._read_and_decode(at, wanted, known_crash)
        except MemoryError as error:
            source, rows = self._assembler.source, self._share.plan.row[self._indices]
            raise out_of_memory(error, source.index, source.recipe, rows, wanted.row) from error
        watch.end()

    def _read_and_decode(self, at: int, wanted: _Wanted, known_crash: str | None) -> None:
        started = time.perf_counter()
        source = self._assembler.source
        sample, recipe = wanted.sample, source.recipe_of(wanted.row)
        sample, wanted.sample = sample or StoredSample(source.index, self._assembler.shards, wanted.row), None
        try:
            if known_crash is not None:
                raise DataError(sample.shard, sample.key, "*", f"its worker {known_crash}")
            ids = self._kept_ids(wanted)
            text, parts, keeps = self._needs(wanted, recipe, ids)
            is_known = ids is not None and not keeps
            payloads = {} if is_known else sample.read(recipe, text=text, parts=parts, kept=keeps)
        except DataError as failure:
            failures = [kept(failure)]
            if wanted.number is not None:
                self._pages.blank(wanted.number, sample)
            for media, number, _ in wanted.parts:
                media.blank(number)
        else:
            read = time.perf_counter()
            failures = self._decode(at, sample, recipe, wanted, payloads, ids)
        with self._lock:
            if failures:
                self._failures[at] = failures
                return
            self._seconds["reading"] += read - started
            self._seconds["decoding"] += time.perf_counter() - read

    def _decode(
        self,
        at: int,
        sample: StoredSample,
        recipe: Recipe,
        wanted: _Wanted,
        payloads: Mapping[int, bytes | memoryview],
        ids: Ids | None,
    ) -> list[DataError]:
        """Write what was read into the pages, and return what failed; its memory is blank."""
        failures: list[DataError] = []

        def attempt(work: Callable[[], None], undo: Callable[[], None]) -> None:
            if failures and not self._is_awaited:
                return  # The whole sample is left out.
            try:
                work()
            except Exception as error:  # noqa: BLE001 - decoders raise anything, and it fails the sample
                failures.append(kept(located(error, sample)))
                undo()

        pages, number = self._pages, wanted.number
        if number is not None:
            write = partial(self._write, at, wanted, sample, recipe, payloads, ids)
            attempt(write, partial(pages.blank, number, sample))
        of = self._share.plan.pass_of(at, self._assembler.seed) if wanted.parts else Pass()
        for media, item, part in wanted.parts:
            member = sample.member_of(part)
            generator = partial(sample.generator, of, part - sample.parts.start)
            decode = partial(media.decode, item, payloads[member], sample.members[member].field, recipe, generator)
            attempt(decode, partial(media.blank, item))
        if failures and number is not None and not self._share.plan.parts:
            pages.blank(number, sample)  # It may stay, with a failed part, in a step that shares samples.
        return failures

    def _write(
        self,
        at: int,
        wanted: _Wanted,
        sample: StoredSample,
        recipe: Recipe,
        payloads: Mapping[int, bytes | memoryview],
        ids: Ids | None,
    ) -> None:
        """Write a sample's sequence, or its piece in a window, and keep its fields."""
        number, plan, texts = wanted.number, self._share.plan, self._assembler.shards.texts
        assert number is not None
        if plan.ranges is None:
            self._pages.write(number, sample, payloads)
        else:

            def tokenized() -> tuple[Ids, int]:
                made = sample.token_ids(recipe, payloads)
                return made, made.nbytes

            if ids is None:
                name = self._ids_name(wanted)
                ids = tokenized()[0] if name is None else texts.made(name, tokenized)
            first, has_labels = (
                int(plan.ranges.first[at]),
                int(self._assembler.source.index.loss_tokens[wanted.row]) > 0,
            )
            self._pages.write_piece(number, ids[first : first + int(plan.llm_positions[at])], has_labels=has_labels)
        if recipe.keep:
            self._kept[at] = sample.kept_values(recipe, payloads)

    def _without_failures(self, failures: Sequence[DataError]) -> Assembled:
        """Build the microbatch again from the samples without failures: memory is laid out for all, and few fail."""
        indices = self._indices[~np.isin(self._indices, list(self._failures))]
        again = self._assembler.begin_with(self._share, indices)
        for task in again.fill(self._memory):
            task()
        rest = again.finish()
        return Assembled(rest.batch, [*failures, *rest.failures], rest.seconds)


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
