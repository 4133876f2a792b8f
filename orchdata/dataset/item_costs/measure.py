"""Costs of the items of a map-style data set: rows -> cost(dataset[row]), in worker processes if the loader has some.

rows --chunks--> a worker of torch's own loader, or this process --costs, or why an item cannot be loaded--> in order
"""

from __future__ import annotations

import multiprocessing
import operator
import os
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from orchdata.building.map_items import map_loader
from orchdata.engines.engine import Workers
from orchdata.engines.pickling import described, pickles
from orchdata.loaders.errors import NOT_DATA, DataError, FunctionError
from orchdata.loaders.functions import line_in
from orchdata.notices import warn_once

Ints = NDArray[np.int64]
FAILED: Final = -1
"""The cost of an item that cannot be loaded."""
_CHUNK: Final = 32
"""Items between two signs of progress, and of one message of a worker."""
_MOST: Final = 2**63 - 1


@dataclass(frozen=True, eq=False)
class ItemCosts:
    """The costs of a data set's items, by a function.

    Attributes:
        dataset: with `__getitem__` and `__len__`.
        cost: item -> integer of at least 0.
        skip_errors: whether items that cannot be loaded are failures; otherwise their errors are raised.
    """

    dataset: Any
    cost: Callable[[Any], int]
    skip_errors: bool

    def measured(
        self, rows: Ints, workers: Workers, progress: Callable[[float, int], None] | None = None
    ) -> tuple[Ints, list[DataError]]:
        """Return the cost of each row, FAILED for those that cannot be loaded, and their failures.

        Args:
            rows: of the data set, (n,).
            workers: load the items.
            progress: called with the number of rows that are done, and of all.

        Raises:
            FunctionError: the function fails, or returns no integer of at least 0; names the item.
            Exception: of the data set, if errors are not skipped.
        """
        chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
        costs: list[int] = []
        failures: list[DataError] = []
        with closing(self._outcomes(chunks, workers)) as found:
            for outcomes in found:
                for outcome in outcomes:
                    if isinstance(outcome, str):
                        raise FunctionError(outcome)
                    if isinstance(outcome, tuple):
                        failures.append(DataError(*outcome))
                    costs.append(FAILED if isinstance(outcome, tuple) else outcome)
                if progress is not None:
                    progress(len(costs), len(rows))
        return np.array(costs, np.int64), failures

    def _outcomes(self, chunks: list[Ints], workers: Workers) -> Generator[list[_Outcome]]:
        source = _Chunks(self, chunks)
        # Those of an engine may be on other machines: then processes of this one load the items.
        count = (
            workers.num_workers if workers.engine is None else min(workers.num_workers, len(os.sched_getaffinity(0)))
        )
        if len(chunks) < 2 or not count or not self._can_be_sent(workers.multiprocessing_context):
            yield from map(source.__getitem__, range(len(chunks)))
            return
        iterator = iter(
            DataLoader(
                source,
                batch_size=None,
                num_workers=min(count, len(chunks)),
                collate_fn=_same,
                multiprocessing_context=workers.multiprocessing_context,
                worker_init_fn=workers.worker_init_fn,
                timeout=workers.timeout,
                generator=torch.Generator(),  # torch's global one stays as it is: epochs draw from it
            )
        )
        try:
            yield from iterator
        finally:  # an error that is kept would keep the workers
            cast("Any", iterator)._shutdown_workers()

    def _can_be_sent(self, context: BaseContext | None) -> bool:
        """Return whether workers can get the function; warn once if not."""
        if (context or multiprocessing).get_start_method() == "fork" or pickles(self.cost):
            return True
        warn_once(
            "a cost that does not pickle",
            f"cost= is {described(self.cost)}, which cannot be sent to another process: the items are loaded in this "
            "one. Define it at the top level of a module",
        )
        return False

    def of(self, row: int) -> _Outcome:
        """Return the cost of one item; the arguments of the DataError of an item that cannot be loaded; or the text of
        the FunctionError if its cost cannot be used: as values, so that a worker does not wrap them.
        """
        load = map_loader(self.dataset, skip_errors=self.skip_errors)
        try:
            item = load(row)
        except DataError as failure:
            if not self.skip_errors:
                raise
            return failure.shard, failure.key, failure.field, failure.reason
        name = getattr(self.cost, "__qualname__", type(self.cost).__name__)
        where = f"cost: {name} of item {row} of {type(self.dataset).__name__}"
        try:
            value = self.cost(item)
        except NOT_DATA:
            raise
        except Exception as error:  # noqa: BLE001 - raised again with the item
            return f"{where} raised {_described(error, self.cost)}"
        try:
            cost = -1 if isinstance(value, bool | np.bool_) else operator.index(value)
        except TypeError:  # floats, tensors of floats, anything else
            return f"{where} returned {value!r:.80}: costs are integers; scale and round them"
        if not 0 <= cost <= _MOST:
            return f"{where} returned {value!r:.80}: costs are integers from 0 to 2**63 - 1"
        return cost


_Outcome = int | tuple[str, str, str, str] | str


class _Chunks(torch.utils.data.Dataset[Any]):
    """The outcomes of chunks of rows, as items of a data set."""

    def __init__(self, costs: ItemCosts, chunks: list[Ints]) -> None:
        self._costs = costs
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: int) -> list[_Outcome]:
        return [self._costs.of(row) for row in self._chunks[number].tolist()]


def _described(error: Exception, function: Any) -> str:
    line = line_in(error, function)
    return f"{type(error).__name__}: {error}{'' if line is None else f' (line {line})'}"


def _same(outcomes: list[_Outcome]) -> list[_Outcome]:
    return outcomes
