"""Profile of a dataset, before any GPU is rented: what it holds, and what N ranks would lose to imbalance.

    index columns --counts, percentiles--> Modality, Phase
    order + cost model --make_plan, as in training--> PhaseImbalance, per number of ranks

Everything is read from the index: no sample is decoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balance import Balance
from orchdata.balancers import CostModel
from orchdata.costs import IndexCosts
from orchdata.loaders.errors import DataError, reason_kind
from orchdata.loaders.index import Index
from orchdata.loaders.order import Order, Shuffle
from orchdata.plan import PlanSpec, SampleOrder, make_plan
from orchdata.stats import step_loads

PERCENTILES = {"min": 0, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "p99": 99, "max": 100}


@dataclass(frozen=True, kw_only=True, slots=True)
class Modality:
    """What the usable samples hold of one modality.

    Attributes:
        samples: samples that have it; `share` is their part of all usable samples.
        parts: images or audio clips; for text the samples that have any.
        tokens: positions it gives the LLM; for text everything that is not media, special tokens included.
    """

    samples: int
    share: float
    parts: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Positions that one phase of a model computes.

    Attributes:
        samples: samples that enter the phase.
        positions: their sum: patches before merging, audio frames entering attention, or LLM tokens.
        percentiles: of the positions of a sample, over the samples that enter the phase; empty without any.
    """

    samples: int
    positions: int
    percentiles: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseImbalance:
    """max/mean of rank loads, where 1 is perfect: the time lost in a phase is 1 - 1/this.

    Attributes:
        unbalanced: samples dealt out in turn, as a plain sampler does.
        balanced: as the DataLoader assigns them.
        lower_bound: no assignment of whole samples can do better; above 1 where single samples are too large.
    """

    unbalanced: float
    balanced: float
    lower_bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What a number of ranks would see, over `steps` steps spread evenly over an epoch.

    Attributes:
        with_replacement: the dataset has fewer samples than a global batch, so samples were drawn with replacement.
        phases: every phase the dataset has; those the cost model does not name are not balanced.
        step: of the whole step, over the phases of the cost model, where ranks wait for each other after each phase.
        speedup: cost of the unbalanced step over that of the balanced one; an estimate by the cost model.
    """

    ranks: int
    batch_size: int
    global_batch_size: int
    steps: int
    with_replacement: bool
    phases: Mapping[str, PhaseImbalance]
    step: PhaseImbalance
    speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What a dataset holds, and what it costs N ranks.

    `samples` are the usable ones; all other numbers are theirs, but for `bad` samples and `failed_shards`, of which
    nothing could be read.
    """

    shards: int
    failed_shards: int
    samples: int
    bad: int
    bad_by_reason: Mapping[str, int]
    bytes: int
    loss_tokens: int
    modalities: Mapping[str, Modality]
    phases: Mapping[str, Phase]
    balanced_phases: tuple[str, ...]
    has_cost_model: bool
    seed: int
    scales: tuple[Scale, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: plain dicts, lists, strings and finite numbers."""
        return asdict(self) | {
            "balanced_phases": list(self.balanced_phases),
            "scales": [asdict(scale) for scale in self.scales],
        }


def profile(
    index: Index,
    *,
    cost: CostModel | None = None,
    ranks: Sequence[int] = (8, 64, 512, 2560),
    batch_size: int = 8,
    seed: int = 0,
    steps: int = 8,
) -> Profile:
    """Profile an index.

    Args:
        index: the dataset under a recipe.
        cost: the model's cost; None balances LLM tokens and reports encoder phases in positions.
        ranks: numbers of data-parallel ranks to plan for.
        batch_size: samples per rank and step.
        seed: of the order.
        steps: steps to plan per number of ranks, fewer where an epoch has fewer.

    Raises:
        ValueError: for numbers below 1, or a dataset without a usable sample.
    """
    for name, value in (("batch_size", batch_size), ("steps", steps), ("ranks", min(ranks, default=0))):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    bad = index.bad_rows()
    if len(bad) == index.num_samples:
        raise ValueError(
            f"none of the {index.num_samples} samples is usable, so there is nothing to profile; "
            f"the first: {index.failure(int(bad[0])) if len(bad) else 'there is none'}"
        )

    source = IndexCosts(index, cost)
    order = Order(index.num_samples, shuffle=Shuffle(), seed=seed, excluded=bad)
    good = np.delete(np.arange(index.num_samples), bad)
    bad_samples, failed_shards = split_failures(index)
    return Profile(
        shards=len(index.shards),
        failed_shards=len(failed_shards),
        samples=order.num_samples,
        bad=len(bad_samples),
        bad_by_reason=count_reasons(bad_samples),
        bytes=index.totals["bytes"],
        loss_tokens=index.totals["loss_tokens"],
        modalities={name: _modality(counts, order.num_samples) for name, counts in index.totals["modalities"].items()},
        phases={phase: _phase(source, phase, good) for phase in source.phases},
        balanced_phases=source.balanced,
        has_cost_model=cost is not None,
        seed=seed,
        scales=tuple(_scale(source, order, num_ranks, batch_size, steps, seed) for num_ranks in ranks),
    )


def count_reasons(failures: Iterable[DataError]) -> dict[str, int]:
    """Failures by kind of reason, the most frequent first; quoted names and numbers do not tell kinds apart."""
    return dict(Counter(reason_kind(failure.reason) for failure in failures).most_common())


def split_failures(index: Index) -> tuple[list[DataError], list[DataError]]:
    """What an index could not use: samples, and whole shards (those have an empty key)."""
    failures = [index.failure(int(row)) for row in index.bad_rows()]
    return [failure for failure in failures if failure.key], [failure for failure in failures if not failure.key]


def _modality(counts: Mapping[str, int], num_samples: int) -> Modality:
    samples = counts["samples"]
    parts = counts.get("parts", samples)
    return Modality(samples=samples, share=samples / num_samples, parts=parts, tokens=counts["tokens"])


def _phase(source: IndexCosts, phase: str, rows: NDArray[np.int64]) -> Phase:
    positions = source.positions(phase, np.zeros(len(rows), np.int32), rows)
    positions = positions[positions > 0]
    percentiles: dict[str, int] = {}
    if len(positions):
        # "lower" gives the size of a sample that exists.
        sizes = np.percentile(positions, list(PERCENTILES.values()), method="lower")
        percentiles = {name: int(size) for name, size in zip(PERCENTILES, sizes, strict=True)}
    return Phase(samples=len(positions), positions=int(positions.sum()), percentiles=percentiles)


@dataclass(frozen=True)
class _Draws:
    """Samples of `order` drawn with replacement, seeded: a global batch larger than the dataset can be planned."""

    order: Order
    seed: int
    num_samples: int

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        picks = np.random.default_rng((self.seed, epoch, start)).integers(self.order.num_samples, size=stop - start)
        dataset_id, row = self.order.rows(epoch, 0, self.order.num_samples)
        return dataset_id[picks], row[picks]


def _scale(source: IndexCosts, order: Order, num_ranks: int, batch_size: int, steps: int, seed: int) -> Scale:
    global_batch_size = num_ranks * batch_size
    with_replacement = order.num_samples < global_batch_size
    drawn: SampleOrder = _Draws(order, seed, steps * global_batch_size) if with_replacement else order
    spec = PlanSpec(
        source=source,
        order=drawn,
        balance=Balance(),
        num_ranks=num_ranks,
        global_batch_size=global_batch_size,
        drop_last=True,
    )
    chosen = np.unique(np.linspace(0, spec.num_steps - 1, min(steps, spec.num_steps)).astype(np.int64))
    plans = [make_plan(spec, epoch=0, step=int(step)) for step in chosen]
    loads = {phase: np.sum([step_loads(plan, phase) for plan in plans], axis=0) for phase in source.phases}
    step = np.sum([loads[phase] for phase in source.balanced], axis=0)
    return Scale(
        ranks=num_ranks,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        steps=len(plans),
        with_replacement=with_replacement,
        phases={phase: _imbalance(values) for phase, values in loads.items()},
        step=_imbalance(step),
        speedup=float(step[0] / step[1]),
    )


def _imbalance(loads: NDArray[np.float64]) -> PhaseImbalance:
    unbalanced, balanced, lower_bound, mean = (float(value) for value in loads)
    if mean == 0:  # nothing in these steps enters the phase
        return PhaseImbalance(unbalanced=1.0, balanced=1.0, lower_bound=1.0)
    return PhaseImbalance(unbalanced=unbalanced / mean, balanced=balanced / mean, lower_bound=lower_bound / mean)
