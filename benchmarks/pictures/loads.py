"""The loads of ranks in one step of real lengths, before balancing and after it.

python -m benchmarks.pictures.loads --json > benchmarks/results/loads.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.cases import Scale
from benchmarks.balance.real_lengths import lengths_folder
from benchmarks.command import run_command
from benchmarks.papers.mixes import Samples
from benchmarks.plans.mixes import MODELS, mixes
from benchmarks.plans.scopes import plans_of
from orchdata.bench import Result, WideTable
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan

Loads = Mapping[str, NDArray[np.float64]]  # phase -> load of each rank, in even steps

WAYS: Final = {"unbalanced": Balance(scope="none"), "balanced": Balance()}


_NOTE: Final = (
    "Lengths are those of whole corpora: tokens of Azure's chat trace, pixel sizes of ADE20K, utterances of "
    "LibriSpeech. Which media a sample has is drawn with a seed, with the shares of `benchmarks.plans.mixes`."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadsBench:
    """What is planned.

    Attributes:
        model: of `benchmarks.plans.mixes.MODELS`.
        ranks: data-parallel ranks.
        samples_per_rank: of a step.
        steps: planned steps; the one of median cost is shown.
        seed: of samples and order.
    """

    model: str = "6B vision"
    ranks: int = 16
    samples_per_rank: int = 16
    steps: int = 65
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        for name in ("ranks", "samples_per_rank", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(config: LoadsBench) -> list[Result | WideTable]:
    """Plan the same steps unbalanced and balanced."""
    if not lengths_folder().is_dir():
        raise ValueError(f"no real lengths in {lengths_folder()}; ORCHDATA_FIXTURES must name the folder above it")
    size = config.ranks * config.samples_per_rank
    samples = mixes()["real lengths"].draw(config.seed, size * config.steps, MODELS[config.model])
    scale = Scale(seed=config.seed, repeats=config.steps)
    plans = {way: plans_of(samples, balance, config.ranks, size, scale) for way, balance in WAYS.items()}

    # The step to show is neither the best nor the worst: that of the median cost before balancing.
    costs = [_cost(loads_of(plan, samples)) for plan in plans["unbalanced"]]
    shown = int(np.argsort(costs, kind="stable")[len(costs) // 2])
    loads = {way: loads_of(each[shown], samples) for way, each in plans.items()}
    return [_table(loads, shown), *_waits(plans, samples)]


def loads_of(plan: Plan, samples: Samples) -> Loads:
    """Loads of each rank, where the mean of the phases together is 1: a step of even ranks takes that long."""
    loads = {phase: plan.loads(phase).astype(np.float64) for phase in samples.phases}
    even = sum(float(each.mean()) for each in loads.values())
    return {phase: each / even for phase, each in loads.items()}


def _cost(loads: Loads) -> float:
    """Time of the step: every phase ends with its slowest rank."""
    return sum(float(each.max()) for each in loads.values())


def _table(loads: Mapping[str, Loads], shown: int) -> WideTable:
    columns = {f"{phase}, {way}": each for way, phases in loads.items() for phase, each in phases.items()}
    rows = zip(*(each.tolist() for each in columns.values()), strict=True)
    return WideTable(
        title=f"loads of ranks in step {shown}; 1 is a step of even ranks",
        columns=("rank", *columns),
        rows=tuple((str(rank), *row) for rank, row in enumerate(rows)),
        note=_NOTE,
    )


def _waits(plans: Mapping[str, Sequence[Plan]], samples: Samples) -> list[Result]:
    """The share of a step that ranks wait, one value a step."""
    return [
        Result(
            name=f"share of the step that ranks wait, {way}",
            unit="",
            values=tuple(1 - 1 / _cost(loads_of(plan, samples)) for plan in each),
        )
        for way, each in plans.items()
    ]


if __name__ == "__main__":
    run_command("benchmarks.pictures.loads", LoadsBench, run)
