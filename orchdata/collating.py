"""Batches by a user's collate_fn: decoded samples of shards, or items of a torch map-style data set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DataError, FieldError
from orchdata.loaders.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples import Sample, decode_sample
from orchdata.loaders.shards import OpenShards
from orchdata.step import Assembled, Share
from orchdata.stored import StoredSample

Load = Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class SampleAssembler:
    """Loads each sample by its row, then hands the list to `collate_fn`.

    Attributes:
        load: row -> sample; raises DataError for one that cannot be used.
        collate_fn: list of samples -> batch.
        repeat_first: a rank without a sample gets the global batch's first one, as torch's DistributedSampler
            pads; otherwise `collate_fn` gets an empty list.
        num_rows: rows of the data set; where a global batch fails as a whole, the next row that works is repeated.
    """

    load: Load
    collate_fn: Callable[[list[Any]], Any]
    repeat_first: bool
    num_rows: int = 0
    pin_memory: bool = False

    def begin(self, share: Share) -> SampleAssembly:
        return SampleAssembly(self, share.rows, share.plan.row)


class SampleAssembly:
    """One microbatch of samples under construction."""

    def __init__(self, assembler: SampleAssembler, rows: NDArray[np.int64], global_rows: NDArray[np.int64]) -> None:
        self._assembler = assembler
        self._global_rows = global_rows
        self._samples: dict[int, Any] = {}
        self._failures: dict[int, DataError] = {}
        self._seconds = 0.0
        self._lock = threading.Lock()
        self.tasks = [partial(self._load, place, int(row)) for place, row in enumerate(rows)]

    def finish(self) -> Assembled:
        if not self._samples and self._assembler.repeat_first:
            self._samples[0] = self._repeated()
        started = time.perf_counter()
        batch = self._assembler.collate_fn([self._samples[place] for place in sorted(self._samples)])
        if self._assembler.pin_memory:
            batch = _pin(batch)
        seconds = {"decoding": self._seconds, "packing": time.perf_counter() - started}
        failures = [self._failures[place] for place in sorted(self._failures)]
        return Assembled(batch, failures, seconds)

    def _repeated(self) -> Any:
        """The first sample of the global batch that works, else the next one of the data set."""
        rows, total = self._global_rows.tolist(), self._assembler.num_rows
        following = ((rows[-1] + distance) % total for distance in range(1, total))
        failure: DataError | None = None
        for row in chain(rows, following):
            try:
                return self._assembler.load(row)
            except DataError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _load(self, place: int, row: int) -> None:
        started = time.perf_counter()
        try:
            sample = self._assembler.load(row)
        except DataError as failure:
            with self._lock:
                self._failures[place] = failure
            return
        with self._lock:
            self._samples[place] = sample
            self._seconds += time.perf_counter() - started


def shard_loader(index: Index, shards: OpenShards, recipe: Recipe) -> Load:
    """row -> decoded `Sample` of an index."""

    def load(row: int) -> Sample:
        stored = StoredSample(index, shards, row)
        try:
            parts = decode_sample(stored.members, stored.read(recipe), recipe)
        except FieldError as error:
            raise error.at(stored.shard, stored.key) from error.__cause__
        return Sample(shard=stored.shard, key=stored.key, parts=parts)

    return load


def map_loader(dataset: Any, *, skip_errors: bool) -> Load:
    """row -> `dataset[row]`; under `skip_errors` an exception there is a DataError of that row."""

    def load(row: int) -> Any:
        try:
            return dataset[row]
        except Exception as error:
            if not skip_errors or isinstance(error, DataError):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise DataError(type(dataset).__name__, str(row), "", reason) from error

    return load


def _pin(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)
