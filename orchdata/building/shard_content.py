"""Batches, packed or padded: the samples of a microbatch written straight into its memory, by any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from orchdata.building.assembler import Assembled, Share, Task, kept
from orchdata.building.collate import shard_loader, shard_refusal
from orchdata.building.media_pages import MediaPages, PageSource
from orchdata.building.memory import Memory
from orchdata.building.pages import Pages
from orchdata.building.shortage import out_of_memory
from orchdata.building.work import MediaWork, own_work, planned_work
from orchdata.loaders.errors import DataError, FieldError, as_field_error
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.watch import Watch


@dataclass(frozen=True, kw_only=True)
class PackedAssembler:
    """Makes batches from an index's samples, in the layout that `source` names."""

    source: PageSource
    shards: OpenShards
    watch: Watch

    @property
    def reads(self) -> ReadBytes:
        return self.shards.reads

    def begin(self, share: Share) -> PackedAssembly:
        places = share.plan.places(share.rank, share.microbatch)
        if share.plan.parts:
            work = {name: planned_work(share, name) for name in self.source.encoders}
            return PackedAssembly(self, share, places, work)
        return self.begin_with(share, places)

    stateful = None

    def load_alone(self, row: int) -> None:
        index = self.source.index
        self.watch.load(row, shard_loader(index, self.shards, self.source.recipe_of), shard_refusal(index))

    def begin_with(self, share: Share, places: NDArray[np.int64]) -> PackedAssembly:
        """`begin` with some of the rank's samples, by their places in the global batch, each encoded where it is."""
        rows = share.plan.row[places]
        work = {name: own_work(self.source.index, rows, places, name) for name in self.source.encoders}
        return PackedAssembly(self, share, places, work)


@dataclass
class _Wanted:
    """What one stored sample gives a microbatch: its sequence, at `place`, and parts to encode, each at its own."""

    row: int
    place: int | None = None
    parts: list[tuple[MediaPages, int, int]] = field(default_factory=list)  # pages, place in them, part of the index


class PackedAssembly:
    """One microbatch under construction. Samples are known by their places in the global batch.

    Attributes:
        num_bytes: memory that `fill` takes.
    """

    def __init__(
        self, assembler: PackedAssembler, share: Share, places: NDArray[np.int64], work: Mapping[str, MediaWork]
    ) -> None:
        self._assembler = assembler
        self._share = share
        self._places = places
        rows = share.plan.row
        self._pages = Pages(assembler.source, rows[places], work)
        self.num_bytes = sum(self._pages.num_bytes)
        self._failures: dict[int, list[DataError]] = {}
        self._seconds = {"reading": 0.0, "decoding": 0.0}
        self._lock = threading.Lock()
        self._wanted = {at: _Wanted(int(rows[at]), place) for place, at in enumerate(places.tolist())}
        for name, media in self._pages.media.items():
            encoded = zip(work[name].encoded.tolist(), work[name].encoded_place.tolist(), strict=True)
            for number, (part, at) in enumerate(encoded):
                self._wanted.setdefault(at, _Wanted(int(rows[at]))).parts.append((media, number, part))

    def fill(self, memory: Memory) -> list[Task]:
        """Lay the batch out in memory; a task for each stored sample. Raises MemoryError, naming the largest."""
        self._memory, source = memory, self._assembler.source
        try:
            self._pages.lay([memory.take(num_bytes) for num_bytes in self._pages.num_bytes])
        except MemoryError as error:
            raise out_of_memory(error, source.index, source.recipe, self._share.plan.row[self._places]) from error
        return [partial(self._fill, at, wanted) for at, wanted in self._wanted.items()]

    @property
    def _is_awaited(self) -> bool:
        """Whether others wait for what this rank encodes, so that what fails has to leave its place as planned."""
        return bool(self._share.plan.parts)

    def finish(self) -> Assembled:
        failures = [failure for at in self._wanted for failure in self._failures.get(at, ())]
        if failures and not self._is_awaited:
            return self._without_failures(failures)
        started = time.perf_counter()
        batch = self._pages.batch(self._share, self._places)
        return Assembled(batch, failures, {**self._seconds, "packing": time.perf_counter() - started})

    def _fill(self, at: int, wanted: _Wanted) -> None:
        watch = self._assembler.watch
        blamed = watch.begin(wanted.row)
        try:
            self._read_and_decode(at, wanted, blamed)
        except MemoryError as error:
            source, rows = self._assembler.source, self._share.plan.row[self._places]
            raise out_of_memory(error, source.index, source.recipe, rows, wanted.row) from error
        watch.end()

    def _read_and_decode(self, at: int, wanted: _Wanted, blamed: str | None) -> None:
        started = time.perf_counter()
        source, pages, place = self._assembler.source, self._pages, wanted.place
        sample = StoredSample(source.index, self._assembler.shards, wanted.row)
        recipe = source.recipe_of(wanted.row)
        failures: list[DataError] = []

        def attempt(work: Callable[[], None], undo: Callable[[], None]) -> None:
            if failures and not self._is_awaited:
                return  # The sample is left out altogether.
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever its bytes make a decoder raise is the sample's failure
                failures.append(kept(_located(error, sample)))
                undo()

        try:
            if blamed is not None:
                raise DataError(sample.shard, sample.key, "*", f"its worker {blamed}")
            parts = [part for _, _, part in wanted.parts]
            payloads = sample.read(recipe, text=place is not None, parts=parts)
        except DataError as failure:
            failures.append(kept(failure))
            if place is not None:
                pages.blank(place, sample)
            for media, number, _ in wanted.parts:
                media.blank(number)
        else:
            read = time.perf_counter()
            if place is not None:
                attempt(partial(pages.write, place, sample, payloads), partial(pages.blank, place, sample))
            for media, number, part in wanted.parts:
                member = sample.member_of(part)
                decode = partial(media.decode, number, payloads[member], sample.members[member].field, recipe)
                attempt(decode, partial(media.blank, number))
        with self._lock:
            if failures:
                self._failures[at] = failures
                return
            self._seconds["reading"] += read - started
            self._seconds["decoding"] += time.perf_counter() - read

    def _without_failures(self, failures: Sequence[DataError]) -> Assembled:
        """Failures are rare and memory is laid out for all samples: build the microbatch again from those that work."""
        places = self._places[~np.isin(self._places, list(self._failures))]
        again = self._assembler.begin_with(self._share, places)
        for task in again.fill(self._memory):
            task()
        rest = again.finish()
        return Assembled(rest.batch, [*failures, *rest.failures], rest.seconds)


def _located(error: Exception, sample: StoredSample) -> DataError:
    known = isinstance(error, FieldError)
    located = as_field_error(error, "decoded").at(sample.shard, sample.key)
    located.__cause__ = error.__cause__ if known else error
    return located
