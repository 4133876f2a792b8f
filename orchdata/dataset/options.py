"""A PreparedDataset: what is built from the arguments of a DataLoader, for any data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchdata.building.spec import BuildSpec
from orchdata.dataset.usable_rows import SourceRows
from orchdata.loaders.errors import DataError
from orchdata.order.mixture import MixtureOrder
from orchdata.order.steps import Draw, Steps, StreamSteps, Sums, TokenBatches


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudgets:
    """`global_batch_tokens`, checked. It becomes a `TokenBatches` once the order is known."""

    budgets: tuple[tuple[int, int], ...]
    drop_last: bool

    @property
    def smallest(self) -> int:
        """The most tokens that a sample may have."""
        return min(tokens for _, tokens in self.budgets)

    def describe(self) -> dict[str, Any]:
        """Return the argument of a DataLoader that it was built from."""
        return {"global_batch_tokens": self.budgets}

    def over(self, sums: Sums) -> TokenBatches:
        return TokenBatches(sums=sums, budgets=self.budgets, drop_last=self.drop_last)


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """A data set, ready to be planned and read.

    Attributes:
        spec: everything on which a step depends, except its task.
        fingerprint: what the loaders of all ranks must agree with, JSON-safe.
        rows: of shards, the usable rows of the data set, or of each source, which bind states to it.
        failures: samples known to be bad before anything is decoded; the order does not contain them.
        num_indexed: samples of the data set, including bad ones.
        num_lost: estimated samples of damaged shards that are not even indexed.
        none_chosen: the `filter`, `split` and others that choose no sample; empty if they choose any.
        on_first_step: called when the first step was delivered; None: nothing is to be done.
        torch_steps: the steps of an epoch, if they are not those of the plan.
        sampler, batch_sampler, collate_fn: the defaults that torch's loader has; None for our own order or layout.
    """

    spec: BuildSpec
    fingerprint: Mapping[str, Any]
    failures: Sequence[DataError]
    num_indexed: int
    torch_steps: Steps | None = None
    rows: tuple[SourceRows, ...] = ()
    num_lost: int = 0
    none_chosen: str = ""
    on_first_step: Callable[[], None] | None = None
    sampler: Any = None
    batch_sampler: Any = None
    collate_fn: Any = None

    @property
    def steps(self) -> Steps:
        """The steps of each epoch."""
        return self.torch_steps or self.spec.plan.steps

    def known_count(self, epoch: int, draw: Draw | None) -> int | None:
        """Return the number of optimizer steps of an epoch; None if it is known only at the end."""
        try:
            return self.steps.count(epoch, draw)
        except (TypeError, NotImplementedError):
            return None

    @property
    def is_iterable(self) -> bool:
        """Whether the data set can only be iterated."""
        return isinstance(self.steps, StreamSteps)

    @property
    def num_samples(self) -> int:
        """Usable samples of the data set."""
        return self.spec.plan.order.num_samples

    def with_order(self, order: MixtureOrder) -> PreparedDataset:
        """Return the same mixture with another order."""
        batches = self.spec.plan.batches
        if isinstance(batches, TokenBatches):
            batches = replace(batches, sums=order)
        spec = replace(self.spec, plan=replace(self.spec.plan, order=order, batches=batches))
        return replace(self, spec=spec)
