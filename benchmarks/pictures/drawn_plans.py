"""Plans of real lengths for the pictures of the docs: steps, layouts, an exchange, a mixture, a run that is resumed.

python -m benchmarks.pictures.drawn_plans --json > benchmarks/results/drawn_plans.json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.real_lengths import lengths_folder, real_lengths
from benchmarks.command import run_command
from benchmarks.papers.mixes import Media, Samples
from benchmarks.pictures.loads import WAYS
from benchmarks.plans.mixes import ENCODER_630M, LLM_7B, VISION_6B, Listed, mixes
from orchdata.balancers import CostModel, TransformerCost
from orchdata.bench import Result, WideTable
from orchdata.order.merge import Stage
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import MixedSource, Order, Shuffle, TokenSums
from orchdata.order.steps import GlobalBatches, StepTask, TokenBatches
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan, PlanSpec, make_plan
from orchdata.planning.sharing.accumulated import FixedCost

Ints = NDArray[np.int64]
Columns = Mapping[str, NDArray[Any]]

STEP, MICRO_STEPS, LAYOUTS, IMAGES, SAMPLES, MIXTURE, RESUMED = (
    "loads of ranks in a step, in means of their phase",
    "loads of ranks in micro-steps; 1 is a step of even ranks",
    "a batch in three layouts, in tokens",
    "images of a step that is balanced per phase",
    "samples of that step",
    "shares of the tokens of each step of a mixture",
    "ranks of each sample before and after a change of the number of ranks",
)
"""Titles of the tables."""
SOURCES: Final = {"chat": ("Azure chat", 1), "images": ("ADE20K", 4), "speech": ("LibriSpeech clean", 2)}
"""Source of a mixture -> its list, and how many of its positions make a token."""
STAGES: Final = ({"chat": 0.5, "images": 0.3, "speech": 0.2}, {"chat": 0.2, "images": 0.5, "speech": 0.3})
"""Planned shares of tokens in the first and in the second half of the steps."""
LENGTH: Final = 4_096
"""Tokens of a microbatch of one length."""
RESUME_RANKS: Final = (2, 4)

_LLM_1_5B: Final = TransformerCost(hidden=1536, layers=28, ffn=8_960, heads=12, vocab=151_936, causal=True, gated=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnPlans:
    """How much is planned.

    Attributes:
        steps: planned steps of which one is drawn: that of the median.
        mixture_steps: drawn steps of a mixture.
        seed: of samples and order.
    """

    steps: int = 65
    mixture_steps: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.mixture_steps < 2:
            raise ValueError(f"mixture_steps must be at least 2, one for each stage; got {self.mixture_steps}")


def run(config: DrawnPlans) -> list[Result | WideTable]:
    """Plan what the pictures show."""
    if not lengths_folder().is_dir():
        raise ValueError(f"no real lengths in {lengths_folder()}; ORCHDATA_FIXTURES must name the folder above it")
    parts = (_step, _micro_steps, _layouts, _exchange, _mixture, _resumed)
    return [found for part in parts for found in part(config)]


def plans_of(samples: Samples, balance: Balance, ranks: int, size: int, seed: int, accumulate: int = 1) -> list[Plan]:
    """Plan all global batches of `size` samples."""
    spec = PlanSpec(
        costs=samples,
        order=Order(len(samples.llm), shuffle=Shuffle(), seed=seed),
        batches=GlobalBatches(size=size),
        balance=balance,
        num_ranks=ranks,
        accumulate=accumulate,
    )
    return [make_plan(spec, StepTask(0, step)) for step in range(spec.num_steps)]


def wait_of(plan: Plan) -> float:
    """The share of the step that ranks wait, where each phase of each micro-step ends with its slowest rank."""
    cells = [plan.cells(phase) for phase in plan.phases]
    return 1 - sum(float(each.mean(axis=0).sum()) for each in cells) / sum(
        int(each.max(axis=0).sum()) for each in cells
    )


def _median(values: Sequence[float]) -> int:
    """The index of the median: neither the best nor the worst step is shown."""
    return int(np.argsort(values, kind="stable")[len(values) // 2])


def _waits(plans: Mapping[str, Plan], what: str) -> Iterator[Result]:
    for way, plan in plans.items():
        yield Result(name=f"share of the {what} that ranks wait, {way}", unit="", values=(wait_of(plan),))


def _step(config: DrawnPlans) -> Iterator[Result | WideTable]:
    """One step of 8 ranks with 16 samples each: images, clips and text."""
    ranks, size = 8, 8 * 16
    real = mixes()["real lengths"]
    speech = Media(positions=Listed(name="LibriSpeech clean", multiple_of=2), positions_a_token=2)
    mix = replace(real, media={**real.media, "audio": speech})
    samples = mix.draw(
        config.seed, size * config.steps, CostModel(image=ENCODER_630M, audio=ENCODER_630M, llm=_LLM_1_5B)
    )
    plans = {way: plans_of(samples, balance, ranks, size, config.seed) for way, balance in WAYS.items()}
    shown = _median([wait_of(plan) for plan in plans["unbalanced"]])
    step = {way: each[shown] for way, each in plans.items()}
    columns: Columns = {
        f"{phase}, {way}": plan.loads(phase) / plan.loads(phase).mean()
        for way, plan in step.items()
        for phase in plan.phases
    }
    yield _table(STEP, "rank", columns, f"Step {shown}: 0.6B encoders, a 1.5B LLM, 16 samples a rank.")
    yield from _waits(step, "step")


def _image_text(config: DrawnPlans, count: int) -> Samples:
    """Half of the samples have one to four images."""
    real = mixes()["real lengths"]
    mix = replace(real, kinds={(): 0.5, ("image",): 0.5}, media={"image": real.media["image"]})
    return mix.draw(config.seed, count, CostModel(image=VISION_6B, llm=LLM_7B))


def _micro_steps(config: DrawnPlans) -> Iterator[Result | WideTable]:
    """Three micro-steps of 4 ranks with 4 samples in each microbatch."""
    ranks, accumulate = 4, 3
    size = ranks * accumulate * 4
    samples = _image_text(config, size * config.steps)
    plans = {way: plans_of(samples, each, ranks, size, config.seed, accumulate) for way, each in WAYS.items()}
    shown = _median([wait_of(plan) for plan in plans["unbalanced"]])
    step = {way: each[shown] for way, each in plans.items()}
    even = sum(float(step["balanced"].loads(phase).mean()) for phase in samples.phases)
    columns: Columns = {
        f"{phase} {number}, {way}": plan.cells(phase)[:, number] / even
        for way, plan in step.items()
        for number in range(accumulate)
        for phase in plan.phases
    }
    yield _table(MICRO_STEPS, "rank", columns, f"Step {shown}: a 6B vision encoder, a 7B LLM, 4 samples a microbatch.")
    yield from _waits(step, "micro-steps")


def _layouts(config: DrawnPlans) -> Iterator[Result | WideTable]:
    """Eight texts on one rank."""
    size = 8
    tokens = real_lengths("Azure chat")
    generator = np.random.default_rng(config.seed)
    drawn = generator.choice(tokens[tokens <= LENGTH], size * config.steps)
    samples = Samples(model=CostModel(llm=LLM_7B), llm=drawn, media={}, balanced=("llm",))
    packed = plans_of(samples, Balance(), 1, size, config.seed)
    shown = _median([1 - _tokens(plan) / (size * int(plan.llm_positions.max())) for plan in packed])

    # As a DataLoader plans microbatches of one length: it is the cap of tokens.
    fixed = replace(samples, padded=FixedCost(LENGTH, samples.model.coefficients("llm")))
    filled = plans_of(fixed, Balance(max_tokens=LENGTH), 1, size, config.seed)[shown]
    lengths = packed[shown].llm_positions
    columns: Columns = {"tokens": lengths, "microbatch of one length": filled.microbatch}
    yield _table(LAYOUTS, "sample", columns, f"Step {shown}: requests of Azure's chat trace; one length is {LENGTH:,}.")
    assert filled.filled is not None
    totals = {
        "padded": size * int(lengths.max()),
        "packed": _tokens(packed[shown]),
        "one length": filled.filled[1],
    }
    for name, total in totals.items():
        share = 1 - int(lengths.sum()) / total
        yield Result(name=f"share of padding, {name}", unit="", values=(share,))


def _tokens(plan: Plan) -> int:
    return int(plan.llm_positions.sum())


def _exchange(config: DrawnPlans) -> Iterator[Result | WideTable]:
    """A step of 4 ranks with 2 samples each, in which several images are encoded elsewhere."""
    ranks, size = 4, 8
    samples = _image_text(config, size * config.steps)
    ways = {**WAYS, "per phase": Balance(assignment="per_phase")}
    plans = {way: plans_of(samples, balance, ranks, size, config.seed) for way, balance in ways.items()}
    # Of the steps in which half of the images move, that of the median wait of whole samples.
    moved = [step for step, plan in enumerate(plans["per phase"]) if 2 * _moved(plan) >= len(plan.parts["image"]) >= 8]
    if not moved:
        raise ValueError(f"no step of {config.steps} moves half of its images: plan more steps")
    shown = moved[_median([wait_of(plans["balanced"][step]) for step in moved])]
    plan = plans["per phase"][shown]
    images = plan.parts["image"]
    columns: Columns = {"sample": images.sample, "positions": images.positions, "encoded by": images.rank}
    note = f"Step {shown}: a 6B vision encoder, a 7B LLM, 2 samples a rank."
    yield _table(IMAGES, "image", columns, note)
    yield _table(SAMPLES, "sample", {"tokens": plan.llm_positions, "trained by": plan.rank}, note)
    yield from _waits({way: each[shown] for way, each in plans.items()}, "step of images")


def _moved(plan: Plan) -> int:
    images = plan.parts["image"]
    return int((images.rank != plan.rank[images.sample]).sum())


class _Tokens:
    """Tokens of the rows of a source."""

    def __init__(self, tokens: Ints) -> None:
        self._tokens = tokens

    def __call__(self, row: Ints) -> Ints:
        return self._tokens[row]


def _mixture(config: DrawnPlans) -> Iterator[Result | WideTable]:
    """Shares of tokens in steps of 131,072 tokens, with other weights from the middle on."""
    step_tokens = 131_072
    total, middle = step_tokens * config.mixture_steps, step_tokens * (config.mixture_steps // 2)
    lengths = {name: np.maximum(real_lengths(of) // shrink, 1) for name, (of, shrink) in SOURCES.items()}
    sources, first_row = [], 0
    for number, (name, tokens) in enumerate(lengths.items()):
        order, counts = Order(len(tokens), shuffle=Shuffle(), seed=config.seed, source=number), _Tokens(tokens)
        sources.append(MixedSource(name, order, counts, TokenSums(order, counts), first_row))
        first_row += len(tokens)
    stages = [
        Stage(bound, tuple(round(2**16 * max(weights.values()) / weights[name]) for name in SOURCES))
        for bound, weights in zip((0, middle), STAGES, strict=True)
    ]
    mixture = MixtureOrder(sources, stages, by="tokens", stop="repeat", epoch_size=("tokens", total))
    batches = TokenBatches(sums=mixture, budgets=((0, step_tokens),))

    all_tokens = np.concatenate(list(lengths.values()))
    given = np.zeros((config.mixture_steps, len(SOURCES)))
    for step in range(config.mixture_steps):
        source, row = mixture.rows(0, *batches.bounds(step, mixture.length(0)))
        np.add.at(given[step], source, all_tokens[row])
    shares = given / given.sum(axis=1, keepdims=True)
    columns = {name: shares[:, number] for number, name in enumerate(SOURCES)}
    note = "Sources: requests of Azure's chat trace, tokens of ADE20K's images, tokens of LibriSpeech's clips."
    yield _table(MIXTURE, "step", columns, note)


def _resumed(config: DrawnPlans) -> Iterator[Result | WideTable]:
    """Six steps of 8 samples, planned for 2 and for 4 ranks."""
    steps, size = 6, 8
    samples = _image_text(config, steps * size)
    first, second = (plans_of(samples, Balance(equal_count=True), ranks, size, config.seed) for ranks in RESUME_RANKS)
    assert all(np.array_equal(one.row, other.row) for one, other in zip(first, second, strict=True))
    columns: Columns = {
        "step": np.repeat(np.arange(steps), size),
        "sample": np.concatenate([plan.row for plan in first]),
        "on 2 ranks": np.concatenate([plan.rank for plan in first]),
        "on 4 ranks": np.concatenate([plan.rank for plan in second]),
    }
    yield _table(RESUMED, "position", columns, "An epoch of 48 samples, global batches of 8, equal counts.")


def _table(title: str, first: str, columns: Columns, note: str) -> WideTable:
    rows = zip(*(each.tolist() for each in columns.values()), strict=True)
    return WideTable(
        title=title,
        columns=(first, *columns),
        rows=tuple((str(number), *row) for number, row in enumerate(rows)),
        note=note,
    )


if __name__ == "__main__":
    run_command("benchmarks.pictures.drawn_plans", DrawnPlans, run)
