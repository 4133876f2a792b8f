"""What groups and grids of ranks must reach if ranks wait after each phase, compared to balancing over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.cases import Job, Scale, measure, owners, slowest
from benchmarks.balance.real_lengths import lengths_folder, real_lengths
from benchmarks.distributions import LARGE_VISION_COST, omni_phases
from orchdata.balancers import CostModel, balance_grid, balance_grouped, balance_phases
from orchdata.bench import OMNI_COST, Result

RANKS = (64, 512)
SAMPLES_PER_RANK = 32
RANKS_PER_NODE = 8
COSTS: Mapping[str, CostModel] = {"0.6B encoders": OMNI_COST, "6B vision": LARGE_VISION_COST}

Phases = dict[str, NDArray[np.int64]]
Mixture = Callable[[np.random.Generator, int, CostModel], Phases]


def by_phase(scale: Scale) -> list[Result]:
    """Sum over phases of the largest load: of a grid over that of all ranks, and of each group over the group alone."""
    return [result for ranks in RANKS for result in _of_size(scale, scale.ranks(ranks))]


def lognormal(generator: np.random.Generator, num_samples: int, cost: CostModel) -> Phases:
    """Log-normal lengths: images in half the samples, audio in a third, text in all."""
    patches = generator.lognormal(7.2, 0.8, num_samples).clip(64, 16_384).astype(np.int64) // 4 * 4
    frames = generator.lognormal(6.0, 0.7, num_samples).clip(50, 3_000).astype(np.int64) // 2 * 2
    return _mixed(generator, patches, frames, generator.lognormal(6.1, 1.0, num_samples).clip(8, 8_192), cost)


def real(generator: np.random.Generator, num_samples: int, cost: CostModel) -> Phases:
    """ADE20K's images in half the samples, LibriSpeech's clips in a third, Azure's chats in all."""
    patches, frames, text = (
        generator.choice(real_lengths(name), num_samples) for name in ("ADE20K", "LibriSpeech other", "Azure chat")
    )
    return _mixed(generator, patches // 4 * 4, frames // 2 * 2, text, cost)


def _mixed(
    generator: np.random.Generator,
    patches: NDArray[np.int64],
    frames: NDArray[np.int64],
    text: NDArray[np.generic],
    cost: CostModel,
) -> Phases:
    patches = np.where(generator.random(len(patches)) < 0.5, patches, 0)
    frames = np.where(generator.random(len(frames)) < 0.33, frames, 0)
    return {
        "image": cost.sequence_costs("image", patches),
        "audio": cost.sequence_costs("audio", frames),
        "llm": cost.sequence_costs("llm", text.astype(np.int64) + patches // 4 + frames // 2),
    }


def _of_size(scale: Scale, num_ranks: int) -> list[Result]:
    num_samples = num_ranks * SAMPLES_PER_RANK
    owner = owners(num_samples, num_ranks)
    mixtures: dict[str, Mixture] = {"omni": omni_phases, "log-normal": lognormal}
    if lengths_folder().is_dir():
        mixtures["real lengths"] = real
    batches: dict[str, list[list[Phases]]] = {
        f"{name}, {size}": [
            [make(np.random.default_rng([scale.seed, turn]), num_samples, cost)] for turn in range(scale.repeats)
        ]
        for name, make in mixtures.items()
        for size, cost in COSTS.items()
    }
    scopes: dict[str, Callable[[Phases], Any]] = {
        "global": partial(balance_phases, num_ranks=num_ranks),
        "grid": partial(balance_grid, owner=owner, num_ranks=num_ranks, ranks_per_node=RANKS_PER_NODE),
        "grouped": partial(_worst_group, owner=owner, num_ranks=num_ranks),
    }
    timed = {
        scope: measure({name: Job(solve, groups) for name, groups in batches.items()})
        for scope, solve in scopes.items()
    }
    name = f"by phase, {num_ranks} x {SAMPLES_PER_RANK}, {RANKS_PER_NODE} a node"
    ratios = {
        case: tuple(
            sum(grid.makespans) / sum(everywhere.makespans)
            for grid, everywhere in zip(timed["grid"][case].found, timed["global"][case].found, strict=True)
        )
        for case in batches
    }
    groups = {case: each.found for case, each in timed["grouped"].items()}
    return [
        _worst(f"{name}: grid over global", ratios, scale.demand(1.05)),
        _worst(f"{name}: each group over its ranks alone", groups, scale.demand(1.02)),
        slowest(f"{name}: time of a grid", timed["grid"], None),
    ]


def _worst_group(costs: Phases, owner: NDArray[np.int64], num_ranks: int) -> float:
    """Of all groups, the largest sum of peaks over what `balance_phases` reaches with the group's samples alone."""
    found = balance_grouped(costs, owner, num_ranks, RANKS_PER_NODE)
    worst = 0.0
    for first in range(0, num_ranks, RANKS_PER_NODE):
        members = owner // RANKS_PER_NODE == first // RANKS_PER_NODE
        size = min(RANKS_PER_NODE, num_ranks - first)
        alone = balance_phases({phase: of_all[members] for phase, of_all in costs.items()}, size)
        peaks = found.loads[:, first : first + size].max(axis=1)
        worst = max(worst, int(peaks.sum()) / sum(alone.makespans))
    return worst


def _worst(name: str, ratios: Mapping[str, tuple[float, ...]], demand: float | None) -> Result:
    case = max(ratios, key=lambda case: max(ratios[case]))
    return Result(name=name, unit="x", values=ratios[case], demand=demand, note=f"worst is {case}")
