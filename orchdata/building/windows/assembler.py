"""Windows of concatenated documents: threads write pieces of documents straight into the memory of a microbatch.

A window has some tokens of each document, and a document is tokenized as a whole. The ids of a document that is cut are
kept with the open shards, so that the windows after it need not read and tokenize it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from orchdata.building.assembler import Assembled, Share, Task, kept
from orchdata.building.collate import shard_loader, shard_refusal
from orchdata.building.media_pages import PageSource
from orchdata.building.memory import Memory
from orchdata.building.shard_content import located
from orchdata.building.shortage import out_of_memory
from orchdata.building.windows.pages import WindowPages
from orchdata.loaders.errors import DataError
from orchdata.loaders.index.stored import StoredSample, Wanted, read_ahead
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.kept import KeptValue
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.watch import Watch

Ids = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class WindowAssembler:
    """Builds windows from the documents of an index."""

    source: PageSource
    shards: OpenShards
    watch: Watch

    stateful = None

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
