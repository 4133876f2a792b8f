"""What a DataLoader draws from, whatever the data set: a StepSpec, and what is known before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchdata.building.step import Assembler, StepSpec
from orchdata.delivery.policy import ErrorPolicy
from orchdata.loaders.errors import DataError
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.order.order import Shuffle
from orchdata.planning.balance import Balance
from orchdata.planning.layout import Packed, Padded
from orchdata.planning.plan import PlanSpec, SampleCosts, SampleOrder
from orchdata.ranks.parallel import Rank


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The arguments of a DataLoader that concern what it draws from, checked."""

    rank: Rank
    global_batch_size: int
    shuffle: Shuffle | None
    seed: int
    drop_last: bool
    balance: Balance
    policy: ErrorPolicy
    collate_fn: Packed | Padded | Callable[[Any], Any] | None
    batched: bool
    pin_memory: bool
    cost: Any

    def step_spec(self, costs: SampleCosts, order: SampleOrder, assembler: Assembler) -> StepSpec:
        plan = PlanSpec(
            source=costs,
            order=order,
            balance=self.balance,
            num_ranks=self.rank.size,
            global_batch_size=self.global_batch_size,
            drop_last=self.drop_last,
            streams=1 if self.shuffle is None else self.shuffle.streams,
        )
        return StepSpec(plan=plan, assembler=assembler, rank=self.rank.rank)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set, ready to be planned and read.

    Attributes:
        spec: all that a step depends on.
        fingerprint: what a state must agree with, JSON-safe.
        failures: samples known to be bad before anything is decoded; they are out of the order.
        num_indexed: samples of the data set, bad ones included.
        num_lost: samples of damaged shards that are not even indexed, as far as can be told.
        begin_epoch: called with the epoch before an iteration's first step; what it returns is held until the last.
        reads: what is read of its shards, counted; None where samples are not in shards.
    """

    spec: StepSpec
    fingerprint: Mapping[str, Any]
    failures: Sequence[DataError]
    num_indexed: int
    num_lost: int = 0
    begin_epoch: Callable[[int], object] = field(default=lambda epoch: None)
    reads: ReadBytes | None = None

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.spec.plan.order.num_samples


def refuse_parts(balance: Balance, reason: str) -> None:
    """Raise ValueError where parts of samples are to be assigned, and only whole samples can be."""
    if balance.assignment == "per_phase":
        raise ValueError(
            f"Balance.assignment='per_phase' gives ranks parts of samples, but {reason}: it needs an od.ShardDataset "
            "with od.Packed or od.Padded; use assignment='joint'"
        )
