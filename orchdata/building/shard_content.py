"""Batches, packed or padded: the samples of a microbatch written straight into its memory, by any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from orchdata.building.media_pages import MediaPages, PageSource
from orchdata.building.pages import Pages
from orchdata.building.shortage import out_of_memory
from orchdata.building.step import Assembled, Share
from orchdata.building.work import MediaWork, own_work, planned_work
from orchdata.loaders.errors import NOT_DATA, DataError, FieldError, as_field_error
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.shards.open import OpenShards


@dataclass(frozen=True, kw_only=True)
class PackedAssembler:
    """Makes batches from an index's samples, in the layout that `source` names."""

    source: PageSource
    shards: OpenShards
    pin_memory: bool = False

    def begin(self, share: Share) -> PackedAssembly:
        if share.plan.parts:
            work = {name: planned_work(share, name) for name in self.source.encoders}
            return PackedAssembly(self, share, share.rows, work)
        return self.begin_with(share, share.rows)

    def begin_with(self, share: Share, rows: NDArray[np.int64]) -> PackedAssembly:
        """`begin` with some of the rank's samples, each encoded where it is."""
        work = {name: own_work(self.source.index, rows, name) for name in self.source.encoders}
        return PackedAssembly(self, share, rows, work)


@dataclass
class _Stored:
    """What one stored sample gives a microbatch: its sequence, at `place`, and parts to encode."""

    place: int | None = None
    parts: list[tuple[MediaPages, int]] = field(default_factory=list)


class PackedAssembly:
    """One microbatch under construction."""

    def __init__(
        self, assembler: PackedAssembler, share: Share, rows: NDArray[np.int64], work: Mapping[str, MediaWork]
    ) -> None:
        self._assembler = assembler
        self._share = share
        self._rows = rows
        try:
            self._pages = Pages(assembler.source, rows, work)
        except MemoryError as error:
            raise out_of_memory(error, assembler.source.index, assembler.source.recipe, rows) from error
        self._failures: dict[int, list[DataError]] = {}
        self._seconds = {"reading": 0.0, "decoding": 0.0}
        self._lock = threading.Lock()
        self._stored = {int(row): _Stored(place) for place, row in enumerate(rows)}
        for name, media in self._pages.media.items():
            for part, row in zip(work[name].encoded.tolist(), work[name].encoded_row.tolist(), strict=True):
                self._stored.setdefault(row, _Stored()).parts.append((media, part))
        self.tasks = [partial(self._fill, row, wanted) for row, wanted in self._stored.items()]

    @property
    def _apart(self) -> bool:
        """Whether others wait for what this rank encodes, so that what fails has to leave its place as planned."""
        return bool(self._share.plan.parts)

    def finish(self) -> Assembled:
        failures = [failure for row in self._stored for failure in self._failures.get(row, ())]
        if failures and not self._apart:
            return self._without_failures(failures)
        started = time.perf_counter()
        batch = self._pages.batch(self._share)
        if self._assembler.pin_memory:
            batch = batch.pin_memory()
        return Assembled(batch, failures, {**self._seconds, "packing": time.perf_counter() - started})

    def _fill(self, row: int, wanted: _Stored) -> None:
        try:
            self._read_and_decode(row, wanted)
        except MemoryError as error:
            source = self._assembler.source
            raise out_of_memory(error, source.index, source.recipe, self._rows, row) from error

    def _read_and_decode(self, row: int, wanted: _Stored) -> None:
        started = time.perf_counter()
        source, pages, place = self._assembler.source, self._pages, wanted.place
        sample = StoredSample(source.index, self._assembler.shards, row)
        failures: list[DataError] = []

        def attempt(work: Callable[[], None], undo: Callable[[], None]) -> None:
            if failures and not self._apart:
                return  # The sample is left out altogether.
            try:
                work()
            except NOT_DATA:
                raise
            except Exception as error:  # noqa: BLE001 - whatever its bytes make a decoder raise is the sample's failure
                failures.append(_located(error, sample))
                undo()

        try:
            payloads = sample.read(source.recipe, text=place is not None, parts=[part for _, part in wanted.parts])
        except DataError as failure:
            failures.append(failure)
            if place is not None:
                pages.blank(place, sample)
            for media, part in wanted.parts:
                media.blank(part)
        else:
            read = time.perf_counter()
            if place is not None:
                attempt(partial(pages.write, place, sample, payloads), partial(pages.blank, place, sample))
            for media, part in wanted.parts:
                member = sample.member_of(part)
                decode = partial(media.decode, part, payloads[member], sample.members[member].field)
                attempt(decode, partial(media.blank, part))
        with self._lock:
            if failures:
                self._failures[row] = failures
                return
            self._seconds["reading"] += read - started
            self._seconds["decoding"] += time.perf_counter() - read

    def _without_failures(self, failures: Sequence[DataError]) -> Assembled:
        """Failures are rare and memory is laid out for all samples: build the microbatch again from those that work."""
        rows = self._rows[~np.isin(self._rows, list(self._failures))]
        again = self._assembler.begin_with(self._share, rows)
        for task in again.tasks:
            task()
        rest = again.finish()
        return Assembled(rest.batch, [*failures, *rest.failures], rest.seconds)


def _located(error: Exception, sample: StoredSample) -> DataError:
    known = isinstance(error, FieldError)
    located = as_field_error(error, "decoded").at(sample.shard, sample.key)
    located.__cause__ = error.__cause__ if known else error
    return located
