"""What batches of shards are made of, as values: the shards of an index, and a layout or a collate_fn.

Windows of concatenated documents: threads write pieces of documents straight into the memory of a microbatch.

A window has some tokens of each document, and a document is tokenized as a whole. The ids of a document that is cut are
kept with the open shards, so that the windows after it need not read and tokenize it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.batch import Batch, SampleId
from orchdata.batch.tensors import IGNORE, LLMBatch, TextBatch
from orchdata.building.assembler import Assembled, Assembler, Share, Task, kept
from orchdata.building.collate import SampleAssembler
from orchdata.building.media_pages import PageSource, cu_seqlens, starts_of
from orchdata.building.memory import Memory, Reservation
from orchdata.building.pages import SequenceArrays
from orchdata.building.shard_content import PackedAssembler, located, out_of_memory, shard_loader, shard_refusal
from orchdata.loaders.errors import DataError, StaleIndexError
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample, Wanted, read_ahead
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_required
from orchdata.loaders.samples.members import KeptValue
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.loaders.watch import Watch
from orchdata.planning.layout import Layout, Packed, window_length


@dataclass(frozen=True, kw_only=True)
class IndexedShards:
    """Shards as an index describes them.

    Attributes:
        index: pickles as its path.
        build_id: of the index when the spec was created: a rebuilt one would result in other batches.
        recipes: as of `PageSource`.
        seed: of the generators that decoding draws from.
        containers: of the user's, which open shards, by identity; of all sources of a mixture together.
        files: where the shards are.
        blank: rows that are delivered as failed, and never read.
    """

    index: Index
    build_id: str
    recipes: tuple[Recipe, ...]
    seed: int = 0
    containers: Mapping[str, Container] = field(default_factory=dict)
    files: Files = PLAIN_FILES
    blank: frozenset[int] = frozenset()

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
    """Batches of shards, packed or padded, or windows of concatenated documents.

    Attributes:
        encoders: modalities that every batch has, if necessary as a dummy.
    """

    shards: IndexedShards
    layout: Layout
    encoders: tuple[str, ...]

    def open(self, watch: Watch) -> Assembler:
        shards = self.shards.open()
        pages = PageSource(
            index=self.shards.index,
            recipes=self.shards.recipes,
            layout=self.layout,
            encoders=self.encoders,
        )
        if window_length(self.layout) is not None:
            return WindowAssembler(source=pages, shards=shards, watch=watch)
        return PackedAssembler(source=pages, shards=shards, watch=watch, seed=self.shards.seed)

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)


@dataclass(frozen=True, kw_only=True)
class SampleContent:
    """Batches of a user's `collate_fn` from decoded samples of shards."""

    shards: IndexedShards
    collate_fn: Callable[..., Any]

    def open(self, watch: Watch) -> Assembler:
        shards = self.shards.open()
        load = shard_loader(self.shards.index, shards, self.shards.recipe_of)
        return SampleAssembler(
            load=load,
            watch=watch,
            refuse=shard_refusal(self.shards.index),
            collate_fn=self.collate_fn,
            reads=shards.reads,
            seed=self.shards.seed,
            ahead=partial(read_ahead, self.shards.index, shards, self.shards.recipe_of),
        )

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)


