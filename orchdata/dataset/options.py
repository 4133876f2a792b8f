"""A PreparedDataset: what is built from the arguments of a DataLoader, for any data set."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from orchdata.building.spec import BuildSpec
from orchdata.loaders.errors import DataError
from orchdata.loop.state import RowsDigest
from orchdata.order.mixture import MixtureOrder
from orchdata.order.steps import Draw, Steps, StreamSteps, Sums, TokenBatches
from orchdata.planning.windows import WindowBatches


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


class UsableRows(Protocol):
    """The usable rows of a data set of shards, or of a source of a mixture: `SourceRows`."""

    @property
    def same(self) -> Hashable:
        """Equal for equal rows of one index."""

    @property
    def digest(self) -> RowsDigest:
        """What a state stores of the rows."""

    def change_since(self, then: RowsDigest) -> str:
        """Return how the rows differ from those of a state, in words; "" for equal ones."""


def no_filler(*_: Any, **__: Any) -> None:
    """Open nothing: no cache is filled."""


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """A data set, ready to be planned and read.

    Attributes:
        spec: everything on which a step depends, except its task.
        fingerprint: what the loaders of all ranks must agree with, JSON-safe.
        rows: of shards, the usable rows of the data set, or of each source, which bind states to it.
        of_processor: names that the recipe has from a Hugging Face processor.
        filler: opens what fills the loader's cache, as `filler_of`.
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
    rows: tuple[UsableRows, ...] = ()
    of_processor: tuple[str, ...] = ()
    filler: Callable[..., Any] = no_filler
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
        elif isinstance(batches, WindowBatches):
            batches = replace(batches, order=order, sums=order)
        spec = replace(self.spec, plan=replace(self.spec.plan, order=order, batches=batches))
        return replace(self, spec=spec)
