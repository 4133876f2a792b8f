"""Batches, packed or padded: the samples of a microbatch written straight into its memory, by any thread."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DataError, FieldError
from orchdata.loaders.shards import OpenShards
from orchdata.media_pages import PageSource
from orchdata.pages import Pages
from orchdata.plan import Plan
from orchdata.step import Assembled
from orchdata.stored import StoredSample


@dataclass(frozen=True, kw_only=True)
class PackedAssembler:
    """Makes batches from an index's samples, in the layout that `source` names."""

    source: PageSource
    shards: OpenShards
    pin_memory: bool = False

    def begin(self, plan: Plan, rank: int, microbatch: int, positions: NDArray[np.int64]) -> PackedAssembly:
        return PackedAssembly(self, plan, microbatch, plan.row[positions])


class PackedAssembly:
    """One microbatch under construction."""

    def __init__(self, assembler: PackedAssembler, plan: Plan, microbatch: int, rows: NDArray[np.int64]) -> None:
        self._assembler = assembler
        self._plan = plan
        self._microbatch = microbatch
        self._rows = rows
        self._pages = Pages(assembler.source, rows)
        self._failures: dict[int, DataError] = {}
        self._seconds = {"reading": 0.0, "decoding": 0.0}
        self._lock = threading.Lock()
        self.tasks = [partial(self._fill, place) for place in range(len(rows))]

    def finish(self) -> Assembled:
        if self._failures:
            return self._without_failures()
        started = time.perf_counter()
        batch = self._pages.batch(self._plan, self._microbatch)
        if self._assembler.pin_memory:
            batch = batch.pin_memory()
        return Assembled(batch, [], {**self._seconds, "packing": time.perf_counter() - started})

    def _fill(self, place: int) -> None:
        started = time.perf_counter()
        sample = StoredSample(self._assembler.source.index, self._assembler.shards, int(self._rows[place]))
        try:
            payloads = sample.read(self._assembler.source.recipe)
            read = time.perf_counter()
            try:
                self._pages.fill(place, sample, payloads)
            except FieldError as error:
                raise error.at(sample.shard, sample.key) from error.__cause__
        except DataError as failure:
            with self._lock:
                self._failures[place] = failure
            return
        with self._lock:
            self._seconds["reading"] += read - started
            self._seconds["decoding"] += time.perf_counter() - read

    def _without_failures(self) -> Assembled:
        """Failures are rare and memory is laid out for all samples: build the microbatch again from those that work."""
        places = sorted(self._failures)
        failures = [self._failures[place] for place in places]
        again = PackedAssembly(self._assembler, self._plan, self._microbatch, np.delete(self._rows, places))
        for task in again.tasks:
            task()
        rest = again.finish()
        return Assembled(rest.batch, failures + rest.failures, rest.seconds)