Ids = NDArray[np.int32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WindowAssembler:
    """Builds windows from the documents of an index."""

    source: PageSource
    shards: OpenShards
    watch: Watch

    @property
    def reads(self) -> ReadBytes:
        return self.shards.reads

    def begin(self, share: Share) -> WindowAssembly:
        return WindowAssembly(self, share)

    def read_ahead(self, wanted: Iterable[Wanted]) -> object:
        return read_ahead(self.source.index, self.shards, self.source.recipe_of, wanted)

    def load_alone(self, row: int) -> None:
        index = self.source.index
        self.watch.load(row, shard_loader(index, self.shards, self.source.recipe_of), shard_refusal(index))


class WindowAssembly:
    """One window under construction. Pieces are identified by their number in the window.

    Attributes:
        num_bytes: memory that `fill` takes.
    """

    def __init__(self, assembler: WindowAssembler, share: Share) -> None:
        plan = share.plan
        assert plan.ranges is not None
        self._assembler = assembler
        self._share = share
        self._indices = plan.places(share.rank, share.microbatch)
        self._rows = plan.row[self._indices]
        self._first, self._tokens = plan.ranges.first[self._indices], plan.llm_positions[self._indices]
        self._pages = WindowPages(assembler.source, self._rows, self._first, self._tokens)
        self.num_bytes = sum(self._pages.num_bytes)
        self._failures: dict[int, DataError] = {}
        self._kept: dict[int, dict[str, KeptValue]] = {}
        self._seconds = {"reading": 0.0, "decoding": 0.0}
        self._lock = threading.Lock()

    def wanted(self) -> Iterator[Wanted]:
        source, texts = self._assembler.source, self._assembler.shards.texts
        for number, row in enumerate(self._rows.tolist()):
            keeps = bool(source.recipe_of(row).keep)
            is_known = self._is_cut(number) and texts.get(self._name(row)) is not None
            if keeps or not is_known:
                yield Wanted(row, not is_known, (), keeps)

    def fill(self, memory: Memory) -> list[Task]:
        """Lay the window out in memory; a task for each piece. Raises MemoryError, naming the largest documents."""
        try:
            self._pages.lay([memory.take(num_bytes) for num_bytes in self._pages.num_bytes])
        except MemoryError as error:
            raise self._out_of_memory(error) from error
        return [partial(self._fill, number) for number in range(len(self._rows))]

    def finish(self) -> Assembled:
        started = time.perf_counter()
        batch = self._pages.batch(self._share, self._indices, self._fields())
        failures = [self._failures[number] for number in sorted(self._failures)]
        return Assembled(batch, failures, {**self._seconds, "packing": time.perf_counter() - started})

    def _fields(self) -> dict[str, list[KeptValue]]:
        """Return the kept fields: for each name a value of each piece, None where its document failed."""
        pieces = [self._kept.get(number, {}) for number in range(len(self._rows))]
        return {name: [piece.get(name) for piece in pieces] for name in self._assembler.source.kept}

    def _fill(self, number: int) -> None:
        row, watch = int(self._rows[number]), self._assembler.watch
        known_crash = watch.begin(row)
        try:
            self._read_and_write(number, row, known_crash)
        except MemoryError as error:
            raise self._out_of_memory(error, row) from error
        watch.end()

    def _read_and_write(self, number: int, row: int, known_crash: str | None) -> None:
        started = time.perf_counter()
        source = self._assembler.source
        sample, recipe = StoredSample(source.index, self._assembler.shards, row), source.recipe_of(row)
        ids = self._assembler.shards.texts.get(self._name(row)) if self._is_cut(number) else None
        try:
            if known_crash is not None:
                raise DataError(sample.shard, sample.key, "*", f"its worker {known_crash}")
            payloads: Mapping[int, bytes | memoryview] = {}
            if ids is None or recipe.keep:
                payloads = sample.read(recipe, text=ids is None, parts=(), kept=bool(recipe.keep))
        except DataError as failure:
            self._fail(number, failure)
            return
        read = time.perf_counter()
        try:
            ids = self._ids(number, sample, recipe, payloads) if ids is None else ids
            values = sample.kept_values(recipe, payloads) if recipe.keep else {}
        except Exception as error:  # noqa: BLE001 - tokenizers raise anything, and it fails the document
            self._fail(number, located(error, sample))
            return
        first = int(self._first[number])
        has_labels = int(source.index.loss_tokens[row]) > 0
        self._pages.write(number, ids[first : first + int(self._tokens[number])], has_labels=has_labels)
        with self._lock:
            self._kept[number] = values
            self._seconds["reading"] += read - started
            self._seconds["decoding"] += time.perf_counter() - read

    def _ids(
        self, number: int, sample: StoredSample, recipe: Recipe, payloads: Mapping[int, bytes | memoryview]
    ) -> Ids:
        """Return the token ids of a whole document, and keep them if it is cut. Raises as `StoredSample.token_ids`."""
        if not self._is_cut(number):
            return sample.token_ids(recipe, payloads)

        def tokenized() -> tuple[Ids, int]:
            ids = sample.token_ids(recipe, payloads)
            return ids, ids.nbytes

        ids: Ids = self._assembler.shards.texts.made(self._name(sample.row), tokenized)
        return ids

    def _is_cut(self, number: int) -> bool:
        return int(self._tokens[number]) < int(self._assembler.source.index.llm_tokens[int(self._rows[number])])

    def _name(self, row: int) -> tuple[str, str, str, int]:
        index = self._assembler.source.index
        return "token ids", index.fingerprint, index.build_id, row

    def _fail(self, number: int, failure: DataError) -> None:
        self._pages.blank(number)
        with self._lock:
            self._failures[number] = kept(failure)

    def _out_of_memory(self, error: MemoryError, row: int | None = None) -> MemoryError:
        source = self._assembler.source
        return out_of_memory(error, source.index, source.recipe, self._rows, row)


class WindowPages:
    """The memory of one window. `lay` provides it, and must be called first.

    Args:
        rows: documents of its pieces, int64 (num_pieces,). A rank without a window has none: all is padding then.
        first, tokens: int64 (num_pieces,), the first token of each piece in its document, and the number of tokens.

    Attributes:
        num_bytes: of each piece of memory that it needs.
    """

    def __init__(self, source: PageSource, rows: Ints, first: Ints, tokens: Ints) -> None:
        index, layout = source.index, source.layout
        assert isinstance(layout, Packed)
        assert layout.length is not None
        self._layout = layout
        self._length: int = layout.length
        self._ids: tuple[SampleId, ...] = tuple((index.shard_of(int(row)).url, index.key(int(row))) for row in rows)
        self._numbers = tuple(index.piece[rows].tolist())
        self._ranges = tuple(zip(first.tolist(), (first + tokens).tolist(), strict=True))
        self._starts = starts_of(tokens)
        reserved = self._reserved = Reservation()
        reserved.add("input_ids", (self._length,), np.int64)
        reserved.add("labels", (self._length,), np.int64)
        reserved.add("position_ids", (4 if layout.positions == "mrope" else 1, self._length), np.int64)
        reserved.add("text_ids", (int(self._starts[-1]),), np.int64)
        self.num_bytes = reserved.num_bytes
        self._written = np.zeros(len(rows), np.bool_)

    def lay(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Take pieces of memory of `num_bytes`, with any contents."""
        arrays = self._reserved.lay(memory)
        self._arrays = SequenceArrays(*(arrays[name] for name in SequenceArrays._fields))
        if not len(self._ids):
            self._arrays.blank(0, self._length)

    def write(self, number: int, token_ids: NDArray[np.int32], *, has_labels: bool) -> None:
        """Write the tokens of a piece, (tokens,). The first has no label: what precedes it is not in the window."""
        start, stop = self._place(number)
        arrays = self._arrays
        arrays.input_ids[start:stop] = arrays.text_ids[start:stop] = token_ids
        arrays.labels[start:stop] = token_ids if has_labels else IGNORE
        arrays.labels[start] = IGNORE
        arrays.position_ids[:, start:stop] = self._positions(start, stop)
        self._written[number] = True

    def blank(self, number: int) -> None:
        """Write a piece of a document that failed: id 0, no labels."""
        start, stop = self._place(number)
        first = int(self._positions(start, stop)[0])
        self._arrays.blank(start, stop, first, first)
        self._arrays.text_ids[start:stop] = 0
        self._written[number] = True

    def batch(self, share: Share, samples: Ints, fields: Mapping[str, list[KeptValue]]) -> Batch:
        """Return the batch over this memory, of the pieces with these indices in the global batch. Raises RuntimeError
        where a piece was not written.
        """
        if not self._written.all():
            raise RuntimeError(f"pieces {np.flatnonzero(~self._written).tolist()} of a window were never written")
        plan, arrays = share.plan, self._arrays
        return Batch(
            text=TextBatch(input_ids=torch.from_numpy(arrays.text_ids), cu_seqlens=cu_seqlens(self._starts)),
            media={},
            llm=self._llm(),
            sample_ids=self._ids,
            pieces=self._numbers,
            token_ranges=self._ranges,
            plan=plan,
            step=plan.step,
            microbatch=share.index,
            num_microbatches=plan.num_microbatches,
            dp_size=plan.num_ranks,
            loss_tokens=int((arrays.labels != IGNORE).sum()),
            global_loss_tokens=plan.global_loss_tokens,
            sources=torch.from_numpy(plan.source[samples]) if plan.sources else None,
            fields=fields,
        )

    def _llm(self) -> LLMBatch:
        arrays, is_padding = self._arrays, not len(self._ids)
        starts = self._starts
        if is_padding or self._layout.attention == "window":
            starts = np.array([0, self._length])
        restart, *_ = positions = torch.from_numpy(arrays.position_ids)
        mrope = self._layout.positions == "mrope"
        lengths = np.zeros(1, np.int32) if is_padding else np.diff(starts).astype(np.int32)
        return LLMBatch(
            input_ids=torch.from_numpy(arrays.input_ids),
            position_ids=positions[1:] if mrope else restart,
            labels=torch.from_numpy(arrays.labels),
            cu_seqlens=cu_seqlens(starts),
            lengths=torch.from_numpy(lengths),
            max_seqlen=self._length,
            restart_position_ids=restart if mrope else None,
            media_positions={},
            media_owners={},
            dummies={},
        )

    def _place(self, number: int) -> tuple[int, int]:
        start, stop = self._starts[number : number + 2].tolist()
        return start, stop

    def _positions(self, start: int, stop: int) -> Ints:
        return np.arange(start, stop) if self._layout.attention == "window" else np.arange(stop - start)
