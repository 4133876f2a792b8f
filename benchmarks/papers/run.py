"""`python -m benchmarks.papers`: what balancing data alone gives in settings like those of the papers.

declared mix --seeded--> samples --make_plan under each balance--> step cost --over none--> speedups
declared sequences --both reorderings--> simulate_1f1b --over none--> speedups
declared modules --the best of each kind of layout--> simulate --> seconds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.papers import layouts
from benchmarks.papers.cases import CASES, GROUP_SIZE, PIPELINES, REPORTED, Case, PipelineCase
from benchmarks.papers.mixes import Samples
from benchmarks.papers.pipeline import COLUMNS, LEGEND, speedups
from orchdata.bench import WideTable
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.plan import PlanSpec, make_plan

METHODS = ("none", "LLM only", "joint", "per phase", "grouped", "grid", "perfect")
SMALL_RANKS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PapersBench:
    """What to plan.

    Attributes:
        steps: of each row; costs are summed over them.
        seed: of the samples.
        small: few ranks and microbatches: to see that everything runs.
    """

    steps: int = 3
    seed: int = 0
    small: bool = False


def run(config: PapersBench) -> list[WideTable]:
    """Plan; raises ValueError where `steps` is below 1."""
    if config.steps < 1:
        raise ValueError(f"steps must be at least 1, got {config.steps}")
    cases, pipelines = CASES, PIPELINES
    if config.small:
        cases = tuple(replace(case, ranks=SMALL_RANKS) for case in cases)
        pipelines = tuple(replace(case, groups=2, microbatches=8) for case in pipelines[::3])
    papers = dict.fromkeys(case.paper for case in cases)
    balanced = [
        WideTable(
            title=f"Like {paper}: speedup over none, ranks waiting after each phase of each micro-step",
            columns=("case", *METHODS, "micro-steps"),
            rows=tuple(_row(case, config) for case in cases if case.paper == paper),
            note=f"{_NOTE}. {_gains(paper)}",
        )
        for paper in papers
    ]
    ordered = WideTable(
        title="Like DistTrain: speedup over none, groups waiting at the end of the step",
        columns=("case", *COLUMNS),
        rows=tuple((case.title, *speedups(case, config.seed, config.steps)) for case in pipelines),
        note=f"{LEGEND}. {_gains('DistTrain')}",
    )
    placed = layouts.table(config.seed, config.steps, small=config.small)
    return [_assumptions(cases, pipelines), *balanced, ordered, placed, _reported()]


_NOTE = (
    "By the cost model alone; planned by make_plan. LLM only: the LLM balanced, all phases priced. Per phase: encoders "
    f"apart, the exchange of features not priced. Grouped and grid: groups of {GROUP_SIZE} ranks. Perfect: every rank "
    "has the mean, which single large samples can put out of reach. Micro-steps: of none, and of joint"
)


def _row(case: Case, config: PapersBench) -> tuple[str | float | None, ...]:
    size = case.ranks * case.samples_per_rank
    samples = case.mix.draw(config.seed, size * config.steps, case.model)
    found = {name: _planned(case, kind, size, config) for name, kind in _kinds(case, samples).items()}
    none, micro_steps = found["none"]
    speedup = {name: none / cost for name, (cost, _) in found.items()}
    everything = np.arange(len(samples.llm))
    total = sum(int(samples.costs(phase, everything).sum()) for phase in samples.phases)
    speedup["perfect"] = none * case.ranks / total
    counts = f"{micro_steps / config.steps:.1f} -> {found['joint'][1] / config.steps:.1f}"
    return (case.title, *(speedup[name] for name in METHODS), counts)


def _kinds(case: Case, samples: Samples) -> Mapping[str, tuple[Samples, Balance]]:
    """What is balanced, and how, under each name of `METHODS` but the last."""
    base, group = case.balance, GROUP_SIZE
    return {
        "none": (samples, replace(base, scope="none")),
        "LLM only": (replace(samples, balanced=("llm",)), base),
        "joint": (samples, base),
        "per phase": (samples, replace(base, assignment="per_phase")),
        "grouped": (samples, replace(base, scope="grouped", group_size=group)),
        "grid": (samples, replace(base, scope="grid", group_size=group)),
    }


def _planned(case: Case, kind: tuple[Samples, Balance], size: int, config: PapersBench) -> tuple[int, int]:
    """Cost and micro-steps of all steps together."""
    samples, balance = kind
    streams = Shuffle(streams=-(-case.ranks // GROUP_SIZE))
    spec = PlanSpec(
        costs=samples,
        order=Order(len(samples.llm), shuffle=streams, seed=config.seed),
        batches=GlobalBatches(size=size),
        balance=balance,
        num_ranks=case.ranks,
    )
    plans = [make_plan(spec, StepTask(0, step)) for step in range(config.steps)]
    cost = sum(plan.cost(balance.price, samples.phases) for plan in plans)
    return cost, sum(plan.num_microbatches for plan in plans)


def _assumptions(cases: Sequence[Case], pipelines: Sequence[PipelineCase]) -> WideTable:
    """One row for each paper and model: what the cases share, and the shares of kinds of samples of each."""
    alike: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        alike.setdefault((case.paper, case.model_words), []).append(case)
    rows = [
        (
            f"{paper}: {found[0].name}",
            model,
            found[0].mix.lengths,
            " | ".join(_kinds_of(found)),
            _caps(found[0].balance),
        )
        for (paper, model), found in alike.items()
    ]
    one = pipelines[0]
    pipeline = (
        "DistTrain",
        f"{one.stages} stages: encoder, LLM in equal parts, generator; backward twice the forward",
        f"image tokens of a sequence {one.image_tokens}; time of encoder and generator in proportion to them",
        "text + image",
        "A microbatch is one sequence, always as long in the LLM",
    )
    return WideTable(
        title="Assumed: all of it ours, as the papers' data are not public; nothing is fitted to what they report",
        columns=("case", "model", "mix", "samples", "microbatches"),
        rows=(*rows, pipeline),
    )


def _kinds_of(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case.mix.samples for case in cases))


def _caps(balance: Balance) -> str:
    if not balance.caps:
        return "A step is one microbatch"
    caps = ", ".join(f"{cap:,} {phase} positions" for phase, cap in balance.caps.items())
    return f"Microbatches of at most {caps}; larger samples have one each"


def _gains(paper: str) -> str:
    gains = [f"{one.gain} ({one.known_from})" for one in REPORTED if one.paper == paper]
    return f"{paper} reports, of its whole system: {'; '.join(gains)}"


def _reported() -> WideTable:
    return WideTable(
        title="What of the reported gains balancing data does not give, as we read what we have read",
        columns=("paper", "reported", "known from", "of it not data balancing"),
        rows=tuple((one.paper, one.gain, one.known_from, one.beyond_data) for one in REPORTED),
    )
