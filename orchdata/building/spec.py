"""BuildSpec: everything that the steps of a rank depend on, as a value; `open()` returns a Builder.

    BuildSpec --pickle--> another process --open()--> Builder --StepTask--> the same batches, bit for bit

Open resources (shards, memory, locks, counters) are in a Builder: one per process, for all its threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from orchdata.building.assembler import Assembler
from orchdata.building.memory import Memory
from orchdata.building.step import Builder
from orchdata.loaders.first_calls import settle_first_calls
from orchdata.loaders.watch import Watch
from orchdata.order.steps import StepTask
from orchdata.planning.layout import Layout
from orchdata.planning.make_plan import PlanSpec


class Content(Protocol):
    """The data of batches, and how batches are made of it: a value."""

    def open(self, watch: Watch) -> Assembler:
        """Return what makes batches in this process. `watch` records each sample while it is loaded."""

    def name_of(self, row: int) -> str:
        """Return a sample's name for messages."""


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """Everything a rank's steps depend on, apart from their `StepTask`; `peer` of the rank has its parts encoded."""

    plan: PlanSpec
    rank: int
    content: Content
    peer: int = 0

    @property
    def shards(self) -> Any:
        """Where the samples are, if these are in shards with an index: an `IndexedShards`; else None."""
        return getattr(self.content, "shards", None)

    @property
    def layout(self) -> Layout | None:
        """How batches are laid out; None for those of a `collate_fn`."""
        return getattr(self.content, "layout", None)

    @property
    def reads_far(self) -> bool:
        """Whether any shard is in object storage, whose answers take longer than a read of a file."""
        return self.shards is not None and bool(self.shards.any_remote)

    def open(self, *, watch: Watch | None = None, allocate: Callable[[StepTask], Memory] | None = None) -> Builder:
        """Return the builder of steps in this process, one for all its threads. Raises StaleIndexError where the index
        was rebuilt after the spec was created, PackageError for a package that the recipe needs, StorageError where the
        index cannot be loaded now.
        """
        settle_first_calls()
        return Builder(self.plan, self.rank, self.content.open(watch or Watch()), allocate, peer=self.peer)
