"""Batches of the items of a torch map-style data set."""

from __future__ import annotations

import errno
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import default_collate, default_convert

from orchdata.batch.step_info import StepInfo
from orchdata.building.assembler import Assembler
from orchdata.building.collate import STOP_ITERATION, SampleAssembler
from orchdata.loaders.errors import NOT_DATA, DataError, pass_broken_package
from orchdata.loaders.watch import Watch

# System errors that say nothing about the file: it may be readable later.
_NOT_NOW = frozenset(
    (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT)
)


@dataclass(frozen=True, kw_only=True)
class MapContent:
    """Batches of a `collate_fn` (default: torch's) from the items of a map-style data set.

    Attributes:
        num_rows: the number of items when the spec was created.
        batched: whether collate_fn gets a list; else one item.
        skip_errors: whether an item that cannot be loaded is a failure, and its exception is not raised.
    """

    dataset: Any
    num_rows: int
    collate_fn: Callable[..., Any] | None
    batched: bool
    skip_errors: bool

    def made(self, items: list[Any], info: StepInfo | None) -> Any:
        """Return the batch of these items; `info` is for a collate_fn that has a parameter `step`."""
        dataset, item = self.dataset, None
        many = self._many
        samples: Any = []
        try:
            if many is not None:
                item, samples = items, many(items)
            else:
                for item in items:
                    samples.append(dataset[item])
        except (Exception, SystemExit) as error:
            error.add_note(self.name_of(item))
            if isinstance(error, StopIteration):
                raise RuntimeError(STOP_ITERATION) from error
            raise
        collate, options = self.collate, {} if info is None else {"step": info}
        try:
            return collate(samples if self.batched else samples[0], **options)
        except StopIteration as error:
            raise RuntimeError(STOP_ITERATION) from error

    @property
    def collate(self) -> Callable[..., Any]:
        """The function that makes a batch of items, or of one item."""
        return self.collate_fn or (default_collate if self.batched else default_convert)

    def open(self, watch: Watch) -> Assembler:
        return SampleAssembler(
            load=map_loader(self.dataset, skip_errors=self.skip_errors),
            watch=watch,
            refuse=lambda row, why: DataError(type(self.dataset).__name__, str(row), "", f"its worker {why}"),
            load_many=None if self.skip_errors else self._many,
            collate_fn=self.collate,
            batched=self.batched,
            num_map_rows=self.num_rows,
        )

    @property
    def _many(self) -> Callable[[list[int]], Any] | None:
        """The data set's `__getitems__`, which torch calls for all samples of a batch. Its result is for collate_fn."""
        return getattr(self.dataset, "__getitems__", None) if self.batched else None

    def name_of(self, row: Any) -> str:
        return f"item {row!r} of {type(self.dataset).__name__}"


def map_loader(dataset: Any, *, skip_errors: bool) -> Callable[[int], Any]:
    """Return row -> `dataset[row]`. With `skip_errors`, an exception that may be about the data becomes a DataError."""
    if not skip_errors:
        return partial(operator.getitem, dataset)

    def load(row: int) -> Any:
        try:
            return dataset[row]
        except NOT_DATA:
            raise
        except (Exception, SystemExit) as error:
            pass_broken_package(error)
            if isinstance(error, DataError) or getattr(error, "errno", None) in _NOT_NOW:
                raise
            reason = f"{type(error).__name__}: {error}"
            raise DataError(type(dataset).__name__, str(row), "", reason) from error

    return load
