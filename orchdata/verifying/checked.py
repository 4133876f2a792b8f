"""A check of a sample: it is built as a loader's step builds it, in limited memory, and dropped."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from orchdata.building.assembler import Assembled, Share, Task
from orchdata.building.contents import IndexedShards, ShardContent
from orchdata.building.memory import Memory
from orchdata.building.shard_samples import sample_bytes
from orchdata.building.spec import BuildSpec
from orchdata.engines.threads import passed_on
from orchdata.loaders.errors import DataError
from orchdata.loaders.failures import as_field_error
from orchdata.loaders.index.wanted import Wanted
from orchdata.loaders.limited_process import lower_limit, taken_bytes
from orchdata.loaders.watch import Watch
from orchdata.order.steps import StepTask
from orchdata.planning.layout import Packed
from orchdata.planning.make_plan import PlanSpec

FREE_BYTES = 2 << 30
"""Memory that a sample may take in addition to twice its size by the index."""


@dataclass(frozen=True, kw_only=True)
class CheckedContent:
    """Steps of one sample each, given by its first row, with all its modalities and pieces decoded. They have failures
    and no batch.

    Attributes:
        plan: a plan of one rank.
    """

    plan: PlanSpec
    shards: IndexedShards

    def open(self, watch: Watch) -> Checker:
        """Open it in a process that does nothing else, and has one thread."""
        return Checker(self, watch)

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)


class Checker:
    """An assembler that builds each sample's step with the builder of a loader."""

    def __init__(self, content: CheckedContent, watch: Watch) -> None:
        shards = self._shards = content.shards
        packed = ShardContent(shards=shards, layout=Packed(), encoders=shards.index.modalities[1:])
        self._builder = BuildSpec(plan=content.plan, rank=0, content=packed).open(watch=watch)
        self.reads = self._builder.reads
        self._base_bytes = taken_bytes()

    def begin(self, share: Share) -> _Check:
        return _Check(self, int(share.rows[0]))

    def read_ahead(self, wanted: Iterable[Wanted]) -> None:
        """The builder of a step does this."""

    def load_alone(self, row: int) -> None:
        self.check(row)

    def check(self, row: int) -> list[DataError]:
        """Return the failures of a loader's step with only this sample. Raises as `pass_trouble`."""
        index = self._shards.index
        rows = np.array(index.rows_of_sample(row))
        num_bytes = sum(sample_bytes(index, self._shards.recipe, each) for each in rows.tolist())
        lower_limit(resource.RLIMIT_DATA, self._base_bytes + FREE_BYTES + 2 * num_bytes)
        try:
            failures = self._builder.build(StepTask(0, row, rows)).failures
        except DataError as failure:
            return [failure]
        except BaseException as error:  # noqa: BLE001 - anything else that would end a loader's step
            return [as_field_error(passed_on(error), "built").at(index.shard_of(row).url, index.key(row))]
        return failures[:1]


class _Check:
    """A sample's step under construction."""

    num_bytes = 0

    def __init__(self, checker: Checker, row: int) -> None:
        self._checker = checker
        self._row = row
        self._failures: list[DataError] = []

    def wanted(self) -> Sequence[Wanted]:
        return ()

    def fill(self, memory: Memory) -> Sequence[Task]:
        return [self._run]

    def finish(self) -> Assembled:
        return Assembled(None, self._failures)

    def _run(self) -> None:
        self._failures = self._checker.check(self._row)


def begin_checking(_number: int) -> None:
    """Set up a process that checks samples, before anything else."""
    os.dup2(2, 1)  # prints of a user's tokenizer are not part of our output
    lower_limit(resource.RLIMIT_CORE, 0)
