"""The arguments of a DataLoader, checked, and what is made of them whatever the data set: a PreparedDataset."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from orchdata.balancers.checks import checked_count
from orchdata.batch.batch import ModelInputs
from orchdata.building.spec import BuildSpec, Content
from orchdata.delivery.policy import ErrorPolicy
from orchdata.loaders.errors import DataError
from orchdata.order.order import SampleOrder, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance, as_balance
from orchdata.planning.layout import Packed, Padded, layout_of
from orchdata.planning.make_plan import PlanSpec, SampleCosts
from orchdata.ranks.parallel import Rank


class _NotGiven(int):
    """An integer that was not passed: reads like any other, in `help()` too, and is told from it by identity."""


DEFAULT_BATCH_SIZE: Final = _NotGiven(1)


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The arguments of a DataLoader that concern its steps, checked."""

    rank: Rank
    batches: GlobalBatches
    shuffle: Shuffle | None
    seed: int
    balance: Balance
    policy: ErrorPolicy
    collate_fn: Packed | Padded | ModelInputs | Callable[..., Any] | None
    batched: bool
    cost: Any

    def build_spec(self, costs: SampleCosts, order: SampleOrder, content: Content) -> BuildSpec:
        plan = PlanSpec(
            costs=costs,
            order=order,
            batches=self.batches,
            balance=self.balance,
            num_ranks=self.rank.size,
            ranks_per_node=self._ranks_per_node,
        )
        return BuildSpec(plan=plan, rank=self.rank.rank, content=content)

    @property
    def _ranks_per_node(self) -> int | None:
        """Of plans that depend on it: else ranks on nodes of different sizes would differ for nothing."""
        node = self.rank.ranks_per_node
        if self.balance.assignment != "per_phase" or node is None or self.rank.size % node:
            return None
        return node


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """A data set, ready to be planned and read.

    Attributes:
        spec: all that a step depends on, but its task.
        fingerprint: what a state must agree with, JSON-safe.
        failures: samples known to be bad before anything is decoded; they are out of the order.
        num_indexed: samples of the data set, bad ones included.
        num_lost: samples of damaged shards that are not even indexed, as far as can be told.
        epoch_tasks: epoch -> (step -> its task), called before an iteration's first step: a sampler is drawn then. What
            it returns is held until the last one.
    """

    spec: BuildSpec
    fingerprint: Mapping[str, Any]
    failures: Sequence[DataError]
    num_indexed: int
    num_lost: int = 0
    epoch_tasks: Callable[[int], Callable[[int], StepTask]] = field(default=lambda epoch: partial(StepTask, epoch))

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.spec.plan.order.num_samples


def batch_sizes(
    batch_size: int | None,
    global_batch_size: int | None,
    *,
    num_ranks: int,
    in_shards: bool,
    has_batch_sampler: bool,
    drop_last: bool,
) -> tuple[int | None, GlobalBatches]:
    """Samples per rank and step, None where that is not what was given, and the global batches (with a batch sampler:
    of one of its batches each).

    Raises ValueError for both sizes, for one outside its range, and for shards without a size.
    """
    if has_batch_sampler:
        # batch_size=1 is what a caller passes who copies torch's default.
        if batch_size != DEFAULT_BATCH_SIZE or global_batch_size is not None:
            raise ValueError("batch_sampler sets the batch sizes: leave batch_size and global_batch_size out")
        return None, GlobalBatches(size=1, drop_last=drop_last)
    if global_batch_size is not None:
        if batch_size is not None and batch_size is not DEFAULT_BATCH_SIZE:
            raise ValueError(
                f"batch_size={batch_size} and global_batch_size={global_batch_size} both given: pass exactly one"
            )
        size = checked_count(global_batch_size, "global_batch_size")
        return None, GlobalBatches(size=size, drop_last=drop_last)
    if batch_size is None:
        if in_shards:
            raise ValueError(
                "batch_size=None takes a map-style data set's samples one by one; steps of a ShardDataset have sizes: "
                "give batch_size=1, or global_batch_size"
            )
        return None, GlobalBatches(size=num_ranks, drop_last=drop_last)
    batch_size = checked_count(batch_size, "batch_size")
    return batch_size, GlobalBatches(size=batch_size * num_ranks, drop_last=drop_last)


def check_timeout(timeout: float) -> None:
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__") or not timeout >= 0:
        raise ValueError(f"timeout is a number of seconds, 0 for no limit, got {timeout!r}")


def check_functions(**functions: Any) -> None:
    """Raise TypeError for an argument that is neither callable nor a layout; a layout's class is callable."""
    for name, given in functions.items():
        known = given is None or layout_of(given) is not None or callable(given)
        if isinstance(given, type) and (given in (Packed, Padded) or hasattr(given, "layout")):
            raise TypeError(f"{name} got the class {given.__name__}: make one, as in {given.__name__}(...)")
        if not known:
            raise TypeError(f"{name} must be callable, got {given!r}")


def chosen_seed(seed: int | None, generator: torch.Generator | None) -> int:
    """The seed of the order."""
    if generator is None:
        if isinstance(seed, bool) or not (seed is None or hasattr(seed, "__index__")):
            raise ValueError(f"seed must be an integer, got {seed!r}")
        return 0 if seed is None else operator.index(seed)
    if seed is not None:
        raise ValueError("seed and generator both given: the seed comes from one of them")
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
    return int(generator.initial_seed())


def as_shuffle(shuffle: bool | Shuffle | None) -> Shuffle | None:
    """The `shuffle=` argument of a DataLoader."""
    if isinstance(shuffle, Shuffle):
        return shuffle
    if shuffle is not None and not isinstance(shuffle, (bool, np.bool_)):
        raise ValueError(f"shuffle must be True, False or an od.Shuffle, got {shuffle!r}")
    return Shuffle() if shuffle else None


def rank_balance(balance: str | Balance, rank: Rank, *, equal_count: bool) -> Balance:
    """The `balance=` argument of a DataLoader; groups are nodes where their size is not given."""
    found = as_balance(balance, equal_count=equal_count)
    if found.scope not in ("grouped", "grid") or found.group_size is not None:
        return found
    if rank.ranks_per_node is None:
        raise ValueError(
            f"balance={found.scope!r} needs a group size: od.Balance(scope={found.scope!r}, group_size=...),"
            " od.DataParallel(mesh, ranks_per_node=...), or LOCAL_WORLD_SIZE, which torchrun sets"
        )
    return replace(found, group_size=rank.ranks_per_node)


def refuse_parts(balance: Balance, reason: str) -> None:
    """Raise ValueError where parts of samples are to be assigned, and only whole samples can be."""
    if balance.assignment == "per_phase":
        raise ValueError(
            f"Balance.assignment='per_phase' gives ranks parts of samples, but {reason}: it needs an od.ShardDataset "
            "with od.Packed or od.Padded; use assignment='joint'"
        )
